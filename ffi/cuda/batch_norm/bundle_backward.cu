// Batch norm and group norm backward, CUDA, with one pass over the arrays: a block has a bundle or
// a panel, a cluster has a bundle, or a few lanes have a small bundle. Sums are of dz and dz *
// x_hat. Traffic: dy and x are read, dx and dresidual are written. One of them may be dy's buffer:
// the thread that writes an element has read it.
#include <cstdint>

#include "cuda/batch_norm/bundle.cuh"
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/column_sum.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// The numbers of a bundle, and how dx follows from them.
template <typename A>
struct BundleNumbers {
  A mean, rstd, delta;
  // Set by EndBundle: dx = (scale * dz - level - (x - mean) * rstd * slope) * rstd.
  A slope, level;

  // A statistic: it has the accumulation dtype.
  __device__ __forceinline__ static A At(const Param& of, std::int64_t group, std::int64_t bundle) {
    if (of.data == nullptr) return 0;
    return static_cast<const A*>(of.data)[group * of.group_stride + bundle];
  }
  BundleNumbers() = default;
  __device__ __forceinline__ BundleNumbers(const BatchNormBwdArgs& args, std::int64_t group,
                                           std::int64_t bundle)
      : mean(At(args.mean, group, bundle)),
        rstd(At(args.rstd, group, bundle)),
        delta(At(args.delta, group, bundle)) {}
  // Of a bundle of a panel.
  __device__ __forceinline__ static BundleNumbers Of(const BatchNormBwdArgs& args,
                                                     const auto& panel, int bundle) {
    const std::int64_t group = panel.GroupOf(bundle * panel.cut.bundle);
    return {args, group, panel.Item(bundle) - group * panel.group_bundles};
  }

  __device__ __forceinline__ A Offset(A scale, A bias) const {
    return bias - delta * (rstd * scale);
  }
  // Stores the gradients of a channel's parameters. `sums` has the sums of dz and of dz * x_hat
  // without delta. It gets the sums of scale * dz and of scale * dz * x_hat.
  __device__ __forceinline__ void EndChannel(const BatchNormBwdArgs& args, bool stores,
                                             std::int64_t i, A scale, double (&sums)[2]) const {
    sums[1] -= static_cast<double>(delta * rstd) * sums[0];
    if (stores && args.dscale.data != nullptr) {
      StoreAs(args.dscale.data, args.dscale.dtype, i, sums[1]);
    }
    if (stores && args.dbias.data != nullptr) {
      StoreAs(args.dbias.data, args.dbias.dtype, i, sums[0]);
    }
    sums[0] *= static_cast<double>(scale), sums[1] *= static_cast<double>(scale);
  }
  // Sets what dx needs, from the sums of scale * dz and scale * dz * x_hat.
  __device__ __forceinline__ void EndBundle(const BatchNormBwdArgs& args, bool stores,
                                            std::int64_t item, double per_element,
                                            const double (&totals)[2]) {
    if (stores && args.sum_dz != nullptr) {
      static_cast<A*>(args.sum_dz)[item] = static_cast<A>(totals[0]);
      static_cast<A*>(args.sum_dz_x_hat)[item] = static_cast<A>(totals[1]);
    }
    slope = static_cast<A>(totals[1] * per_element);
    level = static_cast<A>(totals[0] * per_element) - delta * (slope * rstd);
  }
};

// Turns x into x_hat without delta, and dy into dz. The vector is of one bundle, or each element
// has its own.
template <Mask kMask, typename T, int W, int kBundles, typename A>
__device__ __forceinline__ void ToTerms(const BundleNumbers<A> (&of)[kBundles],
                                        const A (&scales)[W], const A (&offsets)[W], A (&x)[W],
                                        A (&dy)[W]) {
  A factors[W], y[W];
  // Forward computes the activation's argument in the same way. So y and its mask agree.
#pragma unroll
  for (int j = 0; j < W; ++j) {
    x[j] -= of[j % kBundles].mean, factors[j] = of[j % kBundles].rstd * scales[j];
  }
  MaskGrad<kMask, T>(x, factors, offsets, y, dy);
#pragma unroll
  for (int j = 0; j < W; ++j) x[j] *= of[j % kBundles].rstd;
}
// Stores dx and dresidual of a vector, from its terms. `start` is the index of its first element.
template <typename T, int W, int kBundles, typename A>
__device__ __forceinline__ void StoreGradients(const BatchNormBwdArgs& args, std::int64_t start,
                                               const BundleNumbers<A> (&of)[kBundles],
                                               const A (&scales)[W], A (&x)[W], const A (&dz)[W]) {
  if (args.dresidual != nullptr) {
    StoreLast(static_cast<T*>(args.dresidual), start, Narrow<T>(dz));
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const BundleNumbers<A>& own = of[j % kBundles];
    x[j] = (dz[j] * scales[j] - own.level - x[j] * own.slope) * own.rstd;
  }
  StoreLast(static_cast<T*>(args.dx), start, Narrow<T>(x));
}

