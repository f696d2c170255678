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

// --- A block or a cluster has a bundle -----------------------------------------------------------

// A block's shared memory and place. kArrays: how many arrays it holds. kCluster: several blocks
// have the bundle. Vectors are counted in the bundle.
template <typename T, int W, int kArrays, bool kCluster>
struct BundleBlock {
  using A = Accum<T>;

  const BundlePieces& cut;
  char* const shared;
  std::int64_t item, group;
  std::int64_t number, first_channel;  // of the bundle, in its group
  std::int64_t start;                  // the index in x of its first element
  int rank;                            // of this block in the cluster
  int first, end;                      // this block's pieces
  bool exists;

  __device__ __forceinline__ BundleBlock(const ChannelShape& shape, const BundlePieces& cut,
                                         char* shared)
      : cut(cut), shared(shared) {
    const std::int64_t of_group = shape.outer.features / cut.bundle;
    item = kCluster ? ItemOfBlock() >> cut.block_bits : ItemOfBlock();
    rank = kCluster ? ClusterRank() : 0;
    group = item / of_group, number = item % of_group, first_channel = number * cut.bundle;
    start = item * cut.bundle * shape.inner;
    first = kCluster ? FirstPiece(rank) : 0, end = kCluster ? FirstPiece(rank + 1) : cut.pieces();
    exists = item < shape.outer.groups * of_group;
  }
  __device__ __forceinline__ int FirstPiece(int of_rank) const {
    return min(of_rank * cut.block_pieces, cut.pieces());
  }
  __device__ __forceinline__ int FirstVector(int piece) const {
    return piece / cut.channel_pieces * cut.channel_vectors +
           piece % cut.channel_pieces * cut.piece_vectors;
  }
  // The elements of a block of the cluster.
  __device__ __forceinline__ int Elements(int of_rank) const {
    return (FirstVector(FirstPiece(of_rank + 1)) - FirstVector(FirstPiece(of_rank))) * W;
  }
  // After the last channel that has pieces before this one.
  __device__ __forceinline__ int EndChannel(int piece) const {
    return (piece + cut.channel_pieces - 1) / cut.channel_pieces;
  }

  // Shared memory has the block's part of the arrays, then the numbers of channels
  // [numbers][bundle], then pairs of sums. These are of warps, and backward of pieces. In a
  // cluster, two pairs follow that other blocks read, and backward the pairs of channels.
  __device__ __forceinline__ T* At(int array, int vector) const {
    const int own = kCluster ? vector - FirstVector(first) : vector;
    return reinterpret_cast<T*>(shared + array * cut.array_bytes) + own * W;
  }
  __device__ __forceinline__ A* Numbers() const {
    return reinterpret_cast<A*>(shared + kArrays * cut.array_bytes);
  }
  __device__ __forceinline__ double* Pair(int i) const {
    return reinterpret_cast<double*>(shared + kArrays * cut.array_bytes + cut.numbers_bytes) +
           2 * i;
  }
  __device__ __forceinline__ double* SumsOfPiece(int piece) const {
    return Pair(kBundleWarps + piece - first);
  }
  // Up to four numbers that the other blocks read.
  __device__ __forceinline__ double* Shown() const { return Pair(kBundleWarps + cut.sum_pieces); }
  // Where a block of that rank has its sums of a channel. InBlock finds them in that block.
  __device__ __forceinline__ double* SumsOfChannel(int of_rank, int channel) const {
    const int own = channel - FirstPiece(of_rank) / cut.channel_pieces;
    return Pair(kBundleWarps + cut.sum_pieces + 2 + own);
  }

  __device__ __forceinline__ LaneRun run() const { return {1 << cut.lane_bits}; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

  // The block's pieces from `from` to `to`, for this run: calls fn(vector, channel) for this lane's
  // vectors, and end_piece(piece) after each piece.
  __device__ __forceinline__ void ForVectors(int from, int to, const auto& fn,
                                             const auto& end_piece) const {
    const int own = static_cast<int>(threadIdx.x) >> cut.lane_bits;
    for (int piece = from + own; piece < to; piece += cut.runs) {
      const int channel = piece / cut.channel_pieces;
      const int start = piece % cut.channel_pieces * cut.piece_vectors;
      const int stop = min(start + cut.piece_vectors, cut.channel_vectors);
      // A run that is shorter than a warp has at most one vector for each lane.
      for (int i = start + run().lane(); i < stop; i += kWarp) {
        fn(channel * cut.channel_vectors + i, channel);
      }
      end_piece(piece);
    }
  }
  __device__ __forceinline__ void ForVectors(const auto& fn) const {
    ForVectors(first, end, fn, [](int) {});
  }
  // The second half of the pieces starts here. The first half has whole turns of the runs.
  __device__ __forceinline__ int Half() const {
    return first + (end - first) / 2 / cut.runs * cut.runs;
  }

  // Copies the block's part of the arrays to shared memory, in two halves. A thread copies the
  // vectors that it works on.
  __device__ __forceinline__ void Load(const T* const (&from)[kArrays]) const {
    const auto copy = [&](int vector, int) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if constexpr (W == 1) {
          *At(a, vector) = from[a][vector];
        } else {
          CopyAsync(At(a, vector), from[a] + vector * W);
        }
      }
    };
    ForVectors(first, Half(), copy, [](int) {});
    CommitCopies();
    ForVectors(Half(), end, copy, [](int) {});
    CommitCopies();
  }
  // ForVectors, each half when its copies are there.
  __device__ __forceinline__ void ForLoaded(const auto& fn, const auto& end_piece) const {
    WaitForCopies<1>();
    ForVectors(first, Half(), fn, end_piece);
    WaitForCopies<0>();
    ForVectors(Half(), end, fn, end_piece);
  }

  // Replaces values by their sums over all threads of the block, in a fixed order.
  template <int kValues>
  __device__ __forceinline__ void Sum(double (&values)[kValues]) const {
    static_assert(kValues <= 2);
    WarpSums<kWarp>(values);
    __syncthreads();  // the sums of warps have been read
    if (lane() == 0) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) Pair(warp())[v] = values[v];
    }
    __syncthreads();  // the sums of warps are written
