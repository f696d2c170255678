# Finds nvcc and chooses the architectures. Sets cuda_skipped to the reason if CUDA is not built.

set(MINIMUM_NVCC 12.8) # knows all of these
set(RELEASE_ARCHITECTURES 80-real 86-real 89-real 90-real 100-real 120)

# AUTO builds CUDA where it can be used at once: a compiler and a GPU. ON builds it for elsewhere, too.
# PYPI is ON with the compiler that pyproject.toml then requires.
set(cuda_skipped "")
# cannot_build(REASON...): AUTO does without CUDA, and says why; others fail.
macro(cannot_build)
  string(CONCAT cuda_skipped ${ARGN})
  if(NOT JAX_GRADOPS_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "jax_gradops: the CUDA backend cannot be built: ${cuda_skipped}")
  endif()
endmacro()

# The compute capabilities of the machine's GPUs, as in "90"; has_gpu also where they are not known.
function(find_gpus)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_QUIET)
  set(capabilities "")
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${output}")
    list(TRANSFORM capabilities REPLACE "\\." "")
    list(REMOVE_DUPLICATES capabilities)
  endif()
  set(has_gpu FALSE PARENT_SCOPE)
  if(capabilities OR EXISTS /dev/nvidia0 OR EXISTS /dev/dxg)
    set(has_gpu TRUE PARENT_SCOPE)
  endif()
  set(capabilities "${capabilities}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES, unless the user has.
macro(choose_architectures)
  if(JAX_GRADOPS_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${JAX_GRADOPS_CUDA_ARCHITECTURES})
  elseif(CMAKE_CUDA_ARCHITECTURES OR DEFINED ENV{CUDAARCHS})
    # theirs
  elseif(capabilities)
    set(CMAKE_CUDA_ARCHITECTURES ${capabilities})
    list(FILTER CMAKE_CUDA_ARCHITECTURES EXCLUDE REGEX "^[1-7].$")
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      list(JOIN capabilities ", " capabilities)
      cannot_build("the GPU is of architecture ${capabilities}, and 80 (Ampere) or newer is needed")
    endif()
  elseif(has_gpu)
    set(CMAKE_CUDA_ARCHITECTURES native)
  else()
    set(CMAKE_CUDA_ARCHITECTURES ${RELEASE_ARCHITECTURES})
  endif()
endmacro()

# PyPI's packages have their libraries in lib, where neither nvcc nor CMake looks.
macro(find_nvcc_of_pypi)
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
                  "import importlib.util as u; print(u.find_spec('nvidia.cu13').submodule_search_locations[0])"
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE cuda_of_pypi ERROR_QUIET)
  set(CMAKE_CUDA_COMPILER "${cuda_of_pypi}/bin/nvcc")
  if(NOT EXISTS "${CMAKE_CUDA_COMPILER}")
    cannot_build("there is no nvcc of PyPI; without build isolation, install "
                 "\"cuda-toolkit[nvcc,cccl]==13.0.*\" first")
  endif()
  set(ENV{LIBRARY_PATH} "${cuda_of_pypi}/lib:$ENV{LIBRARY_PATH}")
  link_directories("${cuda_of_pypi}/lib")
endmacro()

macro(find_nvcc)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE) # look again
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE version ERROR_QUIET)
    if(version MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS MINIMUM_NVCC)
      cannot_build("nvcc ${CMAKE_MATCH_1} is older than ${MINIMUM_NVCC}")
    endif()
  else()
    cannot_build("no CUDA compiler found that works (set CUDACXX to nvcc's path)")
  endif()
endmacro()

if(NOT JAX_GRADOPS_CUDA MATCHES "^(AUTO|ON|PYPI|OFF)$")
  message(FATAL_ERROR "JAX_GRADOPS_CUDA must be AUTO, ON, PYPI or OFF, not '${JAX_GRADOPS_CUDA}'")
elseif(JAX_GRADOPS_CUDA STREQUAL "OFF")
  set(cuda_skipped "JAX_GRADOPS_CUDA=OFF")
else()
  find_gpus()
  if(JAX_GRADOPS_CUDA STREQUAL "AUTO" AND NOT has_gpu)
    cannot_build("no NVIDIA GPU on this machine (JAX_GRADOPS_CUDA=ON builds it nevertheless)")
  endif()
  if(NOT cuda_skipped)
    choose_architectures()
  endif()
  if(JAX_GRADOPS_CUDA STREQUAL "PYPI")
    find_nvcc_of_pypi()
  elseif(NOT cuda_skipped)
    find_nvcc()
  endif()
endif()

if(NOT cuda_skipped)
  enable_language(CUDA)
  # Names of several architectures to their numbers.
  set(architectures ${CMAKE_CUDA_ARCHITECTURES})
  if(architectures MATCHES "^(native|all|all-major)$")
    string(TOUPPER "${architectures}" name)
    string(REPLACE "-" "_" name "${name}")
    set(architectures ${CMAKE_CUDA_ARCHITECTURES_${name}})
  endif()
  list(JOIN architectures "," architectures)
  if(NOT architectures MATCHES "^[0-9]" OR architectures MATCHES "(^|,)[1-7][0-9](,|-|$)")
    cannot_build("architecture 80 (Ampere) or newer is needed, not ${architectures}")
  endif()
endif()
