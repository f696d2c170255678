// 16-byte accesses to rows that may start anywhere and have any length.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace gradops {

inline constexpr int kVecBytes = 16;

// Elements of T in one 16-byte access.
template <typename T>
inline constexpr int kVec = kVecBytes / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(kVecBytes) Vec {
  T v[kVec<T>];
};

// How many elements before `p` the last 16-byte boundary lies: 0 if p is aligned.
template <typename T>
__device__ __forceinline__ int Misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(p) % kVecBytes / sizeof(T));
}

// A row is cut at 16-byte boundaries of memory, so vector i of a row with misalignment m holds
// columns [i * kVec - m, (i + 1) * kVec - m). The first and the last may hang over the row's ends:
// those go element by element.
template <typename T>
__device__ __forceinline__ std::int64_t VecCount(int misalignment, std::int64_t columns) {
  return (columns + misalignment + kVec<T> - 1) / kVec<T>;
}

// Loads columns [start, start + kVec) of the row; those outside [0, columns) become `fill`.
// row + start must be a 16-byte boundary.
template <typename T>
__device__ __forceinline__ Vec<T> LoadVec(const T* __restrict__ row, std::int64_t start,
                                          std::int64_t columns, T fill) {
  Vec<T> vec;
  if (start >= 0 && start + kVec<T> <= columns) {
    *reinterpret_cast<uint4*>(&vec) = __ldg(reinterpret_cast<const uint4*>(row + start));
  } else {
#pragma unroll
    for (int k = 0; k < kVec<T>; ++k) {
      const std::int64_t c = start + k;
      vec.v[k] = c >= 0 && c < columns ? row[c] : fill;
    }
  }
  return vec;
}

// Stores columns [start, start + kVec) of the row, those inside [0, columns).
template <typename T>
__device__ __forceinline__ void StoreVec(T* __restrict__ row, std::int64_t start, std::int64_t columns,
                                         const Vec<T>& vec) {
  if (start >= 0 && start + kVec<T> <= columns) {
    *reinterpret_cast<uint4*>(row + start) = *reinterpret_cast<const uint4*>(&vec);
  } else {
#pragma unroll
    for (int k = 0; k < kVec<T>; ++k) {
      const std::int64_t c = start + k;
      if (c >= 0 && c < columns) row[c] = vec.v[k];
    }
  }
}

}  // namespace gradops
