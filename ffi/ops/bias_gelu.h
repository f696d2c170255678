// GELU and bias + GELU: arguments, launchers, checks and bindings shared by all backends.
#pragma once

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

struct BiasGeluFwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x and y; bias is in the accumulation dtype
  bool approximate;     // tanh form
  const void* x;        // [groups, rows, features]
  Param bias;           // [features]
  void* y;              // [groups, rows, features]
};

struct BiasGeluBwdArgs {
  RowShape shape;
  ffi::DataType dtype;
  bool approximate;
  const void* dy;  // [groups, rows, features]
  const void* x;   // [groups, rows, features]
  Param bias;      // [features]
  void* dx;        // [groups, rows, features]; may be dy's buffer
  void* dbias;     // [groups, features]; null: not wanted
  // Scratch: [groups, partial_rows, 1, features] in the accumulation dtype. partial_rows is an
  // upper bound: a launcher may use fewer. It is 0 if dbias is not wanted.
  void* workspace;
  std::int64_t partial_rows;
};

ffi::Error BiasGeluFwd(CpuContext, const BiasGeluFwdArgs&);   // cpu/bias_gelu.cc
ffi::Error BiasGeluBwd(CpuContext, const BiasGeluBwdArgs&);   // cpu/bias_gelu.cc
ffi::Error BiasGeluFwd(CudaContext, const BiasGeluFwdArgs&);  // cuda/gelu/bias_gelu.cu
ffi::Error BiasGeluBwd(CudaContext, const BiasGeluBwdArgs&);  // cuda/gelu/bias_gelu.cu

template <class Context>
struct BiasGelu {
  static ffi::Error Fwd(Context ctx, std::int64_t group_rank, bool approximate, In x, In bias,
                        Out y) {
    RowChecker check("bias_gelu_fwd", x, group_rank);
    check.Rows("y", *y);
    const Param bias_param = check.OptionalParam("bias", bias, ParamDtype::kAccum);
    if (!check.ok()) return check.error();
    return BiasGeluFwd(ctx, {.shape = check.shape(),
                             .dtype = check.dtype(),
                             .approximate = approximate,
                             .x = x.untyped_data(),
                             .bias = bias_param,
                             .y = y->untyped_data()});
  }
  static auto BindFwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<bool>("approximate")
        .template Arg<In>()               // x
        .template Arg<In>()               // bias
        .template Ret<ffi::AnyBuffer>();  // y
  }

  static ffi::Error Bwd(Context ctx, std::int64_t group_rank, bool approximate, In dy, In x,
                        In bias, Out dx, Out dbias, Out workspace) {
    RowChecker check("bias_gelu_bwd", x, group_rank);
    check.Rows("dy", dy).Rows("dx", *dx);
    const Param bias_param = check.OptionalParam("bias", bias, ParamDtype::kAccum);
    void* const dbias_data = check.OptionalParamGrad("dbias", *dbias, ParamDtype::kAccum).data;
    const std::int64_t partial_rows =
        check.PartialRows("workspace", *workspace, dbias_data != nullptr);
    if (!check.ok()) return check.error();
    return BiasGeluBwd(ctx, {.shape = check.shape(),
                             .dtype = check.dtype(),
                             .approximate = approximate,
                             .dy = dy.untyped_data(),
                             .x = x.untyped_data(),
                             .bias = bias_param,
                             .dx = dx->untyped_data(),
                             .dbias = dbias_data,
                             .workspace = workspace->untyped_data(),
                             .partial_rows = partial_rows});
  }
  static auto BindBwd() {
    return Bind<Context>()
        .template Attr<std::int64_t>("group_rank")
        .template Attr<bool>("approximate")
        .template Arg<In>()               // dy
        .template Arg<In>()               // x
        .template Arg<In>()               // bias
        .template Ret<ffi::AnyBuffer>()   // dx
        .template Ret<ffi::AnyBuffer>()   // dbias
        .template Ret<ffi::AnyBuffer>();  // workspace
  }
};

}  // namespace gradops
