// The kernel of forward.cu for narrow unaligned rows. Warps work on chunks of rows in shared
// memory, where results replace operands (narrow.cuh).
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/narrow.cuh"

namespace gradops {
namespace {

// Replaces a variance if the sum of squares of x - delta has overflowed. All lanes call it.
template <typename T, int K, typename A>
__device__ __forceinline__ void ReplaceOverflowed(const NarrowPlan& plan, const A (&x)[K],
                                                  const A (&weights)[K], A delta,
                                                  A inverse_features, A& variance) {
  A squares[1] = {};
  ForColumns<K>(plan.columns, [&](int k) {
    const A part = (x[k] - delta) * kLargeUnit<A>;
    squares[0] += part * weights[k] * part;
  });
  OverLanes(plan.lanes, squares);
  const A large = squares[0] * inverse_features / kLargeUnit<A> / kLargeUnit<A>;
  if (Overflowed(variance)) variance = large;
}

// Mean and 1 / deviation of a row, in two passes. x: the lane's columns; on return, x - mean.
// weights: 1 for columns that the lane owns, else 0.
template <typename T, int K, typename A>
__device__ __forceinline__ Moments<A> NarrowMoments(const NarrowPlan& plan, A (&x)[K],
                                                    const A (&weights)[K], A features,
                                                    const ForwardScalars<A>& scalars) {
  using Rule = MeanRule<T, 32 * K>;
  A first = 0;
  if constexpr (!Rule::kExact) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    first = __shfl_sync(0xffffffffu, x[0], lane & ~(plan.lanes - 1));
  }
  A total[1] = {};
  ForColumns<K>(plan.columns, [&](int k) {
    total[0] += (Rule::kExact ? x[k] * Rule::kFactor : x[k] - first) * weights[k];
  });
  OverLanes(plan.lanes, total);
  const A mean = Rule::Mean(first, total[0], features, scalars.inverse_features);
  A sums[1 + Rule::kHasDelta] = {};  // sums of d^2 and d with d = x - mean
  ForColumns<K>(plan.columns, [&](int k) {
    x[k] -= mean;
    const A counted = x[k] * weights[k];
    sums[0] += counted * x[k];
    if constexpr (Rule::kHasDelta) sums[Rule::kHasDelta] += counted;
  });
  OverLanes(plan.lanes, sums);
  A delta = 0;
  if constexpr (Rule::kHasDelta) {
    delta = sums[Rule::kHasDelta] * scalars.inverse_features;
    sums[0] -= sums[Rule::kHasDelta] * delta;
  }
  A variance = sums[0] * scalars.inverse_features;
  if (variance < 0) variance = 0;
  if (AnyOverflowed<T>(variance)) {
    ReplaceOverflowed<T>(plan, x, weights, delta, scalars.inverse_features, variance);
  }
  return {mean, delta, InverseDeviation(variance, scalars.epsilon)};
}

template <typename T, bool kCentered>
__global__ void __launch_bounds__(kNarrowThreads, sizeof(T) == 8 ? 2 : 3)
    ForwardNarrowKernel(const __grid_constant__ RowNormFwdArgs args,
                        const __grid_constant__ NarrowPlan plan,
                        const __grid_constant__ NarrowDeal deal,
                        const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int K = NarrowColumns(sizeof(T)), kSize = sizeof(T);
  extern __shared__ __align__(128) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // the grid's last plane may not be full
  const NarrowPlace<T> place(plan, features);
  const int warp = KeptOfWarp(static_cast<int>(threadIdx.x / kWarp));
  const int row_bytes = static_cast<int>(features) * kSize;
  const bool has_residual = args.residual != nullptr;
  const NarrowTurns turns(deal, plan, blockIdx.x, warp);
  const NarrowChunks<T, 2> chunks(plan, shared + warp * plan.warp_bytes, has_residual ? 2 : 1,
                                  groups * rows * row_bytes);
  const auto rows_of = [&](std::int64_t row) {
    return static_cast<int>(min(std::int64_t{plan.chunk_rows}, rows - row));
  };
  // Starts the copies of a turn's chunk, which begins with `row`, `first` bytes into the arrays.
  const auto order = [&](int turn, std::int64_t row, std::int64_t first) {
    const void* const arrays[] = {args.x, args.residual};
    if (turn < turns.own) chunks.Order(turn & 1, arrays, first, rows_of(row) * row_bytes);
    CommitCopies();
  };
  std::int64_t row = turns.row, first = (group * rows + row) * row_bytes;
  const std::int64_t step_bytes = turns.step * row_bytes;
  order(0, row, first);
  order(1, row + turns.step, first + step_bytes);

  A scale[K], weights[K];
  [[maybe_unused]] A bias[K];
  LoadNarrowParam<T>(args.scale, group, place.begin, plan.columns, A{1}, scalars.scale_offset,
                     scale);
  if constexpr (kCentered) {
    LoadNarrowParam<T>(args.bias, group, place.begin, plan.columns, A{0}, A{0}, bias);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) weights[k] = place.Owns(k) ? A{1} : A{0};
  // A residual's bias is in shared memory: registers do not suffice for it.
  A* const residual_bias = reinterpret_cast<A*>(shared + plan.warps * plan.warp_bytes);
  const bool has_residual_bias = args.residual_bias.data != nullptr;
  if (has_residual_bias) {
    WithType(args.residual_bias, group, [&](const auto* data) {
      for (int c = static_cast<int>(threadIdx.x); c < features; c += static_cast<int>(blockDim.x)) {
        residual_bias[c] = static_cast<A>(__ldg(data + c));
      }
    });
    __syncthreads();  // the whole bias is there
  }

#pragma unroll 1
  for (int turn = 0; turn < turns.own; ++turn) {
    const int stage = turn & 1, count = rows_of(row);
    WaitForCopies<1>();
    __syncwarp();  // all lanes' copies have arrived
#pragma unroll 1
    for (int step = 0; step < count; step += kWarp >> plan.log_lanes) {
      // Lanes without a row repeat the sums of the last row.
      const int of_chunk = min(step + place.row, count - 1);
      const bool has_row = step + place.row < count;
      const auto in_slot = static_cast<std::uint32_t>(of_chunk * row_bytes + place.begin * kSize);
      const std::uint32_t at = chunks.At(stage, 0, first) + in_slot;
      A x[K];
      LoadColumns<T>(plan, at, x);
      if (has_residual) {
        const std::uint32_t residual_at = chunks.At(stage, 1, first) + in_slot;
        ForColumns<K>(plan.columns, [&](int k) {
          A other = k < plan.columns ? LoadElement<T>(residual_at + k * kSize) : A{0};
          if (has_residual_bias && k < plan.columns) other += residual_bias[place.begin + k];
          x[k] = static_cast<A>(static_cast<T>(x[k] + other));
        });
        __syncwarp();  // all lanes have read what is overwritten below
        ForColumns<K>(plan.columns, [&](int k) {
          if (has_row && place.Owns(k)) StoreElement<T>(residual_at + k * kSize, x[k]);
        });
      }
      Moments<A> moments{};
      if constexpr (kCentered) {
        moments =
            NarrowMoments<T>(plan, x, weights, static_cast<A>(static_cast<int>(features)), scalars);
      } else {
        A squares[1] = {};
        ForColumns<K>(plan.columns, [&](int k) { squares[0] += x[k] * weights[k] * x[k]; });
        OverLanes(plan.lanes, squares);
        A variance = squares[0] * scalars.inverse_features;
        if (AnyOverflowed<T>(variance)) {
          ReplaceOverflowed<T>(plan, x, weights, A{0}, scalars.inverse_features, variance);
        }
        moments.rstd = InverseDeviation(variance, scalars.epsilon);
      }
      __syncwarp();  // all lanes have read what is overwritten below
      if (!has_row) continue;
      if (place.lane == 0 && args.rstd != nullptr) {
        const std::int64_t of_all = group * rows + row + of_chunk;
        if constexpr (kCentered) static_cast<A*>(args.mean)[of_all] = moments.mean + moments.delta;
        static_cast<A*>(args.rstd)[of_all] = moments.rstd;
      }
      const A shift = -moments.delta * moments.rstd;
      ForColumns<K>(plan.columns, [&](int k) {
        A y;
        if constexpr (kCentered) {
          y = (x[k] * moments.rstd + shift) * scale[k] + bias[k];
        } else {
          y = x[k] * moments.rstd * scale[k];
        }
        if (place.Owns(k)) StoreElement<T>(at + k * kSize, y);
      });
    }
    __syncwarp();  // all results are in shared memory
    chunks.WriteBack(stage, 0, args.y, first, count * row_bytes);
    if (has_residual) chunks.WriteBack(stage, 1, args.sum, first, count * row_bytes);
    __syncwarp();  // the slots are read before new copies overwrite them
    order(turn + 2, row + 2 * turns.step, first + 2 * step_bytes);
    row += turns.step, first += step_bytes;
  }
}

}  // namespace
}  // namespace gradops
