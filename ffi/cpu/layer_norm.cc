// Layer norm and RMS norm on CPU.
//
// Rows in parallel, each in two or three passes while it lies in the L1 or L2 cache: memory sees x
// read and y written (forward), dy and x read and dx written (backward). 16-bit rows are widened
// block by block to the stack. Sums run in kLanes independent lanes, which compilers vectorise
// without -ffast-math, and are combined in a fixed order.
//
// Mean: from differences to the row's first element, which is exact for constant rows, then
// rounded; y and the variance are of differences from that, corrected by what their own mean is off
// by. So neither a large mean nor an outlier in the first column is lost to rounding. Chan, Golub,
// LeVeque, Algorithms for computing the sample variance (1983).
//
// Column sums: every slice of a group's rows has a partial row; see cpu/column_sum.h.
#include "ops/layer_norm.h"

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "common/math.h"
#include "cpu/column_sum.h"
#include "cpu/parallel.h"

namespace gradops {
namespace {

// Columns at a time. Adding up per block also keeps the rounding error of long sums small.
constexpr std::int64_t kBlock = 1024;
constexpr int kLanes = 16;

// More slices of rows would add more traffic for partial sums than threads to use them.
constexpr std::int64_t kMaxSlices = 64;
constexpr std::int64_t kMaxChunks = 1024;

// What stands for an absent scale or bias.
template <typename A, int kValue>
constexpr std::array<A, kBlock> kConstantBlock = [] {
  std::array<A, kBlock> block{};
  block.fill(kValue);
  return block;
}();

// A row in the accumulation type, block by block.
template <typename T>
class WideRow {
 public:
  using A = Accum<T>;
  WideRow(const T* row, std::int64_t columns) : row_(row), columns_(columns) {}

  // Columns [start, start + kBlock) of the row; valid until the next call.
  const A* operator()(std::int64_t start) {
    if constexpr (std::is_same_v<T, A>) {
      return row_ + start;
    } else {
      if (start != start_) Widen(row_ + start, std::min(kBlock, columns_ - start), block_);
      start_ = start;
      return block_;
    }
  }

 private:
  struct Empty {};

  static void Widen(const T* __restrict__ row, std::int64_t n, A* __restrict__ block) {
    for (std::int64_t i = 0; i < n; ++i) block[i] = static_cast<A>(row[i]);
  }

  const T* row_;
  std::int64_t columns_;
  std::int64_t start_ = -1;
  [[no_unique_address]] std::conditional_t<std::is_same_v<T, A>, Empty, A[kBlock]> block_;
};

// row[i] = fn(i) for each i < n <= kBlock, where fn computes in the accumulation type.
template <typename T, typename Fn>
void StoreEach(T* __restrict__ row, std::int64_t n, const Fn& fn) {
  using A = Accum<T>;
  if constexpr (std::is_same_v<T, A>) {
    for (std::int64_t i = 0; i < n; ++i) row[i] = fn(i);
  } else {
    A block[kBlock];
    for (std::int64_t i = 0; i < n; ++i) block[i] = fn(i);
    for (std::int64_t i = 0; i < n; ++i) row[i] = static_cast<T>(block[i]);
  }
}

// The sums over i < n of terms(i), which returns an array of kSums values.
template <typename A, int kSums, typename Terms>
std::array<A, kSums> LaneSums(std::int64_t n, const Terms& terms) {
  A lanes[kSums][kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::array<A, kSums> term = terms(i + lane);
      for (int s = 0; s < kSums; ++s) lanes[s][lane] += term[s];
    }
  }
  for (int lane = 0; i + lane < n; ++lane) {
    const std::array<A, kSums> term = terms(i + lane);
    for (int s = 0; s < kSums; ++s) lanes[s][lane] += term[s];
  }
  std::array<A, kSums> sums;
  for (int s = 0; s < kSums; ++s) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[s][lane] += lanes[s][lane + half];
    }
    sums[s] = lanes[s][0];
  }
  return sums;
}

// A parameter's row for one group, with a constant where it is absent.
template <typename A, int kAbsent>
class ParamRow {
 public:
  ParamRow(const Param& param, std::int64_t group)
      : row_(param.data == nullptr
                 ? nullptr
                 : static_cast<const A*>(param.data) + group * param.group_stride) {}
  const A* operator()(std::int64_t start) const {
    return row_ == nullptr ? kConstantBlock<A, kAbsent>.data() : row_ + start;
  }

 private:
  const A* row_;
};

template <typename Fn>
void ForBlocks(std::int64_t columns, const Fn& fn) {
  for (std::int64_t start = 0; start < columns; start += kBlock) {
    fn(start, std::min(kBlock, columns - start));
  }
}

