// How layer norm's kernels have narrow rows laid out on a GPU that start anywhere: by the chunk of
// neighbouring rows, which a warp copies to shared memory by whole packs of 16 bytes, works on
// there element by element, and writes back by whole packs; the next one is under way meanwhile.
// Both directions. Plain C++, no CUDA.
//
// A row belongs to some lanes of a warp, each with as many neighbouring columns: an odd number, so
// that lanes find their elements in different banks. Where the last lanes would have columns that
// the row lacks, they begin earlier, and own of what they have only what no lane before them has.
// The fewest lanes that can have a row have more than half of the columns that a lane can have, if
// they are two or more: so that code need not ask for these columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/shape.h"
#include "cuda/layer_norm_policy.h"

namespace gradops {

inline constexpr int kNarrowThreads = 256;  // of a block, at most

// What a chunk is filled up to, of each of so many arrays: as much as leaves a multiprocessor room
// for as many blocks as it has registers for.
constexpr int NarrowChunkBytes(int arrays) {
  return arrays == 1 ? 4096 : 6144 / arrays;
}

// Columns of a lane, at most: as many as there are registers for.
constexpr int NarrowColumns(int element_bytes) {
  return element_bytes == 8 ? 7 : 15;
}
// Of these, which all lanes have, or, if rows have one lane, read beyond their row.
constexpr int SureColumns(int columns) {
  return (columns / 2 + 1) | 1;
}

struct NarrowPlan {
  int lanes;         // of a row: a power of two up to 32; 0: rows are none of these
  int log_lanes;     // log2 of it
  int columns;       // of a lane
  int steps;         // rows of a lane in a chunk
  int chunk_rows;    // of a chunk: those of all lanes, at most 32
  int slot_bytes;    // for a chunk of one array
  int warps;         // of a block
  int warp_bytes;    // of shared memory: a warp's slots
  int shared_bytes;  // of a block: those, and what the kernel asks for beside them

  constexpr int threads() const { return 32 * warps; }
};

// What a kernel needs of shared memory beside slots: for each of a block's warps, and once.
// Forward, a residual's bias; backward, column sums, and dx's of each thread.
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

// Of rows that are to be framed (Division::kFramed).
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
  // A chunk lies as far into a line as in memory; beyond it there is what is read, but not used.
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

// How a group's chunks are dealt out to `slots` blocks, turn by turn: a block's warps take
// neighbouring ones.
struct NarrowDeal {
  std::int64_t slots, rounds, extra;  // turns of every warp; the first `extra` have one more
};

// To about as many blocks as are resident, and no more than `most` for a group.
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
