// Batch norm's sums of channels: over a block's threads, and over blocks.
#pragma once

#include <cstdint>

#include "cuda/batch_norm_policy.h"
#include "cuda/reduce.cuh"

namespace gradops {
namespace {

constexpr int kChannelWarps = kChannelThreads / kWarp;

// --- Sums over a block ---------------------------------------------------------------------------

// emit(channel in the tile, sum) for each of a tile's channels, where pair(j) is what the thread
// has added up of its column j; any thread may be told of any channel. In a fixed order.
template <int W, typename PairOf, typename Emit>
__device__ __forceinline__ void SumColumns(const ChannelPlan& plan, std::int64_t tile,
                                           double2* scratch, const PairOf& pair, const Emit& emit) {
  constexpr int kStaged = W < kStagedColumns ? W : kStagedColumns;
  double2* const totals = scratch + kStaged * kChannelThreads;  // [lanes][W]
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int first = 0; first < W; first += kStaged) {
    __syncthreads();  // scratch has been read
#pragma unroll
    for (int j = 0; j < kStaged; ++j) scratch[j * kChannelThreads + thread] = pair(first + j);
    __syncthreads();  // and is written
    for (int i = thread; i < kStaged * plan.lanes; i += kChannelThreads) {
      const int j = i / plan.lanes, pack = i % plan.lanes;
      double2 total{0, 0};
#pragma unroll 4
      for (int r = 0; r < plan.at_once; ++r) {
        const double2 part = scratch[j * kChannelThreads + r * plan.lanes + pack];
        total.x += part.x, total.y += part.y;
      }
      totals[pack * W + first + j] = total;
    }
  }
  __syncthreads();
  constexpr int kFew = 16;
  const int of_tile = plan.TileChannels(tile), columns = plan.ChannelColumns();
  const bool few = columns <= kFew;  // for one thread; else a warp adds them up
  const int lane = few ? 0 : thread % kWarp, lanes = few ? 1 : kWarp;
  for (int channel = thread / lanes; channel < of_tile; channel += kChannelThreads / lanes) {
    double2 total{0, 0};
    for (int i = lane; i < columns; i += lanes) {
      const double2 part = totals[plan.ColumnOf(channel, i, of_tile)];
      total.x += part.x, total.y += part.y;
    }
    if (!few) {
      double values[2] = {total.x, total.y};
      WarpSums<kWarp>(values);
      total = {values[0], values[1]};
    }
    if (lane == 0) emit(channel, total);
  }
}

// Replaces values by their sums over the block, in thread 0.
template <int kValues>
__device__ __forceinline__ void SumPlane(double* scratch, double (&values)[kValues]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  WarpSums<kWarp>(values);
  __syncthreads();  // scratch has been read
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) scratch[i * kChannelWarps + warp] = values[i];
  }
  __syncthreads();  // and is written
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = lane < kChannelWarps ? scratch[i * kChannelWarps + lane] : 0.0;
    }
    WarpSums<kWarp>(values);
  }
}

// --- Sums over blocks ----------------------------------------------------------------------------

// Partial results in the workspace, [groups, partial_rows, kValues, channels].
template <typename A, int kValues>
struct ChannelPartials {
  A* data;
  std::int64_t partial_rows, channels;

  __device__ __forceinline__ A& at(std::int64_t group, std::int64_t part, int value,
                                   std::int64_t channel) const {
    return data[((group * partial_rows + part) * kValues + value) * channels + channel];
  }
};

// All channels of all groups, spread over the grid: add(values, group, part, channel) for each of
// a channel's partial results, and then finish(group, channel, sums of these values).
template <int kValues, typename Add, typename Finish>
__device__ __forceinline__ void ForChannelSums(const ChannelPlan& plan, std::int64_t groups,
                                               const Add& add, const Finish& finish) {
  const std::int64_t all = groups * plan.channels;
  const std::int64_t warps = std::int64_t{gridDim.x} * kChannelWarps;
  // Lanes that share a channel's partial results; with other channels' next to each other, reads
  // are longer.
  const int lanes = all <= warps ? kWarp : 4, at_once = kWarp / lanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warp =
      std::int64_t{blockIdx.x} + threadIdx.x / kWarp * std::int64_t{gridDim.x};
  for (std::int64_t first = warp * at_once; first < all; first += warps * at_once) {
    const std::int64_t i = first + lane % at_once;
    const std::int64_t group = i / plan.channels, channel = i % plan.channels;
    double values[kValues] = {};
    if (i < all) {
      const std::int64_t tile = group * plan.tiles + channel / plan.tile_channels;
      const int parts = plan.LastBlock(tile) - plan.FirstBlock(tile) + 1;
#pragma unroll 4
      for (int part = lane / at_once; part < parts; part += lanes) {
        add(values, group, part, channel);
      }
    }
    for (int distance = kWarp / 2; distance >= at_once; distance /= 2) {
#pragma unroll
      for (double& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    if (lane < at_once && i < all) finish(group, channel, values);
  }
}

}  // namespace
}  // namespace gradops