#pragma unroll
    for (int v = 0; v < kValues; ++v) values[v] = lane() < cut.warps ? Pair(lane())[v] : 0.0;
    SumLanes<kBundleWarps>(values);
  }
  // Replaces values, in all lanes, by their sums over the first kLanes lanes.
  template <int kLanes, int kValues>
  __device__ __forceinline__ static void SumLanes(double (&values)[kValues]) {
    WarpSums<kLanes>(values);
#pragma unroll
    for (int v = 0; v < kValues; ++v) values[v] = __shfl_sync(0xffffffffu, values[v], 0);
  }
  // Gives lane r the values of block r, instead of this block's. Further lanes get 0.
  template <int kValues>
  __device__ __forceinline__ void Exchange(double (&values)[kValues]) const {
    static_assert(kValues <= 4);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) Shown()[v] = values[v];
    }
    ClusterSync();  // what other blocks read is written
    const int blocks = 1 << cut.block_bits;
    const double* const there = InBlock(min(lane(), blocks - 1), Shown());
#pragma unroll
    for (int v = 0; v < kValues; ++v) values[v] = lane() < blocks ? there[v] : 0.0;
  }
  // A block must not end while others read from it. This barrier has two steps: when this block has
  // read from the others, and at its end. The first step does not wait for reads: what was read
  // must have been used before.
  __device__ __forceinline__ void HasRead() const {
    if constexpr (kCluster) ClusterArrive();
  }
  __device__ __forceinline__ void WaitForReaders() const {
    if constexpr (kCluster) ClusterWait();
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

// A block's shared memory and place. kArrays: how many arrays it holds. kSums: the sum columns of a
// vector, 1 or W. Columns and bundles are counted in the panel.
template <typename T, int W, int kArrays, int kSums>
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
        Array(kArrays))[(which * W + bundle % W) * cut.number_pitch + bundle / W];
  }
  // What the threads that start in a row have added up for a sum column.
  template <int kValues>
  __device__ __forceinline__ A& Sum(int first_row, int value, int sum_column) const {
    static_assert(kValues <= kPanelSums);
    const int place = ((first_row * kValues + value) * kSums + sum_column % kSums) * cut.sum_pitch;
    return reinterpret_cast<A*>(shared + kArrays * cut.array_bytes +
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
  __device__ __forceinline__ void Load(const T* const (&from)[kArrays]) const {
    ForVectors([&](int i, std::int64_t at) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
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

// Launches kernel(args, cut) with a block or a cluster for each of `items`.
template <typename Args, typename Layout>
ffi::Error LaunchBlocks(const char* op, void (*kernel)(Args, Layout), cudaStream_t stream,
                        const Layout& cut, std::int64_t items, int cluster, const Args& args) {
  const cudaError_t status = AllowSharedMemory(reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return ToError(op, status);
  const Launch launch(stream, BlockPerItem(items * cluster), dim3(kWarp * cut.warps),
                      cut.shared_bytes, cluster);
  return ToError(op, cudaLaunchKernelEx(&launch.config, kernel, args, cut));
}

// The kernels for a plan: of blocks or clusters, of runs, of panels.
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
      const std::int64_t panels = plan.panel.Panels(groups, channels);
      return LaunchBlocks(op, panel, stream, plan.panel, panels, 1, args);
    }
    if (plan.small.vectors > 0) {
      const std::int64_t blocks =
          CeilDiv(bundles << plan.small.lane_bits, std::int64_t{kSmallThreads});
      small<<<BlockPerItem(blocks), kSmallThreads, 0, stream>>>(args, plan.small);
      return LastError(op);
    }
    return LaunchBlocks(op, block, stream, plan.block, bundles, 1 << plan.block.block_bits, args);
  }
};

}  // namespace
}  // namespace gradops
