// A thread's place in its row, in layer norm's kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/policy.h"

namespace gradops {
namespace {

// A thread's place in its row. It owns P packs of the row, 16-byte vectors
// (cuda/row_norm/policy.h). If q threads own packs, thread `lane` owns packs lane + k * q with k
// < P. The row has at most P * q packs.
//
// Even: the row has exactly P * q packs. Uneven: some threads lack their last pack, and have the
// row's last pack instead. Threads from q on have the packs of thread q - 1. Packs that another
// thread owns must not be added to sums. Forward, threads repeat the work on such packs, as a
// branch costs all threads more. Backward, they neither load nor store them: their elements are 0.
//
// Framed (see policy.h): the row may have all, some or none of a pack's columns. Rows
// with equal skips go to the same threads, whose columns so do not change.
//
// `kOneUnit`: a block has one row, or several narrow rows (forward).
template <typename T, int P, Division kDivision, bool kOneUnit>
class Place {
 public:
  static constexpr int W = kVec<T>, kPacks = P;
  static constexpr bool kFramed = kDivision == Division::kFramed;

  int unit, in_unit;  // Unit of the block; thread of the unit.
  int lane, row;      // Thread of the row; row of the unit.
  int first_column;   // First column of the block's share, from the frame's start on.
  int base;           // First column of the thread's packs, from first_column on.
  bool counts;        // Whether the thread's packs are added to sums; and its last pack.
  bool counts_last;

  __device__ Place(int lanes, int cluster, int share, std::int64_t features)
      : share_(share), features_(features) {
    const unsigned thread = threadIdx.x;
    if constexpr (kOneUnit) {
      unit = row = row_offset_ = 0;
      in_unit = static_cast<int>(thread);
      lane = lanes <= kWarp ? in_unit & (lanes - 1) : in_unit;
    } else {
      // The shuffle tells the compiler that a warp has one value. So loops over a unit's rows are
      // uniform, their counters need no registers, and shuffles in them overlap.
      unit =
          static_cast<int>(lanes <= kWarp ? thread / kWarp : thread / static_cast<unsigned>(lanes));
      unit = __shfl_sync(0xffffffffu, unit, 0);
      in_unit = static_cast<int>(thread) - unit * max(lanes, kWarp);
      lane = lanes < kWarp ? in_unit & (lanes - 1) : in_unit;
      row = lanes < kWarp ? in_unit >> (31 - __clz(lanes)) : 0;
      row_offset_ = row * static_cast<int>(features);
    }
    first_column = cluster > 1 ? ClusterRank() * share : 0;
    if constexpr (kFramed) {
      counts = counts_last = true;
      stride_ = kWarp * W;
      base = warp_of_row() * (kWarp * P * W) + (lane & (kWarp - 1)) * W;
      SetSkip(0);
    } else {
      SetSkip(0);
      const int packs = static_cast<int>(static_cast<unsigned>(high_) / W);
      owners_ = (packs + P - 1) / P;
      // Backward: a thread's packs are whole 128-byte lines apart (CopyAsync), if possible.
      const int in_lines = (owners_ + 7) & ~7;
      if (!kOneUnit && in_lines <= lanes && (P - 1) * in_lines <= packs) owners_ = in_lines;
      const int owned = min(lane, owners_ - 1), last = owned + (P - 1) * owners_;
      counts = lane < owners_;
      counts_last = counts && (kDivision == Division::kEven || last < packs);
      stride_ = owners_ * W;
      base = owned * W;
      last_ = (min(last, packs - 1) - owned) * W;
    }
  }

  // skip: columns of the frame before its row starts, less than W.
  __device__ void SetSkip(int skip) {
    low_ = skip - first_column;
    high_ = static_cast<int>(min(std::int64_t{share_}, features_ + low_));
    skip_ = skip;
    if constexpr (kFramed) Refresh();
  }

  // Called before each row: the compiler then does not keep what follows from columns_.
  __device__ __forceinline__ void Forget() { asm volatile("" : "+r"(columns_)); }

  __device__ __forceinline__ int warp_of_row() const {
    return static_cast<int>(static_cast<unsigned>(lane) / kWarp);
  }
  __device__ int skip() const { return skip_; }
  // The block's columns, from first_column on: [max(0, low), high).
  __device__ int low() const { return low_; }
  __device__ int high() const { return high_; }
  // How many columns a warp has, and how many the block has.
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

