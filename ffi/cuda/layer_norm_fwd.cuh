// The forward kernel of layer_norm.cu, whose comment describes it.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cuda/layer_norm_rows.cuh"

namespace gradops {
namespace {

// Means and sums of squares of what two or more parts of a row hold, merged as in Chan, Golub,
// LeVeque, Algorithms for computing the sample variance (1983), but in two passes over the parts,
// so that no part's distance from the first one costs accuracy. A part: n, mean + delta, squares,
// the sum of squared differences from that.
template <typename A>
struct Part {
  A n, mean, delta, squares;

  __device__ static Part Of(A n, const A* values) { return {n, values[0], values[1], values[2]}; }
  __device__ void CopyTo(A* values) const {
    values[0] = mean, values[1] = delta, values[2] = squares;
  }
  // What the part adds to n * (mean of all) relative to `pivot`.
  __device__ A Offset(A pivot) const { return n * ((mean - pivot) + delta); }
  // The same, and what it adds to squares, relative to the mean of all. n = 0 adds 0.
  __device__ void Moments(A total_mean, A& offset, A& total_squares) const {
    const A difference = (mean - total_mean) + delta;
    offset = n * difference;
    total_squares = squares + offset * difference;
  }
};

// Means and deviations of rows, of which each thread has kPacks<T, W> packs in registers: two
// passes in each warp, whose results are then merged, and those of a cluster's blocks likewise.
template <typename T, int W>
class RowMoments {
  using A = Accum<T>;
  static constexpr int P = kPacks<T, W>, kWarpColumns = kWarp * kElements<T>;

 public:
  __device__ RowMoments(const RowPlan& plan, const Place<T, W>& place, const Deal& deal,
                        std::int64_t features)
      : plan_(plan),
        place_(place),
        features_(features),
        inverse_features_(static_cast<A>(deal.inverse_features)) {
    const int mine = place.columns - place.base / kWarpColumns * kWarpColumns;
    warp_n_ = static_cast<A>(max(1, min(mine, kWarpColumns)));
    inverse_warp_n_ = Reciprocal(warp_n_);
  }

