// Copy on the CPU, in parallel. Memory traffic: one read, one write.
//
// Large arrays are stored past the caches (cpu/stream.h). Other stores read every line before they
// overwrite it. Two EPYC cores, 64 MB: 27 GB/s, but 17 GB/s with memcpy.
#include "testing/device_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/stream.h"

namespace gradops {
namespace {

constexpr std::int64_t kChunks = 64;
constexpr std::int64_t kLine = 64;

}  // namespace

ffi::Error CopyOnDevice(CpuContext pool, const DeviceCopyArgs& args) {
  if (args.bytes == 0) return ffi::Error::Success();
  const bool streamed = PrepareResult(args.y, args.bytes, {args.x});
  const std::int64_t per_chunk =
      RowsPerChunk((args.bytes + kLine - 1) / kLine, kLine, kChunks) * kLine;
  ParallelFor(pool, (args.bytes + per_chunk - 1) / per_chunk, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * per_chunk;
    char* const to = static_cast<char*>(args.y) + begin;
    const char* const from = static_cast<const char*>(args.x) + begin;
    const std::int64_t bytes = std::min(per_chunk, args.bytes - begin);
    if (streamed) {
      StreamCopy(to, from, bytes);
      StreamFence();
    } else {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
    }
  });
  return ffi::Error::Success();
}

}  // namespace gradops
