// Sum of squares over many arrays, and their scaling in place, CUDA. cuda/clip/leaves.cuh
// explains how leaves are cut into chunks and reach the kernels.
//
// Sum of squares, two kernels:
//   1. Each block writes its partial sum, a double, to the workspace. Further launches add to it.
//   2. Each group's partial sums are added up in a fixed order and split into ranges.
// How the work is cut depends only on the sizes and the device, so every run gives equal results.
// Memory traffic: one read of every leaf, and at most 16 KB of partial sums per group.
//
// The first kernel's grid is a whole number of waves, up to kMaxPartialSums. There are several
// waves so that multiprocessors that run ahead take more blocks. They are whole because the few
// blocks of a partial wave could not saturate memory. A multiprocessor has five blocks, whose
// threads have four 16-byte loads under way each: up to 80 KB. An H200 needs about 32 KB.
//
// Scaling is one kernel of many short blocks, with one read and one write of every leaf. If both
// factors are 1, blocks end at once without a read or write. The kernel goes from the last chunk to
// the first: the L2 cache still has what the norm has read last.
//
//   leaf         One array of the tree, [groups, elements]. vmap adds the groups.
//   table        The leaves of one launch: at most kSmallTable or kLargeTable.
//   chunk        16 KB of one leaf in one group. A leaf's last chunk may be shorter.
//   slot         A run of chunks of a table. A block has one slot of one group.
//   piece        The elements of one leaf in a slot.
//   range        huge, normal or tiny. A group's sum is stored as one of them. A float32 result is
//                huge from 2^96 on, and tiny below 2^-96. Both are stored times a power of two.
//   factor pair  The two factors of a group. An element is multiplied by one after the other,
//                because their product may leave the range of their dtype.
//
// One group of a table of four leaves. Each slot is a block's, and leaves one partial sum:
//
//   leaves  |        leaf 0         |leaf1|leaf2|  leaf 3   |
//   chunks  |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |
//   slots   |  slot 0   |     slot 1      |     slot 2      |
//   pieces  |   piece   |   piece   |piece|piece|   piece   |
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
constexpr int kBlocksPerMultiprocessor = 5;
// Threads and chunks of a block that scales, and such blocks per multiprocessor. If
// chunks are few, a block has one. If nothing is clipped, only the start of warps takes time, 11 a
// nanosecond. Two turns per block need fewer warps.
constexpr int kScaleThreads = 512;
constexpr int kScaleChunks = 8;
constexpr int kScaleBlocks = 2;

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
__device__ __forceinline__ double SumOfSquaresOf(const Pack<T, kVec<T>>& pack,
                                                 float max_float_sum) {
  if constexpr (sizeof(T) == 2) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kVec<T>; ++k) {
      const float x = static_cast<float>(pack.v[k]);
      sum = fmaf(x, x, sum);
    }
    if (sum >= kMinFloatSum && sum <= max_float_sum) return static_cast<double>(sum);
  }
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kVec<T>; ++k) sum += Square(pack.v[k]);
  return sum;
}

// This thread's share of the sum over x[0, count).
template <typename T>
__device__ __forceinline__ double ShareOf(const T* __restrict__ x, std::int64_t count,
                                          float max_float_sum) {
  const std::int64_t thread = threadIdx.x;
  const Division<T> division(x, count);
  double sum = 0;
  if (thread < division.head) sum = Square(x[thread]);
  if (division.tail() < count) sum += Square(x[division.tail()]);

  const uint4* __restrict__ body = reinterpret_cast<const uint4*>(x + division.head);
  for (std::int64_t first = thread; first < division.packs; first += kLoads * kThreads) {
    // All loads come before the first use, so that they are under way together.
    Pack<T, kVec<T>> packs[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool inside = first + k * kThreads < division.packs;
      *reinterpret_cast<uint4*>(&packs[k]) =
          inside ? __ldg(body + first + k * kThreads) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * kThreads < division.packs) sum += SumOfSquaresOf(packs[k], max_float_sum);
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
__device__ __forceinline__ Pack<T, W> ScaledPack(const Pack<T, W>& pack, FactorPair<A> factors) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<A, float>) {
    float values[W];
    Widen(pack, values);
#pragma unroll
    for (float& value : values) value = value * factors.first * factors.second;
    return Narrow<T>(values);
  } else {
    Pack<T, W> scaled;
#pragma unroll
    for (int j = 0; j < W; ++j) scaled.v[j] = Scaled(pack.v[j], factors);
    return scaled;
  }
}

