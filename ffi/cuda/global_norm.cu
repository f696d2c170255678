// Sum of squares over many arrays, CUDA.
//
// Two kernels, or a few more where there are thousands of leaves:
//   1. Partial sums. A table of leaves travels in the kernel's parameters (up to 32,764 bytes since
//      CUDA 12.1); what does not fit takes further launches, which add to the same partial sums.
//      Leaves are cut into chunks of 16 KB, and each block sums a contiguous run of chunks, over as
//      many leaves as it spans: a large leaf is streamed by many blocks, and one block works
//      through many small leaves. One double per block goes to the workspace.
//   2. Each group's partial sums are summed in a fixed order and split into ranges.
// How the work is cut depends on the sizes and the device alone, so results are the same from run
// to run. Memory traffic: one read of every leaf, and at most 16 KB of partial sums per group.
//
// The grid is a whole number of waves, as many as kMaxPartialSums allows: several, so that
// multiprocessors that run ahead take more; whole, because the few blocks of a last, partial wave
// could not saturate memory. Five blocks per multiprocessor, each thread with four 16-byte loads
// under way, have up to 80 KB of loads in flight; an H200 needs about 32 KB.
#include <cub/block/block_reduce.cuh>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "ops/global_norm.h"

namespace gradops {
namespace {

constexpr const char* kOp = "sum_of_squares";
constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 5;
constexpr int kLoads = 4;  // 16-byte loads that a thread has under way
constexpr int kChunkBytes = kThreads * kLoads * kVecBytes;

// Table sizes: most models fit into the small one, whose parameters cost no more than any kernel's;
// the large one fills what CUDA allows.
constexpr int kSmallTable = 250;
constexpr int kLargeTable = 2040;

enum class ElementType : std::uint32_t { kFloat, kDouble, kHalf, kBFloat16 };

// One leaf in 16 bytes: its number of elements follows from that of its chunks and the rest.
struct TableEntry {
  const void* data;          // [groups, count]
  std::uint32_t chunks_end;  // chunks of this leaf and all before it in the table
  std::uint32_t last : 30;   // elements in the last chunk, at least 1
  std::uint32_t type : 2;    // ElementType
};
static_assert(sizeof(TableEntry) == 16);

template <int kCapacity>
struct LeafTable {
  double* partials;  // [groups, slots]
  std::int64_t groups;
  std::int32_t slots;
  std::int32_t leaves;
  float max_float_sum;  // see MaxFloatSum
  bool accumulate;      // add to the partial sums rather than write them
  TableEntry entries[kCapacity];
};
static_assert(sizeof(LeafTable<kSmallTable>) <= 4096 && sizeof(LeafTable<kLargeTable>) <= 32764);

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

// This thread's share of the sum over x[0, count), which may start at any element.
template <typename T>
__device__ __forceinline__ double ShareOf(const T* __restrict__ x, std::int64_t count,
                                          float max_float_sum) {
  const std::int64_t thread = threadIdx.x;
  // The body starts at the first 16-byte boundary; head and tail are shorter than one vector.
  const int misalignment = Misalignment(x);
  const std::int64_t head =
      min(static_cast<std::int64_t>(misalignment == 0 ? 0 : kVec<T> - misalignment), count);
  const std::int64_t vectors = (count - head) / kVec<T>;
  const std::int64_t tail = head + vectors * kVec<T> + thread;
  double sum = 0;
  if (thread < head) sum = Square(x[thread]);
  if (tail < count) sum += Square(x[tail]);

  const uint4* __restrict__ body = reinterpret_cast<const uint4*>(x + head);
  for (std::int64_t first = thread; first < vectors; first += kLoads * kThreads) {
    // All loads before the first use, so that they are under way together.
    Pack<T, kVec<T>> packs[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool inside = first + k * kThreads < vectors;
      *reinterpret_cast<uint4*>(&packs[k]) =
          inside ? __ldg(body + first + k * kThreads) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * kThreads < vectors) sum += SumOfSquaresOf(packs[k], max_float_sum);
    }
  }
  return sum;
}

// This thread's share of chunks [begin, end) of the leaf in one group.
template <typename T>
__device__ __forceinline__ double ShareOf(const TableEntry& leaf, std::int64_t leaf_chunks,
                                          std::int64_t group, std::int64_t begin, std::int64_t end,
                                          float max_float_sum) {
  constexpr std::int64_t kChunk = kChunkBytes / static_cast<int>(sizeof(T));
  const std::int64_t count = (leaf_chunks - 1) * kChunk + leaf.last;
  const std::int64_t stop = end == leaf_chunks ? count : end * kChunk;
  const T* const data = static_cast<const T*>(leaf.data) + group * count;
  return ShareOf(data + begin * kChunk, stop - begin * kChunk, max_float_sum);
}

// This thread's share of the slot's run of chunks, over all leaves that the run spans.
template <int kCapacity>
__device__ __forceinline__ double ShareOf(const LeafTable<kCapacity>& table, std::int64_t group,
                                          std::int64_t slot) {
  const std::int64_t chunks = table.entries[table.leaves - 1].chunks_end;
  std::int64_t chunk = chunks * slot / table.slots;
  const std::int64_t chunks_end = chunks * (slot + 1) / table.slots;
  // The first leaf that ends after `chunk`.
  int low = 0;
  for (int high = table.leaves - 1; low < high;) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].chunks_end > chunk) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  double sum = 0;
  for (int i = low; chunk < chunks_end; ++i) {
    const TableEntry& leaf = table.entries[i];
    const std::int64_t leaf_begin = i == 0 ? 0 : table.entries[i - 1].chunks_end;
    const std::int64_t end = min(chunks_end, static_cast<std::int64_t>(leaf.chunks_end));
    const auto add = [&]<typename T>() {
      sum += ShareOf<T>(leaf, leaf.chunks_end - leaf_begin, group, chunk - leaf_begin,
                        end - leaf_begin, table.max_float_sum);
    };
    switch (static_cast<ElementType>(leaf.type)) {  // the same for the whole block
      case ElementType::kFloat: add.template operator()<float>(); break;
      case ElementType::kDouble: add.template operator()<double>(); break;
      case ElementType::kHalf: add.template operator()<Half>(); break;
      case ElementType::kBFloat16: add.template operator()<BFloat16>(); break;
    }
    chunk = end;
  }
  return sum;
}

