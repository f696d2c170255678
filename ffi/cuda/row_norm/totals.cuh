// Sums over a row in layer norm's backward kernel. All threads of the row get them.
#pragma once

#include <cstdint>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/backward_policy.h"
#include "cuda/row_norm/policy.h"

namespace gradops {
namespace {

// A barrier for the threads of one of a block's units, which has more than a warp.
__device__ __forceinline__ void UnitSync(int unit, int lanes) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + unit), "r"(lanes) : "memory");
}

// Sums of kValues values: of each unit's warps, and of a cluster's blocks. Zeros fill the places up
// to PartsOf.
template <typename A, int kValues>
struct TotalStorage {
  // Room for eight units of two warps (4 places each); fewer values: three of five warps (16 each).
  static constexpr int kParts = kValues == 3 ? 32 : 48;
  A warps[2][kValues][kParts];
  A blocks[2][kValues][kMaxCluster];
  std::uint64_t received[2];
};

template <typename A, int kValues>
class RowTotals {
  using Storage = TotalStorage<A, kValues>;

 public:
  // All threads of the unit call it. A cluster's threads meet (ClusterSync) before the first sums.
  __device__ RowTotals(const BackwardPlan& plan, int unit, int in_unit, Storage& shared)
      : lanes_(plan.lanes), cluster_(plan.cluster), unit_(unit), shared_(shared) {
    const int warps = lanes_ / kWarp, first = unit * PartsOf(warps);
    warp_ = __shfl_sync(0xffffffffu, static_cast<int>(static_cast<unsigned>(in_unit) / kWarp), 0);
    lane_ = Kept(static_cast<int>(threadIdx.x % kWarp));
    // Lanes beyond the last value's lanes have the middle value's sum, too.
    value_ = lane_ / kLaneOfValue < kValues ? lane_ / kLaneOfValue : kValues / 2;
    const bool writes = lane_ == value_ * kLaneOfValue;
    write_ = Kept(writes ? SharedAddress(&shared.warps[0][value_][first + warp_]) : kNowhere);
    read_ = Kept(SharedAddress(&shared.warps[0][value_][first + PlaceOfLane(warps)]));
    read_blocks_ = Kept(SharedAddress(&shared.blocks[0][value_][PlaceOfLane(cluster_)]));
    const int part = in_unit + warps;
    if (lanes_ > kWarp && part < PartsOf(warps)) {
#pragma unroll
      for (int v = 0; v < 2 * kValues; ++v) {
        shared.warps[v / kValues][v % kValues][first + part] = 0;
      }
    }
    if (cluster_ > 1) {
      if (static_cast<int>(threadIdx.x) < kMaxCluster) {
#pragma unroll
        for (int v = 0; v < 2 * kValues; ++v) {
          shared.blocks[v / kValues][v % kValues][threadIdx.x] = 0;
        }
      }
      if (threadIdx.x == 0) {
        InitBarrier(&shared.received[0]);
        InitBarrier(&shared.received[1]);
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
    A sum = OverWarp(values);
    if (lanes_ > kWarp) {
      // Only one of the lanes that have this sum writes it. Their NaNs may differ: float64 has
      // several. A turn without a row, for example, may sum up what shared memory held before.
      if (write_ != kNowhere) StoreShared(write_ + buffer_, sum);
      // Every warp's sums are written before they are read. No barrier is needed after the reads:
      // the next call writes the other buffer. The call after that writes this buffer. By then all
      // threads have passed the next call's barrier, so they have finished these reads.
      UnitSync(unit_, lanes_);
      if (cluster_ == 1 || warp_ == 0) sum = OverParts(read_ + buffer_, lanes_ / kWarp);
      buffer_ = kBufferBytes - buffer_;
    }
    if (cluster_ > 1) sum = OverCluster(sum);
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      values[v] = __shfl_sync(0xffffffffu, sum, v * kLaneOfValue);
    }
  }

 private:
  static constexpr int kBufferBytes = kValues * Storage::kParts * sizeof(A);
  static constexpr std::uint32_t kNowhere = ~0u;  // no shared address
  // Lanes from v * kLaneOfValue on get the sums of value v.
  static constexpr int kLaneOfValue = kValues == 3 ? 8 : 16;

  // How many places up to 16 parts of a sum have. Each thread reads all of a few places. Of more
  // places, each of a value's lanes reads one or two.
  static constexpr int kFewParts = 4;
  __device__ __forceinline__ static int PartsOf(int parts) {
    return parts <= kFewParts ? kFewParts : parts <= 8 && kLaneOfValue == 8 ? 8 : 16;
  }
  __device__ __forceinline__ int PlaceOfLane(int parts) const {
    return parts <= kFewParts ? 0 : lane_ % kLaneOfValue;
  }

  // Sums over the lanes of a warp, in a butterfly. The first steps also give each value lanes of
  // its own, so that later steps add up only one value.
  __device__ __forceinline__ A OverWarp(const A (&values)[kValues]) const {
    // kept: what the lane keeps. given: what it gives the lane that it exchanges with.
    const auto exchange = [](A kept, A given, int distance) {
      return kept + __shfl_xor_sync(0xffffffffu, given, distance);
    };
    A sum = values[0];
    if constexpr (kValues == 1) {
      sum = exchange(sum, sum, 16);
      sum = exchange(sum, sum, 8);
    } else if constexpr (kValues == 2) {
      const bool second = (lane_ & 16) != 0;
      sum = exchange(values[second ? 1 : 0], values[second ? 0 : 1], 16);
      sum = exchange(sum, sum, 8);
    } else {
      static_assert(kValues == 3);
      const bool third = lane_ >= 16, second = lane_ % 16 >= 8;
      const A outer = exchange(third ? values[2] : values[0], third ? values[0] : values[2], 16);
      const A middle = exchange(values[1], values[1], 16);
      sum = exchange(second ? middle : outer, second ? outer : middle, 8);
    }
    sum = exchange(sum, sum, 4);
    sum = exchange(sum, sum, 2);
    return exchange(sum, sum, 1);
  }

  // The sum of the parts of the lane's value, in a fixed order. address: of the first part or, with
  // more than kFewParts, of the lane's part.
  __device__ __forceinline__ A OverParts(std::uint32_t address, int count) const {
    if (count <= kFewParts) {
      A few[kFewParts];
      LoadShared(address, few);
      return (few[0] + few[2]) + (few[1] + few[3]);
    }
    A sum[1];
    LoadShared(address, sum);
    if (kLaneOfValue == 8 && count > 8) {
      A other[1];
      LoadShared(address + 8 * sizeof(A), other);
      sum[0] += other[0];
    }
#pragma unroll
    for (int distance = kLaneOfValue / 2; distance > 0; distance /= 2) {
      sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], distance);
    }
    return sum[0];
  }

  // Sums over the cluster's blocks. Each lane of a block's first warp sends its value's sum to one
  // or two blocks. No block can send twice more before this block's threads have read. The second
  // send needs this block's next sums, sent after a barrier that these threads reach later.
  __device__ __forceinline__ A OverCluster(A sum) {
    const unsigned buffer = exchange_ & 1;
    std::uint64_t* const received = &shared_.received[buffer];
    if (warp_ == 0) {
      if (threadIdx.x == 0) {
        ExpectBytes(received, static_cast<std::uint32_t>(cluster_ * kValues * sizeof(A)));
      }
      if (lane_ < kValues * kLaneOfValue) {
        A* const to = &shared_.blocks[buffer][value_][ClusterRank()];
        const int rank = lane_ % kLaneOfValue;
        if (rank < cluster_) SendTo(rank, to, sum, received);
        if (kLaneOfValue + rank < cluster_) SendTo(kLaneOfValue + rank, to, sum, received);
      }
    }
    WaitForPhase(received, (exchange_ >> 1) & 1);
    ++exchange_;
    constexpr int kBytes = kValues * kMaxCluster * sizeof(A);
    return OverParts(read_blocks_ + buffer * kBytes, cluster_);
  }

  const int lanes_, cluster_, unit_;
  Storage& shared_;
  int warp_, lane_, value_;
  std::uint32_t write_, read_, read_blocks_;
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
