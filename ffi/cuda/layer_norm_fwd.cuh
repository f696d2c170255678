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

// The part of a row that a thread of the forward kernel holds, as the elements that were loaded or,
// unless registers are short, as what they are worked on as.
template <typename T, int P>
class HeldRow {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;
  static constexpr bool kPacked = sizeof(T) == 2 && P == 8;

 public:
  __device__ __forceinline__ void Hold(int i, const Pack<T, W>& pack) {
    if constexpr (kPacked) {
      packed_[i] = pack;
    } else {
      Widen(pack, values_[i]);
    }
  }
  // Pack i, for each pass over it anew.
  __device__ __forceinline__ void Get(int i, A (&values)[W]) {
    if constexpr (kPacked) {
      KeepPacked(packed_[i]);
      Widen(packed_[i], values);
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] = values_[i][j];
    }
  }
  __device__ __forceinline__ A GetOne(int i, int j) const {
    if constexpr (kPacked) {
      return static_cast<A>(packed_[i].v[j]);
    } else {
      return values_[i][j];
    }
  }

 private:
  Pack<T, W> packed_[kPacked ? P : 1];
  A values_[kPacked ? 1 : P][W];
};

// What the row has of a pack: its column j.
template <typename T, int P, Division kDivision>
struct Presence {
  const Place<T, P, kDivision, true>& place;
  int i;
  bool all;  // known to the compiler

  __device__ __forceinline__ bool Has(int j) const { return all || place.Has(i, j); }
  // Whether it is a pack that some of the threads that count must not count.
  __device__ __forceinline__ bool MayNotCount() const {
    return kDivision == Division::kUneven && i == P - 1;
  }
};

// Calls fn(values, presence) for each pack.
template <typename T, int P, Division kDivision, typename Fn>
__device__ __forceinline__ void ForHeld(const Place<T, P, kDivision, true>& place, HeldRow<T, P>& h,
                                        const Fn& fn) {
  place.ForPacks([&]<bool kAll>(int i) {
    Accum<T> values[kVec<T>];
    h.Get(i, values);
    fn(values, Presence<T, P, kDivision>{place, i, kAll});
  });
}

// Mean and deviation of the row that the caller's team holds: two passes in each warp, whose
// results are then merged, and those of a cluster's blocks likewise.
template <typename A>
struct Moments {
  A mean, delta;  // the mean is their sum: apart, they have more digits
  A rstd;
};

