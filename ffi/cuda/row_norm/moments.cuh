// The row that layer norm's forward kernel holds in registers, and its mean and deviation.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/common/reciprocal.cuh"
#include "cuda/row_norm/place.cuh"
#include "ops/row_norm.h"

namespace gradops {
namespace {

// The mean and the sum of squares of one part of a row. Parts are merged as in Chan, Golub,
// LeVeque: Algorithms for computing the sample variance (1983), but all at once. The merge is
// relative to a nearby mean: of all parts (two sweeps over the parts), or of one part. `n`: the
// part's columns. `delta`: the error of `mean`. `squares`: the sum of squares of the differences
// from mean + delta. Differences are in a unit of at least the root of the number of columns
// (ForwardScalars). So a sum of squares overflows only if the variance does.
template <typename A>
struct PartialMoments {
  A n, mean, delta, squares;  // delta and squares: in that unit

  __device__ static PartialMoments Of(A n, const A* values) {
    return {n, values[0], values[1], values[2]};
  }
  __device__ void CopyTo(A* values) const {
    values[0] = mean, values[1] = delta, values[2] = squares;
  }
  // What the part adds to the sum of x - pivot over the row, in units. inverse_unit: 1 / unit.
  __device__ A Offset(A pivot, A inverse_unit) const {
    return n * ((mean - pivot) * inverse_unit + delta);
  }
  // What the part adds to the sums of x - total_mean and of its square. n = 0 adds 0.
  __device__ void Moments(A total_mean, A inverse_unit, A& offset, A& total_squares) const {
    const A difference = (mean - total_mean) * inverse_unit + delta;
    offset = n * difference;
    total_squares = squares + offset * difference;
  }
};

// The part of a row that a thread of a forward kernel holds in registers. kPacked, if registers are
// short: as loaded elements. Otherwise: widened to the accumulation type.
template <typename T, int P, bool kPacked>
class HeldRow {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;

 public:
  __device__ __forceinline__ void Hold(int i, const Vector<T, W>& vector) {
    if constexpr (kPacked) {
      packed_[i] = vector;
    } else {
      Widen(vector, values_[i]);
      if constexpr (sizeof(T) == 2) KeepWide(values_[i]);
    }
  }
  // Vector i, widened. If packed, each pass over the row widens it again.
  __device__ __forceinline__ void Get(int i, A (&values)[W]) {
    if constexpr (kPacked) {
      KeepPacked(packed_[i]);
      Widen(packed_[i], values);
    } else {
      for (int j = 0; j < W; ++j) values[j] = values_[i][j];
    }
  }
  // Sets columns that the row does not have to `value`, so that sums need no check. If packed, the
  // value is rounded to T.
  template <typename RowPlace>
  __device__ __forceinline__ void Fill(const RowPlace& place, A value) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Whole(i)) continue;
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
  Vector<T, W> packed_[kPacked ? P : 1];
  A values_[kPacked ? 1 : P][W];
};

// Calls add(value, sums) for each element that the thread adds to sums over the row, and returns
// the sums. A thread may have to leave out its last vector. Two sums of each kind, so that
// additions need not wait for each other.
template <int kSums, typename T, int P, bool kPacked, Layout kLayout, typename Add>
__device__ __forceinline__ void SumHeld(const Place<T, P, kLayout, true>& place,
                                        HeldRow<T, P, kPacked>& h, Accum<T> (&sums)[kSums],
                                        const Add& add) {
  using A = Accum<T>;
  A parts[2][kSums] = {};
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const bool may_not_own = kLayout == Layout::kPartial && i == P - 1;
    A values[kVec<T>], last[kSums] = {};
    h.Get(i, values);
    for (const A value : values) add(value, may_not_own ? last : parts[i % 2]);
    for (int s = 0; s < kSums; ++s) {
      if (may_not_own && place.owns_last) parts[0][s] += last[s];
    }
  }
  for (int s = 0; s < kSums; ++s) sums[s] = place.owns ? parts[0][s] + parts[1][s] : A{0};
}

// Masked: sets columns that the row does not have to `value`, so that sums need no check.
template <typename T, int P, bool kPacked, Layout kLayout>
__device__ __forceinline__ void FillHeld(const Place<T, P, kLayout, true>& place,
                                         HeldRow<T, P, kPacked>& h, Accum<T> value) {
  if constexpr (Place<T, P, kLayout, true>::kMasked) {
    if (!place.AllWhole()) h.Fill(place, value);
  }
}

