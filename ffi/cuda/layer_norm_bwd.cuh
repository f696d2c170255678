// The backward kernels of layer_norm.cu, whose comment describes them.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "common/math.h"
#include "cuda/layer_norm_tiles.cuh"
#include "cuda/reduce.cuh"

namespace gradops {
namespace {

// Where the column sums of (group, slot) go: into the workspace, or, if a group has one slot, into
// the results. Null where not wanted.
template <typename A>
struct SlotSums {
  A* dscale;
  A* dbias;
  std::int64_t slots, group_pitch, slot_pitch;

  __device__ std::int64_t Offset(std::int64_t group, std::int64_t slot) const {
    return group * group_pitch + slot * slot_pitch;
  }
};

// One row per team on its way to shared memory. Thread t writes and reads [...][t] only.
template <typename T, typename Tile>
struct RingStage {
  static constexpr int kThreads = kBackwardThreads<Tile>;
  Pack<T, Tile::kWidth> x[Tile::kPacks][kThreads];
  Pack<T, Tile::kWidth> dy[Tile::kPacks][kThreads];
  Accum<T> mean[kThreads], rstd[kThreads];
};

// cp.async copies 4 bytes at least; narrower elements are loaded when they are needed.
template <typename T, typename Tile>
constexpr bool kHasRing = Tile::kWidth * sizeof(T) >= 4;

// For the sums of all teams, in the ring's memory.
template <typename T, typename Tile>
constexpr std::size_t kTeamSumsBytes =
    Tile::kTeam == kBackwardThreads<Tile>
        ? 0
        : 2 * sizeof(Accum<T>) * kBackwardThreads<Tile> * Tile::kPacks * Tile::kWidth;

// Until at most `stages` - 1 of this thread's groups of copies are under way.
__device__ __forceinline__ void WaitForOldest(int stages) {
  static_assert(kMaxStages == 3);
  if (stages == 3) {
    __pipeline_wait_prior(2);
  } else if (stages == 2) {
    __pipeline_wait_prior(1);
  } else {
    __pipeline_wait_prior(0);
  }
}

// How many rows a team adds to sums in registers before these are added to the slot's, so that
// rounding errors hardly grow with the number of rows. Double needs no limit.
constexpr std::int64_t kTurns = 128;

// Adds to sums that this thread alone uses, in shared or global memory.
template <int W, typename A>
__device__ __forceinline__ void AddTo(A* p, const A (&values)[W]) {
  constexpr int kStep = W == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    auto pack = *reinterpret_cast<const Pack<A, kStep>*>(p + j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] += values[j + k];
    StorePack(p + j, pack);
  }
}

template <int W, typename A>
__device__ __forceinline__ void StoreOrAdd(A* p, const A (&values)[W], bool store) {
  if (store) {
    StoreSums(p, values);
  } else {
    AddTo(p, values);
  }
}

template <typename T, typename Tile, bool kCentered>
__global__ void __launch_bounds__(kBackwardThreads<Tile>, kBackwardBlocks<Tile>)
    BackwardKernel(const LayerNormBwdArgs args, const SlotSums<Accum<T>> sums, int stages) {
  using A = Accum<T>;
  using Stage = RingStage<T, Tile>;
  constexpr int W = Tile::kWidth, kTeam = Tile::kTeam, kPacks = Tile::kPacks;
  constexpr int kThreads = kBackwardThreads<Tile>, kTeams = kThreads / kTeam;
  constexpr bool kRing = kHasRing<T, Tile>;
  constexpr int kValues = kCentered ? 3 : 1;
  constexpr bool kLimited = !std::is_same_v<A, double>;
  using Sum = TeamSum<A, kThreads, kTeam, kValues>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Stage* const ring = reinterpret_cast<Stage*>(dynamic_shared);
  Sum sum(storage);

  const int features = static_cast<int>(args.shape.features);
  const A inverse_n = A{1} / static_cast<A>(features);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kTeam, team = thread / kTeam;
  const auto column = [=](int i) { return (i * kTeam + lane) * W; };
  const std::int64_t rows = args.shape.rows;
  const std::int64_t step = sums.slots * kTeams;
  for (std::int64_t item = blockIdx.x; item < args.shape.groups * sums.slots; item += gridDim.x) {
    const std::int64_t group = item / sums.slots, slot = item % sums.slots;
    const T* const x_group = static_cast<const T*>(args.x) + group * rows * features;
    const T* const dy_group = static_cast<const T*>(args.dy) + group * rows * features;
    const A* const mean_group =
        kCentered ? static_cast<const A*>(args.mean) + group * rows : nullptr;
    const A* const rstd_group = static_cast<const A*>(args.rstd) + group * rows;
    const A* const scale_group = GroupRow<A>(args.scale, group);
    A scale[kPacks][W];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (column(i) < features) {
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column(i), A{1}, scale[i]);
      }
    }

