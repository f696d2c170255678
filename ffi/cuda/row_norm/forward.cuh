// The kernels of forward.cu for one row, for short rows, and for many rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/common/row_sum.cuh"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/place.cuh"
#include "cuda/row_norm/ring.cuh"

namespace gradops {
namespace {

// Adds the residual (and its bias, if kBias) to a thread's vectors of a row, and stores the sum.
// vectors_of: the address of the thread's vectors in an array.
template <typename ParamT, bool kBias, typename T, int P, Layout kLayout, typename VectorsOf>
__device__ __forceinline__ void AddResidual(const RowNormFwdArgs& args, std::int64_t group,
                                            const Place<T, P, kLayout, true>& place,
                                            const VectorsOf& vectors_of,
                                            Vector<T, kVec<T>> (&x)[P]) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  T* const p = vectors_of(args.sum);
  // More vectors at once would take too many registers.
  constexpr int kAtOnce = kBias && (P == 8 || std::is_void_v<ParamT>) ? 1 : P == 3 ? 3 : 4;
#pragma unroll
  for (int first = 0; first < P; first += kAtOnce) {
    Vector<T, W> residual[kAtOnce];
    const T* const from = vectors_of(args.residual);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      AsWords(residual[i]) = LoadWordsOnce(from + place.Begin(first + i));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      A ours[W], others[W];
      Widen(x[first + i], ours);
      Widen(residual[i], others);
      if constexpr (kBias) AddResidualBias<ParamT>(args, group, place, first + i, others);
      for (int j = 0; j < W; ++j) ours[j] += others[j];
      x[first + i] = Narrow<T>(ours);
      StoreVectorOnce(p + place.Begin(first + i), x[first + i]);
    }
  }
}

// A block has one row, or several, and ends.
// ParamT: the type of scale and bias; void: any type, or no parameter.
template <typename T, typename ParamT, int P, Layout kLayout, bool kCentered>
__global__ void __launch_bounds__(kForwardThreads, 1)
    ForwardKernel(const __grid_constant__ RowNormFwdArgs args,
                  const __grid_constant__ ForwardSplit split,
                  const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  // Rows with few vectors per thread have smaller blocks.
  using Sum =
      RowSum<A, kCentered ? 3 : 1, (P == 8 ? kForwardThreads : kFewThreads) / kWarp, 1, true>;
  __shared__ typename Sum::Storage storage;

  const auto [groups, rows, features] = args.shape;
  std::int64_t group = 0;
  if (groups > 1) {
    group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    if (group >= groups) return;  // the grid's last plane may not be full
  }
  const Place<T, P, kLayout, true> place(split.row_threads, 1, split.block_columns, features);
  const int row_of_block =
      split.row_threads <= kWarp ? place.in_team >> Log2(split.row_threads) : 0;
  // Threads without a row repeat the work of the last row.
  const std::int64_t row =
      group * rows + min(std::int64_t{blockIdx.x} * split.rows_per_block + row_of_block, rows - 1);
  const std::int64_t start = row * features;
  // The address of the thread's vectors in an array. The asm hides its value from the compiler,
  // which would otherwise keep an address of each vector from one array to the next.
  const auto vectors_of = [&](const void* array) {
    auto p = reinterpret_cast<std::uintptr_t>(array) +
             (start + place.base) * static_cast<std::int64_t>(sizeof(T));
    asm volatile("" : "+l"(p));
    return reinterpret_cast<T*>(p);
  };
  Vector<T, W> x[P];
  {
    const T* const p = vectors_of(args.x);
#pragma unroll
    for (int i = 0; i < P; ++i) AsWords(x[i]) = LoadWordsOnce(p + place.Begin(i));
  }
  Sum sum(split.row_threads, 1, storage);
  // `kSteps`: a vector is done in steps, so that registers suffice for the parameters. `kAhead`:
  // parameters of wide rows do not stay in the L1 cache, so the next ones are always in flight.
  constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
  constexpr bool kAhead = P == 8 && sizeof(T) < 8 && !std::is_void_v<ParamT>;
  Parameters<T, ParamT, P, kLayout, kCentered, kSteps> parameters(args, group, place);
  if (args.residual_bias.data != nullptr) {
    AddResidual<ParamT, true>(args, group, place, vectors_of, x);
  } else if (args.residual != nullptr) {
    AddResidual<ParamT, false>(args, group, place, vectors_of, x);
  }
  HeldRow<T, P, sizeof(T) == 2 && P == 8> h;
#pragma unroll
  for (int i = 0; i < P; ++i) h.Hold(i, x[i]);

  if (kAhead) parameters.Load(0);
  Moments<A> moments{};
  if constexpr (kCentered) {
    const ColumnCounts<A> counts(split, place, sum, features);
    moments = RowMoments(split.row_threads, 1, place, h, sum, counts, scalars);
  } else {
    moments.rstd = InverseRootMeanSquare(place, h, sum, scalars);
  }
  if (place.row_thread == 0) StoreStatistics<kCentered>(args, row, moments);

  T* const y = vectors_of(args.y);
  const A shift = -moments.delta * moments.rstd;
  const auto finish = [&]<bool kOffset>() {
    const A offset = kOffset ? scalars.scale_offset : A{0};
#pragma unroll
    for (int i = 0; i < P; ++i) {
      A values[W];
      h.Get(i, values);
      if (parameters.Swaps()) SwapHalves(values);
#pragma unroll
      for (int step = i * kSteps; step < (i + 1) * kSteps; ++step) {
        if (!kAhead) {
          parameters.Load(step);
        } else if (step + 1 < P * kSteps) {
          parameters.Load(step + 1);
        }
        for (int k = 0; k < W / kSteps; ++k) {
          const int j = step % kSteps * (W / kSteps) + k;
          const A x_hat = kCentered ? (values[j] - moments.mean) * moments.rstd + shift
                                    : values[j] * moments.rstd;
          values[j] = x_hat * (parameters.Scale(step, k) + offset) + parameters.Bias(step, k);
        }
      }
      auto out = Narrow<T>(values);
      if (parameters.Swaps()) SwapHalves(reinterpret_cast<unsigned (&)[4]>(out));
      StoreVectorOnce(y + place.Begin(i), out);
    }
  };
  // One branch for the whole row costs less than a branch for each element. Without a scale, the
  // offset is not added.
  if (!scalars.offset) {
    finish.template operator()<false>();
  } else {
    finish.template operator()<true>();
  }
}

