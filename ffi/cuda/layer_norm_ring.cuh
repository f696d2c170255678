// How layer norm's backward kernel gets its rows: dealt out to units of threads, each of which has
// a ring of them in shared memory, or the next one in registers.
#pragma once

#include <cstdint>

#include "cuda/layer_norm_bwd_policy.h"
#include "cuda/layer_norm_rows.cuh"
#include "cuda/layer_norm_sums.cuh"

namespace gradops {
namespace {

// How a group's rows are dealt out: to `slots` blocks (or clusters), turn by turn of as many rows
// as a unit takes at a time. Framed: in `passes`, in each of which all of a unit's rows start as
// many columns after their frames. Divisions are the host's: a device makes calls of them, which
// cost spills.
struct Deal {
  std::int64_t slots;
  std::int64_t turns;  // of the group
  int passes;
  int rounds, extra;  // turns of every unit in a pass; in pass p, the first units up to
                      // extra - p * units of the group's have one more
  double inverse_features;

  Deal(const BackwardPlan& plan, std::int64_t rows, std::int64_t slots, std::int64_t features)
      : slots(slots), inverse_features(features > 0 ? 1.0 / static_cast<double>(features) : 1.0) {
    turns = (rows + plan.unit_rows() - 1) / plan.unit_rows();
    passes =
        static_cast<int>(plan.classes / std::gcd<std::int64_t>(plan.classes, slots * plan.units));
    rounds = static_cast<int>(turns / (slots * plan.units * passes));
    extra = static_cast<int>(turns % (slots * plan.units * passes));
  }

  // Whether all blocks end at about the same time. If not, what comes after, launched early, crowds
  // on the multiprocessors that are done first: [199, 8192] takes 17.6 us, not 16.4.
  __device__ bool EndsTogether() const { return rounds == 0 || extra == 0 || rounds > 8; }

  // Item `item` of groups * slots. If there are more items than blocks, there is one slot.
  __device__ std::int64_t Group(std::int64_t item) const {
    return slots == 1 ? item : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(slots);
  }
};

// The rows of a group that a unit works on in a pass: those of a turn from `first` on, and so on
// every `step`.
struct Turns {
  std::int64_t first, step;
  int most;  // of any unit of the block; the last one may be without rows

  __device__ Turns(const Deal& deal, const BackwardPlan& plan, std::int64_t slot, int unit,
                   int pass) {
    const std::int64_t units = deal.slots * plan.units;
    const std::int64_t number = pass * units + unit * deal.slots + slot;
    first = number * plan.unit_rows();
    step = deal.passes * units * plan.unit_rows();
    most = deal.rounds + (pass * units + slot < deal.extra);
  }
};

struct RingBarriers {
  std::uint64_t full[kBackwardWarps][kMaxStages];
};

// Chunks (of rows, of up to kArrays arrays) on their way to shared memory, for the threads of one
// unit. When one is ordered, all threads must have finished with the one in whose place it goes.
template <typename T, int P, Division kDivision, int kArrays>
class RowRing {
  static constexpr int W = kVec<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;

 public:
  // arrays: first elements, [rows, features]; null at the end for fewer.
  __device__ RowRing(const BackwardPlan& plan, const Place<T, P, kDivision, false>& place,
                     unsigned char* shared, RingBarriers& barriers,
                     const T* const (&arrays)[kArrays], std::int64_t rows, std::int64_t features)
      : place_(place),
        barriers_(barriers.full[place.unit]),
        bulk_(plan.copy == RowCopy::kBulk),
        lanes_(plan.lanes),
        unit_rows_(plan.unit_rows()),
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
    if (bulk_ && place.in_unit == 0) {
      for (int s = 0; s < stages_; ++s) InitBarrier(&barriers_[s]);
      PublishBarriers();
    }
  }

  __device__ int stages() const { return stages_; }

