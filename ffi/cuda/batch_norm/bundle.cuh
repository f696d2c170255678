// What the kernels of bundles share. bundle_plan.h has the choice. bundle_forward.cu and
// bundle_backward.cu have the kernels. A vector has W elements. W is 1 if longer vectors do not
// fit.
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
#include "ops/batch_norm.h"

namespace gradops {

// BatchNormFwd and BatchNormBwd for a task whose plan has a width.
ffi::Error BundlesFwd(cudaStream_t stream, const BatchNormFwdArgs& args, const BundlePlan& plan);
ffi::Error BundlesBwd(cudaStream_t stream, const BatchNormBwdArgs& args, const BundlePlan& plan);

namespace {

// --- A block has a bundle ------------------------------------------------------------------------

// A block's shared memory and place. kHeld: how many arrays stay in shared memory.
template <typename T, int W, int kHeld>
struct BundleBlock {
  using A = Accum<T>;

  const BundlePieces& cut;
  char* const shared;

  // Its arrays, the numbers of channels [numbers][bundle], backward the sums of pieces [pieces][2],
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

// --- A run of lanes has a bundle -----------------------------------------------------------------

template <int W>
struct SmallBundle {
  const SmallLayout& cut;
  LaneRun run;
  std::int64_t item;  // the bundle's number
  std::int64_t start;
  bool exists;

  __device__ __forceinline__ SmallBundle(std::int64_t bundles, const SmallLayout& cut)
      : cut(cut), run{1 << cut.lane_bits} {
    item = ItemOfBlock() * (kSmallThreads >> cut.lane_bits) + (threadIdx.x >> cut.lane_bits);
    start = item * cut.vectors * W;
    exists = item < bundles;
  }

  // Calls fn(number, first element in the bundle) for each vector of this lane.
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
#pragma unroll
    for (int v = 0; v < SmallVectors(W); ++v) {
      const int vector = (v << cut.lane_bits) + run.lane();
      if (vector < cut.vectors) fn(v, vector * W);
    }
  }
};

// --- A block has a panel -------------------------------------------------------------------------

// A block's shared memory and place. kHeld: the arrays. kSums: the sum columns of a vector, 1 or W.
// Columns and bundles are counted in the panel.
template <typename T, int W, int kHeld, int kSums>
struct Panel {
  using A = Accum<T>;

  const PanelLayout& cut;
  char* const shared;
  std::int64_t channels;             // of a group
  std::int64_t group;                // the panel's first
  std::int64_t first, first_bundle;  // the panel's first ones, counted through all groups
  std::int64_t group_bundles;        // bundles of a group
  int bundles;
  int row, column;  // where this thread starts
  int stop;         // after this thread's last row
  bool exists;

  __device__ __forceinline__ Panel(const ChannelShape& shape, const PanelLayout& cut, char* shared)
      : cut(cut), shared(shared), channels(shape.outer.features) {
    const std::int64_t panels = cut.PanelsOfGroup(channels), item = ItemOfBlock();
    group = item / panels * cut.groups;
    exists = group < shape.outer.groups;
    first = group * channels + item % panels * cut.channels;
    first_bundle = first / cut.bundle, group_bundles = channels / cut.bundle;
    // The channels of whole groups, or of this group, that are left.
    const std::int64_t left = (cut.groups > 1 ? shape.outer.groups : group + 1) * channels - first;
    const auto own = static_cast<int>(min(left, std::int64_t{cut.channels}));
    bundles = own / cut.bundle;
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / cut.row_vectors, column = thread % cut.row_vectors * W;
    const bool works = row < cut.step_rows && column < own;
    stop = works ? cut.rows : 0;
    if (!works) column = 0;
  }

  // The group of a column, and the column's channel there.
  __device__ __forceinline__ std::int64_t GroupOf(int at) const {
    return group + (cut.groups > 1 ? at / static_cast<int>(channels) : 0);
  }
  __device__ __forceinline__ std::int64_t ChannelOf(int at) const {
    return first + at - GroupOf(at) * channels;
  }
  // The index in x of a column's element in row 0.
  __device__ __forceinline__ std::int64_t At(int at) const {
    return first + at + GroupOf(at) * (cut.rows - 1) * channels;
  }
  // The bundle of element j of this thread's vectors.
  __device__ __forceinline__ int BundleOf(int j) const { return (column + j) / cut.bundle; }
  // A bundle's number among all bundles.
  __device__ __forceinline__ std::int64_t Item(int bundle) const { return first_bundle + bundle; }

