// Shared by batch norm's forward and backward kernels: parts of tiles, packs, parameters, launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/shape.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/batch_norm/policy.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// --- Packs ---------------------------------------------------------------------------------------

// Stores a pack that is not read again. It should not push other data out of the L2 cache.
template <int W, typename T>
__device__ __forceinline__ void StoreLast(T* array, std::int64_t start, const Pack<T, W>& pack) {
  if constexpr (W == 1) {
    __stcs(array + start, pack.v[0]);
  } else {
    __stcs(reinterpret_cast<uint4*>(array + start), reinterpret_cast<const uint4&>(pack));
  }
}

// Load or store the elements of a span one by one.
template <typename A, int W, typename T>
__device__ __forceinline__ void LoadSpan(const T* array, const ChannelSpan& span, A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    values[j] = span.has(j) ? static_cast<A>(array[span.start + j]) : A{0};
  }
}
template <typename A, int W, typename T>
__device__ __forceinline__ void StoreSpan(T* array, const ChannelSpan& span, const A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (span.has(j)) array[span.start + j] = static_cast<T>(values[j]);
  }
}

// --- Parts ---------------------------------------------------------------------------------------

// Calls fn(part, last) for the parts of this block's steps, from the first to the last, or
// backwards. `last`: this is the block's last part.
template <bool kBackwards, typename Fn>
__device__ __forceinline__ void ForParts(const ChannelPlan& plan, const Fn& fn) {
  const ChannelShare share = plan.ShareOf(static_cast<int>(blockIdx.x));
#pragma unroll 1
  for (int i = 0; i < share.parts; ++i) {
    __syncthreads();  // the shared memory of the part before has been read
    const int number = kBackwards ? share.parts - 1 - i : i;
    fn(plan.PartOf(share, number), number == share.parts - 1);
  }
}

// Calls fn(span) for this thread's incomplete packs, whose other elements are not the tile's.
template <int W, typename Fn>
__device__ __forceinline__ void ForEdges(const ChannelPlan& plan, const ChannelPart& part,
                                         const Fn& fn) {
  if constexpr (W == 1) return;
  const std::int64_t turns = plan.EdgeTurns(part);
#pragma unroll 1
  for (std::int64_t turn = 0; turn < turns; ++turn) {
    const ChannelSpan span = plan.EdgeSpan(part, turn, static_cast<int>(threadIdx.x));
    if (span.first < span.last) fn(span);
  }
}

// Sets channels[j] to the number, in the tile, of the channel of a thread's j-th element.
template <int W>
__device__ __forceinline__ void OwnChannels(const ChannelPlan& plan, const ChannelPart& part,
                                            int (&channels)[W]) {
  const int column = static_cast<int>(threadIdx.x) % plan.lanes * W;
  const int of_tile = part.channels, inner = static_cast<int>(plan.inner);
  int channel = plan.plane ? 0 : column / inner % of_tile, i = plan.plane ? 0 : column % inner;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    channels[j] = channel;
    if (!plan.plane && ++i == inner) {
      i = 0;
      if (++channel == of_tile) channel = 0;
    }
  }
}

// --- Parameters ----------------------------------------------------------------------------------

// An element of a parameter of any float dtype, widened, or `absent` if the parameter is null.
template <typename A>
__device__ __forceinline__ A ParamAt(const Param& param, std::int64_t group, std::int64_t channel,
                                     A absent) {
  if (param.data == nullptr) return absent;
  const std::int64_t i = group * param.group_stride + channel;
  switch (param.dtype) {
    case ffi::F16:
      return static_cast<A>(static_cast<float>(static_cast<const Half*>(param.data)[i]));
    case ffi::BF16:
      return static_cast<A>(static_cast<float>(static_cast<const BFloat16*>(param.data)[i]));
    case ffi::F32: return static_cast<A>(static_cast<const float*>(param.data)[i]);
    default: return static_cast<A>(static_cast<const double*>(param.data)[i]);
  }
}

// Puts a channel's numbers into shared memory, [kValues][SlotOfChannel].
template <int kValues, typename A>
__device__ __forceinline__ void PutParameters(const ChannelPlan& plan, int channel,
                                              const A (&numbers)[kValues], A* shared) {
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    shared[v * plan.channel_slots() + plan.SlotOfChannel(channel)] = numbers[v];
  }
}

