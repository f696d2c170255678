// Batch norm backward, CUDA: one kernel computes the sums from dy and x, and then dx.
//
// First pass: each thread adds up dz and dz * (x - mean) for each column of its vectors. Partial
// sums are combined as in forward. Second pass: dx is computed, from the last vector back to the
// first. dx or dresidual may be dy's buffer: the thread that writes an element has read it before.
//
// Traffic: dy, x and relu's y (if it is given) are read twice, except what caches and shared memory
// hold. dx is written. If y is given, the first pass writes dresidual, and the second pass reads
// dresidual instead of dy and y. Bundles that are taken in one pass have kernels of their own,
// which add up dz and dz * x_hat. README.md has the words.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/batch_norm/bundle.cuh"
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/stages.cuh"
#include "cuda/batch_norm/sums.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/column_sum.cuh"
#include "cuda/common/vector.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

constexpr int kGradChunksPerSum = 16;

// --- An element ----------------------------------------------------------------------------------

// The arrays of a pass; dresidual is null if the pass does not write dresidual.
template <typename T>
struct GradArrays {
  const T *dy, *x, *y;
  T* dresidual;
};

// Load the vectors of a stage, or an edge vector.
template <Mask kMask, typename A, int W>
__device__ __forceinline__ void LoadGrad(const auto& place, A (&dy)[W], A (&x)[W], A (&y)[W]) {
  Widen(place.Get(0), dy);
  Widen(place.Get(1), x);
  if constexpr (kMask == Mask::kOfY) Widen(place.GetTransient(), y);
}
template <Mask kMask, typename T, typename A, int W>
__device__ __forceinline__ void LoadGrad(const GradArrays<T>& arrays, const EdgeVector& edge,
                                         A (&dy)[W], A (&x)[W], A (&y)[W]) {
  LoadEdge(arrays.dy, edge, dy);
  LoadEdge(arrays.x, edge, x);
  if constexpr (kMask == Mask::kOfY) LoadEdge(arrays.y, edge, y);
}

// The numbers of a channel that dx is computed from. Batch norm has one number less, as its sums
// are of one channel:
//   batch norm: dx = (dz - level - (x - mean) * slope) * factor,
//   group norm: dx = (dz * scale - level - (x - mean) * rstd * slope) * rstd.
enum DxNumbers { kDxMean, kDxFactor, kDxOffset, kDxLevel, kDxSlope, kDxScale, kDxNumbers };
constexpr int kDxRstd = kDxFactor;  // in group norm
static_assert(kDxNumbers == kBackwardNeeds.parameters);
template <bool kGrouped>
inline constexpr int kNumbersFor = kGrouped ? kDxNumbers : kDxScale;

template <typename A>
struct Line {
  A level, slope;
};

// A channel's numbers without its line.
template <typename A, bool kGrouped>
struct Affine {
  A mean, rstd, delta, scale, offset;

  __device__ __forceinline__ Affine(const BatchNormBwdArgs& args, const ChannelPlan& plan,
                                    std::int64_t group, std::int64_t channel) {
    const std::int64_t bundle = plan.BundleOf(channel);
    mean = ParamAt<A>(args.mean, group, bundle, 0);
    rstd = ParamAt<A>(args.rstd, group, bundle, 0);
    delta = ParamAt<A>(args.delta, group, bundle, 0);
    scale = ParamAt<A>(args.scale, group, channel, 1);
    offset = ParamAt<A>(args.bias, group, channel, 0) - delta * (rstd * scale);
  }
  // The line that follows from the means of dz and dz * x_hat; in group norm, of scale * dz and
  // scale * dz * x_hat.
  __device__ __forceinline__ Line<A> LineOf(A mean_dz, A mean_dz_x_hat) const {
    const A slope = mean_dz_x_hat * rstd;
    return {mean_dz - delta * slope, kGrouped ? mean_dz_x_hat : slope};
  }
  __device__ __forceinline__ void SetNumbers(const Line<A>& line,
                                             A (&numbers)[kNumbersFor<kGrouped>]) const {
    numbers[kDxMean] = mean, numbers[kDxOffset] = offset;
    numbers[kDxLevel] = line.level, numbers[kDxSlope] = line.slope;
    if constexpr (kGrouped) {
      numbers[kDxRstd] = rstd, numbers[kDxScale] = scale;
    } else {
      numbers[kDxFactor] = rstd * scale;
    }
  }
};

