// Batch norm: arguments, launchers, checks and bindings shared by all backends.
//
// x is [groups, rows, channels, inner]. A channel has rows * inner elements in a group. Its
// statistics are computed from these elements. With channels last, inner is 1.
#pragma once

#include <cstdint>

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// y = act(x_hat * scale + bias + residual) with x_hat = ((x - mean) - delta) * rstd. With relu, act
// is max(0, .), and a NaN stays a NaN. Without relu, act does nothing. All of this is computed in
// the accumulation dtype. Only y is rounded.
//
// mean is rounded to the accumulation dtype. delta is the rounding error: mean + delta is the exact
// mean. Without delta, x_hat would be wrong in channels whose mean is much larger than their
// deviation.
//
// The statistics are the batch's own, unless `mean` is given.
struct BatchNormFwdArgs {
  ChannelShape shape;
  ffi::DataType dtype;  // of x, residual and y
  bool relu;
  double epsilon;
  const void* x;         // [groups, rows, channels, inner]
  const void* residual;  // [groups, rows, channels, inner]; null: none
  Param scale;           // [channels]
  Param bias;            // [channels]
  // Given statistics: [channels] in the accumulation dtype. mean and rstd are null together. Null
  // delta: 0.
  Param mean, rstd, delta;
  void* y;  // [groups, rows, channels, inner]; null: only the batch's statistics are wanted
  // The batch's own statistics: [groups, channels] in the accumulation dtype. All are null if mean
  // is given, and only then. The variance is biased. rstd is its InverseDeviation (common/math.h).
  void *batch_mean, *batch_variance, *batch_rstd, *batch_delta;
  // Scratch: [groups, partial_rows, 4, channels] in the accumulation dtype. partial_rows is an
  // upper bound for the number of parts with statistics of their own. It is 0 if mean is given.
  void* workspace;
  std::int64_t partial_rows;
};

// dz is dy. With relu, dz is 0 where act's argument was not positive. Means are over the elements
// of a channel:
//   dx = scale * rstd * (dz - mean(dz) - x_hat * mean(dz * x_hat)),
//   dresidual = dz, dscale = sum(dz * x_hat), dbias = sum(dz).
//
// relu's argument was positive where y is positive. Without y: where x_hat * scale + bias is
// positive. The means are the batch's own, unless `mean_dz` is given.
struct BatchNormBwdArgs {
  ChannelShape shape;
  ffi::DataType dtype;  // of dy, x, y, dx and dresidual
  bool relu;
  const void* dy;                // [groups, rows, channels, inner]
  const void* x;                 // [groups, rows, channels, inner]
  const void* y;                 // [groups, rows, channels, inner]; null: see above
  Param scale, bias;             // [channels]; bias is null, except for relu without y
  Param mean, rstd, delta;       // [channels] in the accumulation dtype; null delta: 0
  Param mean_dz, mean_dz_x_hat;  // [channels] in the accumulation dtype; both null: not given
  void* dx;                      // x's shape; null: only sums are wanted
  void* dresidual;               // x's shape; null: not wanted; null without dx
  ParamGrad dscale, dbias;       // [groups, channels]; null if means are given
  // Scratch: [groups, partial_rows, 2, channels] in the accumulation dtype. See forward.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error BatchNormFwd(CpuContext, const BatchNormFwdArgs&);   // cpu/batch_norm_fwd.cc
ffi::Error BatchNormBwd(CpuContext, const BatchNormBwdArgs&);   // cpu/batch_norm_bwd.cc
ffi::Error BatchNormFwd(CudaContext, const BatchNormFwdArgs&);  // cuda/batch_norm/forward.cu
ffi::Error BatchNormBwd(CudaContext, const BatchNormBwdArgs&);  // cuda/batch_norm/backward.cu

// The handlers. An absent optional operand or result has shape [0] and the accumulation dtype.
template <class Context>
struct BatchNorm {
  static ffi::Error Fwd(Context ctx, std::int64_t group_rank, std::int64_t inner_rank,
                        double epsilon, bool relu, In x, In residual, In scale, In bias, In mean,
                        In rstd, In delta, Out y, Out batch_mean, Out batch_variance,
                        Out batch_rstd, Out batch_delta, Out workspace) {
    RowChecker check("batch_norm_fwd", x, group_rank, inner_rank);
    BatchNormFwdArgs args{
        .shape = check.channel_shape(),
        .dtype = check.dtype(),
        .relu = relu,
        .epsilon = epsilon,
        .x = x.untyped_data(),
        .residual = check.OptionalRows("residual", residual),
        .scale = check.OptionalParam("scale", scale, ParamDtype::kAnyFloat),
        .bias = check.OptionalParam("bias", bias, ParamDtype::kAnyFloat),
        .mean = check.OptionalParam("mean", mean, ParamDtype::kAccum),
        .rstd = check.OptionalParam("rstd", rstd, ParamDtype::kAccum),
        .delta = check.OptionalParam("delta", delta, ParamDtype::kAccum),
        .y = check.OptionalRows("y", *y),
        .batch_mean = check.OptionalFeatureStat("batch_mean", *batch_mean),
        .batch_variance = check.OptionalFeatureStat("batch_variance", *batch_variance),
        .batch_rstd = check.OptionalFeatureStat("batch_rstd", *batch_rstd),
        .batch_delta = check.OptionalFeatureStat("batch_delta", *batch_delta),
        .workspace = workspace->untyped_data(),
        .partial_rows = 0,
    };
    if (args.shape.channels() > 0) {
      check.BothOrNone("mean", mean, "rstd", rstd)
          .OneOf("mean", mean, "batch_mean", *batch_mean)
          .Needs("mean", mean, "y", *y)
          .BothOrNone("batch_mean", *batch_mean, "batch_variance", *batch_variance)
          .BothOrNone("batch_mean", *batch_mean, "batch_rstd", *batch_rstd)
          .BothOrNone("batch_mean", *batch_mean, "batch_delta", *batch_delta);
    }
    check.Number("epsilon", epsilon, epsilon >= 0, "finite and >= 0");
    const bool own = args.batch_mean != nullptr && args.shape.elements() > 0;
    args.partial_rows = check.PartialRows("workspace", *workspace, own ? 4 : 0);
    return check.ok() ? BatchNormFwd(ctx, args) : check.error();
  }
  static auto BindFwd() {
    return Buffers<7, 6>(Bind<Context>()
                             .template Attr<std::int64_t>("group_rank")
                             .template Attr<std::int64_t>("inner_rank")
                             .template Attr<double>("epsilon")
                             .template Attr<bool>("relu"));
  }

