// How the kernels for many rows get their rows. Each thread copies its own part of the next rows to
// shared memory, and reads only that part.
//
// A warp's vectors should have an equal offset from a 128-byte line in shared and in global memory
// (CopyAsync). Masked, they do.
#pragma once

#include <cstdint>

#include "cuda/row_norm/place.cuh"

namespace gradops {
namespace {

// --- Backward ------------------------------------------------------------------------------------

// The group of an item. Each group has `per_group` items. With more items than blocks, it is 1.
__device__ __forceinline__ std::int64_t GroupOf(std::int64_t item, std::int64_t per_group) {
  return per_group == 1 ? item
                        : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(per_group);
}

// The rows of an item that a team works on in a sweep. Its first iteration begins at row `first` of
// all groups' rows, each later iteration row_stride rows further.
struct TeamRows {
  std::int64_t first, row_stride;
  int most;  // The most iterations of a team of the block.
  int own;   // Iterations in which the thread has a row.

  __device__ TeamRows(const BackwardSchedule& schedule, const BackwardSplit& split,
                      std::int64_t item, int team, int row, int sweep, std::int64_t rows) {
    const std::int64_t group = GroupOf(item, schedule.clusters_per_group);
    const std::int64_t cluster = item - group * schedule.clusters_per_group;
    const std::int64_t teams = schedule.clusters_per_group * split.teams;
    const std::int64_t number = sweep * teams + team * schedule.clusters_per_group + cluster;
    first = number * split.team_rows();
    row_stride = schedule.sweeps * teams * split.team_rows();
    most = schedule.iterations + (sweep * teams + cluster < schedule.extra);
    own = schedule.iterations + (number < schedule.extra);
    // A team's last iteration may lack rows.
    own -= own > 0 && first + (own - 1) * row_stride + row >= rows;
    first += group * rows;
  }
};

// A thread's vectors of its team's rows, of dy, x, and dsum or null. They are copied to shared
// memory `stages` iterations in advance. Each thread waits for no others (masked: for its warp).
// When a row has been read, a later row is copied in its place, at once or later.
//
// If rows are not masked, the offset from a line is right for the team's first rows. It is right
// for all rows if these are whole lines apart. With 1000 elements, 8 teams and 132 blocks they are.
// With 5000 elements and clusters, every second or fourth row has the right offset.
template <typename T, int P, Layout kLayout>
class RowRing {
  static constexpr int W = kVec<T>;
  static constexpr bool kMasked = kLayout == Layout::kMasked;
  using RowPlace = Place<T, P, kLayout, false>;

 public:
  // shared: the block's. elements: of an array. first_row: `first` of the first call of Start.
  __device__ RowRing(const BackwardSplit& split, const RowPlace& place, unsigned char* shared,
                     const T* const (&arrays)[3], std::int64_t elements, std::int64_t first_row)
      : place_(place),
        arrays_{arrays[0], arrays[1], arrays[2]},
        stages_(split.stages),
        last_stage_(split.ring_bytes / split.stages * (split.stages - 1)),
        own_(shared +
             threadIdx.x / kWarp * (split.ring_bytes / split.stages / (split.threads() / kWarp)) +
             threadIdx.x % kWarp * kVecBytes + (kMasked ? 0 : OffsetInLine(first_row))),
        elements_(elements) {
    // Vectors that are never copied are 0, so that they add nothing to a row's sums.
    for (int s = 0; s < stages_; ++s) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (place.Owns(i)) continue;
        StoreVector(Address(0, i, 0), Vector<T, W>{});
        StoreVector(Address(1, i, 0), Vector<T, W>{});
      }
      stage_ = last_stage_ - stage_;
    }
  }