    for (std::int64_t begin = slot * kTeams; begin < rows; begin += step * kTurns) {
      const std::int64_t end = kLimited ? min(rows, begin + step * kTurns) : rows;
      const bool first_turns = !kLimited || begin == slot * kTeams;
      A dscale[kPacks][W] = {}, dbias[kPacks][W] = {};
      const auto fetch = [&](int stage, std::int64_t row) {
        if constexpr (kRing) {
          if (row < end) {
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
              if (column(i) >= features) continue;
              const std::int64_t offset = row * features + column(i);
              __pipeline_memcpy_async(&ring[stage].x[i][thread], x_group + offset, W * sizeof(T));
              __pipeline_memcpy_async(&ring[stage].dy[i][thread], dy_group + offset, W * sizeof(T));
            }
            if (kCentered) {
              __pipeline_memcpy_async(&ring[stage].mean[thread], mean_group + row, sizeof(A));
            }
            __pipeline_memcpy_async(&ring[stage].rstd[thread], rstd_group + row, sizeof(A));
          }
          __pipeline_commit();  // also where there is nothing: groups are counted
        }
      };
      std::int64_t first = begin;  // row of the block's first team
      std::int64_t next_row = first + team;
      for (int stage = 0; stage < stages; ++stage, next_row += step) fetch(stage, next_row);

      // All of the block's teams make the same number of turns, as a warp may be shared by several.
      for (int stage = 0; first < end; first += step) {
        const std::int64_t row = first + team;
        const bool active = row < end;
        const int columns = active ? features : 0;
        Pack<T, W> x[kPacks], dy[kPacks];
        A mean = 0, rstd = 0;
        if constexpr (kRing) {
          WaitForOldest(stages);  // a thread sees its own copies: no barrier
          if (active) {
            if (kCentered) mean = ring[stage].mean[thread];
            rstd = ring[stage].rstd[thread];
          }
        } else if (active) {
          if (kCentered) mean = __ldg(mean_group + row);
          rstd = __ldg(rstd_group + row);
        }
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (column(i) >= columns) continue;
          if constexpr (kRing) {
            x[i] = ring[stage].x[i][thread];
            dy[i] = ring[stage].dy[i][thread];
          } else {
            x[i] = LoadPackOnce<W>(x_group + row * features + column(i));
            dy[i] = LoadPackOnce<W>(dy_group + row * features + column(i));
          }
        }

