// Batch norm and group norm forward, CUDA, with one pass over the arrays: a block has a bundle or a
// panel, or a few lanes have a small bundle. Traffic: x and the residual are read, and y is
// written.
#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm/bundle.cuh"
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// An origin of distances: the value of an element, unless this is NaN or infinite.
template <typename A>
__device__ __forceinline__ A OriginFrom(A value) {
  return isfinite(value) ? value : A{0};
}

// Adds the distance of a value from `center`, and its square. S: the type of the sums.
template <typename S, typename A>
__device__ __forceinline__ void AddCentered(A value, A center, S& offset, S& square) {
  const S centered = static_cast<S>(value) - static_cast<S>(center);
  offset += centered, square += centered * centered;
}

// Sets a bundle's statistics as SetStatistics does. sum_squares<S>(sums) adds up distances from
// `center`, which is almost the mean, and their squares.
template <typename T, typename A>
__device__ __forceinline__ void SetBundleStatistics(const BatchNormFwdArgs& args, bool stores,
                                                    std::int64_t item, A center, double per_element,
                                                    const auto& sum_squares, A (&own)[3]) {
  double sums[2];
  sum_squares.template operator()<A>(sums);
  if (NeedsSecondLook<T>(double2{sums[0], sums[1]})) sum_squares.template operator()<double>(sums);
  const double offset = sums[0] * per_element;
  const double variance = (sums[1] - sums[0] * offset) * per_element;
  SetStatistics(args, stores, item, center, offset, variance < 0 ? 0.0 : variance, own);
}

// Stores y of a vector. `start` is the index of its first element.
template <typename T, int W, typename A>
__device__ __forceinline__ void StoreY(const BatchNormFwdArgs& args, const A (&numbers)[kAffine][W],
                                       std::int64_t start, A (&values)[W]) {
  A terms[W];
  const T* const residual = static_cast<const T*>(args.residual);
  if (residual != nullptr) Widen(LoadVectorOnce<W>(residual + start), terms);
  Apply<T, W>(args, numbers, residual != nullptr, terms, values);
  StoreLast(static_cast<T*>(args.y), start, Narrow<T>(values));
}
// The same, from the parameters of each element and the statistics of their bundle.
template <typename T, int W, typename A>
__device__ __forceinline__ void StoreY(const BatchNormFwdArgs& args, const A (&scale)[W],
                                       const A (&bias)[W], const A (&own)[3], std::int64_t start,
                                       A (&values)[W]) {
  A numbers[kAffine][W], column[kAffine];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    SetAffine(scale[j], bias[j], own[0], own[1], own[2], column);
#pragma unroll
    for (int v = 0; v < kAffine; ++v) numbers[v][j] = column[v];
  }
  StoreY<T>(args, numbers, start, values);
}

// A block has a bundle: statistics by two passes over shared memory, then y. kOneChannel: a vector
// has no elements of two channels.
template <typename T, int W, bool kOneChannel>
__global__ void __launch_bounds__(kBundleWarps* kWarp)
    BundleFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                    const __grid_constant__ BundlePieces cut) {
  using A = Accum<T>;
  extern __shared__ __align__(128) char shared[];
  const BundleBlock<T, W, 1> block{cut, shared};
  const std::int64_t item = ItemOfBlock(), channels = args.shape.outer.features;
  const std::int64_t of_group = channels / cut.bundle;
  if (item >= args.shape.outer.groups * of_group) return;
  const std::int64_t group = item / of_group, first_channel = item % of_group * cut.bundle;
  const std::int64_t start = item * cut.bundle * args.shape.inner;
  const T* const x = static_cast<const T*>(args.x) + start;
  block.Load({x});
  A* const scales = block.Numbers();
  A* const biases = scales + cut.bundle;
  for (int c = static_cast<int>(threadIdx.x); c < cut.bundle; c += static_cast<int>(blockDim.x)) {
    scales[c] = ParamAt<A>(args.scale, group, first_channel + c, 1);
    biases[c] = ParamAt<A>(args.bias, group, first_channel + c, 0);
  }
  double* const room = block.Sums();
  const A origin = OriginFrom(static_cast<A>(x[0]));
  const auto load = [&](int vector, A(&values)[W]) {
    Widen(LoadPlain<W>(block.Array(0) + vector * W), values);
  };

  A distance = 0;
  double of_first[1] = {};
  block.ForLoaded(
      [&](int vector, int) {
        A values[W];
        load(vector, values);
#pragma unroll
        for (int j = 0; j < W; ++j) distance += values[j] - origin;
      },
      [&](int, int) { of_first[0] += static_cast<double>(distance), distance = 0; });
  block.Sum(room, of_first);
  const A center = static_cast<A>(static_cast<double>(origin) + of_first[0] * cut.per_element);

  const auto sum_squares = [&]<typename S>(double (&sums)[2]) {
    S offset = 0, square = 0;
    sums[0] = sums[1] = 0;
    block.ForVectors(
        0, cut.pieces(),
        [&](int vector, int) {
          A values[W];
          load(vector, values);
#pragma unroll
          for (int j = 0; j < W; ++j) AddCentered<S>(values[j], center, offset, square);
        },
        [&](int, int) {
          sums[0] += static_cast<double>(offset), sums[1] += static_cast<double>(square);
          offset = square = 0;
        });
    block.Sum(room, sums);
  };
  A own[3];
  SetBundleStatistics<T>(args, threadIdx.x == 0, item, center, cut.per_element, sum_squares, own);

  if (args.y == nullptr) return;
  const int inner = static_cast<int>(args.shape.inner);
  block.ForVectors([&](int vector, int channel) {
    A values[W];
    load(vector, values);
    A scale[W], bias[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int of_bundle = kOneChannel ? channel : (vector * W + j) / inner;
      scale[j] = scales[of_bundle], bias[j] = biases[of_bundle];
    }
    StoreY<T>(args, scale, bias, own, start + vector * W, values);
  });
}

