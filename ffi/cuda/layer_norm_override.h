// What tests force upon layer norm's choice of a plan, in the whole process.
#pragma once

#include "cuda/layer_norm_policy.h"

namespace gradops {

RowOverride& ForcedRowPlan();  // cuda/layer_norm_fwd.cu

}  // namespace gradops
