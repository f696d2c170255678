// What `python -m jax_gradops info` says of a compiled module.
#pragma once

namespace gradops {

#if defined(GRADOPS_CUDA_ARCHITECTURES)
inline constexpr const char* kBuildInfo = GRADOPS_CUDA_ARCHITECTURES;
#elif defined(__AVX512F__)
inline constexpr const char* kBuildInfo = "AVX-512";
#elif defined(__AVX2__)
inline constexpr const char* kBuildInfo = "AVX2";
#elif defined(__SSE4_2__)
inline constexpr const char* kBuildInfo = "SSE4.2 (x86-64-v2)";
#elif defined(__ARM_NEON)
inline constexpr const char* kBuildInfo = "NEON";
#else
inline constexpr const char* kBuildInfo = "compiler's baseline";
#endif

// Why there is no CUDA module beside this one; empty where there is.
#if defined(GRADOPS_CUDA_SKIPPED)
inline constexpr const char* kCudaSkipped = GRADOPS_CUDA_SKIPPED;
#else
inline constexpr const char* kCudaSkipped = "";
#endif

}  // namespace gradops
