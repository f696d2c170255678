// Batch norm forward, CUDA: one kernel, x to statistics to y.
//
// First pass: each thread adds up, of each column of its packs, distances from the first element it
// met there, and their squares. What blocks make of these, mean, squared deviations and count, goes
// to the workspace. Behind a barrier of all blocks, channels are spread over these, which put the
// parts together, in a fixed order. Behind another one, y is computed, from the last pack back to
// the first: the last ones are in the L2 cache, and the first ones in shared memory.
//
// Traffic: x read twice, but for what caches and shared memory hold; y written, the residual read.
// How elements are divided: cuda/batch_norm_policy.h.
#include <cooperative_groups.h>

#include <cstdint>

#include "common/math.h"
#include "cuda/batch_norm_sums.cuh"
#include "cuda/batch_norm_tiles.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

constexpr int kMomentPacks = 6;  // of a thread, on their way, in the first pass
constexpr int kApplyPacks = 4;   // and in the second one
// Rings of the first pass after which a thread adds its sums to those before, so that rounding
// errors hardly grow with the number of rows.
constexpr int kMomentRingsPerSum = 6;

// A thread's distances from `shift`, which is an element of the column, or, in a plane, of the
// channel: so a large mean costs no digits.
template <typename A, int W>
struct ColumnMoments {
  A shift[W] = {}, sums[W] = {}, squares[W] = {}, all_sums[W] = {}, all_squares[W] = {};
  int packs = 0;
  int rest = 0;  // elements of packs in part: in columns, of one, the first ones of it

  __device__ __forceinline__ void Begin(const A (&values)[W], bool plane) {
    if (packs > 0) return;
#pragma unroll
    for (int j = 0; j < W; ++j) shift[j] = plane ? values[0] : values[j];
  }

  __device__ __forceinline__ void Add(const A (&values)[W]) {
    ++packs;
    AddDistances(values);
  }

  // After all packs.
  __device__ __forceinline__ void Add(A (&values)[W], const ChannelSpan& span, bool plane) {
    if (packs + rest == 0) {
      A first = values[0];
#pragma unroll
      for (int j = 1; j < W; ++j) {
        if (j == span.first) first = values[j];
      }
#pragma unroll
      for (int j = 0; j < W; ++j) shift[j] = plane ? first : values[j];
    }
    rest += span.last - span.first;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (!span.has(j)) values[j] = shift[j];
    }
    AddDistances(values);
    EndSum();
  }

  __device__ __forceinline__ void EndSum() {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      all_sums[j] += sums[j], all_squares[j] += squares[j];
      sums[j] = 0, squares[j] = 0;
    }
  }

  // The sum of distances from `origin`, and that of their squares.
  __device__ __forceinline__ double2 Around(A origin, double count, double sum, double square,
                                            int j) const {
    const double offset = static_cast<double>(shift[j]) - static_cast<double>(origin);
    return {sum + count * offset, square + offset * (2 * sum + count * offset)};
  }

 private:
  __device__ __forceinline__ void AddDistances(const A (&values)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A distance = values[j] - shift[j];
      sums[j] += distance;
      squares[j] += distance * distance;
    }
  }
};

// What parts' means are distances from: of a channel's first, middle and last element the one
// between the others, as one alone may be far from the mean.
template <typename T>
__device__ __forceinline__ Accum<T> Origin(const T* x, const ChannelPlan& plan, std::int64_t group,
                                           std::int64_t channel) {
  using A = Accum<T>;
  const T* const first = x + group * plan.group_elements + channel * plan.inner;
  const std::int64_t row = plan.channels * plan.inner;
  const A a = static_cast<A>(first[0]);
  const A b = static_cast<A>(first[plan.group_rows / 2 * row + plan.inner / 2]);
  const A c = static_cast<A>(first[(plan.group_rows - 1) * row + plan.inner - 1]);
  return max(min(a, b), min(max(a, b), c));
}

