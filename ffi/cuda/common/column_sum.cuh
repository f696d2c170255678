// The second half of every sum over rows: adds partial rows up to results, in a fixed order.
#pragma once

#include <cstdint>

#include "common/shape.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {

// The results of up to three sums, in the workspace's order, each of any float dtype.
struct ColumnSums {
  ParamGrad results[3];
  int count = 0;

  // Adds a result, if it is wanted.
  void Add(const ParamGrad& result) {
    if (result.data != nullptr) results[count++] = result;
  }
};

// Stores the results of sums over no rows: zeros.
inline cudaError_t ZeroColumnSums(cudaStream_t stream, const ColumnSums& sums, std::int64_t groups,
                                  std::int64_t features) {
  cudaError_t status = cudaSuccess;
  for (int i = 0; i < sums.count && groups * features > 0 && status == cudaSuccess; ++i) {
    const std::int64_t bytes = groups * features * ByteWidthOf(sums.results[i].dtype);
    status = cudaMemsetAsync(sums.results[i].data, 0, static_cast<std::size_t>(bytes), stream);
  }
  return status;
}

// Stores a value, rounded to the dtype of the array `data`.
template <typename A>
__device__ __forceinline__ void StoreAs(void* data, ffi::DataType dtype, std::int64_t index,
                                        A value) {
  switch (dtype) {
    case ffi::F16: static_cast<Half*>(data)[index] = static_cast<Half>(value); break;
    case ffi::BF16: static_cast<BFloat16*>(data)[index] = static_cast<BFloat16>(value); break;
    case ffi::F32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    default: static_cast<double*>(data)[index] = static_cast<double>(value);
  }
}

inline constexpr int kColumnLanes = 32;
inline constexpr int kColumnSlices = 16;
// From this many columns on, a thread sums up columns of 16 bytes, not one column. Fewer blocks
// then read the same number of bytes.
inline constexpr std::int64_t kWideSums = 512;

// Adds up the first `partial_rows` rows of each group of `workspace`, [groups, stride, sums.count,
// features]. A block has one (group, sum, tile of 32 * W columns) at a time. A thread has W
// columns; W divides `features`. Not __restrict__: the kernel before may still write `workspace`.
template <typename A, int W>
__global__ void __launch_bounds__(kColumnLanes* kColumnSlices)
    ColumnSumKernel(const A* workspace, ColumnSums sums, std::int64_t stride,
                    std::int64_t partial_rows, std::int64_t features, std::int64_t items) {
  __shared__ Vector<A, W> slices[kColumnSlices][kColumnLanes];
  WaitForKernelBefore();
  const std::int64_t tiles = (features + kColumnLanes * W - 1) / (kColumnLanes * W);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t tile = item % tiles;
    const int sum = static_cast<int>(item / tiles % sums.count);
    const std::int64_t group = item / tiles / sums.count;
    const std::int64_t column = (tile * kColumnLanes + threadIdx.x) * W;
    Vector<A, W> total{};
    const auto add = [&total](const Vector<A, W>& more) {
#pragma unroll
      for (int j = 0; j < W; ++j) total.v[j] += more.v[j];
    };
    if (column < features) {
      const std::int64_t pitch = sums.count * features;
      const A* partial = workspace + (group * stride * sums.count + sum) * features + column;
#pragma unroll 8
      for (std::int64_t row = threadIdx.y; row < partial_rows; row += kColumnSlices) {
        add(LoadPlain<W>(partial + row * pitch));
      }
    }
    StoreVector(slices[threadIdx.y][threadIdx.x].v, total);
    __syncthreads();  // every slice is written
    if (threadIdx.y == 0 && column < features) {
#pragma unroll
      for (int slice = 1; slice < kColumnSlices; ++slice) add(slices[slice][threadIdx.x]);
      const ParamGrad& result = sums.results[sum];
#pragma unroll
      for (int j = 0; j < W; ++j) {
        StoreAs(result.data, result.dtype, group * features + column + j, total.v[j]);
      }
    }
    __syncthreads();  // every slice is read before slices of the next item are written
  }
}

template <typename A>
cudaError_t LaunchColumnSum(cudaStream_t stream, const A* workspace, const ColumnSums& sums,
                            std::int64_t groups, std::int64_t stride, std::int64_t partial_rows,
                            std::int64_t features) {
  const auto launch = [&]<int W>() {
    const std::int64_t items = groups * sums.count * CeilDiv(features, kColumnLanes * W);
    const EarlyLaunch launch(stream, dim3(GridBlocks(items)), dim3(kColumnLanes, kColumnSlices));
    return cudaLaunchKernelEx(&launch.config, &ColumnSumKernel<A, W>, workspace, sums, stride,
                              partial_rows, features, items);
  };
  const bool wide = features % kVec<A> == 0 && Aligned(workspace) && features >= kWideSums;
  return wide ? launch.template operator()<kVec<A>>() : launch.template operator()<1>();
}

}  // namespace gradops
