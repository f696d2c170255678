// What batch norm's two kernels share: parts of tiles, their packs and parameters, launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/shape.h"
#include "cuda/batch_norm_policy.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"

namespace gradops {
namespace {

// --- Packs ---------------------------------------------------------------------------------------

// The pack at `start`, if it is wanted; otherwise the old one stays. No load is moved before a
// store that precedes it, and none is non-coherent: dx may be dy's buffer.
template <int W, typename T>
__device__ __forceinline__ void LoadIf(bool wanted, const T* array, std::int64_t start,
                                       Pack<T, W>& pack) {
  if constexpr (W == 1) {
    if (wanted) pack.v[0] = array[start];
  } else {
    uint4& words = AsWords(pack);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.s32 wanted, %5, 0;\n"
        "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(array + start), "r"(static_cast<int>(wanted))
        : "memory");
  }
}

// What is stored is not read again: it shall not push out of the L2 cache what is.
template <int W, typename T>
__device__ __forceinline__ void StoreLast(T* array, std::int64_t start, const Pack<T, W>& pack) {
  if constexpr (W == 1) {
    __stcs(array + start, pack.v[0]);
  } else {
    __stcs(reinterpret_cast<uint4*>(array + start), reinterpret_cast<const uint4&>(pack));
  }
}

// The same of a span, element by element.
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

// A block's steps [first, end) of a tile; the block's own number of step i is i + own.
struct ChannelPart {
  std::int64_t tile, first, end, own;
};

// fn(part) for the parts of this block's steps, from the first to the last or the other way round.
template <bool kBackwards, typename Fn>
__device__ __forceinline__ void ForParts(const ChannelPlan& plan, const Fn& fn) {
  const std::int64_t start = plan.FirstStep(blockIdx.x), stop = plan.FirstStep(blockIdx.x + 1);
  if (start == stop) return;
  const std::int64_t first_tile = start / plan.steps, last_tile = (stop - 1) / plan.steps;
  for (std::int64_t i = 0; i <= last_tile - first_tile; ++i) {
    const std::int64_t tile = kBackwards ? last_tile - i : first_tile + i;
    const std::int64_t origin = tile * plan.steps;
    fn(ChannelPart{tile, max(start - origin, std::int64_t{0}), min(stop - origin, plan.steps),
                   origin - start});
  }
}

// A part's steps in which all packs are whole, the first so many, and the others.
struct StepKinds {
  int whole, others;

  __device__ __forceinline__ StepKinds(const ChannelPlan& plan, const ChannelPart& part) {
    const std::int64_t behind = min(max(plan.whole_steps, part.first), part.end);
    whole = static_cast<int>(behind - part.first), others = static_cast<int>(part.end - behind);
  }
};

// This thread's packs of one step after the other.
template <bool kBackwards>
class PackWalk {
 public:
  __device__ __forceinline__ PackWalk(const ChannelPlan& plan, std::int64_t tile,
                                      std::int64_t first_step)
      : plan_(plan),
        place_(plan.PlaceOf(tile, first_step, static_cast<int>(threadIdx.x))),
        limit_(plan.Limit(tile)) {}

  __device__ __forceinline__ bool idle() const { return place_.pack < 0; }
  __device__ __forceinline__ bool whole() const { return plan_.Whole(place_, limit_); }
  __device__ __forceinline__ std::int64_t start() const { return plan_.Start(place_); }
  __device__ __forceinline__ void Move() {
    plan_.Move(place_, kBackwards ? plan_.backward : plan_.forward);
  }

