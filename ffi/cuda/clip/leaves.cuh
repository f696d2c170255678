// How the leaves of a tree reach global norm's kernels. README.md has the words and a picture.
//
// A table of leaves travels in a kernel's parameters (up to 32,764 bytes since CUDA 12.1). Leaves
// that do not fit take further launches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cuda/clip/plan.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"
#include "ops/global_norm.h"

namespace gradops {
namespace {

constexpr int kLoads = 4;  // 16-byte loads that a thread of the sum has under way
constexpr int kChunkBytes = kSumThreads * kLoads * kVecBytes;

enum class ElementType : std::uint32_t { kFloat, kDouble, kHalf, kBFloat16 };

// One leaf in 16 bytes. The number of elements follows from the number of chunks and `last`.
struct TableEntry {
  const void* data;          // [groups, count]
  std::uint32_t chunks_end;  // chunks of this leaf and all leaves before it in the table
  std::uint32_t last : 30;   // elements in the last chunk, at least 1
  std::uint32_t type : 2;    // ElementType
};
static_assert(sizeof(TableEntry) == 16);

template <int kCapacity>
struct LeafTable {
  std::int64_t groups;
  std::int32_t segments;  // in each group
  std::int32_t leaves;
  TableEntry entries[kCapacity];
};
constexpr int kOtherParameters = 24;
static_assert(sizeof(LeafTable<kSmallTable>) + kOtherParameters <= 4096 &&
              sizeof(LeafTable<kLargeTable>) + kOtherParameters <= 32764);

// Calls fn.operator()<T>(x, count) for each piece of a segment. A piece is data of one leaf,
// x[0, count). The whole block makes the call with equal arguments.
template <int kCapacity, typename Fn>
__device__ __forceinline__ void ForPieces(const LeafTable<kCapacity>& table, std::int64_t group,
                                          std::int64_t segment, const Fn& fn) {
  const std::int64_t chunks = table.entries[table.leaves - 1].chunks_end;
  std::int64_t chunk = chunks * segment / table.segments;
  const std::int64_t chunks_end = chunks * (segment + 1) / table.segments;
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
  for (int i = low; chunk < chunks_end; ++i) {
    const TableEntry& leaf = table.entries[i];
    const std::int64_t leaf_begin = i == 0 ? 0 : table.entries[i - 1].chunks_end;
    const std::int64_t leaf_end = leaf.chunks_end;
    const std::int64_t end = min(chunks_end, leaf_end);
    const auto run = [&]<typename T>() {
      constexpr std::int64_t kChunk = kChunkBytes / static_cast<int>(sizeof(T));
      const std::int64_t count = (leaf_end - leaf_begin - 1) * kChunk + leaf.last;
      const std::int64_t first = (chunk - leaf_begin) * kChunk;
      const std::int64_t stop = end == leaf_end ? count : (end - leaf_begin) * kChunk;
      fn(static_cast<const T*>(leaf.data) + group * count + first, stop - first);
    };
    switch (static_cast<ElementType>(leaf.type)) {  // one case for the whole block
      case ElementType::kFloat: run.template operator()<float>(); break;
      case ElementType::kDouble: run.template operator()<double>(); break;
      case ElementType::kHalf: run.template operator()<Half>(); break;
      case ElementType::kBFloat16: run.template operator()<BFloat16>(); break;
    }
    chunk = end;
  }
}

// The vectors of x[0, count), which may start at any element. They start at the first 16-byte
// boundary. Head and tail are shorter than a vector: a thread takes at most one element of each.
template <typename T>
struct VectorSplit {
  std::int64_t head, vectors;

  __device__ VectorSplit(const T* x, std::int64_t count) {
    const int misalignment = Misalignment(x);
    head = min(static_cast<std::int64_t>(misalignment == 0 ? 0 : kVec<T> - misalignment), count);
    vectors = (count - head) / kVec<T>;
  }
  // The calling thread's element of the tail; if the result is not below count, there is none.
  __device__ std::int64_t tail() const { return head + vectors * kVec<T> + threadIdx.x; }
};

// --- On the host ---------------------------------------------------------------------------------

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

// The number of chunks of a table whose first leaf is number `first`.
std::int64_t ChunksOfTable(const std::vector<Leaf>& leaves, std::size_t first,
                           std::size_t capacity) {
  std::int64_t chunks = 0;
  for (std::size_t i = first; i < std::min(first + capacity, leaves.size()); ++i)
    chunks += Chunks(leaves[i]);
  return chunks;
}

// Puts all leaves into tables, and calls launch(table, chunks, first) for each table. `first` is
// the number of the table's first leaf. launch fills in `segments`.
template <int kCapacity, typename Fn>
ffi::Error ForTables(const char* op, const std::vector<Leaf>& leaves, std::int64_t groups,
                     const Fn& launch) {
  LeafTable<kCapacity> table;
  table.groups = groups;
  for (std::size_t first = 0; first < leaves.size(); first += kCapacity) {
    const std::int64_t chunks = ChunksOfTable(leaves, first, kCapacity);
    if (chunks > std::numeric_limits<std::uint32_t>::max()) {
      return ffi::Error::InvalidArgument(std::string(op) + ": leaves of more than 64 TiB");
    }
    table.leaves =
        static_cast<std::int32_t>(std::min<std::size_t>(kCapacity, leaves.size() - first));
    std::int64_t chunks_end = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(table.leaves); ++i) {
      const Leaf& leaf = leaves[first + i];
      chunks_end += Chunks(leaf);
      TableEntry& entry = table.entries[i];
      entry.data = leaf.result == nullptr ? leaf.data : leaf.result;
      entry.chunks_end = static_cast<std::uint32_t>(chunks_end);
      entry.last =
          static_cast<std::uint32_t>(leaf.count - (Chunks(leaf) - 1) * ChunkElements(leaf));
      entry.type = static_cast<std::uint32_t>(TypeOf(leaf.dtype));
    }
    launch(table, chunks, first);
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
      return ToError(op, status);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace gradops