// Stores the gradients of the parameters of a cluster's channels. The block that has a channel's
// first piece stores them.
template <typename A>
__device__ __forceinline__ void EndChannelsOfCluster(const BatchNormBwdArgs& args,
                                                     const auto& block, const A* scales,
                                                     const BundleNumbers<A>& numbers) {
  const BundlePieces& cut = block.cut;
  for (int c = block.EndChannel(block.first) + static_cast<int>(threadIdx.x);
       c < block.EndChannel(block.end); c += static_cast<int>(blockDim.x)) {
    double sums[2] = {};
    for (int r = block.rank; block.FirstPiece(r) < (c + 1) * cut.channel_pieces; ++r) {
      const double* const of_block = InBlock(r, block.SumsOfChannel(r, c));
      sums[0] += of_block[0], sums[1] += of_block[1];
    }
    numbers.EndChannel(args, true, block.item * cut.bundle + c, scales[c], sums);
  }
}

// A block or a cluster has a bundle: the sums of its channels, then dx.
template <typename T, int W, Mask kMask, bool kCluster>
__global__ void __launch_bounds__(kRegisterWarps* kWarp, 2)
    BundleBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                    const __grid_constant__ BundlePieces cut) {
  using A = Accum<T>;
  extern __shared__ __align__(128) char shared[];
  const BundleBlock<T, W, 2, kCluster> block{args.shape, cut, shared};
  if (!block.exists) return;
  block.Load(
      {static_cast<const T*>(args.x) + block.start, static_cast<const T*>(args.dy) + block.start});
  BundleNumbers<A> numbers[1] = {{args, block.group, block.number}};
  A* const scales = block.Numbers();
  A* const offsets = scales + cut.bundle;
  for (int c = static_cast<int>(threadIdx.x); c < cut.bundle; c += static_cast<int>(blockDim.x)) {
    const std::int64_t channel = block.first_channel + c;
    scales[c] = ParamAt<A>(args.scale, block.group, channel, 1);
    offsets[c] = numbers[0].Offset(scales[c], ParamAt<A>(args.bias, block.group, channel, 0));
  }
  __syncthreads();  // scales and offsets are written

  const auto load = [&](int vector, int channel, A(&scale)[W], A(&x)[W], A(&dz)[W]) {
    A offset[W];
#pragma unroll
    for (int j = 0; j < W; ++j) scale[j] = scales[channel], offset[j] = offsets[channel];
    Widen(LoadPlain<W>(block.At(0, vector)), x);
    Widen(LoadPlain<W>(block.At(1, vector)), dz);
    ToTerms<kMask, T>(numbers, scale, offset, x, dz);
  };
  A dz_sum = 0, x_hat_sum = 0;
  block.ForLoaded(
      [&](int vector, int channel) {
        A scale[W], x[W], dz[W];
        load(vector, channel, scale, x, dz);
#pragma unroll
        for (int j = 0; j < W; ++j) dz_sum += dz[j], x_hat_sum += dz[j] * x[j];
      },
      [&](int piece) {
        double sums[2] = {static_cast<double>(dz_sum), static_cast<double>(x_hat_sum)};
        block.run().Sums(sums);
        if (block.run().lane() == 0) {
          block.SumsOfPiece(piece)[0] = sums[0], block.SumsOfPiece(piece)[1] = sums[1];
        }
        dz_sum = x_hat_sum = 0;
      });
  __syncthreads();  // the sums of pieces are written
  const LaneRun of_channel{1 << cut.sum_bits};
  const int end_channel = block.EndChannel(block.end);
  double totals[2] = {};
  for (int c = block.first / cut.channel_pieces + (static_cast<int>(threadIdx.x) >> cut.sum_bits);
       c < end_channel; c += static_cast<int>(blockDim.x) >> cut.sum_bits) {
    double sums[2] = {};
    const int end = min((c + 1) * cut.channel_pieces, block.end);
    for (int p = max(c * cut.channel_pieces, block.first) + of_channel.lane(); p < end;
         p += of_channel.lanes) {
      sums[0] += block.SumsOfPiece(p)[0], sums[1] += block.SumsOfPiece(p)[1];
    }
    of_channel.Sums(sums);
    if (of_channel.lane() > 0) continue;
    if constexpr (kCluster) {
      double* const own = block.SumsOfChannel(block.rank, c);
      own[0] = sums[0], own[1] = sums[1];
    }
    numbers[0].EndChannel(args, !kCluster, block.item * cut.bundle + c, scales[c], sums);
    totals[0] += sums[0], totals[1] += sums[1];
  }
  block.Sum(totals);
  if constexpr (kCluster) {
    block.Exchange(totals);
    block.template SumLanes<1 << kClusterBits>(totals);
    EndChannelsOfCluster(args, block, scales, numbers[0]);
  }
  block.HasRead();
  numbers[0].EndBundle(args, block.rank == 0 && threadIdx.x == 0, block.item, cut.per_element,
                       totals);

  const auto store_dx = [&](int vector, int channel) {
    A scale[W], x[W], dz[W];
    load(vector, channel, scale, x, dz);
    StoreGradients<T>(args, block.start + vector * W, numbers, scale, x, dz);
  };
  if (args.dx != nullptr) block.ForVectors(store_dx);
  block.WaitForReaders();
}

