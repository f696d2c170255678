// Batch norm forward, CUDA: one kernel computes the statistics of x, and then y.
//
// First pass: for each channel of its part, a block adds up distances from an origin, and their
// squares. Origin, mean, squared deviations and count go to the workspace. After a barrier, the
// parts of all channels of a bundle are combined in a fixed order. Usually each block combines the
// parts of its tiles. If tiles have many blocks, the channels are spread over all blocks, and a
// second barrier follows. Second pass: y is computed, from the last vector back to the first: the
// L2 cache has the last vectors.
//
// Traffic: x is read twice, except what caches and shared memory hold. y is written, the residual
// read. Bundles that are taken in one pass have kernels of their own. README.md has the words.
#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "common/stored_squares.h"
#include "cuda/batch_norm/bundle.cuh"
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/stages.cuh"
#include "cuda/batch_norm/sums.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

constexpr int kMomentChunksPerSum = 8;

// --- Statistics ----------------------------------------------------------------------------------

// The numbers that a part leaves for each channel. kMean is a distance from the origin. kSquares is
// a result of StoredSquares.
enum PartialMoments { kOrigin, kMean, kSquares, kCount, kMoments };
static_assert(kMoments == kForwardNeeds.partial_numbers);

// The origin of a channel's distances: a large mean then costs no digits. It is the median of three
// of the channel's elements in the part, because a single element may be far from the mean.
template <typename T>
__device__ __forceinline__ Accum<T> Origin(const T* x, const ChannelPlan& plan,
                                           const ChannelPart& part, int channel) {
  using A = Accum<T>;
  const A a = static_cast<A>(x[plan.Sample(part, channel, 0)]);
  const A b = static_cast<A>(x[plan.Sample(part, channel, 1)]);
  const A c = static_cast<A>(x[plan.Sample(part, channel, 2)]);
  const A origin = max(min(a, b), min(max(a, b), c));
  return isfinite(origin) ? origin : A{0};
}

// The sum of (x - center)^2 over the part's elements of a channel, in double. It is slow, and only
// for sums that have overflowed. Columns: the calling thread adds up all elements. Planes: a whole
// warp makes the call and divides the elements among its lanes.
template <int W, typename T>
__device__ __forceinline__ double LargeSquares(const T* x, const ChannelPlan& plan,
                                               const ChannelPart& part, int channel,
                                               double center) {
  const std::int64_t limit = plan.Limit(part);
  double sums[1] = {};
  const auto add = [&](std::int64_t i) {
    const double difference = static_cast<double>(static_cast<Accum<T>>(x[i])) - center;
    sums[0] += difference * difference;
  };
#pragma unroll 1
  for (std::int64_t i = 0; i < part.count; ++i) {
    const std::int64_t step = plan.StepOf(part, i);
    if (plan.plane) {
#pragma unroll 1
      for (int thread = static_cast<int>(threadIdx.x) % kWarp; thread < kChannelThreads;
           thread += kWarp) {
        const VectorPlace place = plan.PlaceOf(part, step, thread);
        const std::int64_t row = place.at - place.vector * W, start = plan.Start(place);
        const std::int64_t end = min(min(start + W, row + plan.inner), limit);
#pragma unroll 1
        for (std::int64_t j = max(start, row); j < end; ++j) add(j);
      }
    } else {
      std::int64_t row = part.element + step * plan.step_rows * plan.row_elements;
#pragma unroll 1
      for (int r = 0; r < plan.step_rows; ++r, row += plan.row_elements) {
#pragma unroll 1
        for (int k = 0; k < plan.ChannelColumns(); ++k) {
          const std::int64_t j = row + plan.ColumnOf(channel, k, part.channels);
          if (j < limit) add(j);
        }
      }
    }
  }
  if (plan.plane) WarpSums<kWarp>(sums);
  return sums[0];
}

