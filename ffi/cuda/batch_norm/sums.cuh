// Batch norm's sums of channels: over a block's threads, and over blocks.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm/plan.h"
#include "cuda/batch_norm/policy.h"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"

namespace gradops {
namespace {

constexpr int kChannelWarps = kChannelThreads / kWarp;
static_assert(kRingCounters == kChannelWarps);

// --- Sums of a thread ----------------------------------------------------------------------------

// Two sums for each of a thread's columns. With regular calls of EndSum(), rounding errors hardly
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
};

// --- Sums over a block ---------------------------------------------------------------------------

// Calls emit(channel in the tile, sum) for each of a tile's channels, in any thread. The order of
// additions is fixed.
template <typename A, int W, typename Emit>
__device__ __forceinline__ void SumColumns(const ChannelPlan& plan, const ChannelPart& part,
                                           char* scratch, const ThreadSums<A, W>& sums,
                                           const Emit& emit) {
  struct alignas(2 * sizeof(A)) Pair {
    A first, second;
  };
  // [W][pitch]: a thread has W neighbouring columns. Threads that read neighbouring columns then
  // read from different banks.
  Pair* const pairs = reinterpret_cast<Pair*>(scratch);
  const int thread = static_cast<int>(threadIdx.x), pitch = plan.sums_pitch;
  ThreadSums<A, W> own = sums;
  for (int rows = plan.warp_rows; rows > 1; rows /= 2) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        own.all[v][j] += __shfl_xor_sync(0xffffffffu, own.all[v][j], rows / 2 * plan.lanes);
      }
    }
  }
  const int rows = plan.at_once / plan.warp_rows;  // rows of a step that are left
  const bool several = plan.warp_rows > 1;
  const int slot = several ? thread / kWarp * plan.lanes + thread % kWarp : thread;
  __syncthreads();  // scratch has been read
  if (several ? thread % kWarp < plan.lanes : thread < rows * plan.lanes) {
#pragma unroll
    for (int j = 0; j < W; ++j) pairs[j * pitch + slot] = {own.all[0][j], own.all[1][j]};
  }
  __syncthreads();  // scratch is written
  const int of_tile = part.channels, columns = plan.ChannelColumns();
  const auto add = [](double2& total, const Pair& pair) {
    total.x += static_cast<double>(pair.first), total.y += static_cast<double>(pair.second);
  };
  // Adds up each column's pairs over the rows. If a channel has several columns, the total replaces
  // the column's first pair.
  const bool is_channel = columns == 1;
  if (is_channel || rows > 1) {
    for (int column = thread; column < W * plan.lanes; column += kChannelThreads) {
      Pair* const of_column = pairs + column % W * pitch + column / W;
      double2 total{0, 0};
#pragma unroll 4
      for (int r = 0; r < rows; ++r) add(total, of_column[r * plan.lanes]);
      if (!is_channel) {
        *of_column = {static_cast<A>(total.x), static_cast<A>(total.y)};
      } else if (column < of_tile) {
        emit(column, total);
      }
    }
    if (is_channel) return;
    __syncthreads();  // all columns are added up
  }
  constexpr int kFew = 16;
  const bool few = columns <= kFew;  // one thread adds few columns up, a warp adds up many
  const int lane = few ? 0 : thread % kWarp, lanes = few ? 1 : kWarp;
  for (int channel = thread / lanes; channel < of_tile; channel += kChannelThreads / lanes) {
    double2 total{0, 0};
    for (int i = lane; i < columns; i += lanes) {
      const int column = plan.ColumnOf(channel, i, of_tile);
      add(total, pairs[column % W * pitch + column / W]);
    }
    if (!few) {
      double values[2] = {total.x, total.y};
      WarpSums<kWarp>(values);
      total = {values[0], values[1]};
    }
    if (lane == 0) emit(channel, total);
  }
}

// Replaces values by their sums over the block, in the first warp.
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
  __syncthreads();  // scratch is written
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = lane < kChannelWarps ? scratch[i * kChannelWarps + lane] : 0.0;
    }
    WarpSums<kWarp>(values);
  }
}

// Calls emit(channel in the tile, sum, count) for each of a tile's channels. `count` is the number
// of a channel's elements in the part. `elements`: planes need to know how many elements this
// thread has added up. Planes: the whole first warp calls emit, with equal arguments.
template <typename A, int W, typename Emit>
__device__ __forceinline__ void SumPart(const ChannelPlan& plan, const ChannelPart& part,
                                        char* scratch, const ThreadSums<A, W>& sums, int elements,
                                        const Emit& emit) {
  if (plan.plane) {
    double values[3] = {0, 0, static_cast<double>(elements)};
#pragma unroll
    for (int j = 0; j < W; ++j) {
      values[0] += static_cast<double>(sums.all[0][j]);
      values[1] += static_cast<double>(sums.all[1][j]);
    }
    SumPlane(reinterpret_cast<double*>(scratch), values);
    if (threadIdx.x < kWarp) emit(0, double2{values[0], values[1]}, values[2]);
  } else {
    const double of_channel = static_cast<double>(plan.ChannelElements(part));
    SumColumns(plan, part, scratch, sums,
               [&](int channel, const double2& sum) { emit(channel, sum, of_channel); });
  }
}

