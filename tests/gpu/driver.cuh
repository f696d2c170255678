// Shared parts of the drivers without JAX. A driver ends at the first error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string>
#include <type_traits>
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

// Arrays of exact sizes. An array without elements is null. The destructor frees all.
class Arrays {
 public:
  ~Arrays() {
    for (void* p : all_) Check(cudaFree(p));
  }
  template <typename T>
  T* Empty(std::int64_t n) {
    void* p = nullptr;
    if (n > 0) Check(cudaMalloc(&p, static_cast<std::size_t>(n) * sizeof(T)));
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

// A number from -1 to 1.
inline double Random() {
  static std::uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  std::uint32_t h = state;
  h = (h ^ (h >> 16)) * 2246822519u;
  return static_cast<double>(h ^ (h >> 13)) / 2147483648.0 - 1;
}

// An array on the host and on the device.
template <typename T>
class Array {
 public:
  Array(std::int64_t n, std::int64_t shift, Arrays& arrays)
      : host(static_cast<std::size_t>(n)), device(arrays.Empty<T>(n + shift) + shift) {}
  template <typename Fn>  // fn(index)
  Array(std::int64_t n, std::int64_t shift, Arrays& arrays, const Fn& fn)
      : Array(n, shift, arrays) {
    for (std::int64_t i = 0; i < n; ++i) {
      host[static_cast<std::size_t>(i)] = static_cast<T>(static_cast<Accum<T>>(fn(i)));
    }
    Upload();
  }
  void Upload() { Copy(device, host.data(), cudaMemcpyHostToDevice); }
  void Download() { Copy(host.data(), device, cudaMemcpyDeviceToHost); }
  double operator[](std::int64_t i) const {
    return static_cast<double>(static_cast<Accum<T>>(host[static_cast<std::size_t>(i)]));
  }
  std::size_t bytes() const { return host.size() * sizeof(T); }

  std::vector<T> host;
  T* device;

 private:
  void Copy(T* to, const T* from, cudaMemcpyKind kind) {
    if (!host.empty()) Check(cudaMemcpy(to, from, bytes(), kind));
  }
};

template <typename T>
constexpr double kUnit = sizeof(T) == 8            ? 1e-15
                         : sizeof(T) == 4          ? 1.2e-7
                         : std::is_same_v<T, Half> ? 0x1p-10
                                                   : 0x1p-7;

}  // namespace
}  // namespace gradops
