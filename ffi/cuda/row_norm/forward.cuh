// The kernel of forward.cu for rows that fit in one block. A block has one row, or several
// narrow rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/parameters.cuh"
#include "cuda/row_norm/rows.cuh"
#include "cuda/row_norm/sums.cuh"

namespace gradops {
namespace {

// ParamT: the type of scale and bias; void: any type, or no parameter.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
__global__ void __launch_bounds__(kForwardThreads, 1)
    ForwardKernel(const __grid_constant__ RowNormFwdArgs args,
                  const __grid_constant__ ForwardPlan plan,
                  const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  // Plans with few packs have smaller blocks.
  using Sum =
      RowSum<A, kCentered ? 3 : 1, (P == 8 ? kForwardThreads : kFewThreads) / kWarp, 1, true>;
  __shared__ typename Sum::Storage storage;

  const auto [groups, rows, features] = args.shape;
  std::int64_t group = 0;
  if (groups > 1) {
    group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    if (group >= groups) return;  // the grid's last plane may not be full
  }
  const Place<T, P, kDivision, true> place(plan.lanes, 1, plan.share, features);
  const int team = plan.lanes <= kWarp ? place.in_unit >> plan.log_lanes : 0;
  // A team without a row repeats the work of the last row.
  const std::int64_t row =
      group * rows + min(std::int64_t{blockIdx.x} * plan.teams + team, rows - 1);
  const std::int64_t start = row * features;
  // The address of the thread's packs in an array. The asm hides its value from the compiler, which
  // would otherwise keep an address of each pack from one array to the next.
  const auto packs_of = [&](const void* array) {
    auto p = reinterpret_cast<std::uintptr_t>(array) +
             (start + place.base) * static_cast<std::int64_t>(sizeof(T));
    asm volatile("" : "+l"(p));
    return reinterpret_cast<T*>(p);
  };
  Pack<T, W> x[P];
  {
    const T* const p = packs_of(args.x);
#pragma unroll
    for (int i = 0; i < P; ++i) AsWords(x[i]) = LoadWordsOnce(p + place.Begin(i));
  }
  Sum sum(plan.lanes, 1, storage);
  // `kSteps`: a pack is done in steps, so that registers suffice for the parameters. `kAhead`:
  // parameters of wide rows do not stay in the L1 cache, so the next ones are always under way.
  constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
  constexpr bool kAhead = P == 8 && sizeof(T) < 8 && !std::is_void_v<ParamT>;
  Parameters<T, ParamT, P, kDivision, kCentered, kSteps> parameters(args, group, place);
  const auto add_residual = [&]<bool kBias>() {
    T* const p = packs_of(args.sum);
    // More packs at once would take too many registers.
    constexpr int kAtOnce = kBias && (P == 8 || std::is_void_v<ParamT>) ? 1 : P == 3 ? 3 : 4;
#pragma unroll
    for (int first = 0; first < P; first += kAtOnce) {
      Pack<T, W> residual[kAtOnce];
      const T* const from = packs_of(args.residual);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        AsWords(residual[i]) = LoadWordsOnce(from + place.Begin(first + i));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        A ours[W], others[W];
        Widen(x[first + i], ours);
        Widen(residual[i], others);
        if constexpr (kBias) AddResidualBias<ParamT>(args, group, place, first + i, others);
#pragma unroll
        for (int j = 0; j < W; ++j) ours[j] += others[j];
        x[first + i] = Narrow<T>(ours);
        StorePackOnce(p + place.Begin(first + i), x[first + i]);
      }
    }
  };
  if (args.residual_bias.data != nullptr) {
    add_residual.template operator()<true>();
  } else if (args.residual != nullptr) {
    add_residual.template operator()<false>();
  }
  HeldRow<T, P, sizeof(T) == 2 && P == 8> h;
#pragma unroll
  for (int i = 0; i < P; ++i) h.Hold(i, x[i]);

  if (kAhead) parameters.Load(0);
  Moments<A> moments{};
  if constexpr (kCentered) {
    const RowCounts<A> counts(plan, place, sum, features);
    moments = RowMoments(plan.lanes, 1, place, h, sum, counts, scalars);
  } else {
    moments.rstd = InverseRootMeanSquare(place, h, sum, scalars);
  }
  if (place.lane == 0 && args.rstd != nullptr) {
    if constexpr (kCentered) static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
    static_cast<A*>(args.rstd)[row] = moments.rstd;
  }

  T* const y = packs_of(args.y);
  const A shift = -moments.delta * moments.rstd;
  const auto finish = [&]<bool kOffset>() {
    const A offset = kOffset ? scalars.scale_offset : A{0};
#pragma unroll
    for (int i = 0; i < P; ++i) {
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
      StorePackOnce(y + place.Begin(i), out);
    }
  };
  // One branch for the whole row costs less than a branch for each element. Without a scale, the
  // offset is not added.
  if (!scalars.offset) {
    finish.template operator()<false>();
  } else {
    finish.template operator()<true>();
  }
}

}  // namespace
}  // namespace gradops
