// Sum of squares over many arrays, and their scaling in place, CUDA. README.md has the words.
//
// Sum of squares, two kernels:
//   1. Each block writes its partial sum, a double, to the workspace. Further launches add to it.
//   2. Each group's partial sums are added up in a fixed order and split into ranges.
// How the work is cut depends only on the sizes and the device, so every run gives equal results.
// Memory traffic: one read of every leaf, and at most 16 KB of partial sums per group.
//
// Scaling is one kernel of many short blocks, with one read and one write of every leaf. If both
// factors are 1, blocks end at once without a read or write. The kernel goes from the last chunk to
// the first: the L2 cache still has what the norm has read last.
#include <cub/block/block_reduce.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/dtype.h"
#include "cuda/clip/leaves.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"
#include "ops/global_norm.h"

namespace gradops {
namespace {

constexpr const char* kSum = "sum_of_squares";
constexpr const char* kScale = "scale";

// --- Sums of one thread --------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ double Square(T value) {
  double x;
  if constexpr (sizeof(T) == 2) {
    x = static_cast<double>(static_cast<float>(value));
  } else {
    x = static_cast<double>(value);
  }
  return x * x;
}

template <typename T>
__device__ __forceinline__ double SumOfSquaresOf(const Vector<T, kVec<T>>& vector,
                                                 float max_float_sum) {
  if constexpr (sizeof(T) == 2) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kVec<T>; ++k) {
      const float x = static_cast<float>(vector.v[k]);
      sum = fmaf(x, x, sum);
    }
    if (sum >= kMinFloatSum && sum <= max_float_sum) return static_cast<double>(sum);
  }
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kVec<T>; ++k) sum += Square(vector.v[k]);
  return sum;
}

// The sum over this thread's elements of x[0, count).
template <typename T>
__device__ __forceinline__ double ThreadSum(const T* __restrict__ x, std::int64_t count,
                                            float max_float_sum) {
  const std::int64_t thread = threadIdx.x;
  const VectorSplit<T> split(x, count);
  double sum = 0;
  if (thread < split.head) sum = Square(x[thread]);
  if (split.tail() < count) sum += Square(x[split.tail()]);

  const uint4* __restrict__ body = reinterpret_cast<const uint4*>(x + split.head);
  for (std::int64_t first = thread; first < split.vectors; first += kLoads * kSumThreads) {
    // All loads come before the first use, so that they are under way together.
    Vector<T, kVec<T>> vectors[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool inside = first + k * kSumThreads < split.vectors;
      *reinterpret_cast<uint4*>(&vectors[k]) =
          inside ? __ldg(body + first + k * kSumThreads) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * kSumThreads < split.vectors) sum += SumOfSquaresOf(vectors[k], max_float_sum);
    }
  }
  return sum;
}

// --- Scaling by one thread -----------------------------------------------------------------------

template <typename T, typename A>
__device__ __forceinline__ T Scaled(T value, FactorPair<A> factors) {
  using C = std::conditional_t<std::is_same_v<T, double>, double, A>;
  C wide;
  if constexpr (sizeof(T) == 2) {
    wide = static_cast<float>(value);
  } else {
    wide = value;
  }
  return static_cast<T>(wide * static_cast<C>(factors.first) * static_cast<C>(factors.second));
}

template <int W, typename T, typename A>
__device__ __forceinline__ Vector<T, W> ScaledVector(const Vector<T, W>& vector,
                                                     FactorPair<A> factors) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<A, float>) {
    float values[W];
    Widen(vector, values);
#pragma unroll
    for (float& value : values) value = value * factors.first * factors.second;
    return Narrow<T>(values);
  } else {
    Vector<T, W> scaled;
#pragma unroll
    for (int j = 0; j < W; ++j) scaled.v[j] = Scaled(vector.v[j], factors);
    return scaled;
  }
}

