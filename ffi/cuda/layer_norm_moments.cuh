// The row that layer norm's forward kernel holds in registers, its mean and deviation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/layer_norm_rows.cuh"
#include "cuda/reciprocal.cuh"
#include "ops/layer_norm.h"

namespace gradops {
namespace {

// Means and sums of squares of what two or more parts of a row hold, merged as in Chan, Golub,
// LeVeque, Algorithms for computing the sample variance (1983), but all at once, relative to a mean
// that is near: in two passes over the parts, or to one part's. A part: n, mean, what that is off by,
// and the sum of squared differences from the right mean. Differences are in a unit that is at least
// the root of the row's number of columns (ForwardScalars): so squares overflow where the variance
// does, and not before.
template <typename A>
struct Part {
  A n, mean, delta, squares;  // the last two in that unit

  __device__ static Part Of(A n, const A* values) { return {n, values[0], values[1], values[2]}; }
  __device__ void CopyTo(A* values) const {
    values[0] = mean, values[1] = delta, values[2] = squares;
  }
  // What the part adds to n * (mean of all) relative to `pivot`. inverse_unit: 1 / the unit.
  __device__ A Offset(A pivot, A inverse_unit) const {
    return n * ((mean - pivot) * inverse_unit + delta);
  }
  // The same, and what it adds to squares, relative to the mean of all. n = 0 adds 0.
  __device__ void Moments(A total_mean, A inverse_unit, A& offset, A& total_squares) const {
    const A difference = (mean - total_mean) * inverse_unit + delta;
    offset = n * difference;
    total_squares = squares + offset * difference;
  }
};

// The part of a row that a thread of a forward kernel holds: kPacked, where registers are short, as
// the elements that were loaded, else as what they are worked on as.
template <typename T, int P, bool kPacked>
class HeldRow {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;

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
  // Gives columns that the row does not have a value, so that sums need not ask; if packed, one
  // that T has.
  template <typename RowPlace>
  __device__ __forceinline__ void Fill(const RowPlace& place, A value) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Whole(i)) continue;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if constexpr (kPacked) {
          if (!place.Has(i, j)) packed_[i].v[j] = static_cast<T>(value);
        } else {
          if (!place.Has(i, j)) values_[i][j] = value;
        }
      }
    }
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

// Calls fn(i, values, may_not_count) for each pack i; may_not_count, known to the compiler: whether
// it is one that some of the threads that count must not count.
template <typename T, int P, bool kPacked, Division kDivision, typename Fn>
__device__ __forceinline__ void ForHeld(const Place<T, P, kDivision, true>&,
                                        HeldRow<T, P, kPacked>& h, const Fn& fn) {
#pragma unroll
  for (int i = 0; i < P; ++i) {
    Accum<T> values[kVec<T>];
    h.Get(i, values);
    fn(i, values, kDivision == Division::kUneven && i == P - 1);
  }
}

// Framed: gives what columns lack that the row does not have, so that sums need not ask.
template <typename T, int P, bool kPacked, Division kDivision>
__device__ __forceinline__ void FillHeld(const Place<T, P, kDivision, true>& place,
                                         HeldRow<T, P, kPacked>& h, Accum<T> value) {
  if constexpr (Place<T, P, kDivision, true>::kFramed) {
    if (!place.AllWhole()) h.Fill(place, value);
  }
}

// What the kernel's arithmetic needs, as what it is done in.
template <typename A>
struct ForwardScalars {
  Epsilon<A> epsilon;
  A scale_offset;
  A inverse_features;  // 1 / features
  // Of differences from the mean, as far as they are squared: a power of two.
  A unit = 1, inverse_unit = 1;
  bool offset;  // whether scale_offset is to be added

  explicit ForwardScalars(const LayerNormFwdArgs& args)
      : epsilon(args.epsilon),
        scale_offset(static_cast<A>(args.scale_offset)),
        inverse_features(A{1} / static_cast<A>(std::max<std::int64_t>(1, args.shape.features))),
        offset(args.scale_offset != 0 && args.scale.data != nullptr) {
    while (unit * unit < static_cast<A>(args.shape.features)) unit *= 2;
    inverse_unit = 1 / unit;
  }
};

// How many columns parts of the caller's row have.
template <typename A>
struct RowCounts {
  A warp, inverse_warp;  // the caller's warp's, at least 1
  A of_lane;             // those of RowSum::WarpOfLane()
  A inverse_block;       // of all of the block's
  A of_block;            // those of RowSum::BlockOfLane(), where there are clusters

