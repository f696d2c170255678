// What the kernels of bundles share. bundle_plan.h has the choice. forward.cu and backward.cu have
// the kernels. A vector has W elements. W is 1 if longer vectors do not fit.
#pragma once

#include <cstdint>

#include "common/integers.h"
#include "common/shape.h"
#include "cuda/batch_norm/bundle_plan.h"
#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// A block's shared memory and place. kHeld: how many arrays stay in shared memory.
template <typename T, int W, int kHeld>
struct BundleBlock {
  using A = Accum<T>;

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

  __device__ __forceinline__ LaneRun run() const { return {1 << cut.lane_bits}; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

  // The pieces [first, end) of all, for this run: calls fn(vector, channel) for this lane's
  // vectors, and end_piece(piece, channel) after each piece.
  __device__ __forceinline__ void ForVectors(int first, int end, const auto& fn,
                                             const auto& end_piece) const {
    const int own = static_cast<int>(threadIdx.x) >> cut.lane_bits;
    for (int piece = first + own; piece < end; piece += cut.runs) {
      const int channel = piece / cut.channel_pieces;
      const int start = piece % cut.channel_pieces * cut.piece_vectors;
      const int stop = min(start + cut.piece_vectors, cut.channel_vectors);
      // A run that is shorter than a warp has at most one vector for each lane.
      for (int i = start + run().lane(); i < stop; i += kWarp) {
        fn(channel * cut.channel_vectors + i, channel);
      }
      end_piece(piece, channel);
    }
  }
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
    ForVectors(0, cut.pieces(), fn, [](int, int) {});
  }
  // The first half of the pieces, in whole turns of the runs.
  __device__ __forceinline__ int Half() const { return cut.pieces() / 2 / cut.runs * cut.runs; }

  // Copies the bundle's parts of the held arrays to shared memory, in two halves. A thread copies
  // the vectors that it works on. The other arrays go to the L2 cache.
  template <int kArrays>
  __device__ __forceinline__ void Load(const T* const (&from)[kArrays]) const {
    static_assert(W > 1 || kArrays == kHeld);
    const auto copy = [&](int vector, int) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if constexpr (W == 1) {
          Array(a)[vector] = from[a][vector];
        } else if (a < kHeld) {
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

// A run of lanes has all vectors of a bundle in registers.
template <int W>
struct SmallBundle {
  const SmallLayout& cut;
  LaneRun run;
  std::int64_t item;  // the bundle's number
  std::int64_t group, number_in_group;
  std::int64_t first_channel;
  std::int64_t start, row_elements;  // of the bundle, of a row of x
  bool exists;

  __device__ __forceinline__ SmallBundle(const ChannelShape& shape, std::int64_t bundle,
                                         const SmallLayout& cut)
      : cut(cut), run{1 << cut.lane_bits} {
    item = ItemOfBlock() * (kSmallThreads >> cut.lane_bits) + (threadIdx.x >> cut.lane_bits);
    const std::int64_t bundles = shape.outer.features / bundle;
    group = item / bundles, number_in_group = item % bundles;
    first_channel = number_in_group * bundle;
    row_elements = shape.outer.features * shape.inner;
    // With one row, loads need not wait for the divisions.
    start = cut.rows == 1
                ? item * cut.bundle_row
                : group * shape.outer.rows * row_elements + number_in_group * cut.bundle_row;
    exists = item < shape.outer.groups * bundles;
  }

  // Calls fn(number, index of the first element in x, column of that element) for each vector of
  // this lane.
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
#pragma unroll
    for (int v = 0; v < kSmallVectors; ++v) {
      const auto [row, column] = cut.PlaceOf(v, run.lane());
      if (row < cut.rows && column < cut.row_vectors) {
        fn(v, start + row * row_elements + column * W, column * W);
      }
    }
  }
};

// Launches kernel(args, cut).
template <typename Args>
ffi::Error LaunchSmallBundles(const char* op, void (*kernel)(Args, SmallLayout),
                              cudaStream_t stream, const SmallLayout& cut, const Args& args) {
  const std::int64_t bundles = args.shape.outer.groups * args.shape.channels() / args.bundle;
  const std::int64_t blocks = CeilDiv(bundles << cut.lane_bits, std::int64_t{kSmallThreads});
  kernel<<<BlockPerItem(blocks), kSmallThreads, 0, stream>>>(args, cut);
  return LastError(op);
}

}  // namespace
}  // namespace gradops
