// Facts about a compiled module that Python can read.
#pragma once

#include <array>
#include <string_view>
#include <utility>

namespace gradops {

#if defined(GRADOPS_CUDA_ARCHITECTURES)
inline constexpr const char* kBuildInfo = GRADOPS_CUDA_ARCHITECTURES;
#elif defined(__AVX512F__)
inline constexpr const char* kBuildInfo = "x86-64-v4 (AVX-512)";
#elif defined(__AVX2__)
inline constexpr const char* kBuildInfo = "x86-64-v3 (AVX2)";
#elif defined(__SSE4_2__)
inline constexpr const char* kBuildInfo = "x86-64-v2 (SSE4.2)";
#elif defined(__ARM_NEON)
inline constexpr const char* kBuildInfo = "NEON";
#else
inline constexpr const char* kBuildInfo = "compiler's baseline";
#endif

// The levels of x86-64 that the CPU's kernels are built for (CMakeLists.txt).
#if defined(GRADOPS_CPU_LEVELS)
inline constexpr std::string_view kCpuLevels = GRADOPS_CPU_LEVELS;
#else
inline constexpr std::string_view kCpuLevels = "";
#endif

// All levels of x86-64. For each level: whether the processor and its operating system support it.
// Empty on other processors.
#if defined(__x86_64__)
inline std::array<std::pair<const char*, bool>, 3> CpuLevels() {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return {{{"v2", true}, {"v3", v3}, {"v4", v4}}};
}
#else
inline std::array<std::pair<const char*, bool>, 0> CpuLevels() {
  return {};
}
#endif

// The reason why no CUDA module was built beside this module. Empty if one was built.
#if defined(GRADOPS_CUDA_SKIPPED)
inline constexpr const char* kCudaSkipped = GRADOPS_CUDA_SKIPPED;
#else
inline constexpr const char* kCudaSkipped = "";
#endif

}  // namespace gradops
