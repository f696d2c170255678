// What both directions of layer norm and RMS norm on the CPU share: how rows are cut into chunks,
// parameters, and prefetching.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/shape.h"
#include "cpu/wide.h"

namespace gradops {

inline constexpr std::int64_t kMaxRowChunks = 256;  // a chunk's first rows are not prefetched

// A value for each of the column sums: dscale, dbias and dresidual_bias.
template <typename V>
using PerSum = std::array<V, 3>;

// Which rows lie side by side (row_norm_narrow_fwd.h). The number of rows does not matter: a
// row's result must not depend on it. Milliseconds for 2,000,000 elements of RMS norm on two cores
// of an EPYC with AVX2:
//                          side by side  one by one
//   float32, 16 columns    2.1           7.8
//   bfloat16, 16 columns   1.2           3.9
//   float32, 64 columns    4.5           1.2
//   bfloat16, 64 columns   1.4           2.5
inline constexpr int kNarrowColumns = 64;
template <typename T>
bool IsNarrow(std::int64_t features) {
  return 0 < features && features <= (sizeof(T) == 2 ? kNarrowColumns : kNarrowColumns / 2);
}

// The parameters of a call, in the accumulation type.
template <typename A>
struct WideParams {
  WideParam<A, 1> scale;
  WideParam<A, 0> bias;
  WideParam<A, 0> residual_bias{};
  WideParam<A, 1> divisor{};  // scale, with infinity in the place of 0
};

// While a row is computed, a row ahead and the place of results are prefetched. Otherwise memory
// would wait during a second pass over a row in the caches. Nanoseconds per element of [8192, 2048]
// on one core of an EPYC, medians of seven, without and with prefetching:
//                         float32     bfloat16
//   layer norm backward   1.13, 0.88  0.75, 0.60
//   layer norm forward    0.63, 0.59  0.43, 0.39
//
// Only a form with the next row in L1 was timed alone, on a Xeon: float32 backward took 1.6 to 1.9
// without it, and 1.0 with it. 16-bit results would lose up to half (RMS norm, EPYC).
template <typename T>
inline constexpr bool kStoresAhead = sizeof(T) >= 4;

// The row that is up to 8 KB ahead, or the next one. Milliseconds for bfloat16 on two cores of a
// Zen 5:
//                                       next row  8 KB ahead
//   RMS norm [8192, 2048]               1.09      0.96
//   RMS norm backward [8192, 2048]      3.0       2.6
//   layer norm backward [16384, 1024]   2.9       2.4
//   layer norm backward [21845, 768]    3.7       3.15
//
// float32 rows of 2,048 columns lose 3 to 10 % if the row is two rows ahead.
template <typename T>
std::int64_t RowAhead(const RowShape& shape, std::int64_t row) {
  constexpr std::int64_t kBytes = 8192;
  const std::int64_t row_bytes =
      std::clamp<std::int64_t>(shape.features * std::int64_t{sizeof(T)}, 1, kBytes);
  return std::min(row + kBytes / row_bytes, shape.all_rows() - 1);
}

}  // namespace gradops
