// Layer norm and RMS norm on the CPU, backward, for rows of few columns. Rows lie side by side
// (cpu/side_by_side.h). The formulas are the same as in row_norm_bwd.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/math.h"
#include "cpu/column_sum.h"
#include "cpu/row_norm_rows.h"
#include "cpu/side_by_side.h"
#include "ops/row_norm.h"

namespace gradops {

// Computes dx, and the terms of column sums, for kSide rows at a time.
template <typename T, bool kCentered, bool kFromOutput>
class BackwardSide {
 public:
  using A = Accum<T>;
  using Columns = Side<A, kNarrowColumns>;
  // The arguments and parameters of a call must outlive this object.
  BackwardSide(const RowNormBwdArgs& args, const WideParams<A>& params)
      : args_(args),
        params_(params),
        scale_(params.scale, args.shape),
        bias_(params.bias, args.shape),
        divisor_(params.divisor, args.shape) {
    ones_.fill(1);
  }

  // Calls add(j, terms) with the terms of dscale, dbias and dresidual_bias in column j. Lanes
  // without a row have zeros.
  template <typename Add>
  void operator()(std::int64_t row, std::int64_t rows, bool streamed, const Add& add) {
    const std::int64_t features = args_.shape.features, offset = row * features;
    const Lanes<A> per_column = A{1} / static_cast<A>(features);
    scale_.MoveTo(params_.scale, row, rows);
    if constexpr (kFromOutput) {
      bias_.MoveTo(params_.bias, row, rows), divisor_.MoveTo(params_.divisor, row, rows);
    }
    LoadSide(static_cast<const T*>(args_.dy) + offset, rows, features, dy_);
    LoadSide(static_cast<const T*>(args_.x) + offset, rows, features, shifted_);
    if (args_.dsum != nullptr) {
      LoadSide(static_cast<const T*>(args_.dsum) + offset, rows, features, dsum_);
    }
    const Lanes<A> rstd = LoadRows(static_cast<const A*>(args_.rstd) + row, rows);
    const Lanes<A> factor = kFromOutput ? Lanes<A>(1) : rstd, zero = 0;
    const Lanes<A> has_row = LoadRows(ones_.data(), rows);
    Lanes<A> mean = 0;
    if constexpr (kCentered && !kFromOutput) {
      mean = LoadRows(static_cast<const A*>(args_.mean) + row, rows);
    }

    constexpr int kSums = !kCentered ? 1 : kFromOutput ? 2 : 3;
    const auto sums = SideSums<A, kSums>(features, [&](std::int64_t j) {
      Lanes<A> x = shifted_[j];
      if constexpr (kFromOutput) {
        x = IfGreater(has_row, zero, (x - bias_[j]) / divisor_[j], zero);
        shifted_.Set(j, x);
      } else if constexpr (kCentered) {
        x = x - mean;
        shifted_.Set(j, x);
      }
      const Lanes<A> wdy = dy_[j] * scale_[j];
      if constexpr (kSums == 1) {
        return std::array{wdy * x};
      } else if constexpr (kSums == 2) {
        return std::array{wdy * x, wdy};
      } else {
        return std::array{wdy * x, wdy, x};
      }
    });
    Lanes<A> sum_wdy = 0, delta = 0;
    if constexpr (kSums > 1) sum_wdy = sums[1];
    if constexpr (kSums > 2) delta = MeanRounding(sums[2] * per_column, mean);
    const Lanes<A> mean_wdy = sum_wdy * per_column;
    const Lanes<A> mean_wdy_x_hat = (sums[0] - delta * sum_wdy) * factor * per_column;

    for (std::int64_t j = 0; j < features; ++j) {
      const Lanes<A> dy = dy_[j], x_hat = (shifted_[j] - delta) * factor;
      Lanes<A> dx = NormInputGrad(dy * scale_[j], x_hat, mean_wdy, mean_wdy_x_hat, rstd);
      if (args_.dsum != nullptr) dx += dsum_[j];
      add(j, std::array{dy * x_hat, dy, dx});
      shifted_.Set(j, dx);
    }
    StoreSide(static_cast<T*>(args_.dx) + offset, rows, features, shifted_, streamed);
  }

