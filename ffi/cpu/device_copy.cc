// Copy on the CPU, in parallel. Memory traffic: one read, one write.
//
// Large arrays are stored around the cache, where the processor has such stores: others read every
// line before they overwrite it (two EPYC cores, 64 MB: 27 GB/s, memcpy 17).
#include "ops/device_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gradops {
namespace {

constexpr std::int64_t kChunks = 64;
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kMinStreamedBytes = 8 << 20;  // less stays in the cache

void Copy(char* y, const char* x, std::int64_t bytes, [[maybe_unused]] bool stream) {
  std::int64_t done = 0;
#if defined(__SSE2__)
  if (stream && reinterpret_cast<std::uintptr_t>(y) % sizeof(__m128i) == 0) {
    for (; done + kLine <= bytes; done += kLine) {
      for (std::int64_t i = done; i < done + kLine; i += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(y + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
      }
    }
    _mm_sfence();  // the stores above are ordered with no other ones
  }
#endif
  std::memcpy(y + done, x + done, static_cast<std::size_t>(bytes - done));
}

}  // namespace

ffi::Error CopyOnDevice(CpuContext pool, const DeviceCopyArgs& args) {
  if (args.bytes == 0) return ffi::Error::Success();
  const bool stream = args.bytes >= kMinStreamedBytes;
  const std::int64_t per_chunk =
      RowsPerChunk((args.bytes + kLine - 1) / kLine, kLine, kChunks) * kLine;
  ParallelFor(pool, (args.bytes + per_chunk - 1) / per_chunk, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * per_chunk;
    Copy(static_cast<char*>(args.y) + begin, static_cast<const char*>(args.x) + begin,
         std::min(per_chunk, args.bytes - begin), stream);
  });
  return ffi::Error::Success();
}

}  // namespace gradops
