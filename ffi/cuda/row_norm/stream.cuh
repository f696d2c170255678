// Kernels for rows that no block or cluster holds. One block reads a row twice, the second time
// mostly from L2. Backward, a second kernel computes the column sums: it reads dy and x once more,
// down the columns. It also computes column sums of few rows (LaunchFewSums).
#pragma once

#include <cstdint>
#include <limits>

#include "common/math.h"
#include "cuda/common/column_sum.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_sum.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/place.cuh"
#include "cuda/row_norm/ring.cuh"
#include "ops/row_norm.h"

namespace gradops {
namespace {

constexpr int kStreamThreads = 512;

template <typename A>
using StreamSum = RowSum<A, 2, kStreamThreads / kWarp, 1, false>;

// Stores x + (residual + residual_bias) in a row of `sum`.
template <int W, typename T>
__device__ __forceinline__ void AddResidual(const RowNormFwdArgs& args, std::int64_t row) {
  using A = Accum<T>;
  const std::int64_t features = args.shape.features, group = row / args.shape.rows;
  const T* const x_row = static_cast<const T*>(args.x) + row * features;
  const T* const residual_row = static_cast<const T*>(args.residual) + row * features;
  T* const sum_row = static_cast<T*>(args.sum) + row * features;
  for (std::int64_t c = threadIdx.x * W; c < features; c += kStreamThreads * W) {
    auto vector = LoadVectorOnce<W>(x_row + c);
    const auto other = LoadVectorOnce<W>(residual_row + c);
    A bias[W];
    LoadParamVector<void>(args.residual_bias, group, c, A{0}, A{0}, bias);
    for (int j = 0; j < W; ++j) {
      const A added = static_cast<A>(other.v[j]) + bias[j];
      vector.v[j] = static_cast<T>(static_cast<A>(vector.v[j]) + added);
    }
    StoreVector(sum_row + c, vector);
  }
}

// Each thread keeps count, mean and centered sum of squares of its elements so far. It merges them
// with the values of the next few vectors, and finally with the other threads' values (Chan, Golub,
// LeVeque). Means are of differences from the thread's own first element. An outlier among first
// elements then costs accuracy only in one thread's elements.
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads, 1)
    ForwardStreamKernel(const __grid_constant__ RowNormFwdArgs args,
                        const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int kAtOnce = W == 1 ? 8 : W == 2 ? 2 : 4;
  constexpr int kUnroll = W == 2 ? 1 : 2;  // double: more would spill
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = StreamSum<A>;
  __shared__ typename Sum::Storage storage;
  Sum sum(kStreamThreads, 1, storage);

  const std::int64_t features = args.shape.features, rows = args.shape.groups * args.shape.rows;
  const A inverse_n = scalars.inverse_features, inverse_unit = scalars.inverse_unit;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    // h is normalised: x, or x + residual. That sum is stored before it is read again.
    const T* const x_row = static_cast<const T*>(args.x) + row * features;
    const T* h_row = x_row;
    if (args.residual != nullptr) {
      AddResidual<W, T>(args, row);
      __syncthreads();  // the first element is stored, too
      h_row = static_cast<const T*>(args.sum) + row * features;
    }
    const bool has_shift = args.centered && threadIdx.x * W < features;
    const A shift = has_shift ? static_cast<A>(LoadPlain<1>(h_row + threadIdx.x * W).v[0]) : A{0};
    int vectors_seen = 0;
    A share_mean = 0, squares = 0;  // of h - shift; of (h - shift) / unit
    for (std::int64_t first = threadIdx.x * W; first < features; first += kAtOnce * kStep) {
      Vector<T, W> h[kAtOnce];
      A part_sum = 0, part_squares = 0;
      int vectors = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kStep < features) h[i] = LoadVectorOnce<W>(h_row + first + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kStep < features) {
          ++vectors;
          for (int j = 0; j < W; ++j) part_sum += static_cast<A>(h[i].v[j]) - shift;
        }
      }
      const A part_mean = args.centered ? part_sum / static_cast<A>(vectors * W) : A{0};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        KeepPacked(h[i]);
        if (first + i * kStep < features) {
          for (int j = 0; j < W; ++j) {
            const A centered = (static_cast<A>(h[i].v[j]) - shift) - part_mean;
            part_squares += (centered * inverse_unit) * (centered * inverse_unit);
          }
        }
      }
      const A difference = part_mean - share_mean;
      const A count = static_cast<A>(vectors_seen * W);  // may be 0
      vectors_seen += vectors;
      const A fraction = static_cast<A>(vectors) / static_cast<A>(vectors_seen);
      const A in_units = difference * inverse_unit;
      squares += part_squares + in_units * (count * fraction * in_units);
      share_mean += difference * fraction;
    }
    const A count = static_cast<A>(vectors_seen * W);
    A mean = 0;
    if (args.centered) {
      const A row_shift = static_cast<A>(LoadPlain<1>(h_row).v[0]);
      A total[1] = {count * ((shift - row_shift) + share_mean)};
      sum(total);
      mean = row_shift + total[0] * inverse_n;
    }
    const A centered_mean = (shift - mean) + share_mean;
    const A in_units = centered_mean * inverse_unit;
    A sums[2] = {count * centered_mean, squares + in_units * (count * in_units)};
    sum(sums);
    const A delta = args.centered ? sums[0] * inverse_n : A{0};
    const A variance = VarianceOf(sums[1] * (inverse_n * scalars.unit * scalars.unit), delta);
    const A rstd = InverseDeviation(variance, scalars.epsilon);

    const std::int64_t group = row / args.shape.rows;
    T* const y = static_cast<T*>(args.y) + row * features;
    // From the end to the start: what was read last is still in the caches.
    const std::int64_t vectors = (features / W - 1 - threadIdx.x) / kStreamThreads;
