// Layer norm and RMS norm, CUDA.
//
// A row belongs to a team of threads: part of a warp, a warp, some warps, or a whole block. Thread
// t of a team of n holds columns [(i n + t) W, (i n + t + 1) W) for i = 0, 1, ... in registers. W
// elements are 16 bytes where all rows start at 16-byte boundaries. Else W is 1: the team's threads
// access neighbouring elements, which coalesce whatever the alignment, and a thread's columns stay
// the same from row to row, so that parameters and column sums stay in registers. (Peeling 16-byte
// pieces would shift the columns from row to row; reading scale and bias then costs more L1 cycles
// than x and y together.) Wider rows are streamed, and read again from L2.
//
// Forward: one pass over registers for the mean, one for the variance and what the rounded mean is
// off by (see cpu/layer_norm.cc), one for y. Traffic: x read, y written.
//
// Backward (formulas: common/math.h): persistent blocks, each with a slot in a group: a share of
// the group's rows, and one partial row of column sums. The next rows are on their way to shared
// memory (cp.async) while one is worked on; every thread copies what it will itself read, so the
// ring needs no barriers. Column sums stay in registers; then teams, and then slots
// (column_sum.cuh), are added in a fixed order. Traffic: dy and x read, dx written, and a partial
// row per block.
#include "ops/layer_norm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/column_sum.cuh"
#include "cuda/launch.cuh"
#include "cuda/layer_norm_bwd.cuh"
#include "cuda/layer_norm_fwd.cuh"

namespace gradops {
namespace {

template <typename T>
ffi::Error Forward(cudaStream_t stream, const LayerNormFwdArgs& args) {
  const std::int64_t rows = args.shape.all_rows(), features = args.shape.features;
  // Then all rows start at 16-byte boundaries, in arrays of T as well as of Accum<T>.
  const bool aligned =
      features % kVec<T> == 0 && Aligned(args.x, args.y, args.scale.data, args.bias.data);
  if (rows == 0) return ffi::Error::Success();
  const auto launch = [&]<typename Tile>() {
    constexpr int kThreads = kForwardThreads<Tile>;
    ForwardKernel<T, Tile>
        <<<GridBlocks(CeilDiv(rows, kThreads / Tile::kTeam)), kThreads, 0, stream>>>(args);
  };
  const bool launched = aligned ? DispatchTile(ForwardTiles<T>{}, features, launch)
                                : DispatchTile(ForwardElementTiles<T>{}, features, launch);
  if (!launched && aligned) {
    ForwardStreamKernel<T, kVec<T>><<<GridBlocks(rows), kStreamThreads, 0, stream>>>(args);
  } else if (!launched) {
    ForwardStreamKernel<T, 1><<<GridBlocks(rows), kStreamThreads, 0, stream>>>(args);
  }
  return LastError(args.centered ? "layer_norm_fwd" : "rms_norm_fwd");
}

// How a persistent kernel runs on a device.
struct Residency {
  int stages, blocks;  // blocks per multiprocessor
  std::size_t shared_bytes;
};

template <typename T, typename Tile, bool kCentered>
cudaError_t FindResidency(Residency& residency) {
  constexpr std::size_t kStageBytes = kHasRing<T, Tile> ? sizeof(RingStage<T, Tile>) : 0;
  const auto bytes = [](int stages) {
    return std::max(static_cast<std::size_t>(stages) * kStageBytes, kTeamSumsBytes<T, Tile>);
  };
  static std::array<std::atomic<int>, 64> found{};  // 16 * blocks + stages by device
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const bool cached = device >= 0 && device < 64;
  int packed = cached ? found[static_cast<std::size_t>(device)].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    auto* const kernel = &BackwardKernel<T, Tile, kCentered>;
    int of_block = 0, of_multiprocessor = 0, blocks = 0;
    status = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    device);
    if (status != cudaSuccess) return status;
    // CUDA keeps 1 KB of each block; the kernel's static shared memory is less than another.
    const int budget = std::min(of_block, of_multiprocessor / kBackwardBlocks<Tile> - 1024) - 1024;
    int stages = kMaxStages;
    while (stages > 1 && bytes(stages) > static_cast<std::size_t>(budget)) --stages;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes(stages)));
    if (status != cudaSuccess) return status;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBackwardThreads<Tile>,
                                                           bytes(stages));
    if (status != cudaSuccess) return status;
    packed = 16 * std::max(1, blocks) + stages;
    if (cached) found[static_cast<std::size_t>(device)].store(packed, std::memory_order_relaxed);
  }
  residency = {.stages = packed % 16, .blocks = packed / 16, .shared_bytes = bytes(packed % 16)};
  return cudaSuccess;
}

