// Layer norm and RMS norm on the CPU, forward, for rows of few columns. Rows lie side by side
// (cpu/side_by_side.h). The formulas are the same as in row_norm_fwd.cc.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/math.h"
#include "cpu/parallel.h"
#include "cpu/row_norm_rows.h"
#include "cpu/side_by_side.h"
#include "ops/row_norm.h"

namespace gradops {

// The rows that are normalised: x, or its sum with the residual. The sum is stored first.
// residual_bias has a number for each element of the rows.
template <typename T>
const T* RowsToNormalise(const RowNormFwdArgs& args, std::int64_t row, std::int64_t rows,
                         const Accum<T>* residual_bias) {
  const std::int64_t offset = row * args.shape.features, count = rows * args.shape.features;
  const T* const x = static_cast<const T*>(args.x) + offset;
  if (args.residual == nullptr) return x;
  const T* const residual = static_cast<const T*>(args.residual) + offset;
  T* const sum = static_cast<T*>(args.sum) + offset;
  if (residual_bias == nullptr) {
    ForLanes<kLanes<Accum<T>>>(count, [=](auto at) { at.Store(sum, at(x) + at(residual)); });
  } else {
    ForLanes<kLanes<Accum<T>>>(
        count, [=](auto at) { at.Store(sum, at(x) + (at(residual) + at(residual_bias))); });
  }
  return sum;
}

// Rows of one column, with parameters that all rows share: a loop over elements. The results are
// equal to ForwardSide's results, bit by bit.
template <typename T, bool kCentered, typename ForwardRow>
void ForwardColumn(const RowNormFwdArgs& args, const WideParams<Accum<T>>& params,
                   std::int64_t first_row, std::int64_t end, const ForwardRow& forward_row) {
  using A = Accum<T>;
  const Epsilon<A> epsilon(args.epsilon, args.strict);
  const Lanes<A> of_constant_row = InverseDeviation(A{0}, epsilon);
  const Lanes<A> scale = params.scale(0, 0)[0], bias = params.bias(0, 0)[0];
  const T* const x_rows = static_cast<const T*>(args.x) + first_row;
  T* const y_rows = static_cast<T*>(args.y) + first_row;
  const bool stores_statistics = args.rstd != nullptr;
  ForWholeLanes<kSide<A>>(end - first_row, [&](auto at) {
    const Lanes<A> x = at(x_rows);
    Lanes<A> variance, rstd, y;
    if constexpr (kCentered) {
      variance = x - x;  // 0, or NaN
      rstd = of_constant_row + variance;
      y = variance * rstd * scale + bias;
      if (stores_statistics) at.Store(static_cast<A*>(args.mean) + first_row, x);
    } else {
      variance = x * x;
      rstd = InverseDeviation(variance, epsilon);
      y = x * rstd * scale + bias;
    }
    at.Store(y_rows, y);
    if (stores_statistics) at.Store(static_cast<A*>(args.rstd) + first_row, rstd);
    const Lanes<A> is_unsafe = IsUnsafe(variance, epsilon);
    if (is_unsafe.Sum() == 0) return;
    A unsafe[kSide<A>];
    StoreLanes(unsafe, is_unsafe);
    const std::int64_t row = first_row + at.i;
    for (int r = 0; r < kSide<A> && row + r < end; ++r) {
      if (unsafe[r] != 0) forward_row(row + r);
    }
  });
}

// Rows of up to kNarrowColumns columns. forward_row(row) computes a row in the way of longer rows.
// It is for rows whose squares, or their sum, leave the range with all digits of float32.
template <typename T, bool kCentered, typename ForwardRow>
void ForwardSide(const RowNormFwdArgs& args, const WideParams<Accum<T>>& params,
                 std::int64_t first_row, std::int64_t end, bool streamed,
                 const ForwardRow& forward_row) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features;
  if (features == 1 && args.residual == nullptr && params.scale.shared() && params.bias.shared()) {
    return ForwardColumn<T, kCentered>(args, params, first_row, end, forward_row);
  }
  // A product takes less time than a quotient. It adds one rounding.
  const Lanes<A> per_column = A{1} / static_cast<A>(features);
  const Epsilon<A> epsilon(args.epsilon, args.strict);
  const A of_constant_row = InverseDeviation(A{0}, epsilon);
  SideParam<A, kNarrowColumns> scale(params.scale, args.shape), bias(params.bias, args.shape);
  SideParam<A, kNarrowColumns> residual_bias(params.residual_bias, args.shape);
  const bool has_residual_bias = args.residual_bias.data != nullptr;
  alignas(64) A added[kNarrowColumns * kSide<A>];
  Side<A, kNarrowColumns> columns;
  for (std::int64_t row = first_row; row < end; row += kSide<A>) {
    const std::int64_t rows = std::min<std::int64_t>(kSide<A>, end - row);
    scale.MoveTo(params.scale, row, rows), bias.MoveTo(params.bias, row, rows);
    if (has_residual_bias && (row == first_row || !params.residual_bias.shared())) {
      residual_bias.MoveTo(params.residual_bias, row, rows);
      StoreSide(added, kSide<A>, features, residual_bias.numbers());
    }
    LoadSide(RowsToNormalise<T>(args, row, rows, has_residual_bias ? added : nullptr), rows,
             features, columns);

    Lanes<A> mean = 0, delta = 0, sum_squares;
    if constexpr (kCentered) {
      const Lanes<A> shift = columns[0];
      mean =
          shift + SideSums<A, 1>(
                      features, [&](std::int64_t j) { return std::array{columns[j] - shift}; })[0] *
                      per_column;
      const auto sums = SideSums<A, 2>(features, [&](std::int64_t j) {
        const Lanes<A> centered = columns[j] - mean;
        return std::array{centered, centered * centered};
      });
      delta = sums[0] * per_column, sum_squares = sums[1];
    } else {
      sum_squares = SideSums<A, 1>(features, [&](std::int64_t j) {
        const Lanes<A> x = columns[j];
        return std::array{x * x};
      })[0];
    }
    const Lanes<A> variance = VarianceOf(sum_squares * per_column, delta);
    // With one column, the variance is 0 or NaN. So no row needs a root or a quotient.
    const Lanes<A> rstd = kCentered && features == 1 ? Lanes<A>(of_constant_row) + variance
                                                     : InverseDeviation(variance, epsilon);
    for (std::int64_t j = 0; j < features; ++j) {
      const Lanes<A> x = columns[j];
      if constexpr (kCentered) {
        columns.Set(j, ((x - mean) - delta) * rstd * scale[j] + bias[j]);
      } else {
        columns.Set(j, x * rstd * scale[j] + bias[j]);
      }
    }
    StoreSide(static_cast<T*>(args.y) + row * features, rows, features, columns, streamed);
    if (args.rstd != nullptr) {
      if constexpr (kCentered) StoreRows(static_cast<A*>(args.mean) + row, rows, mean + delta);
      StoreRows(static_cast<A*>(args.rstd) + row, rows, rstd);
    }

    const Lanes<A> is_unsafe = IsUnsafe(variance, epsilon);
    if (is_unsafe.Sum() == 0) continue;
    A unsafe[kSide<A>];
    StoreLanes(unsafe, is_unsafe);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (unsafe[r] != 0) forward_row(row + r);
    }
  }
}

}  // namespace gradops
