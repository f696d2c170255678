#include "testing/device_clock.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace gradops {

ffi::Error ReadClock(CpuContext, double wait_ms, std::uint32_t* ns) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(wait_ms));
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  const auto now = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  std::memcpy(ns, &now, sizeof(now));  // all supported processors store the low half first
  return ffi::Error::Success();
}

}  // namespace gradops