// Short rows: aligned rows of 1, 2, 4, .. 32 vectors. A thread has one vector of each of its rows,
// so it loads its columns of the parameters once. The 32 vectors of a warp are neighbours in
// memory.
template <typename T, bool kCentered>
__global__ void __launch_bounds__(kShortThreads, 8)
    ForwardShortKernel(const __grid_constant__ RowNormFwdArgs args,
                       const __grid_constant__ ForwardSplit split,
                       const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  using Sum = RowSum<A, kCentered ? 3 : 1, 1, 1, true>;
  __shared__ typename Sum::Storage storage;
  __builtin_assume(split.row_threads <= kWarp);
  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // the grid's last plane may not be full
  const Place<T, 1, Layout::kFull, true> place(split.row_threads, 1, split.block_columns, features);
  const int log_row_threads = Log2(split.row_threads);
  // The thread's r-th row. Threads without a row repeat the work of the last row.
  const auto row_of = [&](int r) {
    const unsigned row_of_block = (threadIdx.x + r * kShortThreads) >> log_row_threads;
    const std::int64_t row = std::int64_t{blockIdx.x} * split.rows_per_block + row_of_block;
    return group * rows + min(row, rows - 1);
  };
  const auto vector_of = [&](const void* array, int r) {
    return static_cast<T*>(const_cast<void*>(array)) + row_of(r) * features + place.base;
  };
  const auto load_rows = [&](const void* array, Vector<T, W>(&vectors)[kShortRows]) {
#pragma unroll
    for (int r = 0; r < kShortRows; ++r) {
      if (r < split.thread_rows) AsWords(vectors[r]) = LoadWordsOnce(vector_of(array, r));
    }
  };
  Vector<T, W> x[kShortRows];
  load_rows(args.x, x);
  const auto load = [&](const Param& param, A absent, A added, A(&values)[W]) {
    LoadParamVector<void>(param, group, place.base, absent, added, values);
  };
  if (args.residual != nullptr) {
    Vector<T, W> residual[kShortRows];
    load_rows(args.residual, residual);
    A bias[W];
    load(args.residual_bias, -A{0}, A{0}, bias);  // -0 changes no sum
#pragma unroll
    for (int r = 0; r < kShortRows; ++r) {
      if (r >= split.thread_rows) break;
      A ours[W], others[W];
      Widen(x[r], ours);
      Widen(residual[r], others);
      for (int j = 0; j < W; ++j) ours[j] += others[j] + bias[j];
      x[r] = Narrow<T>(ours);
      StoreVectorOnce(vector_of(args.sum, r), x[r]);
    }
  }
  A scale[W], bias[W];
  load(args.scale, A{1}, scalars.scale_offset, scale);
  load(kCentered ? args.bias : Param{}, A{0}, A{0}, bias);

  Sum sum(split.row_threads, 1, storage);
  const ColumnCounts<A> counts(split, place, sum, features);
#pragma unroll
  for (int r = 0; r < kShortRows; ++r) {
    if (r >= split.thread_rows) break;
    HeldRow<T, 1, false> h;
    h.Hold(0, x[r]);
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(split.row_threads, 1, place, h, sum, counts, scalars);
    } else {
      moments.rstd = InverseRootMeanSquare(place, h, sum, scalars);
    }
    if (place.row_thread == 0) StoreStatistics<kCentered>(args, row_of(r), moments);
    const A shift = -moments.delta * moments.rstd;
    A values[W];
    h.Get(0, values);
    for (int j = 0; j < W; ++j) {
      const A x_hat =
          kCentered ? (values[j] - moments.mean) * moments.rstd + shift : values[j] * moments.rstd;
      values[j] = x_hat * scale[j] + bias[j];
    }
    StoreVectorOnce(vector_of(args.y, r), Narrow<T>(values));
  }
}