#pragma unroll kUnroll
    for (std::int64_t i = vectors; i >= 0; --i) {
      const std::int64_t column = i * kStep + threadIdx.x * W;
      if (column < features) {
        const auto h = LoadVectorOnce<W>(h_row + column);
        A scale[W], bias[W];
        LoadParamVector<void>(args.scale, group, column, A{1}, static_cast<A>(args.scale_offset),
                              scale);
        LoadParamVector<void>(args.bias, group, column, A{0}, A{0}, bias);
        Vector<T, W> out;
        for (int j = 0; j < W; ++j) {
          const A x_hat = ((static_cast<A>(h.v[j]) - mean) - delta) * rstd;
          out.v[j] = static_cast<T>(x_hat * scale[j] + bias[j]);
        }
        StoreVector(y + column, out);
      }
    }
    if (threadIdx.x == 0) {
      const Moments<A> moments{mean, delta, rstd};
      args.centered ? StoreStatistics<true>(args, row, moments)
                    : StoreStatistics<false>(args, row, moments);
    }
  }
}

// x_hat of W elements of a row. delta: the saved mean's rounding, if rows are centered.
template <int W, typename T, typename A>
__device__ __forceinline__ void NormalisedVector(const RowNormBwdArgs& args, const Vector<T, W>& x,
                                                 std::int64_t group, std::int64_t column,
                                                 const A (&scale)[W], A mean, A delta, A rstd,
                                                 A (&x_hat)[W]) {
  A bias[W];
  if (args.from_output) LoadParamVector<void>(args.bias, group, column, A{0}, A{0}, bias);
  for (int j = 0; j < W; ++j) {
    const A value = static_cast<A>(x.v[j]);
    if (args.from_output) {
      // 0 for subnormal scales too, as in BackwardKernel.
      x_hat[j] =
          abs(scale[j]) < std::numeric_limits<A>::min() ? A{0} : (value - bias[j]) / scale[j];
    } else {
      x_hat[j] = ((value - mean) - delta) * rstd;
    }
  }
}