// Turns dy into dz and x into dx.
template <Mask kMask, bool kGrouped, typename T, int W, typename A = Accum<T>>
__device__ __forceinline__ void ApplyGrad(const A (&numbers)[kNumbersFor<kGrouped>][W],
                                          const A (&y)[W], A (&dy)[W], A (&x)[W]) {
  if constexpr (!kGrouped) {
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] -= numbers[kDxMean][j];
    MaskGrad<kMask, T>(x, numbers[kDxFactor], numbers[kDxOffset], y, dy);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      x[j] = (dy[j] - numbers[kDxLevel][j] - x[j] * numbers[kDxSlope][j]) * numbers[kDxFactor][j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < W; ++j) x[j] = (x[j] - numbers[kDxMean][j]) * numbers[kDxRstd][j];
    MaskGrad<kMask, T>(x, numbers[kDxScale], numbers[kDxOffset], y, dy);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      x[j] = (dy[j] * numbers[kDxScale][j] - numbers[kDxLevel][j] - x[j] * numbers[kDxSlope][j]) *
             numbers[kDxRstd][j];
    }
  }
}

// --- Sums ----------------------------------------------------------------------------------------

template <Mask kMask, bool kGrouped, typename T, int W, int kSteps>
__device__ __forceinline__ void FirstPass(const BatchNormBwdArgs& args, const GradArrays<T>& arrays,
                                          const ChannelPlan& plan,
                                          const ChannelPartials<Accum<T>, 2>& partials,
                                          char* scratch, Stages<T, W, 2, kSteps>& stages) {
  using A = Accum<T>;
  ForParts<false>(plan, [&](const ChannelPart& part, bool) {
    A parameters[3][W];
    const auto find_parameters = [&] {
      LoadNumbers(
          plan, part, reinterpret_cast<A*>(scratch), false,
          [&](std::int64_t group, std::int64_t channel, A(&numbers)[3]) {
            const Affine<A, kGrouped> affine(args, plan, group, channel);
            numbers[0] = affine.mean, numbers[1] = affine.rstd * affine.scale;
            numbers[2] = affine.offset;
          },
          parameters);
    };
    ThreadSums<A, W> sums;
    const auto add = [&](A(&dz)[W], A(&x)[W], const A(&y)[W]) {
#pragma unroll
      for (int j = 0; j < W; ++j) x[j] -= parameters[0][j];
      MaskGrad<kMask, T>(x, parameters[1], parameters[2], y, dz);
#pragma unroll
      for (int j = 0; j < W; ++j) sums.Add(j, dz[j], dz[j] * x[j]);
    };

    int chunks = 0;
    ForVectors<false>(
        plan, part, stages, plan.EvictFirstSteps(part), false,
        [&](auto&& place, std::int64_t start, bool evict_first) {
          place.Copy(0, arrays.dy + start, evict_first);
          place.Copy(1, arrays.x + start, evict_first);
          if constexpr (kMask == Mask::kOfY) place.CopyTransient(arrays.y + start);
        },
        find_parameters,
        [&](auto&& place, std::int64_t start) {
          A dz[W], x[W], y[W];
          LoadGrad<kMask>(place, dz, x, y);
          add(dz, x, y);
          if constexpr (kMask == Mask::kOfX || kMask == Mask::kOfY) {
            const Vector<T, W> masked = Narrow<T>(dz);
            place.Put(0, masked);
            if (kMask == Mask::kOfY && arrays.dresidual != nullptr) {
              StoreVector(arrays.dresidual + start, masked);
            }
          }
        },
        [&] {
          if (++chunks % kGradChunksPerSum == 0) sums.EndSum();
        });
    ForEdges<W>(plan, part, [&](const EdgeVector& edge) {
      A dz[W], x[W], y[W];
      LoadGrad<kMask>(arrays, edge, dz, x, y);
      add(dz, x, y);
      if constexpr (kMask == Mask::kOfY) {
        if (arrays.dresidual != nullptr) StoreEdge(arrays.dresidual, edge, dz);
      }
    });
    sums.EndSum();

    BeginCounters(plan, part, partials);
    const std::int64_t row = plan.NumberOf(part, static_cast<int>(blockIdx.x));
    SumPart(plan, part, scratch, sums, 0, [&](int channel, const double2& total, double) {
      partials.at(part.group, row, part.channel + channel) = {static_cast<A>(total.x),
                                                              static_cast<A>(total.y)};
    });
  });
}

