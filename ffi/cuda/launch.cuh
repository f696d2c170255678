// What every launcher needs: errors, grid sizes, the device's size.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace gradops {

namespace ffi = ::xla::ffi;

inline ffi::Error ToError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();  // else the next launch, anyone's, would be told of this one's error
  return ffi::Error::Internal(std::string(op) + ": " + cudaGetErrorString(status));
}

// The error of the launches just made, so that it is reported by the call that caused it.
inline ffi::Error LastError(const char* op) {
  return ToError(op, cudaGetLastError());
}

// Multiprocessors of the current device, which is the one of the stream that XLA gives.
inline int MultiprocessorCount() {
  static std::array<std::atomic<int>, 64> counts{};  // by device; asked for once each
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 1;
  int count = counts[static_cast<std::size_t>(device)].load(std::memory_order_relaxed);
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
      return 1;
    counts[static_cast<std::size_t>(device)].store(count, std::memory_order_relaxed);
  }
  return count;
}

inline std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Blocks of a one-dimensional grid: one for each of `items`, but no more than CUDA allows and at
// least the one that it demands. So kernels loop over items, from blockIdx.x in steps of gridDim.x.
inline unsigned GridBlocks(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, std::numeric_limits<int>::max()));
}

}  // namespace gradops
