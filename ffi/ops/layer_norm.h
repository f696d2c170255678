// Layer norm and RMS norm: arguments, launchers, checks and bindings shared by all backends.
#pragma once

#include <cmath>

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// y = x_hat * scale + bias with x_hat = (x - mean) * rstd. RMS norm: not centered, mean is null.
struct LayerNormFwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x and y; everything else is in its accumulation dtype
  bool centered;
  double epsilon;
  const void* x;  // [groups, rows, features]
  Param scale;    // [features]
  Param bias;     // [features]
  void* y;        // [groups, rows, features]
  void* mean;     // [groups, rows]
  void* rstd;     // [groups, rows]: 1 / sqrt(var + epsilon)
};

struct LayerNormBwdArgs {
  RowShape shape;
  ffi::DataType dtype;
  bool centered;
  const void* dy;    // [groups, rows, features]
  const void* x;     // [groups, rows, features]
  Param scale;       // [features]
  const void* mean;  // [groups, rows]
  const void* rstd;  // [groups, rows]
  void* dx;          // [groups, rows, features]
  void* dscale;      // [groups, features], null if not wanted
  void* dbias;       // [groups, features], null if not wanted
  // Scratch in the accumulation dtype, [groups, partial_rows, number of wanted sums, features].
  // partial_rows is an upper bound: a launcher may use fewer. 0 if no sum is wanted.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error LayerNormFwd(CpuContext, const LayerNormFwdArgs&);   // cpu/layer_norm.cc
ffi::Error LayerNormBwd(CpuContext, const LayerNormBwdArgs&);   // cpu/layer_norm.cc
ffi::Error LayerNormFwd(CudaContext, const LayerNormFwdArgs&);  // cuda/layer_norm.cu
ffi::Error LayerNormBwd(CudaContext, const LayerNormBwdArgs&);  // cuda/layer_norm.cu

template <class Context>
struct LayerNorm {
  static ffi::Error Fwd(Context ctx, std::int64_t group_rank, double epsilon, In x, In scale,
                        In bias, Out y, Out mean, Out rstd) {
    return RunFwd("layer_norm_fwd", ctx, group_rank, epsilon, x, scale, &bias, y, &mean, rstd);
  }
  static auto BindFwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<double>("epsilon")
        .template Arg<In>()               // x
        .template Arg<In>()               // scale
        .template Arg<In>()               // bias
        .template Ret<ffi::AnyBuffer>()   // y
        .template Ret<ffi::AnyBuffer>()   // mean
        .template Ret<ffi::AnyBuffer>();  // rstd
  }

  static ffi::Error Bwd(Context ctx, std::int64_t group_rank, In dy, In x, In scale, In mean,
                        In rstd, Out dx, Out dscale, Out dbias, Out workspace) {
    return RunBwd("layer_norm_bwd", ctx, group_rank, dy, x, scale, &mean, rstd, dx, dscale, &dbias,
                  workspace);
  }
  static auto BindBwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Arg<In>()               // dy
        .template Arg<In>()               // x
        .template Arg<In>()               // scale
        .template Arg<In>()               // mean
        .template Arg<In>()               // rstd
        .template Ret<ffi::AnyBuffer>()   // dx
        .template Ret<ffi::AnyBuffer>()   // dscale
        .template Ret<ffi::AnyBuffer>()   // dbias
        .template Ret<ffi::AnyBuffer>();  // workspace
  }

  // RMS norm: the same without mean and bias.
  static ffi::Error RmsFwd(Context ctx, std::int64_t group_rank, double epsilon, In x, In scale,
                           Out y, Out rstd) {
    return RunFwd("rms_norm_fwd", ctx, group_rank, epsilon, x, scale, nullptr, y, nullptr, rstd);
  }
  static auto BindRmsFwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<double>("epsilon")
        .template Arg<In>()               // x
        .template Arg<In>()               // scale
        .template Ret<ffi::AnyBuffer>()   // y
        .template Ret<ffi::AnyBuffer>();  // rstd
  }

  static ffi::Error RmsBwd(Context ctx, std::int64_t group_rank, In dy, In x, In scale, In rstd,
                           Out dx, Out dscale, Out workspace) {
    return RunBwd("rms_norm_bwd", ctx, group_rank, dy, x, scale, nullptr, rstd, dx, dscale, nullptr,
                  workspace);
  }
  static auto BindRmsBwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Arg<In>()               // dy
        .template Arg<In>()               // x
        .template Arg<In>()               // scale
        .template Arg<In>()               // rstd
        .template Ret<ffi::AnyBuffer>()   // dx
        .template Ret<ffi::AnyBuffer>()   // dscale
        .template Ret<ffi::AnyBuffer>();  // workspace
  }

 private:
  static ffi::Error RunFwd(std::string_view op, Context ctx, std::int64_t group_rank,
                           double epsilon, const In& x, const In& scale, const In* bias, Out y,
                           Out* mean, Out rstd) {
    RowChecker check(op, x, group_rank);
    check.Rows("y", *y).Stat("rstd", *rstd);
    if (mean != nullptr) check.Stat("mean", **mean);
    const Param scale_param = check.OptionalParam("scale", scale);
    const Param bias_param = bias != nullptr ? check.OptionalParam("bias", *bias) : Param{};
    if (!check.ok()) return check.error();
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) {
      return ffi::Error::InvalidArgument(
          std::string(op) + ": epsilon must be finite and >= 0, got " + std::to_string(epsilon));
    }
    return LayerNormFwd(ctx, {.shape = check.shape(),
                              .dtype = check.dtype(),
                              .centered = mean != nullptr,
                              .epsilon = epsilon,
                              .x = x.untyped_data(),
                              .scale = scale_param,
                              .bias = bias_param,
                              .y = y->untyped_data(),
                              .mean = mean != nullptr ? (*mean)->untyped_data() : nullptr,
                              .rstd = rstd->untyped_data()});
  }

  static ffi::Error RunBwd(std::string_view op, Context ctx, std::int64_t group_rank, const In& dy,
                           const In& x, const In& scale, const In* mean, const In& rstd, Out dx,
                           Out dscale, Out* dbias, Out workspace) {
    RowChecker check(op, x, group_rank);
    check.Rows("dy", dy).Rows("dx", *dx).Stat("rstd", rstd);
    if (mean != nullptr) check.Stat("mean", *mean);
    const Param scale_param = check.OptionalParam("scale", scale);
    void* const dscale_data = check.OptionalParamGrad("dscale", *dscale);
    void* const dbias_data = dbias != nullptr ? check.OptionalParamGrad("dbias", **dbias) : nullptr;
    const std::int64_t partial_rows = check.PartialRows(
        "workspace", *workspace, (dscale_data != nullptr) + (dbias_data != nullptr));
    if (!check.ok()) return check.error();
    return LayerNormBwd(ctx, {.shape = check.shape(),
                              .dtype = check.dtype(),
                              .centered = mean != nullptr,
                              .dy = dy.untyped_data(),
                              .x = x.untyped_data(),
                              .scale = scale_param,
                              .mean = mean != nullptr ? mean->untyped_data() : nullptr,
                              .rstd = rstd.untyped_data(),
                              .dx = dx->untyped_data(),
                              .dscale = dscale_data,
                              .dbias = dbias_data,
                              .workspace = workspace->untyped_data(),
                              .partial_rows = partial_rows});
  }
};

}  // namespace gradops
