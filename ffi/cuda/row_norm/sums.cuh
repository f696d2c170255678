// Sums over a row in layer norm's forward kernel: over lanes, a block's warps, a cluster's blocks.
#pragma once

#include <cstdint>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/policy.h"

namespace gradops {
namespace {

// Sums of up to kMaxValues values: of up to kWarps warps of a block, and of up to kBlocks blocks of
// a cluster (1: no clusters). It is as small as possible: what blocks take of a multiprocessor's
// shared memory is lost to the L1 cache.
template <typename A, int kMaxValues, int kWarps, int kBlocks>
struct SumStorage {
  alignas(kVecBytes) A warps[2][kMaxValues][kWarps];
  A blocks[2][kMaxValues][kBlocks];
  std::uint64_t received[2];
};
template <typename A, int kMaxValues, int kWarps>
struct SumStorage<A, kMaxValues, kWarps, 1> {
  alignas(kVecBytes) A warps[2][kMaxValues][kWarps];
};

// Sums and exchanges among the threads of a row. The row has the block to itself unless it is
// narrow. All threads of the row call each sum, which is also a barrier: after it, any thread may
// overwrite what was read from shared memory before.
// `kNarrow`: a row may have less than a warp.
template <typename A, int kMaxValues, int kWarps, int kBlocks, bool kNarrow>
class RowSum {
 public:
  static constexpr bool kClusters = kBlocks > 1;
  using Storage = SumStorage<A, kMaxValues, kWarps, kBlocks>;

  // Blocks of a cluster meet (ClusterSync) before the first exchange.
  __device__ RowSum(int lanes, int cluster, Storage& shared)
      : lanes_(lanes), cluster_(cluster), shared_(shared) {
    if constexpr (kClusters) {
      warp_ = KeptOfWarp(static_cast<int>(threadIdx.x / kWarp));
      if (cluster > 1 && threadIdx.x == 0) {
        InitBarrier(&shared.received[0]);
        InitBarrier(&shared.received[1]);
        PublishBarriers();
      }
    }
  }

  // Sums over the lanes of a warp that belong to the row.
  template <int kValues>
  __device__ __forceinline__ void OverWarp(A (&values)[kValues]) const {
    if (!kNarrow || lanes_ >= kWarp) {
      WarpSums<kWarp>(values);
    } else {
      for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
    }
  }

  // Whether the warp needs the block's values. In a cluster only the first warp does: it sends the
  // block's sums.
  __device__ __forceinline__ bool WantsBlock() const {
    return !kClusters || cluster_ == 1 || warp_ == 0;
  }

  // The warp (or block) whose values OfWarps (or OfBlocks) gives the calling lane.
  __device__ __forceinline__ int WarpOfLane() const { return PlaceOfLane(lanes_ >> 5); }
  __device__ __forceinline__ int BlockOfLane() const { return PlaceOfLane(cluster_); }

  // An exchange among the row's warps in this block. All warps call MeetWarps. Warps that want the
  // values then call OfWarps: each aligned run of lanes gets the values of all warps, one warp per
  // lane. Lanes without a warp get 0. All warps call NextWarps.
  template <int kValues>
  __device__ __forceinline__ void MeetWarps(const A (&values)[kValues]) {
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared_.warps[buffer_][i][threadIdx.x / kWarp] = values[i];
    }
    // Every warp's values are written before they are read. No barrier is needed after the reads:
    // the next call writes the other buffer. The call after that writes this buffer. By then all
    // threads have passed the next call's barrier, so they have finished these reads.
    __syncthreads();
  }
  template <int kValues>
  __device__ __forceinline__ void OfWarps(A (&values)[kValues]) const {
    const int from = WarpOfLane();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = from < lanes_ >> 5 ? shared_.warps[buffer_][i][from] : A{0};
    }
  }
  __device__ __forceinline__ void NextWarps() { buffer_ ^= 1; }

  // Sums over the lanes that OfWarps gave values.
  template <int kValues>
  __device__ __forceinline__ void OverWarps(A (&values)[kValues]) const {
    OverSpan(values, lanes_ >> 5);
  }

  // Gives each lane the values of a block of the cluster, as OfWarps does for warps.
  template <int kValues>
  __device__ __forceinline__ void OfBlocks(A (&values)[kValues]) {
    static_assert(kClusters);
    A(*const blocks)[kBlocks] = shared_.blocks[exchange_ & 1];
    std::uint64_t* const received = &shared_.received[exchange_ & 1];
    const int rank = ClusterRank();
    if (threadIdx.x == 0) {
      ExpectBytes(received, static_cast<std::uint32_t>(cluster_ * kValues * sizeof(A)));
    }
    // No block can send twice more before all threads of this block have read these values. The
    // second send needs this block's next values, which are sent after a barrier.
    if (static_cast<int>(threadIdx.x) < cluster_) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        SendTo(static_cast<int>(threadIdx.x), &blocks[i][rank], values[i], received);
      }
    }
    WaitForPhase(received, (exchange_ >> 1) & 1);
    ++exchange_;
    const int from = BlockOfLane();
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = from < cluster_ ? blocks[i][from] : A{0};
  }

  // Sums over the lanes that OfBlocks gave values.
  template <int kValues>
  __device__ __forceinline__ void OverBlocks(A (&values)[kValues]) const {
    OverSpan(values, cluster_);
  }

  // Replaces each value by its sum over the row. All threads of the row add in one order.
  template <int kValues>
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    OverWarp(values);
    if (lanes_ <= kWarp) {
      __syncwarp();  // earlier reads end before later writes, as by SumOfWarps' barrier
    } else {
      SumOfWarps(values);
    }
    if constexpr (kClusters) {
      if (cluster_ > 1) {
        OfBlocks(values);
        OverBlocks(values);
      }
    }
  }

 private:
  // OfWarps and OverWarps, if only the sum is wanted. Each lane reads 16 bytes of values, so that
  // lanes exchange less.
  template <int kValues>
  __device__ __forceinline__ void SumOfWarps(A (&values)[kValues]) {
    constexpr int W = kVec<A>;
    const int warp = static_cast<int>(threadIdx.x / kWarp), warps = lanes_ >> 5;
    const int packs = Span((warps + W - 1) / W);
    A(*const all)[kWarps] = shared_.warps[buffer_];
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) all[i][warp] = values[i];
    }
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= warps && thread < packs * W) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) all[i][thread] = 0;
    }
    __syncthreads();  // as in MeetWarps
    const int from = static_cast<int>(threadIdx.x) & (packs - 1);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const Pack<A, W> pack = LoadPlain<W>(&all[i][from * W]);
      values[i] = pack.v[0];
#pragma unroll
      for (int j = 1; j < W; ++j) values[i] += pack.v[j];
    }
    buffer_ ^= 1;
    OverSpan(values, packs);
  }

  __device__ __forceinline__ static int PlaceOfLane(int n) {
    return static_cast<int>(threadIdx.x % kWarp) & (Span(n) - 1);
  }
  // The least power of two that is not less than n.
  __device__ __forceinline__ static int Span(int n) { return 1 << (kWarp - __clz(n - 1)); }

  template <int kValues>
  __device__ __forceinline__ static void OverSpan(A (&values)[kValues], int n) {
#pragma unroll 1
    for (int distance = Span(n) / 2; distance > 0; distance /= 2) {
      A others[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        others[i] = __shfl_xor_sync(0xffffffffu, values[i], distance);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] += others[i];
    }
  }

  const int lanes_, cluster_;
  Storage& shared_;
  int warp_ = 0;  // set if there are clusters
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