template <typename T, int W, int kSteps>
__device__ __forceinline__ void FirstPass(const T* x, const ChannelPlan& plan,
                                          const ChannelPartials<Accum<T>, kMoments>& partials,
                                          char* scratch, Stages<T, W, 1, kSteps>& stages) {
  using A = Accum<T>;
  A* const origins = reinterpret_cast<A*>(scratch + plan.origins_offset);
  ForParts<false>(plan, [&](const ChannelPart& part, bool) {
    const std::int64_t group = part.group, first_channel = part.channel;
    A origin[1][W];
    const auto find_origins = [&] {
      LoadNumbers(
          plan, part, origins, false,
          [&](std::int64_t, std::int64_t channel, A(&numbers)[1]) {
            numbers[0] = Origin(x, plan, part, static_cast<int>(channel - first_channel));
          },
          origin);
    };
    ThreadSums<A, W> sums;
    const auto add = [&](int j, A value) {
      const A distance = value - origin[0][j];
      sums.Add(j, distance, distance * distance);
    };
    int elements = 0, chunks = 0;
    ForVectors<false>(
        plan, part, stages, plan.EvictFirstSteps(part), false,
        [&](auto&& place, std::int64_t start, bool evict_first) {
          place.Copy(0, x + start, evict_first);
        },
        find_origins,
        [&](auto&& place, std::int64_t) {
          A values[W];
          Widen(place.Get(0), values);
#pragma unroll
          for (int j = 0; j < W; ++j) add(j, values[j]);
          elements += W;
        },
        [&] {
          if (++chunks % kMomentChunksPerSum == 0) sums.EndSum();
        });
    ForEdges<W>(plan, part, [&](const EdgeVector& edge) {
      A values[W];
      LoadEdge(x, edge, values);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (edge.has(j)) add(j, values[j]);
      }
      elements += edge.last - edge.first;
    });
    sums.EndSum();

    BeginCounters(plan, part, partials);
    const std::int64_t row = plan.NumberOf(part, static_cast<int>(blockIdx.x));
    SumPart(plan, part, scratch, sums, elements,
            [&](int channel, const double2& sum, double count) {
              // A plane's last step may have edge vectors only, without any of its elements.
              const double mean = count > 0 ? sum.x * (1.0 / count) : 0.0;
              const A from = origins[plan.SharedIndex(channel)];
              double squares = sum.y - sum.x * mean;
              if (NeedsSecondLook<T>(sum)) {
                squares = LargeSquares<W>(x, plan, part, channel, static_cast<double>(from) + mean);
              }
              partials.at(group, row, first_channel + channel) = {
                  from, static_cast<A>(mean), StoredSquares<A>(squares < 0 ? 0.0 : squares),
                  static_cast<A>(count)};
            });
  });
}

// Combines the partial results, and stores the statistics. A channel's AffineNumbers replace its
// first partial result. If the block has one tile only, they go to `shared`.
template <typename A>
struct MomentsFinish {
  using Partials = ChannelPartials<A, kMoments>;
  using Partial = typename Partials::Partial;
  const BatchNormFwdArgs& args;
  const ChannelPlan& plan;
  const Partials& partials;
  A* const shared;

  // Adds distances from `first`'s mean.
  static __device__ __forceinline__ void Add(double (&sums)[2], const Partial& part,
                                             const Partial& first) {
    const auto difference = [&](PartialMoments which) {
      return static_cast<double>(part.v[which]) - static_cast<double>(first.v[which]);
    };
    const double mean = difference(kOrigin) + difference(kMean);
    const double count = static_cast<double>(part.v[kCount]);
    sums[0] += count * mean;
    sums[1] += LoadedSquares(part.v[kSquares]) + count * mean * mean;
  }
  // The statistics of a bundle, from the sums of Add. `stores`: whether to store them.
  __device__ __forceinline__ void Statistics(bool stores, std::int64_t group, std::int64_t channel,
                                             const double (&sums)[2], const Partial& first,
                                             A (&mean_rstd_delta)[3]) const {
    const double mean = sums[0] * plan.inverse_elements;
    const double variance = (sums[1] - sums[0] * mean) * plan.inverse_elements;
    SetStatistics(args, stores, plan.BundleOf(group * plan.channels + channel), first.v[kOrigin],
                  static_cast<double>(first.v[kMean]) + mean, variance < 0 ? 0.0 : variance,
                  mean_rstd_delta);
  }
  __device__ __forceinline__ void Set(const ChannelPart& tile, std::int64_t group,
                                      std::int64_t channel, A scale, A bias,
                                      const A (&mean_rstd_delta)[3]) const {
    const auto& [mean, rstd, delta] = mean_rstd_delta;
    A numbers[kAffine];
    SetAffine(scale, bias, mean, rstd, delta, numbers);
    if (plan.has_one_tile()) {
      PutNumbers(plan, static_cast<int>(channel - tile.channel), numbers, shared);
    } else {
      partials.at(group, 0, channel) = {numbers[0], numbers[1], numbers[2], 0};
    }
  }

