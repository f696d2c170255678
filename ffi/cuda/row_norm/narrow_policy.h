// Layout of narrow unaligned rows in layer norm's kernels on a GPU, forward and backward. A warp
// copies a chunk of neighbouring rows to shared memory by packs (16-byte vectors). It works there
// element by element, and writes the chunk back by packs. Meanwhile the next chunk is under way.
// Plain C++, no CUDA.
//
// A row belongs to some lanes of a warp. Each lane has an equal, odd number of neighbouring
// columns: odd, so that lanes find their elements in different banks. Last lanes that would have
// columns beyond the row begin earlier. They own only columns that no lane before them has. A row
// has the fewest lanes that can hold it. Two or more lanes each have more than half of the columns
// that a lane can have. So code need not check for these columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/shape.h"
#include "cuda/row_norm/policy.h"

namespace gradops {

inline constexpr int kNarrowThreads = 256;  // most threads of a block

// How many bytes of each array a chunk may have. This leaves a multiprocessor room for all the
// blocks that its registers allow.
constexpr int NarrowChunkBytes(int arrays) {
  return arrays == 1 ? 4096 : 6144 / arrays;
}

// The most columns of a lane, limited by registers.
constexpr int NarrowColumns(int element_bytes) {
  return element_bytes == 8 ? 7 : 15;
}
// Of these, the columns that each lane has. If rows have one lane, it may read beyond its row.
constexpr int SureColumns(int columns) {
  return (columns / 2 + 1) | 1;
}

struct NarrowPlan {
  int lanes;         // Lanes of a row: a power of two up to 32. 0: there is no such plan.
  int log_lanes;     // log2 of lanes.
  int columns;       // Columns of a lane.
  int steps;         // Rows of a lane in a chunk.
  int chunk_rows;    // Rows of a chunk, at most 32.
  int slot_bytes;    // Shared memory for a chunk of one array.
  int warps;         // Warps of a block.
  int warp_bytes;    // Shared memory of a warp: its slots.
  int shared_bytes;  // Shared memory of a block: all slots and NarrowExtra.

  constexpr int threads() const { return 32 * warps; }
};

// Shared memory that a kernel needs beside slots: per warp, and per block. Forward: a residual's
// bias. Backward: column sums, and each thread's sums of dx.
struct NarrowExtra {
  int of_warp, of_block;
};
inline NarrowExtra NarrowForwardExtra(const RowTask& task, bool residual_bias) {
  const int accum_bytes = task.element_bytes == 8 ? 8 : 4;
  return {0, residual_bias ? static_cast<int>(task.features) * accum_bytes : 0};
}
inline NarrowExtra NarrowBackwardExtra(const RowTask& task) {
  const int accum_bytes = task.element_bytes == 8 ? 8 : 4;
  const int of_dx = task.sums_dx ? 32 * NarrowColumns(task.element_bytes) : 0;
  return {(static_cast<int>(task.features) + of_dx) * accum_bytes, 0};
}

// For rows that would otherwise be framed (Division::kFramed).
inline NarrowPlan ChooseNarrowPlan(const RowTask& task, NarrowExtra beside) {
  NarrowPlan plan{};
  const int most = NarrowColumns(task.element_bytes);
  if (task.features < 1 || task.features > 32 * most) return plan;
  const auto features = static_cast<int>(task.features);
  plan.lanes = 1;
  while (plan.lanes * most < features) plan.lanes *= 2, ++plan.log_lanes;
  plan.columns = std::min(features, static_cast<int>(CeilDiv(features, plan.lanes)) | 1);
  const int row_bytes = features * task.element_bytes, at_once = 32 / plan.lanes;
  // Few rows are spread over all multiprocessors' warps.
  const std::int64_t spread = task.rows / (at_once * task.multiprocessors * (kNarrowThreads / 32));
  const int most_steps = static_cast<int>(std::clamp<std::int64_t>(spread, 1, plan.lanes));
  plan.steps = std::clamp(NarrowChunkBytes(task.arrays) / (row_bytes * at_once), 1, most_steps);
  plan.chunk_rows = plan.steps * at_once;
  // A chunk has an equal offset from a line in shared and in global memory. What lies beyond the
  // chunk may be read, but is not used.
  const int bytes = plan.chunk_rows * row_bytes + SureColumns(most) * task.element_bytes;
  plan.slot_bytes = static_cast<int>(RoundUp(kLineBytes - 1 + bytes, kLineBytes));
  plan.warp_bytes = 2 * task.arrays * plan.slot_bytes;
  const std::int64_t chunks = CeilDiv(task.rows, plan.chunk_rows);
  for (plan.warps = kNarrowThreads / 32;; plan.warps /= 2) {
    plan.shared_bytes = plan.warps * (plan.warp_bytes + beside.of_warp) + beside.of_block;
    const bool fits = plan.shared_bytes <= task.shared_bytes - kSparedBytes;
    if (plan.warps == 1 || (fits && plan.warps / 2 < chunks)) return plan;
  }
}

// How a group's chunks are dealt out to `slots` blocks, turn by turn. A block's warps take
// neighbouring chunks.
struct NarrowDeal {
  std::int64_t slots, rounds, extra;  // each warp has `rounds` turns; the first `extra` one more
};

// Deals to about `resident` blocks, and to at most `most` blocks for each group.
inline NarrowDeal DealNarrow(const NarrowPlan& plan, const RowShape& shape, std::int64_t resident,
                             std::int64_t most) {
  const std::int64_t chunks = CeilDiv(shape.rows, plan.chunk_rows);
  NarrowDeal deal{};
  deal.slots = std::min(
      {CeilDiv(chunks, plan.warps), most, std::max<std::int64_t>(1, resident / shape.groups)});
  deal.rounds = chunks / (deal.slots * plan.warps);
  deal.extra = chunks % (deal.slots * plan.warps);
  return deal;
}

}  // namespace gradops