// Scales this thread's elements of x[0, count).
template <typename T, typename A>
__device__ __forceinline__ void ScaleElements(T* x, std::int64_t count, FactorPair<A> factors) {
  constexpr int W = kVec<T>;
  const std::int64_t thread = threadIdx.x;
  const VectorSplit<T> split(x, count);
  if (thread < split.head) x[thread] = Scaled(x[thread], factors);
  if (split.tail() < count) x[split.tail()] = Scaled(x[split.tail()], factors);

  constexpr int kAtOnce = 8;  // vectors that a thread loads at once: half of a block's chunks
  for (std::int64_t first = thread; first < split.vectors; first += kAtOnce * kScaleThreads) {
    T* const p = x + split.head + first * W;
    const int last =
        static_cast<int>(min(split.vectors - first, std::int64_t{kAtOnce} * kScaleThreads));
    Vector<T, W> vectors[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kScaleThreads < last) vectors[k] = LoadVectorOnce<W>(p + k * kScaleThreads * W);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kScaleThreads < last) {
        StoreVectorOnce(p + k * kScaleThreads * W, ScaledVector(vectors[k], factors));
      }
    }
  }
}

// --- Kernels -------------------------------------------------------------------------------------

// One block per (group, segment). partials: [groups, segments]. accumulate: add to the old partial
// sums.
template <int kCapacity>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    PartialSumKernel(const __grid_constant__ LeafTable<kCapacity> table,
                     double* __restrict__ partials, float max_float_sum, bool accumulate) {
  using Reduce = cub::BlockReduce<double, kSumThreads>;
  __shared__ typename Reduce::TempStorage storage;
  LaunchNext();
  const std::int64_t item = ItemOfBlock();
  if (item >= table.groups * table.segments) return;
  double thread_sum = 0;
  ForPieces(
      table, item / table.segments, item % table.segments,
      [&](const auto* x, std::int64_t count) { thread_sum += ThreadSum(x, count, max_float_sum); });
  const double sum = Reduce(storage).Sum(thread_sum);
  if (threadIdx.x == 0) partials[item] = accumulate ? partials[item] + sum : sum;
}

// The results of each group from its partial sums, [groups, segments]. One block per group.
template <typename A, int kFinalizeThreads>
__global__ void __launch_bounds__(kFinalizeThreads)
    FinalizeKernel(const double* partials, std::int64_t groups, std::int32_t segments, A* huge,
                   A* normal, A* tiny) {
  using Reduce = cub::BlockReduce<double, kFinalizeThreads>;
  __shared__ typename Reduce::TempStorage storage;
  WaitForKernelBefore();
  const std::int64_t group = ItemOfBlock();
  if (group >= groups) return;
  const double* const mine = partials + group * segments;
  double thread_sum = 0;
#pragma unroll 8
  for (std::int32_t segment = static_cast<std::int32_t>(threadIdx.x); segment < segments;
       segment += kFinalizeThreads) {
    thread_sum += mine[segment];
  }
  const double sum = Reduce(storage).Sum(thread_sum);
  if (threadIdx.x == 0) {
    const RangedSum<A> result = Split<A>(sum);
    huge[group] = result.huge;
    normal[group] = result.normal;
    tiny[group] = result.tiny;
  }
}

// One block per (group, segment). firsts, seconds: [groups], the factors.
template <typename A>
__global__ void __launch_bounds__(kScaleThreads, sizeof(A) == 8 ? 1 : kScaleBlocks)
    ScaleKernel(const __grid_constant__ LeafTable<kSmallTable> table, const A* __restrict__ firsts,
                const A* __restrict__ seconds) {
  const std::int64_t items = table.groups * table.segments;
  for (std::int64_t item = items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
    const std::int64_t group = item / table.segments;
    const FactorPair<A> factors{__ldg(firsts + group), __ldg(seconds + group)};
    if (factors.Keeps()) continue;
    ForPieces(table, group, item % table.segments, [&]<typename T>(const T* x, std::int64_t count) {
      ScaleElements(const_cast<T*>(x), count, factors);  // a table for scaling has results only
    });
  }
}

// --- Launchers -----------------------------------------------------------------------------------

