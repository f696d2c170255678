// Sums over a team of threads: part of a warp, a warp, several warps of a block, or a block.
#pragma once

#include "common/dtype.h"

namespace gradops {

inline constexpr int kWarp = 32;

// Returns `value`, and makes the compiler keep it in a register. Otherwise the compiler would
// compute it again in each turn of a loop. The whole warp must make the call. KeptOfWarp is for
// values that are equal in the whole warp; the compiler then knows that they are equal.
template <typename I>
__device__ __forceinline__ I Kept(I value) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % kWarp));
}
__device__ __forceinline__ int KeptOfWarp(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Every thread of each aligned run of kWidth lanes gets the run's sum. The whole warp must call it.
// The order of additions is fixed, and all lanes get equal bits because a + b == b + a.
template <int kWidth, typename A>
__device__ __forceinline__ A WarpSum(A value) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// WarpSum for several values, one step for all values at a time. Value by value, each sum would
// wait for the shuffles of the sums before.
template <int kWidth, typename A, int kValues>
__device__ __forceinline__ void WarpSums(A (&values)[kValues]) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    A others[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      others[i] = __shfl_xor_sync(0xffffffffu, values[i], distance);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += others[i];
  }
}

// Sums up to kMaxValues values at a time over teams of kTeam consecutive threads in a block of
// kThreads; both are powers of two. All threads of a team and of a warp must call it.
template <typename A, int kThreads, int kTeam, int kMaxValues>
class TeamSum {
  static constexpr int kWarps = kTeam / kWarp;  // warps of a team; 0 for a part of a warp

 public:
  struct Storage {
    A values[2][kMaxValues][kThreads / kWarp];
  };

  __device__ explicit TeamSum(Storage& shared) : shared_(shared) {}

  // Replaces each value by its sum over the team.
  template <int kValues>
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    static_assert(kValues <= kMaxValues);
    WarpSums<(kTeam < kWarp ? kTeam : kWarp)>(values);
    if constexpr (kWarps > 1) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) shared_.values[buffer_][i][warp] = values[i];
      }
      // Every warp's sum is written before it is read. No barrier is needed after the reads,
      // because the next call writes the other buffer. Only the call after the next writes this
      // buffer. By then, all threads have passed the next call's barrier, after these reads.
      Barrier();
      const int first_warp = warp / kWarps * kWarps;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values[i] = shared_.values[buffer_][i][first_warp + lane % kWarps];
      }
      WarpSums<kWarps>(values);
      buffer_ ^= 1;
    }
  }

 private:
  // A barrier of the team only. Barrier 0 is __syncthreads.
  __device__ __forceinline__ static void Barrier() {
    if constexpr (kTeam == kThreads) {
      __syncthreads();
    } else {
      const int id = 1 + static_cast<int>(threadIdx.x) / kTeam;
      asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kTeam) : "memory");
    }
  }

  Storage& shared_;
  int buffer_ = 0;
};

}  // namespace gradops