// Scalars of the kernel's arithmetic, in its type.
template <typename A>
struct ForwardScalars {
  Epsilon<A> epsilon;
  A scale_offset;
  A inverse_features;  // 1 / features
  // The unit of what is squared: differences from the mean or, in RMS norm, elements. A power of
  // two. A sum of squares is multiplied by unit^2 / features last: neither step leaves the range.
  A unit = 1, inverse_unit = 1;
  bool offset;  // whether scale_offset is to be added

  explicit ForwardScalars(const RowNormFwdArgs& args)
      : epsilon(args.epsilon, args.strict),
        scale_offset(static_cast<A>(args.scale_offset)),
        inverse_features(A{1} / static_cast<A>(std::max<std::int64_t>(1, args.shape.features))),
        offset(args.scale_offset != 0 && args.scale.data != nullptr) {
    while (unit * unit < static_cast<A>(args.shape.features)) unit *= 2;
    inverse_unit = 1 / unit;
  }
};

// How many columns parts of the caller's row have.
template <typename A>
struct ColumnCounts {
  A warp, inverse_warp;  // Columns of the caller's warp, at least 1.
  A of_lane;             // Columns of warp RowSum::WarpOfLane().
  A inverse_block;       // 1 / columns of the block.
  A of_block;            // Columns of block RowSum::BlockOfLane(), if there are clusters.

  template <typename RowPlace, typename Sum>
  __device__ ColumnCounts(const ForwardSplit& split, const RowPlace& place, const Sum& sum,
                          std::int64_t features) {
    const auto columns_of = [&](int warp) {
      if (!split.full) return place.WarpColumns(warp);
      constexpr int kColumns = RowPlace::kVectors * RowPlace::W;
      return warp * kWarp < split.row_threads ? kColumns * min(split.row_threads, kWarp) : 0;
    };
    warp = static_cast<A>(max(1, columns_of(place.warp_of_row())));
    inverse_warp = PreciseReciprocal(warp);
    if (split.row_threads > kWarp) {
      of_lane = static_cast<A>(columns_of(sum.WarpOfLane()));
      inverse_block = PreciseReciprocal(static_cast<A>(max(1, place.Columns())));
    }
    if constexpr (Sum::kClusters) {
      if (split.cluster > 1) {
        const std::int64_t from = std::int64_t{sum.BlockOfLane()} * split.block_columns;
        const std::int64_t end = min(place.misalignment() + features, from + split.block_columns);
        const auto columns = end - max(std::int64_t{place.misalignment()}, from);
        of_block = static_cast<A>(max(std::int64_t{0}, columns));
      }
    }
  }
};

// Mean and 1 / deviation of the row that the caller's first_lane holds. Each warp makes two sweeps.
// Then the results of the warps are merged, and then the results of a cluster's blocks.
template <typename A>
struct Moments {
  A mean, delta;  // the row's mean is mean + delta: two numbers have more digits
  A rstd;
};

// Stores a row's statistics, if they are wanted.
template <bool kCentered, typename A>
__device__ __forceinline__ void StoreStatistics(const RowNormFwdArgs& args, std::int64_t row,
                                                const Moments<A>& moments) {
  if (args.rstd == nullptr) return;
  if constexpr (kCentered) static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
  static_cast<A*>(args.rstd)[row] = moments.rstd;
}

// How the mean of up to kMost elements follows from a sum. The sum is of differences from the first
// element, so that the mean of equal elements is exact. Sums of equal 16-bit elements are exact
// without that. bfloat16's mean needs no delta.
template <typename T, int kMost>
struct MeanRule {
  using A = Accum<T>;
  static constexpr bool kExact = sizeof(T) == 2;
  // Whether to compute delta, the mean of the differences from the mean: the mean's error.
  static constexpr bool kHasDelta = !std::is_same_v<T, BFloat16>;
  // Without this factor, a sum of the largest bfloat16s would overflow.
  static constexpr A kFactor =
      std::is_same_v<T, BFloat16> ? A{1} / std::bit_ceil(static_cast<unsigned>(kMost)) : A{1};

  // total: the sum of n elements times kFactor, or of n differences from `first`.
  __device__ __forceinline__ static A Mean(A first, A total, A n, A inverse_n) {
    const A quotient = total * inverse_n;  // `rest` corrects its rounding
    const A rest = (total - quotient * n) * inverse_n;
    return first + (quotient + rest) / kFactor;
  }
};

