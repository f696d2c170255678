// Batch norm and group norm forward, CUDA, with one pass over the arrays: a block has a bundle or a
// panel, a cluster has a bundle, or a few lanes have a small bundle. Traffic: x and the residual
// are read, and y is written.
#include <cstdint>
#include <limits>

#include "cuda/batch_norm/bundle.cuh"
#include "cuda/batch_norm/elements.cuh"
#include "cuda/batch_norm/tiles.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// An origin of distances, near the mean: the mean of at(0) to at(3), unless it is NaN or infinite.
// Equal elements have exactly their value.
template <typename A>
__device__ __forceinline__ A OriginOf(const auto& at) {
  const A first = at(0);
  const A mean = first + ((at(1) - first) + (at(2) - first) + (at(3) - first)) / 4;
  return isfinite(mean) ? mean : A{0};
}

// Adds the distance of a value from `center`, and its square. S: the type of the sums.
template <typename S, typename A>
__device__ __forceinline__ void AddCentered(A value, A center, S& offset, S& square) {
  const S centered = static_cast<S>(value) - static_cast<S>(center);
  offset += centered, square += centered * centered;
}

// Of some elements: their mean is center + offset.
template <typename A>
struct Moments {
  A center;
  double offset, squares;  // the sum of squared distances from the mean

  // From the sums of distances from `center`, and of their squares.
  __device__ __forceinline__ Moments(A center, const double (&sums)[2], double per_element)
      : center(center), offset(sums[0] * per_element), squares(sums[1] - sums[0] * offset) {}
  __device__ __forceinline__ A Mean() const {
    return static_cast<A>(static_cast<double>(center) + offset);
  }
};

// Whether squares have lost digits: the center is far from the mean, or they overflow. NaN counts
// as far.
template <typename A>
__device__ __forceinline__ bool LostDigits(const double (&sums)[2], const Moments<A>& of) {
  constexpr double kFar = 2;  // in squared standard deviations
  return !(sums[0] * of.offset <= kFar * of.squares) || Overflowed(of.squares);
}

// The moments of elements whose mean is almost `center`. sum_up<S>(center, sums) adds up distances
// and their squares.
template <typename T, typename A>
__device__ __forceinline__ Moments<A> MomentsAbout(A center, double per_element,
                                                   const auto& sum_up) {
  double sums[2];
  sum_up.template operator()<A>(center, sums);
  if (NeedsSecondLook<T>(double2{sums[0], sums[1]})) {
    sum_up.template operator()<double>(center, sums);
  }
  return {center, sums, per_element};
}
// The same, from an origin that may be far from the mean.
template <typename T, typename A>
__device__ __forceinline__ Moments<A> MomentsOf(A origin, double per_element, const auto& sum_up) {
  double sums[2];
  sum_up.template operator()<A>(origin, sums);
  const Moments<A> first{origin, sums, per_element};
  if (!LostDigits(sums, first)) return first;
  return MomentsAbout<T>(first.Mean(), per_element, sum_up);
}