  static ffi::Error Bwd(Context ctx, std::int64_t group_rank, std::int64_t inner_rank, bool relu,
                        In dy, In x, In y, In scale, In bias, In mean, In rstd, In delta,
                        In mean_dz, In mean_dz_x_hat, Out dx, Out dresidual, Out dscale, Out dbias,
                        Out workspace) {
    RowChecker check("batch_norm_bwd", x, group_rank, inner_rank);
    check.Rows("dy", dy);
    BatchNormBwdArgs args{
        .shape = check.channel_shape(),
        .dtype = check.dtype(),
        .relu = relu,
        .dy = dy.untyped_data(),
        .x = x.untyped_data(),
        .y = check.OptionalRows("y", y),
        .scale = check.OptionalParam("scale", scale, ParamDtype::kAnyFloat),
        .bias = check.OptionalParam("bias", bias, ParamDtype::kAnyFloat),
        .mean = check.RequiredParam("mean", mean, ParamDtype::kAccum),
        .rstd = check.RequiredParam("rstd", rstd, ParamDtype::kAccum),
        .delta = check.OptionalParam("delta", delta, ParamDtype::kAccum),
        .mean_dz = check.OptionalParam("mean_dz", mean_dz, ParamDtype::kAccum),
        .mean_dz_x_hat = check.OptionalParam("mean_dz_x_hat", mean_dz_x_hat, ParamDtype::kAccum),
        .dx = check.OptionalRows("dx", *dx),
        .dresidual = check.OptionalRows("dresidual", *dresidual),
        .dscale = check.OptionalParamGrad("dscale", *dscale, ParamDtype::kAnyFloat),
        .dbias = check.OptionalParamGrad("dbias", *dbias, ParamDtype::kAnyFloat),
        .workspace = workspace->untyped_data(),
        .partial_rows = 0,
    };
    if (args.shape.channels() > 0) {
      check.BothOrNone("mean_dz", mean_dz, "mean_dz_x_hat", mean_dz_x_hat)
          .NotBoth("dscale", *dscale, "mean_dz", mean_dz)
          .NotBoth("dbias", *dbias, "mean_dz", mean_dz)
          .Needs("dresidual", *dresidual, "dx", *dx);
    }
    const bool own = args.mean_dz.data == nullptr && args.shape.elements() > 0;
    args.partial_rows = check.PartialRows("workspace", *workspace, own ? 2 : 0);
    return check.ok() ? BatchNormBwd(ctx, args) : check.error();
  }
  static auto BindBwd() {
    return Buffers<10, 5>(Bind<Context>()
                              .template Attr<std::int64_t>("group_rank")
                              .template Attr<std::int64_t>("inner_rank")
                              .template Attr<bool>("relu"));
  }
};

}  // namespace gradops
