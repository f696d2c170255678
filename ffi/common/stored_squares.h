// How batch norm stores the sum of squares of a part in the accumulation type.
#pragma once

#include <limits>

#include "common/dtype.h"
#include "common/math.h"

namespace gradops {

// The sum may be too large for A, although the variance is not. Then the sum's negative is stored,
// in units of 1 / kLargeUnit. A NaN stays a NaN.
template <typename A>
GRADOPS_HOST_DEVICE inline A StoredSquares(double squares) {
  if constexpr (sizeof(A) == sizeof(double)) {
    return squares;
  } else {
    return static_cast<A>(squares <= std::numeric_limits<A>::max()
                              ? squares
                              : -squares * static_cast<double>(kLargeUnit<A>));
  }
}

template <typename A>
GRADOPS_HOST_DEVICE inline double LoadedSquares(A stored) {
  if constexpr (sizeof(A) == sizeof(double)) {
    return stored;
  } else {
    constexpr double kUnit = static_cast<double>(A{-1} / kLargeUnit<A>);
    return static_cast<double>(stored) * (stored < 0 ? kUnit : 1.0);
  }
}

}  // namespace gradops
