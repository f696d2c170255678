// A thread's place in its row, in layer norm's kernels, and its columns of scale and bias.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/plan.h"
#include "ops/row_norm.h"

namespace gradops {
namespace {

// Copies a vector to shared memory, or only `left` bytes if the array ends before the vector does:
// nothing beyond an array may be read. These are copied one by one, because memcheck takes a
// cp.async of fewer bytes for one of 16.
template <typename T>
__device__ __forceinline__ void CopyWithin(std::uint32_t shared, const void* global, int left) {
  if (left >= kVecBytes) return CopyAsync(shared, global);
#pragma unroll 1
  for (int j = 0; j < left / static_cast<int>(sizeof(T)); ++j) {
    static_cast<T*>(__cvta_shared_to_generic(shared))[j] = static_cast<const T*>(global)[j];
  }
}
template <typename T>
__device__ __forceinline__ void CopyWithin(void* shared, const void* global, int left) {
  CopyWithin<T>(SharedAddress(shared), global, left);
}

// A thread's place in its row. It owns P vectors of the row (README.md has pictures). If q threads
// own vectors, thread t owns vectors t + k * q with k < P. The row has at most P * q vectors.
//
// Full: the row has exactly P * q vectors. Partial: some threads lack their last vector. They
// repeat the row's last vector instead. Threads from q on repeat the vectors of thread q - 1.
// Repeated vectors must not be added to sums. Forward, threads repeat the work on them, because a
// branch costs all threads more. Backward, threads neither load nor store them. Their elements are
// 0.
//
// Masked: a warp has the next 32 * P vectors, from the last 16-byte boundary at or before the row.
// The row may have all, some or none of a vector's columns. Rows of equal misalignment have equal
// columns in a thread.
//
// `kForward`: a block has one row, or several narrow rows. Otherwise a block has teams.
template <typename T, int P, Layout kLayout, bool kForward>
class Place {
 public:
  static constexpr int W = kVec<T>, kVectors = P;
  static constexpr bool kMasked = kLayout == Layout::kMasked;

  int team, in_team;    // Team of the block; thread of the team.
  int row_thread, row;  // Thread of the row; row of the team.
  int first_column;     // First column of the block, from the 16-byte boundary on.
  int base;             // First column of the thread's vectors, from first_column on.
  bool owns;            // Whether the thread owns its vectors; and its last vector.
  bool owns_last;

  __device__ Place(int row_threads, int cluster, int block_columns, std::int64_t features)
      : block_columns_(block_columns), features_(features) {
    const unsigned thread = threadIdx.x;
    if constexpr (kForward) {
      team = row = row_offset_ = 0;
      in_team = static_cast<int>(thread);
      row_thread = row_threads <= kWarp ? in_team & (row_threads - 1) : in_team;
    } else {
      // The shuffle tells the compiler that a warp has one value. So loops over a team's rows are
      // uniform, their counters need no registers, and shuffles in them overlap.
      team = static_cast<int>(row_threads <= kWarp ? thread / kWarp
                                                   : thread / static_cast<unsigned>(row_threads));
      team = __shfl_sync(0xffffffffu, team, 0);
      in_team = static_cast<int>(thread) - team * max(row_threads, kWarp);
      row_thread = row_threads < kWarp ? in_team & (row_threads - 1) : in_team;
      row = row_threads < kWarp ? in_team >> Log2(row_threads) : 0;
      row_offset_ = row * static_cast<int>(features);
    }
    first_column = cluster > 1 ? ClusterRank() * block_columns : 0;
    if constexpr (kMasked) {
      owns = owns_last = true;
      stride_ = kWarp * W;
      base = warp_of_row() * (kWarp * P * W) + (row_thread & (kWarp - 1)) * W;
      SetMisalignment(0);
    } else {
      SetMisalignment(0);
      const int vectors = static_cast<int>(static_cast<unsigned>(high_) / W);
      owners_ = (vectors + P - 1) / P;
      // Backward: a thread's vectors are whole 128-byte lines apart (CopyAsync), if possible.
      const int in_lines = (owners_ + 7) & ~7;
      if (!kForward && in_lines <= row_threads && (P - 1) * in_lines <= vectors) owners_ = in_lines;
      const int owned = min(row_thread, owners_ - 1), last = owned + (P - 1) * owners_;
      owns = row_thread < owners_;
      owns_last = owns && (kLayout == Layout::kFull || last < vectors);
      stride_ = owners_ * W;
      base = owned * W;
      last_ = (min(last, vectors - 1) - owned) * W;
    }
  }