template <typename T, bool kCentered>
void ForwardRow(const LayerNormFwdArgs& args, std::int64_t row) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const auto n = static_cast<A>(std::max<std::int64_t>(1, features));
  const T* const x_row = static_cast<const T*>(args.x) + row * features;
  T* const y = static_cast<T*>(args.y) + row * features;
  WideRow<T> x_blocks(x_row, features);

  A mean = 0, delta = 0, sum_squares = 0;  // delta: what the rounded mean is off by
  if constexpr (kCentered) {
    const A shift = features > 0 ? static_cast<A>(x_row[0]) : A{0};
    A sum_shifted = 0;
    ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
      const A* const x = x_blocks(start);
      sum_shifted +=
          LaneSums<A, 1>(count, [&](std::int64_t i) { return std::array{x[i] - shift}; })[0];
    });
    mean = shift + sum_shifted / n;
    ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
      const A* const x = x_blocks(start);
      const auto sums = LaneSums<A, 2>(count, [&](std::int64_t i) {
        const A centered = x[i] - mean;
        return std::array{centered, centered * centered};
      });
      delta += sums[0], sum_squares += sums[1];
    });
    delta /= n;
  } else {
    ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
      const A* const x = x_blocks(start);
      sum_squares +=
          LaneSums<A, 1>(count, [&](std::int64_t i) { return std::array{x[i] * x[i]}; })[0];
    });
  }
  const A rstd = InverseDeviation(VarianceOf(sum_squares / n, delta), static_cast<A>(args.epsilon));

  const std::int64_t group = row / args.shape.rows;
  const ParamRow<A, 1> scale_row(args.scale, group);
  const ParamRow<A, 0> bias_row(args.bias, group);
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const A* const x = x_blocks(start);
    const A* const scale = scale_row(start);
    const A* const bias = bias_row(start);
    StoreEach(y + start, count, [&](std::int64_t i) {
      const A centered = kCentered ? (x[i] - mean) - delta : x[i];
      return centered * rstd * scale[i] + bias[i];
    });
  });
  if constexpr (kCentered) static_cast<A*>(args.mean)[row] = mean + delta;
  static_cast<A*>(args.rstd)[row] = rstd;
}

// Also adds the row's terms to dscale and dbias where these are not null.
template <typename T, bool kCentered>
void BackwardRow(const LayerNormBwdArgs& args, std::int64_t row, Accum<T>* dscale,
                 Accum<T>* dbias) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  const auto n = static_cast<A>(std::max<std::int64_t>(1, features));
  const A mean = kCentered ? static_cast<const A*>(args.mean)[row] : A{0};
  const A rstd = static_cast<const A*>(args.rstd)[row];
  WideRow<T> x_blocks(static_cast<const T*>(args.x) + row * features, features);
  WideRow<T> dy_blocks(static_cast<const T*>(args.dy) + row * features, features);
  const ParamRow<A, 1> scale_row(args.scale, row / args.shape.rows);
  T* const dx = static_cast<T*>(args.dx) + row * features;

  A sum_shifted = 0, sum_wdy = 0, sum_wdy_shifted = 0;
  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const A* const x = x_blocks(start);
    const A* const dy = dy_blocks(start);
    const A* const scale = scale_row(start);
    if constexpr (kCentered) {
      const auto sums = LaneSums<A, 3>(count, [&](std::int64_t i) {
        const A shifted = x[i] - mean, wdy = dy[i] * scale[i];
        return std::array{wdy * shifted, wdy, shifted};
      });
      sum_wdy_shifted += sums[0], sum_wdy += sums[1], sum_shifted += sums[2];
    } else {
      sum_wdy_shifted += LaneSums<A, 1>(
          count, [&](std::int64_t i) { return std::array{dy[i] * scale[i] * x[i]}; })[0];
    }
  });
  // The saved mean is rounded: the mean of the differences from it is what it is off by.
  const A delta = sum_shifted / n;
  const A mean_wdy = sum_wdy / n;
  const A mean_wdy_x_hat = (sum_wdy_shifted - delta * sum_wdy) * rstd / n;

  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const A* const x = x_blocks(start);
    const A* const dy = dy_blocks(start);
    const A* const scale = scale_row(start);
    const auto x_hat = [&](std::int64_t i) {
      return (kCentered ? (x[i] - mean) - delta : x[i]) * rstd;
    };
    StoreEach(dx + start, count, [&](std::int64_t i) {
      return NormInputGrad(dy[i] * scale[i], x_hat(i), mean_wdy, mean_wdy_x_hat, rstd);
    });
    const auto add_to = [&](A* __restrict__ sums, const auto& term) {
      for (std::int64_t i = 0; i < count; ++i) sums[i] += term(i);
    };
    if (dscale != nullptr) {
      add_to(dscale + start, [&](std::int64_t i) { return dy[i] * x_hat(i); });
    }
    if (dbias != nullptr) add_to(dbias + start, [&](std::int64_t i) { return dy[i]; });
  });
}

