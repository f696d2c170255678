// Batch norm's sums of channels: over the vectors of a thread, over a block's threads, and over
// blocks. README.md has the words.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm/plan.h"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"

namespace gradops {
namespace {

constexpr int kChannelWarps = kChannelThreads / kWarp;
static_assert(kChunkCounters == kChannelWarps);

// Two sums for each of a thread's columns. Regular calls of EndSum() keep rounding errors small:
// they hardly grow with the number of rows.
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

// A thread's two sums of a column in the accumulation type.
template <typename A>
struct alignas(2 * sizeof(A)) SumPair {
  A first, second;
};
template <typename A>
__device__ __forceinline__ void AddPair(double2& total, const SumPair<A>& pair) {
  total.x += static_cast<double>(pair.first), total.y += static_cast<double>(pair.second);
}

// Adds up a warp's rows of a step, and puts the threads' sums into `pairs`, [W][sums_pitch]. A
// thread has W neighbouring columns, so threads that read neighbouring columns then read from
// different banks. Returns how many rows of a step are left.
template <typename A, int W>
__device__ __forceinline__ int PutColumnSums(const ChannelPlan& plan, const ThreadSums<A, W>& sums,
                                             SumPair<A>* pairs) {
  const int thread = static_cast<int>(threadIdx.x);
  ThreadSums<A, W> own = sums;
  for (int rows = plan.warp_rows; rows > 1; rows /= 2) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        own.all[v][j] += __shfl_xor_sync(0xffffffffu, own.all[v][j], rows / 2 * plan.row_threads);
      }
    }
  }
  const int rows = plan.step_rows / plan.warp_rows;
  const bool several = plan.warp_rows > 1;
  const int place = several ? thread / kWarp * plan.row_threads + thread % kWarp : thread;
  __syncthreads();  // pairs have been read
  if (several ? thread % kWarp < plan.row_threads : thread < rows * plan.row_threads) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      pairs[j * plan.sums_pitch + place] = {own.all[0][j], own.all[1][j]};
    }
  }
  __syncthreads();  // pairs are written
  return rows;
}

// Calls emit(channel in the tile, sum) for each of a tile's channels, in any thread. The order of
// additions is fixed.
template <typename A, int W>
__device__ __forceinline__ void SumColumns(const ChannelPlan& plan, const ChannelPart& part,
                                           char* scratch, const ThreadSums<A, W>& sums,
                                           const auto& emit) {
  auto* const pairs = reinterpret_cast<SumPair<A>*>(scratch);
  const int thread = static_cast<int>(threadIdx.x), pitch = plan.sums_pitch;
  const int rows = PutColumnSums(plan, sums, pairs);
  const int of_tile = part.channels, columns = plan.ChannelColumns();
  // Adds up each column's pairs over the rows. If a channel has several columns, the total replaces
  // the column's first pair.
  const bool is_channel = columns == 1;
  if (is_channel || rows > 1) {
    for (int column = thread; column < W * plan.row_threads; column += kChannelThreads) {
      SumPair<A>* const of_column = pairs + column % W * pitch + column / W;
      double2 total{0, 0};
#pragma unroll 4
      for (int r = 0; r < rows; ++r) AddPair(total, of_column[r * plan.row_threads]);
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
      AddPair(total, pairs[column % W * pitch + column / W]);
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
__device__ __forceinline__ void SumPlane(double* scratch, double (&values)[3]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  WarpSums<kWarp>(values);
  __syncthreads();  // scratch has been read
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < 3; ++i) scratch[i * kChannelWarps + warp] = values[i];
  }
  __syncthreads();  // scratch is written
  if (warp > 0) return;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    values[i] = lane < kChannelWarps ? scratch[i * kChannelWarps + lane] : 0.0;
  }
  WarpSums<kWarp>(values);
}

// Calls emit(channel in the tile, sum, count) for each of a tile's channels, with the count of a
// channel's elements in the part. Planes need to know how many `elements` this thread has added up.
// Planes: the whole first warp calls emit, with equal arguments.
template <typename A, int W>
__device__ __forceinline__ void SumPart(const ChannelPlan& plan, const ChannelPart& part,
                                        char* scratch, const ThreadSums<A, W>& sums, int elements,
                                        const auto& emit) {
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
    const double count = static_cast<double>(plan.ChannelElements(part));
    SumColumns(plan, part, scratch, sums,
               [&](int channel, const double2& sum) { emit(channel, sum, count); });
  }
}

