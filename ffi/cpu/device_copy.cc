// Copy on the CPU: memcpy, in parallel. Memory traffic: one read, one write.
#include "ops/device_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"

namespace gradops {

namespace {
// Few and large, as the C library stores around the cache only where a copy is large.
constexpr std::int64_t kChunks = 16;
}  // namespace

ffi::Error CopyOnDevice(CpuContext pool, const DeviceCopyArgs& args) {
  const std::int64_t per_chunk = RowsPerChunk(args.bytes, 1, kChunks);
  ParallelFor(pool, (args.bytes + per_chunk - 1) / per_chunk, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * per_chunk;
    std::memcpy(static_cast<char*>(args.y) + begin, static_cast<const char*>(args.x) + begin,
                static_cast<std::size_t>(std::min(per_chunk, args.bytes - begin)));
  });
  return ffi::Error::Success();
}

}  // namespace gradops