// A few lanes of a warp have a small bundle.
template <typename T, int W, bool kOneChannel>
__global__ void __launch_bounds__(kSmallThreads, kOneChannel ? 5 : 4)
    SmallBundleFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                         const __grid_constant__ SmallLayout cut) {
  using A = Accum<T>;
  const std::int64_t of_group = args.shape.outer.features / args.bundle;
  const SmallBundle<W> of{args.shape.outer.groups * of_group, cut};
  if (!of.exists) return;
  const T* const x = static_cast<const T*>(args.x) + of.start;
  A values[SmallVectors(W)][W];
  of.ForVectors([&](int v, int i) { Widen(LoadVectorOnce<W>(x + i), values[v]); });

  const A origin = OriginFrom(static_cast<A>(x[0]));
  A distance = 0;
  of.ForVectors([&](int v, int) {
#pragma unroll
    for (int j = 0; j < W; ++j) distance += values[v][j] - origin;
  });
  double sum[1] = {static_cast<double>(distance)};
  of.run.Sums(sum);
  const A center = static_cast<A>(static_cast<double>(origin) + sum[0] * cut.per_element);
  const auto sum_squares = [&]<typename S>(double (&sums)[2]) {
    S offset = 0, square = 0;
    of.ForVectors([&](int v, int) {
#pragma unroll
      for (int j = 0; j < W; ++j) AddCentered<S>(values[v][j], center, offset, square);
    });
    sums[0] = static_cast<double>(offset), sums[1] = static_cast<double>(square);
    of.run.Sums(sums);
  };
  A own[3];
  const bool stores = of.run.lane() == 0;
  SetBundleStatistics<T>(args, stores, of.item, center, cut.per_element, sum_squares, own);

  if (args.y == nullptr) return;
  const std::int64_t group = of.item / of_group;
  const std::int64_t first_channel = of.item % of_group * args.bundle;
  const int inner = static_cast<int>(args.shape.inner);
  of.ForVectors([&](int v, int i) {
    A scale[W], bias[W];
    const std::int64_t channel = first_channel + i / inner;
    if (!kOneChannel && inner == 1) {
      LoadParam(args.scale, group, channel, A{1}, scale);
      LoadParam(args.bias, group, channel, A{0}, bias);
    } else {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const std::int64_t own_channel = kOneChannel ? channel : first_channel + (i + j) / inner;
        scale[j] = kOneChannel && j > 0 ? scale[0] : ParamAt<A>(args.scale, group, own_channel, 1);
        bias[j] = kOneChannel && j > 0 ? bias[0] : ParamAt<A>(args.bias, group, own_channel, 0);
      }
    }
    StoreY<T>(args, scale, bias, own, of.start + i, values[v]);
  });
}

