// The backward kernel of layer_norm.cu, whose comment describes it.
#pragma once

#include <cstdint>
#include <limits>

#include "common/math.h"
#include "cuda/layer_norm_rows.cuh"

namespace gradops {
namespace {

// Where the column sums of (group, slot) go: into the workspace, or, if a group has one slot, into
// the results. Null where not wanted.
template <typename A>
struct SlotSums {
  A* results[2];  // dscale, dbias
  std::int64_t group_pitch, slot_pitch;
};

// For how many turns a thread adds to sums in registers before these are added to the slot's, so
// that rounding errors hardly grow with the number of rows. Double needs no limit.
constexpr int kTurnsPerSum = 128;

// Stores W sums, or adds them to what only this thread has stored; p is aligned to 16 bytes if W
// > 1.
template <int W, typename A>
__device__ __forceinline__ void StoreOrAdd(A* p, const A (&values)[W], bool store) {
  constexpr int kStep = W == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    Pack<A, kStep> pack{};
    if (!store) pack = *reinterpret_cast<const Pack<A, kStep>*>(p + j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] = store ? values[j + k] : pack.v[k] + values[j + k];
    StorePack(p + j, pack);
  }
}

// Adds up the column sums of a block's threads, and gives them to the slot.
template <typename T, int W>
class BlockSums {
  using A = Accum<T>;
  static constexpr int P = kPacks<T, W>;

 public:
  // shared: 2 * kElements<T> values per thread, which may be the ring's memory.
  __device__ BlockSums(const RowPlan& plan, const Place<T, W>& place, unsigned char* shared)
      : plan_(plan), place_(place), shared_(reinterpret_cast<A*>(shared)) {}

  // The s-th sum, of all the block's threads, which all call it.
  __device__ __forceinline__ void Give(int s, A (&sums)[P][W], A* slot, bool first) const {
    const int lanes = plan_.lanes;
    if (lanes < kWarp) {
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        if (distance < lanes) continue;  // these lanes have other columns
#pragma unroll
        for (int i = 0; i < P; ++i) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            sums[i][j] += __shfl_xor_sync(0xffffffffu, sums[i][j], distance);
          }
        }
      }
    }
    if (plan_.units == 1) {
      if (slot == nullptr || place_.row > 0) return;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const int column = place_.base + place_.Pack(i);
        if (column < place_.columns) StoreOrAdd(slot + column, sums[i], first);
      }
      return;
    }
    // [sum][unit][column].
    const int elements = kElements<T> * lanes;
    A* const part = shared_ + s * plan_.units * elements;
    if (place_.row == 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          part[place_.unit * elements + place_.base + place_.Pack(i) + j] = sums[i][j];
        }
      }
    }
    __syncthreads();  // all units' sums are written
    if (slot == nullptr) return;
    for (int column = static_cast<int>(threadIdx.x); column < place_.columns;
         column += static_cast<int>(blockDim.x)) {
      A total[1] = {part[column]};
      for (int unit = 1; unit < plan_.units; ++unit) total[0] += part[unit * elements + column];
      StoreOrAdd(slot + column, total, first);
    }
  }

 private:
  const RowPlan& plan_;
  const Place<T, W>& place_;
  A* const shared_;
};

template <typename T, int W, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    BackwardKernel(const __grid_constant__ LayerNormBwdArgs args,
                   const __grid_constant__ RowPlan plan, const __grid_constant__ Deal deal,
                   const __grid_constant__ SlotSums<Accum<T>> sums) {
  using A = Accum<T>;
  constexpr int P = kPacks<T, W>;
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = kShift ? 3 : kCentered ? 2 : 1;
  constexpr bool kLimited = !std::is_same_v<A, double>;
  constexpr int D = kFromOutput ? 1 : RowDepth(sizeof(T), W);  // chunks at a time
  // Whether dy (and x) is read from shared memory again rather than kept in registers.
  constexpr bool kReloadDy = kCentered || kFromOutput || W == 1 || D > 1,
                 kReloadX = kFromOutput || W == 1 || D > 1;
  using Ring = RowRing<T, W, 3>;
  __shared__ SumStorage<A, D * kValues> storage;
  __shared__ RingBarriers barriers;
  extern __shared__ __align__(16) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const Place<T, W> place(plan, features);
  const int unit_rows = plan.unit_rows();
  const A inverse_n = static_cast<A>(deal.inverse_features);
  const bool has_dsum = args.dsum != nullptr;

  RowSum<A, D * kValues> sum(plan, place.unit, storage);
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
    const Turns turns(deal, plan, slot, place.unit);
    // The first row of the turn being worked on, and the end of the group's rows.
    std::int64_t first_row = group * rows + turns.first;
    const std::int64_t end_row = (group + 1) * rows;
    const auto order = [&](std::int64_t row, std::int64_t end) {
      if (row < end) {
        ring.Order(row, min(std::int64_t{unit_rows}, end_row - row));
      } else {
        ring.OrderNothing();
      }
    };
    const auto order_first = [&](std::int64_t end) {
      ring.Restart();
#pragma unroll 1
      for (int s = 0; s < ring.stages() - D; ++s) order(first_row + s * turns.step, end);
    };
    // Of the turns whose sums stay in registers; a turn's second chunk may be empty.
    static_assert(kTurnsPerSum % D == 0);
    const auto end_of_sum = [&](int done) {
      const int left = (turns.count - done + D - 1) / D * D;
      return first_row + (kLimited ? min(left, kTurnsPerSum) : left) * turns.step;
    };
    order_first(end_of_sum(0));
    A scale[P][W];
    LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), scale);
    [[maybe_unused]] A bias[kFromOutput ? P : 1][W];
    if constexpr (kFromOutput) LoadParam(args.bias, group, place, A{0}, A{0}, bias);
    // All units of a block make the same rounds.
    const int most = deal.rounds + (slot < deal.extra);
