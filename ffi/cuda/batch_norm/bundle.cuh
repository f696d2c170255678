// Channels first: a block takes one bundle of a group, which lies in one piece of memory. If its
// arrays fit into shared memory, they are read once. If only x fits, dy is read twice. Small
// bundles need no shared memory (SmallBundle). forward.cu and backward.cu have the kernels.
//
// A channel is cut into pieces, and each piece is the work of a run of lanes of one warp. So each
// sum of a piece belongs to one channel. Runs are shorter than a warp if channels are short. In
// this picture, a channel has 4 vectors, a piece has 2, and there are two runs:
//
//   channel         0           1           2
//   vector     0  1  2  3  0  1  2  3  0  1  2  3
//   run        0  0  1  1  0  0  1  1  0  0  1  1
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/integers.h"
#include "common/shape.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

constexpr int kBundleWarps = 16;   // the most warps of a block
constexpr int kPieceVectors = 64;  // the most vectors of a piece

// The fewest lanes, a power of two, with which each has at most `each` of the vectors.
inline int LanesFor(std::int64_t vectors, int each) {
  int lanes = 1;
  while (std::int64_t{lanes} * each < vectors) lanes *= 2;
  return lanes;
}

// How a bundle is cut into pieces. All of it follows from the shape.
struct BundlePieces {
  int bundle;           // channels
  int channel_vectors;  // vectors of a channel
  int piece_vectors;    // vectors of a piece; the last piece of a channel may have fewer
  int channel_pieces;   // pieces of a channel
  int lanes;            // of a run
  int warps;
  int array_bytes;    // of a bundle of x
  int numbers_bytes;  // of the channels' numbers
  int shared_bytes;

  GRADOPS_HOST_DEVICE int pieces() const { return bundle * channel_pieces; }
  GRADOPS_HOST_DEVICE int runs() const { return warps * (kWarp / lanes); }  // of a block
};

// The pieces, or no warps if a bundle cannot be taken in this way. `held` arrays stay in shared
// memory, and two numbers for each channel.
template <typename T>
BundlePieces CutBundle(const ChannelShape& shape, std::int64_t bundle, const ChannelDevice& device,
                       int held) {
  constexpr std::int64_t kWidth = kVec<T>;
  constexpr int kNumbers = 2;
  const std::int64_t vectors = shape.inner / kWidth;
  if (shape.outer.rows != 1 || shape.inner % kWidth != 0) return {};
  const std::int64_t bytes = bundle * vectors * kVecBytes;
  const std::int64_t piece = std::min<std::int64_t>(vectors, kPieceVectors);
  const std::int64_t pieces = CeilDiv(vectors, piece) * bundle;
  const std::int64_t of_numbers =
      CeilDiv(bundle * kNumbers * std::int64_t{sizeof(Accum<T>)}, 16) * 16;
  const std::int64_t all = held * bytes + of_numbers + (pieces * 2 + 2 * kBundleWarps) * 8;
  if (all > MaxChannelBytes(device.shared_bytes)) return {};
  // The kernels use up to 64 registers: a multiprocessor runs 32 warps. With small bundles, it runs
  // four blocks.
  const std::int64_t most_warps = all <= 48 * 1024 ? kBundleWarps / 2 : kBundleWarps;
  constexpr std::int64_t kWarpVectors = 4 * kWarp;
  return {.bundle = static_cast<int>(bundle),
          .channel_vectors = static_cast<int>(vectors),
          .piece_vectors = static_cast<int>(piece),
          .channel_pieces = static_cast<int>(pieces / bundle),
          .lanes = LanesFor(std::min<std::int64_t>(vectors, kWarp), 1),
          .warps = static_cast<int>(
              std::clamp<std::int64_t>(bundle * vectors / kWarpVectors, 1, most_warps)),
          .array_bytes = static_cast<int>(bytes),
          .numbers_bytes = static_cast<int>(of_numbers),
          .shared_bytes = static_cast<int>(all)};
}

// A block's shared memory and place. kHeld: how many arrays stay in shared memory.
template <typename T, int kHeld>
struct BundleBlock {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;

  const BundlePieces& cut;
  char* const shared;

  // Its arrays, the numbers of channels [numbers][bundle], the sums of pieces [pieces][2],
  // and room for sums over warps.
  __device__ __forceinline__ T* Array(int i) const {
    return reinterpret_cast<T*>(shared + i * cut.array_bytes);
  }
  __device__ __forceinline__ A* Numbers() const { return reinterpret_cast<A*>(Array(kHeld)); }
  __device__ __forceinline__ double* Sums() const {
    return reinterpret_cast<double*>(shared + kHeld * cut.array_bytes + cut.numbers_bytes);
  }

  __device__ __forceinline__ LaneRun run() const { return {cut.lanes}; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

  // The pieces [first, end) of all, for this run: calls fn(vector, channel) for this lane's
  // vectors, and end_piece(piece, channel) after each piece.
  __device__ __forceinline__ void ForVectors(int first, int end, const auto& fn,
                                             const auto& end_piece) const {
    const int own = static_cast<int>(threadIdx.x) / cut.lanes;
    for (int piece = first + own; piece < end; piece += cut.runs()) {
      const int channel = piece / cut.channel_pieces;
      const int start = piece % cut.channel_pieces * cut.piece_vectors;
      const int stop = min(start + cut.piece_vectors, cut.channel_vectors);
      for (int i = start + run().lane(); i < stop; i += cut.lanes) {
        fn(channel * cut.channel_vectors + i, channel);
      }
      end_piece(piece, channel);
    }
  }
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
    ForVectors(0, cut.pieces(), fn, [](int, int) {});
  }
  // The first half of the pieces, in whole turns of the runs.
  __device__ __forceinline__ int Half() const { return cut.pieces() / 2 / cut.runs() * cut.runs(); }

