// Accesses of 16 bytes, or of one element where rows do not start at 16-byte boundaries.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace gradops {

inline constexpr int kVecBytes = 16;

// Elements of T in one 16-byte access.
template <typename T>
inline constexpr int kVec = kVecBytes / static_cast<int>(sizeof(T));

// Whether all are at 16-byte boundaries; null is.
template <typename... Pointers>
bool Aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

// How many elements before `p` the last 16-byte boundary lies: 0 if p is aligned.
template <typename T>
__device__ __forceinline__ int Misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(p) % kVecBytes / sizeof(T));
}

// What one access moves: 16 bytes or one element.
template <typename T, int W>
struct alignas(W * sizeof(T)) Pack {
  static_assert(W == 1 || W == kVec<T>);
  T v[W];
};

// Loads what no thread writes; p is aligned to the pack.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> LoadPack(const T* p) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.v[0] = __ldg(p);
  } else {
    *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
  }
  return pack;
}

// The same for what is read once: it shall not push parameters out of the L1 cache. Not by the
// non-coherent path, so the thread that reads p may write there later (dx may be dy's buffer).
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> LoadPackOnce(const T* p) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.v[0] = __ldcs(p);
  } else {
    *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(p));
  }
  return pack;
}

// The same from shared memory.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> LoadShared(const T* p) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.v[0] = *p;
  } else {
    *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(p);
  }
  return pack;
}

// Makes the compiler convert 16-bit elements anew in every pass over them: converted ones would
// take twice the registers.
template <typename T, int W>
__device__ __forceinline__ void KeepPacked(Pack<T, W>& pack) {
  if constexpr (sizeof(T) == 2 && W > 1) {
    auto& words = *reinterpret_cast<uint4*>(&pack);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
}

template <int W, typename T>
__device__ __forceinline__ void StorePack(T* p, const Pack<T, W>& pack) {
  if constexpr (W == 1) {
    *p = pack.v[0];
  } else {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&pack);
  }
}

}  // namespace gradops
