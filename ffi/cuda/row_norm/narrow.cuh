// Chunks of narrow unaligned rows in shared memory: cuda/row_norm/narrow_policy.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/narrow_policy.h"
#include "cuda/row_norm/parameters.cuh"

namespace gradops {
namespace {

// A thread's columns in its rows, and its row in each step of a chunk.
template <typename T>
struct NarrowPlace {
  static constexpr int K = NarrowColumns(sizeof(T));

  int lane, row;   // lane of the row; row of the step
  int begin;       // first column
  unsigned owned;  // bit k: the thread owns column begin + k; otherwise another lane, or none

  __device__ NarrowPlace(const NarrowPlan& plan, std::int64_t features) {
    const int in_warp = static_cast<int>(threadIdx.x % kWarp);
    lane = in_warp & (plan.lanes - 1);
    row = in_warp >> plan.log_lanes;
    const int first = lane * plan.columns;
    begin = min(first, static_cast<int>(features) - plan.columns);
    const unsigned all = (1u << plan.columns) - 1;
    owned = all & ~((1u << min(first - begin, plan.columns)) - 1);
  }
  __device__ __forceinline__ bool Owns(int k) const { return (owned & 1u << k) != 0; }
};

// Calls fn(k) for each of a thread's columns; if rows have one lane, also for some beyond.
template <int K, typename Fn>
__device__ __forceinline__ void ForColumns(int columns, const Fn& fn) {
  constexpr int kSure = SureColumns(K);
#pragma unroll
  for (int k = 0; k < kSure; ++k) fn(k);
#pragma unroll
  for (int k = kSure; k < K; k += 2) {
    if (k < columns) fn(k), fn(k + 1);
  }
}

// A thread's columns of a parameter, plus `added`; or `absent` if there is no parameter.
template <typename T, typename A, int K>
__device__ __forceinline__ void LoadNarrowParam(const Param& param, std::int64_t group, int begin,
                                                int columns, A absent, A added, A (&values)[K]) {
#pragma unroll
  for (A& value : values) value = absent;
  if (param.data == nullptr) return;
  WithType(param, group, [&](const auto* data) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < columns) values[k] = static_cast<A>(__ldg(data + begin + k)) + added;
    }
  });
}

// Sums over the lanes of a row. Each lane gets the sums.
template <int kValues, typename A>
__device__ __forceinline__ void OverLanes(int lanes, A (&values)[kValues]) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    if (distance >= lanes) continue;
    A others[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) others[i] = __shfl_xor_sync(0xffffffffu, values[i], distance);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += others[i];
  }
}

// An element at a shared address.
template <typename T>
__device__ __forceinline__ Accum<T> LoadElement(std::uint32_t address) {
  if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
    } else {
      return static_cast<float>(__ushort_as_half(bits));
    }
  } else {
    Accum<T> value[1];
    LoadShared(address, value);
    return value[0];
  }
}
template <typename T>
__device__ __forceinline__ void StoreElement(std::uint32_t address, Accum<T> value) {
  if constexpr (sizeof(T) == 2) {
    std::uint32_t word;  // its lower half is stored
    if constexpr (std::is_same_v<T, Half>) {
      const __half2 pair = __floats2half2_rn(value, 0.f);
      word = reinterpret_cast<const std::uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(value, 0.f);
      word = reinterpret_cast<const std::uint32_t&>(pair);
    }
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  } else {
    StoreShared(address, value);
  }
}

// A thread's columns of a row in a slot. Columns beyond the row that ForColumns visits are 0: the
// next row has them, or no row.
template <typename T, typename A, int K>
__device__ __forceinline__ void LoadColumns(const NarrowPlan& plan, std::uint32_t at,
                                            A (&values)[K]) {
  ForColumns<K>(plan.columns, [&](int k) { values[k] = LoadElement<T>(at + k * sizeof(T)); });
  if (plan.lanes == 1) {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = k < plan.columns ? values[k] : A{0};
  }
}

// Copies a warp's chunks to shared memory and back. All lanes of the warp call it.
template <typename T, int kArrays>
class NarrowChunks {
  static constexpr int kSize = sizeof(T), W = kVec<T>;

 public:
  // shared: the warp's slots, `count` for each stage. array_bytes: the size of each array, beyond
  // which nothing may be read.
  __device__ NarrowChunks(const NarrowPlan& plan, const unsigned char* shared, int count,
                          std::int64_t array_bytes)
      : plan_(plan),
        shared_(SharedAddress(shared)),
        stage_bytes_(count * plan.slot_bytes),
        array_bytes_(array_bytes) {}

