// Copy on the device. Memory traffic: one read, one write.
//
// A kernel is used because the driver copies some sizes slowly (benchmarks/tuning/README.md).
#include "testing/device_copy.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

constexpr int kThreads = 256;

// A thread copies 16 bytes, by one access each if both arrays are aligned.
__global__ void __launch_bounds__(kThreads)
    CopyKernel(const __grid_constant__ DeviceCopyArgs args, bool aligned) {
  const std::int64_t start = (ItemOfBlock() * kThreads + threadIdx.x) * kVecBytes;
  const char* const x = static_cast<const char*>(args.x) + start;
  char* const y = static_cast<char*>(args.y) + start;
  const std::int64_t bytes = min(args.bytes - start, std::int64_t{kVecBytes});
  if (aligned && bytes == kVecBytes) {
    __stcs(reinterpret_cast<uint4*>(y), LoadWordsOnce(x));
  } else {
    for (std::int64_t i = 0; i < bytes; ++i) y[i] = x[i];
  }
}

}  // namespace

ffi::Error CopyOnDevice(CudaContext stream, const DeviceCopyArgs& args) {
  if (args.bytes == 0) return ffi::Error::Success();
  const dim3 grid = BlockPerItem(CeilDiv(args.bytes, kThreads * kVecBytes));
  CopyKernel<<<grid, kThreads, 0, stream>>>(args, Aligned(args.x, args.y));
  return LastError("device_copy");
}

}  // namespace gradops