  // Copies the bundle's parts of the held arrays to shared memory, in two halves. A thread copies
  // the vectors that it works on. The other arrays go to the L2 cache.
  template <int kArrays>
  __device__ __forceinline__ void Load(const T* const (&from)[kArrays]) const {
    const auto copy = [&](int vector, int) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (a < kHeld) {
          CopyAsync(Array(a) + vector * W, from[a] + vector * W);
        } else {
          asm volatile("prefetch.global.L2 [%0];" ::"l"(from[a] + vector * W));
        }
      }
    };
    ForVectors(0, Half(), copy, [](int, int) {});
    CommitCopies();
    ForVectors(Half(), cut.pieces(), copy, [](int, int) {});
    CommitCopies();
  }
  // ForVectors, each half when its copies are there.
  __device__ __forceinline__ void ForLoaded(const auto& fn, const auto& end_piece) const {
    WaitForCopies<1>();
    ForVectors(0, Half(), fn, end_piece);
    WaitForCopies<0>();
    ForVectors(Half(), cut.pieces(), fn, end_piece);
  }

  // Replaces values by their sums over all threads, in a fixed order. `room` has 2 * kBundleWarps
  // numbers.
  template <int kValues>
  __device__ __forceinline__ void Sum(double* room, double (&values)[kValues]) const {
    static_assert(kValues <= 2);
    WarpSums<kWarp>(values);
    __syncthreads();  // room has been read
    if (lane() == 0) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) room[v * kBundleWarps + warp()] = values[v];
    }
    __syncthreads();  // room is written
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      values[v] = lane() < cut.warps ? room[v * kBundleWarps + lane()] : 0.0;
    }
    WarpSums<kBundleWarps>(values);
#pragma unroll
    for (int v = 0; v < kValues; ++v) values[v] = __shfl_sync(0xffffffffu, values[v], 0);
  }
};

// Launches kernel(args, cut) with a block for each bundle of all groups.
template <typename Args>
ffi::Error LaunchBundles(const char* op, void (*kernel)(Args, BundlePieces), cudaStream_t stream,
                         const BundlePieces& cut, const Args& args) {
  int bytes = 0;
  const auto ask = [&](int& answer) {
    answer = static_cast<int>(MaxChannelBytes(CurrentDevice().shared_bytes));
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, answer);
  };
  const cudaError_t status =
      Remembered(reinterpret_cast<const void*>(kernel), kWarp * kBundleWarps, 0, 1, bytes, ask);
  if (status != cudaSuccess) return ToError(op, status);
  const std::int64_t bundles = args.shape.outer.groups * args.shape.channels() / cut.bundle;
  kernel<<<BlockPerItem(bundles), kWarp * cut.warps, static_cast<std::size_t>(cut.shared_bytes),
           stream>>>(args, cut);
  return LastError(op);
}

// --- Small bundles -------------------------------------------------------------------------------

constexpr int kSmallThreads = 256;  // threads of a block
constexpr int kSmallVectors = 2;    // the most vectors of a lane

// The lanes for a small bundle. 0: the bundle is not small.
template <typename T>
int SmallLanes(const ChannelShape& shape, std::int64_t bundle) {
  const std::int64_t vectors = bundle * shape.inner / kVec<T>;
  if (shape.outer.rows != 1 || shape.inner % kVec<T> != 0) return 0;
  return vectors > kWarp * kSmallVectors ? 0 : LanesFor(vectors, kSmallVectors);
}

// A run of lanes has all vectors of a bundle in registers.
template <typename T>
struct SmallBundle {
  LaneRun run;
  std::int64_t item;  // the bundle's number
  int elements;

  __device__ __forceinline__ SmallBundle(int lanes, std::int64_t elements)
      : run{lanes},
        item(ItemOfBlock() * (kSmallThreads / lanes) + static_cast<int>(threadIdx.x) / lanes),
        elements(static_cast<int>(elements)) {}

  __device__ __forceinline__ std::int64_t start() const { return item * elements; }
  // Calls fn(number, index of the first element) for each vector of this lane.
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
#pragma unroll
    for (int v = 0; v < kSmallVectors; ++v) {
      const int i = (v * run.lanes + run.lane()) * kVec<T>;
      if (i < elements) fn(v, i);
    }
  }
};

// Launches kernel(args, lanes).
template <typename Args>
ffi::Error LaunchSmallBundles(const char* op, void (*kernel)(Args, int), cudaStream_t stream,
                              const Args& args, int lanes) {
  const std::int64_t bundles = args.shape.outer.groups * args.shape.channels() / args.bundle;
  const std::int64_t blocks = CeilDiv(bundles * lanes, std::int64_t{kSmallThreads});
  kernel<<<BlockPerItem(blocks), kSmallThreads, 0, stream>>>(args, lanes);
  return LastError(op);
}

}  // namespace
}  // namespace gradops
