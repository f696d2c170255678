// Scalar formulas, one definition for host and device, float or double.
#pragma once

#include <cmath>
#include <limits>

#include "common/dtype.h"

namespace gradops {

// The variance (or mean square) of n terms from the sum of their squares and their mean, which is
// what rounding left of it: so nothing cancels, and only rounding makes a negative value. A NaN
// stays one.
template <typename A>
GRADOPS_HOST_DEVICE inline A VarianceOf(A mean_square, A mean) {
  const A variance = mean_square - mean * mean;
  return variance < 0 ? A{0} : variance;
}

// What elements are multiplied by before they are squared, where the sum of their squares has
// overflowed. The mean of these squares may be a number: it is then that over kLargeUnit twice.
template <typename A>
inline constexpr A kLargeUnit = static_cast<A>(sizeof(A) == 8 ? 0x1p-512 : 0x1p-64);

// Whether a variance is infinite or NaN.
template <typename A>
GRADOPS_HOST_DEVICE inline bool Overflowed(A variance) {
  return !(variance <= std::numeric_limits<A>::max() && variance >= 0);
}

// Epsilon as InverseDeviation takes it: infinite beyond the numbers of A. The sum of the variance
// and a very large epsilon may overflow. So a quarter of each is added up.
template <typename A>
struct Epsilon {
  A part;   // of the variance: 1, or 1/4
  A added;  // the same part of epsilon
  A root;   // of `part`

  GRADOPS_HOST_DEVICE explicit Epsilon(double epsilon) {
    constexpr A kMax = std::numeric_limits<A>::max();
    constexpr A kLarge = kMax * std::numeric_limits<A>::epsilon() / 8;
    root = epsilon > kLarge ? A{0.5} : A{1};
    part = root * root;
    added = epsilon > kMax ? std::numeric_limits<A>::infinity() : static_cast<A>(epsilon) * part;
  }
};

// 1 / sqrt(variance + epsilon), 0 where epsilon is infinite. NaN where the variance is infinite: 0
// would turn an overflow, or a row with an infinite element, into zeros that nobody notices.
template <typename A>
GRADOPS_HOST_DEVICE inline A InverseDeviation(A variance, const Epsilon<A>& epsilon) {
  const A square = variance * epsilon.part + epsilon.added;
  const A nan_if_infinite = variance - variance;
#if defined(__CUDA_ARCH__)
  // The GPU's is off by up to 2 ulp: one Newton step, where that is a number.
  const A guess = rsqrt(square);
  const A error = fma(-square * guess, guess, A{1});
  const A inverse = error == error ? fma(A{0.5} * guess, error, guess) : guess;
  return inverse * epsilon.root + nan_if_infinite;
#else
  return epsilon.root / std::sqrt(square) + nan_if_infinite;
#endif
}

// The part of delta, the mean of x - mean over a row, that the rounding of `mean` explains. A saved
// mean is off by up to one unit in the last place. A larger delta is no error: that mean was given,
// and is not the row's own.
template <typename A>
GRADOPS_HOST_DEVICE inline A MeanRounding(A delta, A mean) {
  constexpr A kMost = 2 * std::numeric_limits<A>::epsilon();
  const A limit = kMost * (mean < 0 ? -mean : mean);
  return -limit < delta && delta < limit ? delta : A{0};
}

// d(loss)/dx of y = scale * x_hat + bias for one element (or several, V), where wdy = scale * dy
// and mean_* are the means over the row. Layer Normalization, https://arxiv.org/abs/1607.06450,
// supplementary material. RMS norm is the same with mean_wdy = 0.
template <typename V, typename A>
GRADOPS_HOST_DEVICE inline V NormInputGrad(V wdy, V x_hat, A mean_wdy, A mean_wdy_x_hat, A rstd) {
  return (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd;
}

}  // namespace gradops
