// Large results: stores that go past the caches, and memory that is new to the process. Little of a
// large result would stay in the caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__linux__)
#include <fstream>
#include <string>

#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define GRADOPS_STREAMS 1
#endif
#endif

namespace gradops {

#if defined(GRADOPS_STREAMS)
inline constexpr bool kStreams = true;
#else
inline constexpr bool kStreams = false;
#endif

// The number of bytes from `from` to the next start of a cache line.
inline std::int64_t BytesToLine(const void* from) {
  return static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(from) % 64);
}

// Stores kBytes bytes past the caches. kBytes divides 64 and the address `to`.
template <int kBytes>
void StreamBytes(void* to, const void* from) {
#if defined(GRADOPS_STREAMS)
  if constexpr (kBytes == 8) {
    long long bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    _mm_stream_si64(static_cast<long long*>(to), bytes);
    return;
  } else if constexpr (kBytes == 16) {
    _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
    return;
#if defined(__AVX__)
  } else if constexpr (kBytes == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to),
                        _mm256_loadu_si256(static_cast<const __m256i*>(from)));
    return;
#endif
#if defined(__AVX512F__)
  } else if constexpr (kBytes == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
    return;
#endif
  }
#endif
  std::memcpy(to, from, kBytes);
}

// Copies whole cache lines past the caches. The bytes before and after them are copied as usual.
inline void StreamCopy(void* to, const void* from, std::int64_t bytes) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const std::int64_t head = std::min(bytes, BytesToLine(to));
  std::memcpy(out, in, static_cast<std::size_t>(head));
  out += head, in += head, bytes -= head;
#if defined(__AVX__)
  constexpr int kBytes = 32;
#else
  constexpr int kBytes = 16;
#endif
  for (; bytes >= 64; out += 64, in += 64, bytes -= 64) {
    for (int i = 0; i < 64; i += kBytes) StreamBytes<kBytes>(out + i, in + i);
  }
  std::memcpy(out, in, static_cast<std::size_t>(bytes));
}

// Call this after a task's last store past the caches. Then other threads see the stored values.
inline void StreamFence() {
#if defined(GRADOPS_STREAMS)
  _mm_sfence();
#endif
}

#if defined(__linux__)
// Whether the process has touched the pages at four places.
inline bool IsResident(const void* memory, std::int64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  constexpr std::int64_t kPlaces = 4;
  for (std::int64_t i = 0; i < kPlaces; ++i) {
    const auto byte = reinterpret_cast<std::uintptr_t>(memory) +
                      static_cast<std::uintptr_t>((bytes - 1) / (kPlaces - 1) * i);
    unsigned char is_there = 0;
    if (mincore(reinterpret_cast<void*>(byte / page * page), page, &is_there) != 0) return false;
    if ((is_there & 1) == 0) return false;
  }
  return true;
}

// Whether the operating system gives huge pages to a process that asks. The file lists "always",
// "madvise" and "never". The setting that holds is in brackets.
inline bool HasHugePages() {
  static const bool has = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    std::string words;
    return static_cast<bool>(std::getline(file, words)) &&
           words.find("[never]") == std::string::npos;
  }();
  return has;
}

// Asks for huge pages (2 MB on x86-64). The advice ends with the memory's mapping.
inline bool AdviseHugePages(void* memory, std::int64_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t first = (begin + page - 1) / page * page,
                       end = (begin + static_cast<std::uintptr_t>(bytes)) / page * page;
  return HasHugePages() && first < end &&
         madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE) == 0;
}
#else
inline bool IsResident(const void* /*memory*/, std::int64_t /*bytes*/) {
  return true;
}
inline bool AdviseHugePages(void* /*memory*/, std::int64_t /*bytes*/) {
  return false;
}
#endif

// Prepares a result's memory before the result is written. Returns whether stores go past the
// caches.
//
// Stores of large results do, because memory need then not be read before it is written. There are
// two exceptions. One is a result that takes over an operand's memory. The second is memory in
// small pages: each page is zeros in the caches after the first write to it. Layer norm takes 2.5
// ms there, and 2.7 past the caches. Nanoseconds per element of float32 [8192, 2048], on one core
// of an EPYC with 32 MB of L3:
//                                              into the caches  past the caches
//   layer norm forward                         0.63             0.33
//   layer norm backward                        0.90             0.70
//   RMS norm forward                           0.48             0.29
//   RMS norm backward                          0.75             0.55
//   two calls of RMS norm in a chain, 4 MB     0.34             0.52
//   two calls of RMS norm in a chain, 8 MB     0.44             0.52
//   two calls of RMS norm in a chain, 16 MB    0.80             0.57
//
// In a chain, a call reads what the call before wrote. GELU forward of float32 [8192, 2048] takes
// 4.9 to 5.1 ms on two cores of a Xeon with 260 MB of L3. Past the caches, it takes 3.8 to 3.9 ms.
//
// malloc maps memory for each large array. It is new to the process, so this function asks for huge
// pages there. The first write to each small page costs more than all other work. Copies run at 60
// GB/s in small pages, and at 110 GB/s in huge pages. Milliseconds for float32 [8192, 2048], on two
// cores of a Zen 5, each call's result in new memory:
//                 small pages   huge, into the caches   huge, past the caches
//   layer norm    17.5          6.1                     5.8
//   GELU          18            10.3                    4.6
//
// In the memory of an earlier call's result, the first one there, layer norm takes 2.7 and 1.9 ms.
// Huge pages pay from 4 MB on: value and gradient of 12 ops on [512, 2048] took 19.6 ms, then 13.1.
inline constexpr std::int64_t kStreamedBytes = 16 << 20, kHugeBytes = 4 << 20;
inline bool PrepareResult(void* result, std::int64_t bytes,
                          std::initializer_list<const void*> operands) {
  if (std::find(operands.begin(), operands.end(), result) != operands.end()) return false;
#if defined(GRADOPS_STREAM_SMALL)  // for tests: some small results, not all
  if (result != nullptr && bytes > 0 && !IsResident(result, bytes)) AdviseHugePages(result, bytes);
  return bytes % 3 != 0;
#else
  if (result == nullptr || bytes < kHugeBytes) return false;
  const bool is_ready = IsResident(result, bytes) || AdviseHugePages(result, bytes);
  return kStreams && is_ready && bytes >= kStreamedBytes;
#endif
}

}  // namespace gradops
