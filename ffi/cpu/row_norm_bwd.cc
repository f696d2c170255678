// Layer norm and RMS norm on the CPU, backward.
//
// Rows are computed in parallel, each in two passes while it lies in the L1 or L2 cache. Memory
// traffic: dy and x (from the output: dy and y) are read and dx is written. The sum's cotangent is
// one array more. 16-bit elements are widened in registers. Parameters, which all rows share, are
// widened once per call.
//
// Column sums: every slice of a group's rows has a partial row; see cpu/column_sum.h.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "common/math.h"
#include "cpu/column_sum.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/row_norm_narrow_bwd.h"
#include "cpu/row_norm_rows.h"
#include "ops/row_norm.h"

namespace gradops {
namespace {

// More slices would add traffic for partial sums, but keep no more threads busy.
constexpr std::int64_t kMaxSlices = 64;

// Columns [start, start + kBlock) of a row of [rows, columns]. Zeros if the array is absent.
template <typename T>
const T* RowBlock(const void* rows, std::int64_t row, std::int64_t columns, std::int64_t start) {
  if (rows == nullptr) return kConstantBlock<T, 0>.data();
  return static_cast<const T*>(rows) + row * columns + start;
}

// The parts of a row's x_hat, block by block: x_hat = (shifted - delta) * factor. From the input,
// shifted is x - mean, and delta is the rounding of the saved mean (MeanRounding). From the output,
// shifted is x_hat itself. Where scale is 0, x_hat is lost, and 0 takes its place.
template <typename T, bool kCentered, bool kFromOutput>
class Shifted {
 public:
  using A = Accum<T>;
  Shifted(const RowNormBwdArgs& args, const WideParams<A>& params, std::int64_t row)
      : x_(static_cast<const T*>(args.x) + row * args.shape.features),
        params_(params),
        group_(row / args.shape.rows),
        mean_(kCentered && !kFromOutput ? static_cast<const A*>(args.mean)[row] : A{0}) {}
  A mean() const { return mean_; }
  // A function that returns `shifted` at a loop's place, in the block from column `start` on.
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

// Computes dx of a row. Adds the row's terms to the sums that are not null.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardRow(const RowNormBwdArgs& args, const WideParams<Accum<T>>& params, std::int64_t row,
                 const PerSum<Accum<T>*>& sums, bool streamed) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features, row_ahead = RowAhead<T>(args.shape, row);
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
  const A delta = MeanRounding(sum_shifted / n, shifted_blocks.mean());
  const A mean_wdy = sum_wdy / n;
  const A mean_wdy_x_hat = (sum_wdy_shifted - delta * sum_wdy) * factor / n;

  ForBlocks(features, [&](std::int64_t start, std::int64_t count) {
    const auto shifted = shifted_blocks(start);
    const T* const dy = RowBlock<T>(args.dy, row, features, start);
    const T* const dsum = RowBlock<T>(args.dsum, row, features, start);
    T* const dx = static_cast<T*>(args.dx) + row * features + start;
    const A* const scale = params.scale(group, start);
    const T* const dy_ahead = RowBlock<T>(args.dy, row_ahead, features, start);
    const T* const x_ahead = RowBlock<T>(args.x, row_ahead, features, start);
    const auto block_of = [start](A* sum) { return sum == nullptr ? nullptr : sum + start; };
    A *const dscale = block_of(sums[0]), *const dbias = block_of(sums[1]);
    A* const dresidual_bias = block_of(sums[2]);
    StoreForLanes<kLanes<A>>(dx, count, streamed, [=](auto at) {
      at.PrefetchToL2(dy_ahead), at.PrefetchToL2(x_ahead);
      const auto dy_here = at(dy), x_hat = (shifted(at) - delta) * factor;
      const auto added = at(dsum);  // before dx is stored: dx may overwrite dsum
      if (dscale != nullptr) at.Store(dscale, at(dscale) + dy_here * x_hat);
      if (dbias != nullptr) at.Store(dbias, at(dbias) + dy_here);
      const auto dx_here =
          NormInputGrad(dy_here * at(scale), x_hat, mean_wdy, mean_wdy_x_hat, rstd) + added;
      if (dresidual_bias != nullptr) at.Store(dresidual_bias, at(dresidual_bias) + dx_here);
      return dx_here;
    });
  });
}

// Computes dx of rows [first, end) of a group, and their column sums in `sums` that are not null.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardSlice(const RowNormBwdArgs& args, const WideParams<Accum<T>>& params,
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

// A slice is a part of a group's rows with its own column sums. A chunk is one slice, or several
// small slices. A group of one slice is added up in the results themselves.
struct Slicing {
  std::int64_t rows;          // Rows of a slice.
  std::int64_t slices;        // Slices of a group.
  std::int64_t chunk_slices;  // Slices of a chunk.
  std::int64_t chunks;        // Chunks of all groups.

