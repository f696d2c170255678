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
// none waits for others (framed: for others than its warp's), and what is read is replaced at once.
// A warp's packs should start as far into a line of 128 bytes as in memory (CopyAsync): framed,
// they do; else, as the block's first rows do, which is right for all if a unit's rows are whole
// lines apart: of 1000 elements 8 units times 132 blocks are, of 5000, by clusters, every second or
// fourth.
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
        pack_bytes_(plan.threads() * kRingPackBytes),
        stages_(plan.stages),
        stage_bytes_(plan.ring_bytes / plan.stages),
        own_(shared + threadIdx.x / kWarp * (kWarp * kRingPackBytes) +
             threadIdx.x % kWarp * kVecBytes + (kFramed ? 0 : InLine(first_turn))),
        elements_(elements) {}

  // The thread's first row starts at element `first`, the next one `step` further, and so on: `own`
  // of them. turn: where the first turn's rows start, the same for the warp. Orders the first ones.
  __device__ __forceinline__ void Start(std::int64_t first, std::int64_t turn, std::int64_t step,
                                        int own) {
    next_ = first, step_ = step, left_ = own;
    if constexpr (kFramed) ordered_ = static_cast<unsigned>(turn);
    stage_ = 0;
#pragma unroll 1
    for (int s = 0; s < stages_; ++s) {
      Order();
      EndTurn();
    }
    if constexpr (kFramed) taken_ = static_cast<unsigned>(turn);
  }

  // The next row's packs of the first two arrays, in whose place those of a later row are ordered:
  // what comes from memory is written long after what a thread has asked for before is read.
  __device__ __forceinline__ void Take(Pack<T, W> (&first)[P], Pack<T, W> (&second)[P]) {
    Wait();
#pragma unroll
    for (int i = 0; i < P; ++i) {
      first[i] = LoadPlain<W>(Slot(0, i, taken_));
      second[i] = LoadPlain<W>(Slot(1, i, taken_));
    }
    SyncSlots();
    Order();
  }
  // After Take: until the same row's packs of the third array are there; pack i of them; and when
  // they are done with, those of a later row.
  __device__ __forceinline__ void WaitForThird() const { Wait(); }
  __device__ __forceinline__ Pack<T, W> Third(int i) const {
    return LoadPlain<W>(Slot(2, i, taken_));
  }
  __device__ __forceinline__ void EndTurn() {
    if (arrays_[2] != nullptr) SyncSlots();
    OrderThird();
    if constexpr (kFramed) taken_ += static_cast<unsigned>(step_);
    if (++stage_ == stages_) stage_ = 0;
  }

 private:
  // Framed, a row's slots may overlap those of the row before of neighbouring lanes.
  __device__ __forceinline__ static void SyncSlots() {
    if constexpr (kFramed) __syncwarp();
  }
  // Where in a line element `element` is.
  __device__ __forceinline__ static unsigned InLine(std::int64_t element) {
    return static_cast<unsigned>(element) * sizeof(T) & (kLineBytes - kVecBytes);
  }
  __device__ __forceinline__ T* Slot(int array, int i, unsigned turn) const {
    return reinterpret_cast<T*>(own_ + (kFramed ? InLine(turn) : 0) + stage_ * stage_bytes_ +
                                (array * P + i) * pack_bytes_);
  }

  __device__ __forceinline__ void Order() {
    if (left_ > 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Copy(arrays_[0], next_, ordered_, 0, i);
        Copy(arrays_[1], next_, ordered_, 1, i);
      }
    }
    --left_;
    next_ += step_;
    if constexpr (kFramed) ordered_ += static_cast<unsigned>(step_);
    CommitCopies();
  }
  __device__ __forceinline__ void OrderThird() {
    if (arrays_[2] != nullptr && left_ >= 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Copy(arrays_[2], next_ - step_, ordered_ - static_cast<unsigned>(step_), 2, i);
      }
    }
    CommitCopies();  // groups are counted
  }
  __device__ __forceinline__ void Copy(const T* array, std::int64_t row, unsigned turn, int a,
                                       int i) const {
    if (!place_.Counts(i) || place_.Lacks(i)) return;
    const std::int64_t from = row + place_.Begin(i);
    T* const to = Slot(a, i, turn);
    // Beyond an array's end, nothing may be read.
    if (!kFramed || elements_ - from >= W) {
      CopyAsync(to, array + from);
    } else {
#pragma unroll 1
      for (int j = 0; j < static_cast<int>(elements_ - from); ++j) to[j] = array[from + j];
    }
  }

  // Two groups of copies a turn: all but the last ones of the turns under way.
  __device__ __forceinline__ void Wait() const {
    if (stages_ == 1) {
      WaitForCopies<1>();
    } else if (stages_ == 2) {
      WaitForCopies<3>();
    } else {
      WaitForCopies<5>();
    }
  }

  const RowPlace& place_;
  const T* const arrays_[3];
  const int pack_bytes_, stages_, stage_bytes_;
  unsigned char* const own_;
  const std::int64_t elements_;
  std::int64_t next_, step_;
  unsigned ordered_ = 0, taken_ = 0;  // framed: where turns' rows start; only the last bits matter
  int left_, stage_ = 0;
};

// The statistics of a unit's rows: mean, if it is not null, and 1 / deviation. The lanes of a row
// load those of as many turns, that many turns ahead. If all loaded the next turn's, the compiler
// would await that within this turn, to have in a uniform register what all have: 8 % of the time.
template <typename A>
class RowStats {
 public:
  __device__ RowStats(int lanes, const A* mean, const A* rstd)
      : span_(min(lanes, kWarp)), mean_(mean), rstd_(rstd) {}

  // The thread's rows: `row`, and so on every `step`, `own` in all.
  __device__ __forceinline__ void Start(std::int64_t row, std::int64_t step, int own) {
    const int lane = static_cast<int>(threadIdx.x) & (span_ - 1);
    row_ = row + lane * step, step_ = step * span_, left_ = own - lane;
    Load();
  }
  // All of the warp call it, turn by turn from 0 on.
  __device__ __forceinline__ void Get(int turn, A& mean, A& rstd) {
    const int of = turn & (span_ - 1);
    if (of == 0) {
      now_[0] = next_[0], now_[1] = next_[1];
      Load();
    }
    if (mean_ != nullptr) mean = __shfl_sync(0xffffffffu, now_[0], of, span_);
    rstd = __shfl_sync(0xffffffffu, now_[1], of, span_);
  }

 private:
  __device__ __forceinline__ void Load() {
    if (left_ > 0) {
      if (mean_ != nullptr) next_[0] = __ldg(mean_ + row_);
      next_[1] = __ldg(rstd_ + row_);
    }
    left_ -= span_;
    row_ += step_;
  }

  const int span_;
  const A *const mean_, *const rstd_;
  std::int64_t row_, step_;
  int left_;
  A now_[2] = {}, next_[2] = {};
};

}  // namespace
}  // namespace gradops