  __device__ __forceinline__ void OfChannels() const {
    struct Given {
      Partial first;
      A scale, bias;
    };
    ForChannelSums(
        plan, args.shape.outer.groups, partials,
        [&](std::int64_t group, std::int64_t channel) {
          return Given{partials.Load(group, 0, channel), ParamAt<A>(args.scale, group, channel, 1),
                       ParamAt<A>(args.bias, group, channel, 0)};
        },
        [](double (&sums)[2], const Partial& part, const Given& given) {
          Add(sums, part, given.first);
        },
        [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel,
            const double (&sums)[2], const Given& given) {
          A own[3];
          Statistics(tile.first == 0, group, channel, sums, given.first, own);
          Set(tile, group, channel, given.scale, given.bias, own);
        });
  }
  __device__ __forceinline__ void OfBundles() const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    ForBundleSums(
        plan, args.shape.outer.groups, partials,
        [&](std::int64_t group, std::int64_t channel) { return partials.Load(group, 0, channel); },
        [](double (&sums)[2], const Partial& part, const Partial& first) {
          Add(sums, part, first);
        },
        [](const ChannelPart&, std::int64_t, std::int64_t, const double (&sums)[2],
           double (&totals)[2], const Partial&) { totals[0] += sums[0], totals[1] += sums[1]; },
        [&](const ChannelPart& tile, std::int64_t group, std::int64_t channel,
            const double (&totals)[2], const Partial& first) {
          A own[3];
          Statistics(tile.first == 0 && lane == 0, group, channel, totals, first, own);
          for (std::int64_t i = channel + lane; i < channel + plan.bundle; i += kWarp) {
            Set(tile, group, i, ParamAt<A>(args.scale, group, i, 1),
                ParamAt<A>(args.bias, group, i, 0), own);
          }
        });
  }
};

// --- y -------------------------------------------------------------------------------------------

template <bool kGrouped, typename T, int W, int kSteps>
__device__ __forceinline__ void SecondPass(const BatchNormFwdArgs& args, const ChannelPlan& plan,
                                           const ChannelPartials<Accum<T>, kMoments>& partials,
                                           char* scratch, Stages<T, W, 1, kSteps>& stages) {
  using A = Accum<T>;
  const T* const x = static_cast<const T*>(args.x);
  const T* const residual = static_cast<const T*>(args.residual);
  T* const y = static_cast<T*>(args.y);
  ForParts<true>(plan, [&](const ChannelPart& part, bool last) {
    A numbers[kAffine][W];
    const auto table = [&](std::int64_t group, std::int64_t channel, A(&of_channel)[kAffine]) {
      if (args.mean.data == nullptr) {
        const auto found = partials.Load(group, 0, channel);
#pragma unroll
        for (int v = 0; v < kAffine; ++v) of_channel[v] = found.v[v];
      } else {
        SetAffine(ParamAt<A>(args.scale, group, channel, 1),
                  ParamAt<A>(args.bias, group, channel, 0),
                  ParamAt<A>(args.mean, group, plan.BundleOf(channel), 0),
                  ParamAt<A>(args.rstd, group, plan.BundleOf(channel), 0),
                  ParamAt<A>(args.delta, group, plan.BundleOf(channel), 0), of_channel);
      }
    };
    const auto find_numbers = [&] {
      LoadNumbers(plan, part, reinterpret_cast<A*>(scratch),
                  args.mean.data == nullptr && plan.has_one_tile(), table, numbers);
      ForEdges<W>(plan, part, [&](const EdgeVector& edge) {
        A values[W], terms[W];
        LoadEdge(x, edge, values);
        if (residual != nullptr) LoadEdge(residual, edge, terms);
        Apply<T, W, kGrouped>(args, numbers, residual != nullptr, terms, values);
        StoreEdge(y, edge, values);
      });
    };
    const auto stream = [&]<bool kResidual>() {
      const auto copy = [&](auto&& place, std::int64_t start, bool there) {
        if (!there) place.Copy(0, x + start);
        if constexpr (kResidual) place.CopyTransient(residual + start);
      };
      const auto use = [&](auto&& place, std::int64_t start) {
        A values[W], terms[W];
        Widen(place.Get(0), values);
        if constexpr (kResidual) Widen(place.GetTransient(), terms);
        Apply<T, W, kGrouped>(args, numbers, kResidual, terms, values);
        StoreLast(y, start, Narrow<T>(values));
      };
      ForSecondPass(plan, part, stages, last && args.mean.data == nullptr,
                    ChunkCounter(plan, part, partials, static_cast<int>(threadIdx.x) / kWarp), copy,
                    find_numbers, use);
    };
    if (residual == nullptr) {
      stream.template operator()<false>();
    } else {
      stream.template operator()<true>();
    }
  });
}

