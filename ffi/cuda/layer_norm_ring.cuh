// How layer norm's backward kernel gets its rows: dealt out to units of threads, each of which has
// its own part of the next ones on their way to shared memory.
#pragma once

#include <cstdint>
#include <numeric>

#include "cuda/layer_norm_bwd_policy.h"
#include "cuda/layer_norm_rows.cuh"

namespace gradops {
namespace {

// How a group's rows are dealt out: to `slots` blocks (or clusters), turn by turn of as many rows
// as a unit takes at a time. Framed: in `passes`, in each of which all of a unit's rows start as
// many columns after their frames. Divisions are the host's: a device makes calls of them, which
// cost spills.
struct Deal {
  std::int64_t slots;
  int passes;
  int rounds, extra;  // turns of every unit in a pass; in pass p, the first units up to
                      // extra - p * units of the group's have one more

  Deal(const BackwardPlan& plan, std::int64_t rows, std::int64_t slots) : slots(slots) {
    const std::int64_t turns = (rows + plan.unit_rows() - 1) / plan.unit_rows();
    passes =
        static_cast<int>(plan.classes / std::gcd<std::int64_t>(plan.classes, slots * plan.units));
    rounds = static_cast<int>(turns / (slots * plan.units * passes));
    extra = static_cast<int>(turns % (slots * plan.units * passes));
  }

  // Item `item` of groups * slots. If there are more items than blocks, there is one slot.
  __device__ std::int64_t Group(std::int64_t item) const {
    return slots == 1 ? item : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(slots);
  }
};

// The rows of a group that a unit works on in a pass: those of a turn from `first` on, and so on
// every `step`.
struct Turns {
  std::int64_t first, step;
  int most;  // of any unit of the block
  int own;   // of those, how many have a row for the thread

  __device__ Turns(const Deal& deal, const BackwardPlan& plan, std::int64_t slot, int unit, int row,
                   int pass, std::int64_t rows) {
    const std::int64_t units = deal.slots * plan.units;
    const std::int64_t number = pass * units + unit * deal.slots + slot;
    first = number * plan.unit_rows();
    step = deal.passes * units * plan.unit_rows();
    most = deal.rounds + (pass * units + slot < deal.extra);
    own = deal.rounds + (number < deal.extra);
    own -= own > 0 && first + (own - 1) * step + row >= rows;  // the group's last turn may be short
  }
};

// A thread's packs of the rows that its unit works on, turn by turn, of dy, x, and dsum or null: on
// their way to shared memory from `stages` turns before. Each thread copies, and reads, its own: so
// none waits for others (framed: for others than its warp's), and what is read is replaced, at once
// or later. A warp's packs should start as far into a line of 128 bytes as in memory (CopyAsync):
// framed, they do; else, as the unit's first rows do, which is right for all if a unit's rows are
// whole lines apart: of 1000 elements 8 units times 132 blocks are, of 5000, by clusters, every
// second or fourth.
template <typename T, int P, Division kDivision>
class RowRing {
  static constexpr int W = kVec<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;
  using RowPlace = Place<T, P, kDivision, false>;

 public:
  // shared: the block's. elements: of an array. first_turn: as in Start, of the first call.
  __device__ RowRing(const BackwardPlan& plan, const RowPlace& place, unsigned char* shared,
                     const T* const (&arrays)[3], std::int64_t elements, std::int64_t first_turn)
      : place_(place),
        arrays_{arrays[0], arrays[1], arrays[2]},
        stages_(plan.stages),
        last_stage_(plan.ring_bytes / plan.stages * (plan.stages - 1)),
        own_(shared +
             threadIdx.x / kWarp * (plan.ring_bytes / plan.stages / (plan.threads() / kWarp)) +
             threadIdx.x % kWarp * kVecBytes + (kFramed ? 0 : InLine(first_turn))),
        elements_(elements) {
    // What is never copied adds nothing to a row's sums.
    for (int s = 0; s < stages_; ++s) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (place.Counts(i)) continue;
        StorePack(Slot(0, i, 0), Pack<T, W>{});
        StorePack(Slot(1, i, 0), Pack<T, W>{});
      }
      stage_ = last_stage_ - stage_;
    }
  }

