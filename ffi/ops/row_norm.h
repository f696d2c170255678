// Layer norm and RMS norm: arguments, launchers and declarations shared by all backends.
#pragma once

#include <cstdint>

#include "common/signature.h"

namespace gradops {

// y = x_hat * (scale + scale_offset) + bias with x_hat = (h - mean) * rstd. h is x. With a
// residual, h is x + (residual + residual_bias), rounded to x's dtype. RMS norm is not centered:
// mean is 0. No result may lie in the memory of an operand.
struct RowNormFwdArgs {
  RowShape shape;
  ffi::DataType dtype;    // of x, residual, y and sum
  bool centered, strict;  // strict: see Epsilon (common/math.h)
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
  const void* mean;         // [groups, rows]; null, unless centered and not from_output
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

// The two handlers. `Args` may be a struct with further members: tests force plans that way.
template <class Args>
struct RowNormFwdTable {
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"residual", "nd", DtypeRule::kX, &Args::residual, Presence::kOptional},
      {"residual_bias", "d", DtypeRule::kAnyFloat, &Args::residual_bias, Presence::kOptional},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"y", "nd", DtypeRule::kX, &Args::y},
      {"sum", "nd", DtypeRule::kX, &Args::sum, Presence::kOptional},
      {"mean", "n", DtypeRule::kAccum, &Args::mean, Presence::kOptional},
      {"rstd", "n", DtypeRule::kAccum, &Args::rstd, Presence::kOptional},
  };
  static constexpr Signature::Rule kRules[] = {
      {"residual", Signature::Rule::kBothOrNone, "sum"},
      {"residual_bias", Signature::Rule::kNeeds, "residual"},
      {"mean", Signature::Rule::kBothOrNone, "rstd", "centered"},
      {"mean", Signature::Rule::kNeeds, "centered"},
      {"bias", Signature::Rule::kNeeds, "centered"},
  };
};

struct RowNormForward : RowNormFwdTable<RowNormFwdArgs> {
  static constexpr char kName[] = "row_norm_fwd";
  using Args = RowNormFwdArgs;
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"centered", &Args::centered},
      {"epsilon", &Args::epsilon, /*non_negative=*/true},
      {"scale_offset", &Args::scale_offset},
      {"strict", &Args::strict},
  };
  static ffi::Error Launch(auto context, const Args& args) { return RowNormFwd(context, args); }
};

template <class Args>
struct RowNormBwdTable {
  static constexpr BufferOf<Args> kOperands[] = {
      {"dy", "nd", DtypeRule::kX, &Args::dy},
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"dsum", "nd", DtypeRule::kX, &Args::dsum, Presence::kOptional},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
      {"mean", "n", DtypeRule::kAccum, &Args::mean, Presence::kOptional},
      {"rstd", "n", DtypeRule::kAccum, &Args::rstd},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dx", "nd", DtypeRule::kX, &Args::dx},
      {"dscale", "d", DtypeRule::kAnyFloat, &Args::dscale, Presence::kOptional},
      {"dbias", "d", DtypeRule::kAnyFloat, &Args::dbias, Presence::kOptional},
      {"dresidual_bias", "d", DtypeRule::kAnyFloat, &Args::dresidual_bias, Presence::kOptional},
  };
  static constexpr Signature::Rule kRules[] = {
      {"mean", Signature::Rule::kOneOf, "from_output", "centered"},
      {"mean", Signature::Rule::kNeeds, "centered"},
      {"bias", Signature::Rule::kNeeds, "from_output"},
      {"bias", Signature::Rule::kNeeds, "centered"},
      {"dbias", Signature::Rule::kNeeds, "centered"},
  };
};

struct RowNormBackward : RowNormBwdTable<RowNormBwdArgs> {
  static constexpr char kName[] = "row_norm_bwd";
  using Args = RowNormBwdArgs;
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"centered", &Args::centered},
      {"from_output", &Args::from_output},
      {"scale_offset", &Args::scale_offset},
      {"epsilon", &Args::epsilon},
  };
  static ffi::Error Launch(auto context, const Args& args) { return RowNormBwd(context, args); }
};

}  // namespace gradops