#pragma unroll 1
    for (int done = 0; done < most; done += kLimited ? kTurnsPerSum : most) {
      const std::int64_t end = end_of_sum(done);
      if (done > 0) order_first(end);
      A dscale[P][W] = {}, dbias[P][W] = {};

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
#pragma unroll 1
      for (; first_row < end; first_row += D * turns.step) {
        // Of the team's d-th row, and the thread's columns of it; there may be no such row.
        const auto row_of = [&](int d) { return first_row + d * turns.step + place.row; };
        const auto rest_of = [&](int d) {
          return row_of(d) < end_row ? place.columns - place.base : 0;
        };
        A mean[D], rstd[D];
#pragma unroll
        for (int d = 0; d < D; ++d) mean[d] = next_mean[d], rstd[d] = next_rstd[d];
        load_stats(row_of(D));
        ring.template Wait<D>(ring.stages() - 2 * D);

        // x - mean, x, or x_hat.
        const auto centered_of = [&](T x, int d, int i, int j) {
          const A value = static_cast<A>(x);
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
          const T* const dy_row = ring.Row(0, d, first_row + d * turns.step);
          const T* const x_row = ring.Row(1, d, first_row + d * turns.step);
          A* const total = totals + d * kValues;
          place.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
            for (int i = 0; i < P; ++i) {
              if (!kAll && place.Pack(i) >= rest_of(d)) continue;
              const auto x_pack = LoadShared<W>(x_row + place.Pack(i));
              const auto dy_pack = LoadShared<W>(dy_row + place.Pack(i));
#pragma unroll
              for (int j = 0; j < W; ++j) {
                centered[i][j] = centered_of(x_pack.v[j], d, i, j);
                dy[i][j] = static_cast<A>(dy_pack.v[j]);
                const A wdy = dy[i][j] * scale[i][j];
                total[0] += wdy * centered[i][j];
                if constexpr (kCentered) total[1] += wdy;
                if constexpr (kShift) total[2] += centered[i][j];
              }
              LimitLoads<W>(i);
            }
          });
        }
        sum(totals);
        // All of the unit are done with the chunks before these, in whose place the next ones go.
#pragma unroll
        for (int d = 0; d < D; ++d) {
          order(first_row + (ring.stages() - D + d) * turns.step, end);
        }

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
          const T* const dy_row = ring.Row(0, d, first_row + d * turns.step);
          const T* const x_row = ring.Row(1, d, first_row + d * turns.step);
          const T* const dsum_row = has_dsum ? ring.Row(2, d, first_row + d * turns.step) : nullptr;
          T* const dx =
              static_cast<T*>(args.dx) + row_of(d) * features + place.first_column + place.base;
          place.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
            for (int i = 0; i < P; ++i) {
              if (!kAll && place.Pack(i) >= rest_of(d)) continue;
              if constexpr (kReloadX) {
                const auto x_pack = LoadShared<W>(x_row + place.Pack(i));
#pragma unroll
                for (int j = 0; j < W; ++j) centered[i][j] = centered_of(x_pack.v[j], d, i, j);
              }
              if constexpr (kReloadDy) {
                const auto dy_pack = LoadShared<W>(dy_row + place.Pack(i));
#pragma unroll
                for (int j = 0; j < W; ++j) dy[i][j] = static_cast<A>(dy_pack.v[j]);
              }
              Pack<T, W> out, dsum;
              if (has_dsum) dsum = LoadShared<W>(dsum_row + place.Pack(i));
#pragma unroll
              for (int j = 0; j < W; ++j) {
                const A x_hat = kFromOutput ? centered[i][j]
                                : kShift    ? centered[i][j] * factor + shift
                                            : centered[i][j] * factor;
                dscale[i][j] += dy[i][j] * x_hat;
                if constexpr (kCentered) dbias[i][j] += dy[i][j];
                A dx_j =
                    NormInputGrad(dy[i][j] * scale[i][j], x_hat, mean_wdy, mean_wdy_x_hat, rstd[d]);
                if (has_dsum) dx_j += static_cast<A>(dsum.v[j]);
                out.v[j] = static_cast<T>(dx_j);
              }
              StorePack(dx + place.Pack(i), out);
              LimitLoads<W>(i);
            }
          });
        }
        ring.template Next<D>();
      }

      const BlockSums<T, W> block(plan, place, shared);
      const std::int64_t at =
          group * sums.group_pitch + slot * sums.slot_pitch + place.first_column;
      __syncthreads();  // nobody reads the ring any more, whose memory is used from here on
      block.Give(0, dscale, sums.results[0] == nullptr ? nullptr : sums.results[0] + at, done == 0);
      if constexpr (kCentered) {
        block.Give(1, dbias, sums.results[1] == nullptr ? nullptr : sums.results[1] + at,
                   done == 0);
      }
      FenceBulkCopies();
      __syncthreads();  // all sums are read before the next rows come into the ring
    }
  }
  if (plan.cluster > 1) ClusterSync();  // no block ends while another may send to it
}

}  // namespace
}  // namespace gradops
