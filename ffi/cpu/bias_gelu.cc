#include "ops/bias_gelu.h"
namespace gradops {
ffi::Error BiasGeluFwd(CpuContext, const BiasGeluFwdArgs&) { return ffi::Error::Internal("stub"); }
ffi::Error BiasGeluBwd(CpuContext, const BiasGeluBwdArgs&) { return ffi::Error::Internal("stub"); }
}
