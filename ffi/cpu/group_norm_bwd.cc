// Group norm on the CPU, backward: see batch_norm_backward.h.
#include "cpu/batch_norm_backward.h"
#include "ops/batch_norm.h"

namespace gradops::batch_norm {

ffi::Error WeightedBwd(const CpuContext& pool, const BatchNormBwdArgs& args) {
  if (args.silu) return Dispatch<Act::kSilu, true>(pool, args);
  return args.relu ? Dispatch<Act::kReluOfArgument, true>(pool, args)
                   : Dispatch<Act::kNone, true>(pool, args);
}

}  // namespace gradops::batch_norm