// --- Sums over blocks ----------------------------------------------------------------------------

// A barrier. After it, a block sees the partial results that it needs. If no other block has its
// channels, these are its own. Otherwise they are from its tiles' blocks or from all blocks.
__device__ __forceinline__ void MeetBlocks(const ChannelPlan& plan) {
  if (!plan.meets()) {
    __syncthreads();
  } else if (plan.clustered) {
    ClusterSync();
  } else {
    cooperative_groups::this_grid().sync();
  }
}

// A part's partial result of a channel, read and written by vectors. Other blocks have to read it
// from the L2 cache.
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

// The workspace: partial results [groups, partial_rows, channels].
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

// A warp's counter of a tile's rings (stream.cuh). It lies after the tile's partial
// results. Warps' counters are far apart, because one place takes one atomic operation at a time.
template <typename A, int kValues>
__device__ __forceinline__ unsigned* RingCounter(const ChannelPlan& plan, const ChannelPart& part,
                                                 const ChannelPartials<A, kValues>& partials,
                                                 int warp) {
  return reinterpret_cast<unsigned*>(&partials.at(part.group, plan.stride + warp, part.channel));
}
template <typename A, int kValues>
__device__ __forceinline__ void BeginCounters(const ChannelPlan& plan, const ChannelPart& part,
                                              const ChannelPartials<A, kValues>& partials) {
  if (plan.shared_rings == 0 || part.first != 0 || threadIdx.x >= kChannelWarps) return;
  *RingCounter(plan, part, partials, static_cast<int>(threadIdx.x)) =
      static_cast<unsigned>(plan.given_rings * plan.stride);
}

// `all` channels from `first` on, counted through all groups, spread over `warps` warps. `warp` is
// the number of the calling warp.
struct ChannelRange {
  std::int64_t first, all, warp, warps;
};

// For each channel of the range: state = begin(group, channel); add(sums, partial, state) for each
// of the channel's partial results; finish(group, channel, sums, state).
template <int kSums, typename A, int kValues, typename Begin, typename Add, typename Finish>
__device__ __forceinline__ void ForChannelSums(const ChannelPlan& plan, const ChannelRange& range,
                                               const ChannelPartials<A, kValues>& partials,
                                               const Begin& begin, const Add& add,
                                               const Finish& finish) {
  // Lanes for the partial results of one channel. With several channels in a warp, neighbouring
  // lanes read neighbouring results, and reads are longer.
  const int lanes = range.all <= range.warps ? kWarp : 4, at_once = kWarp / lanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t first = range.warp * at_once; first < range.all;
       first += range.warps * at_once) {
    const std::int64_t own = first + lane % at_once;
    // Lanes without a channel add up the last channel's results too.
    const std::int64_t i = range.first + min(own, range.all - 1);
    const std::int64_t group = plan.all_tiles == plan.tiles ? 0 : i / plan.channels;
    const std::int64_t channel = i - group * plan.channels;
    const auto of_channel = begin(group, channel);
    const int parts = plan.BlocksOf(group, channel);
    double sums[kSums] = {};
#pragma unroll 4
    for (int part = lane / at_once; part < parts; part += lanes) {
      add(sums, partials.Load(group, part, channel), of_channel);
    }
    for (int distance = kWarp / 2; distance >= at_once; distance /= 2) {
#pragma unroll
      for (double& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane < at_once && own < range.all) finish(group, channel, sums, of_channel);
  }
}

// If blocks combine their own tiles, this covers the channels of the block's tiles, tile by tile,
// spread over the block. Otherwise it covers all channels, spread over the grid. The first
// argument of finish is the tile. For all channels, the tile has no steps, and its first step is 0.
template <int kSums, typename A, int kValues, typename Begin, typename Add, typename Finish>
__device__ __forceinline__ void ForChannelSums(const ChannelPlan& plan, std::int64_t groups,
                                               const ChannelPartials<A, kValues>& partials,
                                               const Begin& begin, const Add& add,
                                               const Finish& finish) {
  const ChannelShare share = plan.ShareOf(static_cast<int>(blockIdx.x));
  ChannelRange range{0, groups * plan.channels, threadIdx.x / kWarp, kChannelWarps};
  if (!plan.own_sums) {
    range.warp = range.warp * gridDim.x + blockIdx.x, range.warps *= gridDim.x;
  }
  const int tiles = plan.own_sums ? share.parts : 1;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    ChannelPart tile{};
    if (plan.own_sums) {
      tile = plan.PartOf(share, i);
      range.first = tile.group * plan.channels + tile.channel, range.all = tile.channels;
    }
    ForChannelSums<kSums>(
        plan, range, partials, begin, add,
        [&](std::int64_t group, std::int64_t channel, const double (&sums)[kSums],
            const auto& of_channel) { finish(tile, group, channel, sums, of_channel); });
  }
}

}  // namespace
}  // namespace gradops