  // Its arrays, the numbers of bundles, and the sums of threads.
  __device__ __forceinline__ T* Array(int i) const {
    return reinterpret_cast<T*>(shared + i * cut.array_bytes);
  }
  // A number of a bundle of the panel.
  __device__ __forceinline__ A& Number(int which, int bundle) const {
    return reinterpret_cast<A*>(
        Array(kHeld))[(which * W + bundle % W) * cut.number_pitch + bundle / W];
  }
  // What the threads that start in a row have added up for a sum column.
  template <int kValues>
  __device__ __forceinline__ A& Sum(int first_row, int value, int sum_column) const {
    static_assert(kValues <= kPanelSums);
    const int place = ((first_row * kValues + value) * kSums + sum_column % kSums) * cut.sum_pitch;
    return reinterpret_cast<A*>(shared + kHeld * cut.array_bytes +
                                cut.numbers_bytes)[place + sum_column / kSums];
  }

  __device__ __forceinline__ LaneRun run() const { return {1 << cut.lane_bits}; }
  // Calls fn(index in a shared array, index in x) for each vector of this thread.
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
    const std::int64_t at = At(column);
    for (int r = row; r < stop; r += cut.step_rows) {
      fn(r * cut.channels + column, at + r * channels);
    }
  }
  // Copies the panel to shared memory. A thread copies the vectors that it works on.
  __device__ __forceinline__ void Load(const T* const (&from)[kHeld]) const {
    ForVectors([&](int i, std::int64_t at) {
#pragma unroll
      for (int a = 0; a < kHeld; ++a) {
        if constexpr (W == 1) {
          Array(a)[i] = from[a][at];
        } else {
          CopyAsync(Array(a) + i, from[a] + at);
        }
      }
    });
    CommitCopies();
  }

  // Puts this thread's sums where AddUp finds them. Between the two, the block must wait.
  template <int kValues>
  __device__ __forceinline__ void Put(const A (&sums)[kValues][kSums]) const {
    if (stop == 0) return;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        Sum<kValues>(row, v, column / cut.sum_elements + j) = sums[v][j];
      }
    }
  }
  // Calls fn(bundle) for the bundles of this thread's run.
  __device__ __forceinline__ void ForBundles(const auto& fn) const {
    const int runs = cut.warps * kWarp >> cut.lane_bits;
    for (int b = static_cast<int>(threadIdx.x) >> cut.lane_bits; b < bundles; b += runs) fn(b);
  }
  // Sets totals to the sums of a bundle, in a fixed order. of_column(stores, sum column, sums) may
  // change a column's sums before they are added. One lane stores.
  template <int kValues>
  __device__ __forceinline__ void AddUp(int bundle, double (&totals)[kValues],
                                        const auto& of_column) const {
    const int of_bundle = cut.bundle / cut.sum_elements, columns = 1 << cut.column_bits;
    const int first_row = run().lane() >> cut.column_bits;
    for (double& total : totals) total = 0;
    for (int first = 0; first < of_bundle; first += columns) {
      const int i = first + (run().lane() & (columns - 1)), own = bundle * of_bundle + i;
      double sums[kValues] = {};
      for (int r = first_row; i < of_bundle && r < cut.step_rows;
           r += run().lanes >> cut.column_bits) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          sums[v] += static_cast<double>(Sum<kValues>(r, v, own));
        }
      }
      run().Sums(sums, columns);
      if (i < of_bundle) of_column(first_row == 0, own, sums);
#pragma unroll
      for (int v = 0; v < kValues; ++v) totals[v] += sums[v];
    }
    LaneRun{columns}.Sums(totals);
  }
};

// --- Launches ------------------------------------------------------------------------------------

// Launches kernel(args, cut) with a block for each of `items`.
template <typename Args, typename Layout>
ffi::Error LaunchBlocks(const char* op, void (*kernel)(Args, Layout), cudaStream_t stream,
                        const Layout& cut, std::int64_t items, const Args& args) {
  const cudaError_t status = AllowSharedMemory(reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return ToError(op, status);
  kernel<<<BlockPerItem(items), kWarp * cut.warps, static_cast<std::size_t>(cut.shared_bytes),
           stream>>>(args, cut);
  return LastError(op);
}

// The kernels for a plan: of blocks, of runs, of panels.
template <typename Args>
struct BundleKernels {
  void (*block)(Args, BundlePieces);
  void (*small)(Args, SmallLayout);
  void (*panel)(Args, PanelLayout);

  ffi::Error Launch(const char* op, cudaStream_t stream, const BundlePlan& plan,
                    const Args& args) const {
    const std::int64_t groups = args.shape.outer.groups, channels = args.shape.outer.features;
    const std::int64_t bundles = groups * (channels / args.bundle);
    if (plan.panel.channels > 0) {
      return LaunchBlocks(op, panel, stream, plan.panel, plan.panel.Panels(groups, channels), args);
    }
    if (plan.small.vectors > 0) {
      const std::int64_t blocks =
          CeilDiv(bundles << plan.small.lane_bits, std::int64_t{kSmallThreads});
      small<<<BlockPerItem(blocks), kSmallThreads, 0, stream>>>(args, plan.small);
      return LastError(op);
    }
    return LaunchBlocks(op, block, stream, plan.block, bundles, args);
  }
};

}  // namespace
}  // namespace gradops
