// How the rows of logits are cut, and the rule that chooses it. Plain C++, no CUDA. README.md has
// the words and a picture.
#pragma once

#include <cstdint>

#include "common/description.h"
#include "common/integers.h"
#include "common/shape.h"

namespace gradops {

inline constexpr int kCrossEntropyThreads = 256;  // threads of a block
inline constexpr int kCrossEntropyLoads = 4;      // vectors that a thread loads at once

// What the choice depends on.
struct CrossEntropyTask {
  RowShape shape;
  int element_bytes;
  bool backward;
  int multiprocessors;
  bool has_clusters;  // The GPU has clusters: compute capability 9.0 or newer.
};

struct CrossEntropyPlan {
  int row_threads;  // Threads of a block that share a row: 32 or all.
  int cluster;      // Forward: blocks that share a row.
  // Backward: blocks that share a row. Each takes a chunk of kCrossEntropyLoads vectors a thread.
  std::int64_t chunks;
  bool backward;

  constexpr int block_rows() const { return kCrossEntropyThreads / row_threads; }
};

// A warp takes short rows, and a block takes longer ones. If rows are few, up to eight blocks share
// a row forward: then all multiprocessors end at about the same time.
constexpr CrossEntropyPlan ChooseCrossEntropyPlan(const CrossEntropyTask& task) {
  constexpr std::int64_t kMostWarpBytes = 8192, kLeastBlockBytes = 32768;
  const std::int64_t bytes = task.shape.features * task.element_bytes;
  CrossEntropyPlan plan{.row_threads = 32, .cluster = 1, .chunks = 1, .backward = task.backward};
  if (bytes <= kMostWarpBytes) return plan;
  plan.row_threads = kCrossEntropyThreads;
  if (task.backward) {
    plan.chunks = CeilDiv(bytes, std::int64_t{16} * kCrossEntropyLoads * kCrossEntropyThreads);
    return plan;
  }
  while (task.has_clusters && plan.cluster < 8 && bytes >= 2 * plan.cluster * kLeastBlockBytes &&
         task.shape.all_rows() * plan.cluster < 24 * task.multiprocessors) {
    plan.cluster *= 2;
  }
  return plan;
}

inline Description Describe(const CrossEntropyPlan& plan) {
  return {plan.backward ? "BackwardKernel" : "ForwardKernel",
          "cross_entropy/cross_entropy.cu",
          {{"row_threads", plan.row_threads, "threads that share a row in one block"},
           {"cluster", plan.cluster, "forward: blocks that share a row"},
           {"chunks", plan.chunks, "backward: blocks that share a row"}}};
}

}  // namespace gradops