// A few lanes of a warp have a small bundle. kElements: each element has its own channel. Otherwise
// the bundle is one channel.
template <typename T, int W, Mask kMask, bool kElements>
__global__ void __launch_bounds__(kSmallThreads, kElements ? 3
                                                 : W == 1  ? 5
                                                           : 4)
    SmallBundleBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                         const __grid_constant__ SmallLayout cut) {
  using A = Accum<T>;
  constexpr int kVectors = SmallVectors(W), kChannels = kElements ? kVectors : 1;
  const std::int64_t channels = args.shape.outer.features, of_group = channels / args.bundle;
  const SmallBundle<W> of{args.shape.outer.groups * of_group, cut};
  if (!of.exists) return;
  const T* const x = static_cast<const T*>(args.x) + of.start;
  const T* const dy = static_cast<const T*>(args.dy) + of.start;
  Vector<T, W> of_x[kVectors], of_dy[kVectors];
  of.ForVectors([&](int v, int i) {
    of_x[v] = LoadVectorOnce<W>(x + i), of_dy[v] = LoadVectorOnce<W>(dy + i);
  });
  const std::int64_t group = of.item / of_group, bundle = of.item % of_group;
  BundleNumbers<A> numbers[1] = {{args, group, bundle}};
  A scale[kChannels][W], offset[kChannels][W];
  if constexpr (kElements) {
    of.ForVectors([&](int v, int i) {
      LoadParam(args.scale, group, bundle * args.bundle + i, A{1}, scale[v]);
      LoadParam(args.bias, group, bundle * args.bundle + i, A{0}, offset[v]);
    });
  } else {
    const A own = ParamAt<A>(args.scale, group, bundle, 1);
    const A own_bias = ParamAt<A>(args.bias, group, bundle, 0);
#pragma unroll
    for (int j = 0; j < W; ++j) scale[0][j] = own, offset[0][j] = own_bias;
  }
#pragma unroll
  for (int v = 0; v < kChannels; ++v) {
#pragma unroll
    for (int j = 0; j < W; ++j) offset[v][j] = numbers[0].Offset(scale[v][j], offset[v][j]);
  }

  A x_hat[kVectors][W], dz[kVectors][W], dz_sum = 0, x_hat_sum = 0;
  of.ForVectors([&](int v, int i) {
    Widen(of_x[v], x_hat[v]);
    Widen(of_dy[v], dz[v]);
    ToTerms<kMask, T>(numbers, scale[v % kChannels], offset[v % kChannels], x_hat[v], dz[v]);
    A dscale[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A weight = kElements ? scale[v % kChannels][j] : A{1};
      dscale[j] = dz[v][j] * (x_hat[v][j] - (kElements ? numbers[0].delta * numbers[0].rstd : 0));
      dz_sum += dz[v][j] * weight, x_hat_sum += dscale[j] * weight;
    }
    if (kElements) StoreParam(args.dscale, of.start + i, dscale);
    if (kElements) StoreParam(args.dbias, of.start + i, dz[v]);
  });
  double totals[2] = {static_cast<double>(dz_sum), static_cast<double>(x_hat_sum)};
  of.run.Sums(totals);
  const bool stores = of.run.lane() == 0;
  if (!kElements) numbers[0].EndChannel(args, stores, of.item, scale[0][0], totals);
  numbers[0].EndBundle(args, stores, of.item, cut.per_element, totals);
  if (args.dx == nullptr) return;
  of.ForVectors([&](int v, int i) {
    StoreGradients<T>(args, of.start + i, numbers, scale[v % kChannels], x_hat[v], dz[v]);
  });
}