// dx. deltas: each saved mean's rounding, for BackwardSumsKernel (null: not wanted).
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads, 1)
    BackwardStreamKernel(const __grid_constant__ RowNormBwdArgs args, Accum<T>* deltas) {
  using A = Accum<T>;
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = StreamSum<A>;
  __shared__ typename Sum::Storage storage;
  Sum sum(kStreamThreads, 1, storage);

  const std::int64_t features = args.shape.features, rows = args.shape.groups * args.shape.rows;
  const A inverse_n = A{1} / static_cast<A>(features);
  const std::int64_t start = threadIdx.x * W;
  const std::int64_t iterations = features <= start ? 0 : (features - start + kStep - 1) / kStep;
  const bool shift = args.centered && !args.from_output;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t group = row / args.shape.rows;
    const T* const x_row = static_cast<const T*>(args.x) + row * features;
    const T* const dy_row = static_cast<const T*>(args.dy) + row * features;
    const T* const dsum_row =
        args.dsum == nullptr ? nullptr : static_cast<const T*>(args.dsum) + row * features;
    T* const dx_row = static_cast<T*>(args.dx) + row * features;
    const A mean = shift ? __ldg(static_cast<const A*>(args.mean) + row) : A{0};
    const A rstd = __ldg(static_cast<const A*>(args.rstd) + row);
    A total[2] = {}, differences[1] = {};  // sums of wdy * x_hat, wdy; of x - mean
    for (std::int64_t i = 0; i < iterations; ++i) {
      const std::int64_t column = start + i * kStep;
      const auto x = LoadVector<W>(x_row + column);
      const auto dy = LoadVector<W>(dy_row + column);
      A scale[W], x_hat[W];
      LoadParamVector<void>(args.scale, group, column, A{1}, static_cast<A>(args.scale_offset),
                            scale);
      NormalisedVector(args, x, group, column, scale, mean, A{0}, rstd, x_hat);
      for (int j = 0; j < W; ++j) {
        const A wdy = static_cast<A>(dy.v[j]) * scale[j];
        total[0] += wdy * x_hat[j];
        total[1] += wdy;
        if (shift) differences[0] += static_cast<A>(x.v[j]) - mean;
      }
    }
    sum(total);
    sum(differences);
    const A delta = MeanRounding(differences[0] * inverse_n, mean);
    const A mean_wdy = args.centered ? total[1] * inverse_n : A{0};
    const A mean_wdy_x_hat = (total[0] - delta * rstd * total[1]) * inverse_n;
    if (deltas != nullptr && threadIdx.x == 0) deltas[row] = delta;
    // From the end to the start: what was read last is still in the caches.
    for (std::int64_t i = iterations - 1; i >= 0; --i) {
      const std::int64_t column = start + i * kStep;
      const auto x = LoadVector<W>(x_row + column);
      const auto dy = LoadVector<W>(dy_row + column);
      A scale[W], x_hat[W];
      LoadParamVector<void>(args.scale, group, column, A{1}, static_cast<A>(args.scale_offset),
                            scale);
      NormalisedVector(args, x, group, column, scale, mean, delta, rstd, x_hat);
      Vector<T, W> out, dsum;
      if (dsum_row != nullptr) dsum = LoadVector<W>(dsum_row + column);
      for (int j = 0; j < W; ++j) {
        A dx = NormInputGrad(static_cast<A>(dy.v[j]) * scale[j], x_hat[j], mean_wdy, mean_wdy_x_hat,
                             rstd);
        if (dsum_row != nullptr) dx += static_cast<A>(dsum.v[j]);
        out.v[j] = static_cast<T>(dx);
      }
      StoreVector(dx_row + column, out);
    }
  }
}

// The roundings of the saved means of up to kFewRows rows; 0 for well conditioned rows, where they
// do not matter. All threads of the block call it.
template <int W, typename T, typename A>
__device__ __forceinline__ void FewDeltas(const RowNormBwdArgs& args, std::int64_t group,
                                          A (&deltas)[kFewRows]) {
  const int thread = static_cast<int>(threadIdx.y * kColumnThreads + threadIdx.x),
            lane = thread % kWarp;
  const std::int64_t features = args.shape.features, first = group * args.shape.rows;
  const auto mean_of = [&](int r) { return __ldg(static_cast<const A*>(args.mean) + first + r); };
  bool well_conditioned = true;
  if (thread < args.shape.rows) {
    const A rstd = __ldg(static_cast<const A*>(args.rstd) + first + thread);
    well_conditioned = WellConditioned(mean_of(thread), rstd, static_cast<A>(args.epsilon));
  }
  deltas[thread] = 0;
  __syncwarp();  // All are 0 before some are set.
  // Each warp looks at its own rows that are not well conditioned.
  for (unsigned left = __ballot_sync(0xffffffffu, !well_conditioned); left != 0; left &= left - 1) {
    const int r = thread - lane + __ffs(static_cast<int>(left)) - 1;
    const A mean = mean_of(r);
    A delta = 0;
    for (std::int64_t c = lane * W; c < features; c += kWarp * W) {
      const auto x = LoadVector<W>(static_cast<const T*>(args.x) + (first + r) * features + c);
      for (int j = 0; j < W; ++j) delta += static_cast<A>(x.v[j]) - mean;
    }
    delta = WarpSum<kWarp>(delta) / static_cast<A>(features);
    if (lane == 0) deltas[r] = MeanRounding(delta, mean);
  }
  __syncthreads();  // all deltas are there
}