// --- Kernels -------------------------------------------------------------------------------------

template <typename T, int W, bool kPlane, int kSteps, bool kGrouped>
__global__ void __launch_bounds__(kChannelThreads, 1)
    BatchNormFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                       const __grid_constant__ ChannelPlan any_plan) {
  extern __shared__ __align__(128) char shared[];
  const ChannelPlan plan = any_plan.As<kPlane, W, kGrouped>();
  Stages<T, W, 1, kSteps> stages(plan, shared);
  const ChannelPartials<Accum<T>, kMoments> partials{args.workspace, args.partial_rows,
                                                     plan.channels};
  if (args.mean.data == nullptr) {
    FirstPass(static_cast<const T*>(args.x), plan, partials, shared, stages);
    SyncBlocks(plan);  // partial results are written
    const MomentsFinish<Accum<T>> finish{args, plan, partials, reinterpret_cast<Accum<T>*>(shared)};
    if (plan.bundle == 1) {
      finish.OfChannels();
    } else {
      finish.OfBundles();
    }
    if (args.y == nullptr) return;
    if (!plan.combines_locally) {
      cooperative_groups::this_grid().sync();  // all AffineNumbers are written
    }
  }
  SecondPass<kGrouped>(args, plan, partials, shared, stages);
}

constexpr int kApplyThreads = 256;  // threads of a block of BatchNormApplyKernel
template <bool kResidual>
constexpr int kApplyVectors = kResidual ? 2 : 4;  // vectors of such a thread

// The second pass as a separate kernel of short blocks (AppliesSeparately in plan.h). It computes y
// from the AffineNumbers that BatchNormFwdKernel has left in the workspace. It goes from the end of
// the arrays to the start: the L2 cache still has what was read last. A thread loads all of its
// vectors first. A vector belongs to one channel or two. A group has `vectors` vectors.
template <typename T, bool kResidual>
__global__ void __launch_bounds__(kApplyThreads, 4)
    BatchNormApplyKernel(const __grid_constant__ BatchNormFwdArgs args, std::int64_t vectors) {
  using A = Accum<T>;
  constexpr int W = kVec<T>, kVectors = kApplyVectors<kResidual>;
  const std::int64_t block = gridDim.x - 1 - blockIdx.x, group = blockIdx.y;
  const std::int64_t first = block * kVectors * kApplyThreads + threadIdx.x;
  const std::int64_t channels = args.shape.outer.features, inner = args.shape.inner;
  const ChannelPartials<A, kMoments> partials{args.workspace, args.partial_rows, channels};
  const T* const x = static_cast<const T*>(args.x) + group * vectors * W;
  const T* const residual = static_cast<const T*>(args.residual) + group * vectors * W;
  T* const y = static_cast<T*>(args.y) + group * vectors * W;
  Vector<T, W> of_x[kVectors] = {}, of_residual[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const std::int64_t i = first + k * kApplyThreads;
    if (i < vectors) of_x[k] = LoadVectorOnce<W>(x + i * W);
    if (kResidual && i < vectors) of_residual[k] = LoadVectorOnce<W>(residual + i * W);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const std::int64_t i = first + k * kApplyThreads;
    if (i >= vectors) break;
    const std::int64_t row = i * W / inner, channel = row % channels;
    const int left = static_cast<int>(min((row + 1) * inner - i * W, std::int64_t{W}));
    const auto own = partials.at(group, 0, channel);
    auto next = own;  // of the channel after
    if (left < W) next = partials.at(group, 0, channel + 1 < channels ? channel + 1 : 0);
    A numbers[kAffine][W], values[W], terms[W];
#pragma unroll
    for (int v = 0; v < kAffine; ++v) {
#pragma unroll
      for (int j = 0; j < W; ++j) numbers[v][j] = j < left ? own.v[v] : next.v[v];
    }
    Widen(of_x[k], values);
    if constexpr (kResidual) Widen(of_residual[k], terms);
    Apply<T, W>(args, numbers, kResidual, terms, values);
    StoreLast(y, i * W, Narrow<T>(values));
  }
}

