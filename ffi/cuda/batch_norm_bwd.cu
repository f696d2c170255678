// Batch norm backward, CUDA: one kernel, dy and x to sums to dx.
//
// First pass: each thread adds up, of each column of its packs, dz and dz * (x - mean). Blocks'
// sums go to the workspace. Behind a barrier they are added up, in a fixed order, as forward's are.
// Then dx is computed, from the last pack back to the first: the last ones are in the L2 cache, and
// the first ones, dz and x, in shared memory.
// dx or dresidual may be dy's buffer: every element is read by the thread that writes it, before it
// does.
//
// Traffic: dy, x and (of relu, where it is given) y read twice, but for what caches and shared
// memory hold; dx written, and dresidual: by the first pass, so that the second one reads it
// instead of dy and y. How elements are divided: cuda/batch_norm_plan.h.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/batch_norm_apply.cuh"
#include "cuda/batch_norm_grad.cuh"
#include "cuda/batch_norm_stream.cuh"
#include "cuda/batch_norm_sums.cuh"
#include "cuda/batch_norm_tiles.cuh"
#include "cuda/column_sum.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

constexpr int kGradRingsPerSum = 16;
template <typename T, int W>
using BackwardRings = PackRings<T, W, 2, W == 1 ? kElementSteps : kBackwardSteps>;  // dz and x
constexpr int kInputGradPacksApart = 2;  // of a thread and an array, in a kernel of its own

// --- Sums ----------------------------------------------------------------------------------------

template <typename T, int W, Mask kMask>
__device__ __forceinline__ void FirstPass(const BatchNormBwdArgs& args, const GradArrays<T>& arrays,
                                          const ChannelPlan& plan,
                                          const ChannelPartials<Accum<T>, 2>& partials,
                                          char* scratch, BackwardRings<T, W>& rings) {
  using A = Accum<T>;
  ForParts<false>(plan, [&](const ChannelPart& part, bool) {
    A parameters[3][W];
    const auto find_parameters = [&] {
      LoadParameters(
          plan, part, reinterpret_cast<A*>(scratch), false,
          [&](std::int64_t group, std::int64_t channel, A(&numbers)[3]) {
            const Affine<A> affine(args, group, channel);
            numbers[0] = affine.mean, numbers[1] = affine.factor, numbers[2] = affine.offset;
          },
          parameters);
    };
    ThreadSums<A, W> sums;
    const auto add = [&](A(&dz)[W], A(&x)[W], const A(&y)[W]) {
      MaskGrad<kMask>(parameters[0], parameters[1], parameters[2], y, x, dz);
#pragma unroll
      for (int j = 0; j < W; ++j) sums.Add(j, dz[j], dz[j] * x[j]);
    };

    int turns = 0;
    ForPacks<false>(
        plan, part, rings, false,
        [&](auto&& place, std::int64_t start, bool) {
          CopyGrad<kMask>(arrays, start, false, place);
        },
        find_parameters,
        [&](auto&& place, std::int64_t start) {
          A dz[W], x[W], y[W];
          WidenGrad<kMask>(place, dz, x, y);
          add(dz, x, y);
          if constexpr (kMask != Mask::kNone) {
            const Pack<T, W> masked = Narrow<T>(dz);
            place.Put(0, masked);
            if (kMask == Mask::kOfY && arrays.dresidual != nullptr) {
              StorePack(arrays.dresidual + start, masked);
            }
          }
        },
        [&] {
          if (++turns % kGradRingsPerSum == 0) sums.EndSum();
        });
    ForEdges<W>(plan, part, [&](const ChannelSpan& span) {
      A dz[W], x[W], y[W];
      LoadGrad<kMask>(arrays, span, dz, x, y);
      add(dz, x, y);
      if constexpr (kMask == Mask::kOfY) {
        if (arrays.dresidual != nullptr) StoreSpan(arrays.dresidual, span, dz);
      }
    });
    sums.EndSum();

    BeginCounters(plan, part, partials);
    const std::int64_t slot = plan.NumberOf(part, static_cast<int>(blockIdx.x));
    SumPart(plan, part, scratch, sums, 0, [&](int channel, const double2& total, double) {
      partials.at(part.group, slot, part.channel + channel) = {static_cast<A>(total.x),
                                                               static_cast<A>(total.y)};
    });
  });
}

