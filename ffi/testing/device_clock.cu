#include "testing/device_clock.h"

#include <cstdint>

#include "cuda/common/launch.cuh"

namespace gradops {
namespace {

// The timer ticks every 32 ns on an H200.
__device__ std::uint64_t Now() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Runs after all work before it in the stream.
__global__ void ReadClockKernel(std::uint64_t wait_ns, std::uint32_t* ns) {
  const std::uint64_t start = Now();
  std::uint64_t now = start;
  while (now - start < wait_ns) now = Now();
  ns[0] = static_cast<std::uint32_t>(now), ns[1] = static_cast<std::uint32_t>(now >> 32);
}

}  // namespace

ffi::Error ReadClock(CudaContext stream, double wait_ms, std::uint32_t* ns) {
  ReadClockKernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(1e6 * wait_ms), ns);
  return LastError("device_clock");
}

}  // namespace gradops