  Slicing(std::int64_t groups, std::int64_t group_rows, std::int64_t bytes_per_row,
          std::int64_t max_slices, bool is_narrow) {
    const std::int64_t multiple = is_narrow ? 64 : 1;  // whole cache lines, of rows side by side
    rows =
        (RowsPerChunk(group_rows, bytes_per_row, max_slices) + multiple - 1) / multiple * multiple;
    slices = (group_rows + rows - 1) / rows;
    chunk_slices =
        RowsPerChunk(groups * slices, std::min(group_rows, rows) * bytes_per_row, kMaxRowChunks);
    chunks = (groups * slices + chunk_slices - 1) / chunk_slices;
  }
};

// Adds up the column sums of each group's slices. slice_sums(group, slice, sum) is where they are.
template <typename A>
void AddSlices(const CpuContext& pool, const RowNormBwdArgs& args, std::int64_t slices,
               std::int64_t groups, std::int64_t sums, const auto& slice_sums,
               const PerSum<A*>& results) {
  const std::int64_t features = args.shape.features;
  const std::int64_t tiles = (features + kBlock - 1) / kBlock;
  const std::int64_t items = groups * sums * tiles;
  const std::int64_t bytes_per_item =
      slices * std::min(kBlock, features) * static_cast<std::int64_t>(sizeof(A));
  const std::int64_t chunk_items = RowsPerChunk(items, bytes_per_item, kMaxRowChunks);
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

template <typename T, bool kCentered, bool kFromOutput>
ffi::Error Backward(const CpuContext& pool, const RowNormBwdArgs& args) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  if (args.shape.all_rows() == 0) {
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
  // The wanted gradients, and the number of each gradient among them.
  PerSum<A*> results{};
  PerSum<std::int64_t> numbers{};
  std::int64_t sums = 0;
  for (std::size_t s = 0; s < grads.size(); ++s) {
    if (grads[s].data() == nullptr) continue;
    numbers[s] = sums;
    results[sums++] = grads[s].data();
  }

  // Groups matter only for sums.
  const std::int64_t groups = sums > 0 ? args.shape.groups : 1,
                     rows = args.shape.all_rows() / groups;
  const bool is_narrow = IsNarrow<T>(features);
  const std::int64_t bytes_per_row = 3 * features * ByteWidthOf(args.dtype);
  const std::int64_t max_slices =
      sums > 0 ? std::min(args.partial_rows, kMaxSlices) : kMaxRowChunks;
  const Slicing slicing(groups, rows, bytes_per_row, max_slices, is_narrow);
  const std::int64_t slices = slicing.slices;
  auto* const workspace = static_cast<A*>(args.workspace);
  const auto slice_sums = [&](std::int64_t group, std::int64_t slice, std::int64_t sum) {
    return slices == 1 ? results[sum] + group * features
                       : workspace + ((group * args.partial_rows + slice) * sums + sum) * features;
  };

  const bool streamed = PrepareResult(args.dx, args.shape.all_rows() * bytes_per_row / 3,
                                      {args.dy, args.x, args.dsum});
  ParallelFor(pool, slicing.chunks, [&](std::int64_t chunk) {
    const std::int64_t start = chunk * slicing.chunk_slices,
                       end = std::min(groups * slices, start + slicing.chunk_slices);
    std::optional<BackwardSide<T, kCentered, kFromOutput>> side;
    if (is_narrow) side.emplace(args, params);
    if (is_narrow && sums > 0 && rows < kSide<A>) {
      const PerSum<A*> all{grads[0].data(), grads[1].data(), grads[2].data()};
      BackwardGroupsSide(args, *side, start, end, all, streamed);
      if (streamed) StreamFence();
      return;
    }
    for (std::int64_t i = start; i < end; ++i) {
      const std::int64_t group = i / slices, slice = i % slices;
      PerSum<A*> own{};
      for (std::size_t s = 0; s < own.size(); ++s) {
        if (grads[s].data() != nullptr) own[s] = slice_sums(group, slice, numbers[s]);
      }
      const std::int64_t first = group * rows + slice * slicing.rows,
                         last = group * rows + std::min(rows, (slice + 1) * slicing.rows);
      if (is_narrow) {
        BackwardSliceSide(args, *side, first, last, own, streamed);
      } else {
        BackwardSlice<T, kCentered, kFromOutput>(args, params, first, last, own, streamed);
      }
    }
    if (streamed) StreamFence();
  });
  if (slices > 1 && sums > 0) {
    AddSlices<A>(pool, args, slices, groups, sums, slice_sums, results);
  }
  ffi::Error error = ffi::Error::Success();
  for (std::size_t s = 0; s < grads.size() && error.success(); ++s) error = grads[s].Store(pool);
  return error;
}

}  // namespace

ffi::Error RowNormBwd(CpuContext pool, const RowNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "row_norm_bwd", args.dtype, [&]<typename T>() {
    if (args.from_output) {
      return args.centered ? Backward<T, true, true>(pool, args)
                           : Backward<T, false, true>(pool, args);
    }
    return args.centered ? Backward<T, true, false>(pool, args)
                         : Backward<T, false, false>(pool, args);
  });
}

}  // namespace gradops
