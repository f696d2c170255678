// Sums of layer norm's backward kernel over a row, whose threads all get them.
#pragma once

#include <cstdint>

#include "cuda/layer_norm_bwd_policy.h"
#include "cuda/layer_norm_policy.h"
#include "cuda/pipeline.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace gradops {
namespace {

// The threads of one of a block's units, of more than a warp, by a barrier of its own, meet.
__device__ __forceinline__ void UnitSync(int unit, int lanes) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + unit), "r"(lanes) : "memory");
}

// Of kValues values: those of each unit's warps, and of a cluster's blocks; behind them zeros, up
// to the next PartsOf.
template <typename A, int kValues>
struct TotalStorage {
  // As eight units of two warps have; or three of five warps.
  static constexpr int kParts = kValues == 3 ? 32 : 48;
  A warps[2][kValues][kParts];
  A blocks[2][kValues][kMaxCluster];
  std::uint64_t received[2];
};

template <typename A, int kValues>
class RowTotals {
  using Storage = TotalStorage<A, kValues>;

 public:
  // All of the unit's threads; those of a cluster meet (ClusterSync) before the first sums.
  __device__ RowTotals(const BackwardPlan& plan, int unit, int in_unit, Storage& shared)
      : lanes_(plan.lanes),
        cluster_(plan.cluster),
        unit_(unit),
        first_(unit * PartsOf(lanes_ / kWarp)),
        warp_(
            __shfl_sync(0xffffffffu, static_cast<int>(static_cast<unsigned>(in_unit) / kWarp), 0)),
        shared_(shared) {
    const int part = in_unit + lanes_ / kWarp;
    if (lanes_ > kWarp && part < PartsOf(lanes_ / kWarp)) {
#pragma unroll
      for (int v = 0; v < 2 * kValues; ++v) {
        shared_.warps[v / kValues][v % kValues][first_ + part] = 0;
      }
    }
    if (cluster_ > 1) {
      if (static_cast<int>(threadIdx.x) < kMaxCluster) {
#pragma unroll
        for (int v = 0; v < 2 * kValues; ++v) {
          shared_.blocks[v / kValues][v % kValues][threadIdx.x] = 0;
        }
      }
      if (threadIdx.x == 0) {
        InitBarrier(&shared_.received[0]);
        InitBarrier(&shared_.received[1]);
        PublishBarriers();
      }
    }
  }

  // Replaces each value by its sum over the row. All threads of the unit call it.
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    if (lanes_ < kWarp) {
      for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
      return;
    }
    const A sum = OverWarp(values);
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    if (lanes_ == kWarp) {
      FromLanes(sum, values);
    } else {
      if (lane % kLaneOfValue == 0 && lane < kValues * kLaneOfValue) {
        shared_.warps[buffer_][lane / kLaneOfValue][first_ + warp_] = sum;
      }
      // Every warp's sums are written before they are read. No barrier is needed after the reads:
      // the next call writes the other buffer, and before the call after that writes this one, all
      // threads have passed the next call's barrier and so have finished these reads.
      UnitSync(unit_, lanes_);
      OverParts<Storage::kParts>(shared_.warps[buffer_][0] + first_, lanes_ / kWarp, values);
      buffer_ ^= 1;
    }
    if (cluster_ > 1) {
      A(*const blocks)[kMaxCluster] = shared_.blocks[exchange_ & 1];
      ExchangeInCluster(shared_, exchange_, cluster_, values);
      ++exchange_;
      OverParts<kMaxCluster>(blocks[0], cluster_, values);
    }
  }

 private:
  // Which lane's sum OverWarp's is: that of value v in lane v * kLaneOfValue.
  static constexpr int kLaneOfValue = kValues == 3 ? 8 : 16;

  // Of so many parts of a sum, up to 16, how many places there are: some, which each thread reads;
  // or one or two for each of a value's lanes.
  static constexpr int kFewParts = 4;
  __device__ __forceinline__ static int PartsOf(int parts) {
    return parts <= kFewParts ? kFewParts : parts <= 8 && kLaneOfValue == 8 ? 8 : 16;
  }

  // Gives all lanes each value's sum, from one of its lanes.
  __device__ __forceinline__ static void FromLanes(A sum, A (&values)[kValues]) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      values[v] = __shfl_sync(0xffffffffu, sum, v * kLaneOfValue);
    }
  }

  // Over the lanes of a warp, in a butterfly, whose first steps also give each value lanes of its
  // own, so that the others are sums of one value.
  __device__ __forceinline__ static A OverWarp(const A (&values)[kValues]) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    // What the lane keeps, and what it gives for the same from the lane it exchanges with.
    const auto exchange = [](A kept, A given, int distance) {
      return kept + __shfl_xor_sync(0xffffffffu, given, distance);
    };
    A sum = values[0];
    if constexpr (kValues == 1) {
      sum = exchange(sum, sum, 16);
      sum = exchange(sum, sum, 8);
    } else if constexpr (kValues == 2) {
      const bool second = (lane & 16) != 0;
      sum = exchange(values[second ? 1 : 0], values[second ? 0 : 1], 16);
      sum = exchange(sum, sum, 8);
    } else {
      static_assert(kValues == 3);
      const bool third = (lane & 16) != 0, second = (lane & 8) != 0;
      const A outer = exchange(third ? values[2] : values[0], third ? values[0] : values[2], 16);
      const A middle = exchange(values[1], values[1], 16);
      sum = exchange(second ? middle : outer, second ? outer : middle, 8);
    }
    sum = exchange(sum, sum, 4);
    sum = exchange(sum, sum, 2);
    return exchange(sum, sum, 1);
  }

  // Each value's parts, in a fixed order; kPitch: from one value's first part to the next one's.
  template <int kPitch>
  __device__ __forceinline__ static void OverParts(const A* parts, int count,
                                                   A (&values)[kValues]) {
    struct alignas(kVecBytes) Few {
      A v[kFewParts];
    };
    if (count <= kFewParts) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const Few few = *reinterpret_cast<const Few*>(parts + v * kPitch);
        values[v] = (few.v[0] + few.v[2]) + (few.v[1] + few.v[3]);
      }
      return;
    }
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const A* const own =
        parts + min(lane / kLaneOfValue, kValues - 1) * kPitch + lane % kLaneOfValue;
    A sum = *own;
    if (kLaneOfValue == 8 && count > 8) sum += own[8];
#pragma unroll
    for (int distance = kLaneOfValue / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    FromLanes(sum, values);
  }

  const int lanes_, cluster_, unit_, first_, warp_;
  Storage& shared_;
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
