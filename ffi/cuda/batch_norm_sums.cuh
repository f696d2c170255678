// Batch norm's sums of channels: over a block's threads, and over blocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm_plan.h"
#include "cuda/batch_norm_policy.h"
#include "cuda/reduce.cuh"

namespace gradops {
namespace {

constexpr int kChannelWarps = kChannelThreads / kWarp;

// --- Sums of a thread ----------------------------------------------------------------------------

// Two sums of each of a thread's columns. EndSum() every so often, so that rounding errors hardly
// grow with the number of rows.
template <typename A, int W>
struct ThreadSums {
  A recent[2][W] = {}, all[2][W] = {};

  __device__ __forceinline__ void Add(int j, A first, A second) {
    recent[0][j] += first, recent[1][j] += second;
  }
  __device__ __forceinline__ void EndSum() {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int j = 0; j < W; ++j) all[v][j] += recent[v][j], recent[v][j] = 0;
    }
  }
  __device__ __forceinline__ double2 column(int j) const {
    return {static_cast<double>(all[0][j]), static_cast<double>(all[1][j])};
  }
};

// --- Sums over a block ---------------------------------------------------------------------------

// emit(channel in the tile, sum) for each of a tile's channels; any thread may be told of any
// channel. In a fixed order.
template <typename A, int W, typename Emit>
__device__ __forceinline__ void SumColumns(const ChannelPlan& plan, std::int64_t tile,
                                           double2* scratch, const ThreadSums<A, W>& sums,
                                           const Emit& emit) {
  constexpr int kStaged = W < kStagedColumns ? W : kStagedColumns;
  double2* const totals = scratch + kStaged * kChannelThreads;  // [lanes][W]
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int first = 0; first < W; first += kStaged) {
    __syncthreads();  // scratch has been read
#pragma unroll
    for (int j = 0; j < kStaged; ++j)
      scratch[j * kChannelThreads + thread] = sums.column(first + j);
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
  __syncthreads();  // all columns' totals are written
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

// emit(channel in the tile, sum, elements) for each of a tile's channels, of whose elements this
// thread has added up so many.
template <typename A, int W, typename Emit>
__device__ __forceinline__ void SumPart(const ChannelPlan& plan, const ChannelPart& part,
                                        double2* scratch, const ThreadSums<A, W>& sums,
                                        int elements, const Emit& emit) {
  if (plan.plane) {
    double values[3] = {0, 0, static_cast<double>(elements)};
#pragma unroll
    for (int j = 0; j < W; ++j) {
      values[0] += sums.column(j).x, values[1] += sums.column(j).y;
    }
    SumPlane(reinterpret_cast<double*>(scratch), values);
    if (threadIdx.x == 0) emit(0, double2{values[0], values[1]}, values[2]);
  } else {
    const double of_channel = static_cast<double>(plan.ChannelElements(part));
    SumColumns(plan, part.tile, scratch, sums,
               [&](int channel, const double2& sum) { emit(channel, sum, of_channel); });
  }
}

// --- Sums over blocks ----------------------------------------------------------------------------

// What a part leaves of a channel, written and read at once. Not before a barrier of the grid is it
// seen by other blocks, which have to read it from the L2 cache.
template <typename A, int kValues>
struct alignas(sizeof(A) * kValues < 16 ? sizeof(A) * kValues : 16) ChannelPartial {
  A v[kValues];
};
template <typename A, int kValues>
__device__ __forceinline__ ChannelPartial<A, kValues> LoadShared(
    const ChannelPartial<A, kValues>& from) {
  using Word = std::conditional_t<sizeof(from) % 16 == 0, uint4, uint2>;
  ChannelPartial<A, kValues> partial;
#pragma unroll
  for (std::size_t i = 0; i < sizeof(from) / sizeof(Word); ++i) {
    reinterpret_cast<Word*>(&partial)[i] = __ldcg(reinterpret_cast<const Word*>(&from) + i);
  }
  return partial;
}

// The workspace, [groups, partial_rows, channels] of these.
template <typename A, int kValues>
struct ChannelPartials {
  ChannelPartial<A, kValues>* data;
  std::int64_t partial_rows, channels;

  __device__ __forceinline__ ChannelPartials(void* workspace, std::int64_t partial_rows,
                                             std::int64_t channels)
      : data(static_cast<ChannelPartial<A, kValues>*>(workspace)),
        partial_rows(partial_rows),
        channels(channels) {}
  __device__ __forceinline__ ChannelPartial<A, kValues>& at(std::int64_t group, std::int64_t part,
                                                            std::int64_t channel) const {
    return data[(group * partial_rows + part) * channels + channel];
  }
  __device__ __forceinline__ ChannelPartial<A, kValues> Load(std::int64_t group, std::int64_t part,
                                                             std::int64_t channel) const {
    return LoadShared(at(group, part, channel));
  }
};

// All channels of all groups, spread over the grid: begin(group, channel), whose result is the last
// argument of add(sums, partial, .), for each of a channel's partial results, and of finish(group,
// channel, sums, .).
template <int kSums, typename A, int kValues, typename Begin, typename Add, typename Finish>
__device__ __forceinline__ void ForChannelSums(const ChannelPlan& plan, std::int64_t groups,
                                               const ChannelPartials<A, kValues>& partials,
                                               const Begin& begin, const Add& add,
                                               const Finish& finish) {
  const std::int64_t all = groups * plan.channels;
  const std::int64_t warps = std::int64_t{gridDim.x} * kChannelWarps;
  // Lanes that share a channel's partial results; with other channels' next to each other, reads
  // are longer.
  const int lanes = all <= warps ? kWarp : 4, at_once = kWarp / lanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warp =
      std::int64_t{blockIdx.x} + threadIdx.x / kWarp * std::int64_t{gridDim.x};
  for (std::int64_t first = warp * at_once; first < all; first += warps * at_once) {
    const std::int64_t own = first + lane % at_once;
    const std::int64_t i = min(own, all - 1);  // lanes that have none add up the last one's, too
    const std::int64_t group = i / plan.channels, channel = i % plan.channels;
    const std::int64_t tile = group * plan.tiles + channel / plan.tile_channels;
    const auto of_channel = begin(group, channel);
    const int parts = plan.LastBlock(tile) - plan.FirstBlock(tile) + 1;
    double sums[kSums] = {};
#pragma unroll 4
    for (int part = lane / at_once; part < parts; part += lanes) {
      add(sums, partials.Load(group, part, channel), of_channel);
    }
    for (int distance = kWarp / 2; distance >= at_once; distance /= 2) {
#pragma unroll
      for (double& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane < at_once && own < all) finish(group, channel, sums, of_channel);
  }
}

}  // namespace
}  // namespace gradops
