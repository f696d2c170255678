// Layer norm and RMS norm on the CPU, forward.
//
// Rows are computed in parallel, each in two or three passes while it lies in the L1 or L2 cache.
// Memory traffic: x is read and y is written. A residual and its sum with x are one more array
// each. 16-bit elements are widened in registers. Parameters, which all rows share, are widened
// once per call. Sums run in independent lanes, which are combined in a fixed order.
//
// The mean comes from differences to the row's first element. This is exact for constant rows. The
// mean is then rounded. The variance and y use differences from the rounded mean, corrected by its
// error. So neither a large mean nor an outlier in the first column is lost to rounding. Source:
// Chan, Golub, LeVeque, Algorithms for computing the sample variance (1983). Tried: mean and
// variance in one pass, about the mean of 8 samples. bfloat16 went from 0.38 to 0.33 ns per
// element. But float32 was off by 5.4 ulp instead of 4.
#include <algorithm>
#include <array>
#include <type_traits>

#include "common/math.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/row_norm_narrow_fwd.h"
#include "cpu/row_norm_rows.h"
#include "ops/row_norm.h"

namespace gradops {
namespace {

// The row that is normalised: x, or its sum with the residual. The sum is stored first.
template <typename T>
const T* RowToNormalise(const RowNormFwdArgs& args, const WideParams<Accum<T>>& params,
                        std::int64_t row) {
  const std::int64_t features = args.shape.features, offset = row * features;
  const T* const x = static_cast<const T*>(args.x) + offset;
  if (args.residual == nullptr) return x;
  const T* const residual = static_cast<const T*>(args.residual) + offset;
  T* const sum = static_cast<T*>(args.sum) + offset;
  if (args.residual_bias.data == nullptr) {
    ForLanes<kLanes<Accum<T>>>(features, [=](auto at) { at.Store(sum, at(x) + at(residual)); });
    return sum;
  }
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const T* const x_block = x + start;
    const T* const residual_block = residual + start;
    T* const sum_block = sum + start;
    const Accum<T>* const bias = params.residual_bias(row / args.shape.rows, start);
    ForLanes<kLanes<Accum<T>>>(count, [=](auto at) {
      at.Store(sum_block, at(x_block) + (at(residual_block) + at(bias)));
    });
  });
  return sum;
}

// The mean of (x - mean)^2 over a row, if the sum of the squares has overflowed.
template <typename T>
Accum<T> LargeMeanSquare(const T* x_row, std::int64_t features, Accum<T> mean) {
  using A = Accum<T>;
  double sum = 0;  // of all blocks
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const T* const x = x_row + start;
    sum += LaneSums<A, 1>(count, [=](auto at) {
      const auto part = (at(x) - mean) * kLargeUnit<A>;
      return std::array{part * part};
    })[0];
  });
  const auto of_parts = static_cast<A>(sum / static_cast<double>(features));
  return of_parts / kLargeUnit<A> / kLargeUnit<A>;
}

// A bfloat16 row of up to this many columns is kept in float from pass to pass of layer norm: first
// x, then x - mean. Nanoseconds per element of [8, n] in the caches of an EPYC:
//   n          768   2048  4096  8192
//   not kept   0.43  0.39  0.38  0.40
//   kept       0.38  0.35  0.34  0.45
//
// float16 gains nothing: it is widened as it is loaded. Two rows at a time were tried, so that sums
// of one row fill the latency of the next row. Two cores of a Zen 5 then took 2.6, not 1.4 ms for
// [16384, 1024].
constexpr std::int64_t kKeptColumns = 4096;

