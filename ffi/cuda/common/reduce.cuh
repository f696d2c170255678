// Sums over the threads of a warp. row_sum.cuh has sums over more threads.
#pragma once

#include "common/dtype.h"

namespace gradops {

inline constexpr int kWarp = 32;

// The logarithm of a power of two.
__device__ __forceinline__ int Log2(int power) {
  return 31 - __clz(power);
}

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

// Some neighbouring lanes of a warp: a power of two, which is known at run time only.
struct LaneRun {
  int lanes;

  // The number of this thread in its run.
  __device__ __forceinline__ int lane() const {
    return static_cast<int>(threadIdx.x) & (lanes - 1);
  }
  // WarpSums over a run. All of its lanes must call it, but other lanes need not. With `least`, a
  // sum is over the lanes whose numbers differ by a multiple of `least`, a power of two.
  template <typename A, int kValues>
  __device__ __forceinline__ void Sums(A (&values)[kValues], int least = 1) const {
    if (lanes == kWarp && least == 1) return WarpSums<kWarp>(values);
    const unsigned mask = 0xffffffffu >> (kWarp - lanes)
                                             << (static_cast<int>(threadIdx.x) % kWarp - lane());
    for (int distance = lanes / 2; distance >= least; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] += __shfl_xor_sync(mask, values[i], distance);
    }
  }
};

}  // namespace gradops
