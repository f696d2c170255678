// Where a thread of layer norm's kernels stands in its row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/layer_norm_policy.h"
#include "cuda/pipeline.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace gradops {
namespace {

// A thread's place in its row, of which it owns P packs of 16 bytes (cuda/layer_norm_policy.h):
// packs lane, lane + q, lane + 2 q ... of a row of at most P * q packs.
//
// Even: of exactly so many. Threads from q on own what the one before them owns, which must not be
// added to sums. Uneven: some threads lack their last pack, and own the row's last one too,
// likewise. Forward, they do the same once more, as a branch costs all of them more; backward, they
// neither load nor store it: what they have of it is 0.
//
// Framed: rows may start anywhere, and have any length. A row's frame then starts at the last
// 16-byte boundary before it, and packs are those of the frame, of which the row may have all, some
// columns, or none: a warp owns 32 * P neighbouring ones, a lane every 32nd of these. Rows whose
// frames start as many columns before them are worked on by the same threads, so that a thread's
// columns stay what they are.
// kOneUnit: a block has one row, unless it is narrow: forward.
template <typename T, int P, Division kDivision, bool kOneUnit>
class Place {
 public:
  static constexpr int W = kVec<T>, kPacks = P;
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
    if constexpr (kOneUnit) {
      unit = row = row_offset_ = 0;
      in_unit = static_cast<int>(thread);
      lane = lanes <= kWarp ? in_unit & (lanes - 1) : in_unit;
    } else {
      // The shuffle tells the compiler that all of a warp have the same: so loops over a unit's
      // rows are uniform, their counters need no registers, and shuffles in them overlap.
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
      // Backward, a thread's packs are whole lines of 128 bytes apart (CopyAsync), if that can be.
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

  // How many columns before its rows the frame starts: less than W.
  __device__ void SetSkip(int skip) {
    low_ = skip - first_column;
    high_ = static_cast<int>(min(std::int64_t{share_}, features_ + low_));
    skip_ = skip;
    if constexpr (kFramed) Refresh();
  }

  // Before each of several rows: so that the compiler does not keep what follows from it.
  __device__ __forceinline__ void Forget() { asm volatile("" : "+r"(columns_)); }

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
    if constexpr (kDivision == Division::kFramed) return i * kWarp * W;
    return kDivision == Division::kUneven && i == P - 1 ? last_ : i * stride_;
  }

  // Pack i of the thread's row, from where the block's share of the first of a warp's rows begins:
  // one address for the warp, and, so that it is one, the rest in 32 bits.
  template <typename U>
  __device__ __forceinline__ U* InRow(U* first, int i) const {
    using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
    const auto offset = static_cast<std::uint32_t>(row_offset_ + base + Begin(i));
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(first) +
                                offset * static_cast<std::uint32_t>(sizeof(T)));
  }

  // Calls fn.operator()<kAll>(i) for each pack i of which any of the warp's rows has anything; kAll
  // says that all of them have all of it.
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
  // Whether all of the warp's rows have all of pack i; of all packs.
  __device__ __forceinline__ bool Whole(int i) const {
    return !kFramed || (whole_packs_ >> i & 1) != 0;
  }
  // Whether any of the warp's rows has anything of pack i.
  __device__ __forceinline__ bool Any(int i) const { return (any_packs_ >> i & 1) != 0; }
  __device__ __forceinline__ bool AllWhole() const {
    return !kFramed || whole_packs_ == (1u << P) - 1;
  }
  // Whether pack i is added to sums; whether the row has nothing of it; all of it; its column j.
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

  // Stores what the row has of pack i at `p`; or only if it does not have all of it.
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
  // Whether what the row has of the thread's columns is kept as bits: forward, where it is asked
  // often. Backward these cost registers: spills, and bfloat16's layer norm of 4097 columns 332 us,
  // not 228.
  static constexpr bool kBits = kFramed && kOneUnit;
  static constexpr unsigned kAllOfPack = (1u << W) - 1;
  static_assert(!kBits || P * W <= 32);

  __device__ void Refresh() {
    whole_packs_ = any_packs_ = columns_ = 0;
#pragma unroll
    for (int i = 0; kBits && i < P; ++i) {
      const int begin = base + Begin(i);
      // The pack's columns from low to high.
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
  int row_offset_;                            // from the first of a warp's rows
  unsigned whole_packs_ = 0, any_packs_ = 0;  // framed, bit i: pack i
  unsigned columns_ = 0;                      // kBits, bit i * W + j: column j of pack i
};

}  // namespace
}  // namespace gradops
