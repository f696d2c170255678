// A block's parts, edge vectors, the numbers of channels, and the launch, for batch norm's kernels.
// README.md has the words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/exponential.h"
#include "common/shape.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

// Stores a vector that is not read again. It should not push other data out of the L2 cache.
template <int W, typename T>
__device__ __forceinline__ void StoreLast(T* array, std::int64_t start,
                                          const Vector<T, W>& vector) {
  if constexpr (W == 1) {
    __stcs(array + start, vector.v[0]);
  } else {
    __stcs(reinterpret_cast<uint4*>(array + start), reinterpret_cast<const uint4&>(vector));
  }
}

// Load or store the tile's elements of an edge vector.
template <typename A, int W>
__device__ __forceinline__ void LoadEdge(const auto* array, const EdgeVector& edge,
                                         A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    values[j] = edge.has(j) ? static_cast<A>(array[edge.start + j]) : A{0};
  }
}
template <typename A, int W, typename T>
__device__ __forceinline__ void StoreEdge(T* array, const EdgeVector& edge, const A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (edge.has(j)) array[edge.start + j] = static_cast<T>(values[j]);
  }
}

// Calls fn(part, last) for the parts of this block, from the first to the last, or backwards.
// `last`: this is the block's last part.
template <bool kBackwards>
__device__ __forceinline__ void ForParts(const ChannelPlan& plan, const auto& fn) {
  const BlockSteps block = plan.StepsOfBlock(static_cast<int>(blockIdx.x));
#pragma unroll 1
  for (int i = 0; i < block.parts; ++i) {
    __syncthreads();  // the shared memory of the part before has been read
    const int number = kBackwards ? block.parts - 1 - i : i;
    fn(plan.PartOf(block, number), number == block.parts - 1);
  }
}

// Calls fn(edge) for this thread's edge vectors.
template <int W>
__device__ __forceinline__ void ForEdges(const ChannelPlan& plan, const ChannelPart& part,
                                         const auto& fn) {
  if constexpr (W == 1) return;
  const std::int64_t iterations = plan.EdgeIterations(part);
#pragma unroll 1
  for (std::int64_t i = 0; i < iterations; ++i) {
    const EdgeVector edge = plan.EdgeVectorOf(part, i, static_cast<int>(threadIdx.x));
    if (edge.first < edge.last) fn(edge);
  }
}

// --- The numbers of channels ---------------------------------------------------------------------

// Sets values to N neighbouring elements of a parameter of any float dtype, converted to A, or to
// `absent` if the parameter is null. The switch is outside the loops: with a switch for each
// element, each load would wait for the one before.
template <int N, typename A>
__device__ __forceinline__ void LoadParam(const Param& param, std::int64_t group,
                                          std::int64_t channel, A absent, A (&values)[N]) {
  if (param.data == nullptr) {
#pragma unroll
    for (A& value : values) value = absent;
    return;
  }
  const auto load = [&]<typename D>(const D* from) {
    from += group * param.group_stride + channel;
    constexpr int V = kVec<D>;
    if constexpr (N % V == 0) {
      if (Aligned(from)) {
#pragma unroll
        for (int i = 0; i < N; i += V) {
          const Vector<D, V> vector = LoadVector<V>(from + i);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            values[i + j] = static_cast<A>(static_cast<Accum<D>>(vector.v[j]));
          }
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = static_cast<A>(static_cast<Accum<D>>(from[j]));
  };
  switch (param.dtype) {
    case ffi::F16: return load(static_cast<const Half*>(param.data));
    case ffi::BF16: return load(static_cast<const BFloat16*>(param.data));
    case ffi::F32: return load(static_cast<const float*>(param.data));
    default: return load(static_cast<const double*>(param.data));
  }
}
// One element.
template <typename A>
__device__ __forceinline__ A ParamAt(const Param& param, std::int64_t group, std::int64_t channel,
                                     A absent) {
  A values[1];
  LoadParam(param, group, channel, absent, values);
  return values[0];
}

// Stores N neighbouring elements of an array of any float dtype, if it is not null.
template <int N, typename A>
__device__ __forceinline__ void StoreParam(const ParamGrad& to, std::int64_t i,
                                           const A (&values)[N]) {
  const auto store = [&]<typename D>(D* array) {
    constexpr int V = kVec<D>;
    if constexpr (N % V == 0) {
      if (Aligned(array + i)) {
#pragma unroll
        for (int k = 0; k < N; k += V) {
          Vector<D, V> vector;
#pragma unroll
          for (int j = 0; j < V; ++j) vector.v[j] = static_cast<D>(values[k + j]);
          StoreVector<V>(array + i + k, vector);
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) array[i + j] = static_cast<D>(values[j]);
  };
  if (to.data == nullptr) return;
  switch (to.dtype) {
    case ffi::F16: return store(static_cast<Half*>(to.data));
    case ffi::BF16: return store(static_cast<BFloat16*>(to.data));
    case ffi::F32: return store(static_cast<float*>(to.data));
    default: return store(static_cast<double*>(to.data));
  }
}

// 1 / (1 + exp(-z)), for elements of type T. For 16-bit types, 21 bits are right.
template <typename T>
__device__ __forceinline__ Accum<T> Sigmoid(Accum<T> z) {
  if constexpr (sizeof(T) == 2) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.44269504f));
    return gelu::Reciprocal(1 + e);
  } else if constexpr (std::is_same_v<T, float>) {
    return gelu::Reciprocal(1 + expf(-z));
  } else {
    return 1 / (1 + exp(-z));
  }
}

// Puts a channel's numbers into shared memory, [kValues][SharedIndex].
template <int kValues, typename A>
__device__ __forceinline__ void PutNumbers(const ChannelPlan& plan, int channel,
                                           const A (&numbers)[kValues], A* shared) {
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    shared[v * plan.shared_channels() + plan.SharedIndex(channel)] = numbers[v];
  }
}

