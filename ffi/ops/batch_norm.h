// Batch norm and group norm: arguments, launchers and declarations shared by all backends.
//
// x is [groups, rows, channels, inner]. With channels last, inner is 1. A bundle is some
// neighbouring channels. Statistics are computed from the elements of a bundle in a group. In batch
// norm, each channel is a bundle. In group norm, the groups of x are the samples, and the bundles
// are what the op calls groups.
#pragma once

#include <cstdint>

#include "common/signature.h"

namespace gradops {

// y = act(x_hat * scale + bias + residual) with x_hat = ((x - mean) - delta) * rstd. With relu, act
// is max(0, .), and a NaN stays a NaN. With silu, act is z / (1 + exp(-z)). Otherwise act does
// nothing. All of this is computed in the accumulation dtype. Only y is rounded.
//
// mean is rounded to the accumulation dtype. delta is the rounding error: mean + delta is the exact
// mean. Without delta, x_hat would be wrong in channels whose mean is much larger than their
// deviation.
//
// The statistics are the batch's own, unless `mean` is given.
struct BatchNormFwdArgs {
  ChannelShape shape;
  ffi::DataType dtype;               // of x, residual and y
  std::int64_t bundle = 1, bundles;  // channels of a bundle; bundles of a group
  bool relu, silu;                   // at most one of them
  bool strict;                       // see Epsilon (common/math.h)
  double epsilon;
  const void* x;         // [groups, rows, channels, inner]
  const void* residual;  // [groups, rows, channels, inner]; null: none
  Param scale;           // [channels]
  Param bias;            // [channels]
  // Given statistics: [bundles] in the accumulation dtype. mean and rstd are null together. Null
  // delta: 0.
  Param mean, rstd, delta;
  void* y;  // [groups, rows, channels, inner]; null: only the batch's statistics are wanted
  // The batch's own statistics: [groups, bundles] in the accumulation dtype. All are null if mean
  // is given, and only then. The variance is biased. rstd is its InverseDeviation (common/math.h).
  void *batch_mean, *batch_variance, *batch_rstd, *batch_delta;
  // Scratch: [groups, partial_rows, 4, channels] in the accumulation dtype. partial_rows is an
  // upper bound for the number of parts with statistics of their own. It is 0 if mean is given.
  void* workspace;
  std::int64_t partial_rows;
};

// dz is dy times the derivative of act. With relu, this is 0 where act's argument was not positive.
// Means are over the elements of a bundle, sums over the elements of a channel:
//   dx = rstd * (scale * dz - mean(scale * dz) - x_hat * mean(scale * dz * x_hat)),
//   dresidual = dz, dscale = sum(dz * x_hat), dbias = sum(dz).
//
// relu's argument was positive where y is positive. Without y: where x_hat * scale + bias is
// positive. silu's argument is x_hat * scale + bias. The means are the batch's own, unless
// `mean_dz` is given.
struct BatchNormBwdArgs {
  ChannelShape shape;
  ffi::DataType dtype;               // of dy, x, y, dx and dresidual
  std::int64_t bundle = 1, bundles;  // channels of a bundle; bundles of a group
  bool relu, silu;                   // at most one of them
  const void* dy;                    // [groups, rows, channels, inner]
  const void* x;                     // [groups, rows, channels, inner]
  const void* y;                     // [groups, rows, channels, inner]; null: see above
  Param scale, bias;        // [channels]; bias is null, except for relu without y, and silu
  Param mean, rstd, delta;  // [bundles] in the accumulation dtype; null delta: 0
  // The means of dz and dz * x_hat. With `weighted`, the means of scale * dz and scale * dz *
  // x_hat. [bundles] in the accumulation dtype; both null: not given.
  Param mean_dz, mean_dz_x_hat;
  bool weighted;
  void* dx;                 // x's shape; null: only sums are wanted
  void* dresidual;          // x's shape; null: not wanted; null without dx
  ParamGrad dscale, dbias;  // [groups, channels]; null if means are given
  // Sums of scale * dz and scale * dz * x_hat: [groups, bundles] in the accumulation dtype. Null:
  // not wanted.
  void *sum_dz, *sum_dz_x_hat;
  // Scratch: [groups, partial_rows, 2, channels] in the accumulation dtype. With sum_dz, it has
  // twice this size. See forward.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error BatchNormFwd(CpuContext, const BatchNormFwdArgs&);   // cpu/batch_norm_fwd.cc
ffi::Error BatchNormBwd(CpuContext, const BatchNormBwdArgs&);   // cpu/batch_norm_bwd.cc
ffi::Error BatchNormFwd(CudaContext, const BatchNormFwdArgs&);  // cuda/batch_norm/forward.cu
ffi::Error BatchNormBwd(CudaContext, const BatchNormBwdArgs&);  // cuda/batch_norm/backward.cu

struct BatchNormForward {
  static constexpr char kName[] = "batch_norm_fwd";
  using Args = BatchNormFwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "ndm", DtypeRule::kX, &Args::x},
      {"residual", "ndm", DtypeRule::kX, &Args::residual, Presence::kOptional},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
      {"mean", "d", DtypeRule::kAccum, &Args::mean, Presence::kOptional},
      {"rstd", "d", DtypeRule::kAccum, &Args::rstd, Presence::kOptional},
      {"delta", "d", DtypeRule::kAccum, &Args::delta, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"y", "ndm", DtypeRule::kX, &Args::y, Presence::kOptional},
      {"batch_mean", "d", DtypeRule::kAccum, &Args::batch_mean, Presence::kOptional},
      {"batch_variance", "d", DtypeRule::kAccum, &Args::batch_variance, Presence::kOptional},
      {"batch_rstd", "d", DtypeRule::kAccum, &Args::batch_rstd, Presence::kOptional},
      {"batch_delta", "d", DtypeRule::kAccum, &Args::batch_delta, Presence::kOptional},
  };
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"epsilon", &Args::epsilon, /*non_negative=*/true},
      {"relu", &Args::relu},
      {"strict", &Args::strict},
  };
  static constexpr Signature::Rule kRules[] = {
      {"mean", Signature::Rule::kBothOrNone, "rstd"},
      {"delta", Signature::Rule::kNeeds, "mean"},
      {"mean", Signature::Rule::kOneOf, "batch_mean"},
      {"mean", Signature::Rule::kNeeds, "y"},
      {"batch_mean", Signature::Rule::kBothOrNone, "batch_variance"},
      {"batch_mean", Signature::Rule::kBothOrNone, "batch_rstd"},
      {"batch_mean", Signature::Rule::kBothOrNone, "batch_delta"},
  };
  static ffi::Error Launch(auto context, const Args& args) { return BatchNormFwd(context, args); }
};

