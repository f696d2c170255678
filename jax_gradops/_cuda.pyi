# What ffi/module.cc makes for CUDA.
from jax_gradops._cpu import build_info as build_info
from jax_gradops._cpu import cpu_levels as cpu_levels
from jax_gradops._cpu import cuda_skipped as cuda_skipped
from jax_gradops._cpu import ffi_api_version as ffi_api_version
from jax_gradops._cpu import registrations as registrations
from jax_gradops._cpu import signatures as signatures

def devices() -> tuple[list[int], int, int]: ...
