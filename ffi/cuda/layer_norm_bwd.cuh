// The backward kernel of layer_norm_bwd.cu, whose comment describes it.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "cuda/launch.cuh"
#include "cuda/layer_norm_column_sums.cuh"
#include "cuda/layer_norm_parameters.cuh"
#include "cuda/layer_norm_ring.cuh"
#include "cuda/layer_norm_sums.cuh"
#include "cuda/reciprocal.cuh"

namespace gradops {
namespace {

// P: packs of a row that a thread holds. kDirect: rows come without the ring (RowsAhead).
template <typename T, int P, Division kDivision, bool kDirect, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(BackwardThreads(P* kVecBytes), 1)
    BackwardKernel(const __grid_constant__ LayerNormBwdArgs args,
                   const __grid_constant__ BackwardPlan plan, const __grid_constant__ Deal deal,
                   const __grid_constant__ SlotSums<Accum<T>> sums) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = kShift ? 3 : kCentered ? 2 : 1;
  constexpr bool kLimited = !std::is_same_v<A, double>;
  constexpr bool kSmall = sizeof(T) == 2;
  constexpr int D =  // chunks at a time
      kFromOutput || kDirect ? 1 : RowDepth(sizeof(T), kFramed, P);
  // Whether dy (and x) is read from shared memory, or widened, again rather than kept in registers.
  constexpr bool kReload = kDirect ? kSmall : kFromOutput || kFramed || D > 1;
  constexpr bool kReloadDy = kReload || (kCentered && !kDirect), kReloadX = kReload;
  using Ring =
      std::conditional_t<kDirect, RowsAhead<T, P, kDivision, 3>, RowRing<T, P, kDivision, 3>>;
  __shared__ SumStorage<A, D * kValues, kBackwardWarps> storage;
  __shared__ RingBarriers barriers;
  extern __shared__ __align__(16) unsigned char shared[];

  if (deal.EndsTogether()) LaunchNext();
  const auto [groups, rows, features] = args.shape;
  Place<T, P, kDivision, false> place(plan.lanes, plan.cluster, plan.share, features);
  const A inverse_n = static_cast<A>(deal.inverse_features);
  const bool has_dsum = args.dsum != nullptr;
  const bool sums_dx = sums.results[2] != nullptr;
  const DxSums<T, P> dx_sums(shared + plan.shared_bytes - plan.dx_sum_bytes);

  RowSum<A, D * kValues, kBackwardWarps, false> sum(plan.lanes, plan.cluster, place.unit, storage);
  Ring ring(plan, place, shared, barriers,
            {static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
             static_cast<const T*>(args.dsum)},
            groups * rows, features);
  if (plan.cluster > 1) {
    ClusterSync();  // all barriers are initialised
  } else {
    __syncthreads();  // likewise
  }

