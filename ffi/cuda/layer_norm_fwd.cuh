// The forward kernel of layer_norm_fwd.cu, whose comment describes it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/layer_norm_moments.cuh"
#include "cuda/layer_norm_parameters.cuh"
#include "cuda/layer_norm_rows.cuh"
#include "cuda/layer_norm_sums.cuh"

namespace gradops {
namespace {

// What an array has of the 16 bytes in which it ends, at `p`, of which that is `count` elements.
template <typename T>
__device__ __forceinline__ uint4 LoadEnd(const T* p, int count) {
  constexpr int kBits = 8 * sizeof(T);
  std::uint64_t low = 0, high = 0;
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const std::uint64_t bits = std::uint64_t{reinterpret_cast<const Bits<T>*>(p)[j]}
                               << j * kBits % 64;
    low |= j * kBits < 64 ? bits : 0;
    high |= j * kBits < 64 ? 0 : bits;
  }
  return {static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high),
          static_cast<unsigned>(high >> 32)};
}

// ParamT: what scale and bias are arrays of; void: of anything.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
__global__ void __launch_bounds__(kDivision == Division::kFramed ? kFramedThreads : kForwardThreads,
                                  1)
    ForwardKernel(const __grid_constant__ LayerNormFwdArgs args,
                  const __grid_constant__ ForwardPlan plan,
                  const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  constexpr int kValues = kCentered ? 3 : 1;
  // The plans with few packs have no clusters, and smaller blocks.
  constexpr bool kClusters = P == 8 || kFramed;
  using Sum = RowSum<A, kValues, (kClusters ? kForwardThreads : kFewThreads) / kWarp,
                     kClusters ? kMaxCluster : 1>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(128) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  std::int64_t group = 0;
  if (groups > 1) {
    group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    if (group >= groups) return;  // its last plane may not be full
  }
  const int cluster = kClusters ? plan.cluster : 1;
  Place<T, P, kDivision, true> place(plan.lanes, cluster, plan.share, features);

  // The first of the team's rows: blocks have neighbouring ones, those of a step in turn.
  const int team = plan.lanes <= kWarp ? place.in_unit >> plan.log_lanes : 0;
  const unsigned block = cluster > 1 ? ClusterId() : blockIdx.x;
  const std::int64_t first_row =
      kFramed ? std::int64_t{block >> plan.log_blocks} * (plan.step * plan.rounds) +
                    static_cast<int>(block & ((1u << plan.log_blocks) - 1)) * plan.teams + team
              : std::int64_t{block} * plan.teams + team;
  if constexpr (kFramed) {
    const auto row = static_cast<std::uint64_t>(group * rows + first_row);
    place.SetSkip(static_cast<int>(row * static_cast<std::uint64_t>(features) % W));
  }
  // A team without a row does the last row's work once more; framed, nothing.
  std::int64_t row = group * rows + (kFramed ? first_row : min(first_row, rows - 1));
  const int own_rounds =
      kFramed ? static_cast<int>(
                    max(std::int64_t{0}, min(std::int64_t{plan.rounds},
                                             (rows - first_row + plan.step - 1) >> plan.log_step)))
              : 1;
  // Where the block's part of the row, or of its frame, begins, and how much further the next
  // one's.
  std::int64_t start = row * features + place.first_column - (kFramed ? place.skip() : 0);
  const std::int64_t stride = kFramed ? plan.step * features : 0;
  // Where the thread's packs of an array are; unknown to the compiler, so that it does not keep an
  // address of each of them from one array to the next.
  const auto packs_of = [&](const void* array, std::int64_t from) {
    auto p = reinterpret_cast<std::uintptr_t>(array) +
             (from + place.base) * static_cast<std::int64_t>(sizeof(T));
    asm volatile("" : "+l"(p));
    return reinterpret_cast<T*>(p);
  };
  // Packs from `first` on of the row that begins at `from`.
  const auto load = [&]<int N>(const void* array, std::int64_t from, int first, uint4(&packs)[N]) {
    const T* const p = packs_of(array, from);
    // Beyond the array's end, nothing may be read.
    const std::int64_t left = kFramed ? groups * rows * features - from : 0;
    if (!kFramed || left >= place.high() + W) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!place.Lacks(first + i)) packs[i] = LoadWordsOnce(p + place.Begin(first + i));
      }
    } else {
      const int whole = static_cast<int>(left) & ~(W - 1);
      const auto end = LoadEnd(p - place.base + whole, static_cast<int>(left) - whole);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        packs[i] = end;
        if (place.base + place.Begin(first + i) < whole) {
          packs[i] = LoadWordsOnce(p + place.Begin(first + i));
        }
      }
    }
  };
  uint4 next[P];
  if (!kFramed || own_rounds > 0) load(args.x, start, 0, next);
  // No block ends while another may send to it: each waits for all that is sent.
  Sum sum(plan.lanes, cluster, storage);
  if (cluster > 1) ClusterArrive();
  // So many columns at a time that registers suffice for their parameters. Those of wide rows do
  // not stay in the L1 cache: the next ones are always on their way.
  constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
  constexpr bool kAhead = P == 8 && sizeof(T) < 8 && !std::is_void_v<ParamT>;
  Parameters<T, ParamT, P, kDivision, kCentered, kSteps> parameters(args, group, place, shared);
