// The second pass of batch norm forward as a separate kernel of short blocks, channels first. It is
// for large arrays whose channels have few elements in a row. There, blocks that take memory in
// order are faster than blocks that stay with their channels. The kernel goes from the end of the
// arrays to the start: the L2 cache still has what was read last.
//
// A thread loads all of its kPacks packs first. A pack belongs to one channel or two.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/vector.cuh"

namespace gradops {
namespace {

constexpr int kApplyThreads = 256;  // threads of a block

// Loads the pack at `start` if it is wanted; otherwise `pack` keeps its value.
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

struct ApplyPlan {
  std::int64_t packs;  // in a group
  std::int64_t channels, inner;
  std::uint32_t blocks;  // for a group

  constexpr explicit ApplyPlan(const ChannelTask& task, int width, int packs_of_thread)
      : packs(task.rows * task.channels * task.inner / width),
        channels(task.channels),
        inner(task.inner),
        blocks(static_cast<std::uint32_t>((packs + packs_of_thread * kApplyThreads - 1) /
                                          (packs_of_thread * kApplyThreads))) {}
};

// Set by tests: take the separate kernel wherever it is possible, whatever the rule says.
inline bool always_apart = false;

// Whether the second pass can be a separate kernel, and should be. on_chip: bytes that the chip's
// memories may still hold of the arrays that the second pass reads.
inline bool ApplyApart(const ChannelTask& task, const ChannelPlan& plan, std::int64_t on_chip) {
  constexpr std::int64_t kMaxGroups = 65535;
  const std::int64_t width = 16 / task.element_bytes;
  const std::int64_t elements = task.rows * task.channels * task.inner;
  if (!task.aligned || task.inner < width || elements % width != 0) return false;
  if (task.groups > kMaxGroups || elements / width >= std::int64_t{1} << 31) return false;
  return always_apart || (!plan.plane && task.groups * elements * task.element_bytes > 4 * on_chip);
}

inline std::int64_t OnChipBytes() {
  const Device device = CurrentDevice();
  return device.l2_bytes + std::int64_t{device.multiprocessors} * device.shared_bytes;
}

// Calls load(k, wanted, start) for all of a thread's packs, then use(k, start, numbers) for the
// wanted ones. `numbers[v][j]` is number v of the channel of the pack's j-th element.
// `table(group, channel, numbers)` gives a channel's numbers.
template <int kPacks, int kNumbers, typename A, int W, typename Table, typename Load, typename Use>
__device__ __forceinline__ void ForApplyPacks(const ApplyPlan& plan, const Table& table,
                                              const Load& load, const Use& use) {
  const std::int64_t block = gridDim.x - 1 - blockIdx.x, group = blockIdx.y;
  std::int64_t own[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    own[k] = (block * kPacks + k) * kApplyThreads + threadIdx.x;
    load(k, own[k] < plan.packs, (group * plan.packs + own[k]) * W);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (own[k] >= plan.packs) break;
    const std::int64_t row = own[k] * W / plan.inner, channel = row % plan.channels;
    const int left = static_cast<int>(min((row + 1) * plan.inner - own[k] * W, std::int64_t{W}));
    A first[kNumbers], second[kNumbers] = {};
    table(group, channel, first);
    if (left < W) table(group, channel + 1 < plan.channels ? channel + 1 : 0, second);
    A numbers[kNumbers][W];
#pragma unroll
    for (int v = 0; v < kNumbers; ++v) {
#pragma unroll
      for (int j = 0; j < W; ++j) numbers[v][j] = j < left ? first[v] : second[v];
    }
    use(k, (group * plan.packs + own[k]) * W, numbers);
  }
}

template <typename... Parameters, typename... Arguments>
ffi::Error LaunchApply(const char* op, void (*kernel)(Parameters...), cudaStream_t stream,
                       const ApplyPlan& plan, std::int64_t groups, const Arguments&... arguments) {
  const dim3 grid(plan.blocks, static_cast<unsigned>(groups));
  kernel<<<grid, kApplyThreads, 0, stream>>>(arguments...);
  return LastError(op);
}

}  // namespace
}  // namespace gradops
