// Layer norm and RMS norm: arguments, launchers, checks and bindings shared by all backends.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// y = x_hat * (scale + scale_offset) + bias with x_hat = (h - mean) * rstd. h is x. With a
// residual, h is x + (residual + residual_bias), rounded to x's dtype. RMS norm is not centered:
// mean is 0. No result may lie in the memory of an operand.
struct RowNormFwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x, residual, y and sum
  bool centered;
  double epsilon, scale_offset;
  const void* x;         // [groups, rows, features]
  const void* residual;  // [groups, rows, features]; null: none
  Param residual_bias;   // [features]; null without residual
  Param scale;           // [features]
  Param bias;            // [features]
  void* y;               // [groups, rows, features]
  void* sum;             // [groups, rows, features]: h; null without residual
  // Statistics in the accumulation dtype. They are null if no gradient needs them.
  void* mean;  // [groups, rows]; always null for RMS norm
  void* rstd;  // [groups, rows]: 1 / sqrt(var + epsilon)
};

// From the input: x_hat = (x - mean) * rstd. From the output, `x` holds y: x_hat = (y - bias) /
// (scale + scale_offset). x_hat is 0 where scale + scale_offset is 0.
struct RowNormBwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of dy, x, dsum and dx
  bool centered, from_output;
  double epsilon;  // rstd's epsilon, for layer norm from its input; negative: not known
  double scale_offset;
  const void* dy;           // [groups, rows, features]
  const void* x;            // [groups, rows, features]
  const void* dsum;         // [groups, rows, features]: added to dx; null: none
  Param scale;              // [features]
  Param bias;               // [features]; null unless from_output
  const void* mean;         // [groups, rows]; null if not centered or from_output
  const void* rstd;         // [groups, rows]
  void* dx;                 // [groups, rows, features]
  ParamGrad dscale, dbias;  // [groups, features]
  // The sum of dx over rows: of values before their rounding, or, if rows are streamed, after it.
  ParamGrad dresidual_bias;  // [groups, features]
  // Scratch: [groups, partial_rows, number of wanted sums, features] in the accumulation dtype.
  // partial_rows is an upper bound: a launcher may use fewer. It is 0 if no sum is wanted. A
  // launcher may also store one value per row there.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error RowNormFwd(CpuContext, const RowNormFwdArgs&);   // cpu/row_norm_fwd.cc
ffi::Error RowNormBwd(CpuContext, const RowNormBwdArgs&);   // cpu/row_norm_bwd.cc
ffi::Error RowNormFwd(CudaContext, const RowNormFwdArgs&);  // cuda/row_norm/forward.cu
ffi::Error RowNormBwd(CudaContext, const RowNormBwdArgs&);  // cuda/row_norm/backward.cu

// The handlers. An absent optional operand or result has shape [0] and the accumulation dtype.
template <class Context>
struct LayerNorm {
  static ffi::Error Fwd(Context ctx, std::int64_t group_rank, double epsilon, double scale_offset,
                        In x, In residual, In residual_bias, In scale, In bias, Out y, Out sum,
                        Out mean, Out rstd) {
    return RunFwd("layer_norm_fwd", ctx, group_rank, epsilon, scale_offset,
                  {.x = x,
                   .residual = residual,
                   .residual_bias = residual_bias,
                   .scale = scale,
                   .bias = &bias},
                  {.y = *y, .sum = *sum, .mean = &*mean, .rstd = *rstd});
  }
  static auto BindFwd() { return Buffers<5, 4>(FwdAttributes()); }

  static ffi::Error RmsFwd(Context ctx, std::int64_t group_rank, double epsilon,
                           double scale_offset, In x, In residual, In residual_bias, In scale,
                           Out y, Out sum, Out rstd) {
    return RunFwd("rms_norm_fwd", ctx, group_rank, epsilon, scale_offset,
                  {.x = x, .residual = residual, .residual_bias = residual_bias, .scale = scale},
                  {.y = *y, .sum = *sum, .rstd = *rstd});
  }
  static auto BindRmsFwd() { return Buffers<4, 3>(FwdAttributes()); }