template <typename T, int W>
__device__ __forceinline__ void FirstPass(const T* x, const ChannelPlan& plan,
                                          const ChannelPartials<Accum<T>, 3>& partials,
                                          double2* scratch, Pack<T, W>* kept) {
  using A = Accum<T>;
  ForParts<false>(plan, [&](const ChannelPart& part) {
    ColumnMoments<A, W> moments;
    Pack<T, W> packs[kMomentPacks] = {};
    int own = static_cast<int>(part.own + part.first), rings = 0;
    const auto load = [&](int k, int, bool wanted, std::int64_t start) {
      LoadIf<W>(wanted, x, start, packs[k]);
    };
    const auto begin = [&](int k) {
      A values[W];
      Widen(packs[k], values);
      moments.Begin(values, plan.plane);
    };
    const auto use = [&](int k, int step) {
      if (own + step < plan.kept_steps) {
        StorePack(kept[(own + step) * kChannelThreads + threadIdx.x].v, packs[k]);
      }
      A values[W];
      Widen(packs[k], values);
      moments.Add(values);
    };
    const auto end_ring = [&] {
      if (++rings % kMomentRingsPerSum == 0) moments.EndSum();
    };
    const StepKinds steps(plan, part);
    ForPacks<kMomentPacks, false, false>(plan, part.tile, part.first, steps.whole, load, begin, use,
                                         end_ring);
    own += steps.whole;
    ForPacks<kMomentPacks, false, true>(plan, part.tile, part.first + steps.whole, steps.others,
                                        load, begin, use, end_ring);
    moments.EndSum();
    ForEdges<W>(plan, part, [&](const ChannelSpan& span) {
      A values[W];
      LoadSpan(x, span, values);
      moments.Add(values, span, plan.plane);
    });

    const std::int64_t group = part.tile / plan.tiles;
    const std::int64_t slot = blockIdx.x - plan.FirstBlock(part.tile);
    const std::int64_t first_channel = plan.FirstChannel(part.tile);
    const auto emit = [&](int i, double count, double sum, double square) {
      const double mean = count > 0 ? sum / count : 0.0;
      const double squares = square - sum * mean;
      const std::int64_t channel = first_channel + i;
      partials.at(group, slot, 0, channel) = static_cast<A>(mean);
      partials.at(group, slot, 1, channel) = static_cast<A>(squares < 0 ? 0.0 : squares);
      partials.at(group, slot, 2, channel) = static_cast<A>(count);
    };
    if (plan.plane) {
      double sum = 0, square = 0;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        sum += static_cast<double>(moments.all_sums[j]);
        square += static_cast<double>(moments.all_squares[j]);
      }
      const double count = static_cast<double>(moments.packs) * W + moments.rest;
      double2 around{0, 0};
      if (count > 0) {
        around = moments.Around(Origin(x, plan, group, first_channel), count, sum, square, 0);
      }
      double values[3] = {count, around.x, around.y};
      SumPlane(reinterpret_cast<double*>(scratch), values);
      if (threadIdx.x == 0) emit(0, values[0], values[1], values[2]);
    } else {
      int channels[W];
      OwnChannels(plan, part.tile, channels);
      SumColumns<W>(
          plan, part.tile, scratch,
          [&](int j) -> double2 {
            const int count = moments.packs + (j < moments.rest ? 1 : 0);
            if (count == 0) return {0, 0};
            const A origin = Origin(x, plan, group, first_channel + channels[j]);
            return moments.Around(origin, count, static_cast<double>(moments.all_sums[j]),
                                  static_cast<double>(moments.all_squares[j]), j);
          },
          [&](int i, const double2& sums) {
            emit(i, static_cast<double>(plan.ChannelElements(part.first, part.end)), sums.x,
                 sums.y);
          });
    }
  });
}

