// Sums over rows, without errors that grow with the number of rows. Rows are added up in blocks,
// and the blocks in double. Both happen in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gradops {

inline constexpr std::int64_t kRowsPerSum = 128;  // rows added up in the accumulation type

// Moves the sums of a block to the totals: totals[i] += sums[i], sums[i] = 0.
template <typename A>
void MoveSums(A* __restrict__ sums, std::int64_t columns, double* __restrict__ totals) {
  for (std::int64_t i = 0; i < columns; ++i) totals[i] += static_cast<double>(sums[i]);
  std::fill_n(sums, columns, A{0});
}

// sums[i] = sum over r < rows of partial[r * pitch + i].
template <typename A>
void AddPartialRows(const A* __restrict__ partial, std::int64_t rows, std::int64_t pitch,
                    std::int64_t columns, A* __restrict__ sums) {
  constexpr std::int64_t kColumns = 512;  // at a time, on the stack
  double totals[kColumns];
  for (std::int64_t start = 0; start < columns; start += kColumns) {
    const std::int64_t count = std::min(kColumns, columns - start);
    std::fill_n(totals, count, 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const A* const row = partial + r * pitch + start;
      for (std::int64_t i = 0; i < count; ++i) totals[i] += static_cast<double>(row[i]);
    }
    for (std::int64_t i = 0; i < count; ++i) sums[start + i] = static_cast<A>(totals[i]);
  }
}

}  // namespace gradops
