// What layer norm's kernels share: where a thread stands, the ring of rows, sums over a row.
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

template <typename T>
inline constexpr int kElements = RowElements(sizeof(T));
// Accesses of W elements that a thread makes for a row.
template <typename T, int W>
inline constexpr int kPacks = kElements<T> / W;

// Keeps the compiler from loading all of a row's single elements before it uses the first: it would
// run out of registers.
template <int W>
__device__ __forceinline__ void LimitLoads(int i) {
  if (W == 1 && i % 4 == 3) asm volatile("" ::: "memory");
}

// A thread's place: in its unit, and in the row that its team works on (cuda/layer_norm_policy.h).
// Of the columns of its block, a warp owns 32 * kElements neighbouring ones; of these, a lane owns
// every 32nd pack.
template <typename T, int W>
struct Place {
  int unit, in_unit;          // of the block; thread of the unit
  int lane, row;              // thread of the row; row of the unit
  int first_column, columns;  // of this block: [first_column, first_column + columns)
  int base, stride;           // of the thread's packs

  __device__ Place(const RowPlan& plan, std::int64_t features) {
    const int lanes = plan.lanes, thread = static_cast<int>(threadIdx.x);
    const int unit_threads = lanes < kWarp ? kWarp : lanes;
    // The shuffle tells the compiler that all of a warp have the same: so loops over a unit's rows
    // are uniform, their counters need no registers, and shuffles in them overlap.
    unit = __shfl_sync(0xffffffffu, thread / unit_threads, 0);
    in_unit = thread - unit * unit_threads;
    lane = lanes < kWarp ? in_unit & (lanes - 1) : in_unit;
    row = lanes < kWarp ? in_unit / lanes : 0;
    first_column = plan.cluster > 1 ? ClusterRank() * plan.share : 0;
    columns = min(plan.share, max(0, static_cast<int>(features) - first_column));
    stride = min(lanes, kWarp) * W;
    base = lane / kWarp * (kWarp * kElements<T>)+lane % kWarp * W;
  }

  // Calls fn.operator()<kAll>(), where kAll says that all of the warp's threads have all of their
  // packs of a row, of which this one has `rest` columns. Where a pack is a
  // single element, that saves a branch for each.
  template <typename Fn>
  __device__ __forceinline__ void ForPacks(int rest, const Fn& fn) const {
    if (W == 1 && __all_sync(0xffffffffu, Pack(kPacks<T, W> - 1) < rest)) {
      fn.template operator()<true>();
    } else {
      fn.template operator()<false>();
    }
  }

  // Where pack i begins, from the thread's first column, `base`, on. W = 1: rows have at least a
  // warp, so that this is a constant.
  __device__ __forceinline__ int Pack(int i) const { return i * (W == 1 ? kWarp : stride); }
};

// How a group's rows are dealt out: to `slots` blocks (or clusters), turn by turn of as many rows
// as a unit takes at a time. Divisions are the host's: a device makes calls of them, which cost
// spills.
struct Deal {
  std::int64_t slots;
  int rounds, extra;  // turns of every unit; the first `extra` units of the group have one more
  double inverse_features;

  Deal(const RowPlan& plan, std::int64_t rows, std::int64_t slots, std::int64_t features)
      : slots(slots), inverse_features(features > 0 ? 1.0 / static_cast<double>(features) : 1.0) {
    const std::int64_t turns = (rows + plan.unit_rows() - 1) / plan.unit_rows();
    rounds = static_cast<int>(turns / (slots * plan.units));
    extra = static_cast<int>(turns % (slots * plan.units));
  }

  // Item `item` of groups * slots. If there are more items than blocks, there is one slot.
  __device__ std::int64_t Group(std::int64_t item) const {
    return slots == 1 ? item : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(slots);
  }
};

// The rows of a group that a unit works on: those of a turn from `first` on, and so on every
// `step`.
struct Turns {
  std::int64_t first, step;
  int count;

  __device__ Turns(const Deal& deal, const RowPlan& plan, std::int64_t slot, int unit) {
    const std::int64_t number = unit * deal.slots + slot;
    first = number * plan.unit_rows();
    step = deal.slots * plan.units * plan.unit_rows();
    count = deal.rounds + (number < deal.extra);
  }
};

