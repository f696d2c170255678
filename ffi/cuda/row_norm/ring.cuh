// How layer norm's backward kernel gets its rows. Rows are dealt out to units of threads. Each
// thread copies its own part of the next rows to shared memory.
#pragma once

#include <cstdint>
#include <numeric>

#include "cuda/row_norm/backward_policy.h"
#include "cuda/row_norm/rows.cuh"

namespace gradops {
namespace {

// How a group's rows are dealt out to `slots` blocks (or clusters), turn by turn and, if framed, in
// `passes` passes: see policy.h. The host does the divisions: on a device they compile
// to calls, which cost spills.
struct Deal {
  std::int64_t slots;
  int passes;
  int rounds, extra;  // Each unit has `rounds` turns in a pass. In pass p, the group's first
                      // extra - p * units units have one more.

  Deal(const BackwardPlan& plan, std::int64_t rows, std::int64_t slots) : slots(slots) {
    const std::int64_t turns = (rows + plan.unit_rows() - 1) / plan.unit_rows();
    passes =
        static_cast<int>(plan.classes / std::gcd<std::int64_t>(plan.classes, slots * plan.units));
    rounds = static_cast<int>(turns / (slots * plan.units * passes));
    extra = static_cast<int>(turns % (slots * plan.units * passes));
  }

  // The group of an item; there are groups * slots. With more items than blocks, slots is 1.
  __device__ std::int64_t Group(std::int64_t item) const {
    return slots == 1 ? item : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(slots);
  }
};

// The rows of a group that a unit works on in a pass. Its first turn begins at row `first`, each
// later turn `step` rows further.
struct Turns {
  std::int64_t first, step;
  int most;  // The most turns of a unit of the block.
  int own;   // Turns in which the thread has a row.

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

// A thread's packs of its unit's rows, turn by turn, of dy, x, and dsum or null. They are copied to
// shared memory from `stages` turns before. Each thread copies and reads its own packs, so it waits
// for no others (framed: for its warp). A row that has been read is replaced, at once or later.
// A warp's packs should have an equal offset from a 128-byte line in shared and in global memory
// (CopyAsync). Framed, they do. Otherwise the offset is right for the unit's first rows. It is
// right for all rows if these are whole lines apart. With 1000 elements, 8 units and 132 blocks
// they are. With 5000 elements and clusters, every second or fourth row has the right offset.
template <typename T, int P, Division kDivision>
class RowRing {
  static constexpr int W = kVec<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;
  using RowPlace = Place<T, P, kDivision, false>;

 public:
  // shared: the block's. elements: of an array. first_turn: `turn` of the first call of Start.
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
    // Packs that are never copied are 0, so that they add nothing to a row's sums.
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

  // The first turn's rows start at element `turn` (equal for the warp), and each next turn's rows
  // `step` further. The thread has rows in `own` turns. Orders the first ones.
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

