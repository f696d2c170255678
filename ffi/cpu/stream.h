// Loads ahead of their use, and stores that go past the caches: for results so large that little of
// them would stay there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gradops {

// Reads the lines of n elements ahead of their use; they need not be there.
template <typename T>
void Prefetch(const T* elements, std::int64_t n) {
  const auto start = reinterpret_cast<std::uintptr_t>(elements);
  for (std::uintptr_t i = 0; i < static_cast<std::uintptr_t>(n) * sizeof(T); i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(start + i));
  }
}

// Results of at least as many bytes are streamed: memory then need not be read before it is
// written. Batch norm does so. Tried for layer norm and GELU of [8192, 2048], two cores, and not
// kept: in memory that is used again, float32 took 16.7 and 22 to 24 ms instead of 18 to 19 and 25,
// bfloat16 14 to 16 and 14 to 15 instead of 14 to 15 and 12; in memory that is new to the process,
// float32 34 to 35 and 40 to 44 ms instead of 25 to 27 and 31 to 36, as the kernel's zeros are in
// the caches then.
inline constexpr std::int64_t kStreamedBytes = 4 << 20;

// Whole cache lines go past the caches, what is left at the ends does not.
inline void StreamCopy(void* to, const void* from, std::int64_t bytes) {
#if defined(__SSE2__)
  constexpr std::int64_t kLine = 64;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const std::int64_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::intptr_t>(to) % kLine) % kLine);
  std::memcpy(out, in, static_cast<std::size_t>(head));
  out += head, in += head, bytes -= head;
  for (; bytes >= kLine; out += kLine, in += kLine, bytes -= kLine) {
#if defined(__AVX__)
    for (std::int64_t i = 0; i < kLine; i += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
    }
#else
    for (std::int64_t i = 0; i < kLine; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    }
#endif
  }
  std::memcpy(out, in, static_cast<std::size_t>(bytes));
#else
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

// After the last StreamCopy of a task, so that other threads see what it wrote.
inline void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace gradops