  // The first turn's rows start at element `turn`, the same for the warp, the next one's `step`
  // further, and so on; of `own` turns one is the thread's. Orders the first ones.
  __device__ __forceinline__ void Start(std::int64_t turn, std::int64_t step, int own) {
#pragma unroll
    for (int a = 0; a < 3; ++a) next_[a] = arrays_[a] + turn;
    step_ = step, left_ = own;
    if constexpr (kFramed) ordered_ = static_cast<unsigned>(turn);
    stage_ = 0;
#pragma unroll 1
    for (int s = 0; s < stages_; ++s) {
      Order();
      EndTurn(arrays_[2] != nullptr);
    }
    if constexpr (kFramed) taken_ = static_cast<unsigned>(turn);
  }

  // The next row's packs of the first two arrays, in whose place, if rows have one stage, those of
  // the next row are ordered at once: what comes from memory is written long after what a thread
  // has asked for before is read.
  __device__ __forceinline__ void Take(Pack<T, W> (&first)[P], Pack<T, W> (&second)[P]) {
    // Two groups of copies a turn: all but the last ones of the turns under way.
    if (stages_ == 1) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<3>();
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      first[i] = LoadPlain<W>(Slot(0, i, taken_));
      second[i] = LoadPlain<W>(Slot(1, i, taken_));
    }
    if (stages_ == 1) Replace();
  }
  // If they have two, later, when the row's sums are there: with two whole rows under way all the
  // time some multiprocessors starve others (ffi/cuda/TUNING.md).
  __device__ __forceinline__ void ReplaceLater() {
    if (stages_ > 1) Replace();
  }
  // Until the same row's packs of the third array are there.
  __device__ __forceinline__ void WaitForThird() const {
    if (stages_ == 1) {
      WaitForCopies<1>();  // but for the next row's first two arrays
    } else {
      WaitForCopies<2>();  // but for all of the next row's, if ReplaceLater comes after this
    }
  }
  // Pack i of them.
  __device__ __forceinline__ Pack<T, W> Third(int i) const {
    return LoadPlain<W>(Slot(2, i, taken_));
  }
  // When they are done with, or there are none: orders those of a later row.
  __device__ __forceinline__ void EndTurn(bool has_third) {
    if (has_third) {
      SyncSlots();
      OrderThird();
    }
    CommitCopies();  // groups are counted
    if constexpr (kFramed) taken_ += static_cast<unsigned>(step_);
    stage_ = last_stage_ - stage_;
  }

 private:
  // Framed, a row's slots may overlap those of the row before of neighbouring lanes.
  __device__ __forceinline__ static void SyncSlots() {
    if constexpr (kFramed) __syncwarp();
  }
  __device__ __forceinline__ void Replace() {
    SyncSlots();
    Order();
  }
  // Where in a line element `element` is.
  __device__ __forceinline__ static unsigned InLine(std::int64_t element) {
    return static_cast<unsigned>(element) * sizeof(T) & (kLineBytes - kVecBytes);
  }
  // A warp's slots are one behind the other, array by array.
  __device__ __forceinline__ T* Slot(int array, int i, unsigned turn) const {
    return reinterpret_cast<T*>(own_ + stage_ + (kFramed ? InLine(turn) : 0) +
                                (array * P + i) * (kWarp * kRingPackBytes));
  }

  __device__ __forceinline__ void Order() {
    if (left_ > 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Copy(0, i, ordered_);
        Copy(1, i, ordered_);
      }
    }
    --left_;
    next_[0] += step_, next_[1] += step_;
    if constexpr (kFramed) ordered_ += static_cast<unsigned>(step_);
    CommitCopies();
  }
  __device__ __forceinline__ void OrderThird() {
    if (left_ >= 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) Copy(2, i, ordered_ - static_cast<unsigned>(step_));
    }
    next_[2] += step_;
  }
  __device__ __forceinline__ void Copy(int a, int i, unsigned turn) const {
    if (!place_.Counts(i) || place_.Lacks(i)) return;
    const T* const from = place_.InRow(next_[a], i);
    T* const to = Slot(a, i, turn);
    // Beyond an array's end, nothing may be read.
    const T* const end = arrays_[a] + elements_;
    if (!kFramed || end - from >= W) {
      CopyAsync(to, from);
    } else {
#pragma unroll 1
      for (int j = 0; j < static_cast<int>(end - from); ++j) to[j] = from[j];
    }
  }

  const RowPlace& place_;
  const T* const arrays_[3];
  const int stages_, last_stage_;  // one or two; where the last one is
  unsigned char* const own_;
  const std::int64_t elements_;
  const T* next_[3];  // where the next turn's rows start
  std::int64_t step_;
  unsigned ordered_ = 0, taken_ = 0;  // framed: where turns' rows start; only the last bits matter
  int left_, stage_ = 0;
};