 private:
  const RowNormBwdArgs& args_;
  const WideParams<A>& params_;
  SideParam<A, kNarrowColumns> scale_, bias_, divisor_;
  std::array<A, kSide<A>> ones_;
  Columns dy_, shifted_, dsum_;
};

// Computes dx of rows [first, end) of a group, and their column sums in `sums` that are not null.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardSliceSide(const RowNormBwdArgs& args, BackwardSide<T, kCentered, kFromOutput>& side,
                       std::int64_t first, std::int64_t end, const PerSum<Accum<T>*>& sums,
                       bool streamed) {
  using A = Accum<T>;
  // Each lane adds up kRowsPerSum rows in the accumulation type. These sums are added up in double.
  constexpr std::int64_t kRows = kRowsPerSum * kSide<A>;
  const std::int64_t features = args.shape.features;
  std::array<Side<A, kNarrowColumns>, 3> lanes;
  double totals[3][kNarrowColumns] = {};
  for (std::int64_t row = first; row < end;) {
    const std::int64_t block_end = std::min(end, row + kRows);
    for (std::size_t s = 0; s < sums.size(); ++s) {
      if (sums[s] == nullptr) continue;
      for (std::int64_t j = 0; j < features; ++j) lanes[s].Set(j, Lanes<A>(0));
    }
    for (; row < block_end; row += kSide<A>) {
      const std::int64_t rows = std::min<std::int64_t>(kSide<A>, block_end - row);
      side(row, rows, streamed, [&](std::int64_t j, const auto& terms) {
        for (std::size_t s = 0; s < sums.size(); ++s) {
          if (sums[s] != nullptr) lanes[s].Set(j, lanes[s][j] + terms[s]);
        }
      });
    }
    for (std::size_t s = 0; s < sums.size(); ++s) {
      for (std::int64_t j = 0; sums[s] != nullptr && j < features; ++j) {
        totals[s][j] += static_cast<double>(lanes[s][j].Sum());
      }
    }
  }
  for (std::size_t s = 0; s < sums.size(); ++s) {
    for (std::int64_t j = 0; sums[s] != nullptr && j < features; ++j) {
      sums[s][j] = static_cast<A>(totals[s][j]);
    }
  }
}

// Computes groups [first, end), several at a time. A group has fewer than kSide rows. `sums` belong
// to all groups.
template <typename T, bool kCentered, bool kFromOutput>
void BackwardGroupsSide(const RowNormBwdArgs& args, BackwardSide<T, kCentered, kFromOutput>& side,
                        std::int64_t first, std::int64_t end, const PerSum<Accum<T>*>& sums,
                        bool streamed) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features, group_rows = args.shape.rows;
  const std::int64_t together = kSide<A> / group_rows;
  std::array<Side<A, kNarrowColumns>, 3> lanes;
  alignas(64) A terms_of_rows[kNarrowColumns * kSide<A>];
  for (std::int64_t group = first; group < end; group += together) {
    const std::int64_t groups = std::min(together, end - group), rows = groups * group_rows;
    side(group * group_rows, rows, streamed, [&](std::int64_t j, const auto& terms) {
      for (std::size_t s = 0; s < sums.size(); ++s) {
        if (sums[s] != nullptr) lanes[s].Set(j, terms[s]);
      }
    });
    for (std::size_t s = 0; s < sums.size(); ++s) {
      if (sums[s] == nullptr) continue;
      A* sum = sums[s] + group * features;
      if (group_rows == 1) {
        StoreSide(sum, rows, features, lanes[s]);
        continue;
      }
      StoreSide(terms_of_rows, rows, features, lanes[s]);
      const A* from = terms_of_rows;
      for (std::int64_t g = 0; g < groups; ++g, sum += features) {
        std::copy_n(from, features, sum);
        from += features;
        for (std::int64_t r = 1; r < group_rows; ++r, from += features) {
          for (std::int64_t j = 0; j < features; ++j) sum[j] += from[j];
        }
      }
    }
  }
}

}  // namespace gradops