// Gradients of the parameters, and, as a channel's first partial result, its level and slope; for
// another kernel, the other numbers that dx is made of, too, as the second and the third. Of a
// block's only tile, all of them as `parameters` in shared memory.
template <typename A>
__device__ __forceinline__ void Finish(const BatchNormBwdArgs& args, const ChannelPlan& plan,
                                       const ChannelPartials<A, 2>& partials, bool apart,
                                       A* parameters) {
  const double terms = static_cast<double>(args.shape.outer.rows) * static_cast<double>(plan.inner);
  ForChannelSums<2>(
      plan, args.shape.outer.groups, partials,
      [&](std::int64_t group, std::int64_t channel) { return Affine<A>(args, group, channel); },
      [](double (&sums)[2], const ChannelPartial<A, 2>& part, const Affine<A>&) {
        sums[0] += static_cast<double>(part.v[0]), sums[1] += static_cast<double>(part.v[1]);
      },
      [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel,
          const double (&sums)[2], const Affine<A>& affine) {
        const bool stores = tile.first == 0;
        const double of_x_hat = (sums[1] - static_cast<double>(affine.delta) * sums[0]) *
                                static_cast<double>(affine.rstd);
        const std::int64_t i = group * plan.channels + channel;
        if (stores && args.dscale.data != nullptr) {
          StoreAs(args.dscale.data, args.dscale.dtype, i, of_x_hat);
        }
        if (stores && args.dbias.data != nullptr) {
          StoreAs(args.dbias.data, args.dbias.dtype, i, sums[0]);
        }
        const Slope<A> line(static_cast<A>(sums[0] / terms), static_cast<A>(of_x_hat / terms),
                            affine.rstd, affine.delta);
        if (plan.has_own_numbers()) {
          A numbers[kDxNumbers];
          SetDxNumbers(affine, line, numbers);
          PutParameters(plan, static_cast<int>(channel - tile.channel), numbers, parameters);
        } else {
          partials.at(group, 0, channel) = {line.level, line.slope};
          if (!apart) return;
          partials.at(group, 1, channel) = {affine.mean, affine.factor};
          partials.at(group, 2, channel) = {affine.offset, 0};
        }
      });
}

// --- dx ------------------------------------------------------------------------------------------

template <typename T, int W, Mask kMask>
__device__ __forceinline__ void SecondPass(const BatchNormBwdArgs& args,
                                           const GradArrays<T>& arrays, const ChannelPlan& plan,
                                           const ChannelPartials<Accum<T>, 2>& partials,
                                           char* scratch, BackwardRings<T, W>& rings) {
  using A = Accum<T>;
  T* const dx = static_cast<T*>(args.dx);
  ForParts<true>(plan, [&](const ChannelPart& part, bool last) {
    A parameters[kDxNumbers][W];
    auto& [mean, factor, offset, level, slope] = parameters;
    const auto find_parameters = [&] {
      LoadParameters(
          plan, part, reinterpret_cast<A*>(scratch),
          args.mean_dz.data == nullptr && plan.has_own_numbers(),
          [&](std::int64_t group, std::int64_t channel, A(&numbers)[kDxNumbers]) {
            const bool given = args.mean_dz.data != nullptr;
            ChannelPartial<A, 2> line{};
            if (!given) line = partials.Load(group, 0, channel);
            const Affine<A> affine(args, group, channel);
            if (given) {
              const Slope<A> own(ParamAt<A>(args.mean_dz, group, channel, 0),
                                 ParamAt<A>(args.mean_dz_x_hat, group, channel, 0), affine.rstd,
                                 affine.delta);
              line = {own.level, own.slope};
            }
            SetDxNumbers(affine, {line.v[0], line.v[1]}, numbers);
          },
          parameters);
      ForEdges<W>(plan, part, [&](const ChannelSpan& span) {
        A dz[W], x[W], y[W];
        LoadGrad<kMask>(arrays, span, dz, x, y);
        MaskGrad<kMask>(mean, factor, offset, y, x, dz);
        ApplyInputGrad(parameters, dz, x);
        StoreSpan(dx, span, x);
        if (arrays.dresidual != nullptr) StoreSpan(arrays.dresidual, span, dz);
      });
    };

    const auto copy = [&](auto&& place, std::int64_t start, bool stays) {
      CopyGrad<kMask>(arrays, start, stays, place);
    };
    const auto use = [&](auto&& place, std::int64_t start) {
      A dz[W], x[W], y[W];
      WidenGrad<kMask>(place, dz, x, y);
      MaskGrad<kMask>(mean, factor, offset, y, x, dz);
      ApplyInputGrad(parameters, dz, x);
      StoreLast(dx, start, Narrow<T>(x));
      if (arrays.dresidual != nullptr) StoreLast(arrays.dresidual, start, Narrow<T>(dz));
    };
    ForSecondPass(plan, part, rings, last && args.mean_dz.data == nullptr,
                  RingCounter(plan, part, partials, static_cast<int>(threadIdx.x) / kWarp), copy,
                  find_parameters, use);
  });
}