// To an ulp, without the calls that a division compiles to.
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ double Reciprocal(double x) {
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // 20 bits
#pragma unroll
  for (int i = 0; i < 2; ++i) result = fma(result, fma(-x, result, 1.0), result);  // Newton
  return result;
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
  constexpr int kBytes = W * sizeof(P) < 16 ? W * sizeof(P) : 16;
  constexpr int kStep = kBytes / sizeof(P);
  using Words = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, P>>>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    struct alignas(kBytes) {
      P v[kStep];
    } pack;
    *reinterpret_cast<Words*>(&pack) = __ldg(reinterpret_cast<const Words*>(p + j));
#pragma unroll
    for (int k = 0; k < kStep; ++k) values[j + k] = static_cast<A>(pack.v[k]) + added;
  }
}

// W values of a parameter, plus `added`; `absent` where there is none.
template <int W, typename A>
__device__ __forceinline__ void LoadParamPack(const Param& param, std::int64_t group,
                                              std::int64_t column, A absent, A added,
                                              A (&values)[W]) {
  if (param.data == nullptr) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = absent;
    return;
  }
  WithType(param, group, [&](const auto* data) { LoadWide(data + column, added, values); });
}

// A thread's columns of a parameter.
template <typename T, int W, typename A, int P>
__device__ __forceinline__ void LoadParam(const Param& param, std::int64_t group,
                                          const Place<T, W>& place, A absent, A added,
                                          A (&values)[P][W]) {
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[i][j] = absent;
  }
  if (param.data == nullptr) return;
  const int rest = place.columns - place.base;
  WithType(param, group, [&](const auto* data) {
    data += place.first_column + place.base;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Pack(i) < rest) LoadWide(data + place.Pack(i), added, values[i]);
    }
  });
}

// --- The ring -----------------------------------------------------------------------------------

struct RingBarriers {
  std::uint64_t full[kMaxUnits][kMaxStages];
};