  // Orders this block's columns of the unit's rows from `row` on, as far as they precede `end`, of
  // which the caller's is the one of its place; there may be none. All threads of the unit call it.
  __device__ __forceinline__ void Order(std::int64_t row, std::int64_t end) {
    const std::int64_t count = min(std::int64_t{unit_rows_}, end - row);
    unsigned char* const stage = base_ + order_stage_ * stage_bytes_;
    if (bulk_) {
      if (place_.in_unit == 0) OrderBulk(stage, row, static_cast<int>(count));
    } else {
      const std::int64_t offset = FirstElement(row + place_.row);
      T* const to = reinterpret_cast<T*>(stage) + place_.row * static_cast<int>(features_);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (place_.row >= count || place_.Lacks(i) || !place_.Counts(i)) continue;
        const int column = place_.base + place_.Begin(i);
#pragma unroll
        for (int a = 0; a < kArrays; ++a) {
          if (a >= count_) continue;
          T* const shared = to + column + a * (array_bytes_ / int{sizeof(T)});
          const T* const global = arrays_[a] + offset + column;
          // Beyond an array's end, nothing may be read.
          if (!kFramed || elements_ - offset - column >= W) {
            CopyAsync(shared, global);
          } else {
#pragma unroll 1
            for (int j = 0; j < static_cast<int>(elements_ - offset) - column; ++j) {
              shared[j] = global[j];
            }
          }
        }
      }
      CommitCopies();
    }
    if (++order_stage_ == stages_) order_stage_ = 0;
  }

  // In place of Order for a chunk that nobody will wait for.
  __device__ __forceinline__ void OrderNothing() {
    if (!bulk_) CommitCopies();  // groups are counted
  }

  // Until the oldest kDepth chunks have arrived; `ahead`: how many more are ordered, of which
  // cp.async leaves two under way at most. All threads of the unit call it.
  template <int kDepth>
  __device__ __forceinline__ void Wait(int ahead) {
    if (bulk_) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const bool wraps = stage_ + d >= stages_;
        WaitForPhase(&barriers_[wraps ? stage_ + d - stages_ : stage_ + d], parity_ ^ wraps);
      }
      return;
    }
    if (ahead == 0) {
      WaitForCopies<0>();
    } else if (ahead == 1) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<2>();
    }
    UnitSync(place_.unit, lanes_);  // others' copies have arrived, too
  }

  // Where this thread's packs begin in array a of the d-th oldest chunk; and pack i from there.
  __device__ __forceinline__ const T* Row(int a, int d) const {
    const int stage = stage_ + d >= stages_ ? stage_ + d - stages_ : stage_ + d;
    const unsigned char* const p = base_ + stage * stage_bytes_ + a * array_bytes_;
    return reinterpret_cast<const T*>(p) + place_.row * static_cast<int>(features_) + place_.base;
  }
  __device__ __forceinline__ Pack<T, W> Load(const T* row, int i) const {
    return LoadPlain<W>(row + place_.Begin(i));
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
  // Where this block's share of a row's frame begins.
  __device__ __forceinline__ std::int64_t FirstElement(std::int64_t row) const {
    return row * features_ + place_.first_column - (kFramed ? place_.skip() : 0);
  }

  // By one thread.
  __device__ __forceinline__ void OrderBulk(unsigned char* stage, std::int64_t row, int count) {
    std::uint64_t* const barrier = &barriers_[order_stage_];
    const int columns = place_.high();
    if (count <= 0 || columns <= max(0, place_.low())) {
      ExpectBytes(barrier, 0);
      return;
    }
    const std::int64_t begin = FirstElement(row);
    int elements = (count - 1) * static_cast<int>(features_) + columns;
    if constexpr (kFramed) {
      // To the next 16-byte boundary, but single elements at the array's end, beyond which nothing
      // may be read.
      int rest = elements & (W - 1);
      if (rest != 0 && begin + elements + W - rest > elements_) {
#pragma unroll 1
        for (; rest > 0; --rest) {
          --elements;
#pragma unroll
          for (int a = 0; a < kArrays; ++a) {
            if (a >= count_) continue;
            reinterpret_cast<T*>(stage + a * array_bytes_)[elements] = arrays_[a][begin + elements];
          }
        }
      }
      elements = (elements + W - 1) & ~(W - 1);
      FenceBulkCopies();  // single elements come before what is copied to their place later
    }
    const std::uint32_t bytes = static_cast<std::uint32_t>(elements) * sizeof(T);
    ExpectBytes(barrier, bytes * count_);
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      if (a < count_ && bytes > 0) {
        CopyBulk(stage + a * array_bytes_, arrays_[a] + begin, bytes, barrier);
      }
    }
  }

  const Place<T, P, kDivision, false>& place_;
  std::uint64_t* const barriers_;
  const bool bulk_;
  const int lanes_, unit_rows_, stages_, array_bytes_;
  const std::int64_t features_, elements_;
  const T* arrays_[kArrays];
  int count_, stage_bytes_;
  unsigned char* base_;
  int order_stage_ = 0, stage_ = 0;
  std::uint32_t parity_ = 0;
};