  // misalignment: the columns from the last 16-byte boundary to the row's start.
  __device__ void SetMisalignment(int misalignment) {
    low_ = misalignment - first_column;
    high_ = static_cast<int>(min(std::int64_t{block_columns_}, features_ + low_));
    misalignment_ = misalignment;
    if constexpr (kMasked) Refresh();
  }

  // Sets the misalignment of a row of an array.
  __device__ void SetRow(std::int64_t row) {
    SetMisalignment(static_cast<int>(static_cast<std::uint64_t>(row) *
                                     static_cast<std::uint64_t>(features_) % W));
  }

  // Called before each row. The compiler then does not keep values that depend on columns_.
  __device__ __forceinline__ void Forget() { asm volatile("" : "+r"(columns_)); }

  __device__ __forceinline__ int warp_of_row() const {
    return static_cast<int>(static_cast<unsigned>(row_thread) / kWarp);
  }
  __device__ int misalignment() const { return misalignment_; }
  // The block's columns, from first_column on: [max(0, low), high).
  __device__ int low() const { return low_; }
  __device__ int high() const { return high_; }
  // The number of columns of a warp, and of the block.
  __device__ int WarpColumns(int warp) const {
    if constexpr (kMasked) {
      constexpr int kColumns = kWarp * P * W;
      return max(0, min(high_, (warp + 1) * kColumns) - max(max(0, low_), warp * kColumns));
    } else {
      const int owners = min(kWarp, owners_ - warp * kWarp);
      const int vectors = static_cast<int>(static_cast<unsigned>(high_) / W);
      const int last = min(kWarp, vectors - (P - 1) * owners_ - warp * kWarp);
      return (max(0, owners) * (P - 1) + max(0, last)) * W;
    }
  }
  __device__ int Columns() const { return max(0, high_ - max(0, low_)); }

  // The beginning of vector i, from `base` on.
  __device__ __forceinline__ int Begin(int i) const {
    if constexpr (kLayout == Layout::kMasked) return i * kWarp * W;
    return kLayout == Layout::kPartial && i == P - 1 ? last_ : i * stride_;
  }

  // Vector i of the thread's row. first: the block's first column of the warp's first row. The warp
  // has one such address. A 32-bit offset is added to it.
  template <typename U>
  __device__ __forceinline__ U* InRow(U* first, int i) const {
    using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
    const auto offset = static_cast<std::uint32_t>(row_offset_ + base + Begin(i));
    return reinterpret_cast<U*>(reinterpret_cast<Byte*>(first) +
                                offset * static_cast<std::uint32_t>(sizeof(T)));
  }

