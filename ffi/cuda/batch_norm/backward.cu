// Batch norm backward, CUDA: one kernel computes the sums from dy and x, and then dx.
//
// First pass: each thread adds up dz and dz * (x - mean) for each column of its packs. Blocks write
// their sums to the workspace. After a barrier these are added up in a fixed order, as in forward.
// Second pass: dx is computed, from the last pack back to the first. The last packs are in the L2
// cache. The first packs, dz and x, are in shared memory.
// dx or dresidual may be dy's buffer: the thread that writes an element has read it before.
//
// Traffic: dy, x and relu's y (if it is given) are read twice, except what caches and shared memory
// hold. dx is written. If y is given, the first pass writes dresidual, and the second pass reads
// dresidual instead of dy and y. How elements are divided: cuda/batch_norm/plan.h.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/batch_norm/grad.cuh"
#include "cuda/batch_norm/stream.cuh"
#include "cuda/batch_norm/sums.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/column_sum.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

constexpr int kGradRingsPerSum = 16;

// --- Sums ----------------------------------------------------------------------------------------

template <Mask kMask, typename T, int W, int kSteps>
__device__ __forceinline__ void FirstPass(const BatchNormBwdArgs& args, const GradArrays<T>& arrays,
                                          const ChannelPlan& plan,
                                          const ChannelPartials<Accum<T>, 2>& partials,
                                          char* scratch, PackRings<T, W, 2, kSteps>& rings) {
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
        plan, part, rings, plan.PassingSteps(part), false,
        [&](auto&& place, std::int64_t start, bool passing) {
          place.Copy(0, arrays.dy + start, passing), place.Copy(1, arrays.x + start, passing);
          if constexpr (kMask == Mask::kOfY) place.CopyOther(arrays.y + start);
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

// Stores the gradients of the parameters. Level and slope of a channel replace its first partial
// result. If the block has one tile only, all DxNumbers go to `parameters` in shared memory.
template <typename A>
__device__ __forceinline__ void Finish(const BatchNormBwdArgs& args, const ChannelPlan& plan,
                                       const ChannelPartials<A, 2>& partials, A* parameters) {
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
        const Slope<A> line(static_cast<A>(sums[0] * plan.inverse_elements),
                            static_cast<A>(of_x_hat * plan.inverse_elements), affine.rstd,
                            affine.delta);
        if (plan.has_own_numbers()) {
          A numbers[kDxNumbers];
          SetDxNumbers(affine, line, numbers);
          PutParameters(plan, static_cast<int>(channel - tile.channel), numbers, parameters);
        } else {
          partials.at(group, 0, channel) = {line.level, line.slope};
        }
      });
}

// --- dx ------------------------------------------------------------------------------------------

template <Mask kMask, typename T, int W, int kSteps>
__device__ __forceinline__ void SecondPass(const BatchNormBwdArgs& args,
                                           const GradArrays<T>& arrays, const ChannelPlan& plan,
                                           const ChannelPartials<Accum<T>, 2>& partials,
                                           char* scratch, PackRings<T, W, 2, kSteps>& rings) {
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

template <typename T, int W, bool kPlane, int kSteps, Mask kMask>
__global__ void __launch_bounds__(kChannelThreads, 1)
    BatchNormBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                       const __grid_constant__ ChannelPlan any_plan) {
  extern __shared__ __align__(128) char shared[];
  const ChannelPlan plan = any_plan.As<kPlane, W>();
  PackRings<T, W, 2, kSteps> rings(plan, shared);  // rings of dz and x
  const ChannelPartials<Accum<T>, 2> partials(args.workspace, args.partial_rows, plan.channels);
  GradArrays<T> arrays{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                       static_cast<const T*>(args.y), static_cast<T*>(args.dresidual)};
  if (args.mean_dz.data == nullptr) {
    if (args.dx == nullptr) arrays.dresidual = nullptr;
    FirstPass<kMask>(args, arrays, plan, partials, shared, rings);
    MeetBlocks(plan);  // partial sums are written
    Finish(args, plan, partials, reinterpret_cast<Accum<T>*>(shared));
    if (args.dx == nullptr) return;
    if (!plan.own_sums) cooperative_groups::this_grid().sync();  // levels and slopes are written
    if constexpr (kMask == Mask::kOfY) {
      // dresidual is dz. Another block may have written it before the barrier, so it must not be
      // read through the L1 cache.
      if (arrays.dresidual != nullptr) {
        arrays.dy = arrays.dresidual, arrays.dresidual = nullptr;
        SecondPass<Mask::kNone>(args, arrays, plan, partials, shared, rings);
        return;
      }
    }
  }
  SecondPass<kMask>(args, arrays, plan, partials, shared, rings);
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
  ChannelTask task = ChannelTaskOf<T>(kBackwardNeeds, args.shape);
  const void* const y = args.relu ? args.y : nullptr;
  task.aligned = Aligned(args.dy, args.x, y, args.dx) &&
                 Aligned(args.dx == nullptr ? nullptr : args.dresidual);
  task.statistics = own, task.apply = args.dx != nullptr;
  task.other_arrays = y == nullptr ? 0 : 1, task.partial_rows = args.partial_rows;
  const ChannelPlan plan = ChooseChannelPlan(task);
  const auto launch = [&]<Mask kMask>() {
    return DispatchPlan<kVec<T>, kBackwardNeeds>(plan, [&]<int W, bool kPlane, int kSteps>() {
      return LaunchChannels(kOp, BatchNormBwdKernel<T, W, kPlane, kSteps, kMask>, stream, plan,
                            args);
    });
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
