// Batch norm on the CPU, backward: see batch_norm_backward.h.
#include "cpu/batch_norm_backward.h"
#include "cpu/batch_norm_small.h"
#include "ops/batch_norm.h"

namespace gradops {

ffi::Error BatchNormBwd(CpuContext pool, const BatchNormBwdArgs& args) {
  using namespace batch_norm;
  if (IsSmall(args.shape)) return SmallBatchNormBwd(pool, args);
  if (args.weighted && IsJoined(args)) return JoinedGroupNormBwd(pool, args);
  if (IsMiddle(args.shape)) return MiddleBatchNormBwd(pool, args);
  if (args.weighted) return WeightedBwd(pool, args);
  if (!args.relu) return Dispatch<Act::kNone, false>(pool, args);
  return args.y == nullptr ? Dispatch<Act::kReluOfArgument, false>(pool, args)
                           : Dispatch<Act::kReluOfOutput, false>(pool, args);
}

}  // namespace gradops
