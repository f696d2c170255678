// The forward kernel of layer_norm_fwd.cu, whose comment describes it.
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
      if constexpr (sizeof(T) == 2) KeepWide(values_[i]);
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
  __device__ __forceinline__ void SetOne(int i, int j, A value) {
    static_assert(!kPacked);
    values_[i][j] = value;
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

// Calls fn(values, may_not_count) for each pack; may_not_count, known to the compiler: whether it
// is one that some of the threads that count must not count.
template <typename T, int P, Division kDivision, typename Fn>
__device__ __forceinline__ void ForHeld(const Place<T, P, kDivision, true>& place, HeldRow<T, P>& h,
                                        const Fn& fn) {
  place.ForPacks([&]<bool kAll>(int i) {
    Accum<T> values[kVec<T>];
    h.Get(i, values);
    fn(values, kDivision == Division::kUneven && i == P - 1);
  });
}

// Framed: gives columns that threads hold, but the row does not have, a value.
template <typename T, int P, Division kDivision>
__device__ __forceinline__ void Fill(const Place<T, P, kDivision, true>& place, HeldRow<T, P>& h,
                                     Accum<T> value) {
  if constexpr (kDivision == Division::kFramed) {
    if (place.AllWhole()) return;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Whole(i)) continue;
#pragma unroll
      for (int j = 0; j < kVec<T>; ++j) {
        if (!place.Has(i, j)) h.SetOne(i, j, value);
      }
    }
  }
}

// Mean and deviation of the row that the caller's team holds: two passes in each warp, whose
// results are then merged, and those of a cluster's blocks likewise.
template <typename A>
struct Moments {
  A mean, delta;  // the mean is their sum: apart, they have more digits
  A rstd;
};

template <typename T, int P, Division kDivision, typename Sum>
__device__ __forceinline__ Moments<Accum<T>> RowMoments(const ForwardPlan& plan, int cluster,
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
  // How many of the row's columns, in this block, a warp has.
  const auto columns_of = [&](int warp) {
    if (!plan.full) return place.WarpColumns(warp);
    return warp * kWarp < plan.lanes ? P * W * min(plan.lanes, kWarp) : 0;
  };
  const A n = static_cast<A>(max(1, columns_of(place.warp_of_row())));
  const A inverse_warp_n = PreciseReciprocal(n);

  A first = 0;
  if constexpr (!kExact) {
    constexpr bool kFramed = kDivision == Division::kFramed;
    const int j = kFramed ? (W - 1) & max(0, place.low() - place.base) : 0;
#pragma unroll
    for (int k = 0; k < (kFramed ? W : 1); ++k) {
      if (k == j) first = h.GetOne(0, k);
    }
    const int team = plan.lanes < kWarp ? lane & ~(plan.lanes - 1) : 0;
    first = __shfl_sync(0xffffffffu, place.Lacks(0) ? A{0} : first, team);
  }
  Fill(place, h, first);
  A total[1] = {};
  ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
    A last = 0;
    A& sum_of = may_not_count ? last : total[0];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      sum_of += kExact ? values[j] * kFactor : values[j] - first;
    }
    if (may_not_count && place.counts_last) total[0] += last;
  });
  if (!place.counts) total[0] = 0;
  sum.OverWarp(total);
  const A quotient = total[0] * inverse_warp_n;  // made exact where it can be
  const A warp_mean = first + (quotient + (total[0] - quotient * n) * inverse_warp_n) / kFactor;

  Fill(place, h, warp_mean);
  A squares[1 + kHasDelta] = {};  // sums of d^2 and d with d = h - mean
  ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
    A last[1 + kHasDelta] = {};
    A(&sums)[1 + kHasDelta] = may_not_count ? last : squares;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A difference = values[j] - warp_mean;
      sums[0] += difference * difference;
      if constexpr (kHasDelta) sums[kHasDelta] += difference;
    }
