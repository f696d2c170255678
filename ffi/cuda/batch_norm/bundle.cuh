// Channels first: a block takes one bundle of a group, which lies in one piece of memory. If its
// arrays fit into shared memory, they are read once. If only x fits, dy is read twice. forward.cu
// and backward.cu have the kernels.
//
// A channel is cut into pieces, and each piece is one warp's work. So each sum of a piece belongs
// to one channel. In this picture, a channel has 4 vectors, a piece has 2, and there are two warps:
//
//   channel         0           1           2
//   vector     0  1  2  3  0  1  2  3  0  1  2  3
//   warp       0  0  1  1  0  0  1  1  0  0  1  1
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

// How a bundle is cut into pieces. All of it follows from the shape.
struct BundlePieces {
  int bundle;           // channels
  int channel_vectors;  // vectors of a channel
  int piece_vectors;    // vectors of a piece; the last piece of a channel may have fewer
  int channel_pieces;   // pieces of a channel
  int warps;
  int array_bytes;    // of a bundle of x
  int numbers_bytes;  // of the channels' numbers
  int shared_bytes;

  GRADOPS_HOST_DEVICE int pieces() const { return bundle * channel_pieces; }
};

// The pieces, or no warps if a bundle cannot be taken in this way. `held` arrays stay in shared
// memory, and two numbers for each channel.
template <typename T>
BundlePieces CutBundle(const ChannelShape& shape, std::int64_t bundle, const ChannelDevice& device,
                       int held) {
  constexpr std::int64_t kWidth = kVec<T>;
  constexpr int kNumbers = 2;
  constexpr std::int64_t kLeastVectors = 16;  // of a channel: shorter ones leave most lanes idle
  const std::int64_t vectors = shape.inner / kWidth;
  if (shape.outer.rows != 1 || shape.inner % kWidth != 0 || vectors < kLeastVectors) return {};
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
  return {.bundle = static_cast<int>(bundle),
          .channel_vectors = static_cast<int>(vectors),
          .piece_vectors = static_cast<int>(piece),
          .channel_pieces = static_cast<int>(pieces / bundle),
          .warps = static_cast<int>(std::clamp<std::int64_t>(pieces / 2, 1, most_warps)),
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

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

  // The pieces [first, end) of all, for this warp: calls fn(vector, channel) for this lane's
  // vectors, and end_piece(piece, channel) after each piece.
  __device__ __forceinline__ void ForVectors(int first, int end, const auto& fn,
                                             const auto& end_piece) const {
    for (int piece = first + warp(); piece < end; piece += cut.warps) {
      const int channel = piece / cut.channel_pieces;
      const int start = piece % cut.channel_pieces * cut.piece_vectors;
      const int stop = min(start + cut.piece_vectors, cut.channel_vectors);
      for (int i = start + lane(); i < stop; i += kWarp) {
        fn(channel * cut.channel_vectors + i, channel);
      }
      end_piece(piece, channel);
    }
  }
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
    ForVectors(0, cut.pieces(), fn, [](int, int) {});
  }
  // The first half of the pieces, in whole turns of the warps.
  __device__ __forceinline__ int Half() const { return cut.pieces() / 2 / cut.warps * cut.warps; }

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

}  // namespace
}  // namespace gradops