  // The shared address, in array a's slot, of a chunk that begins `first` bytes into its array.
  __device__ __forceinline__ std::uint32_t At(int stage, int a, std::int64_t first) const {
    return shared_ + static_cast<std::uint32_t>(stage * stage_bytes_ + a * plan_.slot_bytes) +
           (static_cast<std::uint32_t>(first) & (kLineBytes - 1));
  }

  // Starts copies of `bytes` from `first` on, of each array that is not null. The caller commits.
  __device__ __forceinline__ void Order(int stage, const void* const (&arrays)[kArrays],
                                        std::int64_t first, int bytes) const {
    const int before = static_cast<int>(first) & (kVecBytes - 1), end = before + bytes;
    const std::int64_t begin = first - before;
    if (array_bytes_ - begin < end + kVecBytes) return OrderLast(stage, arrays, begin, end);
    const int own = Lane() * kVecBytes;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      if (arrays[a] == nullptr) continue;
      std::uint32_t to = At(stage, a, begin) + static_cast<std::uint32_t>(own);
      const char* from = static_cast<const char*>(arrays[a]) + begin + own;
#pragma unroll 1
      for (int at = own; at < end; at += kStep) {
        CopyAsync(to, from);
        to += kStep, from += kStep;
      }
    }
  }

  // Stores array a's slot, which all lanes of the warp have written, in the array.
  __device__ __forceinline__ void WriteBack(int stage, int a, void* array, std::int64_t first,
                                            int bytes) const {
    const int before = static_cast<int>(first) & (kVecBytes - 1), end = before + bytes;
    char* const to = static_cast<char*>(array) + (first - before);
    const std::uint32_t from = At(stage, a, first - before);
    const int packs = before > 0 ? kVecBytes : 0;
#pragma unroll 1
    for (int at = packs + Lane() * kVecBytes; at + kVecBytes <= end; at += kStep) {
      uint4 words;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(from + static_cast<std::uint32_t>(at))
                   : "memory");
      asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + at),
                   "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    }
    if (((before | end) & (kVecBytes - 1)) == 0) return;
    // The first and the last pack may be the chunk's only in part. Each lane stores one element.
    const int tail = end & -kVecBytes, which = Lane() % W * kSize;
    const bool of_head = Lane() < W;
    const int at = of_head ? before + which : tail + which;
    if (of_head ? before > 0 && at < min(end, kVecBytes)
                : Lane() < 2 * W && tail >= packs && at < end) {
      *reinterpret_cast<T*>(to + at) =
          *static_cast<const T*>(__cvta_shared_to_generic(from + static_cast<std::uint32_t>(at)));
    }
  }

 private:
  static constexpr int kStep = kWarp * kVecBytes;  // bytes that a warp copies at once
  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x % kWarp); }

  // Order at the arrays' end. The last pack's elements are copied one by one: memcheck takes a
  // cp.async of fewer bytes for one of 16.
  __device__ void OrderLast(int stage, const void* const (&arrays)[kArrays], std::int64_t begin,
                            int end) const {
    const auto there = static_cast<int>(array_bytes_ - begin);
#pragma unroll 1
    for (int at = Lane() * kVecBytes; at < end; at += kStep) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (arrays[a] == nullptr) continue;
        const char* const from = static_cast<const char*>(arrays[a]) + begin;
        auto* const to = static_cast<char*>(__cvta_shared_to_generic(At(stage, a, begin)));
        if (at + kVecBytes <= there) {
          CopyAsync(to + at, from + at);
        } else {
#pragma unroll 1
          for (int j = at; j < end; j += kSize) {
            *reinterpret_cast<T*>(to + j) = *reinterpret_cast<const T*>(from + j);
          }
        }
      }
    }
  }

  const NarrowPlan& plan_;
  const std::uint32_t shared_;
  const int stage_bytes_;
  const std::int64_t array_bytes_;
};

// The turns of a warp.
struct NarrowTurns {
  std::int64_t row, step;  // first row in the group; rows from turn to turn
  int most, own;           // the most turns of a warp of the block; turns of this warp

  __device__ NarrowTurns(const NarrowDeal& deal, const NarrowPlan& plan, std::int64_t slot,
                         int warp) {
    const std::int64_t first = slot * plan.warps;
    row = (first + warp) * plan.chunk_rows;
    step = deal.slots * plan.warps * plan.chunk_rows;
    most = static_cast<int>(deal.rounds + (first < deal.extra));
    own = static_cast<int>(deal.rounds + (first + warp < deal.extra));
  }
};

}  // namespace
}  // namespace gradops
