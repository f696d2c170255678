// The backward kernel that backward.cu describes and launches.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/reciprocal.cuh"
#include "cuda/row_norm/column_sums.cuh"
#include "cuda/row_norm/parameters.cuh"
#include "cuda/row_norm/ring.cuh"
#include "cuda/row_norm/totals.cuh"

namespace gradops {
namespace {

// P: packs (16-byte vectors) of a row that a thread holds.
template <typename T, int P, Division kDivision, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(BackwardThreads(P* kVecBytes), 1)
    BackwardKernel(const __grid_constant__ RowNormBwdArgs args,
                   const __grid_constant__ BackwardPlan plan, const __grid_constant__ Deal deal,
                   const __grid_constant__ SlotSums<Accum<T>> sums, const Accum<T> inverse_n) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = kShift ? 3 : kCentered ? 2 : 1;
  constexpr bool kLimited = !std::is_same_v<A, double>;
  __shared__ __align__(kVecBytes) TotalStorage<A, kValues> storage;
  extern __shared__ __align__(128) unsigned char shared[];

  if (EndTogether(deal.rounds, deal.extra)) LaunchNext();
  const auto [groups, rows, features] = args.shape;
  Place<T, P, kDivision, false> place(plan.lanes, plan.cluster, plan.share, features);
  const bool has_dsum = KeptOfWarp(args.dsum != nullptr) != 0;
  const bool sums_dx = sums.results[2] != nullptr;
  const DxSums<T, P> dx_sums(shared + plan.shared_bytes - plan.dx_sum_bytes);
  const BlockSums<T, P, kDivision> block(plan, place, shared + plan.ring_bytes);
  const T* const arrays[] = {static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                             static_cast<const T*>(args.dsum)};
  const unsigned clusters = gridDim.x / static_cast<unsigned>(plan.cluster);
  const std::int64_t first_item = blockIdx.x / static_cast<unsigned>(plan.cluster);
  const auto row_of = [&](std::int64_t item, const Turns& turns) {
    return deal.Group(item) * rows + turns.first;
  };
  const auto turns_of = [&](std::int64_t item, int pass) {
    return Turns(deal, plan, item - deal.Group(item) * deal.slots, place.unit, place.row, pass,
                 rows);
  };
  RowRing<T, P, kDivision> ring(
      plan, place, shared, arrays, groups * rows * features,
      row_of(first_item, turns_of(first_item, 0)) * features + place.first_column);
  RowStats<A, kShift> stats(plan.lanes, static_cast<const A*>(args.mean),
                            static_cast<const A*>(args.rstd), static_cast<A>(args.epsilon),
                            has_dsum || sums_dx);
  RowTotals<A, kValues> over_row(plan, place.unit, place.in_unit, storage);
  if (plan.cluster > 1) ClusterSync();  // all barriers are initialised