  // The beginning of pack i, from `base` on.
  __device__ __forceinline__ int Begin(int i) const {
    if constexpr (kDivision == Division::kFramed) return i * kWarp * W;
    return kDivision == Division::kUneven && i == P - 1 ? last_ : i * stride_;
  }

  // Pack i of the thread's row. first: where the block's share of the warp's first row begins. The
  // warp has one such address, and the rest is a 32-bit offset.
  template <typename U>
  __device__ __forceinline__ U* InRow(U* first, int i) const {
    using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
    const auto offset = static_cast<std::uint32_t>(row_offset_ + base + Begin(i));
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(first) +
                                offset * static_cast<std::uint32_t>(sizeof(T)));
  }

  // Calls fn.operator()<kAll>(i) for each pack i that has columns of the warp's rows. kAll: all
  // rows of the warp have the whole pack.
  template <typename Fn>
  __device__ __forceinline__ void ForPacks(const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (Whole(i)) {
        fn.template operator()<true>(i);
      } else if (Any(i)) {
        fn.template operator()<false>(i);
      }
    }
  }
  // Whether all rows of the warp have the whole pack i; AllWhole: all packs.
  __device__ __forceinline__ bool Whole(int i) const {
    return !kFramed || (whole_packs_ >> i & 1) != 0;
  }
  // Whether any row of the warp has columns of pack i.
  __device__ __forceinline__ bool Any(int i) const { return (any_packs_ >> i & 1) != 0; }
  __device__ __forceinline__ bool AllWhole() const {
    return !kFramed || whole_packs_ == (1u << P) - 1;
  }
  // Pack i is added to sums. Lacks: the row has none of it. HasAll: all of it. Has: its column j.
  __device__ __forceinline__ bool Counts(int i) const {
    return kFramed || (i == P - 1 ? counts_last : counts);
  }
  __device__ __forceinline__ bool Lacks(int i) const {
    const int begin = base + Begin(i);
    return kFramed &&
           (kBits ? (columns_ >> i * W & kAllOfPack) == 0 : begin >= high_ || begin + W <= low_);
  }
  __device__ __forceinline__ bool HasAll(int i) const {
    const int begin = base + Begin(i);
    return !kFramed || (kBits ? (columns_ >> i * W & kAllOfPack) == kAllOfPack
                              : begin >= low_ && begin + W <= high_);
  }
  __device__ __forceinline__ bool Has(int i, int j) const {
    const int column = base + Begin(i) + j;
    return !kFramed ||
           (kBits ? (columns_ >> (i * W + j) & 1) != 0 : column >= low_ && column < high_);
  }

  // Stores the row's columns of pack i at `p`. StoreSome: only if the row lacks some of them.
  __device__ __forceinline__ void Store(T* p, const Pack<T, W>& pack, int i) const {
    if (HasAll(i)) StorePackOnce(p, pack);
    StoreSome(p, pack, i);
  }
  __device__ __forceinline__ void StoreSome(T* p, const Pack<T, W>& pack, int i) const {
    if (!HasAll(i)) {
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
  // Whether bits say which of the thread's columns the row has: forward, which asks often. Backward
  // they cost registers, so code spills: bfloat16 layer norm of 4097 columns took 332 us, not 228.
  static constexpr bool kBits = kFramed && kOneUnit;
  static constexpr unsigned kAllOfPack = (1u << W) - 1;
  static_assert(!kBits || P * W <= 32);

  __device__ void Refresh() {
    whole_packs_ = any_packs_ = columns_ = 0;
#pragma unroll
    for (int i = 0; kBits && i < P; ++i) {
      const int begin = base + Begin(i);
      // Bits of the pack's columns from low to high.
      const unsigned before = (1u << min(W, max(0, low_ - begin))) - 1;
      const unsigned up_to = (1u << min(W, max(0, high_ - begin))) - 1;
      columns_ |= (up_to & ~before) << i * W;
    }
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
  int row_offset_;                            // columns from the warp's first row on
  unsigned whole_packs_ = 0, any_packs_ = 0;  // framed, bit i: pack i
  unsigned columns_ = 0;                      // kBits, bit i * W + j: column j of pack i
};

}  // namespace
}  // namespace gradops