  // Takes a mean, its own warp's or the row's, from h, of which the thread has rest_of(d) columns
  // of D rows. Adding `correction` to h then gives h - mean.
  template <int D, typename Sum, typename Rest>
  __device__ __forceinline__ void Centre(Sum& sum, A (&h)[D][P][W], const Rest& rest_of, A epsilon,
                                         A (&mean)[D], A (&correction)[D], A (&rstd)[D]) const {
    // From differences from the first element, so that the mean of equal elements is exact; sums of
    // a warp's equal 16-bit elements are exact themselves.
    constexpr bool kExact = sizeof(T) == 2;
    // A warp's sum of the largest bfloat16s would overflow.
    constexpr A kFactor = std::is_same_v<T, BFloat16> ? A{1} / kWarpColumns : A{1};
    // An outlier may leave its warp's mean far from the row's: differences from the first would
    // then be rounded to its ulp. Rounding 16-bit results costs more.
    constexpr bool kKeep = !kExact;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int team = plan_.lanes < kWarp ? lane & ~(plan_.lanes - 1) : 0;
    A first[D] = {}, total[D] = {};
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if constexpr (!kExact) {
        first[d] = __shfl_sync(0xffffffffu, rest_of(d) > 0 ? h[d][0][0] : A{0}, team);
      }
      place_.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
        for (int i = 0; i < P; ++i) {
          if (!kAll && place_.Pack(i) >= rest_of(d)) continue;
#pragma unroll
          for (int j = 0; j < W; ++j)
            total[d] += kExact ? h[d][i][j] * kFactor : h[d][i][j] - first[d];
        }
      });
    }
    sum.OverWarp(total);
    A squares[2 * D] = {};  // of each row: sums of d and d^2 with d = h - mean
    A warp_mean[D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const A quotient = total[d] * inverse_warp_n_;  // made exact where it can be
      warp_mean[d] =
          first[d] + (quotient + (total[d] - quotient * warp_n_) * inverse_warp_n_) / kFactor;
      place_.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
        for (int i = 0; i < P; ++i) {
          if (!kAll && place_.Pack(i) >= rest_of(d)) continue;
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const A difference = h[d][i][j] - warp_mean[d];
            if constexpr (!kKeep) h[d][i][j] = difference;
            squares[2 * d] += difference;
            squares[2 * d + 1] += difference * difference;
          }
        }
      });
    }
    sum.OverWarp(squares);
    Part<A> parts[D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const A delta = squares[2 * d] * inverse_warp_n_;
      parts[d] = {A{0}, warp_mean[d], delta, squares[2 * d + 1] - squares[2 * d] * delta};
    }
    A inverse_n = inverse_warp_n_;
    if (plan_.lanes > kWarp) {
      A of_warp[3 * D];
#pragma unroll
      for (int d = 0; d < D; ++d) parts[d].CopyTo(of_warp + 3 * d);
      sum.OfWarps(of_warp);
      const auto n = static_cast<A>(
          max(0, min(place_.columns - lane % kMaxUnits * kWarpColumns, kWarpColumns)));
#pragma unroll
      for (int d = 0; d < D; ++d) parts[d] = Part<A>::Of(n, of_warp + 3 * d);
      inverse_n = Reciprocal(static_cast<A>(max(1, place_.columns)));
      Merge<D>(sum, parts, inverse_n);
    } else {
      __syncwarp();
    }
    if (plan_.cluster > 1) {
      A of_block[3 * D];
#pragma unroll
      for (int d = 0; d < D; ++d) parts[d].CopyTo(of_block + 3 * d);
      const A(*const blocks)[kMaxCluster] = sum.OfBlocks(of_block);
      static_assert(kMaxCluster == kMaxUnits);
      const int r = lane % kMaxCluster;
      const auto n =
          static_cast<A>(r < plan_.cluster ? min(std::int64_t{plan_.share},
                                                 features_ - std::int64_t{r} * plan_.share)
                                           : 0);
#pragma unroll
      for (int d = 0; d < D; ++d) {
        A values[3] = {};
        if (r < plan_.cluster) {
#pragma unroll
          for (int k = 0; k < 3; ++k) values[k] = blocks[3 * d + k][r];
        }
        parts[d] = Part<A>::Of(n, values);
      }
      inverse_n = inverse_features_;
      Merge<D>(sum, parts, inverse_n);
    }
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const A variance = parts[d].squares * inverse_n;
      mean[d] = parts[d].mean + parts[d].delta;
      if constexpr (kKeep) {
#pragma unroll
        for (int i = 0; i < P; ++i) {
#pragma unroll
          for (int j = 0; j < W; ++j) h[d][i][j] -= parts[d].mean;
        }
        correction[d] = -parts[d].delta;
      } else {
        correction[d] = (warp_mean[d] - parts[d].mean) - parts[d].delta;
      }
      rstd[d] = InverseDeviation(variance < 0 ? A{0} : variance, epsilon);
    }
  }

 private:
  // Of parts in lanes k and 16 + k, to the whole in every lane.
  template <int D, typename Sum>
  __device__ __forceinline__ void Merge(const Sum& sum, Part<A> (&parts)[D], A inverse_n) const {
    A offsets[D], pivot[D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      pivot[d] = __shfl_sync(0xffffffffu, parts[d].mean, 0);
      offsets[d] = parts[d].Offset(pivot[d]);
    }
    sum.OverWarps(offsets);
    A moments[2 * D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      offsets[d] = pivot[d] + offsets[d] * inverse_n;  // the mean
      parts[d].Moments(offsets[d], moments[2 * d], moments[2 * d + 1]);
    }
    sum.OverWarps(moments);
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const A delta = moments[2 * d] * inverse_n;
      parts[d] = {A{0}, offsets[d], delta, moments[2 * d + 1] - moments[2 * d] * delta};
    }
  }

  const RowPlan& plan_;
  const Place<T, W>& place_;
  const std::int64_t features_;
  const A inverse_features_;
  A warp_n_, inverse_warp_n_;  // of the row's columns in this warp
};

template <typename T, int W, bool kCentered>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    ForwardKernel(const __grid_constant__ LayerNormFwdArgs args,
                  const __grid_constant__ RowPlan plan, const __grid_constant__ Deal deal) {
  using A = Accum<T>;
  constexpr int P = kPacks<T, W>, D = RowDepth(sizeof(T), W);
  constexpr int kValues = kCentered ? 3 : 1;
  __shared__ SumStorage<A, D * kValues> storage;
  __shared__ RingBarriers barriers;
  extern __shared__ __align__(16) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const Place<T, W> place(plan, features);
  RowSum<A, D * kValues> sum(plan, place.unit, storage);
  RowRing<T, W, 2> ring(plan, place, shared, barriers,
                        {static_cast<const T*>(args.x), static_cast<const T*>(args.residual)},
                        groups * rows, features);
  const bool has_residual = args.residual != nullptr;
  if (plan.cluster > 1) {
    ClusterSync();  // all barriers are initialised
  } else {
    __syncthreads();  // likewise
  }
  const RowMoments<T, W> moments(plan, place, deal, features);

  const unsigned clusters = gridDim.x / static_cast<unsigned>(plan.cluster);
  for (std::int64_t item = blockIdx.x / static_cast<unsigned>(plan.cluster);
       item < groups * deal.slots; item += clusters) {
    const std::int64_t group = deal.Group(item);
    const Turns turns(deal, plan, item - group * deal.slots, place.unit);
    // The first row of the oldest chunk, and the end of the group's rows.
    std::int64_t first_row = group * rows + turns.first;
    const std::int64_t end_row = (group + 1) * rows;
    const auto order = [&](int chunk, std::int64_t row) {
      if (chunk < (turns.count + D - 1) / D * D) {
        ring.Order(row, min(std::int64_t{plan.unit_rows()}, end_row - row));
      } else {
        ring.OrderNothing();
      }
    };
    ring.Restart();
#pragma unroll 1
    for (int s = 0; s < ring.stages(); ++s) order(s, first_row + s * turns.step);
    A scale[P][W], bias[P][W];
    LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), scale);
    LoadParam(args.bias, group, place, A{0}, A{0}, bias);