// Adds up the partial results, stores the sums, and sets the numbers for dx. Level and slope of a
// channel replace its first partial result. If the block has one tile only, all DxNumbers go to
// `shared`.
template <typename A, bool kGrouped>
struct GradFinish {
  using ChannelAffine = Affine<A, kGrouped>;
  using Partials = ChannelPartials<A, 2>;
  const BatchNormBwdArgs& args;
  const ChannelPlan& plan;
  const Partials& partials;
  A* const shared;

  static __device__ __forceinline__ void Add(double (&sums)[2],
                                             const typename Partials::Partial& part) {
    sums[0] += static_cast<double>(part.v[0]), sums[1] += static_cast<double>(part.v[1]);
  }
  // Stores a channel's sums as the gradients of its parameters, and multiplies them by scale.
  __device__ __forceinline__ void EndChannel(const ChannelPart& tile, std::int64_t group,
                                             std::int64_t channel, A scale,
                                             const ChannelAffine& affine, double (&sums)[2]) const {
    sums[1] =
        (sums[1] - static_cast<double>(affine.delta) * sums[0]) * static_cast<double>(affine.rstd);
    const std::int64_t i = group * plan.channels + channel;
    const auto store = [&](const ParamGrad& grad, double value) {
      if (tile.first == 0 && grad.data != nullptr) StoreAs(grad.data, grad.dtype, i, value);
    };
    store(args.dscale, sums[1]), store(args.dbias, sums[0]);
    if (kGrouped) sums[0] *= static_cast<double>(scale), sums[1] *= static_cast<double>(scale);
  }
  // Stores the sums of a bundle. Returns its line.
  __device__ __forceinline__ Line<A> EndBundle(bool stores, std::int64_t group,
                                               std::int64_t channel, const ChannelAffine& affine,
                                               const double (&sums)[2]) const {
    if (kGrouped && stores && args.sum_dz != nullptr) {
      const std::int64_t i = plan.BundleOf(group * plan.channels + channel);
      static_cast<A*>(args.sum_dz)[i] = static_cast<A>(sums[0]);
      static_cast<A*>(args.sum_dz_x_hat)[i] = static_cast<A>(sums[1]);
    }
    return affine.LineOf(static_cast<A>(sums[0] * plan.inverse_elements),
                         static_cast<A>(sums[1] * plan.inverse_elements));
  }
  __device__ __forceinline__ void Set(const ChannelPart& tile, std::int64_t group,
                                      std::int64_t channel, const Line<A>& line,
                                      const ChannelAffine& affine) const {
    if (plan.has_one_tile()) {
      A numbers[kNumbersFor<kGrouped>];
      affine.SetNumbers(line, numbers);
      PutNumbers(plan, static_cast<int>(channel - tile.channel), numbers, shared);
    } else {
      partials.at(group, 0, channel) = {line.level, line.slope};
    }
  }

  __device__ __forceinline__ void OfChannels() const {
    ForChannelSums(
        plan, args.shape.outer.groups, partials,
        [&](std::int64_t group, std::int64_t channel) {
          return ChannelAffine(args, plan, group, channel);
        },
        [](double (&sums)[2], const auto& part, const ChannelAffine&) { Add(sums, part); },
        [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel, double (&sums)[2],
            const ChannelAffine& affine) {
          EndChannel(tile, group, channel, affine.scale, affine, sums);
          Set(tile, group, channel, EndBundle(tile.first == 0, group, channel, affine, sums),
              affine);
        });
  }
  __device__ __forceinline__ void OfBundles() const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ForBundleSums(
        plan, args.shape.outer.groups, partials,
        [&](std::int64_t group, std::int64_t channel) {
          return ChannelAffine(args, plan, group, channel);
        },
        [](double (&sums)[2], const auto& part, const ChannelAffine&) { Add(sums, part); },
        [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel, double (&sums)[2],
            double (&totals)[2], const ChannelAffine& affine) {
          const A scale = ParamAt<A>(args.scale, group, channel, 1);
          EndChannel(tile, group, channel, scale, affine, sums);
          totals[0] += sums[0], totals[1] += sums[1];
        },
        [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel,
            const double (&totals)[2], const ChannelAffine& affine) {
          const bool stores = tile.first == 0 && lane == 0;
          const Line<A> line = EndBundle(stores, group, channel, affine, totals);
          for (std::int64_t i = channel + lane; i < channel + plan.bundle; i += kWarp) {
            Set(tile, group, i, line, ChannelAffine(args, plan, group, i));
          }
        });
  }
};

