// Scalar formulas, one definition for host and device, float or double.
#pragma once

#include <cmath>

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

// 1 / sqrt(variance + epsilon). NaN where that is infinite: 0 would turn an overflow, or a row with
// an infinite element, into zeros that nobody notices.
template <typename A>
GRADOPS_HOST_DEVICE inline A InverseDeviation(A variance, A epsilon) {
  const A square = variance + epsilon;
  const A nan_if_infinite = square - square;
#if defined(__CUDA_ARCH__)
  // The GPU's is off by up to 2 ulp: one Newton step, where that is a number.
  const A guess = rsqrt(square);
  const A error = fma(-square * guess, guess, A{1});
  return (error == error ? fma(A{0.5} * guess, error, guess) : guess) + nan_if_infinite;
#else
  return A{1} / std::sqrt(square) + nan_if_infinite;
#endif
}

// d(loss)/dx of y = scale * x_hat + bias for one element (or several, V), where wdy = scale * dy
// and mean_* are the means over the row. Layer Normalization, https://arxiv.org/abs/1607.06450,
// supplementary material. RMS norm is the same with mean_wdy = 0.
template <typename V, typename A>
GRADOPS_HOST_DEVICE inline V NormInputGrad(V wdy, V x_hat, A mean_wdy, A mean_wdy_x_hat, A rstd) {
  return (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd;
}

}  // namespace gradops
