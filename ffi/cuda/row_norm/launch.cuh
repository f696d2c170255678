// What layer norm's launchers share: how many blocks run, and the device that a plan is for. The
// launches themselves are in common/launch.cuh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/launch.h"
#include "cuda/row_norm/plan.h"

namespace gradops {
namespace {

// How many blocks (or clusters) of a persistent kernel run at a time. 0: the GPU cannot run such
// clusters.
template <typename Kernel>
cudaError_t CountResident(Kernel* kernel, int threads, int shared_bytes, int cluster,
                          std::int64_t& resident) {
  const auto ask = [&](int& count) {
    // Allows the most shared memory that any plan takes. Always asks for one split with the L1
    // cache: another split makes multiprocessors idle between kernels.
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              CurrentDevice().shared_bytes - kSparedBytes);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
    if (status != cudaSuccess) return status;
    if (cluster > 8) {
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (cluster > 1) {
      const Launch launch(nullptr, dim3(static_cast<unsigned>(cluster)),
                          dim3(static_cast<unsigned>(threads)), shared_bytes, cluster);
      if (status != cudaSuccess) cudaGetLastError();  // clears the error: rows are streamed then
      count = status == cudaSuccess
                  ? ResidentClusters(reinterpret_cast<const void*>(kernel), launch)
                  : 0;
      return cudaSuccess;
    }
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads,
                                                           static_cast<std::size_t>(shared_bytes));
    count = std::max(1, count) * MultiprocessorCount();
    return status;
  };
  int count = 0;
  const cudaError_t status =
      Remembered(reinterpret_cast<const void*>(kernel), threads, shared_bytes, cluster, count, ask);
  resident = count;
  return status;
}

// A task for this device. Its other members are not set.
RowTask TaskOfDevice() {
  const Device device = CurrentDevice();
  RowTask task{};
  task.architecture = device.architecture;
  task.multiprocessors = device.multiprocessors;
  task.shared_bytes = device.shared_bytes;
  return task;
}

}  // namespace
}  // namespace gradops