  for (std::int64_t item = first_item; item < groups * deal.slots; item += clusters) {
    const std::int64_t group = deal.Group(item), slot = item - group * deal.slots;
#pragma unroll 1
    for (int pass = 0; pass < (kFramed ? deal.passes : 1); ++pass) {
      const Turns turns = turns_of(item, pass);
      const std::int64_t turn_row = row_of(item, turns), first_row = turn_row + place.row;
      if constexpr (kFramed) {
        place.SetSkip(static_cast<int>((static_cast<std::uint64_t>(first_row) * features) % W));
      }
      // Here the block's share of the turn's first row begins (framed: of its frame).
      const std::int64_t first =
          turn_row * features + place.first_column - (kFramed ? place.skip() : 0);
      const std::int64_t step = turns.step * features;
      T* dx = static_cast<T*>(args.dx) + first;
      ring.Start(first, step, turns.own);
      stats.Start(first_row, turns.step, turns.own);
      A scale[P][W];
      LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), scale);
      // In packs that do not count (Place::Counts), dy and x are 0. The scale must be 0 too: an
      // infinite scale would give NaN, and a bias would give an x_hat other than 0.
#pragma unroll
      for (int i = 0; i < P; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) scale[i][j] = place.Counts(i) ? scale[i][j] : A{0};
      }
      [[maybe_unused]] A bias[kFromOutput ? P : 1][W];
      if constexpr (kFromOutput) LoadParam(args.bias, group, place, A{0}, A{0}, bias);
      int turn = 0;
#pragma unroll 1
      for (bool store = pass == 0; turn < turns.most; store = false) {
        // Column sums stay in registers for these turns. All units of a block take equally many
        // turns, so they meet its barriers equally often. A unit's last turn may have no row.
        const int end = kLimited ? min(turns.most, turn + kTurnsPerSum) : turns.most;
        A dscale[P][W] = {}, dbias[P][W] = {};
        if (sums_dx) dx_sums.Clear();
#pragma unroll 1
        for (; turn < end; ++turn) {
          A mean = 0, rstd;
          const bool usual = stats.Get(turn, mean, rstd);
          Pack<T, W> dy_packs[P], x_packs[P];
          ring.Take(dy_packs, x_packs);

          // Layer norm: x - mean. RMS norm: x. From the output: x_hat.
          const auto centered_of = [&](A value, int i, int j) {
            if constexpr (kFromOutput) {
              // The reciprocal of a subnormal scale is infinite.
              return abs(scale[i][j]) < std::numeric_limits<A>::min()
                         ? A{0}
                         : (value - bias[i][j]) * Reciprocal(scale[i][j]);
            }
            return kShift ? value - mean : value;
          };
          A totals[kValues] = {};  // sums of wdy * centered, wdy and, not kUsual, centered
          const auto add_up = [&]<bool kUsual>() {
            place.ForPacks([&]<bool kAll>(int i) {
              if (!kAll && place.Lacks(i)) return;
              A dy[W], x[W];
              Widen(x_packs[i], x);
              Widen(dy_packs[i], dy);
#pragma unroll
              for (int j = 0; j < W; ++j) {
                if (!kAll && !place.Has(i, j)) continue;
                const A centered = centered_of(x[j], i, j), wdy = dy[j] * scale[i][j];
                // The first term is not added to 0. That would take an instruction: -0 + 0 is 0.
                const bool alone = !kFramed && i == 0 && j == 0;
                totals[0] = alone ? wdy * centered : totals[0] + wdy * centered;
                if constexpr (kCentered) totals[1] = alone ? wdy : totals[1] + wdy;
                if constexpr (kShift && !kUsual) totals[2] += place.Counts(i) ? centered : A{0};
              }
            });
          };
          if (!kShift || usual) {
            add_up.template operator()<true>();
          } else {
            add_up.template operator()<false>();
          }
          over_row(totals);
          if (plan.cluster > 1) ring.ReplaceLater();
          // dy is widened again below: registers do not suffice to keep it widened too.
#pragma unroll
          for (int i = 0; i < P; ++i) KeepPacked(dy_packs[i]);

          const auto finish = [&]<bool kUsual>() {
            // x_hat = centered * factor + shift. shift corrects the saved mean's rounding.
            const A factor = kFromOutput ? A{1} : rstd;
            A shift = 0, mean_wdy = 0, mean_wdy_x_hat = totals[0];
            if constexpr (kShift && !kUsual) {
              const A delta = MeanRounding(totals[2] * inverse_n, mean);
              mean_wdy_x_hat -= delta * totals[1];
              shift = -delta * rstd;
            }
            if constexpr (kCentered) mean_wdy = totals[1] * inverse_n;
            mean_wdy_x_hat *= factor * inverse_n;
            // kUsual: NormInputGrad is multiplied out, which takes fewer instructions.
            const A slope = -mean_wdy_x_hat * rstd * factor, offset = -mean_wdy * rstd;
            place.ForPacks([&]<bool kAll>(int i) {
              if (!kAll && place.Lacks(i)) return;
              A dy[W], x[W], dx_i[W];
              Widen(x_packs[i], x);
              Widen(dy_packs[i], dy);
#pragma unroll
              for (int j = 0; j < W; ++j) {
                const A centered = centered_of(x[j], i, j);
                if constexpr (kCentered) dbias[i][j] += dy[j];
                if constexpr (kUsual) {
                  const A scaled = dy[j] * rstd;
                  dscale[i][j] += (kFromOutput ? dy[j] : scaled) * centered;
                  const A rest = kCentered ? centered * slope + offset : centered * slope;
                  dx_i[j] = scaled * scale[i][j] + rest;
                } else {
                  const A x_hat = kShift ? centered * factor + shift : centered * factor;
                  dscale[i][j] += dy[j] * x_hat;
                  dx_i[j] =
                      NormInputGrad(dy[j] * scale[i][j], x_hat, mean_wdy, mean_wdy_x_hat, rstd);
                }
              }
              if constexpr (!kUsual) {
                if (has_dsum) {
                  A dsum[W];
                  Widen(ring.Third(i), dsum);
#pragma unroll
                  for (int j = 0; j < W; ++j) dx_i[j] += dsum[j];
                }
                if (sums_dx) dx_sums.Add(i, dx_i);
              }
              const auto out = Narrow<T>(dx_i);
              T* const to = place.InRow(dx, i);
              if (!kAll) {
                place.Store(to, out, i);
              } else if (place.Counts(i)) {
                StorePackOnce(to, out);
              }
            });
          };
          if (turn < turns.own) {
            if (usual) {
              finish.template operator()<true>();
            } else {
              if (has_dsum) ring.WaitForThird();
              finish.template operator()<false>();
            }
          }
          dx += step;
          if (plan.cluster == 1) ring.ReplaceLater();
          ring.EndTurn(has_dsum);
        }

        const std::int64_t sums_at = group * sums.group_pitch + slot * sums.slot_pitch;
        const auto give = [&](int place_of, A(&values)[P][W], int s) {
          A* const to = sums.results[s] == nullptr ? nullptr : sums.results[s] + sums_at;
          block.Give(place_of, values, to, store);
        };
        give(0, dscale, 0);
        if constexpr (kCentered) give(1, dbias, 1);
        if (sums_dx) {
          // Where dscale's sums were, which have been read. RMS norm: where dbias's would be.
          dx_sums.Get(dscale);
          give(kCentered ? 0 : 1, dscale, 2);
        }
        // All sums are read before the next are written. Framed: all are written before the next
        // pass, in which other threads add to them.
        if (plan.units > 1 || kFramed) __syncthreads();
      }
      // In the next pass a block adds to columns that another block of the cluster stored.
      if (kFramed && plan.cluster > 1 && pass + 1 < deal.passes) ClusterSync();
    }
  }
  if (plan.cluster > 1) ClusterSync();  // no block ends while another may send to it
}

}  // namespace
}  // namespace gradops