#pragma unroll
    for (int v = 0; v < 1 + kHasDelta; ++v) {
      if (may_not_count && place.counts_last) squares[v] += last[v];
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
    part = Part<A>::Of(static_cast<A>(columns_of(sum.WarpOfLane())), values);
    inverse_n = PreciseReciprocal(static_cast<A>(max(1, place.Columns())));
    merge(inverse_n, [&](auto& v) { sum.OverWarps(v); });
  } else {
    __syncwarp();
  }
  if (cluster > 1) {
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

// Scale and bias of a thread's columns, kVec<T> / kSteps at a time. Framed rows, in memory, have
// them at no 16-byte boundary: each thread has its own in shared memory, for all its rows.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered, int kSteps>
class Parameters {
  using A = Accum<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;
  static constexpr int W = kVec<T>, N = W / kSteps, kArrays = 1 + kCentered;
  using RowPlace = Place<T, P, kDivision, true>;

 public:
  // shared: the block's, kArrays * P * W values for each thread.
  __device__ Parameters(const LayerNormFwdArgs& args, std::int64_t group, const RowPlace& place,
                        unsigned char* shared)
      : place_(place),
        shared_(shared),
        own_(static_cast<int>(threadIdx.x / kWarp * (P * kSteps * kArrays) * kWarp +
                              threadIdx.x % kWarp) *
             kVecBytes) {
    const int column = place.first_column + place.base - (kFramed ? place.skip() : 0);
    scale_ = From<ParamT>(args.scale, group, column);
    bias_ = From<ParamT>(args.bias, group, column);
    if constexpr (kFramed) {
      const auto offset = static_cast<A>(args.scale_offset);
#pragma unroll 8
      for (int c = 0; c < P * W; ++c) {
        const int i = c / W, j = c % W, from = place.Begin(i) + j;
        A scale[1] = {1}, bias[1] = {0};
        if (place.Has(i, j)) {
          LoadParamPack<ParamT>(scale_, 0, from, A{1}, offset, scale);
          if constexpr (kCentered) LoadParamPack<ParamT>(bias_, 0, from, A{0}, A{0}, bias);
        }
        At(0, c / N)[c % N] = scale[0];
        if constexpr (kCentered) At(1, c / N)[c % N] = bias[0];
      }
    }
  }

  // Of framed rows: before each of them, so that the compiler does not keep addresses.
  __device__ __forceinline__ void Forget() { asm volatile("" : "+r"(own_)); }

  __device__ __forceinline__ void Load(int step) {
    A(&scale)[N] = values_[0][step % 2];
    A(&bias)[N] = values_[kCentered][step % 2];
    if constexpr (kFramed) {
      LoadWide(At(0, step), A{0}, scale);
      if constexpr (kCentered) LoadWide(At(1, step), A{0}, bias);
    } else {
      const int column = place_.Begin(step / kSteps) + step % kSteps * N;
      LoadParamPack<ParamT>(scale_, 0, column, A{1}, A{0}, scale);
      if constexpr (kCentered) LoadParamPack<ParamT>(bias_, 0, column, A{0}, A{0}, bias);
    }
  }
  __device__ __forceinline__ A Scale(int step, int k) const { return values_[0][step % 2][k]; }
  __device__ __forceinline__ A Bias(int step, int k) const {
    return kCentered ? values_[kCentered][step % 2][k] : A{0};
  }

 private:
  __device__ __forceinline__ A* At(int array, int step) const {
    static_assert(N == kVec<A>);
    return reinterpret_cast<A*>(shared_ + own_ + (step * kArrays + array) * kWarp * kVecBytes);
  }

  const RowPlace& place_;
  unsigned char* const shared_;
  int own_;
  Param scale_, bias_;
  A values_[kArrays][2][N];
};

// What an array has of the 16 bytes in which it ends, at `p`, of which that is `count` elements.
template <typename T>
__device__ __forceinline__ uint4 LoadEnd(const T* p, int count) {
  constexpr int kBits = 8 * sizeof(T);
  std::uint64_t low = 0, high = 0;
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const std::uint64_t bits = std::uint64_t{reinterpret_cast<const Bits<T>*>(p)[j]}
                               << j * kBits % 64;
    low |= j * kBits < 64 ? bits : 0;
    high |= j * kBits < 64 ? 0 : bits;
  }
  return {static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high),
          static_cast<unsigned>(high >> 32)};
}