  // Calls fn.operator()<kAll>(i) for each vector i that has columns of the warp's rows. kAll: all
  // rows of the warp have the whole vector.
  template <typename Fn>
  __device__ __forceinline__ void ForVectors(const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (Whole(i)) {
        fn.template operator()<true>(i);
      } else if (Any(i)) {
        fn.template operator()<false>(i);
      }
    }
  }
  // Whether all rows of the warp have the whole vector i; AllWhole: all vectors.
  __device__ __forceinline__ bool Whole(int i) const {
    return !kMasked || (whole_vectors_ >> i & 1) != 0;
  }
  // Whether any row of the warp has columns of vector i.
  __device__ __forceinline__ bool Any(int i) const { return (any_vectors_ >> i & 1) != 0; }
  __device__ __forceinline__ bool AllWhole() const {
    return !kMasked || whole_vectors_ == (1u << P) - 1;
  }
  // Owns: vector i is added to sums. Lacks: the row has no column of vector i. HasAll: the row has
  // all columns of vector i. Has: the row has column j of vector i.
  __device__ __forceinline__ bool Owns(int i) const {
    return kMasked || (i == P - 1 ? owns_last : owns);
  }
  __device__ __forceinline__ bool Lacks(int i) const {
    const int begin = base + Begin(i);
    return kMasked &&
           (kBits ? (columns_ >> i * W & kWholeVector) == 0 : begin >= high_ || begin + W <= low_);
  }
  __device__ __forceinline__ bool HasAll(int i) const {
    const int begin = base + Begin(i);
    return !kMasked || (kBits ? (columns_ >> i * W & kWholeVector) == kWholeVector
                              : begin >= low_ && begin + W <= high_);
  }
  __device__ __forceinline__ bool Has(int i, int j) const {
    const int column = base + Begin(i) + j;
    return !kMasked ||
           (kBits ? (columns_ >> (i * W + j) & 1) != 0 : column >= low_ && column < high_);
  }

  // Stores the row's columns of vector i at `p`. StoreSome: only if the row lacks some of them.
  __device__ __forceinline__ void Store(T* p, const Vector<T, W>& vector, int i) const {
    if (HasAll(i)) StoreVectorOnce(p, vector);
    StoreSome(p, vector, i);
  }
  __device__ __forceinline__ void StoreSome(T* p, const Vector<T, W>& vector, int i) const {
    if (!HasAll(i)) {
      const auto& words = reinterpret_cast<const std::uint32_t (&)[kVecBytes / 4]>(vector);
      for (int j = 0; j < W; ++j) {
        if (!Has(i, j)) continue;
        if constexpr (sizeof(T) == 2) {
          reinterpret_cast<Bits<T>*>(p)[j] = static_cast<std::uint16_t>(words[j / 2] >> j % 2 * 16);
        } else {
          p[j] = vector.v[j];
        }
      }
    }
  }

 private:
  // Whether bits say which of the thread's columns the row has: forward, which asks often. Backward
  // they cost registers, so code spills: bfloat16 layer norm of 4097 columns took 332 us, not 228.
  static constexpr bool kBits = kMasked && kForward;
  static constexpr unsigned kWholeVector = (1u << W) - 1;
  static_assert(!kBits || P * W <= 32);

  __device__ void Refresh() {
    whole_vectors_ = any_vectors_ = columns_ = 0;
#pragma unroll
    for (int i = 0; kBits && i < P; ++i) {
      const int begin = base + Begin(i);
      // Bits of the vector's columns from low to high.
      const unsigned before = (1u << min(W, max(0, low_ - begin))) - 1;
      const unsigned up_to = (1u << min(W, max(0, high_ - begin))) - 1;
      columns_ |= (up_to & ~before) << i * W;
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      whole_vectors_ |= static_cast<unsigned>(__all_sync(0xffffffffu, HasAll(i))) << i;
      any_vectors_ |= static_cast<unsigned>(__any_sync(0xffffffffu, !Lacks(i))) << i;
    }
  }

