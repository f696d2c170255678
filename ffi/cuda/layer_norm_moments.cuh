// The row that layer norm's forward kernel holds in registers, its mean and deviation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/layer_norm_rows.cuh"
#include "cuda/reciprocal.cuh"
#include "ops/layer_norm.h"

namespace gradops {
namespace {

// Means and sums of squares of what two or more parts of a row hold, merged as in Chan, Golub,
// LeVeque, Algorithms for computing the sample variance (1983), but in two passes over the parts,
// so that no part's distance from the first one costs accuracy. A part: n, mean + delta, squares,
// the sum of squared differences from that.
template <typename A>
struct Part {
  A n, mean, delta, squares;

  __device__ static Part Of(A n, const A* values) { return {n, values[0], values[1], values[2]}; }
  __device__ void CopyTo(A* values) const {
    values[0] = mean, values[1] = delta, values[2] = squares;
  }
  // What the part adds to n * (mean of all) relative to `pivot`.
  __device__ A Offset(A pivot) const { return n * ((mean - pivot) + delta); }
  // The same, and what it adds to squares, relative to the mean of all. n = 0 adds 0.
  __device__ void Moments(A total_mean, A& offset, A& total_squares) const {
    const A difference = (mean - total_mean) + delta;
    offset = n * difference;
    total_squares = squares + offset * difference;
  }
};

// The part of a row that a thread of the forward kernel holds, as the elements that were loaded or,
// unless registers are short, as what they are worked on as.
template <typename T, int P>
class HeldRow {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;
  static constexpr bool kPacked = sizeof(T) == 2 && P == 8;

 public:
  __device__ __forceinline__ void Hold(int i, const Pack<T, W>& pack) {
    if constexpr (kPacked) {
      packed_[i] = pack;
    } else {
      Widen(pack, values_[i]);
      if constexpr (sizeof(T) == 2) KeepWide(values_[i]);
    }
  }
  // Pack i, for each pass over it anew.
  __device__ __forceinline__ void Get(int i, A (&values)[W]) {
    if constexpr (kPacked) {
      KeepPacked(packed_[i]);
      Widen(packed_[i], values);
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] = values_[i][j];
    }
  }
  __device__ __forceinline__ void SetOne(int i, int j, A value) {
    static_assert(!kPacked);
    values_[i][j] = value;
  }
  __device__ __forceinline__ A GetOne(int i, int j) const {
    if constexpr (kPacked) {
      return static_cast<A>(packed_[i].v[j]);
    } else {
      return values_[i][j];
    }
  }

 private:
  Pack<T, W> packed_[kPacked ? P : 1];
  A values_[kPacked ? 1 : P][W];
};

// Calls fn(values, may_not_count) for each pack; may_not_count, known to the compiler: whether it
// is one that some of the threads that count must not count.
template <typename T, int P, Division kDivision, typename Fn>
__device__ __forceinline__ void ForHeld(const Place<T, P, kDivision, true>& place, HeldRow<T, P>& h,
                                        const Fn& fn) {
  place.ForPacks([&]<bool kAll>(int i) {
    Accum<T> values[kVec<T>];
    h.Get(i, values);
    fn(values, kDivision == Division::kUneven && i == P - 1);
  });
}

// Framed: gives columns that threads hold, but the row does not have, a value.
template <typename T, int P, Division kDivision>
__device__ __forceinline__ void Fill(const Place<T, P, kDivision, true>& place, HeldRow<T, P>& h,
                                     Accum<T> value) {
  if constexpr (kDivision == Division::kFramed) {
    if (place.AllWhole()) return;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Whole(i)) continue;
#pragma unroll
      for (int j = 0; j < kVec<T>; ++j) {
        if (!place.Has(i, j)) h.SetOne(i, j, value);
      }
    }
  }
}

// What the kernel's arithmetic needs, as what it is done in.
template <typename A>
struct ForwardScalars {
  A epsilon, scale_offset;
  A inverse_features;  // 1 / features
  bool offset;         // whether scale_offset is to be added

  explicit ForwardScalars(const LayerNormFwdArgs& args)
      : epsilon(static_cast<A>(args.epsilon)),
        scale_offset(static_cast<A>(args.scale_offset)),
        inverse_features(A{1} / static_cast<A>(std::max<std::int64_t>(1, args.shape.features))),
        offset(args.scale_offset != 0 && args.scale.data != nullptr) {}
};

// Mean and deviation of the row that the caller's team holds: two passes in each warp, whose
// results are then merged, and those of a cluster's blocks likewise.
template <typename A>
struct Moments {
  A mean, delta;  // the mean is their sum: apart, they have more digits
  A rstd;
};