// --- Sums over blocks ----------------------------------------------------------------------------

// A barrier. After it, a block sees the partial results that it needs. If no other block has its
// channels, these are its own. Otherwise they are from its tiles' blocks or from all blocks.
__device__ __forceinline__ void SyncBlocks(const ChannelPlan& plan) {
  if (!plan.needs_barrier()) {
    __syncthreads();
  } else if (plan.clustered) {
    ClusterSync();
  } else {
    cooperative_groups::this_grid().sync();
  }
}

// The workspace: partial results [groups, partial_rows, channels].
template <typename A, int kValues>
struct ChannelPartials {
  // A part's partial result of a channel, read and written by vectors.
  struct alignas(sizeof(A) * kValues < 16 ? sizeof(A) * kValues : 16) Partial {
    A v[kValues];
  };

  void* workspace;
  std::int64_t partial_rows, channels;

  __device__ __forceinline__ Partial& at(std::int64_t group, std::int64_t part,
                                         std::int64_t channel) const {
    return static_cast<Partial*>(workspace)[(group * partial_rows + part) * channels + channel];
  }
  // Another block's partial result has to be read from the L2 cache.
  __device__ __forceinline__ Partial Load(std::int64_t group, std::int64_t part,
                                          std::int64_t channel) const {
    using Word = std::conditional_t<sizeof(Partial) % 16 == 0, uint4, uint2>;
    const Partial& from = at(group, part, channel);
    Partial partial;
#pragma unroll
    for (std::size_t i = 0; i < sizeof(from) / sizeof(Word); ++i) {
      reinterpret_cast<Word*>(&partial)[i] = __ldcg(reinterpret_cast<const Word*>(&from) + i);
    }
    return partial;
  }
};

// A warp's counter of a tile's chunks (stages.cuh). It lies after the tile's partial results.
// Warps' counters are far apart, because one place takes one atomic operation at a time.
__device__ __forceinline__ unsigned* ChunkCounter(const ChannelPlan& plan, const ChannelPart& part,
                                                  const auto& partials, int warp) {
  return reinterpret_cast<unsigned*>(
      &partials.at(part.group, plan.tile_blocks + warp, part.channel));
}
__device__ __forceinline__ void BeginCounters(const ChannelPlan& plan, const ChannelPart& part,
                                              const auto& partials) {
  if (plan.dynamic_chunks == 0 || part.first != 0 || threadIdx.x >= kChannelWarps) return;
  *ChunkCounter(plan, part, partials, static_cast<int>(threadIdx.x)) =
      static_cast<unsigned>(plan.static_chunks * plan.tile_blocks);
}