// ParamT: what scale and bias are arrays of; void: of anything.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered>
__global__ void __launch_bounds__(kDivision == Division::kFramed ? kFramedThreads : kForwardThreads,
                                  1) ForwardKernel(const __grid_constant__ LayerNormFwdArgs args,
                                                   const __grid_constant__ ForwardPlan plan) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kFramed = kDivision == Division::kFramed;
  constexpr int kValues = kCentered ? 3 : 1;
  __shared__ SumStorage<A, kValues, kForwardWarps> storage;
  extern __shared__ __align__(16) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // its last plane may not be full
  // The plans with few packs have no clusters.
  const int cluster = P == 8 || kFramed ? plan.cluster : 1;
  Place<T, P, kDivision, true> place(plan.lanes, cluster, plan.share, features);

  // The first of the team's rows: blocks have neighbouring ones, those of a step in turn.
  const int team = plan.lanes < kWarp
                       ? static_cast<int>(threadIdx.x) >> (kWarp - 1 - __clz(plan.lanes))
                       : place.unit;
  const unsigned block = cluster > 1 ? ClusterId() : blockIdx.x;
  const std::int64_t first_row =
      kFramed ? std::int64_t{block >> plan.log_blocks} * (plan.step * plan.rounds) +
                    static_cast<int>(block & ((1u << plan.log_blocks) - 1)) * plan.teams + team
              : std::int64_t{block} * plan.teams + team;
  if constexpr (kFramed) {
    const auto row = static_cast<std::uint64_t>(group * rows + first_row);
    place.SetSkip(static_cast<int>(row * static_cast<std::uint64_t>(features) % W));
  }
  // A team without a row does the last row's work once more; framed, nothing.
  std::int64_t row = group * rows + (kFramed ? first_row : min(first_row, rows - 1));
  const int own_rounds =
      kFramed ? static_cast<int>(
                    max(std::int64_t{0}, min(std::int64_t{plan.rounds},
                                             (rows - first_row + plan.step - 1) >> plan.log_step)))
              : 1;
  // Where the block's part of the row, or of its frame, begins, and how much further the next
  // one's.
  std::int64_t start = row * features + place.first_column - (kFramed ? place.skip() : 0);
  const std::int64_t stride = kFramed ? plan.step * features : 0;
  // Where the thread's packs of an array are; unknown to the compiler, so that it does not keep an
  // address of each of them from one array to the next.
  const auto packs_of = [&](const void* array, std::int64_t from) {
    auto p = reinterpret_cast<std::uintptr_t>(array) +
             (from + place.base) * static_cast<std::int64_t>(sizeof(T));
    asm volatile("" : "+l"(p));
    return reinterpret_cast<T*>(p);
  };
  // Packs from `first` on of the row that begins at `from`.
  const auto load = [&]<int N>(const void* array, std::int64_t from, int first, uint4(&packs)[N]) {
    const T* const p = packs_of(array, from);
    // Beyond the array's end, nothing may be read.
    const std::int64_t left = kFramed ? groups * rows * features - from : 0;
    if (!kFramed || left >= place.high() + W) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!place.Lacks(first + i)) packs[i] = LoadWordsOnce(p + place.Begin(first + i));
      }
    } else {
      const int whole = static_cast<int>(left) & ~(W - 1);
      const auto end = LoadEnd(p - place.base + whole, static_cast<int>(left) - whole);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        packs[i] = end;
        if (place.base + place.Begin(first + i) < whole) {
          packs[i] = LoadWordsOnce(p + place.Begin(first + i));
        }
      }
    }
  };
  uint4 next[P];
  if (!kFramed || own_rounds > 0) load(args.x, start, 0, next);
  // No block ends while another may send to it: each waits for all that is sent.
  RowSum<A, kValues, kForwardWarps, true> sum(plan.lanes, cluster, place.unit, storage);
  if (cluster > 1) ClusterArrive();
  // So many columns at a time that registers suffice for their parameters. Those of wide rows do
  // not stay in the L1 cache: the next ones are always on their way.
  constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
  constexpr bool kAhead = P == 8 && sizeof(T) < 8 && !std::is_void_v<ParamT>;
  Parameters<T, ParamT, P, kDivision, kCentered, kSteps> parameters(args, group, place, shared);