// The chunks of the largest table.
std::int64_t MostChunks(const std::vector<Leaf>& leaves, std::size_t capacity) {
  std::int64_t most = 0;
  for (std::size_t first = 0; first < leaves.size(); first += capacity) {
    most = std::max(most, ChunksOfTable(leaves, first, capacity));
  }
  return most;
}

template <int kCapacity>
ffi::Error LaunchPartialSums(cudaStream_t stream, const SumOfSquaresArgs& args,
                             const ClipPlan& plan) {
  const auto launch = [&](LeafTable<kCapacity>& table, std::int64_t, std::size_t first) {
    table.segments = plan.segments;
    PartialSumKernel<kCapacity>
        <<<BlockPerItem(args.groups * plan.segments), plan.threads, 0, stream>>>(
            table, static_cast<double*>(args.workspace), MaxFloatSum(args.dtype), first > 0);
  };
  return ForTables<kCapacity>(kSum, args.leaves, args.groups, launch);
}

template <typename A>
cudaError_t LaunchFinalize(cudaStream_t stream, const SumOfSquaresArgs& args,
                           const ClipPlan& plan) {
  const auto kernel =
      plan.finalize_threads == 32 ? FinalizeKernel<A, 32> : FinalizeKernel<A, kSumThreads>;
  cudaLaunchAttribute early{};
  cudaLaunchConfig_t config{};
  config.gridDim = BlockPerItem(args.groups);
  config.blockDim = dim3(static_cast<unsigned>(plan.finalize_threads));
  config.stream = stream;
  config.attrs = &early, config.numAttrs = StartEarly(early);
  return cudaLaunchKernelEx(&config, kernel, static_cast<const double*>(args.workspace),
                            args.groups, plan.segments, static_cast<A*>(args.huge),
                            static_cast<A*>(args.normal), static_cast<A*>(args.tiny));
}

// A call has few leaves: see _LEAVES_PER_CALL in jax_gradops/_ops/clip/kernels.py.
template <typename A>
ffi::Error LaunchScale(cudaStream_t stream, const ScaleArgs& args) {
  const auto launch = [&](LeafTable<kSmallTable>& table, std::int64_t chunks, std::size_t) {
    const ClipPlan plan = ChooseScalePlan({.chunks = chunks,
                                           .groups = args.groups,
                                           .workspace_doubles = 0,
                                           .multiprocessors = MultiprocessorCount()});
    table.segments = plan.segments;
    ScaleKernel<A><<<GridBlocks(args.groups * plan.segments), plan.threads, 0, stream>>>(
        table, static_cast<const A*>(args.factors), static_cast<const A*>(args.second_factors));
  };
  return ForTables<kSmallTable>(kScale, args.leaves, args.groups, launch);
}

}  // namespace

ffi::Error SumOfSquares(CudaContext stream, const SumOfSquaresArgs& args) {
  if (args.groups == 0) return ffi::Error::Success();
  const bool small = args.leaves.size() <= kSmallTable;
  const ClipPlan plan =
      ChooseSumPlan({.chunks = MostChunks(args.leaves, small ? kSmallTable : kLargeTable),
                     .groups = args.groups,
                     .workspace_doubles = args.workspace_doubles,
                     .multiprocessors = MultiprocessorCount()});
  const ffi::Error error = small ? LaunchPartialSums<kSmallTable>(stream, args, plan)
                                 : LaunchPartialSums<kLargeTable>(stream, args, plan);
  if (error.failure()) return error;
  return ToError(kSum, args.dtype == ffi::F64 ? LaunchFinalize<double>(stream, args, plan)
                                              : LaunchFinalize<float>(stream, args, plan));
}

ffi::Error Scale(CudaContext stream, const ScaleArgs& args) {
  for (const Leaf& leaf : args.leaves) {
    if (leaf.result == leaf.data) continue;
    const std::int64_t bytes = args.groups * leaf.count * ByteWidthOf(leaf.dtype);
    const cudaError_t status = cudaMemcpyAsync(
        leaf.result, leaf.data, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) return ToError(kScale, status);
  }
  return args.dtype == ffi::F64 ? LaunchScale<double>(stream, args)
                                : LaunchScale<float>(stream, args);
}

}  // namespace gradops