  static ffi::Error Bwd(Context ctx, std::int64_t group_rank, double scale_offset, double epsilon,
                        In dy, In x, In dsum, In scale, In mean, In rstd, Out dx, Out dscale,
                        Out dbias, Out dresidual_bias, Out workspace) {
    return RunBwd({.op = "layer_norm_bwd", .centered = true, .epsilon = epsilon}, ctx, group_rank,
                  scale_offset,
                  {.dy = dy, .x = x, .dsum = dsum, .scale = scale, .mean = &mean, .rstd = rstd},
                  {.dx = *dx,
                   .dscale = *dscale,
                   .dbias = &*dbias,
                   .dresidual_bias = *dresidual_bias,
                   .workspace = *workspace});
  }
  static auto BindBwd() { return Buffers<6, 5>(BwdAttributes().template Attr<double>("epsilon")); }

  static ffi::Error RmsBwd(Context ctx, std::int64_t group_rank, double scale_offset, In dy, In x,
                           In dsum, In scale, In rstd, Out dx, Out dscale, Out dresidual_bias,
                           Out workspace) {
    return RunBwd(
        {.op = "rms_norm_bwd"}, ctx, group_rank, scale_offset,
        {.dy = dy, .x = x, .dsum = dsum, .scale = scale, .rstd = rstd},
        {.dx = *dx, .dscale = *dscale, .dresidual_bias = *dresidual_bias, .workspace = *workspace});
  }
  static auto BindRmsBwd() { return Buffers<5, 4>(BwdAttributes()); }

  static ffi::Error BwdFromOutput(Context ctx, std::int64_t group_rank, double scale_offset, In dy,
                                  In y, In dsum, In scale, In bias, In rstd, Out dx, Out dscale,
                                  Out dbias, Out dresidual_bias, Out workspace) {
    return RunBwd({.op = "layer_norm_bwd_from_output", .centered = true, .from_output = true}, ctx,
                  group_rank, scale_offset,
                  {.dy = dy, .x = y, .dsum = dsum, .scale = scale, .bias = &bias, .rstd = rstd},
                  {.dx = *dx,
                   .dscale = *dscale,
                   .dbias = &*dbias,
                   .dresidual_bias = *dresidual_bias,
                   .workspace = *workspace});
  }
  static auto BindBwdFromOutput() { return Buffers<6, 5>(BwdAttributes()); }

  static ffi::Error RmsBwdFromOutput(Context ctx, std::int64_t group_rank, double scale_offset,
                                     In dy, In y, In dsum, In scale, In rstd, Out dx, Out dscale,
                                     Out dresidual_bias, Out workspace) {
    return RunBwd(
        {.op = "rms_norm_bwd_from_output", .from_output = true}, ctx, group_rank, scale_offset,
        {.dy = dy, .x = y, .dsum = dsum, .scale = scale, .rstd = rstd},
        {.dx = *dx, .dscale = *dscale, .dresidual_bias = *dresidual_bias, .workspace = *workspace});
  }
  static auto BindRmsBwdFromOutput() { return Buffers<5, 4>(BwdAttributes()); }

 private:
  // What a handler was given. A null pointer means: the handler has no such operand or result.
  struct FwdOperands {
    const In& x;
    const In& residual;
    const In& residual_bias;
    const In& scale;
    const In* bias = nullptr;
  };
  struct FwdResults {
    ffi::AnyBuffer& y;
    ffi::AnyBuffer& sum;
    ffi::AnyBuffer* mean = nullptr;
    ffi::AnyBuffer& rstd;
  };
  struct BwdKind {
    std::string_view op;
    bool centered = false, from_output = false;
    double epsilon = 0;
  };
  struct BwdOperands {
    const In& dy;
    const In& x;
    const In& dsum;
    const In& scale;
    const In* bias = nullptr;
    const In* mean = nullptr;
    const In& rstd;
  };
  struct BwdResults {
    ffi::AnyBuffer& dx;
    ffi::AnyBuffer& dscale;
    ffi::AnyBuffer* dbias = nullptr;
    ffi::AnyBuffer& dresidual_bias;
    ffi::AnyBuffer& workspace;
  };
  static constexpr ParamDtype kAnyFloat = ParamDtype::kAnyFloat;

