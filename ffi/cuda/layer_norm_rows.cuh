// What layer norm's kernels share: where a thread stands in a row, parameters, sums over a row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/layer_norm_policy.h"
#include "cuda/pipeline.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/layer_norm.h"

namespace gradops {
namespace {

// Of a row, what a thread of the backward kernel holds.
template <typename T, bool kDirect>
inline constexpr int kPacks = RowElements(sizeof(T), kDirect) / kVec<T>;

// A thread's place in its row, of which it owns P packs of 16 bytes (cuda/layer_norm_policy.h):
// packs lane, lane + q, lane + 2 q ... of a row of at most P * q packs.
//
// Even: of exactly so many. Threads from q on own what the one before them owns, and do the same
// once more, as a branch costs all of them more; but that must not be added to sums. Uneven: some
// threads lack their last pack, and own the row's last one too, likewise.
//
// Framed: rows may start anywhere, and have any length. A row's frame then starts at the last
// 16-byte boundary before it, and packs are those of the frame, of which the row may have all, some
// columns, or none: a warp owns 32 * P neighbouring ones, a lane every 32nd of these. Rows whose
// frames start as many columns before them are worked on by the same threads, so that a thread's
// columns stay what they are.
// kOneUnit: a block has one row, unless it is narrow.
template <typename T, int P, Division kDivision, bool kOneUnit>
class Place {
 public:
  static constexpr int W = kVec<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;

  int unit, in_unit;  // of the block; thread of the unit
  int lane, row;      // thread of the row; row of the unit
  int first_column;   // the frame's, where the block's share begins
  int base;           // from there on: where the thread's packs begin
  bool counts;        // in sums; and so does its last pack
  bool counts_last;

  __device__ Place(int lanes, int cluster, int share, std::int64_t features)
      : share_(share), features_(features) {
    const unsigned thread = threadIdx.x;
    // The shuffle tells the compiler that all of a warp have the same: so loops over a unit's rows
    // are uniform, their counters need no registers, and shuffles in them overlap.
    unit = static_cast<int>(lanes <= kWarp ? thread / kWarp
                            : kOneUnit     ? 0
                                           : thread / static_cast<unsigned>(lanes));
    unit = __shfl_sync(0xffffffffu, unit, 0);
    in_unit = static_cast<int>(thread) - unit * max(lanes, kWarp);
    lane = lanes < kWarp ? in_unit & (lanes - 1) : in_unit;
    row = lanes < kWarp ? in_unit >> (31 - __clz(lanes)) : 0;
    first_column = cluster > 1 ? ClusterRank() * share : 0;
    if constexpr (kFramed) {
      counts = counts_last = true;
      stride_ = min(lanes, kWarp) * W;
      base = warp_of_row() * (kWarp * P * W) + (lane & (kWarp - 1)) * W;
      SetSkip(0);
    } else {
      SetSkip(0);
      const int packs = static_cast<int>(static_cast<unsigned>(high_) / W);
      owners_ = (packs + P - 1) / P;
      const int owned = min(lane, owners_ - 1), last = owned + (P - 1) * owners_;
      counts = lane < owners_;
      counts_last = counts && (kDivision == Division::kEven || last < packs);
      stride_ = owners_ * W;
      base = owned * W;
      last_ = (min(last, packs - 1) - owned) * W;
    }
  }

  // How many columns before its rows the frame starts: less than W.
  __device__ void SetSkip(int skip) {
    low_ = skip - first_column;
    high_ = static_cast<int>(min(std::int64_t{share_}, features_ + low_));
    skip_ = skip;
    if constexpr (kFramed) Refresh();
  }

  // From now on there is no row for the threads that say so. The whole warp calls it.
  __device__ void Vanish(bool vanishes) {
    if (vanishes) low_ = high_ = 0;
    Refresh();
  }

  // Before each of several rows: so that the compiler does not keep what follows from it.
  __device__ __forceinline__ void Forget() { asm volatile("" : "+r"(base), "+r"(stride_)); }

