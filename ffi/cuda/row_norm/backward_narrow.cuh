// The kernel of backward.cu for narrow unaligned rows. Warps work on chunks of rows in shared
// memory, where dx replaces dy (narrow.cuh).
#pragma once

#include <cstdint>
#include <limits>

#include "common/math.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/reciprocal.cuh"
#include "cuda/row_norm/column_sums.cuh"
#include "cuda/row_norm/narrow.cuh"
#include "cuda/row_norm/ring.cuh"

namespace gradops {
namespace {

template <typename T, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(kNarrowThreads, 2)
    BackwardNarrowKernel(const __grid_constant__ RowNormBwdArgs args,
                         const __grid_constant__ NarrowPlan plan,
                         const __grid_constant__ NarrowDeal deal,
                         const __grid_constant__ SlotSums<Accum<T>> sums,
                         const Accum<T> inverse_n) {
  using A = Accum<T>;
  constexpr int K = NarrowColumns(sizeof(T)), kSize = sizeof(T);
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = kShift ? 3 : kCentered ? 2 : 1;
  extern __shared__ __align__(128) unsigned char shared[];

  if (EndTogether(deal.rounds, deal.extra)) LaunchNext();
  const auto [groups, rows, features] = args.shape;
  const NarrowPlace<T> place(plan, features);
  const int warp = KeptOfWarp(static_cast<int>(threadIdx.x / kWarp));
  const int row_bytes = static_cast<int>(features) * kSize;
  const void* const arrays[] = {args.dy, args.x, args.dsum};
  const NarrowChunks<T, 3> chunks(plan, shared + warp * plan.warp_bytes,
                                  args.dsum != nullptr ? 3 : 2, groups * rows * row_bytes);
  // partial: each warp's partial sums of all columns. dx_sums: each thread's sums of dx.
  A* const partial = reinterpret_cast<A*>(shared + plan.warps * plan.warp_bytes);
  A* const dx_sums = partial + plan.warps * features + threadIdx.x;
  const bool sums_dx = sums.results[2] != nullptr;
  const A epsilon = static_cast<A>(args.epsilon);
  const int turns_per_sum = max(1, kTurnsPerSum / plan.steps);
  const auto rows_of = [&](std::int64_t row) {
    return static_cast<int>(min(std::int64_t{plan.chunk_rows}, rows - row));
  };

  for (std::int64_t item = blockIdx.x; item < groups * deal.slots; item += gridDim.x) {
    const std::int64_t group =
        deal.slots == 1 ? item
                        : static_cast<std::uint32_t>(item) / static_cast<std::uint32_t>(deal.slots);
    const std::int64_t slot = item - group * deal.slots;
    const NarrowTurns turns(deal, plan, slot, warp);
    // order: starts the copies of a turn's chunk. The chunk begins with `row`, `first` bytes into
    // the arrays. load_statistics: loads the statistics of its rows, one row per lane.
    const auto order = [&](int turn, std::int64_t row, std::int64_t first) {
      if (turn < turns.own) chunks.Order(turn & 1, arrays, first, rows_of(row) * row_bytes);
      CommitCopies();
    };
    A next_mean = 0, next_rstd = 0;
    const auto load_statistics = [&](int turn, std::int64_t row) {
      const int lane = static_cast<int>(threadIdx.x % kWarp);
      if (turn >= turns.own || lane >= rows_of(row)) return;
      const std::int64_t at = group * rows + row + lane;
      if constexpr (kShift) next_mean = __ldg(static_cast<const A*>(args.mean) + at);
      next_rstd = __ldg(static_cast<const A*>(args.rstd) + at);
    };
    std::int64_t row = turns.row, first = (group * rows + row) * row_bytes;
    const std::int64_t step_bytes = turns.step * row_bytes;
    load_statistics(0, row);
    order(0, row, first);
    order(1, row + turns.step, first + step_bytes);

    // The scale is 0 for columns that other lanes own, so they add nothing to a row's sums.
    A scale[K];
    [[maybe_unused]] A bias[K];
    LoadNarrowParam<T>(args.scale, group, place.begin, plan.columns, A{1},
                       static_cast<A>(args.scale_offset), scale);
#pragma unroll
    for (int k = 0; k < K; ++k) scale[k] = place.Owns(k) ? scale[k] : A{0};
    if constexpr (kFromOutput) {
      LoadNarrowParam<T>(args.bias, group, place.begin, plan.columns, A{0}, A{0}, bias);
    }

    int turn = 0;
#pragma unroll 1
    for (bool store = true; turn < turns.most; store = false) {
      // Column sums stay in registers for these turns.
      const int end = min(turns.most, turn + turns_per_sum);
      A dscale[K] = {}, dbias[K] = {};
      if (sums_dx) {
#pragma unroll
        for (int k = 0; k < K; ++k) dx_sums[k * static_cast<int>(blockDim.x)] = 0;
      }
#pragma unroll 1
      for (; turn < end; ++turn) {
        if (turn >= turns.own) continue;
        const int stage = turn & 1, count = rows_of(row);
        const A means = next_mean, rstds = next_rstd;
        // Bit r is set if row r of the chunk is not usual (UsualRow).
        const unsigned unusual =
            !kShift
                ? 0
                : __ballot_sync(0xffffffffu, static_cast<int>(threadIdx.x % kWarp) < count &&
                                                 (epsilon < 0 || !UsualRow(means, rstds, epsilon)));
        load_statistics(turn + 1, row + turns.step);
        WaitForCopies<1>();
        __syncwarp();  // all lanes' copies have arrived
#pragma unroll 1
        for (int step = 0; step < count; step += kWarp >> plan.log_lanes) {
          // Lanes without a row repeat the sums of the last row.
          const int of_chunk = min(step + place.row, count - 1);
          [[maybe_unused]] const A mean = __shfl_sync(0xffffffffu, means, of_chunk);
          const A rstd = __shfl_sync(0xffffffffu, rstds, of_chunk);
          const auto in_slot =
              static_cast<std::uint32_t>(of_chunk * row_bytes + place.begin * kSize);
          const std::uint32_t dy_at = chunks.At(stage, 0, first) + in_slot;
          const std::uint32_t x_at = chunks.At(stage, 1, first) + in_slot;
          A dy[K], x[K];           // x becomes x - mean; from the output: x_hat
          A totals[kValues] = {};  // sums of wdy * x, wdy and x
          LoadColumns<T>(plan, dy_at, dy);
          LoadColumns<T>(plan, x_at, x);
          ForColumns<K>(plan.columns, [&](int k) {
            if constexpr (kFromOutput) {
              // The reciprocal of a subnormal scale is infinite.
              x[k] = abs(scale[k]) < std::numeric_limits<A>::min()
                         ? A{0}
                         : (x[k] - bias[k]) * Reciprocal(scale[k]);
            } else if constexpr (kShift) {
              x[k] -= mean;
            }
            const A wdy = dy[k] * scale[k];
            totals[0] += wdy * x[k];
            if constexpr (kCentered) totals[1] += wdy;
          });
          if (kShift && unusual != 0) {
            ForColumns<K>(plan.columns, [&](int k) { totals[2] += place.Owns(k) ? x[k] : A{0}; });
            OverLanes(plan.lanes, totals);
          } else {
            OverLanes(plan.lanes, reinterpret_cast<A(&)[kValues - kShift]>(totals));
          }
          __syncwarp();  // all lanes have read what is overwritten below
          if (step + place.row >= count) continue;
          // x_hat = x * factor + shift. shift corrects the saved mean's rounding.
          const A factor = kFromOutput ? A{1} : rstd;
          A shift = 0, mean_wdy = 0, mean_wdy_x_hat = totals[0];
          if constexpr (kShift) {
            const A delta =
                MeanRounding((unusual >> of_chunk & 1) != 0 ? totals[2] * inverse_n : A{0}, mean);
            mean_wdy_x_hat -= delta * totals[1];
            shift = -delta * rstd;
          }
          if constexpr (kCentered) mean_wdy = totals[1] * inverse_n;
          mean_wdy_x_hat *= factor * inverse_n;
          const std::uint32_t dsum_at = chunks.At(stage, 2, first) + in_slot;
          const auto finish = [&]<bool kMore>() {
            ForColumns<K>(plan.columns, [&](int k) {
              const A x_hat = kShift ? x[k] * factor + shift : x[k] * factor;
              dscale[k] += dy[k] * x_hat;
              if constexpr (kCentered) dbias[k] += dy[k];
              A dx = NormInputGrad(dy[k] * scale[k], x_hat, mean_wdy, mean_wdy_x_hat, rstd);
              if constexpr (kMore) {
                if (args.dsum != nullptr) dx += LoadElement<T>(dsum_at + k * kSize);
                if (sums_dx) dx_sums[k * static_cast<int>(blockDim.x)] += dx;
              }
              if (place.Owns(k)) StoreElement<T>(dy_at + k * kSize, dx);
            });
          };
          if (args.dsum == nullptr && !sums_dx) {
            finish.template operator()<false>();
          } else {
            finish.template operator()<true>();
          }
        }
        __syncwarp();  // all results are in shared memory
        chunks.WriteBack(stage, 0, args.dx, first, count * row_bytes);
        __syncwarp();  // the slots are read before new copies overwrite them
        order(turn + 2, row + 2 * turns.step, first + 2 * step_bytes);
        row += turns.step, first += step_bytes;
      }

      // Adds sums over the rows of each warp, then over the block's warps, then to the slot.
      const std::int64_t sums_at = group * sums.group_pitch + slot * sums.slot_pitch;
      const auto give = [&](A(&values)[K], int s) {
        if (sums.results[s] == nullptr) return;
        A* const to = sums.results[s] + sums_at;
#pragma unroll 1
        for (int distance = plan.lanes; distance < kWarp; distance *= 2) {
#pragma unroll
          for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
        }
        if (place.row == 0) {
          ForColumns<K>(plan.columns, [&](int k) {
            if (place.Owns(k)) partial[warp * features + place.begin + k] = values[k];
          });
        }
        __syncthreads();  // all warps' sums are written
        for (int column = static_cast<int>(threadIdx.x); column < features;
             column += static_cast<int>(blockDim.x)) {
          A total[1] = {partial[column]};
          for (int w = 1; w < plan.warps; ++w) total[0] += partial[w * features + column];
          StoreOrAdd(to + column, total, store);
        }
        __syncthreads();  // all sums are read before the next ones are written
      };
      give(dscale, 0);
      if constexpr (kCentered) give(dbias, 1);
      if (sums_dx) {
#pragma unroll
        for (int k = 0; k < K; ++k) dscale[k] = dx_sums[k * static_cast<int>(blockDim.x)];
        give(dscale, 2);
      }
    }
  }
}

}  // namespace
}  // namespace gradops