  // The first iteration's rows start at element `first` (equal for the warp), and each next
  // iteration's rows `stride` elements further. The thread has rows in `own` iterations. Starts the
  // copies of the first ones.
  __device__ __forceinline__ void Start(std::int64_t first, std::int64_t stride, int own) {
#pragma unroll
    for (int a = 0; a < 3; ++a) next_[a] = arrays_[a] + first;
    stride_ = stride, left_ = own;
    if constexpr (kMasked) copied_ = static_cast<unsigned>(first);
    stage_ = 0;
#pragma unroll 1
    for (int s = 0; s < stages_; ++s) {
      StartCopy();
      EndIteration(arrays_[2] != nullptr);
    }
    if constexpr (kMasked) loaded_ = static_cast<unsigned>(first);
  }

  // Reads the next row's vectors of the first two arrays. With one stage, a later row is copied
  // into their place at once. That is safe: bytes from global memory are written long after the
  // thread's earlier reads are done.
  __device__ __forceinline__ void Load(Vector<T, W> (&first)[P], Vector<T, W> (&second)[P]) {
    // Each iteration has two groups of copies. This waits for the first group of the oldest
    // iteration.
    if (stages_ == 1) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<3>();
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      first[i] = LoadPlain<W>(Address(0, i, loaded_));
      second[i] = LoadPlain<W>(Address(1, i, loaded_));
    }
    if (stages_ == 1) Replace();
  }
  // With two stages the copy starts later, when the row's sums are there. Two whole rows in flight
  // all the time would make some multiprocessors starve others (ffi/cuda/TUNING.md).
  __device__ __forceinline__ void ReplaceLater() {
    if (stages_ > 1) Replace();
  }
  // Waits for the row's vectors of the third array.
  __device__ __forceinline__ void WaitForThird() const {
    if (stages_ == 1) {
      WaitForCopies<1>();  // the next row's first two arrays may be in flight
    } else {
      WaitForCopies<2>();  // all of the next row may be, if ReplaceLater comes later
    }
  }
  // Vector i of the third array.
  __device__ __forceinline__ Vector<T, W> Third(int i) const {
    return LoadPlain<W>(Address(2, i, loaded_));
  }
  // Ends an iteration, when the third array's vectors are read or absent. Copies a later row's.
  __device__ __forceinline__ void EndIteration(bool has_third) {
    if (has_third) {
      SyncWarp();
      StartThirdCopy();
    }
    CommitCopies();  // even without copies: groups are counted
    if constexpr (kMasked) loaded_ += static_cast<unsigned>(stride_);
    stage_ = last_stage_ - stage_;
  }

 private:
  // Masked: a thread's room for a row may overlap a neighbouring thread's room for the row before.
  __device__ __forceinline__ static void SyncWarp() {
    if constexpr (kMasked) __syncwarp();
  }
  __device__ __forceinline__ void Replace() {
    SyncWarp();
    StartCopy();
  }
  // The offset of element `element` from its line, in bytes.
  __device__ __forceinline__ static unsigned OffsetInLine(std::int64_t element) {
    return static_cast<unsigned>(element) * sizeof(T) & (kLineBytes - kVecBytes);
  }
  // Where vector i of an array is in shared memory, array by array. first: the rows' first element.
  __device__ __forceinline__ T* Address(int array, int i, unsigned first) const {
    return reinterpret_cast<T*>(own_ + stage_ + (kMasked ? OffsetInLine(first) : 0) +
                                (array * P + i) * (kWarp * kRingVectorBytes));
  }

  __device__ __forceinline__ void StartCopy() {
    if (left_ > 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Copy(0, i, copied_);
        Copy(1, i, copied_);
      }
    }
    --left_;
    next_[0] += stride_, next_[1] += stride_;
    if constexpr (kMasked) copied_ += static_cast<unsigned>(stride_);
    CommitCopies();
  }
  __device__ __forceinline__ void StartThirdCopy() {
    if (left_ >= 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) Copy(2, i, copied_ - static_cast<unsigned>(stride_));
    }
    next_[2] += stride_;
  }
  __device__ __forceinline__ void Copy(int a, int i, unsigned first) const {
    if (!place_.Owns(i) || place_.Lacks(i)) return;
    const T* const from = place_.InRow(next_[a], i);
    T* const to = Address(a, i, first);
    if (!kMasked) return CopyAsync(to, from);
    const std::int64_t left = arrays_[a] + elements_ - from;
    CopyWithin<T>(to, from,
                  static_cast<int>(min(left, std::int64_t{W})) * static_cast<int>(sizeof(T)));
  }

  const RowPlace& place_;
  const T* const arrays_[3];
  const int stages_, last_stage_;  // one or two; the byte offset of the last one
  unsigned char* const own_;
  const std::int64_t elements_;
  const T* next_[3];  // Where the next iteration's rows start.
  std::int64_t stride_;
  // Masked: the first elements of the rows that are copied and loaded next. Only the last bits
  // matter.
  unsigned copied_ = 0, loaded_ = 0;
  int left_, stage_ = 0;
};