struct BatchNormBackward {
  static constexpr char kName[] = "batch_norm_bwd";
  using Args = BatchNormBwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"dy", "ndm", DtypeRule::kX, &Args::dy},
      {"x", "ndm", DtypeRule::kX, &Args::x},
      {"y", "ndm", DtypeRule::kX, &Args::y, Presence::kOptional},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
      {"mean", "d", DtypeRule::kAccum, &Args::mean},
      {"rstd", "d", DtypeRule::kAccum, &Args::rstd},
      {"delta", "d", DtypeRule::kAccum, &Args::delta, Presence::kOptional},
      {"mean_dz", "d", DtypeRule::kAccum, &Args::mean_dz, Presence::kOptional},
      {"mean_dz_x_hat", "d", DtypeRule::kAccum, &Args::mean_dz_x_hat, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dx", "ndm", DtypeRule::kX, &Args::dx, Presence::kOptional},
      {"dresidual", "ndm", DtypeRule::kX, &Args::dresidual, Presence::kOptional},
      {"dscale", "d", DtypeRule::kAnyFloat, &Args::dscale, Presence::kOptional},
      {"dbias", "d", DtypeRule::kAnyFloat, &Args::dbias, Presence::kOptional},
  };
  static constexpr AttributeOf<Args> kAttributes[] = {{"relu", &Args::relu}};
  static constexpr Signature::Rule kRules[] = {
      {"mean_dz", Signature::Rule::kBothOrNone, "mean_dz_x_hat"},
      {"dscale", Signature::Rule::kOneOf, "mean_dz"},
      {"dbias", Signature::Rule::kOneOf, "mean_dz"},
      {"dresidual", Signature::Rule::kNeeds, "dx"},
  };
  static ffi::Error Launch(auto context, const Args& args) { return BatchNormBwd(context, args); }
};

}  // namespace gradops