#pragma unroll 1
  for (int round = 0; round < (kFramed ? plan.rounds : 1); ++round) {
    if constexpr (kFramed) {
      const bool vanishes = round >= own_rounds;
      if (__any_sync(0xffffffffu, vanishes)) place.Vanish(vanishes);
      place.Forget();
      parameters.Forget();
    }
    Pack<T, W> x[P];
#pragma unroll
    for (int i = 0; i < P; ++i) AsWords(x[i]) = next[i];
    if (kFramed && round + 1 < own_rounds) load(args.x, start + stride, 0, next);
    const auto store = [&]<bool kAll>(T* p, int i, const Pack<T, W>& pack) {
      if (kAll) {
        StorePackOnce(p + place.Begin(i), pack);
      } else {
        place.Store(p + place.Begin(i), pack, i);
      }
    };
    if (args.residual != nullptr) {
      T* const p = packs_of(args.sum, start);
      constexpr int kAtOnce = kFramed ? 2 : 4;  // more would take too many registers
#pragma unroll
      for (int first = 0; first < P; first += kAtOnce) {
        uint4 residual[kAtOnce];
        if (!kFramed || round < own_rounds) load(args.residual, start, first, residual);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          Pack<T, W> pack;
          AsWords(pack) = residual[i];
          A ours[W], others[W];
          Widen(x[first + i], ours);
          Widen(pack, others);
#pragma unroll
          for (int j = 0; j < W; ++j) ours[j] += others[j];
          x[first + i] = Narrow<T>(ours);
          store.template operator()<!kFramed>(p, first + i, x[first + i]);
        }
      }
    }
    HeldRow<T, P> h;
#pragma unroll
    for (int i = 0; i < P; ++i) h.Hold(i, x[i]);

    if (kAhead) parameters.Load(0);
    if (cluster > 1 && round == 0) ClusterWait();  // all barriers are initialised
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(plan, cluster, place, h, sum, features, static_cast<A>(args.epsilon));
    } else {
      A squares[1] = {};
      Fill(place, h, A{0});
      ForHeld(place, h, [&](const A(&values)[W], bool may_not_count) {
        A last = 0;
        A& sum_of = may_not_count ? last : squares[0];
#pragma unroll
        for (int j = 0; j < W; ++j) sum_of += values[j] * values[j];
        if (may_not_count && place.counts_last) squares[0] += last;
      });
      if (!place.counts) squares[0] = 0;
      sum(squares);
      moments.rstd = InverseDeviation(
          squares[0] * PreciseReciprocal(static_cast<A>(max(features, std::int64_t{1}))),
          static_cast<A>(args.epsilon));
    }
    if (place.lane == 0 && place.first_column == 0 && (!kFramed || round < own_rounds)) {
      if constexpr (kCentered) {
        static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
      }
      static_cast<A*>(args.rstd)[row] = moments.rstd;
    }

    T* const y = packs_of(args.y, start);
    const A shift = -moments.delta * moments.rstd;
    const auto finish = [&]<bool kOffset>() {
      const A offset = kOffset ? static_cast<A>(args.scale_offset) : A{0};
      place.ForPacks([&]<bool kAll>(int i) {
        A values[W];
        h.Get(i, values);
#pragma unroll
        for (int step = i * kSteps; step < (i + 1) * kSteps; ++step) {
          if (!kAhead) {
            parameters.Load(step);
          } else if (step + 1 < P * kSteps) {
            parameters.Load(step + 1);
          }
#pragma unroll
          for (int k = 0; k < W / kSteps; ++k) {
            const int j = step % kSteps * (W / kSteps) + k;
            const A x_hat = kCentered ? (values[j] - moments.mean) * moments.rstd + shift
                                      : values[j] * moments.rstd;
            values[j] = x_hat * (parameters.Scale(step, k) + offset) + parameters.Bias(step, k);
          }
        }
        store.template operator()<kAll>(y, i, Narrow<T>(values));
      });
    };
    // A branch for all of it: one for each element costs more. Framed, and where there is no scale,
    // nothing is left to add.
    if (kFramed || args.scale_offset == 0 || args.scale.data == nullptr) {
      finish.template operator()<false>();
    } else {
      finish.template operator()<true>();
    }
    start += stride;
    row += plan.step;
  }
}

}  // namespace
}  // namespace gradops