  const int block_columns_;
  const std::int64_t features_;
  int owners_ = 0, last_ = 0;  // not masked: q; where the last vector begins
  int stride_ = 0, low_, high_, misalignment_;
  int row_offset_;                                // columns from the warp's first row on
  unsigned whole_vectors_ = 0, any_vectors_ = 0;  // masked, bit i: vector i
  unsigned columns_ = 0;                          // kBits, bit i * W + j: column j of vector i
};

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

// W values from global memory, plus `added`. p is aligned to them, up to 16 bytes.
template <int W, typename A, typename P>
__device__ __forceinline__ void LoadWide(const P* p, A added, A (&values)[W]) {
  if constexpr (W * sizeof(P) % kVecBytes == 0) {
    constexpr int kStep = kVec<P>;
    for (int j = 0; j < W; j += kStep) {
      Widen(LoadVectorAgain<kStep>(p + j), reinterpret_cast<A(&)[kStep]>(values[j]));
    }
  } else if constexpr (W * sizeof(P) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(p);
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(reinterpret_cast<const P*>(&words)[j]);
  } else {
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(__ldg(p + j));
  }
  if (added != 0) {
    for (A& value : values) value += added;
  }
}

// W values of a parameter, plus `added`. P: its type. void: any type, or no parameter; then the
// values are `absent`.
template <typename P, int W, typename A>
__device__ __forceinline__ void LoadParamVector(const Param& param, std::int64_t group,
                                                std::int64_t column, A absent, A added,
                                                A (&values)[W]) {
  if constexpr (!std::is_void_v<P>) {
    const P* const data = static_cast<const P*>(param.data) + group * param.group_stride;
    LoadWide(data + column, added, values);
  } else if (param.data == nullptr) {
    for (int j = 0; j < W; ++j) values[j] = absent;
  } else {
    WithType(param, group, [&](const auto* data) { LoadWide(data + column, added, values); });
  }
}

// A thread's columns of a parameter, plus `added`; or `absent` if there is no parameter.
template <typename T, int P, Layout kLayout, bool kForward, typename A>
__device__ __forceinline__ void LoadParam(const Param& param, std::int64_t group,
                                          const Place<T, P, kLayout, kForward>& place, A absent,
                                          A added, A (&values)[P][kVec<T>]) {
  constexpr int W = kVec<T>;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    for (int j = 0; j < W; ++j) values[i][j] = absent;
  }
  if (param.data == nullptr) return;
  WithType(param, group, [&](const auto* data) {
    data += place.first_column - place.misalignment() + place.base;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Lacks(i)) continue;
      if constexpr (kLayout != Layout::kMasked) {
        LoadWide(data + place.Begin(i), added, values[i]);
      } else {
        for (int j = 0; j < W; ++j) {
          if (place.Has(i, j)) {
            values[i][j] = static_cast<A>(__ldg(data + place.Begin(i) + j)) + added;
          }
        }
      }
    }
  });
}

// --- Forward ------------------------------------------------------------------------------------

template <typename ParamT>
__device__ __forceinline__ int WidthOf(ffi::DataType dtype) {
  if constexpr (std::is_void_v<ParamT>) {
    return dtype == ffi::F64 ? 8 : dtype == ffi::F32 ? 4 : 2;
  } else {
    return sizeof(ParamT);
  }
}

// A parameter from one of a group's columns on, as if that were the first group's first column.
template <typename ParamT>
__device__ __forceinline__ Param From(const Param& param, std::int64_t group, int column) {
  if (param.data == nullptr) return param;
  const std::int64_t width = WidthOf<ParamT>(param.dtype);
  const std::int64_t first = group * param.group_stride + column;
  return {static_cast<const char*>(param.data) + first * width, 0, param.dtype};
}

// Adds a residual's bias to vector i of the residual.
template <typename ParamT, typename T, int P, Layout kLayout, typename A>
__device__ __forceinline__ void AddResidualBias(const RowNormFwdArgs& args, std::int64_t group,
                                                const Place<T, P, kLayout, true>& place, int i,
                                                A (&residual)[kVec<T>]) {
  constexpr int W = kVec<T>, N = sizeof(T) == 2 ? W / 2 : W;
  const Param param = From<ParamT>(args.residual_bias, group, place.base + place.Begin(i));
  for (int j = 0; j < W; j += N) {
    A bias[N];
    LoadParamVector<ParamT>(param, 0, j, A{0}, A{0}, bias);
    for (int k = 0; k < N; ++k) residual[j + k] += bias[k];
  }
}