// Stores a thread's vectors of a row, `at` bytes into the array.
template <typename T, int P>
__device__ __forceinline__ void StoreRow(const Place<T, P, Layout::kMasked, true>& place,
                                         void* array, std::int64_t at,
                                         const Vector<T, kVec<T>> (&vectors)[P]) {
  T* const p = reinterpret_cast<T*>(static_cast<char*>(array) + at);
#pragma unroll
  for (int i = 0; i < P; ++i) StoreVectorOnceIf(place.HasAll(i), p + place.Begin(i), vectors[i]);
  if (place.AllWhole()) return;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (!place.Whole(i)) place.StoreSome(p + place.Begin(i), vectors[i], i);
  }
}

// Adds the residual (and its bias, if kBias) to a thread's vectors of a row, and stores the sum.
// The row begins `at` bytes into the arrays. kRereads: also replaces the row in shared memory.
template <bool kBias, bool kRereads, typename T, int P, bool kResidual, bool kPacked>
__device__ __forceinline__ void AddRowResidual(const RowNormFwdArgs& args,
                                               const Place<T, P, Layout::kMasked, true>& place,
                                               const ForwardRing<T, P, kResidual>& ring,
                                               const StagedParameter<T, P>& staged, std::int64_t at,
                                               int iteration, HeldRow<T, P, kPacked>& h) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  Vector<T, W> vectors[P];
#pragma unroll
  for (int i = 0; i < P; ++i) {
    A ours[W], others[W];
    Widen(ring.X(at, iteration, i), ours);
    Widen(ring.Residual(at, iteration, i), others);
    if constexpr (kBias) {
      A added[W];
      staged.Get(i, added);
      for (int j = 0; j < W; ++j) others[j] += added[j];
    }
    for (int j = 0; j < W; ++j) ours[j] += others[j];
    vectors[i] = Narrow<T>(ours);
    if (kRereads) ring.Put(at, iteration, i, vectors[i]);
    h.Hold(i, vectors[i]);
  }
  StoreRow<T>(place, args.sum, at, vectors);
}

