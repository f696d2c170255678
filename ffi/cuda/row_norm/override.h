// What tests force upon layer norm's choice of a plan, in the whole process.
#pragma once

#include "cuda/row_norm/policy.h"

namespace gradops {

RowOverride& ForcedRowPlan();  // cuda/row_norm/forward.cu

}  // namespace gradops
