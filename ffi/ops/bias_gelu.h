// GELU and bias + GELU: arguments, launchers and declarations shared by all backends.
#pragma once

#include <array>
#include <cstdint>

#include "common/signature.h"

namespace gradops {

struct BiasGeluFwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x and y; bias is in the accumulation dtype
  bool approximate;     // tanh form
  bool strict;          // see LimitOf (common/gelu.h)
  const void* x;        // [groups, rows, features]
  Param bias;           // [features]
  void* y;              // [groups, rows, features]
};

struct BiasGeluBwdArgs {
  RowShape shape;
  ffi::DataType dtype;
  bool approximate, strict;
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

struct BiasGeluForward {
  static constexpr char kName[] = "bias_gelu_fwd";
  using Args = BiasGeluFwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"bias", "d", DtypeRule::kAccum, &Args::bias, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {{"y", "nd", DtypeRule::kX, &Args::y}};
  static constexpr AttributeOf<Args> kAttributes[] = {{"approximate", &Args::approximate},
                                                      {"strict", &Args::strict}};
  static constexpr std::array<Signature::Rule, 0> kRules{};
  static ffi::Error Launch(auto context, const Args& args) { return BiasGeluFwd(context, args); }
};

struct BiasGeluBackward {
  static constexpr char kName[] = "bias_gelu_bwd";
  using Args = BiasGeluBwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"dy", "nd", DtypeRule::kX, &Args::dy},
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"bias", "d", DtypeRule::kAccum, &Args::bias, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dx", "nd", DtypeRule::kX, &Args::dx, Presence::kRequired, /*in_place_of=*/"dy"},
      {"dbias", "d", DtypeRule::kAccum, &Args::dbias, Presence::kOptional},
  };
  static constexpr AttributeOf<Args> kAttributes[] = {{"approximate", &Args::approximate},
                                                      {"strict", &Args::strict}};
  static constexpr std::array<Signature::Rule, 0> kRules{};
  static ffi::Error Launch(auto context, const Args& args) { return BiasGeluBwd(context, args); }
};

}  // namespace gradops