// --- dx ------------------------------------------------------------------------------------------

template <Mask kMask, bool kGrouped, typename T, int W, int kSteps>
__device__ __forceinline__ void SecondPass(const BatchNormBwdArgs& args,
                                           const GradArrays<T>& arrays, const ChannelPlan& plan,
                                           const ChannelPartials<Accum<T>, 2>& partials,
                                           char* scratch, Stages<T, W, 2, kSteps>& stages) {
  using A = Accum<T>;
  T* const dx = static_cast<T*>(args.dx);
  ForParts<true>(plan, [&](const ChannelPart& part, bool last) {
    A numbers[kNumbersFor<kGrouped>][W];
    const auto table = [&](std::int64_t group, std::int64_t channel,
                           A(&of_channel)[kNumbersFor<kGrouped>]) {
      const bool given = args.mean_dz.data != nullptr;
      Line<A> line{};
      if (!given) {
        const auto found = partials.Load(group, 0, channel);
        line = {found.v[0], found.v[1]};
      }
      const Affine<A, kGrouped> affine(args, plan, group, channel);
      if (given) {
        const A weight = kGrouped && !args.weighted ? affine.scale : A{1};
        const std::int64_t bundle = plan.BundleOf(channel);
        line = affine.LineOf(weight * ParamAt<A>(args.mean_dz, group, bundle, 0),
                             weight * ParamAt<A>(args.mean_dz_x_hat, group, bundle, 0));
      }
      affine.SetNumbers(line, of_channel);
    };
    const auto find_numbers = [&] {
      LoadNumbers(plan, part, reinterpret_cast<A*>(scratch),
                  args.mean_dz.data == nullptr && plan.has_one_tile(), table, numbers);
      ForEdges<W>(plan, part, [&](const EdgeVector& edge) {
        A dz[W], x[W], y[W];
        LoadGrad<kMask>(arrays, edge, dz, x, y);
        ApplyGrad<kMask, kGrouped, T>(numbers, y, dz, x);
        StoreEdge(dx, edge, x);
        if (arrays.dresidual != nullptr) StoreEdge(arrays.dresidual, edge, dz);
      });
    };
    const auto copy = [&](auto&& place, std::int64_t start, bool there) {
      if (!there) place.Copy(0, arrays.dy + start), place.Copy(1, arrays.x + start);
      if constexpr (kMask == Mask::kOfY) place.CopyTransient(arrays.y + start);
    };
    const auto use = [&](auto&& place, std::int64_t start) {
      A dz[W], x[W], y[W];
      LoadGrad<kMask>(place, dz, x, y);
      ApplyGrad<kMask, kGrouped, T>(numbers, y, dz, x);
      StoreLast(dx, start, Narrow<T>(x));
      if (arrays.dresidual != nullptr) StoreLast(arrays.dresidual, start, Narrow<T>(dz));
    };
    ForSecondPass(plan, part, stages, last && args.mean_dz.data == nullptr,
                  ChunkCounter(plan, part, partials, static_cast<int>(threadIdx.x) / kWarp), copy,
                  find_numbers, use);
  });
}

// --- Kernels and launchers -----------------------------------------------------------------------

template <typename T, int W, bool kPlane, int kSteps, bool kGrouped, Mask kMask>
__global__ void __launch_bounds__(kChannelThreads, 1)
    BatchNormBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                       const __grid_constant__ ChannelPlan any_plan) {
  extern __shared__ __align__(128) char shared[];
  const ChannelPlan plan = any_plan.As<kPlane, W, kGrouped>();
  Stages<T, W, 2, kSteps> stages(plan, shared);  // of dz and x
  const ChannelPartials<Accum<T>, 2> partials{args.workspace, args.partial_rows, plan.channels};
  GradArrays<T> arrays{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                       static_cast<const T*>(args.y), static_cast<T*>(args.dresidual)};
  if (args.mean_dz.data == nullptr) {
    if (args.dx == nullptr) arrays.dresidual = nullptr;
    FirstPass<kMask, kGrouped>(args, arrays, plan, partials, shared, stages);
    SyncBlocks(plan);  // partial sums are written
    const GradFinish<Accum<T>, kGrouped> finish{args, plan, partials,
                                                reinterpret_cast<Accum<T>*>(shared)};
    if (plan.bundle == 1) {
      finish.OfChannels();
    } else {
      finish.OfBundles();
    }
    if (args.dx == nullptr) return;
    if (!plan.combines_locally) {
      cooperative_groups::this_grid().sync();  // levels and slopes are written
    }
    if constexpr (kMask == Mask::kOfY) {
      // dresidual is dz. Another block may have written it before the barrier, so it must not be
      // read through the L1 cache.
      if (arrays.dresidual != nullptr) {
        arrays.dy = arrays.dresidual, arrays.dresidual = nullptr;
        SecondPass<Mask::kNone, kGrouped>(args, arrays, plan, partials, shared, stages);
        return;
      }
    }
  }
  SecondPass<kMask, kGrouped>(args, arrays, plan, partials, shared, stages);
}

