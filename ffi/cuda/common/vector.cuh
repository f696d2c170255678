// Accesses of 16 bytes, or of one element where rows do not start at 16-byte boundaries.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace gradops {

inline constexpr int kVecBytes = 16;

// Elements of T in one 16-byte access.
template <typename T>
inline constexpr int kVec = kVecBytes / static_cast<int>(sizeof(T));

// Whether all pointers are at 16-byte boundaries; null counts as one.
template <typename... Pointers>
GRADOPS_HOST_DEVICE bool Aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

// The number of elements from the last 16-byte boundary to `p`: 0 if p is aligned.
template <typename T>
__device__ __forceinline__ int Misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(p) % kVecBytes / sizeof(T));
}

// An unsigned integer type for an element's bits.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;

// A vector: the elements of one memory access, which are a vector of 16 bytes or one element.
template <typename T, int W>
struct alignas(W * sizeof(T)) Vector {
  static_assert(W == 1 || W == kVec<T>);
  T v[W];
};

// Loads a vector that no thread of the kernel writes; p is aligned to the vector.
template <int W, typename T>
__device__ __forceinline__ Vector<T, W> LoadVector(const T* p) {
  Vector<T, W> vector;
  if constexpr (W == 1) {
    vector.v[0] = __ldg(p);
  } else {
    *reinterpret_cast<uint4*>(&vector) = __ldg(reinterpret_cast<const uint4*>(p));
  }
  return vector;
}

// Loads 16 bytes that are read once, and should not push parameters out of the L1 cache. The load
// does not take the non-coherent path, which costs 4 % of the bandwidth (ffi/cuda/TUNING.md). So
// the thread that reads p may write there later: dx may be dy's buffer.
__device__ __forceinline__ uint4 LoadWordsOnce(const void* p) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(p)
               : "memory");
  return words;
}

// A vector as the words of one access. If a vector is also put together from elements somewhere,
// the compiler takes all vectors apart.
template <int W, typename T>
__device__ __forceinline__ uint4& AsWords(Vector<T, W>& vector) {
  static_assert(sizeof(vector) == kVecBytes);
  return reinterpret_cast<uint4&>(vector);
}

template <int W, typename T>
__device__ __forceinline__ Vector<T, W> LoadVectorOnce(const T* p) {
  Vector<T, W> vector;
  if constexpr (W == 1) {
    vector.v[0] = __ldcs(p);
  } else {
    AsWords(vector) = LoadWordsOnce(p);
  }
  return vector;
}

// Loads a vector that other threads read too, and that may stay in the L1 cache. Loads and stores
// stay in order, so that a loaded vector does not take registers before it is needed.
template <int W, typename T>
__device__ __forceinline__ Vector<T, W> LoadVectorAgain(const T* p) {
  Vector<T, W> vector;
  uint4& words = AsWords(vector);
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(p)
               : "memory");
  return vector;
}

// Loads a vector that threads may write, in shared memory or in a workspace.
template <int W, typename T>
__device__ __forceinline__ Vector<T, W> LoadPlain(const T* p) {
  Vector<T, W> vector;
  if constexpr (W == 1) {
    vector.v[0] = *p;
  } else {
    *reinterpret_cast<uint4*>(&vector) = *reinterpret_cast<const uint4*>(p);
  }
  return vector;
}

// Converts a vector's elements to the type of the arithmetic. A bfloat16 takes one instruction if
// it comes from a 32-bit word, and two if the compiler has taken the word apart.
template <int W, typename T, typename A>
__device__ __forceinline__ void Widen(const Vector<T, W>& vector, A (&values)[W]) {
  if constexpr (std::is_same_v<T, BFloat16> && W > 1) {
    const auto& words = reinterpret_cast<const std::uint32_t (&)[W / 2]>(vector);
#pragma unroll
    for (int j = 0; j < W; j += 2) {
      values[j] = __uint_as_float(words[j / 2] << 16);
      values[j + 1] = __uint_as_float(words[j / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(vector.v[j]);
  }
}

// Rounds values to a vector.
template <typename T, int W, typename A>
__device__ __forceinline__ Vector<T, W> Narrow(const A (&values)[W]) {
  Vector<T, W> vector;
  if constexpr (sizeof(T) == 2 && W > 1) {
    using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
    Pair pairs[W / 2];
#pragma unroll
    for (int j = 0; j < W; j += 2) {
      if constexpr (std::is_same_v<T, Half>) {
        pairs[j / 2] = __floats2half2_rn(values[j], values[j + 1]);
      } else {
        pairs[j / 2] = __floats2bfloat162_rn(values[j], values[j + 1]);
      }
    }
    *reinterpret_cast<uint4*>(&vector) = *reinterpret_cast<const uint4*>(pairs);
  } else {
#pragma unroll
    for (int j = 0; j < W; ++j) vector.v[j] = static_cast<T>(values[j]);
  }
  return vector;
}

// Exchanges the first half of some values with the second one.
template <int W, typename A>
__device__ __forceinline__ void SwapHalves(A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W / 2; ++j) {
    const A first = values[j];
    values[j] = values[W / 2 + j];
    values[W / 2 + j] = first;
  }
}

// Makes the compiler convert 16-bit elements again in every pass over them. Converted elements
// would take twice the registers.
template <typename T, int W>
__device__ __forceinline__ void KeepPacked(Vector<T, W>& vector) {
  if constexpr (sizeof(T) == 2 && W > 1) {
    auto& words = *reinterpret_cast<uint4*>(&vector);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
}

// The opposite of KeepPacked: makes the compiler keep converted elements in registers.
template <int W>
__device__ __forceinline__ void KeepWide(float (&values)[W]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value));
}

template <int W, typename T>
__device__ __forceinline__ void StoreVector(T* p, const Vector<T, W>& vector) {
  if constexpr (W == 1) {
    *p = vector.v[0];
  } else {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&vector);
  }
}

// StoreVectorOnce is for data that is not read again soon. StoreVectorOnceIf stores 16 bytes if
// `wanted`, without a branch.
template <int W, typename T>
__device__ __forceinline__ void StoreVectorOnceIf(bool wanted, T* p, const Vector<T, W>& vector) {
  const auto& words = *reinterpret_cast<const uint4*>(&vector);
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(p),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(static_cast<int>(wanted))
      : "memory");
}
template <int W, typename T>
__device__ __forceinline__ void StoreVectorOnce(T* p, const Vector<T, W>& vector) {
  if constexpr (W == 1) {
    *p = vector.v[0];
  } else {
    const auto& words = *reinterpret_cast<const uint4*>(&vector);
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  }
}

}  // namespace gradops