// Scale and bias of a thread's columns, kVec<T> / kSteps at a time.
//
// If the class has half a vector at a time, some threads begin with the second half. If all threads
// read the first 16 of each 32 bytes of float32, the L1 cache would take twice as long.
template <typename T, typename ParamT, int P, Layout kLayout, bool kCentered, int kSteps>
class Parameters {
  using A = Accum<T>;
  static constexpr int W = kVec<T>, N = W / kSteps;
  using RowPlace = Place<T, P, kLayout, true>;

 public:
  __device__ Parameters(const RowNormFwdArgs& args, std::int64_t group, const RowPlace& place)
      : place_(place),
        scale_(From<ParamT>(args.scale, group, place.base)),
        bias_(From<ParamT>(args.bias, group, place.base)) {}

  // Whether the thread has a vector's second half first. With 8 vectors this does not pay.
  static constexpr bool kSwaps = kSteps == 2 && P <= 4;
  __device__ __forceinline__ static bool Swaps() { return kSwaps && (threadIdx.x & 4) != 0; }

  __device__ __forceinline__ void Load(int step) {
    const int part = step % kSteps ^ static_cast<int>(Swaps());
    const int column = place_.Begin(step / kSteps) + part * N;
    LoadParamVector<ParamT>(scale_, 0, column, A{1}, A{0}, values_[0][step % 2]);
    if constexpr (kCentered) {
      LoadParamVector<ParamT>(bias_, 0, column, A{0}, A{0}, values_[1][step % 2]);
    }
  }
  __device__ __forceinline__ A Scale(int step, int k) const { return values_[0][step % 2][k]; }
  __device__ __forceinline__ A Bias(int step, int k) const {
    return kCentered ? values_[kCentered][step % 2][k] : A{0};
  }

 private:
  const RowPlace& place_;
  const Param scale_, bias_;
  A values_[1 + kCentered][2][N];
};

// A warp's columns of a parameter of unaligned rows, on their way to registers. Lanes load
// neighbouring columns to `shared` (the warp's, as large). Each thread then reads its own columns.
template <typename T, int P>
class StagedParameter {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;

 public:
  __device__ explicit StagedParameter(unsigned char* shared)
      : shared_(reinterpret_cast<A*>(shared)) {}

  // Columns that the row does not have are `absent`; all are if there is no parameter.
  __device__ __forceinline__ void Load(const Param& param, std::int64_t group,
                                       const Place<T, P, Layout::kMasked, true>& place,
                                       std::int64_t features, A absent, A added) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int own_column = place.first_column - place.misalignment() + place.base;
    __syncwarp();  // earlier values have been read
    if (param.data == nullptr) {
#pragma unroll 4
      for (int k = 0; k < P * W; ++k) shared_[k * kWarp + lane] = absent;
    } else {
      WithType(param, group, [&](const auto* data) {
      // All at once, so that all loads are in flight together.
#pragma unroll
        for (int k = 0; k < P * W; ++k) {
          const int column = own_column - lane * W + k * kWarp + lane;
          const bool has = column >= 0 && column < features;
          shared_[k * kWarp + lane] = has ? static_cast<A>(__ldg(data + column)) + added : absent;
        }
      });
    }
    __syncwarp();
  }

  // Load, and then all of the thread's vectors.
  __device__ __forceinline__ void Load(const Param& param, std::int64_t group,
                                       const Place<T, P, Layout::kMasked, true>& place,
                                       std::int64_t features, A absent, A added,
                                       A (&values)[P][W]) const {
    Load(param, group, place, features, absent, added);
#pragma unroll
    for (int i = 0; i < P; ++i) Get(i, values[i]);
  }

  // The thread's vector i.
  __device__ __forceinline__ void Get(int i, A (&values)[W]) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    for (int j = 0; j < W; j += kVec<A>) {
      const auto part = LoadPlain<kVec<A>>(shared_ + (i * kWarp + lane) * W + j);
      for (int k = 0; k < kVec<A>; ++k) values[j + k] = part.v[k];
    }
  }

 private:
  A* const shared_;
};

}  // namespace
}  // namespace gradops
