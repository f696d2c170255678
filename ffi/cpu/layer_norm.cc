// Layer norm and RMS norm on CPU.
//
// Rows in parallel, each in two or three passes while it lies in the L1 or L2 cache: memory sees x
// read and y written (forward), dy and x read and dx written (backward; dy and y, from the output);
// a residual, its sum with x and the sum's cotangent are one array more each. 16-bit elements are
// widened in registers; parameters, which all rows share, once in a call. Sums run in independent
// lanes, which are combined in a fixed order.
//
// Mean: from differences to the row's first element, which is exact for constant rows, then
// rounded; y and the variance are of differences from that, corrected by what their own mean is off
// by. So neither a large mean nor an outlier in the first column is lost to rounding. Chan, Golub,
// LeVeque, Algorithms for computing the sample variance (1983). Tried: both in one pass, about the
// mean of 8 samples: bfloat16 0.38 to 0.33 ns an element, but float32 5.4 ulp off instead of 4.
//
// Column sums: every slice of a group's rows has a partial row; see cpu/column_sum.h.
#include "ops/layer_norm.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/math.h"
#include "cpu/column_sum.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/wide.h"

namespace gradops {
namespace {

// More slices of rows would add more traffic for partial sums than threads to use them.
constexpr std::int64_t kMaxSlices = 64;
constexpr std::int64_t kMaxChunks = 256;  // no chunk's first row is prefetched

// The parameters of a call, in the accumulation type.
template <typename A>
struct WideParams {
  WideParam<A, 1> scale;
  WideParam<A, 0> bias;
  WideParam<A, 0> residual_bias{};
  WideParam<A, 1> divisor{};  // scale, with infinity in the place of 0
};

// Columns [start, start + kBlock) of a row of [rows, columns]; zeros where there is none.
template <typename T>
const T* RowBlock(const void* rows, std::int64_t row, std::int64_t columns, std::int64_t start) {
  if (rows == nullptr) return kConstantBlock<T, 0>.data();
  return static_cast<const T*>(rows) + row * columns + start;
}

// Prefetched while a row is worked on, as memory would wait during a second pass over what lies in
// the caches: the next row, and where results go. ns an element of [8192, 2048] on one core of an
// EPYC, medians of seven, without and with: layer norm backward float32 1.13, 0.88, bfloat16 0.75,
// 0.60, forward 0.63, 0.59 and 0.43, 0.39. On a Xeon only a form with the next row in L1 was timed
// alone: float32 backward 1.6 to 1.9, 1.0. 16-bit stores ahead lose up to half (RMS norm, EPYC).
template <typename T>
inline constexpr bool kStoresAhead = sizeof(T) >= 4;
std::int64_t NextRow(const RowShape& shape, std::int64_t row) {
  return std::min(row + 1, shape.all_rows() - 1);
}

// What is normalised: x, or its sum with the residual, which is stored first.
template <typename T>
const T* RowToNormalise(const LayerNormFwdArgs& args, const WideParams<Accum<T>>& params,
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

// A bfloat16 row of so many columns is kept in float from pass to pass of layer norm: first x, then
// what it is off the mean. ns an element of [8, n] in the caches of an EPYC, without and with: n
// 768 0.43, 0.38, 2048 0.39, 0.35, 4096 0.38, 0.34, but 8192 0.40, 0.45; float16, which is widened
// as it is loaded, gains nothing.
constexpr std::int64_t kKeptColumns = 4096;

template <typename T, bool kCentered, bool kKept>
void ForwardRow(const LayerNormFwdArgs& args, const WideParams<Accum<T>>& params, std::int64_t row,
                bool streamed) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const auto n = static_cast<A>(std::max<std::int64_t>(1, features));
  const T* const x_row = RowToNormalise<T>(args, params, row);
  T* const y_row = static_cast<T*>(args.y) + row * features;
  const T* const next_row = static_cast<const T*>(args.x) + NextRow(args.shape, row) * features;

  // Where a pass finds a block, and leaves it for the next one.
  alignas(64) A kept[kKept ? kKeptColumns : 1];
  const auto wide = [&kept, x_row](std::int64_t start) {
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

  A mean = 0, delta = 0;   // delta: what the rounded mean is off by
  double sum_squares = 0;  // of blocks
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
      const T* const next_x = next_row + start;
      const auto sums = LaneSums<A, 2>(count, [=, keep = keep(start)](auto at) {
        at.PrefetchToL2(next_x);
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
  const A mean_square = static_cast<A>(sum_squares / n);
  const A rstd = InverseDeviation(VarianceOf(mean_square, delta), static_cast<A>(args.epsilon));

  const std::int64_t group = row / args.shape.rows;
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const auto* const x = wide(start);
    const T* const next_x = next_row + start;
    const A *const scale = params.scale(group, start), *const bias = params.bias(group, start);
    StoreForLanes<kLanes<A>>(y_row + start, count, streamed, [=](auto at) {
      if constexpr (kKept) {
        return (at(x) - delta) * rstd * at(scale) + at(bias);
      } else if constexpr (kCentered) {
        return ((at(x) - mean) - delta) * rstd * at(scale) + at(bias);
      } else {
        at.PrefetchToL2(next_x);
        return at(x) * rstd * at(scale) + at(bias);
      }
    });
  });
  if constexpr (kCentered) static_cast<A*>(args.mean)[row] = mean + delta;
  static_cast<A*>(args.rstd)[row] = rstd;
}

// What a row's x_hat is made of, block by block: x_hat = (shifted - delta) * factor. From the
// input, shifted is x - mean, and delta what the rounding of the saved mean left. From the output,
// it is x_hat itself; where scale is 0, that is lost, and 0.
template <typename T, bool kCentered, bool kFromOutput>
class Shifted {
 public:
  using A = Accum<T>;
  Shifted(const LayerNormBwdArgs& args, const WideParams<A>& params, std::int64_t row)
      : x_(static_cast<const T*>(args.x) + row * args.shape.features),
        params_(params),
        group_(row / args.shape.rows),
        mean_(kCentered && !kFromOutput ? static_cast<const A*>(args.mean)[row] : A{0}) {}
  // Of the block from column start on: a function of where a loop is.
  auto operator()(std::int64_t start) const {
    const T* const x = x_ + start;
    if constexpr (kFromOutput) {
      const A* const divisor = params_.divisor(group_, start);
      const A* const bias = params_.bias(group_, start);
      return [=](auto at) { return (at(x) - at(bias)) / at(divisor); };
    } else if constexpr (kCentered) {
      return [x, mean = mean_](auto at) { return at(x) - mean; };
    } else {
      return [x](auto at) { return at(x); };
    }
  }

 private:
  const T* x_;
  const WideParams<A>& params_;
  std::int64_t group_;
  A mean_;
};

// Column sums, or what has them: of dscale, dbias and dresidual_bias.
template <typename V>
using PerSum = std::array<V, 3>;

// Also adds the row's terms to the sums that are not null.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardRow(const LayerNormBwdArgs& args, const WideParams<Accum<T>>& params, std::int64_t row,
                 const PerSum<Accum<T>*>& sums, bool streamed) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const auto n = static_cast<A>(std::max<std::int64_t>(1, features));
  const std::int64_t group = row / args.shape.rows;
  const A rstd = static_cast<const A*>(args.rstd)[row];
  const A factor = kFromOutput ? A{1} : rstd;
  const Shifted<T, kCentered, kFromOutput> shifted_blocks(args, params, row);