// Sets channels[j] to the number, in the tile, of the channel of a thread's j-th element.
template <int W>
__device__ __forceinline__ void OwnChannels(const ChannelPlan& plan, const ChannelPart& part,
                                            int (&channels)[W]) {
  const int column = static_cast<int>(threadIdx.x) % plan.row_threads * W;
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

// Fills values[v][j] with number v of the channel of the thread's column j. table(group, channel,
// numbers) gives a channel's numbers. They go to `shared` and stay there. No thread may still read
// `shared`. If `there`, `shared` has the numbers already.
template <int kValues, typename A, int W>
__device__ __forceinline__ void LoadNumbers(const ChannelPlan& plan, const ChannelPart& part,
                                            A* shared, bool there, const auto& table,
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
      if (i < of_tile) PutNumbers(plan, i, numbers[k], shared);
    }
  }
  int channels[W];
  OwnChannels(plan, part, channels);
  __syncthreads();  // shared is written
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      values[v][j] = shared[v * plan.shared_channels() + plan.SharedIndex(channels[j])];
    }
  }
}

// --- Launches ------------------------------------------------------------------------------------

ChannelDevice CurrentChannelDevice() {
  const Device device = CurrentDevice();
  return {device.multiprocessors, device.shared_bytes, device.l2_bytes, device.architecture >= 90};
}

template <typename T>
ChannelTask TaskOf(bool backward, const ChannelShape& shape, const ChannelDevice& device) {
  ChannelTask task{};
  task.device = device, task.backward = backward;
  task.groups = shape.outer.groups, task.rows = shape.outer.rows;
  task.channels = shape.channels(), task.inner = shape.inner;
  task.element_bytes = sizeof(T), task.accum_bytes = sizeof(Accum<T>);
  return task;
}

// Calls fn.operator()<width of vectors, whether tiles are planes, steps of a chunk, whether it is
// group norm>(). Group norm has kernels of its own: bundles and silu would take registers from
// batch norm's. Single elements are rare, and both share their kernels.
template <int kWidest, ChannelNeeds kNeeds>
ffi::Error DispatchPlan(const ChannelPlan& plan, bool grouped, const auto& fn) {
  if (plan.width == 1) {
    return plan.plane ? fn.template operator()<1, true, kElementSteps, true>()
                      : fn.template operator()<1, false, kElementSteps, true>();
  }
  const auto of_vectors = [&]<bool kGrouped>() {
    if (plan.plane) return fn.template operator()<kWidest, true, kNeeds.chunk_steps, kGrouped>();
    return plan.chunk_steps == kNeeds.chunk_steps
               ? fn.template operator()<kWidest, false, kNeeds.chunk_steps, kGrouped>()
               : fn.template operator()<kWidest, false, kNeeds.long_chunk_steps, kGrouped>();
  };
  return grouped ? of_vectors.template operator()<true>() : of_vectors.template operator()<false>();
}

// Whether the GPU has room for a cluster of each tile's blocks. `config` is a launch of clusters.
bool FitClusters(const void* kernel, const ChannelPlan& plan, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  const auto count = [&](int& answer) {  // a GPU that cannot say has room for none
    if (cudaOccupancyMaxActiveClusters(&answer, kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      answer = 0;
    }
    return cudaSuccess;
  };
  (void)Remembered(kernel, kChannelThreads, plan.shared_bytes, static_cast<int>(plan.tile_blocks),
                   clusters, count);
  return clusters >= plan.all_tiles;
}

// Allows a kernel enough shared memory for any plan. This takes time, and so it is done once.
inline cudaError_t AllowSharedMemory(const void* kernel) {
  int bytes = 0;
  return Remembered(kernel, 0, 0, 1, bytes, [&](int& answer) {
    answer = static_cast<int>(MaxChannelBytes(CurrentDevice().shared_bytes));
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, answer);
  });
}

// Launches kernel(args, plan). Blocks that need each other's partial results run at the same time.
// A tile's blocks are a cluster if the GPU has room for all clusters. Otherwise the launch is
// cooperative: all blocks run at the same time.
template <typename Args>
ffi::Error LaunchChannels(const char* op, void (*kernel)(Args, ChannelPlan), cudaStream_t stream,
                          const ChannelPlan& chosen, const ChannelDevice& device,
                          const Args& args) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (const cudaError_t status = AllowSharedMemory(function); status != cudaSuccess) {
    return ToError(op, status);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(chosen.tile_blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(chosen.blocks));
  config.blockDim = dim3(kChannelThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(chosen.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  ChannelPlan plan = chosen;
  plan.clustered =
      device.clusters && chosen.fits_cluster() && FitClusters(function, chosen, config);
  if (!plan.clustered) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.numAttrs = plan.needs_barrier() ? 1 : 0;
  }
  return ToError(op, cudaLaunchKernelEx(&config, kernel, args, plan));
}

}  // namespace
}  // namespace gradops