// Whether a row is as most are. The saved mean is no more than a few times the deviation, so that
// the mean's rounding does not matter. Epsilon is not nearly all of the deviation. Products of rstd,
// its square and a dy of 2^-100 to 2^100 are far from where floats end. A usual row's mean is taken
// as it is, whether it is the row's own or not.
template <typename A>
__device__ __forceinline__ bool UsualRow(A mean, A rstd, A epsilon) {
  // Of variance + epsilon, the variance; and the square of the mean.
  const A part = A{1} - epsilon * rstd * rstd, ratio = mean * rstd;
  return part >= A{0x1p-8} && ratio * ratio <= A{16} * part && rstd > A{0x1p-10} &&
         rstd < A{0x1p10};
}

// The statistics of a unit's rows: mean, if kMean, and 1 / deviation. The lanes of a row load those
// of as many turns, that many turns ahead. If all loaded the next turn's, the compiler would await
// that within this turn, to have in a uniform register what all have: 8 % of the time.
template <typename A, bool kMean>
class RowStats {
 public:
  // epsilon: in rstd; negative: not known. careful: no row is to be called usual.
  __device__ RowStats(int lanes, const A* mean, const A* rstd, A epsilon, bool careful)
      : mask_(KeptOfWarp(min(lanes, kWarp) - 1)),
        first_(Kept(static_cast<int>(threadIdx.x % kWarp) & ~mask_)),
        mean_(mean),
        rstd_(rstd),
        epsilon_(epsilon),
        careful_(careful || epsilon < 0) {}

  // The thread's rows: `row`, and so on every `step`, `own` in all.
  __device__ __forceinline__ void Start(std::int64_t row, std::int64_t step, int own) {
    const int lane = static_cast<int>(threadIdx.x) & mask_;
    row_ = row + lane * step, step_ = step * (mask_ + 1), left_ = own - lane;
    Load();
  }
  // All of the warp call it, turn by turn from 0 on. Returns whether the row is as most are.
  __device__ __forceinline__ bool Get(int turn, A& mean, A& rstd) {
    const int of = turn & mask_, from = first_ + of;
    if (of == 0) {
      now_[0] = next_[0], now_[1] = next_[1];
      usual_ = __ballot_sync(0xffffffffu, !careful_ && UsualRow(now_[0], now_[1], epsilon_));
      Load();
    }
    if constexpr (kMean) mean = __shfl_sync(0xffffffffu, now_[0], from);
    rstd = __shfl_sync(0xffffffffu, now_[1], from);
    return usual_ >> from & 1;
  }

 private:
  __device__ __forceinline__ void Load() {
    if (left_ > 0) {
      if constexpr (kMean) next_[0] = __ldg(mean_ + row_);
      next_[1] = __ldg(rstd_ + row_);
    }
    left_ -= mask_ + 1;
    row_ += step_;
  }

  const int mask_, first_;  // a row's lanes less one; the first of the thread's row
  const A *const mean_, *const rstd_;
  const A epsilon_;
  const bool careful_;
  std::int64_t row_, step_;
  int left_;
  A now_[2] = {}, next_[2] = {};
  unsigned usual_ = 0;  // lane by lane, of the rows of now_
};

}  // namespace
}  // namespace gradops