// Scales this thread's share of x[0, count).
template <typename T, typename A>
__device__ __forceinline__ void ScaleShare(T* x, std::int64_t count, FactorPair<A> factors) {
  constexpr int W = kVec<T>;
  const std::int64_t thread = threadIdx.x;
  const Division<T> division(x, count);
  if (thread < division.head) x[thread] = Scaled(x[thread], factors);
  if (division.tail() < count) x[division.tail()] = Scaled(x[division.tail()], factors);

  constexpr int kAtOnce = 8;  // packs of a thread in a turn: half of a block's chunks
  for (std::int64_t first = thread; first < division.packs; first += kAtOnce * kScaleThreads) {
    T* const p = x + division.head + first * W;
    const int last =
        static_cast<int>(min(division.packs - first, std::int64_t{kAtOnce} * kScaleThreads));
    Pack<T, W> packs[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kScaleThreads < last) packs[k] = LoadPackOnce<W>(p + k * kScaleThreads * W);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k * kScaleThreads < last) {
        StorePackOnce(p + k * kScaleThreads * W, ScaledPack(packs[k], factors));
      }
    }
  }
}

// --- Kernels -------------------------------------------------------------------------------------

// One block per (group, slot). partials: [groups, slots]. accumulate: add to the old partial sums.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    PartialSumKernel(const __grid_constant__ LeafTable<kCapacity> table,
                     double* __restrict__ partials, float max_float_sum, bool accumulate) {
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  LaunchNext();
  const std::int64_t item = ItemOfBlock();
  if (item >= table.groups * table.slots) return;
  double share = 0;
  ForPieces(table, item / table.slots, item % table.slots,
            [&](const auto* x, std::int64_t count) { share += ShareOf(x, count, max_float_sum); });
  const double sum = Reduce(storage).Sum(share);
  if (threadIdx.x == 0) partials[item] = accumulate ? partials[item] + sum : sum;
}

// The results of each group from its partial sums, [groups, slots]. One block per group.
template <typename A, int kFinalizeThreads>
__global__ void __launch_bounds__(kFinalizeThreads)
    FinalizeKernel(const double* partials, std::int64_t groups, std::int32_t slots, A* huge,
                   A* normal, A* tiny) {
  using Reduce = cub::BlockReduce<double, kFinalizeThreads>;
  __shared__ typename Reduce::TempStorage storage;
  WaitForKernelBefore();
  const std::int64_t group = ItemOfBlock();
  if (group >= groups) return;
  const double* const mine = partials + group * slots;
  double share = 0;
#pragma unroll 8
  for (std::int32_t slot = static_cast<std::int32_t>(threadIdx.x); slot < slots;
       slot += kFinalizeThreads) {
    share += mine[slot];
  }
  const double sum = Reduce(storage).Sum(share);
  if (threadIdx.x == 0) {
    const RangedSum<A> result = Split<A>(sum);
    huge[group] = result.huge;
    normal[group] = result.normal;
    tiny[group] = result.tiny;
  }
}

// One block per (group, slot). firsts, seconds: [groups], the factors.
template <typename A>
__global__ void __launch_bounds__(kScaleThreads, sizeof(A) == 8 ? 1 : kScaleBlocks)
    ScaleKernel(const __grid_constant__ LeafTable<kSmallTable> table, const A* __restrict__ firsts,
                const A* __restrict__ seconds) {
  const std::int64_t items = table.groups * table.slots;
  for (std::int64_t item = items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
    const std::int64_t group = item / table.slots;
    const FactorPair<A> factors{__ldg(firsts + group), __ldg(seconds + group)};
    if (factors.Keeps()) continue;
    ForPieces(table, group, item % table.slots, [&]<typename T>(const T* x, std::int64_t count) {
      ScaleShare(const_cast<T*>(x), count, factors);  // a table for scaling has results only
    });
  }
}

// --- Launchers -----------------------------------------------------------------------------------