#pragma unroll 1
    for (int chunk = 0; chunk < turns.count; chunk += D, first_row += D * turns.step) {
      // Of the team's d-th row, and the thread's columns of it; there may be no such row.
      const auto row_of = [&](int d) { return first_row + d * turns.step + place.row; };
      const auto rest_of = [&](int d) {
        return row_of(d) < end_row ? place.columns - place.base : 0;
      };
      ring.template Wait<D>(ring.stages() - D);
      A h[D][P][W];
#pragma unroll
      for (int d = 0; d < D; ++d) {
        const T* const x_row = ring.Row(0, d, first_row + d * turns.step);
        const T* const residual_row =
            has_residual ? ring.Row(1, d, first_row + d * turns.step) : nullptr;
        T* const sum_row =
            static_cast<T*>(args.sum) + row_of(d) * features + place.first_column + place.base;
        place.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
          for (int i = 0; i < P; ++i) {
            if (!kAll && place.Pack(i) >= rest_of(d)) continue;
            auto pack = LoadShared<W>(x_row + place.Pack(i));
            if (has_residual) {
              const auto other = LoadShared<W>(residual_row + place.Pack(i));
#pragma unroll
              for (int j = 0; j < W; ++j) {
                pack.v[j] = static_cast<T>(static_cast<A>(pack.v[j]) + static_cast<A>(other.v[j]));
              }
              StorePack(sum_row + place.Pack(i), pack);
            }
#pragma unroll
            for (int j = 0; j < W; ++j) h[d][i][j] = static_cast<A>(pack.v[j]);
            LimitLoads<W>(i);
          }
        });
      }

      // Of each row: its reciprocal deviation, and what has yet to be added to h for h - mean.
      A rstd[D], correction[D] = {}, mean[D] = {};
      if constexpr (kCentered) {
        moments.template Centre<D>(sum, h, rest_of, static_cast<A>(args.epsilon), mean, correction,
                                   rstd);
      } else {
        A squares[D] = {};
#pragma unroll
        for (int d = 0; d < D; ++d) {
          place.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
            for (int i = 0; i < P; ++i) {
              if (!kAll && place.Pack(i) >= rest_of(d)) continue;
#pragma unroll
              for (int j = 0; j < W; ++j) squares[d] += h[d][i][j] * h[d][i][j];
            }
          });
        }
        sum(squares);
#pragma unroll
        for (int d = 0; d < D; ++d) {
          rstd[d] = InverseDeviation(squares[d] * static_cast<A>(deal.inverse_features),
                                     static_cast<A>(args.epsilon));
        }
      }
      // All of the unit have read these chunks, in whose place the next ones go.
#pragma unroll
      for (int d = 0; d < D; ++d) {
        order(chunk + ring.stages() + d, first_row + (ring.stages() + d) * turns.step);
      }
      ring.template Next<D>();

#pragma unroll
      for (int d = 0; d < D; ++d) {
        const std::int64_t row = row_of(d);
        T* const y = static_cast<T*>(args.y) + row * features + place.first_column + place.base;
        const A shift = correction[d] * rstd[d];
        place.ForPacks(rest_of(d), [&]<bool kAll>() {
#pragma unroll
          for (int i = 0; i < P; ++i) {
            if (!kAll && place.Pack(i) >= rest_of(d)) continue;
            Pack<T, W> out;
#pragma unroll
            for (int j = 0; j < W; ++j) {
              const A x_hat = kCentered ? h[d][i][j] * rstd[d] + shift : h[d][i][j] * rstd[d];
              out.v[j] = static_cast<T>(x_hat * scale[i][j] + bias[i][j]);
            }
            StorePack(y + place.Pack(i), out);
          }
        });
        if (place.lane == 0 && row < end_row && place.first_column == 0) {
          if constexpr (kCentered) static_cast<A*>(args.mean)[row] = mean[d];
          static_cast<A*>(args.rstd)[row] = rstd[d];
        }
      }
    }
  }
  if (plan.cluster > 1) ClusterSync();  // no block ends while another may send to it
}

}  // namespace
}  // namespace gradops
