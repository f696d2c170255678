// What every launcher needs: errors, grid sizes, the device's size.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "common/integers.h"
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

template <int>
__global__ void ArchitectureProbe() {}

struct Device {
  int architecture =
      0;  // 10 * major + minor: the GPU's, or what the code was compiled for if older
  int multiprocessors = 1;
  int shared_bytes = 0;  // of a multiprocessor
  int l2_bytes = 0;
};

// The current device, which is the one of the stream that XLA gives.
inline Device CurrentDevice() {
  static std::array<Device, 64> devices;
  static std::array<std::once_flag, 64> asked;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return {};
  const auto ask = [index] {
    const auto attribute = [index](cudaDeviceAttr which) {
      int value = 0;
      return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
    };
    // PTX for an older architecture, compiled by the driver, lacks what newer ones can do.
    cudaFuncAttributes compiled{};
    if (cudaFuncGetAttributes(&compiled, ArchitectureProbe<0>) != cudaSuccess) return Device{};
    return Device{std::min(10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                               attribute(cudaDevAttrComputeCapabilityMinor),
                           compiled.ptxVersion),
                  std::max(1, attribute(cudaDevAttrMultiProcessorCount)),
                  attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                  attribute(cudaDevAttrL2CacheSize)};
  };
  if (index < 0 || index >= 64) return ask();
  const auto i = static_cast<std::size_t>(index);
  std::call_once(asked[i], [&] { devices[i] = ask(); });
  return devices[i];
}

inline int MultiprocessorCount() {
  return CurrentDevice().multiprocessors;
}

// What `ask` says of a kernel launched in this way on the current device, asked once: CUDA takes
// microseconds to answer. An error, which is no answer, is asked again.
template <typename Ask>
cudaError_t Remembered(const void* kernel, int threads, int shared_bytes, int cluster, int& answer,
                       const Ask& ask) {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int, int>, int> answers;
  const auto key = std::tuple(kernel, device, threads, shared_bytes, cluster);
  const std::lock_guard lock(mutex);
  if (const auto found = answers.find(key); found != answers.end()) {
    answer = found->second;
    return cudaSuccess;
  }
  const cudaError_t status = ask(answer);
  if (status == cudaSuccess) answers[key] = answer;
  return status;
}

// Lets the next kernel start as soon as there is room, if it was launched so, which then waits (by
// WaitForKernelBefore) until this one has ended: so its launch takes no time.
__device__ __forceinline__ void LaunchNext() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ __forceinline__ void WaitForKernelBefore() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// How such a kernel is launched, where the GPU can; returns how many attributes that takes.
inline unsigned StartEarly(cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return CurrentDevice().architecture >= 90 ? 1 : 0;
}

// And with as much shared memory as the kernel before has, as changing that takes time.
inline unsigned KeepShared(cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  return 1;
}

// Blocks of a one-dimensional grid: one for each of `items`, but no more than CUDA allows and at
// least the one that it demands. So kernels loop over items, from blockIdx.x in steps of gridDim.x.
inline unsigned GridBlocks(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, std::numeric_limits<int>::max()));
}
// A block for each of any number of items, at least one: ItemOfBlock() may be none of these.
inline dim3 BlockPerItem(std::int64_t items) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  return {GridBlocks(items),
          static_cast<unsigned>(CeilDiv(std::max<std::int64_t>(1, items), kMost))};
}
__device__ __forceinline__ std::int64_t ItemOfBlock() {
  return std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
}

}  // namespace gradops