// Sets a bundle's statistics as SetStatistics does.
template <typename A>
__device__ __forceinline__ void SetBundleStatistics(const BatchNormFwdArgs& args, bool stores,
                                                    std::int64_t item, const Moments<A>& of,
                                                    double per_element, A (&own)[3]) {
  const double variance = of.squares * per_element;
  SetStatistics(args, stores, item, of.center, of.offset, variance < 0 ? 0.0 : variance, own);
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

// Chan's merge of the moments of a cluster's blocks, in a fixed order. Distances are from block 0's
// mean, so that equal means stay as they are.
template <typename A>
__device__ __forceinline__ void MergeBlocks(const auto& block, Moments<A>& moments) {
  double of[3] = {static_cast<double>(moments.center), moments.offset, moments.squares};
  block.Exchange(of);  // lane r has block r's
  const int blocks = 1 << block.cut.block_bits;
  const double count = block.lane() < blocks ? block.Elements(block.lane()) : 0;
  const double center = __shfl_sync(0xffffffffu, of[0], 0);
  const double offset = __shfl_sync(0xffffffffu, of[1], 0);
  const double distance = count > 0 ? (of[0] - center) + (of[1] - offset) : 0.0;
  double mean[1] = {count * block.cut.per_element * distance};
  block.template SumLanes<1 << kClusterBits>(mean);
  const double from_mean = distance - mean[0];
  double squares[1] = {of[2] + count * from_mean * from_mean};
  block.template SumLanes<1 << kClusterBits>(squares);
  moments.center = static_cast<A>(center), moments.offset = offset + mean[0];
  moments.squares = squares[0];
}

// A block or a cluster has a bundle: statistics, then y. kOneChannel: a vector has no elements of
// two channels.
template <typename T, int W, bool kOneChannel, bool kCluster>
__global__ void __launch_bounds__(kRegisterWarps* kWarp, 2)
    BundleFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                    const __grid_constant__ BundlePieces cut) {
  using A = Accum<T>;
  extern __shared__ __align__(128) char shared[];
  const BundleBlock<T, W, 1, kCluster> block{args.shape, cut, shared};
  if (!block.exists) return;
  const T* const x = static_cast<const T*>(args.x) + block.start;
  block.Load({x});
  A* const scales = block.Numbers();
  A* const biases = scales + cut.bundle;
  for (int c = static_cast<int>(threadIdx.x); c < cut.bundle; c += static_cast<int>(blockDim.x)) {
    scales[c] = ParamAt<A>(args.scale, block.group, block.first_channel + c, 1);
    biases[c] = ParamAt<A>(args.bias, block.group, block.first_channel + c, 0);
  }
  const T* const own_x = x + block.FirstVector(block.first) * W;
  const int elements = block.Elements(block.rank);
  const A origin = OriginOf<A>([&](int i) { return static_cast<A>(own_x[i * (elements / 4)]); });
  const double per_element = kCluster ? 1 / static_cast<double>(elements) : cut.per_element;
  const auto load = [&](int vector, A(&values)[W]) {
    Widen(LoadPlain<W>(block.At(0, vector)), values);
  };

  const auto sum_up = [&]<typename S>(A center, double (&sums)[2]) {
    S offset = 0, square = 0;
    sums[0] = sums[1] = 0;
    block.ForLoaded(
        [&](int vector, int) {
          A values[W];
          load(vector, values);
#pragma unroll
          for (int j = 0; j < W; ++j) AddCentered<S>(values[j], center, offset, square);
        },
        [&](int) {
          sums[0] += static_cast<double>(offset), sums[1] += static_cast<double>(square);
          offset = square = 0;
        });
    block.Sum(sums);
  };
  Moments<A> moments = MomentsOf<T>(origin, per_element, sum_up);
  if constexpr (kCluster) MergeBlocks(block, moments);
  block.HasRead();
  A own[3];
  const bool stores = block.rank == 0 && threadIdx.x == 0;
  SetBundleStatistics(args, stores, block.item, moments, cut.per_element, own);

  const int inner = static_cast<int>(args.shape.inner);
  const auto store_y = [&](int vector, int channel) {
    A values[W];
    load(vector, values);
    A scale[W], bias[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int of_bundle = kOneChannel ? channel : (vector * W + j) / inner;
      scale[j] = scales[of_bundle], bias[j] = biases[of_bundle];
    }
    StoreY<T>(args, scale, bias, own, block.start + vector * W, values);
  };
  if (args.y != nullptr) block.ForVectors(store_y);
  block.WaitForReaders();
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

  // Squares are of distances from the mean. In registers, that takes little time.
  const A first = static_cast<A>(x[0]), origin = isfinite(first) ? first : A{0};
  A distance = 0;
  of.ForVectors([&](int v, int) {
#pragma unroll
    for (int j = 0; j < W; ++j) distance += values[v][j] - origin;
  });
  double sum[1] = {static_cast<double>(distance)};
  of.run.Sums(sum);
  const A center = static_cast<A>(static_cast<double>(origin) + sum[0] * cut.per_element);
  const auto sum_up = [&]<typename S>(A about, double (&sums)[2]) {
    S offset = 0, square = 0;
    of.ForVectors([&](int v, int) {
#pragma unroll
      for (int j = 0; j < W; ++j) AddCentered<S>(values[v][j], about, offset, square);
    });
    sums[0] = static_cast<double>(offset), sums[1] = static_cast<double>(square);
    of.run.Sums(sums);
  };
  A own[3];
  const bool stores = of.run.lane() == 0;
  SetBundleStatistics(args, stores, of.item, MomentsAbout<T>(center, cut.per_element, sum_up),
                      cut.per_element, own);

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

// A block has a panel: statistics, then y. kOneBundle: a vector has no elements of two bundles.
template <typename T, int W, bool kOneBundle>
__global__ void __launch_bounds__(kPanelWarps* kWarp, 4)
    PanelFwdKernel(const __grid_constant__ BatchNormFwdArgs args,
                   const __grid_constant__ PanelLayout cut) {
  using A = Accum<T>;
  enum { kMeanOf, kRstdOf, kDeltaOf, kCenter, kNumbers };  // of a bundle
  static_assert(kNumbers <= kPanelNumbers);
  constexpr int kBundles = kOneBundle ? 1 : W;
  extern __shared__ __align__(128) char shared[];
  const Panel<T, W, 1, kBundles> panel{args.shape, cut, shared};
  if (!panel.exists) return;
  const T* const x = static_cast<const T*>(args.x);
  panel.Load({x});
  const auto sample = [&](int i) { return i * cut.rows / 4 * panel.channels; };
  const auto origin_of = [&](int bundle) {
    const T* const from = x + panel.At(bundle * cut.bundle);
    return OriginOf<A>([&](int i) { return static_cast<A>(from[sample(i) + i * cut.bundle / 4]); });
  };
  const auto load = [&](int i, A(&values)[W]) { Widen(LoadPlain<W>(panel.Array(0) + i), values); };
  const auto unchanged = [](bool, int, const auto&) {};

  A centers[kBundles];
  const auto sum_up = [&] {
    A sums[2][kBundles] = {};
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
  };
  const bool stores = panel.run().lane() == 0;
  const auto set_statistics = [&](int bundle, const Moments<A>& moments) {
    A own[3];
    SetBundleStatistics(args, stores, panel.Item(bundle), moments, cut.per_element, own);
#pragma unroll
    for (int v = 0; v < 3; ++v) {
      if (stores) panel.Number(kMeanOf + v, bundle) = own[v];
    }
  };
  if (kBundles > 1 && cut.bundle == 1) {  // the same as below, by vectors
    A samples[4][W];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Widen(LoadPlain<W>(x + panel.At(panel.column) + sample(i)), samples[i]);
    }
#pragma unroll
    for (int j = 0; j < kBundles; ++j) {
      centers[j] = OriginOf<A>([&](int i) { return samples[i][j]; });
    }
  } else {
#pragma unroll
    for (int j = 0; j < kBundles; ++j) centers[j] = origin_of(panel.BundleOf(j));
  }
  WaitForCopies<0>();
  sum_up();
  A scale[W], bias[W];
  const std::int64_t group = panel.GroupOf(panel.column), channel = panel.ChannelOf(panel.column);
  LoadParam(args.scale, group, channel, A{1}, scale);
  LoadParam(args.bias, group, channel, A{0}, bias);
  __syncthreads();  // sums are written
  bool again = false;
  panel.ForBundles([&](int bundle) {
    double sums[2];
    panel.AddUp(bundle, sums, unchanged);
    const Moments<A> moments{origin_of(bundle), sums, cut.per_element};
    const bool lost = LostDigits(sums, moments);
    set_statistics(bundle, moments);
    again |= lost;
    // The center of a second pass over shared memory. NaN: there is none, or the mean is NaN.
    if (stores) {
      panel.Number(kCenter, bundle) = lost ? moments.Mean() : std::numeric_limits<A>::quiet_NaN();
    }
  });
  if (__syncthreads_or(again)) {  // statistics are written, and sums have been read
#pragma unroll
    for (int j = 0; j < kBundles; ++j) centers[j] = panel.Number(kCenter, panel.BundleOf(j));
    sum_up();
    __syncthreads();  // sums are written
    panel.ForBundles([&](int bundle) {
      const A center = panel.Number(kCenter, bundle);
      if (isnan(center)) return;
      double sums[2];
      panel.AddUp(bundle, sums, unchanged);
      if (NeedsSecondLook<T>(double2{sums[0], sums[1]})) {  // from the elements
        sums[0] = sums[1] = 0;
        for (int r = 0; r < cut.rows; ++r) {
          for (int i = panel.run().lane(); i < cut.bundle; i += panel.run().lanes) {
            const T value = panel.Array(0)[r * cut.channels + bundle * cut.bundle + i];
            AddCentered<double>(static_cast<A>(value), center, sums[0], sums[1]);
          }
        }
        panel.run().Sums(sums);
      }
      set_statistics(bundle, {center, sums, cut.per_element});
    });
    __syncthreads();  // statistics are written
  }
  if (args.y == nullptr) return;

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
  const auto block = [&]<bool kCluster>() {
    return channel ? BundleFwdKernel<T, W, true, kCluster>
                   : BundleFwdKernel<T, W, W == 1, kCluster>;
  };
  const BundleKernels<BatchNormFwdArgs> kernels{
      plan.block.block_bits == 0 ? block.template operator()<false>()
                                 : block.template operator()<W != 1>(),
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