template <typename T, bool kCentered>
ffi::Error Forward(const CpuContext& pool, const LayerNormFwdArgs& args) {
  const RowShape& shape = args.shape;
  const std::int64_t rows = shape.all_rows();
  const std::int64_t bytes_per_row = 2 * shape.features * ByteWidthOf(args.dtype);
  const std::int64_t chunk_rows = RowsPerChunk(rows, bytes_per_row, kMaxChunks);
  ParallelFor(pool, (rows + chunk_rows - 1) / chunk_rows, [&](std::int64_t chunk) {
    const std::int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
    for (std::int64_t row = chunk * chunk_rows; row < end; ++row) {
      ForwardRow<T, kCentered>(args, row);
    }
  });
  return ffi::Error::Success();
}

// Rows [first, end) of a group's, with their column sums in `sums`, where not null: dscale, dbias.
template <typename T, bool kCentered>
void BackwardSlice(const LayerNormBwdArgs& args, std::int64_t first, std::int64_t end,
                   std::array<Accum<T>*, 2> sums) {
  const std::int64_t features = args.shape.features;
  const bool several_blocks = end - first > kRowsPerSum;
  std::array<std::vector<double>, 2> totals;
  for (std::size_t s = 0; s < 2; ++s) {
    if (sums[s] == nullptr) continue;
    std::fill_n(sums[s], features, Accum<T>{0});
    if (several_blocks) totals[s].resize(static_cast<std::size_t>(features));
  }
  for (std::int64_t row = first; row < end;) {
    const std::int64_t block_end = std::min(end, row + kRowsPerSum);
    for (; row < block_end; ++row) BackwardRow<T, kCentered>(args, row, sums[0], sums[1]);
    for (std::size_t s = 0; s < 2; ++s) {
      if (!totals[s].empty()) MoveSums(sums[s], features, totals[s].data());
    }
  }
  for (std::size_t s = 0; s < 2; ++s) {
    std::transform(totals[s].begin(), totals[s].end(), sums[s],
                   [](double total) { return static_cast<Accum<T>>(total); });
  }
}

template <typename T, bool kCentered>
ffi::Error Backward(const CpuContext& pool, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  std::array<A*, 2> results{};
  std::int64_t sums = 0;
  for (void* const result : {args.dscale, args.dbias}) {
    if (result != nullptr) results[sums++] = static_cast<A*>(result);
  }
  const bool has_dscale = args.dscale != nullptr, has_dbias = args.dbias != nullptr;

  // A slice is a part of a group's rows with column sums of its own; a chunk is one slice, or
  // several small ones. A group of one slice adds up in the results themselves.
  const std::int64_t bytes_per_row = 3 * features * ByteWidthOf(args.dtype);
  const std::int64_t max_slices = sums > 0 ? std::min(args.partial_rows, kMaxSlices) : kMaxChunks;
  const std::int64_t slice_rows = RowsPerChunk(rows, bytes_per_row, max_slices);
  const std::int64_t slices = std::max<std::int64_t>(1, (rows + slice_rows - 1) / slice_rows);
  const std::int64_t chunk_slices =
      RowsPerChunk(groups * slices, std::min(rows, slice_rows) * bytes_per_row, kMaxChunks);
  auto* const workspace = static_cast<A*>(args.workspace);
  const auto slice_sums = [&](std::int64_t group, std::int64_t slice, std::int64_t sum) {
    return slices == 1 ? results[sum] + group * features
                       : workspace + ((group * args.partial_rows + slice) * sums + sum) * features;
  };

  const std::int64_t chunks = (groups * slices + chunk_slices - 1) / chunk_slices;
  ParallelFor(pool, chunks, [&](std::int64_t chunk) {
    const std::int64_t end = std::min(groups * slices, (chunk + 1) * chunk_slices);
    for (std::int64_t i = chunk * chunk_slices; i < end; ++i) {
      const std::int64_t group = i / slices, slice = i % slices;
      A* const dscale = has_dscale ? slice_sums(group, slice, 0) : nullptr;
      A* const dbias = has_dbias ? slice_sums(group, slice, sums - 1) : nullptr;
      BackwardSlice<T, kCentered>(args, group * rows + slice * slice_rows,
                                  group * rows + std::min(rows, (slice + 1) * slice_rows),
                                  {dscale, dbias});
    }
  });
  if (slices == 1 || sums == 0) return ffi::Error::Success();

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
  return ffi::Error::Success();
}

}  // namespace

ffi::Error LayerNormFwd(CpuContext pool, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_fwd", args.dtype, [&]<typename T>() {
    return args.centered ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
  });
}

ffi::Error LayerNormBwd(CpuContext pool, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_bwd", args.dtype, [&]<typename T>() {
    return args.centered ? Backward<T, true>(pool, args) : Backward<T, false>(pool, args);
  });
}

}  // namespace gradops