template <typename T, int P, Division kDivision, typename Sum>
__device__ __forceinline__ Moments<Accum<T>> RowMoments(const ForwardPlan& plan,
                                                        const Place<T, P, kDivision, true>& place,
                                                        HeldRow<T, P>& h, Sum& sum,
                                                        std::int64_t features, Accum<T> epsilon) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  // From differences from the warp's first element, so that the mean of equal elements is exact;
  // sums of a warp's equal 16-bit elements are exact themselves, and bfloat16's mean needs no more.
  constexpr bool kExact = sizeof(T) == 2, kHasDelta = !std::is_same_v<T, BFloat16>;
  // A warp's sum of the largest bfloat16s would overflow.
  constexpr A kFactor = std::is_same_v<T, BFloat16> ? A{1} / (kWarp * P * W) : A{1};
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const A n = static_cast<A>(max(1, place.WarpColumns(place.warp_of_row())));
  const A inverse_warp_n = PreciseReciprocal(n);

  A first = 0;
  if constexpr (!kExact) {
    const int j = kDivision == Division::kFramed ? (W - 1) & max(0, place.low() - place.base) : 0;
#pragma unroll
    for (int k = 0; k < (kDivision == Division::kFramed ? W : 1); ++k) {
      if (k == j) first = h.GetOne(0, k);
    }
    const int team = plan.lanes < kWarp ? lane & ~(plan.lanes - 1) : 0;
    first = __shfl_sync(0xffffffffu, place.Lacks(0) ? A{0} : first, team);
  }
  A total[1] = {};
  ForHeld(place, h, [&](const A(&values)[W], const Presence<T, P, kDivision>& row) {
    A last = 0;
    A& sum_of = row.MayNotCount() ? last : total[0];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (row.Has(j)) sum_of += kExact ? values[j] * kFactor : values[j] - first;
    }
    if (row.MayNotCount() && place.counts_last) total[0] += last;
  });
  if (!place.counts) total[0] = 0;
  sum.OverWarp(total);
  const A quotient = total[0] * inverse_warp_n;  // made exact where it can be
  const A warp_mean = first + (quotient + (total[0] - quotient * n) * inverse_warp_n) / kFactor;

  A squares[1 + kHasDelta] = {};  // sums of d^2 and d with d = h - mean
  ForHeld(place, h, [&](const A(&values)[W], const Presence<T, P, kDivision>& row) {
    A last[1 + kHasDelta] = {};
    A(&sums)[1 + kHasDelta] = row.MayNotCount() ? last : squares;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A difference = values[j] - warp_mean;
      if (!row.Has(j)) continue;
      sums[0] += difference * difference;
      if constexpr (kHasDelta) sums[kHasDelta] += difference;
    }
#pragma unroll
    for (int v = 0; v < 1 + kHasDelta; ++v) {
      if (row.MayNotCount() && place.counts_last) squares[v] += last[v];
    }
  });
  if (!place.counts) {
#pragma unroll
    for (A& value : squares) value = 0;
  }
  sum.OverWarp(squares);
  A delta = 0;
  if constexpr (kHasDelta) {
    delta = squares[kHasDelta] * inverse_warp_n;
    squares[0] -= squares[kHasDelta] * delta;
  }
  Part<A> part{A{0}, warp_mean, delta, squares[0]};

  // Of parts in lanes k, to the whole in every lane.
  const auto merge = [&](A inverse_n, const auto& sum_over) {
    const A pivot = __shfl_sync(0xffffffffu, part.mean, 0);
    A offset[1] = {part.Offset(pivot)};
    sum_over(offset);
    const A whole_mean = pivot + offset[0] * inverse_n;
    A moments[2];
    part.Moments(whole_mean, moments[0], moments[1]);
    sum_over(moments);
    const A whole_delta = moments[0] * inverse_n;
    part = {A{0}, whole_mean, whole_delta, moments[1] - moments[0] * whole_delta};
  };
  A inverse_n = inverse_warp_n;
  if (plan.lanes > kWarp) {
    A values[3];
    part.CopyTo(values);
    sum.OfWarps(values);
    part = Part<A>::Of(static_cast<A>(place.WarpColumns(sum.WarpOfLane())), values);
    inverse_n = PreciseReciprocal(static_cast<A>(max(1, place.Columns())));
    merge(inverse_n, [&](auto& v) { sum.OverWarps(v); });
  } else {
    __syncwarp();
  }
  if (plan.cluster > 1) {
    A values[3];
    part.CopyTo(values);
    sum.OfBlocks(values);
    const std::int64_t from = std::int64_t{sum.BlockOfLane()} * plan.share;
    const std::int64_t end = min(place.skip() + features, from + plan.share);
    const auto columns = end - max(std::int64_t{place.skip()}, from);
    part = Part<A>::Of(static_cast<A>(max(std::int64_t{0}, columns)), values);
    inverse_n = PreciseReciprocal(static_cast<A>(features));
    merge(inverse_n, [&](auto& v) { sum.OverBlocks(v); });
  }
  const A variance = part.squares * inverse_n;
  return {part.mean, part.delta, InverseDeviation(variance < 0 ? A{0} : variance, epsilon)};
}

// N values of each of a block's threads, in shared memory: of array `index`.
template <typename A, int N>
struct OwnPacks {
  static constexpr int kStep = kVec<A>;

  unsigned char* shared;
  int index;

  __device__ __forceinline__ A* At(int i) const {
    return reinterpret_cast<A*>(shared) +
           ((index * N + i) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x) * kStep);
  }
  template <int P, int W>
  __device__ __forceinline__ void Store(const A (&values)[P][W]) const {
#pragma unroll
    for (int i = 0; i < N; i += kStep) {
      Pack<A, kStep> pack;
#pragma unroll
      for (int k = 0; k < kStep; ++k) pack.v[k] = values[(i + k) / W][(i + k) % W];
      StorePack(At(i), pack);
    }
  }
  template <int W>
  __device__ __forceinline__ void Load(int first, A (&values)[W]) const {
#pragma unroll
    for (int i = 0; i < W; i += kStep) {
      const auto pack = LoadShared<kStep>(At(first + i));
#pragma unroll
      for (int k = 0; k < kStep; ++k) values[i + k] = pack.v[k];
    }
  }
};