template <typename T, int P, Division kDivision, typename Sum>
__device__ __forceinline__ Moments<Accum<T>> RowMoments(const ForwardPlan& plan, int cluster,
                                                        const Place<T, P, kDivision, true>& place,
                                                        HeldRow<T, P>& h, Sum& sum,
                                                        std::int64_t features,
                                                        const ForwardScalars<Accum<T>>& scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  // From differences from the warp's first element, so that the mean of equal elements is exact;
  // sums of a warp's equal 16-bit elements are exact themselves, and bfloat16's mean needs no more.
  constexpr bool kExact = sizeof(T) == 2, kHasDelta = !std::is_same_v<T, BFloat16>;
  // A warp's sum of the largest bfloat16s would overflow.
  constexpr A kFactor = std::is_same_v<T, BFloat16> ? A{1} / (kWarp * P * W) : A{1};
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  // How many of the row's columns, in this block, a warp has.
  const auto columns_of = [&](int warp) {
    if (!plan.full) return place.WarpColumns(warp);
    return warp * kWarp < plan.lanes ? P * W * min(plan.lanes, kWarp) : 0;
  };
  const A n = static_cast<A>(max(1, columns_of(place.warp_of_row())));
  const A inverse_warp_n = PreciseReciprocal(n);

  A first = 0;
  if constexpr (!kExact) {
    constexpr bool kFramed = kDivision == Division::kFramed;
    const int j = kFramed ? (W - 1) & max(0, place.low() - place.base) : 0;
#pragma unroll
    for (int k = 0; k < (kFramed ? W : 1); ++k) {
      if (k == j) first = h.GetOne(0, k);
    }
    const int team = plan.lanes < kWarp ? lane & ~(plan.lanes - 1) : 0;
    first = __shfl_sync(0xffffffffu, place.Lacks(0) ? A{0} : first, team);
  }
  Fill(place, h, first);
  A total[1] = {};
  ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
    A last = 0;
    A& sum_of = may_not_count ? last : total[0];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sum_of += kExact ? values[j] * kFactor : values[j] - first;
    }
    if (may_not_count && place.counts_last) total[0] += last;
  });
  if (!place.counts) total[0] = 0;
  sum.OverWarp(total);
  const A quotient = total[0] * inverse_warp_n;  // made exact where it can be
  const A warp_mean = first + (quotient + (total[0] - quotient * n) * inverse_warp_n) / kFactor;

  Fill(place, h, warp_mean);
  A squares[1 + kHasDelta] = {};  // sums of d^2 and d with d = h - mean
  ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
    A last[1 + kHasDelta] = {};
    A(&sums)[1 + kHasDelta] = may_not_count ? last : squares;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A difference = values[j] - warp_mean;
      sums[0] += difference * difference;
      if constexpr (kHasDelta) sums[kHasDelta] += difference;
    }
#pragma unroll
    for (int v = 0; v < 1 + kHasDelta; ++v) {
      if (may_not_count && place.counts_last) squares[v] += last[v];
    }
  });
  if (!place.counts) {
#pragma unroll
    for (A& value : squares) value = 0;
  }
  sum.OverWarp(squares);
  A delta = 0;
  if constexpr (kHasDelta) {
    delta = squares[kHasDelta] * inverse_warp_n;
    squares[0] -= squares[kHasDelta] * delta;
  }
  Part<A> part{A{0}, warp_mean, delta, squares[0]};

  // Of parts in lanes k, to the whole in every lane.
  const auto merge = [&](A inverse_n, const auto& sum_over) {
    const A pivot = __shfl_sync(0xffffffffu, part.mean, 0);
    A offset[1] = {part.Offset(pivot)};
    sum_over(offset);
    const A whole_mean = pivot + offset[0] * inverse_n;
    A moments[2];
    part.Moments(whole_mean, moments[0], moments[1]);
    sum_over(moments);
    const A whole_delta = moments[0] * inverse_n;
    part = {A{0}, whole_mean, whole_delta, moments[1] - moments[0] * whole_delta};
  };
  A inverse_n = inverse_warp_n;
  if (plan.lanes > kWarp) {
    A values[3];
    part.CopyTo(values);
    sum.OfWarps(values);
    part = Part<A>::Of(static_cast<A>(columns_of(sum.WarpOfLane())), values);
    inverse_n = PreciseReciprocal(static_cast<A>(max(1, place.Columns())));
    merge(inverse_n, [&](auto& v) { sum.OverWarps(v); });
  } else {
    __syncwarp();  // what was read from shared memory may be overwritten, as after RowSum's sums
  }
  if constexpr (Sum::kClusters) {
    if (cluster > 1) {
      A values[3];
      part.CopyTo(values);
      sum.OfBlocks(values);
      const std::int64_t from = std::int64_t{sum.BlockOfLane()} * plan.share;
      const std::int64_t end = min(place.skip() + features, from + plan.share);
      const auto columns = end - max(std::int64_t{place.skip()}, from);
      part = Part<A>::Of(static_cast<A>(max(std::int64_t{0}, columns)), values);
      inverse_n = scalars.inverse_features;
      merge(inverse_n, [&](auto& v) { sum.OverBlocks(v); });
    }
  }
  const A variance = part.squares * inverse_n;
  return {part.mean, part.delta, InverseDeviation(variance < 0 ? A{0} : variance, scalars.epsilon)};
}

}  // namespace
}  // namespace gradops