// The same without shared memory: a thread has its packs of the next chunk in registers, which are
// on their way while it works on this one, and are ordered as soon as that has arrived. Elements of
// 16 bits, whose rows are direct where they are few: it has this chunk's only, and orders the next
// one when it is done. Rows are not framed.
template <typename T, int P, Division kDivision, int kArrays>
class RowsAhead {
  static constexpr int W = kVec<T>;
  static constexpr bool kAhead = sizeof(T) > 2;
  static_assert(kDivision != Division::kFramed);

 public:
  __device__ RowsAhead(const BackwardPlan&, const Place<T, P, kDivision, false>& place,
                       unsigned char*, RingBarriers&, const T* const (&arrays)[kArrays],
                       std::int64_t, std::int64_t features)
      : place_(place), features_(features) {
#pragma unroll
    for (int a = 0; a < kArrays; ++a) arrays_[a] = arrays[a];
  }

  __device__ static constexpr int stages() { return 2; }

  // What the next order is for: the unit's rows from `row` on; where they do not precede `end`,
  // anything or nothing. Apart from Order, as that comes after waiting, when nothing else shall be
  // left to do.
  __device__ __forceinline__ void Aim(std::int64_t row, std::int64_t end) {
    row += place_.row;
    aimed_ = row < end;
    offset_ = aimed_ ? row * features_ + place_.first_column + place_.base : 0;
  }
  __device__ __forceinline__ void Order() {
    if constexpr (kAhead) {
      LoadAll(next_);
    } else if (aimed_) {
      LoadAll(row_);
    }
  }

  template <int kDepth>
  __device__ __forceinline__ void Wait(int) {
    static_assert(kDepth == 1);
    if constexpr (kAhead) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
#pragma unroll
        for (int i = 0; i < P; ++i) row_[a][i] = next_[a][i];
      }
    }
  }
  __device__ __forceinline__ const Pack<T, W>* Row(int a, int) const { return row_[a]; }
  __device__ __forceinline__ Pack<T, W> Load(const Pack<T, W>* row, int i) const { return row[i]; }
  template <int kDepth>
  __device__ __forceinline__ void Next() {}

 private:
  using Packs = Pack<T, W>[kArrays][P];

  __device__ __forceinline__ void LoadAll(Packs& packs) const {
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const T* const p = arrays_[a] + offset_ + place_.Begin(i);
        packs[a][i] =
            a + 1 < kArrays ? LoadPackOnce<W>(p) : LoadPackOnceIf<W>(arrays_[a] != nullptr, p);
      }
    }
  }

  const Place<T, P, kDivision, false>& place_;
  const std::int64_t features_;
  const T* arrays_[kArrays];
  std::int64_t offset_;
  bool aimed_;
  Packs row_, next_;
};

}  // namespace
}  // namespace gradops
