// Sums over the threads of a row. Each thread gets the sums. The threads are some lanes of a
// warp, warps of a block, or the blocks of a cluster. The order of additions is fixed.
#pragma once

#include <cstdint>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// --- RowSum: one row in a block, or narrow rows --------------------------------------------------

// For up to kMaxValues values of up to kWarps warps of a block, and of up to kBlocks blocks of a
// cluster (1: no clusters). It is as small as possible, because the L1 cache has less memory for
// it.
template <typename A, int kMaxValues, int kWarps, int kBlocks>
struct RowSumStorage {
  alignas(kVecBytes) A warps[2][kMaxValues][kWarps];
  A blocks[2][kMaxValues][kBlocks];
  std::uint64_t received[2];
};
template <typename A, int kMaxValues, int kWarps>
struct RowSumStorage<A, kMaxValues, kWarps, 1> {
  alignas(kVecBytes) A warps[2][kMaxValues][kWarps];
};

// Sums and exchanges among the threads of a row, which has the block to itself unless it is narrow.
// All threads of the row call each sum, which is also a barrier: after it, any thread may overwrite
// shared memory that was read before.
// `kNarrow`: a row may have less than a warp.
template <typename A, int kMaxValues, int kWarps, int kBlocks, bool kNarrow>
class RowSum {
 public:
  static constexpr bool kClusters = kBlocks > 1;
  using Storage = RowSumStorage<A, kMaxValues, kWarps, kBlocks>;

  // Blocks of a cluster meet (ClusterSync) before the first exchange.
  __device__ RowSum(int row_threads, int cluster, Storage& shared)
      : row_threads_(row_threads), cluster_(cluster), shared_(shared) {
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
    if (!kNarrow || row_threads_ >= kWarp) {
      WarpSums<kWarp>(values);
    } else {
      for (int distance = row_threads_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
    }
  }

  // Whether the warp needs the block's values. In a cluster only the first warp does: it sends the
  // block's sums.
  __device__ __forceinline__ bool NeedsBlock() const {
    return !kClusters || cluster_ == 1 || warp_ == 0;
  }

  // The warp (or block) whose values OfWarps (or OfBlocks) gives the calling lane.
  __device__ __forceinline__ int WarpOfLane() const { return PartOfLane(row_threads_ >> 5); }
  __device__ __forceinline__ int BlockOfLane() const { return PartOfLane(cluster_); }

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
      values[i] = from < row_threads_ >> 5 ? shared_.warps[buffer_][i][from] : A{0};
    }
  }
  __device__ __forceinline__ void NextWarps() { buffer_ ^= 1; }

  // Sums over the lanes that OfWarps gave values.
  template <int kValues>
  __device__ __forceinline__ void OverWarps(A (&values)[kValues]) const {
    OverSpan(values, row_threads_ >> 5);
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
    if (row_threads_ <= kWarp) {
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
    const int warp = static_cast<int>(threadIdx.x / kWarp), warps = row_threads_ >> 5;
    const int vectors = Span((warps + W - 1) / W);
    A(*const all)[kWarps] = shared_.warps[buffer_];
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) all[i][warp] = values[i];
    }
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= warps && thread < vectors * W) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) all[i][thread] = 0;
    }
    __syncthreads();  // as in MeetWarps
    const int from = static_cast<int>(threadIdx.x) & (vectors - 1);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const Vector<A, W> vector = LoadPlain<W>(&all[i][from * W]);
      values[i] = vector.v[0];
#pragma unroll
      for (int j = 1; j < W; ++j) values[i] += vector.v[j];
    }
    buffer_ ^= 1;
    OverSpan(values, vectors);
  }

  __device__ __forceinline__ static int PartOfLane(int n) {
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

  const int row_threads_, cluster_;
  Storage& shared_;
  int warp_ = 0;  // set if there are clusters
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

// --- TeamSum: several teams in a block -----------------------------------------------------------

// A team is a warp, or the warps of one row. A barrier for the threads of a team of several warps.
__device__ __forceinline__ void TeamSync(int team, int row_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(row_threads) : "memory");
}

// Sums of kValues values: of each team's warps, and of a cluster's blocks. Zeros fill the places up
// to PartsOf.
template <typename A, int kValues, int kBlocks>
struct TeamSumStorage {
  // Room for eight teams of two warps (4 places each); fewer values: three of five warps (16 each).
  static constexpr int kParts = kValues == 3 ? 32 : 48;
  A warps[2][kValues][kParts];
  A blocks[2][kValues][kBlocks];
  std::uint64_t received[2];
};

template <typename A, int kValues, int kBlocks>
class TeamSum {
  using Storage = TeamSumStorage<A, kValues, kBlocks>;

 public:
  // All threads of the team call it. A cluster's threads meet (ClusterSync) before the first sums.
  __device__ TeamSum(int row_threads, int cluster, int team, int in_team, Storage& shared)
      : row_threads_(row_threads), cluster_(cluster), team_(team), shared_(shared) {
    const int warps = row_threads_ / kWarp, first = team * PartsOf(warps);
    warp_ = __shfl_sync(0xffffffffu, static_cast<int>(static_cast<unsigned>(in_team) / kWarp), 0);
    lane_ = Kept(static_cast<int>(threadIdx.x % kWarp));
    // Lanes beyond those of the last value have the middle value's sum, too.
    value_ = lane_ / kLaneOfValue < kValues ? lane_ / kLaneOfValue : kValues / 2;
    const bool writes = lane_ == value_ * kLaneOfValue;
    write_ = Kept(writes ? SharedAddress(&shared.warps[0][value_][first + warp_]) : kNowhere);
    read_ = Kept(SharedAddress(&shared.warps[0][value_][first + PartOfLane(warps)]));
    read_blocks_ = Kept(SharedAddress(&shared.blocks[0][value_][PartOfLane(cluster_)]));
    const int part = in_team + warps;
    if (row_threads_ > kWarp && part < PartsOf(warps)) {
#pragma unroll
      for (int v = 0; v < 2 * kValues; ++v) {
        shared.warps[v / kValues][v % kValues][first + part] = 0;
      }
    }
    if (cluster_ > 1) {
      if (static_cast<int>(threadIdx.x) < kBlocks) {
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

  // Replaces each value by its sum over the row. All threads of the team call it.
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    if (row_threads_ < kWarp) {
      for (int distance = row_threads_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
      return;
    }
    A sum = OverWarp(values);
    if (row_threads_ > kWarp) {
      // Only one of the lanes that have this sum writes it. Their NaNs may differ: float64 has
      // several. An iteration without a row, for example, adds up old values of shared memory.
      if (write_ != kNowhere) StoreShared(write_ + buffer_, sum);
      // Every warp's sums are written before they are read. No barrier is needed after the reads:
      // the next call writes the other buffer. The call after that writes this buffer. By then all
      // threads have passed the next call's barrier, so they have finished these reads.
      TeamSync(team_, row_threads_);
      if (cluster_ == 1 || warp_ == 0) sum = OverParts(read_ + buffer_, row_threads_ / kWarp);
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
  __device__ __forceinline__ int PartOfLane(int parts) const {
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
    constexpr int kBytes = kValues * kBlocks * sizeof(A);
    return OverParts(read_blocks_ + buffer * kBytes, cluster_);
  }

  const int row_threads_, cluster_, team_;
  Storage& shared_;
  int warp_, lane_, value_;
  std::uint32_t write_, read_, read_blocks_;
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