  __device__ __forceinline__ int warp_of_row() const {
    return static_cast<int>(static_cast<unsigned>(lane) / kWarp);
  }
  __device__ int skip() const { return skip_; }
  // The block's columns, from first_column on: [max(0, low), high).
  __device__ int low() const { return low_; }
  __device__ int high() const { return high_; }
  // How many of them are a warp's, or the block's.
  __device__ int WarpColumns(int warp) const {
    if constexpr (kFramed) {
      constexpr int kColumns = kWarp * P * W;
      return max(0, min(high_, (warp + 1) * kColumns) - max(max(0, low_), warp * kColumns));
    } else {
      const int owners = min(kWarp, owners_ - warp * kWarp);
      const int packs = static_cast<int>(static_cast<unsigned>(high_) / W);
      const int last = min(kWarp, packs - (P - 1) * owners_ - warp * kWarp);
      return (max(0, owners) * (P - 1) + max(0, last)) * W;
    }
  }
  __device__ int Columns() const { return max(0, high_ - max(0, low_)); }

  // Where pack i begins, from `base` on.
  __device__ __forceinline__ int Begin(int i) const {
    return kDivision == Division::kUneven && i == P - 1 ? last_ : i * stride_;
  }

  // Calls fn.operator()<kAll>(i) for each pack i of which any of the warp's rows has anything; kAll
  // says that all of them have all of it.
  template <typename Fn>
  __device__ __forceinline__ void ForPacks(const Fn& fn) const {
    // Forward, it pays that the many packs of most warps are one piece of code.
    if (kFramed && kOneUnit && AllWhole()) {
#pragma unroll
      for (int i = 0; i < P; ++i) fn.template operator()<true>(i);
      return;
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (!kFramed || (!kOneUnit && Whole(i))) {
        fn.template operator()<true>(i);
      } else if (any_packs_ >> i & 1) {
        fn.template operator()<false>(i);
      }
    }
  }
  // Whether all of the warp's rows have all of pack i; of all packs.
  __device__ __forceinline__ bool Whole(int i) const {
    return !kFramed || (whole_packs_ >> i & 1) != 0;
  }
  __device__ __forceinline__ bool AllWhole() const {
    return !kFramed || whole_packs_ == (1u << P) - 1;
  }
  // Whether pack i is added to sums; whether the row has nothing of it; all of it; its column j.
  __device__ __forceinline__ bool Counts(int i) const {
    return kFramed || (i == P - 1 ? counts_last : counts);
  }
  __device__ __forceinline__ bool Lacks(int i) const {
    const int begin = base + Begin(i);
    return kFramed && (begin >= high_ || begin + W <= low_);
  }
  __device__ __forceinline__ bool HasAll(int i) const {
    const int begin = base + Begin(i);
    return !kFramed || (begin >= low_ && begin + W <= high_);
  }
  __device__ __forceinline__ bool Has(int i, int j) const {
    const int column = base + Begin(i) + j;
    return !kFramed || (column >= low_ && column < high_);
  }

  // Stores what the row has of pack i at `p`.
  __device__ __forceinline__ void Store(T* p, const Pack<T, W>& pack, int i) const {
    if (HasAll(i)) {
      StorePackOnce(p, pack);
    } else {
      const auto& words = reinterpret_cast<const std::uint32_t (&)[kVecBytes / 4]>(pack);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (!Has(i, j)) continue;
        if constexpr (sizeof(T) == 2) {
          reinterpret_cast<Bits<T>*>(p)[j] = static_cast<std::uint16_t>(words[j / 2] >> j % 2 * 16);
        } else {
          p[j] = pack.v[j];
        }
      }
    }
  }

 private:
  __device__ void Refresh() {
    whole_packs_ = any_packs_ = 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      whole_packs_ |= static_cast<unsigned>(__all_sync(0xffffffffu, HasAll(i))) << i;
      any_packs_ |= static_cast<unsigned>(__any_sync(0xffffffffu, !Lacks(i))) << i;
    }
  }

  const int share_;
  const std::int64_t features_;
  int owners_ = 0, last_ = 0;  // not framed: q; where the last pack begins
  int stride_ = 0, low_, high_, skip_;
  unsigned whole_packs_ = 0, any_packs_ = 0;  // bit i: pack i
};