// Blocks take rows one after the other: unaligned rows, and rows that blocks share. A thread keeps
// its columns' scale and bias in registers for all rows. Loading them for each row would cost more
// than the row: they are loaded as single elements, or do not stay in the L1 cache. Meanwhile the
// next rows are copied to shared memory.
// kResidual: there may be a residual.
template <typename T, bool kCentered, bool kResidual>
__global__ void __launch_bounds__(ThreadsPerMultiprocessor(sizeof(T)), 1)
    ForwardRowsKernel(const __grid_constant__ RowNormFwdArgs args,
                      const __grid_constant__ ForwardSplit split,
                      const __grid_constant__ ForwardSchedule schedule,
                      const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>, P = kManyRowsVectors;
  // Layer norm of 16-bit elements: the parameters take most registers. The others hold the widened
  // row until its mean and deviation are known. Then the row is read from shared memory again.
  // Otherwise the row stays in registers, and the next row is copied into its place at once.
  constexpr bool kRereads = kCentered && sizeof(T) == 2;
  using Sum = RowSum<A, kCentered ? 3 : 1, ThreadsPerMultiprocessor(sizeof(T)) / kWarp, kMaxCluster,
                     /*kNarrow=*/false>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(128) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // the grid's last plane may not be full
  const int cluster = split.cluster, row_threads = split.row_threads;
  Place<T, P, Layout::kMasked, true> place(row_threads, cluster, split.block_columns, features);

  // The thread's rows: the first one, and then every row_stride-th row.
  const int row_of_block =
      row_threads <= kWarp ? static_cast<int>(threadIdx.x) >> Log2(row_threads) : 0;
  const unsigned block = cluster > 1 ? ClusterId() : blockIdx.x;
  const std::int64_t first_row =
      std::int64_t{block >> Log2(split.period_blocks())} * split.period +
      static_cast<int>(block & (split.period_blocks() - 1)) * split.rows_per_block + row_of_block;
  std::int64_t row = group * rows + first_row;
  const std::int64_t last = first_row + (schedule.iterations - 1) * schedule.row_stride;
  int own_iterations = first_row >= rows ? 0 : schedule.iterations - (last >= rows);
  own_iterations = KeptOfWarp(own_iterations);  // tells the compiler that the warp has one value
  place.SetRow(row);
  // The byte offset of the thread's vectors of the row in each array.
  std::int64_t at = (row * features + (place.first_column - place.misalignment() + place.base)) *
                    static_cast<int>(sizeof(T));

  Sum sum(row_threads, cluster, storage);
  if (cluster > 1) ClusterArrive();
  unsigned char* const of_warp = shared + threadIdx.x / kWarp * split.warp_bytes;
  const ForwardRing<T, P, kResidual> ring(args, split, place, of_warp);
#pragma unroll 1
  for (int s = 0; s < split.stages; ++s) {
    if (s < own_iterations) ring.StartCopy(at + s * schedule.byte_stride, s);
    CommitCopies();
  }
  A scale[P][W];
  [[maybe_unused]] A bias[kCentered ? P : 1][W];
  const StagedParameter<T, P> staged(of_warp + split.stages * split.stage_bytes);
  staged.Load(args.scale, group, place, features, A{1}, scalars.scale_offset, scale);
  if constexpr (kCentered) staged.Load(args.bias, group, place, features, A{0}, A{0}, bias);
  // A residual's bias stays in shared memory: registers do not suffice for it.
  const bool has_residual_bias = kResidual && args.residual_bias.data != nullptr;
  if (has_residual_bias) staged.Load(args.residual_bias, group, place, features, A{0}, A{0});
  const ColumnCounts<A> counts(split, place, sum, features);
  if (cluster > 1) ClusterWait();  // all barriers are initialised

#pragma unroll 1
  for (int iteration = 0; iteration < own_iterations; ++iteration) {
    place.Forget();
    ring.Wait();
    HeldRow<T, P, !kRereads> h;
#pragma unroll
    for (int i = 0; i < P; ++i) h.Hold(i, ring.X(at, iteration, i));
    const auto replace = [&] {
      __syncwarp();  // rooms may overlap neighbouring lanes' rooms for the row before
      if (iteration + split.stages < own_iterations) {
        ring.StartCopy(at + schedule.bytes_ahead, iteration);  // in the place of this row
      }
      CommitCopies();
    };
    // A residual with a bias has code of its own: a branch for each vector would spill.
    if (has_residual_bias) {
      AddRowResidual<true, kRereads>(args, place, ring, staged, at, iteration, h);
    } else if (kResidual && args.residual != nullptr) {
      AddRowResidual<false, kRereads>(args, place, ring, staged, at, iteration, h);
    }
    if (!kRereads && split.stages == 1) replace();
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(row_threads, cluster, place, h, sum, counts, scalars);
    } else {
      moments.rstd = InverseRootMeanSquare(place, h, sum, scalars);
    }
    if (!kRereads && split.stages > 1) replace();
    if (place.row_thread == 0 && place.first_column == 0) {
      StoreStatistics<kCentered>(args, row, moments);
    }
    const A shift = -moments.delta * moments.rstd;
    Vector<T, W> vectors[P];
#pragma unroll
    for (int i = 0; i < P; ++i) {
      A values[W];
      if constexpr (kRereads) {
        Widen(ring.X(at, iteration, i), values);
      } else {
        h.Get(i, values);
      }
      for (int j = 0; j < W; ++j) {
        if constexpr (kCentered) {
          const A x_hat = (values[j] - moments.mean) * moments.rstd + shift;
          values[j] = x_hat * scale[i][j] + bias[i][j];
        } else {
          values[j] = values[j] * moments.rstd * scale[i][j];
        }
      }
      vectors[i] = Narrow<T>(values);
    }
    if (kRereads) replace();
    StoreRow<T>(place, args.y, at, vectors);
    at += schedule.byte_stride;
    row += schedule.row_stride;
  }
}

}  // namespace
}  // namespace gradops