// Adds up a channel's partial results: add(sums, partial) for each. All lanes of a warp call it. A
// warp has `warp_channels` channels, a power of two. Lane i has the channel of lane i %
// warp_channels. The order of additions is fixed.
__device__ __forceinline__ void SumPartials(const ChannelPlan& plan, const auto& partials,
                                            std::int64_t group, std::int64_t channel,
                                            int warp_channels, const auto& add, double (&sums)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, lanes = kWarp / warp_channels;
  const int parts = plan.BlocksOf(group, channel);
#pragma unroll 4
  for (int part = lane / warp_channels; part < parts; part += lanes) {
    add(sums, partials.Load(group, part, channel));
  }
  for (int distance = kWarp / 2; distance >= warp_channels; distance /= 2) {
#pragma unroll
    for (double& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
}

// Calls fn(tile, first, channels, warp, warps) for the channels that a block combines: `channels`
// channels from `first` on, counted through all groups. The calling warp is one of `warps` warps
// that share them. If blocks combine their own tiles, these are the channels of the block's tiles,
// tile by tile. Otherwise they are all channels, spread over the grid. Then `tile` has no steps,
// and its first step is 0.
__device__ __forceinline__ void ForCombined(const ChannelPlan& plan, std::int64_t groups,
                                            const auto& fn) {
  const BlockSteps block = plan.StepsOfBlock(static_cast<int>(blockIdx.x));
  std::int64_t warp = threadIdx.x / kWarp, warps = kChannelWarps;
  if (!plan.combines_locally) warp = warp * gridDim.x + blockIdx.x, warps *= gridDim.x;
  const int tiles = plan.combines_locally ? block.parts : 1;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    if (plan.combines_locally) {
      const ChannelPart tile = plan.PartOf(block, t);
      fn(tile, tile.group * plan.channels + tile.channel, std::int64_t{tile.channels}, warp, warps);
    } else {
      fn(ChannelPart{}, std::int64_t{0}, groups * plan.channels, warp, warps);
    }
  }
}

// For each channel: state = begin(group, channel); add(sums, partial, state) for each of the
// channel's partial results; finish(tile, group, channel, sums, state).
__device__ __forceinline__ void ForChannelSums(const ChannelPlan& plan, std::int64_t groups,
                                               const auto& partials, const auto& begin,
                                               const auto& add, const auto& finish) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ForCombined(plan, groups,
              [&](const ChannelPart& tile, std::int64_t first_channel, std::int64_t channels,
                  std::int64_t warp, std::int64_t warps) {
                // Lanes for the partial results of one channel. With several channels in a warp,
                // neighbouring lanes read neighbouring results, and reads are longer.
                const int warp_channels = channels <= warps ? 1 : kWarp / 4;
                for (std::int64_t first = warp * warp_channels; first < channels;
                     first += warps * warp_channels) {
                  const std::int64_t own = first + lane % warp_channels;
                  // Lanes without a channel add up the last channel's results too.
                  const std::int64_t i = first_channel + min(own, channels - 1);
                  const std::int64_t group = plan.all_tiles == plan.tiles ? 0 : i / plan.channels;
                  const std::int64_t channel = i - group * plan.channels;
                  const auto state = begin(group, channel);
                  double sums[2] = {};
                  SumPartials(
                      plan, partials, group, channel, warp_channels,
                      [&](double (&of_channel)[2], const auto& partial) {
                        add(of_channel, partial, state);
                      },
                      sums);
                  if (lane < warp_channels && own < channels)
                    finish(tile, group, channel, sums, state);
                }
              });
}

// For each bundle, in a warp: state = begin(group, first channel); add(sums, partial, state) for
// each partial result of a channel; end_channel(tile, group, channel, sums, totals, state), in one
// lane, for each channel, adds the channel's sums to the totals of the bundle; finish(tile, group,
// first channel, totals, state) in all lanes.
__device__ __forceinline__ void ForBundleSums(const ChannelPlan& plan, std::int64_t groups,
                                              const auto& partials, const auto& begin,
                                              const auto& add, const auto& end_channel,
                                              const auto& finish) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, bundle = static_cast<int>(plan.bundle);
  int warp_channels = 1;  // the largest power of two up to the bundle and the warp
  while (warp_channels < kWarp && 2 * warp_channels <= bundle) warp_channels *= 2;
  ForCombined(plan, groups,
              [&](const ChannelPart& tile, std::int64_t first_channel, std::int64_t channels,
                  std::int64_t warp, std::int64_t warps) {
                for (std::int64_t first = warp * bundle; first < channels;
                     first += warps * bundle) {
                  const std::int64_t i = first_channel + first;
                  const std::int64_t group = plan.all_tiles == plan.tiles ? 0 : i / plan.channels;
                  const std::int64_t channel = i - group * plan.channels;
                  const auto state = begin(group, channel);
                  double totals[2] = {};
#pragma unroll 1
                  for (int start = 0; start < bundle; start += warp_channels) {
                    const int own = start + lane % warp_channels;
                    double sums[2] = {};
                    SumPartials(
                        plan, partials, group, channel + min(own, bundle - 1), warp_channels,
                        [&](double (&of_channel)[2], const auto& partial) {
                          add(of_channel, partial, state);
                        },
                        sums);
                    if (own < bundle && lane < warp_channels) {
                      end_channel(tile, group, channel + own, sums, totals, state);
                    }
                  }
                  WarpSums<kWarp>(totals);
                  finish(tile, group, channel, totals, state);
                }
              });
}

}  // namespace
}  // namespace gradops