// Without the calls that a division compiles to: to an ulp, or, with a Newton step, and for normal
// numbers with normal reciprocals, as good as exact.
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float PreciseReciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return fmaf(result, fmaf(-x, result, 1.f), result);
}
__device__ __forceinline__ double Reciprocal(double x) {
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // 20 bits
#pragma unroll
  for (int i = 0; i < 2; ++i) result = fma(result, fma(-x, result, 1.0), result);  // Newton
  return result;
}
__device__ __forceinline__ double PreciseReciprocal(double x) {
  return Reciprocal(x);
}

// --- Parameters ---------------------------------------------------------------------------------

// Calls fn with a pointer of the parameter's type.
template <typename Fn>
__device__ __forceinline__ void WithType(const Param& param, std::int64_t group, const Fn& fn) {
  const std::int64_t offset = group * param.group_stride;
  switch (param.dtype) {
    case ffi::F16: return fn(static_cast<const Half*>(param.data) + offset);
    case ffi::BF16: return fn(static_cast<const BFloat16*>(param.data) + offset);
    case ffi::F32: return fn(static_cast<const float*>(param.data) + offset);
    default: return fn(static_cast<const double*>(param.data) + offset);
  }
}

// W values; p is aligned to them, up to 16 bytes.
template <int W, typename A, typename P>
__device__ __forceinline__ void LoadWide(const P* p, A added, A (&values)[W]) {
  if constexpr (W * sizeof(P) % kVecBytes == 0) {
    constexpr int kStep = kVec<P>;
#pragma unroll
    for (int j = 0; j < W; j += kStep) {
      Widen(LoadPlain<kStep>(p + j), reinterpret_cast<A(&)[kStep]>(values[j]));
    }
  } else if constexpr (W * sizeof(P) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(p);
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(reinterpret_cast<const P*>(&words)[j]);
  } else {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(__ldg(p + j));
  }
  if (added != 0) {
#pragma unroll
    for (A& value : values) value += added;
  }
}

// W values of a parameter, plus `added`. P: what it is an array of; void: of anything, and there
// may be none: then `absent`.
template <typename P, int W, typename A>
__device__ __forceinline__ void LoadParamPack(const Param& param, std::int64_t group,
                                              std::int64_t column, A absent, A added,
                                              A (&values)[W]) {
  if constexpr (!std::is_void_v<P>) {
    const P* const data = static_cast<const P*>(param.data) + group * param.group_stride;
    LoadWide(data + column, added, values);
  } else if (param.data == nullptr) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = absent;
  } else {
    WithType(param, group, [&](const auto* data) { LoadWide(data + column, added, values); });
  }
}

// A thread's columns of a parameter; `absent` where there is none.
template <typename T, int P, Division kDivision, bool kOneUnit, typename A>
__device__ __forceinline__ void LoadParam(const Param& param, std::int64_t group,
                                          const Place<T, P, kDivision, kOneUnit>& place, A absent,
                                          A added, A (&values)[P][kVec<T>]) {
  constexpr int W = kVec<T>;
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[i][j] = absent;
  }
  if (param.data == nullptr) return;
  WithType(param, group, [&](const auto* data) {
    data += place.first_column - place.skip() + place.base;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Lacks(i)) continue;
      if constexpr (kDivision != Division::kFramed) {
        LoadWide(data + place.Begin(i), added, values[i]);
      } else {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          if (place.Has(i, j)) {
            values[i][j] = static_cast<A>(__ldg(data + place.Begin(i) + j)) + added;
          }
        }
      }
    }
  });
}

// The threads of one of a block's units, by a barrier of its own, meet.
__device__ __forceinline__ void UnitSync(int unit, int lanes) {
  if (lanes <= kWarp) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + unit), "r"(lanes) : "memory");
  }
}

// --- Sums over a row ----------------------------------------------------------------------------

// For the sums of up to kMaxValues values: of a block's up to kWarps warps, and of a cluster's
// blocks.
template <typename A, int kMaxValues, int kWarps>
struct SumStorage {
  A warps[2][kMaxValues][kWarps];
  A blocks[2][kMaxValues][kMaxCluster];
  std::uint64_t received[2];
};

