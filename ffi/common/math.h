// Scalar formulas for float and double, one definition for host and device.
#pragma once

#include <cmath>
#include <limits>

#include "common/dtype.h"

namespace gradops {

// a > b ? yes : no. The result is `no` where a or b is NaN.
GRADOPS_HOST_DEVICE inline float IfGreater(float a, float b, float yes, float no) {
  return a > b ? yes : no;
}
GRADOPS_HOST_DEVICE inline double IfGreater(double a, double b, double yes, double no) {
  return a > b ? yes : no;
}

// The variance of terms that are already centered, up to rounding. mean_square is the mean of their
// squares. Their mean is only a rounding error, so nothing cancels. For a mean square, pass mean 0.
// Only rounding can make the difference negative. It is then 0. A NaN stays a NaN.
template <typename A>
GRADOPS_HOST_DEVICE inline A VarianceOf(A mean_square, A mean) {
  const A variance = mean_square - mean * mean;
  return variance < 0 ? A{0} : variance;
}

// If a sum of squares has overflowed, elements are multiplied by kLargeUnit before they are
// squared. The mean of the small squares is then divided by kLargeUnit twice. The result is the
// mean of the original squares, which may be a finite number.
template <typename A>
inline constexpr A kLargeUnit = static_cast<A>(sizeof(A) == 8 ? 0x1p-512 : 0x1p-64);

// Whether a variance is infinite or NaN.
template <typename A>
GRADOPS_HOST_DEVICE inline bool Overflowed(A variance) {
  return !(variance <= std::numeric_limits<A>::max() && variance >= 0);
}

// Epsilon in the form that InverseDeviation takes. It is infinite if too large for A. If epsilon is
// very large, its sum with the variance may overflow. Then a quarter of each is added up.
template <typename A>
struct Epsilon {
  A part;   // the factor of the variance: 1, or 1/4
  A added;  // epsilon times `part`
  A root;   // the square root of `part`
  bool strict;

  // strict: the deviation of an infinite variance is infinite, as in the formula. Else it is NaN.
  GRADOPS_HOST_DEVICE Epsilon(double epsilon, bool strict) : strict(strict) {
    constexpr A kMax = std::numeric_limits<A>::max();
    constexpr A kLarge = kMax * std::numeric_limits<A>::epsilon() / 8;
    root = epsilon > kLarge ? A{0.5} : A{1};
    part = root * root;
    added = epsilon > kMax ? std::numeric_limits<A>::infinity() : static_cast<A>(epsilon) * part;
  }
};

// 1 / sqrt(variance + epsilon). It is 0 if epsilon is infinite. It is NaN if the variance is
// infinite, unless epsilon is strict: 0 would turn an overflow, or a row with an infinite element,
// into unnoticed zeros.
template <typename A>
GRADOPS_HOST_DEVICE inline A InverseDeviation(A variance, const Epsilon<A>& epsilon) {
  const A square = variance * epsilon.part + epsilon.added;
  const A nan_if_infinite = epsilon.strict ? A{0} : variance - variance;
#if defined(__CUDA_ARCH__)
  // The GPU's rsqrt is off by up to 2 ulp. One Newton step corrects it, unless the step gives NaN.
  const A guess = rsqrt(square);
  const A error = fma(-square * guess, guess, A{1});
  const A inverse = error == error ? fma(A{0.5} * guess, error, guess) : guess;
  return inverse * epsilon.root + nan_if_infinite;
#else
  return epsilon.root / std::sqrt(square) + nan_if_infinite;
#endif
}

// Returns delta if the rounding of `mean` explains it, else 0. delta is the mean of x - mean over a
// row. A saved mean is off by up to one unit in the last place. A larger delta is no error: the
// caller gave a mean that is not the row's own.
template <typename A>
GRADOPS_HOST_DEVICE inline A MeanRounding(A delta, A mean) {
  constexpr A kMost = 2 * std::numeric_limits<A>::epsilon();
  const A limit = kMost * (mean < 0 ? -mean : mean);
  return -limit < delta && delta < limit ? delta : A{0};
}

// d(loss)/dx of y = scale * x_hat + bias, for one element or several (V). wdy is scale * dy. mean_*
// are the means over the row. Source: Layer Normalization, https://arxiv.org/abs/1607.06450,
// supplementary material. For RMS norm, mean_wdy is 0.
template <typename V, typename A>
GRADOPS_HOST_DEVICE inline V NormInputGrad(V wdy, V x_hat, A mean_wdy, A mean_wdy_x_hat, A rstd) {
  return (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd;
}

}  // namespace gradops