template <typename T, bool kCentered, bool kKept>
void ForwardRow(const RowNormFwdArgs& args, const WideParams<Accum<T>>& params, std::int64_t row,
                bool streamed) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const auto n = static_cast<A>(std::max<std::int64_t>(1, features));
  const T* const x_row = RowToNormalise<T>(args, params, row);
  T* const y_row = static_cast<T*>(args.y) + row * features;
  const T* const row_ahead =
      static_cast<const T*>(args.x) + RowAhead<T>(args.shape, row) * features;

  // The row ahead is prefetched in the second pass, or in the last one. Kept rows with AVX-512 have
  // a very short second pass, which would wait for its own prefetches. Milliseconds on two cores of
  // a Zen 5:
  //                            second pass  last pass
  //   bfloat16 [21845, 768]    2.1          1.65
  //   bfloat16 [8192, 2048]    1.6          1.45
  //   bfloat16 [5461, 3072]    2.3          1.7
  //   bfloat16 [4096, 4096]    2.15         1.9
  //   float32 [4096, 4096]     2.85         3.1
  //
  // With AVX2, and in float16, both take equally long.
  constexpr bool kInLastPass = !kCentered || (kKept && lanes::kWidth<A> == kLanes<A>);
  // Where a pass finds a block (wide), and leaves it for the next pass (keep).
  alignas(64) A kept[kKept ? kKeptColumns : 1];
  const auto wide = [&](std::int64_t start) {
    if constexpr (kKept) {
      return static_cast<const A*>(kept + start);
    } else {
      return x_row + start;
    }
  };
  const auto keep = [&kept](std::int64_t start) {
    return [to = kept + (kKept ? start : 0)](auto at, const auto& value) {
      if constexpr (kKept) at.Store(to, value);
      return value;
    };
  };

  A mean = 0, delta = 0;   // delta: the error of the rounded mean
  double sum_squares = 0;  // of all blocks
  if constexpr (kCentered) {
    const A shift = features > 0 ? static_cast<A>(x_row[0]) : A{0};
    A sum_shifted = 0;
    ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
      const T *const x = x_row + start, *const y = y_row + start;
      sum_shifted += LaneSums<A, 1>(count, [=, keep = keep(start)](auto at) {
        if (kStoresAhead<T> && !streamed) at.PrefetchToStore(y);
        return std::array{keep(at, at(x)) - shift};
      })[0];
    });
    mean = shift + sum_shifted / n;
    ForBlocks(features, [&, mean](std::int64_t start, std::int64_t count) {
      const auto* const x = wide(start);
      const T* const x_ahead = row_ahead + start;
      const auto sums = LaneSums<A, 2>(count, [=, keep = keep(start)](auto at) {
        if (!kInLastPass) at.PrefetchToL2(x_ahead);
        const auto centered = keep(at, at(x) - mean);
        return std::array{centered, centered * centered};
      });
      delta += sums[0], sum_squares += sums[1];
    });
    delta /= n;
  } else {
    ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
      const T *const x = x_row + start, *const y = y_row + start;
      sum_squares += LaneSums<A, 1>(count, [=](auto at) {
        if (kStoresAhead<T> && !streamed) at.PrefetchToStore(y);
        return std::array{at(x) * at(x)};
      })[0];
    });
  }
  A variance = VarianceOf(static_cast<A>(sum_squares / n), delta);
  if (Overflowed(variance)) {
    variance = VarianceOf(LargeMeanSquare(x_row, features, mean), delta);
  }
  const A rstd = InverseDeviation(variance, Epsilon<A>(args.epsilon, args.strict));

  const std::int64_t group = row / args.shape.rows;
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const auto* const x = wide(start);
    const T* const x_ahead = row_ahead + start;
    const A *const scale = params.scale(group, start), *const bias = params.bias(group, start);
    StoreForLanes<kLanes<A>>(y_row + start, count, streamed, [=](auto at) {
      if (kInLastPass) at.PrefetchToL2(x_ahead);
      if constexpr (kKept) {
        return (at(x) - delta) * rstd * at(scale) + at(bias);
      } else if constexpr (kCentered) {
        return ((at(x) - mean) - delta) * rstd * at(scale) + at(bias);
      } else {
        return at(x) * rstd * at(scale) + at(bias);
      }
    });
  });
  if (args.rstd != nullptr) {
    if constexpr (kCentered) static_cast<A*>(args.mean)[row] = mean + delta;
    static_cast<A*>(args.rstd)[row] = rstd;
  }
}

template <typename T, bool kCentered>
ffi::Error Forward(const CpuContext& pool, const RowNormFwdArgs& args) {
  const RowShape& shape = args.shape;
  const std::int64_t rows = shape.all_rows();
  const std::int64_t bytes_per_row = 2 * shape.features * ByteWidthOf(args.dtype);
  const bool is_narrow = IsNarrow<T>(shape.features);
  // Rows side by side store whole cache lines of results.
  const std::int64_t multiple = is_narrow ? 64 : 1;
  const std::int64_t chunk_rows =
      (RowsPerChunk(rows, bytes_per_row, kMaxRowChunks) + multiple - 1) / multiple * multiple;
  const WideParams<Accum<T>> params{.scale = {pool, args.scale, shape, args.scale_offset},
                                    .bias = {pool, args.bias, shape, 0},
                                    .residual_bias = {pool, args.residual_bias, shape, 0}};
  const bool streamed = PrepareResult(args.y, rows * bytes_per_row / 2, {args.x, args.residual});
  // The sum is read again. So it does not go past the caches.
  PrepareResult(args.sum, rows * bytes_per_row / 2, {args.x, args.residual});
  // If rows are short, the statistics are as large as y.
  for (void* const statistic : {args.mean, args.rstd}) {
    if (statistic != nullptr) {
      PrepareResult(statistic, rows * std::int64_t{sizeof(Accum<T>)}, {});
    }
  }
  constexpr bool kKeeps = kCentered && std::is_same_v<T, BFloat16>;
  const auto forward_row = shape.features <= kKeptColumns ? ForwardRow<T, kCentered, kKeeps>
                                                          : ForwardRow<T, kCentered, false>;
  ParallelFor(pool, (rows + chunk_rows - 1) / chunk_rows, [&](std::int64_t chunk) {
    const std::int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
    const auto one = [&](std::int64_t row) { forward_row(args, params, row, streamed); };
    if (is_narrow) {
      ForwardSide<T, kCentered>(args, params, chunk * chunk_rows, end, streamed, one);
    } else {
      for (std::int64_t row = chunk * chunk_rows; row < end; ++row) one(row);
    }
    if (streamed) StreamFence();
  });
  return ffi::Error::Success();
}

}  // namespace

ffi::Error RowNormFwd(CpuContext pool, const RowNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "row_norm_fwd", args.dtype, [&]<typename T>() {
    return args.centered ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
  });
}

}  // namespace gradops
