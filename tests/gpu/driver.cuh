// Shared parts of the drivers without JAX. A driver ends at the first error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cuda/common/launch.cuh"

namespace gradops {
namespace {

// The current action, for messages.
inline std::string& Doing() {
  static std::string text;
  return text;
}

void Check(cudaError_t status, std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  std::printf("%s:%u: %s: %s\n", at.file_name(), at.line(), Doing().c_str(),
              cudaGetErrorString(status));
  std::exit(1);
}

void Check(const ffi::Error& error) {
  if (error.success()) return;
  std::printf("%s\n", error.message().c_str());
  std::exit(1);
}

// Fills with numbers from 1/2 to 3/2.
template <typename T>
__global__ void FillSmall(T* p, std::int64_t n, std::uint32_t seed) {
  const auto threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += threads) {
    const auto h = static_cast<std::uint32_t>(i + seed * 77777777u) * 2654435761u;
    p[i] = static_cast<T>(static_cast<float>(h >> 16) / 65536.f + 0.5f);
  }
}

// Arrays of exact sizes. The destructor frees all.
class Arrays {
 public:
  ~Arrays() {
    for (void* p : all_) Check(cudaFree(p));
  }
  template <typename T>
  T* Empty(std::int64_t n) {
    void* p = nullptr;
    Check(cudaMalloc(&p, static_cast<std::size_t>(n) * sizeof(T)));
    all_.push_back(p);
    return static_cast<T*>(p);
  }
  template <typename T>
  T* Filled(std::int64_t n) {
    T* const p = Empty<T>(n);
    FillSmall<<<128, 256>>>(p, n, static_cast<std::uint32_t>(all_.size()));
    return p;
  }

 private:
  std::vector<void*> all_;
};

}  // namespace
}  // namespace gradops
