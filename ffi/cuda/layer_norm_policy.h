// How layer norm's rows are laid out on a GPU: the one table that decides it. Plain C++, no CUDA.
//
// A thread holds 16 elements of a row (8 of float64) in registers, whatever the row's width, and a
// row belongs to the fewest threads that hold it: some lanes of a warp, some warps (a unit), or,
// from sm_90 on, the blocks of a cluster, each with a share of the columns. A row's result depends
// on none but these three, so neither on how many rows there are nor on how they reach the chip:
//
//   bulk    sm_90 and newer: one thread orders whole rows into a ring in shared memory
//   async   sm_80: each thread orders its own 16 bytes at a time into the ring
//   direct  sm_80, rows that start anywhere: loads when they are needed
//
//   features                              threads per row            without clusters
//   (float64: half of it)
//   up to 512                             1 to 32 lanes; unaligned: 32 the same
//   up to 8192                            64 to 512 threads          the same
//   up to 131072                          2 to 16 blocks of those    streamed
//   more                                  streamed: a block per row, which reads it twice
//
// Below 8192 features, too, a row gets a cluster where one block of it would leave two or more of a
// multiprocessor's 16 warps without work (2561 to 3584 and 4097 to 7168 features).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradops {

enum class RowCopy : int { kDirect = 0, kAsync = 1, kBulk = 2 };

// What the choice depends on.
struct RowTask {
  std::int64_t rows, features;
  int element_bytes;  // of x
  int arrays;         // that are read: x, a residual; dy, x, dsum
  bool backward;
  bool aligned;      // all rows start at 16-byte boundaries
  int architecture;  // 10 * major + minor
  int multiprocessors;
  std::int64_t shared_bytes;  // of a multiprocessor
};

// What tests may force; 0: as the table says. A row that does not fit what is forced is streamed.
struct RowOverride {
  int architecture = 0;  // as if the GPU were this one
  int max_cluster = 0;   // blocks that may share a row
  int max_threads = 0;   // of a row in one block
  int max_stages = 0;
  bool stream = false;
};

struct RowPlan {
  bool stream;  // none of what follows holds
  RowCopy copy;
  int width;         // elements of an access: 16 bytes or one
  int lanes;         // threads of a row in one block: a power of two up to 32, or full warps
  int units;         // of a block, each of max(32, lanes) threads with a ring of its own
  int cluster;       // blocks that share a row
  int share;         // columns of each of them
  int stages;        // of a ring
  int array_bytes;   // of a unit's rows of one array in one stage
  int shared_bytes;  // of a block
  int blocks;        // of a multiprocessor

  constexpr int unit_threads() const { return std::max(32, lanes); }
  constexpr int threads() const { return units * unit_threads(); }
  constexpr int unit_rows() const { return lanes < 32 ? 32 / lanes : 1; }  // of a chunk
};

inline constexpr int kMaxRowThreads = 512;  // of a block
inline constexpr int kMaxCluster = 16;
inline constexpr int kMaxStages = 8;
// On their way to a multiprocessor: less leaves it waiting, more makes reads and writes disturb
// each other in the memory (ffi/cuda/TUNING.md).
inline constexpr std::int64_t kBytesUnderWay = 32 * 1024;
inline constexpr int kMaxUnits = kMaxRowThreads / 32;

// Chunks that a unit works on at a time: where elements are small, waiting for one row's sums takes
// longer than its bytes.
constexpr int RowDepth(int element_bytes, int width) {
  return element_bytes == 2 && width > 1 ? 2 : 1;
}

// Elements of a row that one thread holds.
constexpr int RowElements(int element_bytes) {
  return element_bytes == 8 ? 8 : 16;
}