// Whether a row is well conditioned, as most rows are. The saved mean is at most a few deviations,
// so its rounding does not matter. Epsilon is not nearly all of the squared deviation. Products of
// rstd, its square and a dy of 2^-100 to 2^100 are far from the limits of floats. Such a row's mean
// is taken as given, whether it is the row's own or not.
template <typename A>
__device__ __forceinline__ bool WellConditioned(A mean, A rstd, A epsilon) {
  // As fractions of variance + epsilon: part is the variance, ratio^2 the square of the mean.
  const A part = A{1} - epsilon * rstd * rstd, ratio = mean * rstd;
  return part >= A{0x1p-8} && ratio * ratio <= A{16} * part && rstd > A{0x1p-10} &&
         rstd < A{0x1p10};
}

// The statistics of a team's rows: mean, if kMean, and 1 / deviation. The threads of a row load
// them for different iterations. If all threads loaded the next iteration's, the compiler would
// move them to a uniform register. It would wait for the loads within this iteration: 8 % of the
// time.
template <typename A, bool kMean>
class RowStats {
 public:
  // epsilon: in rstd; negative: not known. careful: no row counts as well conditioned.
  __device__ RowStats(int row_threads, const A* mean, const A* rstd, A epsilon, bool careful)
      : mask_(KeptOfWarp(min(row_threads, kWarp) - 1)),
        first_(Kept(static_cast<int>(threadIdx.x % kWarp) & ~mask_)),
        mean_(mean),
        rstd_(rstd),
        epsilon_(epsilon),
        careful_(careful || epsilon < 0) {}

  // The thread has `own` rows: `row`, row + stride and so on.
  __device__ __forceinline__ void Start(std::int64_t row, std::int64_t stride, int own) {
    const int lane = static_cast<int>(threadIdx.x) & mask_;
    row_ = row + lane * stride, stride_ = stride * (mask_ + 1), left_ = own - lane;
    Load();
  }
  // All lanes call it, iteration by iteration from 0 on. Returns whether the row is well
  // conditioned.
  __device__ __forceinline__ bool Get(int iteration, A& mean, A& rstd) {
    const int of = iteration & mask_, from = first_ + of;
    if (of == 0) {
      now_[0] = next_[0], now_[1] = next_[1];
      well_conditioned_ =
          __ballot_sync(0xffffffffu, !careful_ && WellConditioned(now_[0], now_[1], epsilon_));
      Load();
    }
    if constexpr (kMean) mean = __shfl_sync(0xffffffffu, now_[0], from);
    rstd = __shfl_sync(0xffffffffu, now_[1], from);
    return well_conditioned_ >> from & 1;
  }

 private:
  __device__ __forceinline__ void Load() {
    if (left_ > 0) {
      if constexpr (kMean) next_[0] = __ldg(mean_ + row_);
      next_[1] = __ldg(rstd_ + row_);
    }
    left_ -= mask_ + 1;
    row_ += stride_;
  }

  const int mask_,
      first_;  // a row's threads in a warp, minus 1; the first lane of the thread's row
  const A *const mean_, *const rstd_;
  const A epsilon_;
  const bool careful_;
  std::int64_t row_, stride_;
  int left_;
  A now_[2] = {}, next_[2] = {};
  unsigned well_conditioned_ = 0;  // bit by lane: whether the row in now_ is well conditioned
};