  A sum_shifted = 0, sum_wdy = 0, sum_wdy_shifted = 0;
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const auto shifted = shifted_blocks(start);
    const T* const dy = RowBlock<T>(args.dy, row, features, start);
    const A* const scale = params.scale(group, start);
    constexpr int kSums = !kCentered ? 1 : kFromOutput ? 2 : 3;
    const T* const dx = static_cast<const T*>(args.dx) + row * features + start;
    const auto totals = LaneSums<A, kSums>(count, [=](auto at) {
      if (!streamed) at.PrefetchToStore(dx);
      const auto wdy = at(dy) * at(scale), x = shifted(at);
      if constexpr (kSums == 1) {
        return std::array{wdy * x};
      } else if constexpr (kSums == 2) {
        return std::array{wdy * x, wdy};
      } else {
        return std::array{wdy * x, wdy, x};
      }
    });
    sum_wdy_shifted += totals[0];
    if constexpr (kSums > 1) sum_wdy += totals[1];
    if constexpr (kSums > 2) sum_shifted += totals[2];
  });
  const A delta = sum_shifted / n;
  const A mean_wdy = sum_wdy / n;
  const A mean_wdy_x_hat = (sum_wdy_shifted - delta * sum_wdy) * factor / n;

  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const auto shifted = shifted_blocks(start);
    const T* const dy = RowBlock<T>(args.dy, row, features, start);
    const T* const dsum = RowBlock<T>(args.dsum, row, features, start);
    T* const dx = static_cast<T*>(args.dx) + row * features + start;
    const A* const scale = params.scale(group, start);
    const std::int64_t next_row = NextRow(args.shape, row);
    const T* const next_dy = RowBlock<T>(args.dy, next_row, features, start);
    const T* const next_x = RowBlock<T>(args.x, next_row, features, start);
    const auto block_of = [start](A* sum) { return sum == nullptr ? nullptr : sum + start; };
    A *const dscale = block_of(sums[0]), *const dbias = block_of(sums[1]);
    A* const dresidual_bias = block_of(sums[2]);
    StoreForLanes<kLanes<A>>(dx, count, streamed, [=](auto at) {
      at.PrefetchToL2(next_dy), at.PrefetchToL2(next_x);
      const auto dy_here = at(dy), x_hat = (shifted(at) - delta) * factor;
      const auto added = at(dsum);  // before dx is stored, which may lie there
      if (dscale != nullptr) at.Store(dscale, at(dscale) + dy_here * x_hat);
      if (dbias != nullptr) at.Store(dbias, at(dbias) + dy_here);
      const auto dx_here =
          NormInputGrad(dy_here * at(scale), x_hat, mean_wdy, mean_wdy_x_hat, rstd) + added;
      if (dresidual_bias != nullptr) at.Store(dresidual_bias, at(dresidual_bias) + dx_here);
      return dx_here;
    });
  });
}