// --- Kernels -------------------------------------------------------------------------------------

// One block per (group, slot).
template <int kCapacity>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    PartialSumKernel(const __grid_constant__ LeafTable<kCapacity> table) {
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const std::int64_t items = table.groups * table.slots;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const double share = ShareOf(table, item / table.slots, item % table.slots);
    const double sum = Reduce(storage).Sum(share);
    if (threadIdx.x == 0)
      table.partials[item] = table.accumulate ? table.partials[item] + sum : sum;
    __syncthreads();  // `storage` is free for the next item
  }
}

// Results of each group from its partial sums, [groups, slots]: one block per group.
template <typename A, int kFinalizeThreads>
__global__ void __launch_bounds__(kFinalizeThreads)
    FinalizeKernel(const double* __restrict__ partials, std::int64_t groups, std::int32_t slots,
                   A* __restrict__ huge, A* __restrict__ normal, A* __restrict__ tiny) {
  using Reduce = cub::BlockReduce<double, kFinalizeThreads>;
  __shared__ typename Reduce::TempStorage storage;
  for (std::int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const double* mine = partials + group * slots;
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
    __syncthreads();  // `storage` is free for the next group
  }
}

// --- Launchers -----------------------------------------------------------------------------------

ElementType TypeOf(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F64: return ElementType::kDouble;
    case ffi::F16: return ElementType::kHalf;
    case ffi::BF16: return ElementType::kBFloat16;
    default: return ElementType::kFloat;
  }
}