template <typename T, int W, bool kPlane, Mask kMask>
__global__ void __launch_bounds__(kChannelThreads, 1)
    BatchNormBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                       const __grid_constant__ ChannelPlan any_plan, bool apart) {
  extern __shared__ __align__(128) char shared[];
  const ChannelPlan plan = any_plan.As<kPlane, W>();
  BackwardRings<T, W> rings(plan, shared);
  const ChannelPartials<Accum<T>, 2> partials(args.workspace, args.partial_rows, plan.channels);
  GradArrays<T> arrays{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                       static_cast<const T*>(args.y), static_cast<T*>(args.dresidual)};
  if (args.mean_dz.data == nullptr) {
    if (args.dx == nullptr) arrays.dresidual = nullptr;
    FirstPass<T, W, kMask>(args, arrays, plan, partials, shared, rings);
    MeetBlocks(plan);  // partial sums are written
    Finish(args, plan, partials, apart, reinterpret_cast<Accum<T>*>(shared));
    if (args.dx == nullptr || apart) return;
    if (!plan.own_sums) cooperative_groups::this_grid().sync();  // levels and slopes are
    if constexpr (kMask == Mask::kOfY) {
      // It is dz, which another block may have written before the barrier: so it must not be read
      // through the L1 cache.
      if (arrays.dresidual != nullptr) {
        arrays.dy = arrays.dresidual, arrays.dresidual = nullptr;
        SecondPass<T, W, Mask::kNone>(args, arrays, plan, partials, shared, rings);
        return;
      }
    }
  }
  SecondPass<T, W, kMask>(args, arrays, plan, partials, shared, rings);
}

// dx where the other kernel has left what it is made of.
template <typename T, int W, Mask kMask>
__global__ void __launch_bounds__(kApplyThreads, 3)
    BatchNormInputGradKernel(const __grid_constant__ BatchNormBwdArgs args,
                             const GradArrays<T> arrays, const __grid_constant__ ApplyPlan plan) {
  using A = Accum<T>;
  const ChannelPartials<A, 2> partials(args.workspace, args.partial_rows, plan.channels);
  GradPacks<T, W, kMask> packs[kInputGradPacksApart] = {};
  ForApplyPacks<kInputGradPacksApart, kDxNumbers, A, W>(
      plan,
      [&](std::int64_t group, std::int64_t channel, A(&numbers)[kDxNumbers]) {
        const ChannelPartial<A, 2> line = partials.at(group, 0, channel);
        const ChannelPartial<A, 2> affine = partials.at(group, 1, channel);
        numbers[kDxMean] = affine.v[0], numbers[kDxFactor] = affine.v[1];
        numbers[kDxLevel] = line.v[0], numbers[kDxSlope] = line.v[1];
        numbers[kDxOffset] = kMask == Mask::kOfX ? partials.at(group, 2, channel).v[0] : A{0};
      },
      [&](int k, bool wanted, std::int64_t start) {
        LoadGrad<kMask>(arrays, wanted, start, packs[k]);
      },
      [&](int k, std::int64_t start, const A(&numbers)[kDxNumbers][W]) {
        A dz[W], x[W], y[W];
        Widen(packs[k].dy, dz);
        Widen(packs[k].x, x);
        if constexpr (kMask == Mask::kOfY) Widen(packs[k].y, y);
        MaskGrad<kMask>(numbers[kDxMean], numbers[kDxFactor], numbers[kDxOffset], y, x, dz);
        ApplyInputGrad(numbers, dz, x);
        StoreLast(static_cast<T*>(args.dx), start, Narrow<T>(x));
        if (arrays.dresidual != nullptr) StoreLast(arrays.dresidual, start, Narrow<T>(dz));
      });
}

