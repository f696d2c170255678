// Group norm: the declarations. Arguments and launchers are those of batch norm.
//
// d are the channels, and g are the bundles. The groups of x are the samples.
#pragma once

#include "ops/batch_norm.h"

namespace gradops {

struct GroupNormForward {
  static constexpr char kName[] = "group_norm_fwd";
  using Args = BatchNormFwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"x", "ndm", DtypeRule::kX, &Args::x},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
      {"mean", "g", DtypeRule::kAccum, &Args::mean, Presence::kOptional},
      {"rstd", "g", DtypeRule::kAccum, &Args::rstd, Presence::kOptional},
      {"delta", "g", DtypeRule::kAccum, &Args::delta, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"y", "ndm", DtypeRule::kX, &Args::y, Presence::kOptional},
      {"batch_mean", "g", DtypeRule::kAccum, &Args::batch_mean, Presence::kOptional},
      {"batch_variance", "g", DtypeRule::kAccum, &Args::batch_variance, Presence::kOptional},
      {"batch_rstd", "g", DtypeRule::kAccum, &Args::batch_rstd, Presence::kOptional},
      {"batch_delta", "g", DtypeRule::kAccum, &Args::batch_delta, Presence::kOptional},
  };
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"epsilon", &Args::epsilon, /*non_negative=*/true},
      {"relu", &Args::relu},
      {"silu", &Args::silu},
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
      {"relu", Signature::Rule::kNotBoth, "silu"},
  };
  static ffi::Error Launch(auto context, const Args& args) { return BatchNormFwd(context, args); }
};

struct GroupNormBackward {
  static constexpr char kName[] = "group_norm_bwd";
  using Args = BatchNormBwdArgs;
  static constexpr BufferOf<Args> kOperands[] = {
      {"dy", "ndm", DtypeRule::kX, &Args::dy},
      {"x", "ndm", DtypeRule::kX, &Args::x},
      {"scale", "d", DtypeRule::kAnyFloat, &Args::scale, Presence::kOptional},
      {"bias", "d", DtypeRule::kAnyFloat, &Args::bias, Presence::kOptional},
      {"mean", "g", DtypeRule::kAccum, &Args::mean},
      {"rstd", "g", DtypeRule::kAccum, &Args::rstd},
      {"delta", "g", DtypeRule::kAccum, &Args::delta, Presence::kOptional},
      {"mean_dz", "g", DtypeRule::kAccum, &Args::mean_dz, Presence::kOptional},
      {"mean_dz_x_hat", "g", DtypeRule::kAccum, &Args::mean_dz_x_hat, Presence::kOptional},
  };
  static constexpr BufferOf<Args> kResults[] = {
      {"dx", "ndm", DtypeRule::kX, &Args::dx, Presence::kOptional},
      {"dscale", "d", DtypeRule::kAnyFloat, &Args::dscale, Presence::kOptional},
      {"dbias", "d", DtypeRule::kAnyFloat, &Args::dbias, Presence::kOptional},
      {"sum_dz", "g", DtypeRule::kAccum, &Args::sum_dz, Presence::kOptional},
      {"sum_dz_x_hat", "g", DtypeRule::kAccum, &Args::sum_dz_x_hat, Presence::kOptional},
  };
  static constexpr AttributeOf<Args> kAttributes[] = {{"relu", &Args::relu}, {"silu", &Args::silu}};
  static constexpr Signature::Rule kRules[] = {
      {"mean_dz", Signature::Rule::kBothOrNone, "mean_dz_x_hat"},
      {"dscale", Signature::Rule::kOneOf, "mean_dz"},
      {"dbias", Signature::Rule::kOneOf, "mean_dz"},
      {"sum_dz", Signature::Rule::kNeeds, "dscale"},
      {"sum_dz", Signature::Rule::kBothOrNone, "sum_dz_x_hat"},
      {"relu", Signature::Rule::kNotBoth, "silu"},
  };
  static ffi::Error Launch(auto context, const Args& args) {
    Args weighted = args;
    weighted.weighted = true;
    return BatchNormBwd(context, weighted);
  }
};

}  // namespace gradops
