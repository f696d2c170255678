// How many blocks the kernels of global norm and clip have, and the rule that chooses it. Plain
// C++, no CUDA. README.md has the words and a picture.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/description.h"
#include "common/integers.h"
#include "ops/global_norm.h"

namespace gradops {

inline constexpr int kSumThreads = 256;  // threads of a block of the first kernel
inline constexpr int kSumBlocks = 5;     // such blocks per multiprocessor
// Threads and chunks of a block that scales, and such blocks per multiprocessor. If chunks are few,
// a block has one. If nothing is clipped, only the start of warps takes time, 11 a nanosecond.
// Blocks of several chunks need fewer warps.
inline constexpr int kScaleThreads = 512, kScaleChunks = 8, kScaleBlocks = 2;

// Leaves of a table. Most models fit into the small table. Its size makes no launch slower: it is
// within the 4 KB of any kernel's parameters. The large table fills what CUDA allows.
inline constexpr int kSmallTable = 250, kLargeTable = 2040;

struct ClipTask {
  std::int64_t chunks;  // Chunks of the table. The sum counts the largest table.
  std::int64_t groups;
  std::int64_t workspace_doubles;  // The sum: room for partial sums.
  int multiprocessors;
};

struct ClipPlan {
  bool scales;
  std::int32_t segments;  // Of a table in each group.
  int threads;            // Of a block.
  int finalize_threads;   // The sum: of a block that adds up a group's partial sums.
};

// Partial sums per group: the least of three numbers. These are the chunks of the largest table,
// the room in the workspace, and the blocks of full waves for all groups together. There are
// several waves so that multiprocessors that run ahead take more blocks. They are whole because the
// few blocks of a partial wave could not saturate memory. A multiprocessor's blocks have up to 80
// KB of loads under way. An H200 needs about 32 KB.
constexpr ClipPlan ChooseSumPlan(const ClipTask& task) {
  const std::int64_t wave = std::int64_t{kSumBlocks} * task.multiprocessors;
  const std::int64_t blocks = wave * std::max<std::int64_t>(1, kMaxPartialSums / wave);
  const std::int64_t segments =
      std::min({task.chunks, task.workspace_doubles / task.groups, CeilDiv(blocks, task.groups)});
  // With many groups, each group has few partial sums, and a warp is enough.
  return {false, static_cast<std::int32_t>(segments), kSumThreads,
          segments <= 64 ? 32 : kSumThreads};
}

// Few chunks are spread over all multiprocessors before a block gets several.
constexpr ClipPlan ChooseScalePlan(const ClipTask& task) {
  const std::int64_t resident = std::int64_t{kScaleBlocks} * task.multiprocessors;
  const bool many = task.chunks * task.groups >= 2 * kScaleChunks * resident;
  const std::int64_t segments = many ? CeilDiv(task.chunks, kScaleChunks) : task.chunks;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return {true, static_cast<std::int32_t>(std::min(segments, kMost)), kScaleThreads, 0};
}

// The plan in numbers, for tests and people.
inline Description Describe(const ClipPlan& plan) {
  return {plan.scales ? "ScaleKernel" : "PartialSumKernel",
          "clip/global_norm.cu",
          {{"segments", plan.segments, "blocks of a table of leaves, for each group"},
           {"threads", plan.threads, "threads of a block"},
           {"finalize_threads", plan.finalize_threads,
            "threads of the block that adds up partial sums"}}};
}

}  // namespace gradops
