// Batch norm's second pass in a kernel of its own, of short blocks: large arrays pass through these
// faster than through blocks that stay, by 5 %. It does not know what is in shared memory, and goes
// from the end to the start, as the L2 cache has what was read last.
//
// A thread has kPacks packs, `stride` packs from each other, all loaded first. Channels last: the
// stride is a multiple of a row, so that a thread's packs are of the same channels. Channels first:
// a pack is of one channel or two.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/batch_norm_tiles.cuh"

namespace gradops {
namespace {

constexpr int kApplyThreads = 256;  // of a block

struct ApplyPlan {
  std::int64_t packs;  // of a group
  std::int64_t channels, inner;
  std::uint32_t row_packs;  // channels last; else 0
  std::uint32_t stride;
  std::uint32_t threads;  // of a group

  constexpr explicit ApplyPlan(const ChannelTask& task, int width, int packs_of_thread)
      : packs(task.rows * task.channels * task.inner / width),
        channels(task.channels),
        inner(task.inner),
        row_packs(task.inner == 1 ? static_cast<std::uint32_t>(task.channels / width) : 0),
        stride(kApplyThreads) {
    if (row_packs > 0) stride = (kApplyThreads + row_packs - 1) / row_packs * row_packs;
    const std::int64_t of_stride = std::int64_t{packs_of_thread} * stride;
    threads = static_cast<std::uint32_t>((packs + of_stride - 1) / of_stride * stride);
  }
};

// What tests want, instead of what the rule says, where it can be.
inline bool always_apart = false;

// Whether the second pass shall have, and can have, a kernel of its own: the arrays that it reads
// are so large that little of them is still on the chip, or thrice as much where blocks that stay
// have long runs of memory each.
inline bool ApplyApart(const ChannelTask& task, const ChannelPlan& plan, std::int64_t on_chip) {
  constexpr std::int64_t kMaxGroups = 65535;
  const std::int64_t width = 16 / task.element_bytes;
  const std::int64_t elements = task.rows * task.channels * task.inner;
  const bool fits = task.inner == 1 ? task.channels % width == 0 : task.inner >= width;
  if (!task.aligned || !fits || elements % width != 0 || task.groups > kMaxGroups) return false;
  if (elements / width > std::int64_t{1} << 31 || task.partial_rows < 3) return false;
  const std::int64_t bytes = task.groups * elements * task.element_bytes * task.arrays;
  return always_apart || bytes > (task.inner > 1 && !plan.plane ? on_chip : 3 * on_chip);
}

inline std::int64_t OnChipBytes() {
  const Device device = CurrentDevice();
  return device.l2_bytes + std::int64_t{device.multiprocessors} * device.shared_bytes;
}

// load(k, wanted, start) for all of a thread's packs, then use(k, start, numbers) for those that it
// has: numbers[v][j] is number v of the pack's j-th element's channel, from table(group, channel,
// numbers).
template <int kPacks, int kNumbers, typename A, int W, typename Table, typename Load, typename Use>
__device__ __forceinline__ void ForApplyPacks(const ApplyPlan& plan, const Table& table,
                                              const Load& load, const Use& use) {
  const std::uint32_t block = gridDim.x - 1 - blockIdx.x;
  const std::uint32_t thread = block * kApplyThreads + threadIdx.x;
  if (thread >= plan.threads) return;
  const std::uint32_t unit = thread / plan.stride, place = thread % plan.stride;
  const std::int64_t group = blockIdx.y;
  std::int64_t numbers_of[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    numbers_of[k] = (std::int64_t{unit} * kPacks + k) * plan.stride + place;
    load(k, numbers_of[k] < plan.packs, (group * plan.packs + numbers_of[k]) * W);
  }
  A numbers[kNumbers][W];
  if (plan.row_packs > 0) {
    const std::int64_t first = std::int64_t{place % plan.row_packs} * W;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      A of_channel[kNumbers];
      table(group, first + j, of_channel);
#pragma unroll
      for (int v = 0; v < kNumbers; ++v) numbers[v][j] = of_channel[v];
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (numbers_of[k] >= plan.packs) continue;
    if (plan.row_packs == 0) {
      const std::int64_t row = numbers_of[k] * W / plan.inner, channel = row % plan.channels;
      const int left =
          static_cast<int>(min((row + 1) * plan.inner - numbers_of[k] * W, std::int64_t{W}));
      A first[kNumbers], second[kNumbers] = {};
      table(group, channel, first);
      if (left < W) table(group, channel + 1 < plan.channels ? channel + 1 : 0, second);
#pragma unroll
      for (int v = 0; v < kNumbers; ++v) {
#pragma unroll
        for (int j = 0; j < W; ++j) numbers[v][j] = j < left ? first[v] : second[v];
      }
    }
    use(k, (group * plan.packs + numbers_of[k]) * W, numbers);
  }
}

template <typename... Parameters, typename... Arguments>
ffi::Error LaunchApply(const char* op, void (*kernel)(Parameters...), cudaStream_t stream,
                       const ApplyPlan& plan, std::int64_t groups, const Arguments&... arguments) {
  const dim3 grid((plan.threads + kApplyThreads - 1) / kApplyThreads,
                  static_cast<unsigned>(groups));
  kernel<<<grid, kApplyThreads, 0, stream>>>(arguments...);
  return LastError(op);
}

}  // namespace
}  // namespace gradops