// Chunks (of rows, of up to kArrays arrays) on their way to shared memory, for the threads of one
// unit. When one is ordered, all threads must have finished with the one in whose place it goes.
template <typename T, int W, int kArrays>
class RowRing {
 public:
  // arrays: first elements, [rows, features]; null at the end for fewer.
  __device__ RowRing(const RowPlan& plan, const Place<T, W>& place, unsigned char* shared,
                     RingBarriers& barriers, const T* const (&arrays)[kArrays], std::int64_t rows,
                     std::int64_t features)
      : place_(place),
        barriers_(barriers.full[place.unit]),
        copy_(plan.copy),
        stages_(plan.stages),
        array_bytes_(plan.array_bytes),
        features_(features),
        elements_(rows * features) {
    count_ = 0;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      arrays_[a] = arrays[a];
      count_ += arrays[a] != nullptr;
    }
    stage_bytes_ = count_ * array_bytes_;
    base_ = shared + place.unit * stages_ * stage_bytes_;
    if (copy_ == RowCopy::kBulk && place.in_unit == 0) {
      for (int s = 0; s < stages_; ++s) InitBarrier(&barriers_[s]);
      PublishBarriers();
    }
  }

  __device__ int stages() const { return stages_; }
  __device__ bool direct() const { return W == 1 && copy_ == RowCopy::kDirect; }

  // Before the first Order for rows that do not follow on those ordered so far, all of which must
  // have been waited for.
  __device__ void Restart() { order_stage_ = stage_; }

  // Orders this block's columns of `count` rows from `row` on, of which the caller's is the one of
  // its place; the chunk is empty if count is not positive. All threads of the unit call it.
  __device__ __forceinline__ void Order(std::int64_t row, std::int64_t count) {
    unsigned char* const stage = base_ + order_stage_ * stage_bytes_;
    if (W == 1 ? !direct() : copy_ == RowCopy::kBulk) {
      if (place_.in_unit == 0) {
        if (count > 0 && place_.columns > 0) {
          OrderBulk(stage, row * features_ + place_.first_column,
                    (static_cast<int>(count) - 1) * static_cast<int>(features_) + place_.columns);
        } else {
          ExpectBytes(&barriers_[order_stage_], 0);
        }
      }
    } else {
      if constexpr (W > 1) {
        const std::int64_t offset = (row + place_.row) * features_ + place_.first_column;
        T* const to = reinterpret_cast<T*>(stage) + place_.row * static_cast<int>(features_);
#pragma unroll
        for (int i = 0; i < kPacks<T, W>; ++i) {
          const int column = place_.base + place_.Pack(i);
          if (place_.row >= count || column >= place_.columns) continue;
#pragma unroll
          for (int a = 0; a < kArrays; ++a) {
            if (a >= count_) continue;
            CopyAsync<W * sizeof(T)>(
                reinterpret_cast<unsigned char*>(to + column) + a * array_bytes_,
                arrays_[a] + offset + column);
          }
        }
      }
      CommitCopies();
    }
    if (++order_stage_ == stages_) order_stage_ = 0;
  }

  // In place of Order for a chunk that nobody will wait for.
  __device__ __forceinline__ void OrderNothing() {
    if (W > 1 && copy_ == RowCopy::kAsync) CommitCopies();  // groups are counted
  }

  // Until the oldest kDepth chunks have arrived; `ahead`: how many more are ordered, of which
  // cp.async leaves two under way at most.
  template <int kDepth>
  __device__ __forceinline__ void Wait(int ahead) {
    if (W == 1 ? !direct() : copy_ == RowCopy::kBulk) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const bool wraps = stage_ + d >= stages_;
        WaitForPhase(&barriers_[wraps ? stage_ + d - stages_ : stage_ + d], parity_ ^ wraps);
      }
    } else if (W > 1) {
      if (ahead == 0) {
        WaitForCopies<0>();
      } else if (ahead == 1) {
        WaitForCopies<1>();
      } else {
        WaitForCopies<2>();
      }
    }
  }

  // Where this thread's columns begin in array a of the d-th oldest chunk, whose first row is
  // `row`.
  __device__ __forceinline__ const T* Row(int a, int d, std::int64_t row) const {
    if (direct()) {
      return arrays_[a] + (row + place_.row) * features_ + place_.first_column + place_.base;
    }
    const int stage = stage_ + d >= stages_ ? stage_ + d - stages_ : stage_ + d;
    const unsigned char* p = base_ + stage * stage_bytes_ + a * array_bytes_;
    if (W == 1) {
      p += reinterpret_cast<std::uintptr_t>(arrays_[a] + row * features_ + place_.first_column) %
           kVecBytes;
    }
    return reinterpret_cast<const T*>(p) + place_.row * static_cast<int>(features_) + place_.base;
  }

  // Done with the oldest kDepth chunks.
  template <int kDepth>
  __device__ __forceinline__ void Next() {
    stage_ += kDepth;
    if (stage_ >= stages_) {
      stage_ -= stages_;
      parity_ ^= 1;
    }
  }

 private:
  __device__ void OrderBulk(unsigned char* stage, std::int64_t offset, int count) {
    std::uint64_t* const barrier = &barriers_[order_stage_];
    if constexpr (W > 1) {
      const std::uint32_t bytes = static_cast<std::uint32_t>(count) * sizeof(T);
      ExpectBytes(barrier, bytes * count_);
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (a < count_) CopyBulk(stage + a * array_bytes_, arrays_[a] + offset, bytes, barrier);
      }
    } else {
      // From the last 16-byte boundary to the next; but single elements at the array's ends, beyond
      // which nothing may be read.
      const unsigned char* low[kArrays];
      std::uint32_t skip[kArrays], size[kArrays], total = 0;
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (a >= count_) continue;
        const T *begin = arrays_[a] + offset, *end = begin + count;
        const auto misaligned =
            static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(begin) % kVecBytes);
        T* const to = reinterpret_cast<T*>(stage + a * array_bytes_ + misaligned);
        low[a] = reinterpret_cast<const unsigned char*>(begin) - misaligned;
        skip[a] = 0;
        size[a] = misaligned + static_cast<std::uint32_t>(count) * sizeof(T);
        if (low[a] < reinterpret_cast<const unsigned char*>(arrays_[a])) {
          const int head = min(count, static_cast<int>((kVecBytes - misaligned) / sizeof(T)));
          for (int i = 0; i < head; ++i) to[i] = begin[i];
          skip[a] = kVecBytes;
        }
        const std::uint32_t rest = size[a] % kVecBytes;
        if (rest != 0 && end + (kVecBytes - rest) / sizeof(T) > arrays_[a] + elements_) {
          const int tail = min(count, static_cast<int>(rest / sizeof(T)));
          for (int i = 1; i <= tail; ++i) to[count - i] = end[-i];
          size[a] -= rest;
        } else if (rest != 0) {
          size[a] += kVecBytes - rest;
        }
        size[a] = size[a] > skip[a] ? size[a] - skip[a] : 0;
        total += size[a];
      }
      FenceBulkCopies();  // single elements come before what is copied to their place later
      ExpectBytes(barrier, total);
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (a < count_ && size[a] > 0) {
          CopyBulk(stage + a * array_bytes_ + skip[a], low[a] + skip[a], size[a], barrier);
        }
      }
    }
  }

  const Place<T, W>& place_;
  std::uint64_t* const barriers_;
  const RowCopy copy_;
  const int stages_, array_bytes_;
  const std::int64_t features_, elements_;
  const T* arrays_[kArrays];
  int count_, stage_bytes_;
  unsigned char* base_;
  int order_stage_ = 0, stage_ = 0;
  std::uint32_t parity_ = 0;
};