  static auto FwdAttributes() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<double>("epsilon")
        .template Attr<double>("scale_offset");
  }
  static auto BwdAttributes() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<double>("scale_offset");
  }

  static ffi::Error RunFwd(std::string_view op, Context ctx, std::int64_t group_rank,
                           double epsilon, double scale_offset, const FwdOperands& in,
                           const FwdResults& out) {
    RowChecker check(op, in.x, group_rank);
    check.Rows("y", out.y);
    void* const rstd = check.OptionalStat("rstd", out.rstd);
    void* mean = nullptr;
    if (out.mean != nullptr) {
      mean = check.OptionalStat("mean", *out.mean);
      check.BothOrNone("mean", *out.mean, "rstd", out.rstd);
    }
    const void* const residual = check.OptionalRows("residual", in.residual);
    void* const sum = check.OptionalRows("sum", out.sum);
    check.BothOrNone("residual", in.residual, "sum", out.sum);
    const Param residual_bias = check.OptionalParam("residual_bias", in.residual_bias, kAnyFloat);
    if (check.shape().features > 0) {
      check.Needs("residual_bias", in.residual_bias, "residual", in.residual);
    }
    const Param scale = check.OptionalParam("scale", in.scale, kAnyFloat);
    const Param bias =
        in.bias != nullptr ? check.OptionalParam("bias", *in.bias, kAnyFloat) : Param{};
    check.Number("epsilon", epsilon, epsilon >= 0, "finite and >= 0");
    check.Number("scale_offset", scale_offset, true, "finite");
    if (!check.ok()) return check.error();
    return RowNormFwd(ctx, {.shape = check.shape(),
                            .dtype = check.dtype(),
                            .centered = out.mean != nullptr,
                            .epsilon = epsilon,
                            .scale_offset = scale_offset,
                            .x = in.x.untyped_data(),
                            .residual = residual,
                            .residual_bias = residual_bias,
                            .scale = scale,
                            .bias = bias,
                            .y = out.y.untyped_data(),
                            .sum = sum,
                            .mean = mean,
                            .rstd = rstd});
  }

  static ffi::Error RunBwd(const BwdKind& kind, Context ctx, std::int64_t group_rank,
                           double scale_offset, const BwdOperands& in, const BwdResults& out) {
    RowChecker check(kind.op, in.x, group_rank);
    check.Rows("dy", in.dy).Rows("dx", out.dx).Stat("rstd", in.rstd);
    if (in.mean != nullptr) check.Stat("mean", *in.mean);
    const void* const dsum = check.OptionalRows("dsum", in.dsum);
    const Param scale = check.OptionalParam("scale", in.scale, kAnyFloat);
    const Param bias =
        in.bias != nullptr ? check.OptionalParam("bias", *in.bias, kAnyFloat) : Param{};
    const ParamGrad dscale = check.OptionalParamGrad("dscale", out.dscale, kAnyFloat);
    const ParamGrad dbias = out.dbias != nullptr
                                ? check.OptionalParamGrad("dbias", *out.dbias, kAnyFloat)
                                : ParamGrad{};
    const ParamGrad dresidual_bias =
        check.OptionalParamGrad("dresidual_bias", out.dresidual_bias, kAnyFloat);
    std::int64_t sums = 0;
    for (const ParamGrad& grad : {dscale, dbias, dresidual_bias}) sums += grad.data != nullptr;
    const std::int64_t partial_rows = check.PartialRows("workspace", out.workspace, sums);
    check.Number("epsilon", kind.epsilon, true, "finite");
    check.Number("scale_offset", scale_offset, true, "finite");
    if (!check.ok()) return check.error();
    return RowNormBwd(ctx, {.shape = check.shape(),
                            .dtype = check.dtype(),
                            .centered = kind.centered,
                            .from_output = kind.from_output,
                            .epsilon = kind.epsilon,
                            .scale_offset = scale_offset,
                            .dy = in.dy.untyped_data(),
                            .x = in.x.untyped_data(),
                            .dsum = dsum,
                            .scale = scale,
                            .bias = bias,
                            .mean = in.mean != nullptr ? in.mean->untyped_data() : nullptr,
                            .rstd = in.rstd.untyped_data(),
                            .dx = out.dx.untyped_data(),
                            .dscale = dscale,
                            .dbias = dbias,
                            .dresidual_bias = dresidual_bias,
                            .workspace = out.workspace.untyped_data(),
                            .partial_rows = partial_rows});
  }
};

}  // namespace gradops
