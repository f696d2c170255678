// Scalar formulas, one definition for host and device, float or double.
#pragma once

#include "common/dtype.h"

namespace gradops {

// d(loss)/dx of y = scale * x_hat + bias for one element, where wdy = scale * dy and mean_* are the
// means over the row. Layer Normalization, https://arxiv.org/abs/1607.06450, supplementary
// material. RMS norm is the same with mean_wdy = 0.
template <typename A>
GRADOPS_HOST_DEVICE inline A NormInputGrad(A wdy, A x_hat, A mean_wdy, A mean_wdy_x_hat, A rstd) {
  return (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd;
}

}  // namespace gradops