// --- Sums over a row ----------------------------------------------------------------------------

// For the sums of up to kMaxValues values: of a block's warps, and of a cluster's blocks.
template <typename A, int kMaxValues>
struct SumStorage {
  A warps[2][kMaxValues][kMaxUnits];
  A blocks[2][kMaxValues][kMaxCluster];
  std::uint64_t received[2];
};

// Sums and exchanges among the threads of a row. All of a unit call it, whose barrier it is: what
// was read before from shared memory may be overwritten by any thread after.
template <typename A, int kMaxValues>
class RowSum {
 public:
  __device__ RowSum(const RowPlan& plan, int unit, SumStorage<A, kMaxValues>& shared)
      : plan_(plan), shared_(shared), unit_(unit) {
    if (plan.cluster > 1 && threadIdx.x == 0) {
      InitBarrier(&shared.received[0]);
      InitBarrier(&shared.received[1]);
      PublishBarriers();
    }
  }

  __device__ int warps() const {
    return plan_.lanes / kWarp;
  }  // of a row and block; 0: part of one

  // Over the lanes of a warp that belong to the row.
  template <int kValues>
  __device__ __forceinline__ void OverWarp(A (&values)[kValues]) const {
    if (plan_.lanes >= kWarp) {
      WarpSums<kWarp>(values);
    } else {
      for (int distance = plan_.lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
      }
    }
  }

  // Lanes k and 16 + k get the values of the row's warp k in this block; 0 where there is none.
  template <int kValues>
  __device__ __forceinline__ void OfWarps(A (&values)[kValues]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared_.warps[buffer_][i][warp] = values[i];
    }
    // Every warp's values are written before they are read. No barrier is needed after the reads:
    // the next call writes the other buffer, and before the call after that writes this one, all
    // threads have passed the next call's barrier and so have finished these reads.
    asm volatile("bar.sync %0, %1;" ::"r"(1 + unit_), "r"(plan_.lanes) : "memory");
    static_assert(kMaxUnits == 16);
    const int from = lane % kMaxUnits;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = from < warps() ? shared_.warps[buffer_][i][unit_ * warps() + from] : A{0};
    }
    buffer_ ^= 1;
  }

  // Over the lanes that OfWarps gave values.
  template <int kValues>
  __device__ __forceinline__ void OverWarps(A (&values)[kValues]) const {
    WarpSums<kMaxUnits>(values);
  }

  // Gives each of the cluster's blocks the values of all: values[i] of block r is at result[i][r].
  template <int kValues>
  __device__ __forceinline__ const A (*OfBlocks(const A (&values)[kValues])) [kMaxCluster] {
    A(*const blocks)[kMaxCluster] = shared_.blocks[exchange_ & 1];
    std::uint64_t* const received = &shared_.received[exchange_ & 1];
    const int rank = ClusterRank();
    if (threadIdx.x == 0) {
      ExpectBytes(received, static_cast<std::uint32_t>(plan_.cluster * kValues * sizeof(A)));
    }
    // No block can send twice more before all of this block's threads have read what is here: it
    // waits for this block's next values, which are sent after a barrier.
    if (static_cast<int>(threadIdx.x) < plan_.cluster) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        SendTo(static_cast<int>(threadIdx.x), &blocks[i][rank], values[i], received);
      }
    }
    WaitForPhase</*kCluster=*/true>(received, (exchange_ >> 1) & 1);
    ++exchange_;
    return blocks;
  }

  // Replaces each value by its sum over the row.
  template <int kValues>
  __device__ __forceinline__ void operator()(A (&values)[kValues]) {
    OverWarp(values);
    if (plan_.lanes <= kWarp) {
      __syncwarp();
    } else {
      OfWarps(values);
      OverWarps(values);
    }
    if (plan_.cluster > 1) {
      const A(*const blocks)[kMaxCluster] = OfBlocks(values);
      static_assert(kMaxCluster == kMaxUnits);  // lanes k and 16 + k take block k's
      const int rank = static_cast<int>(threadIdx.x) % kMaxCluster;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values[i] = rank < plan_.cluster ? blocks[i][rank] : A{0};
      }
      OverWarps(values);
    }
  }

 private:
  const RowPlan& plan_;
  SumStorage<A, kMaxValues>& shared_;
  const int unit_;
  int buffer_ = 0;
  std::uint32_t exchange_ = 0;
};

}  // namespace
}  // namespace gradops
