// Softmax cross-entropy: arguments, launchers and declarations shared by all backends.
//
// The kernels know neither label smoothing nor other options. Forward reduces each row of logits to
// a few numbers. JAX's operations compute the loss from these numbers. The derivative of these
// operations gives three numbers for each row. Backward computes dx from them:
//   dx[c] = factor * exp(x[c] - largest) + uniform + (c == label ? target : 0)
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "common/signature.h"

namespace gradops {

// A row with this label is ignored, and not even read. Its dx is 0. Forward gives the numbers of a
// row of one logit of 0.
inline constexpr std::int32_t kIgnoredLabel = std::numeric_limits<std::int32_t>::min();

// The classes of a row may be a shard of all classes: they are classes[0], classes[0] + 1, ... A
// label elsewhere belongs to another shard.
struct CrossEntropyFwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x; all results are in the accumulation dtype
  const void* x;        // [groups, rows, features]: the logits
  const void* labels;   // [groups, rows], int32
  Param classes;        // [features], int32
  void* largest;        // [groups, rows]: the largest logit, not counting NaN
  void* total;  // [groups, rows]: the sum of exp(x - largest); of exp(x) if largest is infinite
  void* logit_of_label;      // [groups, rows]: 0 if the label belongs to another shard
  void* sum_of_differences;  // [groups, rows]: the sum of x - largest; null: not wanted
};

struct CrossEntropyBwdArgs {
  RowShape shape;
  ffi::DataType dtype;  // of x and dx; all other floats are in the accumulation dtype
  const void* x;        // [groups, rows, features]
  const void* labels;   // [groups, rows], int32
  Param classes;        // [features], int32
  const void* largest;  // [groups, rows]
  const void* factor;   // [groups, rows]
  const void* target;   // [groups, rows]
  const void* uniform;  // [groups, rows]; null: 0
  void* dx;             // [groups, rows, features]; may be x's buffer
};

ffi::Error CrossEntropyFwd(CpuContext, const CrossEntropyFwdArgs&);   // cpu/cross_entropy.cc
ffi::Error CrossEntropyBwd(CpuContext, const CrossEntropyBwdArgs&);   // cpu/cross_entropy.cc
ffi::Error CrossEntropyFwd(CudaContext, const CrossEntropyFwdArgs&);  // cuda/cross_entropy/*.cu
ffi::Error CrossEntropyBwd(CudaContext, const CrossEntropyBwdArgs&);  // cuda/cross_entropy/*.cu

struct CrossEntropyForward {
  static constexpr char kName[] = "softmax_cross_entropy_fwd";
  using Args = CrossEntropyFwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"labels", "n", DtypeRule::kInt32, &Args::labels},
      {"classes", "d", DtypeRule::kInt32, &Args::classes},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"largest", "n", DtypeRule::kAccum, &Args::largest},
      {"total", "n", DtypeRule::kAccum, &Args::total},
      {"logit_of_label", "n", DtypeRule::kAccum, &Args::logit_of_label},
      {"sum_of_differences", "n", DtypeRule::kAccum, &Args::sum_of_differences,
       Presence::kOptional},
  };
  static constexpr std::array<AttributeOf<Args>, 0> kAttributes{};
  static constexpr std::array<Signature::Rule, 0> kRules{};
  static ffi::Error Launch(auto context, const Args& args) {
    return CrossEntropyFwd(context, args);
  }
};

struct CrossEntropyBackward {
  static constexpr char kName[] = "softmax_cross_entropy_bwd";
  using Args = CrossEntropyBwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "nd", DtypeRule::kX, &Args::x},
      {"labels", "n", DtypeRule::kInt32, &Args::labels},
      {"classes", "d", DtypeRule::kInt32, &Args::classes},
      {"largest", "n", DtypeRule::kAccum, &Args::largest},
      {"factor", "n", DtypeRule::kAccum, &Args::factor},
      {"target", "n", DtypeRule::kAccum, &Args::target},
      {"uniform", "n", DtypeRule::kAccum, &Args::uniform, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dx", "nd", DtypeRule::kX, &Args::dx, Presence::kRequired, /*in_place_of=*/"x"},
  };
  static constexpr std::array<AttributeOf<Args>, 0> kAttributes{};
  static constexpr std::array<Signature::Rule, 0> kRules{};
  static ffi::Error Launch(auto context, const Args& args) {
    return CrossEntropyBwd(context, args);
  }
};

}  // namespace gradops