template <typename T, bool kCentered>
ffi::Error Forward(const CpuContext& pool, const LayerNormFwdArgs& args) {
  const RowShape& shape = args.shape;
  const std::int64_t rows = shape.all_rows();
  const std::int64_t bytes_per_row = 2 * shape.features * ByteWidthOf(args.dtype);
  const std::int64_t chunk_rows = RowsPerChunk(rows, bytes_per_row, kMaxChunks);
  const WideParams<Accum<T>> params{.scale = {pool, args.scale, shape, args.scale_offset},
                                    .bias = {pool, args.bias, shape, 0},
                                    .residual_bias = {pool, args.residual_bias, shape, 0}};
  const bool streamed = IsStreamed(args.y, rows * bytes_per_row / 2, {args.x, args.residual});
  constexpr bool kKeeps = kCentered && std::is_same_v<T, BFloat16>;
  const auto forward_row = shape.features <= kKeptColumns ? ForwardRow<T, kCentered, kKeeps>
                                                          : ForwardRow<T, kCentered, false>;
  ParallelFor(pool, (rows + chunk_rows - 1) / chunk_rows, [&](std::int64_t chunk) {
    const std::int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
    for (std::int64_t row = chunk * chunk_rows; row < end; ++row) {
      forward_row(args, params, row, streamed);
    }
    if (streamed) StreamFence();
  });
  return ffi::Error::Success();
}

// Rows [first, end) of a group's, with their column sums in `sums`, where not null.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardSlice(const LayerNormBwdArgs& args, const WideParams<Accum<T>>& params,
                   std::int64_t first, std::int64_t end, const PerSum<Accum<T>*>& sums,
                   bool streamed) {
  const std::int64_t features = args.shape.features;
  const bool several_blocks = end - first > kRowsPerSum;
  PerSum<std::vector<double>> totals;
  for (std::size_t s = 0; s < sums.size(); ++s) {
    if (sums[s] == nullptr) continue;
    std::fill_n(sums[s], features, Accum<T>{0});
    if (several_blocks) totals[s].resize(static_cast<std::size_t>(features));
  }
  for (std::int64_t row = first; row < end;) {
    const std::int64_t block_end = std::min(end, row + kRowsPerSum);
    for (; row < block_end; ++row) {
      BackwardRow<T, kCentered, kFromOutput>(args, params, row, sums, streamed);
    }
    for (std::size_t s = 0; s < sums.size(); ++s) {
      if (!totals[s].empty()) MoveSums(sums[s], features, totals[s].data());
    }
  }
  for (std::size_t s = 0; s < sums.size(); ++s) {
    std::transform(totals[s].begin(), totals[s].end(), sums[s],
                   [](double total) { return static_cast<Accum<T>>(total); });
  }
}