#pragma unroll 1
  for (int round = 0; round < (kFramed ? plan.rounds : 1); ++round) {
    if constexpr (kFramed) {
      const bool vanishes = round >= own_rounds;
      if (__any_sync(0xffffffffu, vanishes)) place.Vanish(vanishes);
      place.Forget();
      parameters.Forget();
    }
    Pack<T, W> x[P];
#pragma unroll
    for (int i = 0; i < P; ++i) AsWords(x[i]) = next[i];
    if (kFramed && round + 1 < own_rounds) load(args.x, start + stride, 0, next);
    const auto store = [&]<bool kAll>(T* p, int i, const Pack<T, W>& pack) {
      if (kAll) {
        StorePackOnce(p + place.Begin(i), pack);
      } else {
        place.Store(p + place.Begin(i), pack, i);
      }
    };
    const auto add_residual = [&]<bool kBias>() {
      T* const p = packs_of(args.sum, start);
      // More would take too many registers.
      constexpr int kAtOnce = kBias && (P == 8 || std::is_void_v<ParamT>) ? 1 : kFramed ? 2 : 4;
#pragma unroll
      for (int first = 0; first < P; first += kAtOnce) {
        uint4 residual[kAtOnce];
        if (!kFramed || round < own_rounds) load(args.residual, start, first, residual);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          Pack<T, W> pack;
          AsWords(pack) = residual[i];
          A ours[W], others[W];
          Widen(x[first + i], ours);
          Widen(pack, others);
          if constexpr (kBias) AddResidualBias<ParamT>(args, group, place, first + i, others);
#pragma unroll
          for (int j = 0; j < W; ++j) ours[j] += others[j];
          x[first + i] = Narrow<T>(ours);
          store.template operator()<!kFramed>(p, first + i, x[first + i]);
        }
      }
    };
    if (args.residual_bias.data != nullptr) {
      add_residual.template operator()<true>();
    } else if (args.residual != nullptr) {
      add_residual.template operator()<false>();
    }
    HeldRow<T, P> h;
#pragma unroll
    for (int i = 0; i < P; ++i) h.Hold(i, x[i]);

    if (kAhead) parameters.Load(0);
    if (cluster > 1 && round == 0) ClusterWait();  // all barriers are initialised
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(plan, cluster, place, h, sum, features, scalars);
    } else {
      A squares[1] = {};
      Fill(place, h, A{0});
      ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
        A last = 0;
        A& sum_of = may_not_count ? last : squares[0];
#pragma unroll
        for (int j = 0; j < W; ++j) sum_of += values[j] * values[j];
        if (may_not_count && place.counts_last) squares[0] += last;
      });
      if (!place.counts) squares[0] = 0;
      sum(squares);
      moments.rstd = InverseDeviation(squares[0] * scalars.inverse_features, scalars.epsilon);
    }
    if (place.lane == 0 && place.first_column == 0 && (!kFramed || round < own_rounds)) {
      if constexpr (kCentered) {
        static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
      }
      static_cast<A*>(args.rstd)[row] = moments.rstd;
    }

    T* const y = packs_of(args.y, start);
    const A shift = -moments.delta * moments.rstd;
    const auto finish = [&]<bool kOffset>() {
      const A offset = kOffset ? scalars.scale_offset : A{0};
      place.ForPacks([&]<bool kAll>(int i) {
        A values[W];
        h.Get(i, values);
        if (parameters.Swaps()) SwapHalves(values);
#pragma unroll
        for (int step = i * kSteps; step < (i + 1) * kSteps; ++step) {
          if (!kAhead) {
            parameters.Load(step);
          } else if (step + 1 < P * kSteps) {
            parameters.Load(step + 1);
          }
#pragma unroll
          for (int k = 0; k < W / kSteps; ++k) {
            const int j = step % kSteps * (W / kSteps) + k;
            const A x_hat = kCentered ? (values[j] - moments.mean) * moments.rstd + shift
                                      : values[j] * moments.rstd;
            values[j] = x_hat * (parameters.Scale(step, k) + offset) + parameters.Bias(step, k);
          }
        }
        auto out = Narrow<T>(values);
        if (parameters.Swaps()) SwapHalves(reinterpret_cast<unsigned (&)[4]>(out));
        store.template operator()<kAll>(y, i, out);
      });
    };
    // A branch for all of it: one for each element costs more. Framed, and where there is no scale,
    // nothing is left to add.
    if (kFramed || !scalars.offset) {
      finish.template operator()<false>();
    } else {
      finish.template operator()<true>();
    }
    start += stride;
    row += plan.step;
  }
}

}  // namespace
}  // namespace gradops