// Sums and exchanges among the threads of a row. All of a unit call it, whose barrier it is: what
// was read before from shared memory may be overwritten by any thread after.
// kOneUnit: the block has no other. Otherwise each has a barrier of its own, which leaves room for
// four such blocks on a multiprocessor.
template <typename A, int kMaxValues, int kWarps, bool kOneUnit>
class RowSum {
 public:
  // Blocks of a cluster meet (ClusterSync) before the first exchange.
  __device__ RowSum(int lanes, int cluster, int unit, SumStorage<A, kMaxValues, kWarps>& shared)
      : lanes_(lanes), cluster_(cluster), unit_(unit), shared_(shared) {
    if (cluster > 1 && threadIdx.x == 0) {
      InitBarrier(&shared.received[0]);
      InitBarrier(&shared.received[1]);
      PublishBarriers();
    }
  }

  // Over the lanes of a warp that belong to the row.
  template <int kValues>
  __device__ __forceinline__ void OverWarp(A (&values)[kValues]) const {
    if (lanes_ >= kWarp) {
      WarpSums<kWarp>(values);
    } else {
      for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
    }
  }

  // Whose values OfWarps and OfBlocks give the calling lane.
  __device__ __forceinline__ int WarpOfLane() const { return PlaceOfLane(lanes_ >> 5); }
  __device__ __forceinline__ int BlockOfLane() const { return PlaceOfLane(cluster_); }

  // Each aligned run of lanes gets the values of the row's warps in this block, lane by lane; 0
  // where there is none.
  template <int kValues>
  __device__ __forceinline__ void OfWarps(A (&values)[kValues]) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int warp = static_cast<int>(threadIdx.x / kWarp), warps = lanes_ >> 5;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared_.warps[buffer_][i][warp] = values[i];
    }
    // Every warp's values are written before they are read. No barrier is needed after the reads:
    // the next call writes the other buffer, and before the call after that writes this one, all
    // threads have passed the next call's barrier and so have finished these reads.
    if constexpr (kOneUnit) {
      __syncthreads();
    } else {
      UnitSync(unit_, lanes_);
    }
    const int from = WarpOfLane();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = from < warps ? shared_.warps[buffer_][i][unit_ * warps + from] : A{0};
    }
    buffer_ ^= 1;
  }

  // Over the lanes that OfWarps gave values.
  template <int kValues>
  __device__ __forceinline__ void OverWarps(A (&values)[kValues]) const {
    OverSpan(values, lanes_ >> 5);
  }

  // The same for the cluster's blocks.
  template <int kValues>
  __device__ __forceinline__ void OfBlocks(A (&values)[kValues]) {
    A(*const blocks)[kMaxCluster] = shared_.blocks[exchange_ & 1];
    std::uint64_t* const received = &shared_.received[exchange_ & 1];
    const int rank = ClusterRank();
    if (threadIdx.x == 0) {
      ExpectBytes(received, static_cast<std::uint32_t>(cluster_ * kValues * sizeof(A)));
    }
    // No block can send twice more before all of this block's threads have read what is here: it
    // waits for this block's next values, which are sent after a barrier.
    if (static_cast<int>(threadIdx.x) < cluster_) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        SendTo(static_cast<int>(threadIdx.x), &blocks[i][rank], values[i], received);
      }
    }
    WaitForPhase</*kCluster=*/true>(received, (exchange_ >> 1) & 1);
    ++exchange_;
    const int from = BlockOfLane();
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = from < cluster_ ? blocks[i][from] : A{0};
  }

  // Over the lanes that OfBlocks gave values.
  template <int kValues>
  __device__ __forceinline__ void OverBlocks(A (&values)[kValues]) const {
    OverSpan(values, cluster_);
  }

  // Replaces each value by its sum over the row.
  template <int kValues>
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    OverWarp(values);
    if (lanes_ <= kWarp) {
      __syncwarp();
    } else {
      OfWarps(values);
      OverWarps(values);
    }
    if (cluster_ > 1) {
      OfBlocks(values);
      OverBlocks(values);
    }
  }

 private:
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

  const int lanes_, cluster_, unit_;
  SumStorage<A, kMaxValues, kWarps>& shared_;
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