// --- Forward -------------------------------------------------------------------------------------

// A thread's vectors of its rows, of x and of a residual if there is one. The class refers to the
// kernel's parameters and keeps no copies: registers are short.
template <typename T, int P, bool kResidual>
class ForwardRing {
  static constexpr int W = kVec<T>;
  using RowPlace = Place<T, P, Layout::kMasked, true>;

 public:
  // shared: the warp's part.
  __device__ ForwardRing(const RowNormFwdArgs& args, const ForwardSplit& split,
                         const RowPlace& place, const unsigned char* shared)
      : args_(args),
        split_(split),
        place_(place),
        own_(SharedAddress(shared) + threadIdx.x % kWarp * kVecBytes) {}

  // Starts the copy of a row for an iteration, or for one `stages` iterations later. The thread's
  // vectors of the row begin `at` bytes into the arrays.
  __device__ __forceinline__ void StartCopy(std::int64_t at, int iteration) const {
    const std::uint32_t to = Room(at, iteration);
    Copy(args_.x, at, to);
    if (kResidual && args_.residual != nullptr) Copy(args_.residual, at, to + P * kWarpBytes);
  }
  // Waits for the row whose copy started `stages` commits before.
  __device__ __forceinline__ void Wait() const {
    if (split_.stages == 1) {
      WaitForCopies<0>();
    } else {
      WaitForCopies<1>();
    }
  }
  // Replaces vector i of x.
  __device__ __forceinline__ void Put(std::int64_t at, int iteration, int i,
                                      const Vector<T, W>& vector) const {
    const auto& words = reinterpret_cast<const uint4&>(vector);
    asm volatile(
        "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(Room(at, iteration) + i * kWarpBytes),
        "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
        : "memory");
  }
  // Vector i of x; vector i of the residual.
  __device__ __forceinline__ Vector<T, W> X(std::int64_t at, int iteration, int i) const {
    return Load(Room(at, iteration) + i * kWarpBytes);
  }
  __device__ __forceinline__ Vector<T, W> Residual(std::int64_t at, int iteration, int i) const {
    return Load(Room(at, iteration) + (P + i) * kWarpBytes);
  }

 private:
  static constexpr int kWarpBytes = kWarp * kVecBytes;
  __device__ __forceinline__ std::uint32_t Room(std::int64_t at, int iteration) const {
    const unsigned first = static_cast<unsigned>(at) - threadIdx.x % kWarp * kVecBytes;
    return own_ + (split_.stages == 1 ? 0 : (iteration & 1) * split_.stage_bytes) +
           (first & (kLineBytes - kVecBytes));
  }
  __device__ __forceinline__ static Vector<T, W> Load(std::uint32_t address) {
    Vector<T, W> vector;
    uint4& words = AsWords(vector);
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return vector;
  }
  __device__ __forceinline__ void Copy(const void* array, std::int64_t at, std::uint32_t to) const {
    const char* const from = static_cast<const char*>(array) + at;
    const auto begin = [&](int i) { return place_.Begin(i) * static_cast<int>(sizeof(T)); };
    if (place_.AllWhole()) {
#pragma unroll
      for (int i = 0; i < P; ++i) CopyAsync(to + i * kWarpBytes, from + begin(i));
      return;
    }
    // Nothing beyond the array's end may be read.
    const auto [groups, rows, features] = args_.shape;
    const std::int64_t left = groups * rows * features * static_cast<int>(sizeof(T)) - at;
    if (left >= begin(P)) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        CopyAsyncIf(!place_.Lacks(i), to + i * kWarpBytes, from + begin(i));
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < P; ++i) {
      if (!place_.Lacks(i))
        CopyWithin<T>(to + i * kWarpBytes, from + begin(i), static_cast<int>(left) - begin(i));
    }
  }

  const RowNormFwdArgs& args_;
  const ForwardSplit& split_;
  const RowPlace& place_;
  const std::uint32_t own_;
};

}  // namespace
}  // namespace gradops
