// Chooses how batch norm's elements are divided on a GPU (cuda/batch_norm/plan.h). Plain C++, no
// CUDA. For 16-bit elements, whose packs have 8 elements, the first line that fits counts:
//
//   inner                       channels * inner   way       lanes of a tile
//   256 and more, whole packs   any                plane (1)
//   any                         up to 1024 (2)     columns   about 64, one tile (3)
//   lcm(inner, 8) up to 4096    whole packs        columns   8 to 512
//   32 and more                 any                plane
//   any                         any                columns of packs of one element
//
// (1) If a block then has at most half the tiles, columns are chosen.
// (2) If only every n-th row ends with a pack, and n > 1, the limit is 2048 / n.
// (3) If inner is 1, several tiles of 8 or more lanes are possible too.
//
// Tiles are dealt out if this leaves few blocks without work. If short rows take less time
// than a barrier, tiles are narrow: a block can then combine a tile's partial results itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/integers.h"
#include "cuda/batch_norm/plan.h"

namespace gradops {

// What the kernel of a direction, forward or backward, needs. All numbers are counts.
struct ChannelNeeds {
  int arrays;           // Arrays that a thread keeps from the first pass for the second.
  int ring_steps;       // Steps of a ring: copies are this many steps ahead.
  int long_ring_steps;  // Steps of a ring if many threads have no pack.
  int parameters;       // Numbers of a channel in the second pass.
  int origins;          // Numbers of a channel in the first pass.
  int partial_numbers;  // Numbers of a channel in a partial result.
};
inline constexpr ChannelNeeds kForwardNeeds{.arrays = 1,
                                            .ring_steps = 4,
                                            .long_ring_steps = 6,
                                            .parameters = 3,
                                            .origins = 1,
                                            .partial_numbers = 4};
inline constexpr ChannelNeeds kBackwardNeeds{.arrays = 2,
                                             .ring_steps = 3,
                                             .long_ring_steps = 3,
                                             .parameters = 5,
                                             .origins = 0,
                                             .partial_numbers = 2};

// What the choice depends on.
struct ChannelTask {
  ChannelNeeds needs;
  std::int64_t groups, rows, channels, inner;  // of x
  int element_bytes;
  int accum_bytes;            // Bytes of the accumulation type.
  bool aligned;               // All arrays start at 16-byte boundaries.
  bool statistics;            // There is a first pass, which adds up.
  bool apply;                 // There is a second pass in this kernel.
  bool apart;                 // The second pass is, or would be, a separate kernel.
  int other_arrays;           // Arrays that are copied ahead, but not kept.
  std::int64_t partial_rows;  // Partial rows in the workspace.
  int multiprocessors;
  std::int64_t shared_bytes;  // Shared memory of a multiprocessor.
  std::int64_t l2_bytes;
};

inline constexpr int kUsualLanes = 256;  // most lanes of a group's only tile
inline constexpr int kElementSteps = 4;  // steps of a ring of single elements

// Unused elements in the shared memory where a block adds up columns, so that neighbouring columns
// are in different banks.
inline constexpr int kSumsPadding = 16;

// A block combines a tile's partial results itself if these are at most kMaxOwnBytes from at most
// kMaxOwnParts blocks. Larger ones are combined by all blocks, and all blocks wait for that.
inline constexpr std::int64_t kMaxOwnBytes = 96 << 10, kMaxOwnParts = 48;

inline constexpr int kWarpThreads = 32;
inline constexpr int kRingCounters = kChannelThreads / kWarpThreads;  // of a tile: one per warp

// Dynamic shared memory of a block that has a multiprocessor to itself. CUDA keeps 1 KB, and static
// shared memory takes less than another 1 KB.
constexpr std::int64_t MaxChannelBytes(std::int64_t of_multiprocessor) {
  return of_multiprocessor - 2048;
}

namespace channel_policy {

// How tiles are dealt out to blocks. stride and tile_stride are ChannelPlan's. rounds: the most
// tiles that a block works on, one after the other.
struct Deal {
  std::int64_t stride, tile_stride, rounds;
};

// The number of blocks. A block with less than kLeastSteps steps is not worth waiting for.
constexpr std::int64_t BlocksFor(const ChannelTask& task, std::int64_t tiles, std::int64_t steps) {
  constexpr std::int64_t kLeastSteps = 4;
  return std::clamp<std::int64_t>(CeilDiv(tiles * steps, kLeastSteps), 1, task.multiprocessors);
}

constexpr Deal DealOut(const ChannelTask& task, std::int64_t tiles, std::int64_t steps) {
  const std::int64_t blocks = BlocksFor(task, tiles, steps);
  const std::int64_t rounds = CeilDiv(tiles, blocks);
  const std::int64_t at_once = CeilDiv(tiles, rounds);
  std::int64_t stride = std::min(blocks / at_once, steps);
  if (task.statistics) stride = std::min(stride, task.partial_rows);
  if (rounds > 1) stride = 1;
  const bool few_idle = 100 * tiles * stride >= 85 * rounds * blocks;
  return few_idle ? Deal{stride, at_once, rounds} : Deal{1, 0, 2};
}

// Bytes of a tile's partial results, which a block reads to combine them itself.
constexpr std::int64_t OwnBytes(const ChannelTask& task, const Deal& deal, std::int64_t channels) {
  return deal.stride * channels * task.needs.partial_numbers * task.accum_bytes;
}
constexpr bool OwnSums(const ChannelTask& task, const Deal& deal, std::int64_t channels) {
  return task.statistics && !task.apart && deal.tile_stride > 0 && deal.stride <= kMaxOwnParts &&
         OwnBytes(task, deal, channels) <= kMaxOwnBytes;
}

// How good tiles of `lanes` lanes are: the product of two factors, minus penalties. The first
// factor is the share of threads that have a pack; only half of it counts, because memory is the
// limit. The second factor is a block's ideal number of steps over its real one plus the overhead
// of its tiles. There are penalties for rows that are short to read or long to add up. There is one
// for tiles that end within a line of 128 bytes, the unit in which memory is read.
constexpr std::int64_t Fitness(const ChannelTask& task, std::int64_t rows, std::int64_t lanes,
                               std::int64_t tiles, std::int64_t packs) {
  const std::int64_t at_once = kChannelThreads / lanes;
  const std::int64_t steps = CeilDiv(rows, at_once);
  const std::int64_t taken =
      1024 * at_once * packs * rows / (kChannelThreads * tiles) / (steps * at_once);
  const std::int64_t all_tiles = task.groups * tiles;
  const std::int64_t blocks = BlocksFor(task, all_tiles, steps);
  const Deal deal = DealOut(task, all_tiles, steps);
  const std::int64_t own = CeilDiv(all_tiles * steps, blocks);  // a block's ideal number of steps
  // Blocks that do not work on one stretch of memory are slower.
  const std::int64_t slowest =
      deal.tile_stride > 0 ? deal.rounds * CeilDiv(steps, deal.stride) : own * 9 / 8;
  // The overhead, in steps: sums and parameters of each tile, and changes from tile to tile.
  const std::int64_t channels = CeilDiv(task.channels, tiles);
  const std::int64_t of_tile =
      OwnSums(task, deal, channels) ? 8 + OwnBytes(task, deal, channels) / 8192 : 20;
  const std::int64_t besides = deal.rounds * of_tile + (deal.rounds - 1) * 12;
  const std::int64_t cost = lanes < 8     ? 200
                            : lanes < 16  ? 40
                            : lanes < 32  ? 24
                            : lanes < 128 ? 8
                            : lanes > 256 ? 130
                            : lanes > 128 ? 80
                                          : 0;
  const std::int64_t cut = tiles == 1 || lanes % 8 == 0 ? 0 : lanes < 128 ? 100 : 40;
  return (1024 + taken) / 2 * own / (slowest + besides) - cost - cut;
}

// Whether a multiprocessor has room for a tile's numbers and for rings of `slots` packs a step. One
// more array is always counted, so that tiles do not depend on whether there is one.
constexpr bool Fits(const ChannelTask& task, std::int64_t channels, std::int64_t width,
                    std::int64_t slots = kChannelThreads) {
  constexpr std::int64_t kMostBetween = 96;  // most unused places (SlotOfChannel)
  const ChannelNeeds& needs = task.needs;
  const std::int64_t numbers =
      (needs.parameters + needs.origins) * (channels + kMostBetween) * task.accum_bytes;
  const std::int64_t ring = width == 1 ? 0 : needs.ring_steps * slots * 16;
  return numbers + (needs.arrays + 1) * ring <= MaxChannelBytes(task.shared_bytes);
}

// Sets what columns need. Returns false if packs of this width cannot be cut into columns.
constexpr bool CutColumns(const ChannelTask& task, ChannelPlan& plan) {
  const std::int64_t row = task.channels * task.inner, width = plan.width;
  const std::int64_t least_fold = width / std::gcd(row, width);
  if (width > 1 && task.groups > 1 && plan.group_elements % width != 0) return false;
  plan.plane = plan.framed = false, plan.fold = 1, plan.tile_channels = task.channels;
  plan.lanes = 0;
  std::int64_t best = std::numeric_limits<std::int64_t>::min();
  const std::int64_t packs = least_fold * row / width;  // of the fewest rows that end with a pack
  const bool whole = (packs <= kUsualLanes / 2 || (least_fold > 1 && packs <= kUsualLanes)) &&
                     Fits(task, task.channels, width);
  if (whole) {  // one tile: `fold` is just large enough for reads of some length
    const std::int64_t times = std::max<std::int64_t>(1, kUsualLanes / 4 / packs);
    plan.fold = least_fold * std::min(times, CeilDiv(task.rows, least_fold));
    const std::int64_t lanes = plan.fold * row / width;
    plan.lanes = static_cast<int>(lanes);
    best = Fitness(task, CeilDiv(task.rows, plan.fold), lanes, 1, lanes);
  }
  if (least_fold == 1 && (!whole || task.inner == 1)) {
    const std::int64_t least_channels = width / std::gcd(task.inner, width);
    const std::int64_t unit = least_channels * task.inner / width;
    const std::int64_t all = CeilDiv(packs, unit);
    for (std::int64_t times = 1; times * unit <= kChannelThreads; ++times) {
      const std::int64_t tiles = CeilDiv(all, times);
      if (times > 1 && CeilDiv(all, tiles) != times) continue;
      if (!Fits(task, times * least_channels, width)) break;
      const std::int64_t fitness = Fitness(task, task.rows, times * unit, tiles, packs);
      if (fitness <= best) continue;
      best = fitness, plan.lanes = static_cast<int>(times * unit);
      plan.tile_channels = times * least_channels, plan.fold = 1;
    }
  }
  if (plan.lanes == 0) return false;
  plan.at_once = kChannelThreads / plan.lanes;
  plan.tiles = CeilDiv(task.channels, plan.tile_channels);
  plan.rows = CeilDiv(task.rows, plan.fold);
  plan.row_elements = plan.fold * row;
  plan.row_packs = 0;
  plan.steps = CeilDiv(plan.rows, plan.at_once);
  plan.whole_steps = task.rows / plan.fold / plan.at_once;
  plan.ragged = width > 1 && task.rows % plan.fold != 0;
  return true;
}

constexpr void CutPlanes(const ChannelTask& task, ChannelPlan& plan) {
  const std::int64_t width = plan.width;
  plan.plane = true, plan.framed = task.inner % width != 0, plan.fold = 1, plan.tile_channels = 1;
  plan.lanes = kChannelThreads, plan.at_once = 1;
  plan.tiles = task.channels;
  plan.rows = task.rows;
  plan.row_elements = task.channels * task.inner;
  // Enough for every place within a pack where a row may start.
  plan.row_packs = CeilDiv(task.inner + (plan.framed ? width - 1 : 0), width);
  plan.steps = CeilDiv(plan.rows * plan.row_packs, kChannelThreads);
  plan.whole_steps = plan.framed ? 0 : plan.rows * plan.row_packs / kChannelThreads;
}

// About how many tiles a block has.
constexpr std::int64_t Rounds(const ChannelTask& task, const ChannelPlan& plan) {
  return DealOut(task, task.groups * plan.tiles, plan.steps).rounds;
}

// How many blocks may have a part of one tile.
constexpr std::int64_t BlocksOfTile(const ChannelPlan& plan) {
  const std::int64_t least = plan.all_tiles * plan.units / plan.blocks;  // units of a block
  return std::min<std::int64_t>({plan.blocks, plan.units, (plan.units - 1) / least + 2});
}

// Distances from a thread's pack to its packs in the block's next and previous steps.
constexpr void SetStrides(ChannelPlan& plan) {
  const auto stride = [&](std::int64_t rows, std::int64_t packs) {
    return ChannelStride{packs, rows * plan.row_elements + packs * plan.width};
  };
  if (plan.plane) {
    const std::int64_t packs = plan.stride * kChannelThreads;
    const std::int64_t rows = packs / plan.row_packs, rest = packs % plan.row_packs;
    plan.forward = stride(rows, rest), plan.backward = stride(-rows - 1, plan.row_packs - rest);
  } else {
    plan.forward = stride(plan.stride * plan.at_once, 0);
    plan.backward = stride(-plan.stride * plan.at_once, 0);
  }
}

// Sets the way to cut tiles, and all that follows from that choice.
constexpr void ChooseWay(const ChannelTask& task, ChannelPlan& plan) {
  plan.channels = task.channels, plan.inner = task.inner;
  plan.group_rows = task.rows;
  plan.group_elements = task.rows * task.channels * task.inner;
  plan.width = task.aligned ? 16 / task.element_bytes : 1;
  const std::int64_t width = plan.width;
  // Rows whose ends are masked lose about two of their packs.
  if (width > 1 && task.inner % width == 0 && task.inner >= 32 * width) {
    CutPlanes(task, plan);
    ChannelPlan columns = plan;
    if (Rounds(task, plan) > 1 && CutColumns(task, columns) &&
        2 * Rounds(task, columns) <= Rounds(task, plan)) {
      plan = columns;
    }
  } else if (!CutColumns(task, plan)) {
    if (task.inner >= (width > 1 ? 4 * width : kUsualLanes)) {
      CutPlanes(task, plan);
    } else {
      plan.width = 1;
      CutColumns(task, plan);
    }
  }
  plan.all_tiles = task.groups * plan.tiles;
}

// Sets which steps a block has.
constexpr void DivideSteps(const ChannelTask& task, const Deal& deal, ChannelPlan& plan) {
  plan.stride = deal.stride, plan.tile_stride = deal.tile_stride;
  plan.step_turns = ChannelTurns(plan.steps, plan.stride);
  plan.whole_turns = ChannelTurns(plan.whole_steps, plan.stride);
  plan.tile_turns = ChannelTurns(plan.all_tiles, std::max<std::int64_t>(plan.tile_stride, 1));
  const auto divide = [&](std::int64_t unit_steps) {
    plan.unit_steps = unit_steps;
    plan.units = CeilDiv(plan.steps, unit_steps);
    plan.blocks = static_cast<int>(
        std::min(BlocksFor(task, plan.all_tiles, plan.steps), plan.all_tiles * plan.units));
  };
  divide(1);
  if (plan.dealt()) {
    plan.blocks = static_cast<int>(deal.stride * deal.tile_stride);
  } else if (task.statistics && BlocksOfTile(plan) > task.partial_rows) {
    divide(CeilDiv(plan.steps, task.partial_rows));
  }
  SetStrides(plan);
}

// Sets how many rings of the second pass go to whichever block is free. None do if there are few,
// or if there is no room for counters after a tile's partial results.
constexpr void ShareRings(const ChannelTask& task, const Deal& deal, ChannelPlan& plan) {
  constexpr std::int64_t kLeastRings = 16;  // per block
  if (plan.plane || plan.width == 1 || !plan.dealt() || deal.rounds > 1 || plan.stride == 1) return;
  if (plan.stride + kRingCounters > task.partial_rows) return;
  const std::int64_t kept = plan.kept_rings * plan.ring_steps * plan.stride;
  const std::int64_t rings = CeilDiv(std::max<std::int64_t>(plan.steps - kept, 0), plan.ring_steps);
  if (rings < kLeastRings * plan.stride || rings > std::numeric_limits<int>::max() / 16) return;
  plan.shared_rings = static_cast<int>(rings);
  plan.given_rings = static_cast<int>(std::max<std::int64_t>(2, rings / plan.stride * 3 / 4));
}

// Steps of a ring. There are more if at least a fifth of the threads have no pack, and the
// multiprocessor has much shared memory.
constexpr int RingSteps(const ChannelTask& task, const ChannelPlan& plan) {
  constexpr std::int64_t kMuchMemory = 160 << 10;
  if (plan.width == 1) return kElementSteps;
  const bool few = !plan.plane && 5 * plan.lanes * plan.at_once <= 4 * kChannelThreads;
  return few && task.shared_bytes >= kMuchMemory ? task.needs.long_ring_steps
                                                 : task.needs.ring_steps;
}

// Sets which steps the second pass finds in the L2 cache. Without hints it finds only half of them.
// Very large arrays get no hints: little of them fits, and hints make them slower.
constexpr void ChooseCachedSteps(const ChannelTask& task, ChannelPlan& plan) {
  constexpr std::int64_t kMostTimes = 5;  // size of the L2 cache
  const std::int64_t bytes =
      task.groups * plan.group_elements * task.element_bytes * task.needs.arrays;
  const std::int64_t cached = task.l2_bytes * 6 / 10;
  if (!task.statistics || plan.width == 1 || bytes <= cached) return;
  if (bytes > kMostTimes * task.l2_bytes) return;
  const std::int64_t step_bytes =
      std::int64_t{plan.plane ? kChannelThreads : plan.at_once * plan.lanes} * 16 *
      task.needs.arrays;
  plan.cached_steps =
      static_cast<int>(std::max<std::int64_t>(1, cached / step_bytes / plan.blocks));
}

// Sets the layout of a block's shared memory. The first region has either sums of threads and
// origins, or parameters and the rings of arrays that do not stay: no thread needs these rings
// while sums are there. Then follow the rings of the other arrays: the kept rings and one more.
// Fits made sure that there is room for that one.
constexpr void DivideMemory(const ChannelTask& task, const Deal& deal, ChannelPlan& plan) {
  const auto lines = [](std::int64_t bytes) { return static_cast<int>(CeilDiv(bytes, 128) * 128); };
  plan.warp_rows = plan.plane || kWarpThreads % plan.lanes != 0 ? 1 : kWarpThreads / plan.lanes;
  plan.sums_pitch = plan.at_once / plan.warp_rows * plan.lanes + kSumsPadding / plan.width;
  const int sums =
      plan.plane ? kChannelThreads * 2 : plan.sums_pitch * plan.width * 2 * task.accum_bytes;
  const auto tile_channels = static_cast<int>(plan.tile_channels);
  plan.channel_shift = 0, plan.channel_pitch = tile_channels;
  if (!plan.plane && plan.inner == 1 && plan.width > 1) {
    while (1 << plan.channel_shift < plan.width) ++plan.channel_shift;
    // Four more than a multiple of eight: stores for 16-bit types then go to different banks too.
    plan.channel_pitch = static_cast<int>(CeilDiv(CeilDiv(tile_channels, plan.width), 8)) * 8 + 4;
  }
  const int channel_bytes = plan.channel_slots() * task.accum_bytes;
  // Rows start as far into a line as in global memory, if that takes little room.
  const int whole_lines = static_cast<int>(CeilDiv(plan.lanes, kLinePacks)) * kLinePacks;
  const int skewed_slots = plan.at_once * whole_lines + kLinePacks;
  const bool skewed = !plan.plane && plan.tiles > 1 && plan.lanes != whole_lines &&
                      4 * skewed_slots <= 5 * kChannelThreads &&
                      Fits(task, tile_channels, plan.width, skewed_slots);
  plan.row_slots = skewed ? whole_lines : plan.lanes;
  const int slots = skewed ? skewed_slots : plan.at_once * plan.lanes;
  plan.slot_bytes = lines(slots * plan.width * task.element_bytes);
  plan.ring_steps = RingSteps(task, plan);
  plan.part_rings = static_cast<int>(CeilDiv(plan.steps, plan.ring_steps));
  const int ring_bytes = plan.ring_steps * plan.slot_bytes;
  const int rings_bytes = plan.width > 1 ? task.needs.arrays * ring_bytes : 0;
  const int origin_bytes = task.statistics ? channel_bytes * task.needs.origins : 0;
  plan.other_at = lines(channel_bytes * task.needs.parameters);
  plan.origins_at = std::max(task.statistics ? sums : 0, plan.other_at);
  const int least = lines(plan.other_at + (plan.width > 1 ? task.other_arrays * ring_bytes : 0));
  plan.scratch_bytes = std::max(lines(plan.origins_at + origin_bytes), least);
  plan.shared_bytes = plan.scratch_bytes + rings_bytes;
  if (task.statistics && task.apply) {
    const std::int64_t budget = MaxChannelBytes(task.shared_bytes) - plan.shared_bytes;
    const std::int64_t rings =
        plan.dealt() ? deal.rounds * CeilDiv(CeilDiv(plan.steps, plan.stride), plan.ring_steps)
                     : CeilDiv(plan.steps * plan.all_tiles, plan.blocks) / plan.ring_steps + 2;
    plan.kept_rings = static_cast<int>(
        std::clamp<std::int64_t>(budget / (task.needs.arrays * ring_bytes), 0, rings));
    plan.shared_bytes += plan.kept_rings * task.needs.arrays * ring_bytes;
    ShareRings(task, deal, plan);
  }
}

}  // namespace channel_policy

// The plan for a task with elements.
constexpr ChannelPlan ChooseChannelPlan(const ChannelTask& task) {
  using namespace channel_policy;
  ChannelPlan plan{};
  ChooseWay(task, plan);
  const Deal deal = DealOut(task, plan.all_tiles, plan.steps);
  DivideSteps(task, deal, plan);
  plan.sums = task.statistics;
  plan.inverse_elements = 1.0 / (static_cast<double>(task.rows) * static_cast<double>(task.inner));
  plan.own_sums = OwnSums(task, deal, plan.tile_channels);
  ChooseCachedSteps(task, plan);
  DivideMemory(task, deal, plan);
  return plan;
}

}  // namespace gradops