        A total[kValues] = {};  // of wdy * shifted, wdy, shifted
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (column(i) >= columns) continue;
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const A shifted = static_cast<A>(x[i].v[j]) - mean;
            const A wdy = static_cast<A>(dy[i].v[j]) * scale[i][j];
            total[0] += wdy * shifted;
            if constexpr (kCentered) {
              total[1] += wdy;
              total[2] += shifted;
            }
          }
        }
        sum(total);
        // The stage is free: this thread has read it, earlier in program order, and the compiler
        // keeps that order, as the asm of cp.async clobbers memory.
        fetch(stage, next_row);
        next_row += step;
        stage = stage + 1 == stages ? 0 : stage + 1;

        A delta = 0, mean_wdy = 0, sum_wdy_centered = total[0];
        if constexpr (kCentered) {
          // The saved mean is rounded: the mean of the differences from it is what it is off by.
          delta = total[2] * inverse_n;
          mean_wdy = total[1] * inverse_n;
          sum_wdy_centered -= delta * total[1];
        }
        const A mean_wdy_x_hat = sum_wdy_centered * rstd * inverse_n;
        T* const dx = static_cast<T*>(args.dx) + (group * rows + row) * features;
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (column(i) >= columns) continue;
          KeepPacked(x[i]);
          KeepPacked(dy[i]);
          Pack<T, W> out;
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const A dy_j = static_cast<A>(dy[i].v[j]);
            const A x_hat = ((static_cast<A>(x[i].v[j]) - mean) - delta) * rstd;
            dscale[i][j] += dy_j * x_hat;
            if constexpr (kCentered) dbias[i][j] += dy_j;
            out.v[j] = static_cast<T>(
                NormInputGrad(dy_j * scale[i][j], x_hat, mean_wdy, mean_wdy_x_hat, rstd));
          }
          StorePack(dx + column(i), out);
        }
      }

      const std::int64_t offset = sums.Offset(group, slot);
      if constexpr (kTeams == 1) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (column(i) >= features) continue;
          if (sums.dscale != nullptr) {
            StoreOrAdd(sums.dscale + offset + column(i), dscale[i], first_turns);
          }
          if (sums.dbias != nullptr) {
            StoreOrAdd(sums.dbias + offset + column(i), dbias[i], first_turns);
          }
        }
      } else {
        // [sum][team][element][lane], so that neighbouring threads access neighbouring words.
        constexpr int kTeamElements = kPacks * W * kTeam, kBlockElements = kTeams * kTeamElements;
        A* const shared = reinterpret_cast<A*>(dynamic_shared);
        __syncthreads();  // no thread reads the ring any more, whose memory is used from here on
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const int element = team * kTeamElements + (i * W + j) * kTeam + lane;
            shared[element] = dscale[i][j];
            shared[kBlockElements + element] = dbias[i][j];
          }
        }
        __syncthreads();  // all teams' sums are written
        for (int element = thread; element < kTeamElements; element += kThreads) {
          const int index = element / kTeam;
          const int feature = (index / W * kTeam + element % kTeam) * W + index % W;
          if (feature >= features) continue;
          A total_dscale[1] = {}, total_dbias[1] = {};
#pragma unroll
          for (int t = 0; t < kTeams; ++t) {
            total_dscale[0] += shared[t * kTeamElements + element];
            total_dbias[0] += shared[kBlockElements + t * kTeamElements + element];
          }
          if (sums.dscale != nullptr) {
            StoreOrAdd(sums.dscale + offset + feature, total_dscale, first_turns);
          }
          if (sums.dbias != nullptr) {
            StoreOrAdd(sums.dbias + offset + feature, total_dbias, first_turns);
          }
        }
        __syncthreads();  // all sums are read before the next rows come into the ring
      }
      if (!kLimited) break;  // without a second turn, the loop takes no registers
    }
  }
}

