// The list of handlers that only the benchmark and the tests use.
#pragma once

#include "common/dtype.h"
#include "testing/device_clock.h"
#include "testing/device_copy.h"

namespace gradops {

using TestingOps = TypeList<DeviceClock, DeviceCopy>;

}  // namespace gradops