template <typename T>
ffi::Error Backward(cudaStream_t stream, const BatchNormBwdArgs& args,
                    const ChannelDevice& device) {
  const bool own = args.mean_dz.data == nullptr;
  if (args.shape.elements() == 0) {
    ColumnSums sums;
    sums.Add(args.dscale);
    sums.Add(args.dbias);
    const ffi::Error error =
        ToError(kBackward,
                ZeroColumnSums(stream, sums, args.shape.outer.groups, args.shape.outer.features));
    if (error.failure() || args.sum_dz == nullptr) return error;
    const std::int64_t bundles = args.shape.outer.groups * args.bundles;
    for (void* const sum : {args.sum_dz, args.sum_dz_x_hat}) {
      const auto bytes = static_cast<std::size_t>(bundles) * sizeof(Accum<T>);
      const cudaError_t status = cudaMemsetAsync(sum, 0, bytes, stream);
      if (status != cudaSuccess) return ToError(kBackward, status);
    }
    return error;
  }
  if (args.dx == nullptr && (!own || (args.dscale.data == nullptr && args.dbias.data == nullptr))) {
    return ffi::Error::Success();
  }
  const void* const y = args.relu ? args.y : nullptr;
  ChannelTask task = TaskOf<T>(/*backward=*/true, args.shape, device);
  task.aligned = Aligned(args.dy, args.x, y, args.dx) &&
                 Aligned(args.dx == nullptr ? nullptr : args.dresidual);
  task.bundle = args.bundle, task.statistics = own, task.apply = args.dx != nullptr;
  task.transient_arrays = y == nullptr ? 0 : 1, task.partial_rows = args.partial_rows;
  if (const BundlePlan bundles = ChooseBundlePlan(task); y == nullptr && bundles.width > 0) {
    return BundlesBwd(stream, args, bundles);
  }
  const ChannelPlan plan = ChooseBatchNormPlan(task).channels;
  const bool grouped = args.bundle > 1 || args.silu || args.weighted;
  const auto launch = [&]<Mask kMask>() {
    return DispatchPlan<kVec<T>, kBackwardNeeds>(
        plan, grouped, [&]<int W, bool kPlane, int kSteps, bool kGrouped>() {
          if constexpr (kMask == Mask::kSilu ? !kGrouped
                                             : kMask == Mask::kOfY && kGrouped && W > 1) {
            return ffi::Error::Internal("batch_norm_bwd: no such kernel");  // never called
          } else {
            return LaunchChannels(kBackward,
                                  BatchNormBwdKernel<T, W, kPlane, kSteps, kGrouped, kMask>, stream,
                                  plan, device, args);
          }
        });
  };
  if (args.silu) return launch.template operator()<Mask::kSilu>();
  if (!args.relu) return launch.template operator()<Mask::kNone>();
  return y != nullptr ? launch.template operator()<Mask::kOfY>()
                      : launch.template operator()<Mask::kOfX>();
}

// BatchNormBwd for a GPU like `device`. Tests pass devices that differ from the current one.
ffi::Error BatchNormBwdOn(const ChannelDevice& device, cudaStream_t stream,
                          const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, kBackward, args.dtype,
                       [&]<typename T>() { return Backward<T>(stream, args, device); });
}

}  // namespace

ffi::Error BatchNormBwd(CudaContext stream, const BatchNormBwdArgs& args) {
  return BatchNormBwdOn(CurrentChannelDevice(), stream, args);
}

}  // namespace gradops