  template <typename RowPlace, typename Sum>
  __device__ RowCounts(const ForwardPlan& plan, const RowPlace& place, const Sum& sum,
                       std::int64_t features) {
    const auto columns_of = [&](int warp) {
      if (!plan.full) return place.WarpColumns(warp);
      constexpr int kColumns = RowPlace::kPacks * RowPlace::W;
      return warp * kWarp < plan.lanes ? kColumns * min(plan.lanes, kWarp) : 0;
    };
    warp = static_cast<A>(max(1, columns_of(place.warp_of_row())));
    inverse_warp = PreciseReciprocal(warp);
    if (plan.lanes > kWarp) {
      of_lane = static_cast<A>(columns_of(sum.WarpOfLane()));
      inverse_block = PreciseReciprocal(static_cast<A>(max(1, place.Columns())));
    }
    if constexpr (Sum::kClusters) {
      if (plan.cluster > 1) {
        const std::int64_t from = std::int64_t{sum.BlockOfLane()} * plan.share;
        const std::int64_t end = min(place.skip() + features, from + plan.share);
        const auto columns = end - max(std::int64_t{place.skip()}, from);
        of_block = static_cast<A>(max(std::int64_t{0}, columns));
      }
    }
  }
};

// Mean and deviation of the row that the caller's team holds: two passes in each warp, whose
// results are then merged, and those of a cluster's blocks likewise.
template <typename A>
struct Moments {
  A mean, delta;  // the mean is their sum: apart, they have more digits
  A rstd;
};

// How the mean of up to kMost elements comes from a sum over them: of differences from the first
// one, so that the mean of equal elements is exact; sums of equal 16-bit elements are exact
// themselves, and bfloat16's mean needs no more.
template <typename T, int kMost>
struct MeanRule {
  using A = Accum<T>;
  static constexpr bool kExact = sizeof(T) == 2;
  // Whether the mean of the differences from the mean, by which it is off, is to be looked at.
  static constexpr bool kHasDelta = !std::is_same_v<T, BFloat16>;
  // A sum of the largest bfloat16s would overflow.
  static constexpr A kFactor =
      std::is_same_v<T, BFloat16> ? A{1} / std::bit_ceil(static_cast<unsigned>(kMost)) : A{1};

  // total: of n elements times kFactor, or less `first`.
  __device__ __forceinline__ static A Mean(A first, A total, A n, A inverse_n) {
    const A quotient = total * inverse_n;  // made exact where it can be
    const A rest = (total - quotient * n) * inverse_n;
    return first + (quotient + rest) / kFactor;
  }
};

// Whether the sum of a row's squares may have overflowed for a row of the caller's warp, all of
// which calls it. Squares of float16s do not.
template <typename T, typename A>
__device__ __forceinline__ bool AnyOverflowed(A variance) {
  if constexpr (std::is_same_v<T, Half>) return false;
  return __any_sync(0xffffffffu, static_cast<int>(Overflowed(variance))) != 0;
}

template <typename T, int P, bool kPacked, Division kDivision, typename Sum>
__device__ __forceinline__ Moments<Accum<T>> RowMoments(int lanes, int cluster,
                                                        const Place<T, P, kDivision, true>& place,
                                                        HeldRow<T, P, kPacked>& h, Sum& sum,
                                                        const RowCounts<Accum<T>>& counts,
                                                        const ForwardScalars<Accum<T>>& scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  using Rule = MeanRule<T, kWarp * P * W>;
  constexpr bool kExact = Rule::kExact, kHasDelta = Rule::kHasDelta;

  A first = 0;
  if constexpr (!kExact) {
    constexpr bool kFramed = Place<T, P, kDivision, true>::kFramed;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int j = kFramed ? (W - 1) & max(0, place.low() - place.base) : 0;
#pragma unroll
    for (int k = 0; k < (kFramed ? W : 1); ++k) {
      if (k == j) first = h.GetOne(0, k);
    }
    const int team = lanes < kWarp ? lane & ~(lanes - 1) : 0;
    first = __shfl_sync(0xffffffffu, place.Lacks(0) ? A{0} : first, team);
  }
  // Sums of two halves, so that additions need not wait for each other.
  A halves[2] = {};
  FillHeld(place, h, first);
  ForHeld(place, h, [&](int i, const A(&values)[W], bool may_not_count) {
    A last = 0;
    A& sum_of = may_not_count ? last : halves[i % 2];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sum_of += kExact ? values[j] * Rule::kFactor : values[j] - first;
    }
    if (may_not_count && place.counts_last) halves[0] += last;
  });
  A total[1] = {halves[0] + halves[1]};
  if (!place.counts) total[0] = 0;
  sum.OverWarp(total);
  const A warp_mean = Rule::Mean(first, total[0], counts.warp, counts.inverse_warp);

  const A inverse_unit = scalars.inverse_unit, less = -warp_mean * inverse_unit;
  A parts[2][1 + kHasDelta] = {};  // sums of d^2 and d with d = (h - mean) / unit
  FillHeld(place, h, warp_mean);
  ForHeld(place, h, [&](int i, const A(&values)[W], bool may_not_count) {
    A last[1 + kHasDelta] = {};
    A(&sums)[1 + kHasDelta] = may_not_count ? last : parts[i % 2];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A difference = fma(values[j], inverse_unit, less);  // no more than h - mean takes
      sums[0] += difference * difference;
      if constexpr (kHasDelta) sums[kHasDelta] += difference;
    }
#pragma unroll
    for (int v = 0; v < 1 + kHasDelta; ++v) {
      if (may_not_count && place.counts_last) parts[0][v] += last[v];
    }
  });
  A squares[1 + kHasDelta];