  const unsigned clusters = gridDim.x / static_cast<unsigned>(plan.cluster);
  for (std::int64_t item = blockIdx.x / static_cast<unsigned>(plan.cluster);
       item < groups * deal.slots; item += clusters) {
    const std::int64_t group = deal.Group(item), slot = item - group * deal.slots;
#pragma unroll 1
    for (int pass = 0; pass < (kFramed ? deal.passes : 1); ++pass) {
      const Turns turns(deal, plan, slot, place.unit, pass);
      // The first row of the turn being worked on, and the end of the group's rows.
      std::int64_t first_row = group * rows + turns.first;
      const std::int64_t end_row = (group + 1) * rows;
      if constexpr (kFramed) {
        place.SetSkip(static_cast<int>((static_cast<std::uint64_t>(first_row) * features) % W));
      }
      const auto order = [&](std::int64_t row, std::int64_t end) {
        if constexpr (kDirect) {
          ring.Order();
          ring.Aim(row + turns.step, end_row);
        } else if (row < end) {
          ring.Order(row, end_row);
        } else {
          ring.OrderNothing();
        }
      };
      const auto order_first = [&](std::int64_t end) {
        if constexpr (kDirect) ring.Aim(first_row, end_row);
#pragma unroll 1
        for (int s = 0; s < ring.stages() - D; ++s) order(first_row + s * turns.step, end);
      };
      // Of the turns whose sums stay in registers. All of a block's units take as many, so that its
      // barriers are met equally often; a unit's last chunks may be empty.
      static_assert(kTurnsPerSum % D == 0);
      const auto end_of_sum = [&](int done) {
        const int left = (turns.most - done + D - 1) / D * D;
        return first_row + (kLimited ? min(left, kTurnsPerSum) : left) * turns.step;
      };
      order_first(end_of_sum(0));
      // Statistics come one turn ahead.
      A next_mean[D] = {}, next_rstd[D] = {};
      const auto load_stats = [&](std::int64_t row) {
#pragma unroll
        for (int d = 0; d < D; ++d, row += turns.step) {
          if (row >= end_row) continue;
          if constexpr (kShift) next_mean[d] = __ldg(static_cast<const A*>(args.mean) + row);
          next_rstd[d] = __ldg(static_cast<const A*>(args.rstd) + row);
        }
      };
      load_stats(first_row + place.row);
      A scale[P][W];
      LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), scale);
      [[maybe_unused]] A bias[kFromOutput ? P : 1][W];
      if constexpr (kFromOutput) LoadParam(args.bias, group, place, A{0}, A{0}, bias);
#pragma unroll 1
      for (int done = 0; done < turns.most; done += kLimited ? kTurnsPerSum : turns.most) {
        const std::int64_t end = end_of_sum(done);
        if (!kDirect && done > 0) order_first(end);  // what is in registers stays there
        A dscale[P][W] = {}, dbias[P][W] = {};
        if (sums_dx) dx_sums.Clear();

#pragma unroll 1
        for (; first_row < end; first_row += D * turns.step) {
          // The team's d-th row; there may be no such row.
          const auto row_of = [&](int d) { return first_row + d * turns.step + place.row; };
          const auto has_row = [&](int d) { return row_of(d) < end_row; };
          A mean[D], rstd[D];
#pragma unroll
          for (int d = 0; d < D; ++d) mean[d] = next_mean[d], rstd[d] = next_rstd[d];
          load_stats(row_of(D));
          ring.template Wait<D>(ring.stages() - 2 * D);
          const auto order_next = [&] {
#pragma unroll
            for (int d = 0; d < D; ++d) {
              order(first_row + (ring.stages() - D + d) * turns.step, end);
            }
          };
          if constexpr (kDirect && !kSmall) order_next();  // into other registers

          // x - mean, x, or x_hat.
          const auto centered_of = [&](A value, int d, int i, int j) {
            if constexpr (kFromOutput) {
              // The reciprocal of a subnormal is infinite.
              return abs(scale[i][j]) < std::numeric_limits<A>::min()
                         ? A{0}
                         : (value - bias[i][j]) * Reciprocal(scale[i][j]);
            }
            return kShift ? value - mean[d] : value;
          };
          A centered[P][W], dy[P][W];
          A totals[D * kValues] = {};  // of each row: of wdy * centered, wdy, centered
#pragma unroll
          for (int d = 0; d < D; ++d) {
            const auto* const dy_row = ring.Row(0, d);
            const auto* const x_row = ring.Row(1, d);
            A* const total = totals + d * kValues;
            place.ForPacks([&]<bool kAll>(int i) {
              if (!has_row(d) || (!kAll && place.Lacks(i))) return;
              A x[W];
              Widen(ring.Load(x_row, i), x);
              Widen(ring.Load(dy_row, i), dy[i]);
              // Some threads that count must not count their last pack.
              A last[kValues] = {};
              A* const into = kDivision == Division::kUneven && i == P - 1 ? last : total;
#pragma unroll
              for (int j = 0; j < W; ++j) {
                centered[i][j] = centered_of(x[j], d, i, j);
                if (!kAll && !place.Has(i, j)) continue;
                const A wdy = dy[i][j] * scale[i][j];
                into[0] += wdy * centered[i][j];
                if constexpr (kCentered) into[1] += wdy;
                if constexpr (kShift) into[2] += centered[i][j];
              }
#pragma unroll
              for (int v = 0; v < kValues; ++v) {
                if (place.counts_last) total[v] += last[v];
              }
            });
          }
          if (!place.counts) {
#pragma unroll
            for (A& total : totals) total = 0;
          }
          sum(totals);
          // All of the unit are done with the chunks before these, in whose place the next ones go.
          if constexpr (!kDirect) order_next();

#pragma unroll
          for (int d = 0; d < D; ++d) {
            // x_hat = centered * factor + shift. The saved mean is rounded: the mean of the
            // differences from it is what it is off by.
            const A* const total = totals + d * kValues;
            const A factor = kFromOutput ? A{1} : rstd[d];
            A shift = 0, mean_wdy = 0, mean_wdy_x_hat = total[0];
            if constexpr (kShift) {
              const A delta = total[2] * inverse_n;
              mean_wdy_x_hat -= delta * total[1];
              shift = -delta * rstd[d];
            }
            if constexpr (kCentered) mean_wdy = total[1] * inverse_n;
            mean_wdy_x_hat *= factor * inverse_n;
            const auto* const dy_row = ring.Row(0, d);
            const auto* const x_row = ring.Row(1, d);
            const auto* const dsum_row = kDirect || has_dsum ? ring.Row(2, d) : nullptr;
            T* const dx = static_cast<T*>(args.dx) + row_of(d) * features + place.first_column -
                          (kFramed ? place.skip() : 0) + place.base;
            place.ForPacks([&]<bool kAll>(int i) {
              if (!has_row(d) || (!kAll && place.Lacks(i))) return;
              if constexpr (kReloadX) {
                A x[W];
                Widen(ring.Load(x_row, i), x);
#pragma unroll
                for (int j = 0; j < W; ++j) centered[i][j] = centered_of(x[j], d, i, j);
              }
              if constexpr (kReloadDy) Widen(ring.Load(dy_row, i), dy[i]);
              A dx_i[W];
#pragma unroll
              for (int j = 0; j < W; ++j) {
                const A x_hat = kFromOutput ? centered[i][j]
                                : kShift    ? centered[i][j] * factor + shift
                                            : centered[i][j] * factor;
                dscale[i][j] += dy[i][j] * x_hat;
                if constexpr (kCentered) dbias[i][j] += dy[i][j];
                dx_i[j] =
                    NormInputGrad(dy[i][j] * scale[i][j], x_hat, mean_wdy, mean_wdy_x_hat, rstd[d]);
              }
              if (has_dsum) {
                A dsum[W];
                Widen(ring.Load(dsum_row, i), dsum);
#pragma unroll
                for (int j = 0; j < W; ++j) dx_i[j] += dsum[j];
              }
              if (sums_dx) dx_sums.Add(i, dx_i);
              const auto out = Narrow<T>(dx_i);
              if (kAll) {
                StorePackOnce(dx + place.Begin(i), out);
              } else {
                place.Store(dx + place.Begin(i), out, i);
              }
            });
          }
          if constexpr (kDirect && kSmall) order_next();  // into the same
          ring.template Next<D>();
        }

        const BlockSums<T, P, kDivision> block(plan, place, shared);
        const std::int64_t at = group * sums.group_pitch + slot * sums.slot_pitch;
        const bool store = pass == 0 && done == 0;
        __syncthreads();  // nobody reads the ring any more, whose memory is used from here on
        block.Give(0, dscale, sums.results[0] == nullptr ? nullptr : sums.results[0] + at, store);
        if constexpr (kCentered) {
          block.Give(1, dbias, sums.results[1] == nullptr ? nullptr : sums.results[1] + at, store);
        }
        if (sums_dx) {
          // In the place of dscale's, which have been read, or of dbias's, which there are not.
          dx_sums.Get(dscale);
          block.Give(kCentered ? 0 : 1, dscale, sums.results[2] + at, store);
        }
        FenceBulkCopies();
        __syncthreads();  // all sums are read before the next rows come into the ring
      }
      // Columns change hands: what one block stored, another one adds to.
      if (kFramed && plan.cluster > 1 && pass + 1 < deal.passes) ClusterSync();
    }
  }
  if (plan.cluster > 1) ClusterSync();  // no block ends while another may send to it
}

}  // namespace
}  // namespace gradops