// Partial sums per group: the least of three numbers. These are the chunks of the largest table,
// the room in the workspace, and the blocks of full waves for all groups together.
std::int64_t SlotsFor(const SumOfSquaresArgs& args, std::size_t capacity) {
  std::int64_t most_chunks = 0;
  for (std::size_t first = 0; first < args.leaves.size(); first += capacity) {
    most_chunks = std::max(most_chunks, ChunksOfTable(args.leaves, first, capacity));
  }
  const std::int64_t wave = std::int64_t{kBlocksPerMultiprocessor} * MultiprocessorCount();
  const std::int64_t blocks = wave * std::max<std::int64_t>(1, kMaxPartialSums / wave);
  return std::min(
      {most_chunks, args.workspace_doubles / args.groups, CeilDiv(blocks, args.groups)});
}

template <int kCapacity>
ffi::Error LaunchPartialSums(cudaStream_t stream, const SumOfSquaresArgs& args,
                             std::int64_t slots) {
  const auto launch = [&](LeafTable<kCapacity>& table, std::int64_t, std::size_t first) {
    table.slots = static_cast<std::int32_t>(slots);
    PartialSumKernel<kCapacity><<<BlockPerItem(args.groups * slots), kThreads, 0, stream>>>(
        table, static_cast<double*>(args.workspace), MaxFloatSum(args.dtype), first > 0);
  };
  return ForTables<kCapacity>(kSum, args.leaves, args.groups, launch);
}

// A call has few leaves: see _LEAVES_PER_CALL in jax_gradops/_ops/clip/kernels.py.
template <typename A>
ffi::Error LaunchScale(cudaStream_t stream, const ScaleArgs& args) {
  const std::int64_t resident = std::int64_t{kScaleBlocks} * MultiprocessorCount();
  const auto launch = [&](LeafTable<kSmallTable>& table, std::int64_t chunks, std::size_t) {
    // Few chunks are spread over all multiprocessors before a block gets several.
    const bool many = chunks * args.groups >= 2 * kScaleChunks * resident;
    const std::int64_t slots = many ? CeilDiv(chunks, kScaleChunks) : chunks;
    table.slots = static_cast<std::int32_t>(
        std::min<std::int64_t>(slots, std::numeric_limits<std::int32_t>::max()));
    ScaleKernel<A><<<GridBlocks(args.groups * table.slots), kScaleThreads, 0, stream>>>(
        table, static_cast<const A*>(args.factors), static_cast<const A*>(args.second_factors));
  };
  return ForTables<kSmallTable>(kScale, args.leaves, args.groups, launch);
}

template <typename A>
cudaError_t LaunchFinalize(cudaStream_t stream, const SumOfSquaresArgs& args, std::int64_t slots) {
  // With many groups, each group has few partial sums, and a warp is enough.
  const auto kernel = slots <= 64 ? FinalizeKernel<A, 32> : FinalizeKernel<A, kThreads>;
  cudaLaunchAttribute early{};
  cudaLaunchConfig_t config{};
  config.gridDim = BlockPerItem(args.groups);
  config.blockDim = dim3(slots <= 64 ? 32 : kThreads);
  config.stream = stream;
  config.attrs = &early, config.numAttrs = StartEarly(early);
  return cudaLaunchKernelEx(&config, kernel, static_cast<const double*>(args.workspace),
                            args.groups, static_cast<std::int32_t>(slots),
                            static_cast<A*>(args.huge), static_cast<A*>(args.normal),
                            static_cast<A*>(args.tiny));
}

}  // namespace

ffi::Error SumOfSquares(CudaContext stream, const SumOfSquaresArgs& args) {
  if (args.groups == 0) return ffi::Error::Success();
  const bool small = args.leaves.size() <= kSmallTable;
  const std::int64_t slots = SlotsFor(args, small ? kSmallTable : kLargeTable);
  const ffi::Error error = small ? LaunchPartialSums<kSmallTable>(stream, args, slots)
                                 : LaunchPartialSums<kLargeTable>(stream, args, slots);
  if (error.failure()) return error;
  return ToError(kSum, args.dtype == ffi::F64 ? LaunchFinalize<double>(stream, args, slots)
                                              : LaunchFinalize<float>(stream, args, slots));
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