#pragma unroll
  for (int v = 0; v < 1 + kHasDelta; ++v) squares[v] = parts[0][v] + parts[1][v];
  if (!place.counts) {
#pragma unroll
    for (A& value : squares) value = 0;
  }
  sum.OverWarp(squares);
  A delta = 0;
  if constexpr (kHasDelta) {
    delta = squares[kHasDelta] * counts.inverse_warp;
    squares[0] -= squares[kHasDelta] * delta;
  }
  Part<A> part{A{0}, warp_mean, delta, squares[0]};

  // Of parts in lanes k, to the whole in every lane.
  const auto merge = [&](A inverse_n, const auto& sum_over) {
    A mean = __shfl_sync(0xffffffffu, part.mean, 0);
    // Relative to the first part's mean alone, squares may lose as many units in the last place as
    // there are parts: elements of 16 bits do not notice.
    if constexpr (sizeof(T) > 2) {
      A offset[1] = {part.Offset(mean, inverse_unit)};
      sum_over(offset);
      mean += offset[0] * inverse_n * scalars.unit;
    }
    A moments[2];
    part.Moments(mean, inverse_unit, moments[0], moments[1]);
    sum_over(moments);
    const A whole_delta = moments[0] * inverse_n;
    part = {A{0}, mean, whole_delta, moments[1] - moments[0] * whole_delta};
  };
  A inverse_n = counts.inverse_warp;
  if (lanes > kWarp) {
    A values[3];
    part.CopyTo(values);
    sum.MeetWarps(values);
    inverse_n = counts.inverse_block;
    if (sum.WantsBlock()) {
      sum.OfWarps(values);
      part = Part<A>::Of(counts.of_lane, values);
      merge(inverse_n, [&](auto& v) { sum.OverWarps(v); });
    }
    sum.NextWarps();
  } else {
    __syncwarp();  // what was read from shared memory may be overwritten, as after RowSum's sums
  }
  if constexpr (Sum::kClusters) {
    if (cluster > 1) {
      A values[3];
      part.CopyTo(values);
      sum.OfBlocks(values);
      part = Part<A>::Of(counts.of_block, values);
      inverse_n = scalars.inverse_features;
      merge(inverse_n, [&](auto& v) { sum.OverBlocks(v); });
    }
  }
  const A variance = part.squares * inverse_n * scalars.unit * scalars.unit;
  return {part.mean, part.delta * scalars.unit,
          InverseDeviation(variance < 0 ? A{0} : variance, scalars.epsilon)};
}

// Replaces the mean square of a row where the sum of squares has overflowed. All threads of a row
// come here together: they have the same mean square, and the rows of a warp come with each other.
template <typename T, int P, bool kPacked, Division kDivision, typename Sum>
__device__ __forceinline__ void ReplaceOverflowed(const Place<T, P, kDivision, true>& place,
                                                  HeldRow<T, P, kPacked>& h, Sum& sum,
                                                  Accum<T> inverse_features,
                                                  Accum<T>& mean_square) {
  using A = Accum<T>;
  A squares[1] = {};
  ForHeld(place, h, [&](int, const A(&values)[kVec<T>], bool may_not_count) {
    A last = 0;
    A& sum_of = may_not_count ? last : squares[0];
#pragma unroll
    for (const A value : values) {
      const A part = value * kLargeUnit<A>;
      sum_of += part * part;
    }
    if (may_not_count && place.counts_last) squares[0] += last;
  });
  if (!place.counts) squares[0] = 0;
  sum(squares);
  const A large = squares[0] * inverse_features / kLargeUnit<A> / kLargeUnit<A>;
  if (Overflowed(mean_square)) mean_square = large;
}

// RMS norm's factor for the row that the caller's team holds.
template <typename T, int P, bool kPacked, Division kDivision, typename Sum>
__device__ __forceinline__ Accum<T> InverseRootMeanSquare(const Place<T, P, kDivision, true>& place,
                                                          HeldRow<T, P, kPacked>& h, Sum& sum,
                                                          const ForwardScalars<Accum<T>>& scalars) {
  using A = Accum<T>;
  A halves[2] = {};
  FillHeld(place, h, A{0});
  ForHeld(place, h, [&](int i, const A(&values)[kVec<T>], bool may_not_count) {
    A last = 0;
    A& sum_of = may_not_count ? last : halves[i % 2];
#pragma unroll
    for (const A value : values) sum_of += value * value;
    if (may_not_count && place.counts_last) halves[0] += last;
  });
  A squares[1] = {halves[0] + halves[1]};
  if (!place.counts) squares[0] = 0;
  sum(squares);
  A mean_square = squares[0] * scalars.inverse_features;
  if (AnyOverflowed<T>(mean_square)) {
    ReplaceOverflowed(place, h, sum, scalars.inverse_features, mean_square);
  }
  return InverseDeviation(mean_square, scalars.epsilon);
}

}  // namespace
}  // namespace gradops
