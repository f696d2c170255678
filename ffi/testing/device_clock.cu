#include "testing/device_clock.h"

#include <cstdint>

#include "cuda/common/launch.cuh"

namespace gradops {
namespace {

// Runs after all work before it in the stream. The timer ticks every 32 ns on an H200.
__global__ void ReadClockKernel(std::uint32_t* ns) {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  ns[0] = static_cast<std::uint32_t>(now), ns[1] = static_cast<std::uint32_t>(now >> 32);
}

}  // namespace

ffi::Error ReadClock(CudaContext stream, std::uint32_t* ns) {
  ReadClockKernel<<<1, 1, 0, stream>>>(ns);
  return LastError("device_clock");
}

}  // namespace gradops
