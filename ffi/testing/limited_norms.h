// Layer norm and RMS norm with limits of the CUDA plan, so that tests reach each kernel.
#pragma once

#include <cstdint>

#include "common/signature.h"
#include "cuda/row_norm/launch.h"
#include "ops/row_norm.h"

namespace gradops {

// A norm's arguments, and a RowPlanLimits as further attributes.
template <class NormArgs>
struct Limited : NormArgs {
  std::int64_t architecture, max_cluster, max_threads, max_stages, vectors;
  bool stream;

  RowPlanLimits limits() const {
    return {.architecture = static_cast<int>(architecture),
            .max_cluster = static_cast<int>(max_cluster),
            .max_threads = static_cast<int>(max_threads),
            .max_stages = static_cast<int>(max_stages),
            .stream = stream,
            .vectors = static_cast<int>(vectors)};
  }
};

struct LimitedNormForward : RowNormFwdTable<Limited<RowNormFwdArgs>> {
  static constexpr char kName[] = "row_norm_fwd_limited";
  using Args = Limited<RowNormFwdArgs>;
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"centered", &Args::centered},
      {"epsilon", &Args::epsilon, /*non_negative=*/true},
      {"scale_offset", &Args::scale_offset},
      {"architecture", &Args::architecture},
      {"max_cluster", &Args::max_cluster},
      {"max_threads", &Args::max_threads},
      {"max_stages", &Args::max_stages},
      {"vectors", &Args::vectors},
      {"stream", &Args::stream},
  };
  static ffi::Error Launch(CudaContext stream, const Args& args) {
    return RowNormFwd(stream, args, args.limits());
  }
};

struct LimitedNormBackward : RowNormBwdTable<Limited<RowNormBwdArgs>> {
  static constexpr char kName[] = "row_norm_bwd_limited";
  using Args = Limited<RowNormBwdArgs>;
  static constexpr AttributeOf<Args> kAttributes[] = {
      {"centered", &Args::centered},         {"from_output", &Args::from_output},
      {"scale_offset", &Args::scale_offset}, {"epsilon", &Args::epsilon},
      {"architecture", &Args::architecture}, {"max_cluster", &Args::max_cluster},
      {"max_threads", &Args::max_threads},   {"max_stages", &Args::max_stages},
      {"vectors", &Args::vectors},           {"stream", &Args::stream},
  };
  static ffi::Error Launch(CudaContext stream, const Args& args) {
    return RowNormBwd(stream, args, args.limits());
  }
};

}  // namespace gradops