template <typename T, int P, bool kPacked, Layout kLayout, typename Sum>
__device__ __forceinline__ Moments<Accum<T>> RowMoments(int row_threads, int cluster,
                                                        const Place<T, P, kLayout, true>& place,
                                                        HeldRow<T, P, kPacked>& h, Sum& sum,
                                                        const ColumnCounts<Accum<T>>& counts,
                                                        const ForwardScalars<Accum<T>>& scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  using Rule = MeanRule<T, kWarp * P * W>;
  constexpr bool kExact = Rule::kExact, kHasDelta = Rule::kHasDelta;

  A first = 0;
  if constexpr (!kExact) {
    constexpr bool kMasked = Place<T, P, kLayout, true>::kMasked;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int j = kMasked ? (W - 1) & max(0, place.low() - place.base) : 0;
#pragma unroll
    for (int k = 0; k < (kMasked ? W : 1); ++k) {
      if (k == j) first = h.GetOne(0, k);
    }
    const int first_lane = row_threads < kWarp ? lane & ~(row_threads - 1) : 0;
    first = __shfl_sync(0xffffffffu, place.Lacks(0) ? A{0} : first, first_lane);
  }
  A total[1];
  FillHeld(place, h, first);
  SumHeld(place, h, total,
          [&](A x, A(&sums)[1]) { sums[0] += kExact ? x * Rule::kFactor : x - first; });
  sum.OverWarp(total);
  const A warp_mean = Rule::Mean(first, total[0], counts.warp, counts.inverse_warp);

  const A inverse_unit = scalars.inverse_unit, less = -warp_mean * inverse_unit;
  A squares[1 + kHasDelta];  // sums of d^2 and d with d = (h - mean) / unit
  FillHeld(place, h, warp_mean);
  SumHeld(place, h, squares, [&](A x, A(&sums)[1 + kHasDelta]) {
    const A difference = fma(x, inverse_unit, less);  // one instruction, as h - mean
    sums[0] += difference * difference;
    if constexpr (kHasDelta) sums[kHasDelta] += difference;
  });
  sum.OverWarp(squares);
  A delta = 0;
  if constexpr (kHasDelta) {
    delta = squares[kHasDelta] * counts.inverse_warp;
    squares[0] -= squares[kHasDelta] * delta;
  }
  PartialMoments<A> part{A{0}, warp_mean, delta, squares[0]};

  // Merges the lanes' parts. Each lane gets the moments of all parts.
  const auto merge = [&](A inverse_n, const auto& sum_over) {
    A mean = __shfl_sync(0xffffffffu, part.mean, 0);
    // Without this, means are relative to the first part's mean. Squares may then lose a unit in
    // the last place for each part: 16-bit elements do not notice.
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
  if (row_threads > kWarp) {
    A values[3];
    part.CopyTo(values);
    sum.MeetWarps(values);
    inverse_n = counts.inverse_block;
    if (sum.NeedsBlock()) {
      sum.OfWarps(values);
      part = PartialMoments<A>::Of(counts.of_lane, values);
      merge(inverse_n, [&](auto& v) { sum.OverWarps(v); });
    }
    sum.NextWarps();
  } else {
    __syncwarp();  // reads of shared memory end before later writes, as in RowSum
  }
  if constexpr (Sum::kClusters) {
    if (cluster > 1) {
      A values[3];
      part.CopyTo(values);
      sum.OfBlocks(values);
      part = PartialMoments<A>::Of(counts.of_block, values);
      inverse_n = scalars.inverse_features;
      merge(inverse_n, [&](auto& v) { sum.OverBlocks(v); });
    }
  }
  const A variance = part.squares * (inverse_n * scalars.unit * scalars.unit);
  return {part.mean, part.delta * scalars.unit,
          InverseDeviation(variance < 0 ? A{0} : variance, scalars.epsilon)};
}

// RMS norm's factor for the row that the caller's first_lane holds: 1 / root mean square.
template <typename T, int P, bool kPacked, Layout kLayout, typename Sum>
__device__ __forceinline__ Accum<T> InverseRootMeanSquare(const Place<T, P, kLayout, true>& place,
                                                          HeldRow<T, P, kPacked>& h, Sum& sum,
                                                          const ForwardScalars<Accum<T>>& scalars) {
  using A = Accum<T>;
  A squares[1];
  FillHeld(place, h, A{0});
  SumHeld(place, h, squares, [&](A x, A(&sums)[1]) {
    const A part = x * scalars.inverse_unit;
    sums[0] += part * part;
  });
  sum(squares);
  const A mean_square = squares[0] * (scalars.inverse_features * scalars.unit * scalars.unit);
  return InverseDeviation(mean_square, scalars.epsilon);
}

}  // namespace
}  // namespace gradops