// A block has a panel. kOneBundle: a vector has no elements of two bundles.
template <typename T, int W, Mask kMask, bool kOneBundle>
__global__ void __launch_bounds__(kPanelWarps* kWarp, kOneBundle ? 3 : 2)
    PanelBwdKernel(const __grid_constant__ BatchNormBwdArgs args,
                   const __grid_constant__ PanelLayout cut) {
  using A = Accum<T>;
  constexpr int kBundles = kOneBundle ? 1 : W;
  extern __shared__ __align__(128) char shared[];
  const Panel<T, W, 2, W> panel{args.shape, cut, shared};
  if (!panel.exists) return;
  panel.Load({static_cast<const T*>(args.x), static_cast<const T*>(args.dy)});
  BundleNumbers<A> numbers[kBundles];
#pragma unroll
  for (int j = 0; j < kBundles; ++j) {
    numbers[j] = BundleNumbers<A>::Of(args, panel, panel.BundleOf(j));
  }
  A scale[W], offset[W];
  const std::int64_t group = panel.GroupOf(panel.column), channel = panel.ChannelOf(panel.column);
  LoadParam(args.scale, group, channel, A{1}, scale);
  LoadParam(args.bias, group, channel, A{0}, offset);
#pragma unroll
  for (int j = 0; j < W; ++j) offset[j] = numbers[j % kBundles].Offset(scale[j], offset[j]);
  const auto load = [&](int i, A(&x)[W], A(&dz)[W]) {
    Widen(LoadPlain<W>(panel.Array(0) + i), x);
    Widen(LoadPlain<W>(panel.Array(1) + i), dz);
    ToTerms<kMask, T>(numbers, scale, offset, x, dz);
  };
  A sums[2][W] = {};
  WaitForCopies<0>();
  panel.ForVectors([&](int i, std::int64_t) {
    A x[W], dz[W];
    load(i, x, dz);
#pragma unroll
    for (int j = 0; j < W; ++j) sums[0][j] += dz[j], sums[1][j] += dz[j] * x[j];
  });
  panel.Put(sums);
  __syncthreads();                    // sums are written
  enum { kSlope, kLevel, kNumbers };  // of a bundle
  static_assert(kNumbers <= kPanelNumbers);
  panel.ForBundles([&](int bundle) {
    auto own = BundleNumbers<A>::Of(args, panel, bundle);
    double totals[2];
    panel.AddUp(bundle, totals, [&](bool stores, int column, double (&of_channel)[2]) {
      const A own_scale = ParamAt<A>(args.scale, panel.GroupOf(column), panel.ChannelOf(column), 1);
      own.EndChannel(args, stores, panel.first + column, own_scale, of_channel);
    });
    const bool stores = panel.run().lane() == 0;
    own.EndBundle(args, stores, panel.Item(bundle), cut.per_element, totals);
    if (stores) panel.Number(kSlope, bundle) = own.slope, panel.Number(kLevel, bundle) = own.level;
  });
  if (args.dx == nullptr) return;
  __syncthreads();  // slopes and levels are written
#pragma unroll
  for (int j = 0; j < kBundles; ++j) {
    numbers[j].slope = panel.Number(kSlope, panel.BundleOf(j));
    numbers[j].level = panel.Number(kLevel, panel.BundleOf(j));
  }
  panel.ForVectors([&](int i, std::int64_t at) {
    A x[W], dz[W];
    load(i, x, dz);
    StoreGradients<T>(args, at, numbers, scale, x, dz);
  });
}

// --- Launch --------------------------------------------------------------------------------------

template <typename T, int W, Mask kMask>
ffi::Error LaunchBackward(cudaStream_t stream, const BatchNormBwdArgs& args,
                          const BundlePlan& plan) {
  // With a W of 1, there is one kernel for both cases.
  const bool bundle = W == 1 || args.bundle % W == 0;
  const BundleKernels<BatchNormBwdArgs> kernels{
      plan.block.block_bits == 0 ? BundleBwdKernel<T, W, kMask, false>
                                 : BundleBwdKernel<T, W, kMask, W != 1>,
      args.bundle > 1 ? SmallBundleBwdKernel<T, W, kMask, true>
                      : SmallBundleBwdKernel<T, W, kMask, false>,
      bundle ? PanelBwdKernel<T, W, kMask, true> : PanelBwdKernel<T, W, kMask, W == 1>};
  return kernels.Launch(kBackward, stream, plan, args);
}

}  // namespace

ffi::Error BundlesBwd(cudaStream_t stream, const BatchNormBwdArgs& args, const BundlePlan& plan) {
  return DispatchDtype(FloatTypes{}, kBackward, args.dtype, [&]<typename T>() {
    const auto launch = [&]<Mask kMask>() {
      return plan.width == 1 ? LaunchBackward<T, 1, kMask>(stream, args, plan)
                             : LaunchBackward<T, kVec<T>, kMask>(stream, args, plan);
    };
    if (args.silu) return launch.template operator()<Mask::kSilu>();
    return args.relu ? launch.template operator()<Mask::kOfX>()
                     : launch.template operator()<Mask::kNone>();
  });
}

}  // namespace gradops