inline RowPlan ChooseRowPlan(const RowTask& task, const RowOverride& forced = {}) {
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto round_up = [&](std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; };
  const int architecture = forced.architecture != 0 ? forced.architecture : task.architecture;
  const bool hopper = architecture >= 90;
  RowPlan plan{};
  plan.width = task.aligned ? 16 / task.element_bytes : 1;
  const int elements = RowElements(task.element_bytes);
  const int depth = RowDepth(task.element_bytes, plan.width);
  // What a block can hold: in registers, and in a ring with one turn's chunks of the most arrays
  // there can be and the next one's. Beside it, CUDA keeps 1 KB, and static memory is less than 3.
  const auto ring_budget = [&](int blocks) { return task.shared_bytes / blocks - 4096; };
  const int max_threads = forced.max_threads != 0 ? forced.max_threads : kMaxRowThreads;
  const std::int64_t held =
      std::min(std::int64_t{max_threads} * elements,
               (ring_budget(1) / (2 * depth * (task.backward ? 3 : 2)) - 32) / task.element_bytes);
  plan.copy = hopper ? RowCopy::kBulk : task.aligned ? RowCopy::kAsync : RowCopy::kDirect;
  const int max_cluster = !hopper ? 1 : forced.max_cluster != 0 ? forced.max_cluster : kMaxCluster;
  const auto share = [&](int cluster) {
    return round_up(ceil_div(std::max<std::int64_t>(1, task.features), cluster), plan.width);
  };
  // The fewest blocks that together leave no more than one of 16 warps of a multiprocessor idle.
  const auto warps_in_use = [&](int cluster) {
    const std::int64_t warps = ceil_div(share(cluster), 32 * elements);
    return share(cluster) > held ? 0 : static_cast<int>(warps * (kMaxUnits / warps));
  };
  // More than 8 blocks only where 8 cannot hold the row: not every GPU can run that many.
  plan.cluster = 1;
  for (int cluster = 2; cluster <= max_cluster; ++cluster) {
    if (warps_in_use(plan.cluster) >= (cluster <= 8 ? kMaxUnits - 1 : 1)) break;
    if (warps_in_use(cluster) > warps_in_use(plan.cluster)) plan.cluster = cluster;
  }
  plan.stream = forced.stream || share(plan.cluster) > held;
  if (plan.stream) return plan;
  plan.share = static_cast<int>(share(plan.cluster));
  const int needed = static_cast<int>(ceil_div(plan.share, elements));
  plan.lanes = task.aligned ? 1 : 32;
  while (plan.lanes < 32 && plan.lanes < needed) plan.lanes *= 2;
  if (needed > 32) plan.lanes = static_cast<int>(round_up(needed, 32));

  // Few rows are spread over all multiprocessors before a block gets several of them. Blocks of
  // clusters are small, so that one can work while another waits for its cluster.
  const std::int64_t chunks = ceil_div(task.rows, plan.unit_rows());
  const int most_units = std::max(1, kMaxRowThreads / plan.unit_threads());
  plan.units = plan.cluster > 1 ? 1
                                : static_cast<int>(std::clamp<std::int64_t>(
                                      ceil_div(chunks, task.multiprocessors), 1, most_units));
  plan.blocks = plan.cluster > 1 ? most_units : 1;

  // Rows that start anywhere are copied from the last 16-byte boundary to the next.
  const std::int64_t row_bytes = std::int64_t{plan.share} * task.element_bytes;
  plan.array_bytes =
      static_cast<int>(round_up(plan.unit_rows() * row_bytes, 16) + (task.aligned ? 0 : 16));
  const auto stage_bytes = [&] {
    return std::int64_t{plan.units} * task.arrays * plan.array_bytes;
  };
  while (plan.units > 1 && 2 * depth * stage_bytes() > ring_budget(1)) --plan.units;
  while (plan.blocks > 1 && 2 * depth * stage_bytes() > ring_budget(plan.blocks)) --plan.blocks;
  // One turn's chunks are worked on, and more are under way. Forward, a turn's chunks are free as
  // soon as they are in registers; backward, they are read twice, and where few units can work
  // while another one waits, more have to be under way.
  std::int64_t wanted =
      depth + ceil_div((plan.cluster > 1 ? 2 : 1) * kBytesUnderWay, stage_bytes() * plan.blocks);
  if (task.backward) {
    wanted = 2 * depth + (plan.units == 1 ? 2 : plan.units == 2 || depth == 1 ? 1 : 0);
  }
  if (forced.max_stages != 0) wanted = forced.max_stages;
  plan.stages = static_cast<int>(std::max<std::int64_t>(
      2 * depth,
      std::min({wanted, ring_budget(plan.blocks) / stage_bytes(), std::int64_t{kMaxStages}})));
  // The ring's memory is also where units add up their column sums.
  const std::int64_t sums_bytes =
      task.backward ? 2 * plan.threads() * elements * (task.element_bytes == 8 ? 8 : 4) : 0;
  plan.shared_bytes = static_cast<int>(std::max(plan.stages * stage_bytes(), sums_bytes));
  return plan;
}

}  // namespace gradops