// Fills values[v][j] with number v of the channel of the thread's column j. table(group, channel,
// numbers) gives a channel's numbers, which go to `shared` and stay there. No thread may still read
// `shared`. `there`: `shared` has the numbers already.
template <int kValues, typename A, int W, typename Table>
__device__ __forceinline__ void LoadParameters(const ChannelPlan& plan, const ChannelPart& part,
                                               A* shared, bool there, const Table& table,
                                               A (&values)[kValues][W]) {
  const int of_tile = part.channels;
  constexpr int kAtOnce = 2;
  for (int start = there ? of_tile : static_cast<int>(threadIdx.x); start < of_tile;
       start += kAtOnce * kChannelThreads) {
    A numbers[kAtOnce][kValues];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = start + k * kChannelThreads;
      if (i < of_tile) table(part.group, part.channel + i, numbers[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = start + k * kChannelThreads;
      if (i < of_tile) PutParameters(plan, i, numbers[k], shared);
    }
  }
  int channels[W];
  OwnChannels(plan, part, channels);
  __syncthreads();  // shared is written
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      values[v][j] = shared[v * plan.channel_slots() + plan.SlotOfChannel(channels[j])];
    }
  }
}

// --- Launches ------------------------------------------------------------------------------------

// Set by tests: limits below what a multiprocessor or a GPU has.
inline int most_shared_bytes = std::numeric_limits<int>::max();
inline int most_multiprocessors = std::numeric_limits<int>::max();
inline int most_l2_bytes = std::numeric_limits<int>::max();
inline bool never_clustered = false;

template <typename T>
ChannelTask ChannelTaskOf(const ChannelNeeds& needs, const ChannelShape& shape) {
  const Device device = CurrentDevice();
  ChannelTask task{};
  task.needs = needs;
  task.groups = shape.outer.groups, task.rows = shape.outer.rows;
  task.channels = shape.channels(), task.inner = shape.inner;
  task.element_bytes = sizeof(T), task.accum_bytes = sizeof(Accum<T>);
  task.l2_bytes = std::min(device.l2_bytes, most_l2_bytes);
  task.multiprocessors = std::min(device.multiprocessors, most_multiprocessors);
  task.shared_bytes = std::min(device.shared_bytes, most_shared_bytes);
  return task;
}

// Calls fn.operator()<width of packs, whether tiles are planes, steps of a ring>().
template <int kWidest, ChannelNeeds kNeeds, typename Fn>
ffi::Error DispatchPlan(const ChannelPlan& plan, const Fn& fn) {
  if (plan.width == 1) {
    return plan.plane ? fn.template operator()<1, true, kElementSteps>()
                      : fn.template operator()<1, false, kElementSteps>();
  }
  if (plan.plane) return fn.template operator()<kWidest, true, kNeeds.ring_steps>();
  return plan.ring_steps == kNeeds.ring_steps
             ? fn.template operator()<kWidest, false, kNeeds.ring_steps>()
             : fn.template operator()<kWidest, false, kNeeds.long_ring_steps>();
}

// Launches kernel(args, plan). Blocks that need each other's partial results run at the same time.
// A tile's blocks are a cluster if the GPU has room for all clusters. Otherwise the launch is
// cooperative: all blocks run at the same time.
template <typename Args>
ffi::Error LaunchChannels(const char* op, void (*kernel)(Args, ChannelPlan), cudaStream_t stream,
                          ChannelPlan plan, const Args& args) {
  // Allow enough shared memory for any plan. This takes time, and so it is done once.
  int bytes = 0;
  const auto ask = [&](int& answer) {
    answer = static_cast<int>(MaxChannelBytes(CurrentDevice().shared_bytes));
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, answer);
  };
  if (const cudaError_t status =
          Remembered(reinterpret_cast<const void*>(kernel), kChannelThreads, 0, 1, bytes, ask);
      status != cudaSuccess) {
    return ToError(op, status);
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(kChannelThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  if (plan.has_cluster_size() && CurrentDevice().architecture >= 90 && !never_clustered) {
    const auto blocks = static_cast<int>(plan.stride);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.numAttrs = 1;
    int clusters = 0;
    const auto count = [&](int& answer) {  // a GPU that cannot say has room for none
      if (cudaOccupancyMaxActiveClusters(&answer, kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        answer = 0;
      }
      return cudaSuccess;
    };
    (void)Remembered(reinterpret_cast<const void*>(kernel), kChannelThreads, plan.shared_bytes,
                     blocks, clusters, count);
    plan.clustered = clusters >= plan.all_tiles;
  }
  if (!plan.clustered) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.numAttrs = plan.meets() ? 1 : 0;
  }
  return ToError(op, cudaLaunchKernelEx(&config, kernel, args, plan));
}

}  // namespace
}  // namespace gradops