template <typename ParamT>
__device__ __forceinline__ int WidthOf(ffi::DataType dtype) {
  if constexpr (std::is_void_v<ParamT>) {
    return dtype == ffi::F64 ? 8 : dtype == ffi::F32 ? 4 : 2;
  } else {
    return sizeof(ParamT);
  }
}

// A parameter from one of a group's columns on, as if it were the first group's first.
template <typename ParamT>
__device__ __forceinline__ Param From(const Param& param, std::int64_t group, int column) {
  if (param.data == nullptr) return param;
  const std::int64_t width = WidthOf<ParamT>(param.dtype);
  const std::int64_t first = group * param.group_stride + column;
  return {static_cast<const char*>(param.data) + first * width, 0, param.dtype};
}

// ParamT: what scale and bias are arrays of; void: of anything.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
__global__ void __launch_bounds__(kDivision == Division::kFramed ? FramedThreads(sizeof(T))
                                                                 : kForwardThreads,
                                  kDivision == Division::kFramed ? 2 : 1)
    ForwardKernel(const __grid_constant__ LayerNormFwdArgs args,
                  const __grid_constant__ ForwardPlan plan) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  constexpr int kValues = kCentered ? 3 : 1;
  __shared__ SumStorage<A, kValues, kForwardWarps> storage;

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // its last plane may not be full
  Place<T, P, kDivision, true> place(plan.lanes, plan.cluster, plan.share, features);

  // The first of the team's rows: blocks have neighbouring ones, those of a step in turn.
  const int team = plan.lanes < kWarp
                       ? static_cast<int>(threadIdx.x) >> (kWarp - 1 - __clz(plan.lanes))
                       : place.unit;
  const unsigned block = ClusterId();
  const std::int64_t first_row =
      kFramed ? std::int64_t{block >> plan.log_blocks} * (plan.step * plan.rounds) +
                    static_cast<int>(block & ((1u << plan.log_blocks) - 1)) * plan.teams + team
              : std::int64_t{block} * plan.teams + team;
  if constexpr (kFramed) {
    const auto row = static_cast<std::uint64_t>(group * rows + first_row);
    place.SetSkip(static_cast<int>(row * static_cast<std::uint64_t>(features) % W));
  }
  // A team without a row does the last row's work once more; framed, nothing.
  const auto has_row = [&](int round) { return first_row + round * plan.step < rows; };
  const auto row_of = [&](int round) {
    return group * rows + min(first_row + round * plan.step, rows - 1);
  };
  // Where the thread's packs of a row begin.
  const auto start_of = [&](std::int64_t row) {
    return row * features + place.first_column - (kFramed ? place.skip() : 0) + place.base;
  };
  const auto load = [&](const void* array, std::int64_t row, int i, Pack<T, W>& pack) {
    const T* const p = static_cast<const T*>(array) + start_of(row) + place.Begin(i);
    // Beyond the array's end, nothing may be read.
    if (kFramed && !place.HasAll(i) &&
        start_of(row) + place.Begin(i) + W > groups * rows * features) {
      pack = place.LoadPart(p, i);
    } else if (!place.Lacks(i)) {
      pack = LoadPackOnce<W>(p);
    }
  };
  Pack<T, W> next[P];
  const auto load_next = [&](int round) {
    if (kFramed && !has_row(round)) return;
#pragma unroll
    for (int i = 0; i < P; ++i) load(args.x, row_of(round), i, next[i]);
  };
  load_next(0);
  // Framed: parameters are single elements, and kept; otherwise each is loaded when needed.
  extern __shared__ __align__(16) unsigned char shared[];
  const OwnPacks<A, P * W> own_scale{shared, 0}, own_bias{shared, 1};
  if constexpr (kFramed) {
    A values[P][W];
    LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), values);
    own_scale.Store(values);
    LoadParam(args.bias, group, place, A{0}, A{0}, values);
    own_bias.Store(values);
  }
  // No block ends while another may send to it: each waits for all that is sent.
  RowSum<A, kValues, kForwardWarps, true> sum(plan.lanes, plan.cluster, place.unit, storage);
  if (plan.cluster > 1) ClusterArrive();