// A block per row, which reads it twice. Column sums are in shared memory where they fit, else in
// the partial row itself; either way each thread owns its columns, which needs no barrier.
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads, 1)
    BackwardStreamKernel(const LayerNormBwdArgs args, const SlotSums<Accum<T>> sums,
                         bool sums_in_shared) {
  using A = Accum<T>;
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = TeamSum<A, kStreamThreads, kStreamThreads, 3>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Sum sum(storage);

  const std::int64_t features = args.shape.features, rows = args.shape.rows;
  const A inverse_n = A{1} / static_cast<A>(features);
  const std::int64_t start = threadIdx.x * W;
  const std::int64_t turns = (features - start + kStep - 1) / kStep;
  for (std::int64_t item = blockIdx.x; item < args.shape.groups * sums.slots; item += gridDim.x) {
    const std::int64_t group = item / sums.slots, slot = item % sums.slots;
    const std::int64_t sums_offset = sums.Offset(group, slot);
    A* const slot_sums[2] = {sums.dscale == nullptr ? nullptr : sums.dscale + sums_offset,
                             sums.dbias == nullptr ? nullptr : sums.dbias + sums_offset};
    A* block_sums[2] = {slot_sums[0], slot_sums[1]};
    if (sums_in_shared) {
      A* const shared = reinterpret_cast<A*>(dynamic_shared);
      if (slot_sums[0] != nullptr) block_sums[0] = shared;
      if (slot_sums[1] != nullptr)
        block_sums[1] = slot_sums[0] == nullptr ? shared : shared + features;
    }
    const A zeros[W] = {};
    for (std::int64_t i = 0; i < turns; ++i) {
      for (A* const s : block_sums) {
        if (s != nullptr) StoreSums(s + start + i * kStep, zeros);
      }
    }
    const A* const scale_group = GroupRow<A>(args.scale, group);
    for (std::int64_t row = group * rows + slot; row < (group + 1) * rows; row += sums.slots) {
      const T* const x_row = static_cast<const T*>(args.x) + row * features;
      const T* const dy_row = static_cast<const T*>(args.dy) + row * features;
      T* const dx_row = static_cast<T*>(args.dx) + row * features;
      const A mean = args.centered ? __ldg(static_cast<const A*>(args.mean) + row) : A{0};
      const A rstd = __ldg(static_cast<const A*>(args.rstd) + row);
      A total[3] = {};  // of wdy * shifted, wdy, shifted
#pragma unroll 2
      for (std::int64_t i = 0; i < turns; ++i) {
        const std::int64_t column = start + i * kStep;
        const auto x = LoadPack<W>(x_row + column);
        const auto dy = LoadPack<W>(dy_row + column);
        A scale[W];
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column, A{1}, scale);
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A shifted = static_cast<A>(x.v[j]) - mean;
          const A wdy = static_cast<A>(dy.v[j]) * scale[j];
          total[0] += wdy * shifted;
          total[1] += wdy;
          total[2] += shifted;
        }
      }
      sum(total);
      const A delta = args.centered ? total[2] * inverse_n : A{0};
      const A mean_wdy = args.centered ? total[1] * inverse_n : A{0};
      const A mean_wdy_x_hat = (total[0] - delta * total[1]) * rstd * inverse_n;
      // Backwards: what was read last is still in the caches.
#pragma unroll 2
      for (std::int64_t i = turns - 1; i >= 0; --i) {
        const std::int64_t column = start + i * kStep;
        const auto x = LoadPack<W>(x_row + column);
        const auto dy_pack = LoadPack<W>(dy_row + column);
        A scale[W], dy[W], dy_x_hat[W];
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column, A{1}, scale);
        Pack<T, W> out;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          dy[j] = static_cast<A>(dy_pack.v[j]);
          const A x_hat = ((static_cast<A>(x.v[j]) - mean) - delta) * rstd;
          dy_x_hat[j] = dy[j] * x_hat;
          out.v[j] = static_cast<T>(
              NormInputGrad(dy[j] * scale[j], x_hat, mean_wdy, mean_wdy_x_hat, rstd));
        }
        StorePack(dx_row + column, out);
        if (block_sums[0] != nullptr) AddTo(block_sums[0] + column, dy_x_hat);
        if (block_sums[1] != nullptr) AddTo(block_sums[1] + column, dy);
      }
    }
    if (!sums_in_shared) continue;
    for (std::int64_t i = 0; i < turns; ++i) {
      const std::int64_t column = start + i * kStep;
      for (int s = 0; s < 2; ++s) {
        if (slot_sums[s] == nullptr) continue;
        A values[W] = {};
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] = block_sums[s][column + j];
        StoreSums(slot_sums[s] + column, values);
      }
    }
  }
}

}  // namespace
}  // namespace gradops