  // Reads the next row's packs of the first two arrays. With one stage, the row after is ordered
  // into their place at once. That is safe: bytes from global memory are written long after the
  // thread's earlier reads are done.
  __device__ __forceinline__ void Take(Pack<T, W> (&first)[P], Pack<T, W> (&second)[P]) {
    // Each turn has two groups of copies. This waits for the first group of the oldest turn.
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
  // With two stages they are ordered later, when the row's sums are there. Two whole rows under way
  // all the time would make some multiprocessors starve others (ffi/cuda/TUNING.md).
  __device__ __forceinline__ void ReplaceLater() {
    if (stages_ > 1) Replace();
  }
  // Waits for the row's packs of the third array.
  __device__ __forceinline__ void WaitForThird() const {
    if (stages_ == 1) {
      WaitForCopies<1>();  // the next row's first two arrays may be under way
    } else {
      WaitForCopies<2>();  // all of the next row may be, if ReplaceLater comes after this
    }
  }
  // Pack i of the third array.
  __device__ __forceinline__ Pack<T, W> Third(int i) const {
    return LoadPlain<W>(Slot(2, i, taken_));
  }
  // Ends a turn, when the third array's packs are read or absent. Orders a later row's.
  __device__ __forceinline__ void EndTurn(bool has_third) {
    if (has_third) {
      SyncSlots();
      OrderThird();
    }
    CommitCopies();  // even without copies: groups are counted
    if constexpr (kFramed) taken_ += static_cast<unsigned>(step_);
    stage_ = last_stage_ - stage_;
  }

 private:
  // Framed: a row's slots may overlap neighbouring lanes' slots of the row before.
  __device__ __forceinline__ static void SyncSlots() {
    if constexpr (kFramed) __syncwarp();
  }
  __device__ __forceinline__ void Replace() {
    SyncSlots();
    Order();
  }
  // The offset of element `element` from its line, in bytes.
  __device__ __forceinline__ static unsigned InLine(std::int64_t element) {
    return static_cast<unsigned>(element) * sizeof(T) & (kLineBytes - kVecBytes);
  }
  // A warp's slots follow each other, array by array.
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
    // Nothing beyond an array's end may be read.
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
  const int stages_, last_stage_;  // one or two; the byte offset of the last one
  unsigned char* const own_;
  const std::int64_t elements_;
  const T* next_[3];  // Where the next turn's rows start.
  std::int64_t step_;
  unsigned ordered_ = 0, taken_ = 0;  // Framed: where turns' rows start. Only the last bits matter.
  int left_, stage_ = 0;
};

// Whether a row is usual, as most rows are. The saved mean is at most a few deviations, so that its
// rounding does not matter. Epsilon is not nearly all of the squared deviation. Products of rstd,
// its square and a dy of 2^-100 to 2^100 are far from the limits of floats. A usual row's mean is
// taken as given, whether it is the row's own or not.
template <typename A>
__device__ __forceinline__ bool UsualRow(A mean, A rstd, A epsilon) {
  // As fractions of variance + epsilon: part is the variance, ratio^2 the square of the mean.
  const A part = A{1} - epsilon * rstd * rstd, ratio = mean * rstd;
  return part >= A{0x1p-8} && ratio * ratio <= A{16} * part && rstd > A{0x1p-10} &&
         rstd < A{0x1p10};
}

// The statistics of a unit's rows: mean, if kMean, and 1 / deviation. The lanes of a row load them
// for different turns. If all lanes loaded the next turn's, the compiler would move them to a
// uniform register. It would wait for the loads within this turn: 8 % of the time.
template <typename A, bool kMean>
class RowStats {
 public:
  // epsilon: in rstd; negative: not known. careful: no row counts as usual.
  __device__ RowStats(int lanes, const A* mean, const A* rstd, A epsilon, bool careful)
      : mask_(KeptOfWarp(min(lanes, kWarp) - 1)),
        first_(Kept(static_cast<int>(threadIdx.x % kWarp) & ~mask_)),
        mean_(mean),
        rstd_(rstd),
        epsilon_(epsilon),
        careful_(careful || epsilon < 0) {}

  // The thread has `own` rows: `row`, row + step and so on.
  __device__ __forceinline__ void Start(std::int64_t row, std::int64_t step, int own) {
    const int lane = static_cast<int>(threadIdx.x) & mask_;
    row_ = row + lane * step, step_ = step * (mask_ + 1), left_ = own - lane;
    Load();
  }
  // All lanes call it, turn by turn from 0 on. Returns whether the row is usual.
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

  const int mask_, first_;  // a row's lanes minus 1; the first lane of the thread's row
  const A *const mean_, *const rstd_;
  const A epsilon_;
  const bool careful_;
  std::int64_t row_, step_;
  int left_;
  A now_[2] = {}, next_[2] = {};
  unsigned usual_ = 0;  // bit by lane: whether the row in now_ is usual
};

}  // namespace
}  // namespace gradops