// A block has a panel: statistics by two passes over shared memory, then y. kOneBundle: a vector
// has no elements of two bundles.
template <typename T, int W, bool kOneBundle>
__global__ void __launch_bounds__(kPanelWarps* kWarp, 4)
    PanelFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                   const __grid_constant__ PanelLayout cut) {
  using A = Accum<T>;
  enum { kCenter, kMeanOf, kRstdOf, kDeltaOf, kNumbers };  // of a bundle
  static_assert(kNumbers <= kPanelNumbers);
  constexpr int kBundles = kOneBundle ? 1 : W;
  extern __shared__ __align__(128) char shared[];
  const Panel<T, W, 1, kBundles> panel{args.shape, cut, shared};
  if (!panel.exists) return;
  const T* const x = static_cast<const T*>(args.x);
  panel.Load({x});
  const auto origin_of = [&](int bundle) {
    return OriginFrom(static_cast<A>(x[panel.At(bundle * cut.bundle)]));
  };
  const auto load = [&](int i, A(&values)[W]) { Widen(LoadPlain<W>(panel.Array(0) + i), values); };
  const auto unchanged = [](bool, int, const auto&) {};

  A centers[kBundles], of_first[1][kBundles] = {};
#pragma unroll
  for (int j = 0; j < kBundles; ++j) centers[j] = origin_of(panel.BundleOf(j));
  WaitForCopies<0>();
  panel.ForVectors([&](int i, std::int64_t) {
    A values[W];
    load(i, values);
#pragma unroll
    for (int j = 0; j < W; ++j) of_first[0][j % kBundles] += values[j] - centers[j % kBundles];
  });
  panel.Put(of_first);
  __syncthreads();  // sums are written
  panel.ForBundles([&](int bundle) {
    double sum[1];
    panel.AddUp(bundle, sum, unchanged);
    if (panel.run().lane() > 0) return;
    panel.Number(kCenter, bundle) =
        static_cast<A>(static_cast<double>(origin_of(bundle)) + sum[0] * cut.per_element);
  });
  __syncthreads();  // centers are written, and sums have been read

  A sums[2][kBundles] = {};
#pragma unroll
  for (int j = 0; j < kBundles; ++j) centers[j] = panel.Number(kCenter, panel.BundleOf(j));
  panel.ForVectors([&](int i, std::int64_t) {
    A values[W];
    load(i, values);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      AddCentered<A>(values[j], centers[j % kBundles], sums[0][j % kBundles],
                     sums[1][j % kBundles]);
    }
  });
  panel.Put(sums);
  A scale[W], bias[W];
  const std::int64_t group = panel.GroupOf(panel.column), channel = panel.ChannelOf(panel.column);
  LoadParam(args.scale, group, channel, A{1}, scale);
  LoadParam(args.bias, group, channel, A{0}, bias);
  __syncthreads();  // sums are written
  panel.ForBundles([&](int bundle) {
    const A center = panel.Number(kCenter, bundle);
    const auto sum_squares = [&]<typename S>(double (&totals)[2]) {
      if constexpr (std::is_same_v<S, A>) {
        panel.AddUp(bundle, totals, unchanged);
      } else {  // again, from the elements
        totals[0] = totals[1] = 0;
        for (int r = 0; r < cut.rows; ++r) {
          for (int i = panel.run().lane(); i < cut.bundle; i += panel.run().lanes) {
            const T value = panel.Array(0)[r * cut.channels + bundle * cut.bundle + i];
            AddCentered<S>(static_cast<A>(value), center, totals[0], totals[1]);
          }
        }
        panel.run().Sums(totals);
      }
    };
    A own[3];
    const bool stores = panel.run().lane() == 0;
    SetBundleStatistics<T>(args, stores, panel.Item(bundle), center, cut.per_element, sum_squares,
                           own);
#pragma unroll
    for (int v = 0; v < 3; ++v) {
      if (stores) panel.Number(kMeanOf + v, bundle) = own[v];
    }
  });
  if (args.y == nullptr) return;
  __syncthreads();  // statistics are written

  A affine[kAffine][W], column[kAffine];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const int bundle = panel.BundleOf(kOneBundle ? 0 : j);
    SetAffine(scale[j], bias[j], panel.Number(kMeanOf, bundle), panel.Number(kRstdOf, bundle),
              panel.Number(kDeltaOf, bundle), column);
#pragma unroll
    for (int v = 0; v < kAffine; ++v) affine[v][j] = column[v];
  }
  panel.ForVectors([&](int i, std::int64_t at) {
    A values[W];
    load(i, values);
    StoreY<T>(args, affine, at, values);
  });
}

// --- Launch --------------------------------------------------------------------------------------

template <typename T, int W>
ffi::Error LaunchForward(cudaStream_t stream, const BatchNormFwdArgs& args,
                         const BundlePlan& plan) {
  // With a W of 1, there is one kernel for both cases.
  const bool channel = W == 1 || args.shape.inner % W == 0;
  const bool bundle = W == 1 || args.bundle % W == 0;
  const BundleKernels<BatchNormFwdArgs> kernels{
      channel ? BundleFwdKernel<T, W, true> : BundleFwdKernel<T, W, W == 1>,
      channel ? SmallBundleFwdKernel<T, W, true> : SmallBundleFwdKernel<T, W, W == 1>,
      bundle ? PanelFwdKernel<T, W, true> : PanelFwdKernel<T, W, W == 1>};
  return kernels.Launch(kForward, stream, plan, args);
}

}  // namespace

ffi::Error BundlesFwd(cudaStream_t stream, const BatchNormFwdArgs& args, const BundlePlan& plan) {
  return DispatchDtype(FloatTypes{}, kForward, args.dtype, [&]<typename T>() {
    return plan.width == 1 ? LaunchForward<T, 1>(stream, args, plan)
                           : LaunchForward<T, kVec<T>>(stream, args, plan);
  });
}

}  // namespace gradops