 private:
  const ChannelPlan& plan_;
  ChannelPlace place_;
  std::int64_t limit_;
};

// load(k, step, wanted, start) and then use(k, step) of this thread's packs in so many steps, up to
// kRing of them loaded ahead, to place k of the ring in turn; where a load is not wanted, it is not
// used. begin(k) before the first use, end_ring() after every kRing or fewer. Packs are whole; or,
// kChecked, those that are not are left out.
template <int kRing, bool kBackwards, bool kChecked, typename Load, typename Begin, typename Use,
          typename EndRing>
__device__ __forceinline__ void ForPacks(const ChannelPlan& plan, std::int64_t tile,
                                         std::int64_t first_step, int steps, const Load& load,
                                         const Begin& begin, const Use& use,
                                         const EndRing& end_ring) {
  if (steps == 0) return;
  PackWalk<kBackwards> walk(plan, tile, first_step);
  if (walk.idle()) return;
  if constexpr (kChecked) {
#pragma unroll 1
    for (int step = 0; step < steps; step += kRing) {
      bool wanted[kRing];
#pragma unroll
      for (int k = 0; k < kRing; ++k) {
        wanted[k] = step + k < steps && walk.whole();
        load(k, step + k, wanted[k], walk.start());
        walk.Move();
      }
#pragma unroll
      for (int k = 0; k < kRing; ++k) {
        if (!wanted[k]) continue;
        begin(k);
        use(k, step + k);
      }
      end_ring();
    }
  } else {
    const auto next = [&](int k, int step) {
      load(k, step, step < steps, walk.start());
      walk.Move();
    };
#pragma unroll
    for (int k = 0; k < kRing; ++k) next(k, k);
    begin(0);
    int step = 0;
#pragma unroll 1
    for (; step + kRing <= steps; step += kRing) {
#pragma unroll
      for (int k = 0; k < kRing; ++k) {
        use(k, step + k);
        next(k, step + k + kRing);
      }
      end_ring();
    }
#pragma unroll
    for (int k = 0; k < kRing - 1; ++k) {
      if (step + k < steps) use(k, step + k);
    }
    end_ring();
  }
}

// fn(span) for this thread's packs that are the tile's in part.
template <int W, typename Fn>
__device__ __forceinline__ void ForEdges(const ChannelPlan& plan, const ChannelPart& part,
                                         const Fn& fn) {
  if constexpr (W == 1) return;
  const std::int64_t turns = plan.EdgeTurns(part.first, part.end);
#pragma unroll 1
  for (std::int64_t turn = 0; turn < turns; ++turn) {
    const ChannelSpan span =
        plan.EdgeSpan(part.tile, part.first, part.end, turn, static_cast<int>(threadIdx.x));
    if (span.first < span.last) fn(span);
  }
}

// Of each of a thread's elements, the channel's number in the tile.
template <int W>
__device__ __forceinline__ void OwnChannels(const ChannelPlan& plan, std::int64_t tile,
                                            int (&channels)[W]) {
  const int column = static_cast<int>(threadIdx.x) % plan.lanes * W;
  const int of_tile = plan.TileChannels(tile);
#pragma unroll
  for (int j = 0; j < W; ++j) {
    channels[j] = plan.plane ? 0 : plan.ChannelOf(column + j, of_tile);
  }
}

// --- Parameters ----------------------------------------------------------------------------------

// A parameter of any float dtype, widened; `absent` where there is none.
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

// What this kernel may have written, before a barrier of the grid.
template <typename A>
__device__ __forceinline__ A AccumAt(const Param& param, std::int64_t group, std::int64_t channel) {
  if (param.data == nullptr) return 0;
  return __ldcg(static_cast<const A*>(param.data) + group * param.group_stride + channel);
}

// Fills values[v][j] with number v of the thread's column j: table(group, channel, numbers) gives
// those of a channel.
template <int kValues, typename A, int W, typename Table>
__device__ __forceinline__ void LoadParameters(const ChannelPlan& plan, std::int64_t tile,
                                               void* scratch, const Table& table,
                                               A (&values)[kValues][W]) {
  A* const shared = static_cast<A*>(scratch);  // [kValues][channels of the tile]
  const std::int64_t group = tile / plan.tiles, first = plan.FirstChannel(tile);
  const int of_tile = plan.TileChannels(tile);
  __syncthreads();  // scratch has been read
  for (int i = static_cast<int>(threadIdx.x); i < of_tile; i += kChannelThreads) {
    A numbers[kValues];
    table(group, first + i, numbers);
#pragma unroll
    for (int v = 0; v < kValues; ++v) shared[v * of_tile + i] = numbers[v];
  }
  __syncthreads();  // and is written
  int channels[W];
  OwnChannels(plan, tile, channels);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[v][j] = shared[v * of_tile + channels[j]];
  }
}

// --- Launches ------------------------------------------------------------------------------------

template <typename T>
ChannelTask ChannelTaskOf(const ChannelShape& shape) {
  const Device device = CurrentDevice();
  ChannelTask task{};
  task.groups = shape.outer.groups, task.rows = shape.outer.rows;
  task.channels = shape.channels(), task.inner = shape.inner;
  task.element_bytes = sizeof(T), task.accum_bytes = sizeof(Accum<T>);
  task.multiprocessors = device.multiprocessors, task.shared_bytes = device.shared_bytes;
  return task;
}

// All blocks are resident at a time, where `together`.
template <typename... Parameters, typename... Arguments>
ffi::Error LaunchChannels(const char* op, void (*kernel)(Parameters...), cudaStream_t stream,
                          const ChannelPlan& plan, bool together, const Arguments&... arguments) {
  // Once, as it takes time: as much shared memory as any plan takes.
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
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = together ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(kChannelThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return ToError(op, cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace
}  // namespace gradops
