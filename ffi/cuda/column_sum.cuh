// The second half of every sum over rows: partial rows to results, in a fixed order.
#pragma once

#include <cstdint>

#include "cuda/launch.cuh"

namespace gradops {

// The results of up to two sums, in the workspace's order.
template <typename A>
struct ColumnSums {
  A* results[2];
  int count;
};

// The results of sums over no rows.
template <typename A>
cudaError_t ZeroColumnSums(cudaStream_t stream, const ColumnSums<A>& sums, std::int64_t groups,
                           std::int64_t features) {
  cudaError_t status = cudaSuccess;
  const std::size_t bytes = static_cast<std::size_t>(groups * features) * sizeof(A);
  for (int i = 0; i < sums.count && bytes > 0 && status == cudaSuccess; ++i) {
    status = cudaMemsetAsync(sums.results[i], 0, bytes, stream);
  }
  return status;
}

inline constexpr int kColumnTile = 32;
inline constexpr int kColumnSlices = 16;

// workspace: [groups, stride, sums.count, features], of which the first `partial_rows` of each
// group are summed, each by the block of its (group, sum, tile of 32 columns).
template <typename A>
__global__ void __launch_bounds__(kColumnTile* kColumnSlices)
    ColumnSumKernel(const A* __restrict__ workspace, ColumnSums<A> sums, std::int64_t stride,
                    std::int64_t partial_rows, std::int64_t features, std::int64_t items) {
  __shared__ A slices[kColumnSlices][kColumnTile];
  const std::int64_t tiles = (features + kColumnTile - 1) / kColumnTile;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t tile = item % tiles;
    const int sum = static_cast<int>(item / tiles % sums.count);
    const std::int64_t group = item / tiles / sums.count;
    const std::int64_t column = tile * kColumnTile + threadIdx.x;
    A total = 0;
    if (column < features) {
      const std::int64_t pitch = sums.count * features;
      const A* partial = workspace + (group * stride * sums.count + sum) * features + column;
      for (std::int64_t row = threadIdx.y; row < partial_rows; row += kColumnSlices) {
        total += partial[row * pitch];
      }
    }
    slices[threadIdx.y][threadIdx.x] = total;
    __syncthreads();  // every slice is written
    if (threadIdx.y == 0 && column < features) {
#pragma unroll
      for (int slice = 1; slice < kColumnSlices; ++slice) total += slices[slice][threadIdx.x];
      A* const result = sum == 0 ? sums.results[0] : sums.results[1];
      result[group * features + column] = total;
    }
    __syncthreads();  // every slice is read before the next item's are written
  }
}

template <typename A>
void LaunchColumnSum(cudaStream_t stream, const A* workspace, const ColumnSums<A>& sums,
                     std::int64_t groups, std::int64_t stride, std::int64_t partial_rows,
                     std::int64_t features) {
  const std::int64_t items = groups * sums.count * CeilDiv(features, kColumnTile);
  ColumnSumKernel<A><<<GridBlocks(items), dim3(kColumnTile, kColumnSlices), 0, stream>>>(
      workspace, sums, stride, partial_rows, features, items);
}

}  // namespace gradops
