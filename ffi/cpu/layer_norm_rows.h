// What both directions of layer norm and RMS norm on the CPU share: how rows are cut into chunks,
// parameters, and what is prefetched.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/shape.h"
#include "cpu/wide.h"

namespace gradops {

inline constexpr std::int64_t kMaxRowChunks = 256;  // no chunk's first rows are prefetched

// Column sums, or what has them: of dscale, dbias and dresidual_bias.
template <typename V>
using PerSum = std::array<V, 3>;

// Which rows lie side by side (layer_norm_narrow_fwd.h). The number of rows does not matter, as a
// row's result must not depend on it. Milliseconds for 2,000,000 elements of RMS norm on two cores
// of an EPYC with AVX2, side by side and one by one. Rows of 16 columns: float32 2.1, 7.8, bfloat16
// 1.2, 3.9. Of 64 columns: float32 4.5, 1.2, bfloat16 1.4, 2.5.
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

// Prefetched while a row is worked on, as memory would wait during a second pass over what lies in
// the caches: a row ahead, and where results go. ns an element of [8192, 2048] on one core of an
// EPYC, medians of seven, without and with: layer norm backward float32 1.13, 0.88, bfloat16 0.75,
// 0.60, forward 0.63, 0.59 and 0.43, 0.39. On a Xeon only a form with the next row in L1 was timed
// alone: float32 backward 1.6 to 1.9, 1.0. 16-bit stores ahead lose up to half (RMS norm, EPYC).
template <typename T>
inline constexpr bool kStoresAhead = sizeof(T) >= 4;

// The row that is up to 8 KB ahead, or the next one. ms of bfloat16 on two cores of a Zen 5, the
// next one and this: RMS norm [8192, 2048] 1.09, 0.96, backward 3.0, 2.6, layer norm backward
// [16384, 1024] 2.9, 2.4, [21845, 768] 3.7, 3.15. float32 of 2,048 columns loses 3 to 10 % with two
// rows.
template <typename T>
std::int64_t RowAhead(const RowShape& shape, std::int64_t row) {
  constexpr std::int64_t kBytes = 8192;
  const std::int64_t row_bytes =
      std::clamp<std::int64_t>(shape.features * std::int64_t{sizeof(T)}, 1, kBytes);
  return std::min(row + kBytes / row_bytes, shape.all_rows() - 1);
}

}  // namespace gradops
