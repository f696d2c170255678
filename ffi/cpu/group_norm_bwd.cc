// Group norm on the CPU, backward: see batch_norm_backward.h.
#include "cpu/batch_norm_backward.h"
#include "ops/batch_norm.h"

namespace gradops {

ffi::Error LargeGroupNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "group_norm_bwd", args.dtype, [&]<typename T>() {
    const auto with_act = [&]<Act kAct>() {
      return args.shape.inner > 1 ? Backward<T, kAct, true, true>(pool, args)
                                  : Backward<T, kAct, true, false>(pool, args);
    };
    if (args.silu) return with_act.template operator()<Act::kSilu>();
    return args.relu ? with_act.template operator()<Act::kReluOfArgument>()
                     : with_act.template operator()<Act::kNone>();
  });
}

}  // namespace gradops