template <typename T>
ffi::Error Backward(cudaStream_t stream, const BatchNormBwdArgs& args) {
  constexpr const char* kOp = "batch_norm_bwd";
  const bool own = args.mean_dz.data == nullptr;
  if (args.shape.elements() == 0) {
    ColumnSums sums;
    sums.Add(args.dscale);
    sums.Add(args.dbias);
    return ToError(
        kOp, ZeroColumnSums(stream, sums, args.shape.outer.groups, args.shape.outer.features));
  }
  if (args.dx == nullptr && (!own || (args.dscale.data == nullptr && args.dbias.data == nullptr))) {
    return ffi::Error::Success();
  }
  ChannelTask task = ChannelTaskOf<T>(args.shape);
  const void* const y = args.relu ? args.y : nullptr;
  task.aligned = Aligned(args.dy, args.x, y, args.dx) &&
                 Aligned(args.dx == nullptr ? nullptr : args.dresidual);
  task.statistics = own, task.apply = args.dx != nullptr;
  task.arrays = 2, task.parameters = 5, task.partial_rows = args.partial_rows;
  task.partial_numbers = 2;
  task.ring_steps = kBackwardSteps, task.other_arrays = y == nullptr ? 0 : 1;
  ChannelPlan plan = ChooseChannelPlan(task);
  // Where there is no second pass, too: so sums have the same bits.
  task.apart = own && ApplyApart(task, plan, OnChipBytes());
  const bool apart = task.apart && task.apply;
  if (task.apart) task.apply = false, plan = ChooseChannelPlan(task);
  const auto launch = [&]<Mask kMask>() {
    const ffi::Error error = DispatchPlan<kVec<T>>(plan, [&]<int W, bool kPlane>() {
      return LaunchChannels(kOp, BatchNormBwdKernel<T, W, kPlane, kMask>, stream, plan, args,
                            apart);
    });
    if (error.failure() || !apart) return error;
    const auto apply = [&]<Mask kLeft>(const GradArrays<T>& arrays) {
      const ApplyPlan apply_plan(task, kVec<T>, kInputGradPacksApart);
      return LaunchApply(kOp, BatchNormInputGradKernel<T, kVec<T>, kLeft>, stream, apply_plan,
                         task.groups, args, arrays, apply_plan);
    };
    const auto* const x = static_cast<const T*>(args.x);
    auto* const dresidual = static_cast<T*>(args.dresidual);
    if (kMask == Mask::kOfY && dresidual != nullptr) {  // it is dz
      return apply.template operator()<Mask::kNone>({dresidual, x, nullptr, nullptr});
    }
    return apply.template operator()<kMask>(
        {static_cast<const T*>(args.dy), x, static_cast<const T*>(args.y), dresidual});
  };
  if (!args.relu) return launch.template operator()<Mask::kNone>();
  return y != nullptr ? launch.template operator()<Mask::kOfY>()
                      : launch.template operator()<Mask::kOfX>();
}

}  // namespace

ffi::Error BatchNormBwd(CudaContext stream, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype,
                       [&]<typename T>() { return Backward<T>(stream, args); });
}

}  // namespace gradops
