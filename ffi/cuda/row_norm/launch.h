// Layer norm's launchers with limits of the plan, for tests. ops/row_norm.h has them without.
#pragma once

#include "cuda/row_norm/plan.h"
#include "ops/row_norm.h"

namespace gradops {

ffi::Error RowNormFwd(CudaContext, const RowNormFwdArgs&, const RowPlanLimits&);  // forward.cu
ffi::Error RowNormBwd(CudaContext, const RowNormBwdArgs&, const RowPlanLimits&);  // backward.cu

}  // namespace gradops