// The mean is so far from the origin.
template <typename A>
__device__ __forceinline__ void StoreStatistics(const BatchNormFwdArgs& args, std::int64_t i,
                                                A origin, double offset, double variance) {
  const A rounded = static_cast<A>(static_cast<double>(origin) + offset);
  static_cast<A*>(args.batch_mean)[i] = rounded;
  static_cast<A*>(args.batch_variance)[i] = static_cast<A>(variance);
  static_cast<A*>(args.batch_rstd)[i] =
      InverseDeviation(static_cast<A>(variance), static_cast<A>(args.epsilon));
  // From the origin, as the mean itself may have more digits than a double.
  static_cast<A*>(args.batch_delta)[i] =
      static_cast<A>((static_cast<double>(origin) - static_cast<double>(rounded)) + offset);
}

template <typename T>
__device__ __forceinline__ void Finish(const BatchNormFwdArgs& args, const ChannelPlan& plan,
                                       const ChannelPartials<Accum<T>, 3>& partials) {
  using A = Accum<T>;
  ForChannelSums<3>(
      plan, args.shape.outer.groups,
      [&](double (&sums)[3], std::int64_t group, int part, std::int64_t channel) {
        const auto value = [&](int v) {
          return static_cast<double>(__ldcg(&partials.at(group, part, v, channel)));
        };
        const double mean = value(0), squares = value(1), count = value(2);
        sums[0] += count, sums[1] += count * mean, sums[2] += squares + count * mean * mean;
      },
      [&](std::int64_t group, std::int64_t channel, const double (&sums)[3]) {
        const double offset = sums[1] / sums[0];
        const double variance = (sums[2] - sums[1] * offset) / sums[0];
        StoreStatistics(args, group * plan.channels + channel,
                        Origin(static_cast<const T*>(args.x), plan, group, channel), offset,
                        variance < 0 ? 0.0 : variance);
      });
}

template <typename T, int W>
__device__ __forceinline__ void SecondPass(const BatchNormFwdArgs& args, const ChannelPlan& plan,
                                           double2* scratch, const Pack<T, W>* kept) {
  using A = Accum<T>;
  const T* const x = static_cast<const T*>(args.x);
  const T* const residual = static_cast<const T*>(args.residual);
  T* const y = static_cast<T*>(args.y);
  const bool own = args.mean.data == nullptr;
  const auto statistic = [&](const Param& given, const void* batch) {
    return own ? Param{batch, plan.channels, kDtype<A>} : given;
  };
  const Param mean = statistic(args.mean, args.batch_mean);
  const Param rstd = statistic(args.rstd, args.batch_rstd);
  const Param delta = statistic(args.delta, args.batch_delta);
  ForParts<true>(plan, [&](const ChannelPart& part) {
    A parameters[3][W];
    LoadParameters(
        plan, part.tile, scratch,
        [&](std::int64_t group, std::int64_t channel, A(&numbers)[3]) {
          const A factor =
              AccumAt<A>(rstd, group, channel) * ParamAt<A>(args.scale, group, channel, 1);
          numbers[0] = AccumAt<A>(mean, group, channel), numbers[1] = factor;
          numbers[2] =
              ParamAt<A>(args.bias, group, channel, 0) - AccumAt<A>(delta, group, channel) * factor;
        },
        parameters);
    const auto apply = [&](A(&values)[W]) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        values[j] = (values[j] - parameters[0][j]) * parameters[1][j] + parameters[2][j];
      }
    };
    const auto activate = [&](A(&values)[W]) {
      if (!args.relu) return;
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] = values[j] < 0 ? A{0} : values[j];  // NaN stays
    };
    ForEdges<W>(plan, part, [&](const ChannelSpan& span) {
      A values[W], terms[W];
      LoadSpan(x, span, values);
      apply(values);
      if (residual != nullptr) {
        LoadSpan(residual, span, terms);
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] += terms[j];
      }
      activate(values);
      StoreSpan(y, span, values);
    });
    Pack<T, W> packs[kApplyPacks] = {}, others[kApplyPacks] = {};
    std::int64_t starts[kApplyPacks];
    int own = static_cast<int>(part.own + part.end) - 1;
    const auto load = [&](int k, int step, bool wanted, std::int64_t start) {
      starts[k] = start;
      if (own - step >= plan.kept_steps) {
        LoadIf<W>(wanted, x, start, packs[k]);
      } else if (wanted) {
        packs[k] = LoadPlain<W>(kept[(own - step) * kChannelThreads + threadIdx.x].v);
      }
      if (residual != nullptr) LoadIf<W>(wanted, residual, start, others[k]);
    };
    const auto use = [&](int k, int) {
      A values[W];
      Widen(packs[k], values);
      apply(values);
      if (residual != nullptr) {
        A terms[W];
        Widen(others[k], terms);
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] += terms[j];
      }
      activate(values);
      StoreLast(y, starts[k], Narrow<T>(values));
    };
    const auto nothing = [](auto...) {};
    const StepKinds steps(plan, part);
    ForPacks<kApplyPacks, true, true>(plan, part.tile, part.end - 1, steps.others, load, nothing,
                                      use, nothing);
    own -= steps.others;
    ForPacks<kApplyPacks, true, false>(plan, part.tile, part.end - 1 - steps.others, steps.whole,
                                       load, nothing, use, nothing);
  });
}

