// Used by every launcher: errors, grid sizes, properties of the device.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
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
  cudaGetLastError();  // else the next launch, anyone's, would report this error
  return ffi::Error::Internal(std::string(op) + ": " + cudaGetErrorString(status));
}

// The error of the launches just made. Each call asks, so that it reports its own errors.
inline ffi::Error LastError(const char* op) {
  return ToError(op, cudaGetLastError());
}

template <int>
__global__ void ArchitectureProbe() {}

struct Device {
  int architecture =
      0;  // 10 * major + minor, of the GPU or of the compiled code, whichever is older
  int multiprocessors = 1;
  int shared_bytes = 0;  // shared memory of a multiprocessor
  int l2_bytes = 0;
};

// The current device; XLA makes the stream's device current.
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
    // The driver may have compiled PTX for an older architecture, without newer features.
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

// The answer of `ask` for a kernel launched in this way on the current device. It is asked only
// once, because CUDA takes microseconds to answer. After an error, it is asked again.
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

// Lets the next kernel, if it was launched with StartEarly, start as soon as there is room. There,
// WaitForKernelBefore waits until this kernel has ended. So the launch takes no time.
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
// Sets the attribute to launch such a kernel. Returns 1 if the GPU can do that, otherwise 0.
inline unsigned StartEarly(cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return CurrentDevice().architecture >= 90 ? 1 : 0;
}

// Sets the attribute for the largest shared memory, and returns 1. The kernel before should have it
// too, because a change of size takes time.
inline unsigned KeepShared(cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  return 1;
}

// A launch of `grid` blocks, in whole clusters. Do not copy it: config points to the attributes.
struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(cudaStream_t stream, dim3 grid, dim3 block, int shared_bytes = 0, int cluster = 1) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = grid, config.blockDim = block;
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster > 1 ? 1 : 0;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

// A launch that may start before the kernel before has ended (StartEarly).
struct EarlyLaunch : Launch {
  EarlyLaunch(cudaStream_t stream, dim3 grid, dim3 block) : Launch(stream, grid, block) {
    config.numAttrs = KeepShared(attributes[0]) + StartEarly(attributes[1]);
  }
};

// How many clusters run at a time. 0: the GPU, or the part of it in use, cannot run such clusters.
inline int ResidentClusters(const void* kernel, const Launch& launch) {
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) == cudaSuccess) return count;
  cudaGetLastError();  // clears the error: it is not from a launch
  return 0;
}

// A grid of `blocks` blocks for each group, in its first dimension. The last plane may not be full.
inline cudaError_t GridOfGroups(std::int64_t groups, std::int64_t blocks, dim3& grid) {
  constexpr std::int64_t kMost = 65535;
  const std::int64_t y = std::min(groups, kMost), z = CeilDiv(groups, y);
  if (blocks > std::numeric_limits<int>::max() || z > kMost) return cudaErrorInvalidValue;
  grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(y), static_cast<unsigned>(z));
  return cudaSuccess;
}

// Blocks of a one-dimensional grid: one for each of `items`, at least one, and no more than CUDA
// allows. Kernels loop over items, from blockIdx.x in steps of gridDim.x.
inline unsigned GridBlocks(std::int64_t items) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(items, 1, std::numeric_limits<int>::max()));
}
// A grid with a block for each of any number of items, and at least one. Blocks may be left over:
// if ItemOfBlock() is not below `items`, the block has no item.
inline dim3 BlockPerItem(std::int64_t items) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  return {GridBlocks(items),
          static_cast<unsigned>(CeilDiv(std::max<std::int64_t>(1, items), kMost))};
}
__device__ __forceinline__ std::int64_t ItemOfBlock() {
  return std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
}

}  // namespace gradops