template <typename T, bool kCentered, bool kFromOutput>
ffi::Error Backward(const CpuContext& pool, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  const std::int64_t groups = args.shape.groups, rows = args.shape.rows,
                     features = args.shape.features;
  if (groups * rows == 0) {
    SetZero(args.dscale, args.shape);
    SetZero(args.dbias, args.shape);
    SetZero(args.dresidual_bias, args.shape);
    return ffi::Error::Success();
  }
  WideParams<A> params{.scale = {pool, args.scale, args.shape, args.scale_offset},
                       .bias = {pool, args.bias, args.shape, 0}};
  if constexpr (kFromOutput) {
    constexpr A kInfinity = std::numeric_limits<A>::infinity();
    params.divisor = {pool, args.scale, args.shape, args.scale_offset, kInfinity};
  }
  const PerSum<WideGrad<A>> grads{WideGrad<A>(args.dscale, args.shape),
                                  WideGrad<A>(args.dbias, args.shape),
                                  WideGrad<A>(args.dresidual_bias, args.shape)};
  // Those that are wanted, and the number of each among them.
  PerSum<A*> results{};
  PerSum<std::int64_t> numbers{};
  std::int64_t sums = 0;
  for (std::size_t s = 0; s < grads.size(); ++s) {
    if (grads[s].data() == nullptr) continue;
    numbers[s] = sums;
    results[sums++] = grads[s].data();
  }

  // A slice is a part of a group's rows with column sums of its own; a chunk is one slice, or
  // several small ones. A group of one slice adds up in the results themselves.
  const std::int64_t bytes_per_row = 3 * features * ByteWidthOf(args.dtype);
  const std::int64_t max_slices = sums > 0 ? std::min(args.partial_rows, kMaxSlices) : kMaxChunks;
  const std::int64_t slice_rows = RowsPerChunk(rows, bytes_per_row, max_slices);
  const std::int64_t slices = (rows + slice_rows - 1) / slice_rows;
  const std::int64_t chunk_slices =
      RowsPerChunk(groups * slices, std::min(rows, slice_rows) * bytes_per_row, kMaxChunks);
  auto* const workspace = static_cast<A*>(args.workspace);
  const auto slice_sums = [&](std::int64_t group, std::int64_t slice, std::int64_t sum) {
    return slices == 1 ? results[sum] + group * features
                       : workspace + ((group * args.partial_rows + slice) * sums + sum) * features;
  };

  const bool streamed =
      IsStreamed(args.dx, groups * rows * bytes_per_row / 3, {args.dy, args.x, args.dsum});
  const std::int64_t chunks = (groups * slices + chunk_slices - 1) / chunk_slices;
  ParallelFor(pool, chunks, [&](std::int64_t chunk) {
    const std::int64_t end = std::min(groups * slices, (chunk + 1) * chunk_slices);
    for (std::int64_t i = chunk * chunk_slices; i < end; ++i) {
      const std::int64_t group = i / slices, slice = i % slices;
      PerSum<A*> own{};
      for (std::size_t s = 0; s < own.size(); ++s) {
        if (grads[s].data() != nullptr) own[s] = slice_sums(group, slice, numbers[s]);
      }
      BackwardSlice<T, kCentered, kFromOutput>(
          args, params, group * rows + slice * slice_rows,
          group * rows + std::min(rows, (slice + 1) * slice_rows), own, streamed);
    }
    if (streamed) StreamFence();
  });
  if (slices > 1 && sums > 0) {
    const std::int64_t tiles = (features + kBlock - 1) / kBlock;
    const std::int64_t items = groups * sums * tiles;
    const std::int64_t bytes_per_item =
        slices * std::min(kBlock, features) * static_cast<std::int64_t>(sizeof(A));
    const std::int64_t chunk_items = RowsPerChunk(items, bytes_per_item, kMaxChunks);
    ParallelFor(pool, (items + chunk_items - 1) / chunk_items, [&](std::int64_t chunk) {
      const std::int64_t end = std::min(items, (chunk + 1) * chunk_items);
      for (std::int64_t item = chunk * chunk_items; item < end; ++item) {
        const std::int64_t start = item % tiles * kBlock;
        const std::int64_t sum = item / tiles % sums, group = item / tiles / sums;
        AddPartialRows(slice_sums(group, 0, sum) + start, slices, sums * features,
                       std::min(kBlock, features - start), results[sum] + group * features + start);
      }
    });
  }
  ffi::Error error = ffi::Error::Success();
  for (std::size_t s = 0; s < grads.size() && error.success(); ++s) error = grads[s].Store(pool);
  return error;
}

}  // namespace

ffi::Error LayerNormFwd(CpuContext pool, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_fwd", args.dtype, [&]<typename T>() {
    return args.centered ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
  });
}

ffi::Error LayerNormBwd(CpuContext pool, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_bwd", args.dtype, [&]<typename T>() {
    if (args.from_output) {
      return args.centered ? Backward<T, true, true>(pool, args)
                           : Backward<T, false, true>(pool, args);
    }
    return args.centered ? Backward<T, true, false>(pool, args)
                         : Backward<T, false, false>(pool, args);
  });
}

}  // namespace gradops
