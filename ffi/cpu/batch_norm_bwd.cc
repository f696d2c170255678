// Batch norm on the CPU, backward: see batch_norm_backward.h.
#include "cpu/batch_norm_backward.h"
#include "cpu/batch_norm_small.h"
#include "ops/batch_norm.h"

namespace gradops {

ffi::Error BatchNormBwd(CpuContext pool, const BatchNormBwdArgs& args) {
  if (IsSmall(args.shape)) return SmallBatchNormBwd(pool, args);
  if (args.weighted && IsJoined(args)) return JoinedGroupNormBwd(pool, args);
  if (IsMiddle(args.shape)) return MiddleBatchNormBwd(pool, args);
  if (args.weighted) return LargeGroupNormBwd(pool, args);
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype, [&]<typename T>() {
    const auto with_act = [&]<Act kAct>() {
      return args.shape.inner > 1 ? Backward<T, kAct, false, true>(pool, args)
                                  : Backward<T, kAct, false, false>(pool, args);
    };
    if (!args.relu) return with_act.template operator()<Act::kNone>();
    return args.y == nullptr ? with_act.template operator()<Act::kReluOfArgument>()
                             : with_act.template operator()<Act::kReluOfOutput>();
  });
}

}  // namespace gradops