// Column sums: each block adds up all rows of a group in kColumnThreads vectors of columns. For few
// rows, deltas is null, and this kernel runs beside the dx kernel. Otherwise dx is complete.
template <typename T, int W>
__global__ void __launch_bounds__(kColumnThreads* kRowThreads)
    BackwardSumsKernel(const __grid_constant__ RowNormBwdArgs args, const Accum<T>* deltas) {
  using A = Accum<T>;
  constexpr int kColumns = kColumnThreads * W;
  __shared__ A shared[3][kRowThreads][kColumns];
  __shared__ A few_deltas[kFewRows];
  const std::int64_t features = args.shape.features, rows = args.shape.rows;
  const std::int64_t tiles = (features + kColumns - 1) / kColumns;
  const bool shift = args.centered && !args.from_output;
  for (std::int64_t item = blockIdx.x; item < args.shape.groups * tiles; item += gridDim.x) {
    const std::int64_t group = item / tiles;
    const std::int64_t column = item % tiles * kColumns + threadIdx.x * W;
    A dscale[W] = {}, dbias[W] = {}, dresidual_bias[W] = {};
    if (shift && deltas == nullptr) FewDeltas<W, T>(args, group, few_deltas);
    if (column < features) {
      A scale[W];
      LoadParamVector<void>(args.scale, group, column, A{1}, static_cast<A>(args.scale_offset),
                            scale);
      // Adds up sums of 64 terms, so that rounding errors hardly grow with the number of rows.
      for (std::int64_t first = threadIdx.y; first < rows; first += 64 * kRowThreads) {
        A part_dscale[W] = {}, part_dbias[W] = {}, part_dresidual_bias[W] = {};
        const std::int64_t end = min(rows, first + 64 * kRowThreads);
#pragma unroll 4
        for (std::int64_t r = first; r < end; r += kRowThreads) {
          const std::int64_t row = group * rows + r;
          const auto x = LoadVector<W>(static_cast<const T*>(args.x) + row * features + column);
          const auto dy = LoadVector<W>(static_cast<const T*>(args.dy) + row * features + column);
          const A mean = shift ? __ldg(static_cast<const A*>(args.mean) + row) : A{0};
          A delta = 0;
          if (shift) delta = deltas == nullptr ? few_deltas[r] : __ldg(deltas + row);
          A x_hat[W];
          NormalisedVector(args, x, group, column, scale, mean, delta,
                           __ldg(static_cast<const A*>(args.rstd) + row), x_hat);
          for (int j = 0; j < W; ++j) {
            part_dscale[j] += static_cast<A>(dy.v[j]) * x_hat[j];
            part_dbias[j] += static_cast<A>(dy.v[j]);
          }
          if (args.dresidual_bias.data != nullptr) {
            const auto dx = LoadVector<W>(static_cast<const T*>(args.dx) + row * features + column);
            for (int j = 0; j < W; ++j) part_dresidual_bias[j] += static_cast<A>(dx.v[j]);
          }
        }
        for (int j = 0; j < W; ++j) {
          dscale[j] += part_dscale[j], dbias[j] += part_dbias[j];
          dresidual_bias[j] += part_dresidual_bias[j];
        }
      }
    }
    for (int j = 0; j < W; ++j) {
      shared[0][threadIdx.y][threadIdx.x * W + j] = dscale[j];
      shared[1][threadIdx.y][threadIdx.x * W + j] = dbias[j];
      shared[2][threadIdx.y][threadIdx.x * W + j] = dresidual_bias[j];
    }
    __syncthreads();  // all rows' sums are written
    const int thread = static_cast<int>(threadIdx.y * kColumnThreads + threadIdx.x);
    for (int i = thread; i < 3 * kColumns; i += kColumnThreads * kRowThreads) {
      const int s = i / kColumns, c = i % kColumns;
      const std::int64_t to = item % tiles * kColumns + c;
      const ParamGrad& result = s == 0 ? args.dscale : s == 1 ? args.dbias : args.dresidual_bias;
      if (to >= features || result.data == nullptr) continue;
      A total = 0;
      for (int r = 0; r < kRowThreads; ++r) total += shared[s][r][c];
      StoreAs(result.data, result.dtype, group * features + to, total);
    }
    __syncthreads();  // all sums are read before the next item's are written
  }
  WaitForKernelBefore();  // the next kernel needs dx too
}

}  // namespace
}  // namespace gradops