// Stores the statistics of bundles without elements.
template <typename A>
__global__ void EmptyStatisticsKernel(const __grid_constant__ BatchNormFwdArgs args) {
  const std::int64_t all = args.shape.outer.groups * args.bundles;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  A unused[3];
  if (i < all) SetStatistics(args, true, i, A{0}, 0.0, 0.0, unused);
}

// --- Launchers -----------------------------------------------------------------------------------

template <typename T, bool kResidual>
ffi::Error LaunchApply(cudaStream_t stream, const BatchNormFwdArgs& args, std::int64_t vectors) {
  const std::int64_t blocks =
      CeilDiv(vectors, std::int64_t{kApplyThreads} * kApplyVectors<kResidual>);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(args.shape.outer.groups));
  BatchNormApplyKernel<T, kResidual><<<grid, kApplyThreads, 0, stream>>>(args, vectors);
  return LastError(kForward);
}

template <typename T>
ffi::Error Forward(cudaStream_t stream, const BatchNormFwdArgs& args, const ChannelDevice& device) {
  const bool own = args.mean.data == nullptr;
  if (args.shape.elements() == 0) {
    const std::int64_t all = args.shape.outer.groups * args.bundles;
    if (!own || all == 0) return ffi::Error::Success();
    EmptyStatisticsKernel<Accum<T>><<<GridBlocks(CeilDiv(all, 256)), 256, 0, stream>>>(args);
    return LastError(kForward);
  }
  if (!own && args.y == nullptr) return ffi::Error::Success();
  ChannelTask task = TaskOf<T>(/*backward=*/false, args.shape, device);
  task.aligned = Aligned(args.x, args.residual, args.y);
  task.bundle = args.bundle, task.statistics = own, task.apply = args.y != nullptr;
  task.transient_arrays = args.residual == nullptr ? 0 : 1;
  task.partial_rows = args.partial_rows;
  if (const BundlePlan bundles = ChooseBundlePlan(task); bundles.width > 0) {
    return BundlesFwd(stream, args, bundles);
  }
  const BatchNormPlan plan = ChooseBatchNormPlan(task);
  BatchNormFwdArgs main = args;
  if (plan.apply_vectors > 0) main.y = nullptr;
  const ffi::Error error = DispatchPlan<kVec<T>, kForwardNeeds>(
      plan.channels, args.bundle > 1 || args.silu,
      [&]<int W, bool kPlane, int kSteps, bool kGrouped>() {
        return LaunchChannels(kForward, BatchNormFwdKernel<T, W, kPlane, kSteps, kGrouped>, stream,
                              plan.channels, device, main);
      });
  if (error.failure() || plan.apply_vectors == 0) return error;
  return args.residual == nullptr ? LaunchApply<T, false>(stream, args, plan.apply_vectors)
                                  : LaunchApply<T, true>(stream, args, plan.apply_vectors);
}

// BatchNormFwd for a GPU like `device`. Tests pass devices that differ from the current one.
ffi::Error BatchNormFwdOn(const ChannelDevice& device, cudaStream_t stream,
                          const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, kForward, args.dtype,
                       [&]<typename T>() { return Forward<T>(stream, args, device); });
}

}  // namespace

ffi::Error BatchNormFwd(CudaContext stream, const BatchNormFwdArgs& args) {
  return BatchNormFwdOn(CurrentChannelDevice(), stream, args);
}

}  // namespace gradops