std::int64_t ChunkElements(const Leaf& leaf) {
  return kChunkBytes / ByteWidthOf(leaf.dtype);
}
std::int64_t Chunks(const Leaf& leaf) {
  return CeilDiv(leaf.count, ChunkElements(leaf));
}

// Chunks of the leaves from `first` on that go into one table.
std::int64_t ChunksOfTable(const std::vector<Leaf>& leaves, std::size_t first,
                           std::size_t capacity) {
  std::int64_t chunks = 0;
  for (std::size_t i = first; i < std::min(first + capacity, leaves.size()); ++i)
    chunks += Chunks(leaves[i]);
  return chunks;
}

// Partial sums per group: as many as the largest table has chunks, within the workspace, and no
// more than fill the device's waves with all groups together.
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
  LeafTable<kCapacity> table;
  table.partials = static_cast<double*>(args.workspace);
  table.groups = args.groups;
  table.slots = static_cast<std::int32_t>(slots);
  table.max_float_sum = MaxFloatSum(args.dtype);
  for (std::size_t first = 0; first < args.leaves.size(); first += kCapacity) {
    if (ChunksOfTable(args.leaves, first, kCapacity) > std::numeric_limits<std::uint32_t>::max()) {
      return ffi::Error::InvalidArgument(std::string(kOp) + ": leaves of more than 64 TiB");
    }
    const std::size_t leaves = std::min<std::size_t>(kCapacity, args.leaves.size() - first);
    std::int64_t chunks_end = 0;
    for (std::size_t i = 0; i < leaves; ++i) {
      const Leaf& leaf = args.leaves[first + i];
      chunks_end += Chunks(leaf);
      TableEntry& entry = table.entries[i];
      entry.data = leaf.data;
      entry.chunks_end = static_cast<std::uint32_t>(chunks_end);
      entry.last =
          static_cast<std::uint32_t>(leaf.count - (Chunks(leaf) - 1) * ChunkElements(leaf));
      entry.type = static_cast<std::uint32_t>(TypeOf(leaf.dtype));
    }
    table.leaves = static_cast<std::int32_t>(leaves);
    table.accumulate = first > 0;
    PartialSumKernel<kCapacity><<<GridBlocks(args.groups * slots), kThreads, 0, stream>>>(table);
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
      return ToError(kOp, status);
  }
  return ffi::Error::Success();
}

template <typename A>
void LaunchFinalize(cudaStream_t stream, const SumOfSquaresArgs& args, std::int64_t slots) {
  // A warp is enough for what many groups have each.
  const auto kernel = slots <= 64 ? FinalizeKernel<A, 32> : FinalizeKernel<A, kThreads>;
  kernel<<<GridBlocks(args.groups), slots <= 64 ? 32 : kThreads, 0, stream>>>(
      static_cast<const double*>(args.workspace), args.groups, static_cast<std::int32_t>(slots),
      static_cast<A*>(args.huge), static_cast<A*>(args.normal), static_cast<A*>(args.tiny));
}

}  // namespace

ffi::Error SumOfSquares(CudaContext stream, const SumOfSquaresArgs& args) {
  if (args.groups == 0) return ffi::Error::Success();
  const bool small = args.leaves.size() <= kSmallTable;
  const std::int64_t slots = SlotsFor(args, small ? kSmallTable : kLargeTable);
  const ffi::Error error = small ? LaunchPartialSums<kSmallTable>(stream, args, slots)
                                 : LaunchPartialSums<kLargeTable>(stream, args, slots);
  if (error.failure()) return error;
  if (args.dtype == ffi::F64) {
    LaunchFinalize<double>(stream, args, slots);
  } else {
    LaunchFinalize<float>(stream, args, slots);
  }
  return LastError(kOp);
}

}  // namespace gradops