template <typename T, int W>
__global__ void __launch_bounds__(kChannelThreads, 1)
    BatchNormFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                       const __grid_constant__ ChannelPlan plan) {
  extern __shared__ __align__(16) char shared[];
  auto* const scratch = reinterpret_cast<double2*>(shared);
  auto* const kept = reinterpret_cast<Pack<T, W>*>(shared + plan.scratch_bytes);
  if (args.mean.data == nullptr) {
    const ChannelPartials<Accum<T>, 3> partials{static_cast<Accum<T>*>(args.workspace),
                                                args.partial_rows, plan.channels};
    FirstPass<T, W>(static_cast<const T*>(args.x), plan, partials, scratch, kept);
    cooperative_groups::this_grid().sync();  // partial results are written
    Finish<T>(args, plan, partials);
    if (args.y == nullptr) return;
    cooperative_groups::this_grid().sync();  // statistics are
  }
  SecondPass<T, W>(args, plan, scratch, kept);
}

// The statistics of no elements.
template <typename A>
__global__ void EmptyStatisticsKernel(const __grid_constant__ BatchNormFwdArgs args) {
  const std::int64_t all = args.shape.outer.groups * args.shape.outer.features;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all;
       i += threads) {
    StoreStatistics(args, i, A{0}, 0.0, 0.0);
  }
}

template <typename T>
ffi::Error Forward(cudaStream_t stream, const BatchNormFwdArgs& args) {
  constexpr const char* kOp = "batch_norm_fwd";
  const bool own = args.mean.data == nullptr;
  if (args.shape.elements() == 0) {
    const std::int64_t all = args.shape.outer.groups * args.shape.channels();
    if (!own || all == 0) return ffi::Error::Success();
    EmptyStatisticsKernel<Accum<T>><<<GridBlocks(CeilDiv(all, 256)), 256, 0, stream>>>(args);
    return LastError(kOp);
  }
  if (!own && args.y == nullptr) return ffi::Error::Success();
  ChannelTask task = ChannelTaskOf<T>(args.shape);
  task.aligned = Aligned(args.x, args.residual, args.y);
  task.statistics = own, task.apply = args.y != nullptr;
  task.arrays = 1, task.parameters = 3, task.partial_rows = args.partial_rows;
  const ChannelPlan plan = ChooseChannelPlan(task);
  return plan.width == 1
             ? LaunchChannels(kOp, BatchNormFwdKernel<T, 1>, stream, plan, own, args, plan)
             : LaunchChannels(kOp, BatchNormFwdKernel<T, kVec<T>>, stream, plan, own, args, plan);
}

}  // namespace

ffi::Error BatchNormFwd(CudaContext stream, const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(stream, args); });
}

}  // namespace gradops