#pragma unroll 1
  for (int round = 0; round < (kFramed ? plan.rounds : 1); ++round) {
    if (kFramed && __any_sync(0xffffffffu, !has_row(round))) place.Vanish(!has_row(round));
    const std::int64_t row = row_of(round), at = start_of(row);
    HeldRow<T, P> h;
    {
      Pack<T, W> x[P];
#pragma unroll
      for (int i = 0; i < P; ++i) x[i] = next[i];
      if (kFramed && round + 1 < plan.rounds) load_next(round + 1);
      if (args.residual != nullptr) {
        constexpr int kAtOnce = P < 4 ? P : 4;  // more would take too many registers
#pragma unroll
        for (int first = 0; first < P; first += kAtOnce) {
          Pack<T, W> residual[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            load(args.residual, row, first + i, residual[i]);
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            Pack<T, W>& sum = x[first + i];
            A ours[W], others[W];
            Widen(sum, ours);
            Widen(residual[i], others);
#pragma unroll
            for (int j = 0; j < W; ++j) ours[j] += others[j];
            sum = Narrow<T>(ours);
            place.Store(static_cast<T*>(args.sum) + at + place.Begin(first + i), sum, first + i);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < P; ++i) h.Hold(i, x[i]);
    }

    if (plan.cluster > 1 && round == 0) ClusterWait();  // all barriers are initialised
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(plan, place, h, sum, features, static_cast<A>(args.epsilon));
    } else {
      A squares[1] = {};
      ForHeld(place, h, [&](const A(&values)[W], const Presence<T, P, kDivision>& row) {
        A last = 0;
        A& sum_of = row.MayNotCount() ? last : squares[0];
#pragma unroll
        for (int j = 0; j < W; ++j) {
          if (row.Has(j)) sum_of += values[j] * values[j];
        }
        if (row.MayNotCount() && place.counts_last) squares[0] += last;
      });
      if (!place.counts) squares[0] = 0;
      sum(squares);
      moments.rstd = InverseDeviation(
          squares[0] * PreciseReciprocal(static_cast<A>(max(features, std::int64_t{1}))),
          static_cast<A>(args.epsilon));
    }
    if (place.lane == 0 && place.first_column == 0 && (!kFramed || has_row(round))) {
      if constexpr (kCentered) static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
      static_cast<A*>(args.rstd)[row] = moments.rstd;
    }

    T* const y = static_cast<T*>(args.y) + at;
    const int column = place.first_column + place.base;
    const Param scale_from = From<ParamT>(args.scale, group, column);
    const Param bias_from = From<ParamT>(args.bias, group, column);
    const A shift = -moments.delta * moments.rstd;
    place.ForPacks([&]<bool kAll>(int i) {
      A values[W];
      h.Get(i, values);
      // So many columns at a time that registers suffice for their parameters.
      constexpr int kStep = sizeof(T) == 2 && !kFramed ? W / 2 : W;
#pragma unroll
      for (int from = 0; from < W; from += kStep) {
        A scale_i[kStep], bias_i[kStep];
        if constexpr (kFramed) {
          own_scale.Load(i * W, scale_i);
          if constexpr (kCentered) own_bias.Load(i * W, bias_i);
        } else {
          const int column = place.Begin(i) + from;
          const auto offset = static_cast<A>(args.scale_offset);
          LoadParamPack<ParamT>(scale_from, 0, column, A{1}, offset, scale_i);
          if constexpr (kCentered) {
            LoadParamPack<ParamT>(bias_from, 0, column, A{0}, A{0}, bias_i);
          }
        }
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          const int j = from + k;
          const A bias_j = kCentered ? bias_i[k] : A{0};
          const A x_hat = kCentered ? (values[j] - moments.mean) * moments.rstd + shift
                                    : values[j] * moments.rstd;
          values[j] = x_hat * scale_i[k] + bias_j;
        }
        asm volatile("" ::: "memory");
      }
      const auto out = Narrow<T>(values);
      if (kAll) {
        StorePackOnce(y + place.Begin(i), out);
      } else {
        place.Store(y + place.Begin(i), out, i);
      }
    });
  }
}

}  // namespace
}  // namespace gradops