// The wanted results in the workspace's order.
template <typename A>
ColumnSums<A> WantedSums(const LayerNormBwdArgs& args) {
  ColumnSums<A> wanted{};
  for (void* const result : {args.dscale, args.dbias}) {
    if (result != nullptr) wanted.results[wanted.count++] = static_cast<A*>(result);
  }
  return wanted;
}

// `blocks` run at a time, and work on `rows_per_block` rows each.
template <typename A>
SlotSums<A> CutIntoSlots(const LayerNormBwdArgs& args, std::int64_t blocks, int rows_per_block) {
  const auto [groups, rows, features] = args.shape;
  std::int64_t slots =
      std::min(CeilDiv(rows, rows_per_block), std::max<std::int64_t>(1, blocks / groups));
  const int count = WantedSums<A>(args).count;
  if (count > 0) slots = std::min(slots, args.partial_rows);
  if (slots == 1) {
    return {static_cast<A*>(args.dscale), static_cast<A*>(args.dbias), 1, features, 0};
  }
  auto* const workspace = static_cast<A*>(args.workspace);
  return {args.dscale == nullptr ? nullptr : workspace,
          args.dbias == nullptr ? nullptr : workspace + (count - 1) * features, slots,
          args.partial_rows * count * features, count * features};
}

template <typename T, int W>
cudaError_t LaunchStream(cudaStream_t stream, const LayerNormBwdArgs& args,
                         const SlotSums<Accum<T>>& sums) {
  int device = 0, of_block = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  const std::int64_t bytes = WantedSums<Accum<T>>(args).count * args.shape.features *
                             static_cast<std::int64_t>(sizeof(Accum<T>));
  const bool in_shared = bytes <= of_block - 2048;
  const int shared_bytes = in_shared ? static_cast<int>(bytes) : 0;
  auto* const kernel = &BackwardStreamKernel<T, W>;
  status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, of_block - 2048);
  if (status != cudaSuccess) return status;
  kernel<<<GridBlocks(args.shape.groups * sums.slots), kStreamThreads,
           static_cast<std::size_t>(shared_bytes), stream>>>(args, sums, in_shared);
  return cudaGetLastError();
}

template <typename T, bool kCentered>
ffi::Error Backward(cudaStream_t stream, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  constexpr const char* kOp = kCentered ? "layer_norm_bwd" : "rms_norm_bwd";
  const auto [groups, rows, features] = args.shape;
  const ColumnSums<A> wanted = WantedSums<A>(args);
  if (args.shape.elements() == 0) {
    return ToError(kOp, ZeroColumnSums(stream, wanted, groups, features));
  }
  const bool aligned = features % kVec<T> == 0 && Aligned(args.dy, args.x, args.dx, args.scale.data,
                                                          args.dscale, args.dbias, args.workspace);
  cudaError_t status = cudaSuccess;
  SlotSums<A> sums{};
  const auto launch = [&]<typename Tile>() {
    constexpr int kThreads = kBackwardThreads<Tile>;
    Residency residency{};
    status = FindResidency<T, Tile, kCentered>(residency);
    if (status != cudaSuccess) return;
    sums = CutIntoSlots<A>(args, residency.blocks * MultiprocessorCount(), kThreads / Tile::kTeam);
    BackwardKernel<T, Tile, kCentered>
        <<<GridBlocks(args.shape.groups * sums.slots), kThreads, residency.shared_bytes, stream>>>(
            args, sums, residency.stages);
    status = cudaGetLastError();
  };
  const bool launched = aligned ? DispatchTile(BackwardTiles<T>{}, features, launch)
                                : DispatchTile(BackwardElementTiles<T>{}, features, launch);
  if (!launched) {
    sums = CutIntoSlots<A>(args, MultiprocessorCount(), 1);
    status = aligned ? LaunchStream<T, kVec<T>>(stream, args, sums)
                     : LaunchStream<T, 1>(stream, args, sums);
  }
  if (status != cudaSuccess) return ToError(kOp, status);
  if (sums.slots > 1) {
    LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                       args.partial_rows, sums.slots, features);
  }
  return LastError(kOp);
}

}  // namespace

ffi::Error LayerNormFwd(CudaContext stream, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(stream, args); });
}

ffi::Error LayerNormBwd(CudaContext stream, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_bwd", args.dtype, [&]<typename T>() {
    return args.centered ? Backward<T, true>(stream, args) : Backward<T, false>(stream, args);
  });
}

}  // namespace gradops
