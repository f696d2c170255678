// Plans of layer norm on GPUs: which kernel runs, and how rows are split among threads. README.md
// has a glossary with pictures. A plan is a value: a pure function of a RowTask and of limits that
// tests set. This header is plain C++ without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "common/description.h"
#include "common/integers.h"
#include "cuda/common/cache_line.h"

namespace gradops {

// What a plan depends on.
struct RowTask {
  // Forward: the rows of a group. Backward: all rows.
  std::int64_t rows, features;
  int element_bytes;    // Of x.
  int arrays;           // Arrays that are read: x and a residual, or dy, x and dsum.
  bool aligned;         // All arrays start at 16-byte boundaries.
  bool aligned_params;  // Scale and bias start there too.
  int architecture;     // 10 * major + minor.
  int multiprocessors;
  std::int64_t shared_bytes;  // Of a multiprocessor.
  bool centered = true;       // Layer norm.

  // Forward.
  bool residual_bias = false;

  // Backward.
  std::int64_t groups = 1;
  bool sums = true;            // dscale, dbias or dresidual_bias is wanted.
  bool sums_dx = false;        // dresidual_bias is wanted.
  bool reads_mean = true;      // Layer norm from its input.
  bool knows_epsilon = false;  // Without epsilon, no row counts as well conditioned.
};

// What tests limit. A value of 0 is no limit. Rows that do not fit the limits are streamed.
struct RowPlanLimits {
  int architecture = 0;  // The plan is for this architecture.
  int max_cluster = 0;   // The most blocks that may share a row.
  int max_threads = 0;   // The most threads of a row in one block.
  int max_stages = 0;    // 1 or 2, if there is room.
  bool stream = false;   // Rows are streamed.
  int vectors = 0;       // Backward: the vectors of a row that a thread has.

  bool operator==(const RowPlanLimits&) const = default;
};

enum class RowKernel : int {
  kStream,    // A block reads a row twice from global memory.
  kOneRow,    // Forward: a block loads one row (or a few) and ends.
  kShort,     // Forward: a block loads many aligned rows of 1, 2, 4, .. 32 vectors, and ends.
  kManyRows,  // Blocks loop over rows. The next rows are copied to shared memory in advance.
  kNarrow,    // Warps loop over tiles of narrow rows in shared memory.
};
static_assert(RowKernel{} == RowKernel::kStream);  // a plan that says nothing else

// How rows are split into threads' vectors (Place in place.cuh).
enum class Layout : int {
  kFull,     // All threads have an equal number of vectors.
  kPartial,  // Some threads lack their last vector.
  kMasked,   // Rows or parameters are unaligned. Forward: also if blocks share rows.
};

// Who adds up dscale, dbias and dresidual_bias.
enum class SumsBy : int {
  kNobody,    // They are not wanted.
  kDxKernel,  // The kernel for dx keeps them in registers.
  kAfterDx,   // Stream: a kernel reads dy and x again after the kernel for dx.
  kBesideDx,  // Few rows: this kernel runs beside the kernel for dx.
};

inline constexpr int kVectorBytes = 16;
inline constexpr int kMaxCluster = 16;
inline constexpr int kSparedBytes = 4 * 1024;  // Shared memory that blocks do not get.

// --- Narrow rows ---------------------------------------------------------------------------------

inline constexpr int kNarrowThreads = 256;  // The most threads of a block.

// How many bytes of each array a tile may have. This leaves a multiprocessor room for all the
// blocks that its registers allow.
constexpr int TileBytes(int arrays) {
  return arrays == 1 ? 4096 : 6144 / arrays;
}

// The most columns of a thread, limited by registers.
constexpr int NarrowColumns(int element_bytes) {
  return element_bytes == 8 ? 7 : 15;
}
// The first columns, which each thread has. The only thread of a row may read beyond the row.
constexpr int SureColumns(int columns) {
  return (columns / 2 + 1) | 1;
}

// A warp copies a tile of neighbouring rows to shared memory by vectors. It works there element by
// element, and writes the tile back by vectors. Meanwhile the next tile is in flight.
//
// A row belongs to some threads of a warp. Each thread has an equal, odd number of neighbouring
// columns. The number is odd so that threads find their elements in different banks. The last
// threads would have columns beyond the row. They begin earlier, and own only columns that no
// thread before them has. A row has the fewest threads that can hold it. If it has two or more
// threads, each has more than half of the columns that a thread can have. So code need not check
// for these columns.
struct NarrowPlan {
  int row_threads;   // Threads of a row: a power of two up to 32.
  int columns;       // Columns of a thread.
  int tile_steps;    // Rows of a thread in a tile.
  int tile_rows;     // Rows of a tile, at most 32.
  int tile_bytes;    // Shared memory for a tile of one array.
  int warps;         // Warps of a block.
  int warp_bytes;    // Shared memory for the tiles of a warp.
  int shared_bytes;  // Shared memory of a block.

  constexpr int threads() const { return kWarpThreads * warps; }
};

// How the tiles of a group are split among blocks. A block's warps take neighbouring tiles.
struct TileSchedule {
  std::int64_t blocks_per_group;
  std::int64_t iterations,
      extra;  // Each warp has `iterations` tiles. The first `extra` have one more.
};

// --- Wider rows ----------------------------------------------------------------------------------

// How a row is split among threads. README.md has tables.
struct RowSplit {
  RowKernel kernel;  // Stream and narrow: the other members mean nothing.
  Layout layout;
  int vectors;        // Vectors of a row that a thread has.
  int row_threads;    // Threads of a row in one block: a power of two up to 32, or whole warps.
  int cluster;        // Blocks that share a row.
  int block_columns;  // Columns of each block.
  int period;         // Rows this far apart have an equal misalignment. Forward, not masked: 0.
  int stages;         // Rows that a thread has in flight. Forward, one row or short rows: 0.
  int shared_bytes;   // Shared memory of a block.
};

// What runs. The split is a ForwardSplit or a BackwardSplit.
template <typename Split>
struct RowPlan {
  bool reads_vectors;  // Kernels that stream, or that only add up column sums, read by vectors.
  SumsBy sums = SumsBy::kNobody;  // Backward.
  Split split{};
  NarrowPlan narrow{};

  constexpr RowKernel kernel() const { return split.kernel; }  // Backward: for dx.
};

// --- Forward -------------------------------------------------------------------------------------

// One row: a block has one row, or a few. The hardware starts the next block when a block ends,
// which keeps all multiprocessors busy to the end. Many rows: parameters cost more than rows if
// rows are unaligned or shared by blocks, so a block loads them once for many rows. Short rows: a
// thread has one vector of each of up to four rows, and loads its columns of the parameters once.
struct ForwardSplit : RowSplit {
  bool full;            // All row_threads have exactly `vectors` vectors of their own.
  int rows_per_block;   // Rows of a block; of a block that loops over rows, at a time.
  int thread_rows = 1;  // Short rows: rows of a thread.
  // Many rows: `period` is a power of two, at least rows_per_block.
  int stage_bytes, warp_bytes;  // Shared memory for one stage of a warp; for a warp.

  constexpr int threads() const { return rows_per_block / thread_rows * row_threads; }
  // How many blocks have the rows of a period.
  constexpr int period_blocks() const { return period / rows_per_block; }
};
using ForwardPlan = RowPlan<ForwardSplit>;

// How rows are split among the blocks of the kernel for many rows.
struct ForwardSchedule {
  int iterations;            // The most rows of a thread.
  std::int64_t row_stride;   // Rows from one of a thread's rows to the next.
  std::int64_t byte_stride;  // row_stride in bytes.
  std::int64_t bytes_ahead;  // Bytes from a row to the row that is copied in its place.
};

inline constexpr int kForwardThreads = 1024;  // The most threads of a block.
inline constexpr int kFewThreads = 512;       // The most, if its threads have few vectors.
inline constexpr int kShortThreads = 128;     // Threads of a block of short rows.
inline constexpr int kShortRows = 4;          // The most rows of such a thread.

// Many rows: threads that a multiprocessor has registers for; the most of a block; vectors of a
// thread.
constexpr int ThreadsPerMultiprocessor(int element_bytes) {
  return element_bytes == 2 ? 512 : element_bytes == 4 ? 768 : 640;
}
inline constexpr int kManyRowsThreads = 512;
inline constexpr int kManyRowsVectors = 4;

// --- Backward ------------------------------------------------------------------------------------

// The grid is small: a few blocks per multiprocessor loop over all rows. Each thread keeps its
// column sums in registers for the whole loop. Sums of dx are in shared memory. A team takes row
// after row. Each thread copies its part of the next rows to its own part of a ring in shared
// memory. When it has read a part, it starts the copy of a later row into that part. So a
// multiprocessor has enough bytes in flight all the time. A thread waits for other threads only in
// a row's sums, and for its warp if rows are masked.
//
// A cluster also shares a row that one block could hold, if that block left more than an eighth of
// the threads of a multiprocessor idle. With 48 bytes, a tenth is enough if rows are not masked.
// The blocks of such a cluster have at least three warps.
struct BackwardSplit : RowSplit {
  int teams;         // Teams of a block. Each has max(32, row_threads) threads.
  int ring_bytes;    // A block's ring. It comes first in shared memory, then column sums.
  int dx_sum_bytes;  // A block's sums of dx, last in shared memory. 0: there are none.

  constexpr int team_threads() const {
    return row_threads < kWarpThreads ? kWarpThreads : row_threads;
  }
  constexpr int threads() const { return teams * team_threads(); }
  // Rows of a team in an iteration.
  constexpr int team_rows() const { return team_threads() / row_threads; }
};
using BackwardPlan = RowPlan<BackwardSplit>;

// How a group's rows are split among clusters (of one block, too). Each team makes `sweeps` loops
// over rows of one misalignment. The host does the divisions: on a device they compile to calls,
// which cost spills.
struct BackwardSchedule {
  std::int64_t clusters_per_group;
  int sweeps;
  int iterations, extra;  // Each team has `iterations` iterations in a sweep. In sweep s, the
                          // group's first extra - s * teams teams have one more.
};

// Whether all blocks end at about the same time. Each has a number of iterations, and `extra` of
// them have one more. If not, the next kernel must not start early: it would crowd on the
// multiprocessors that are done first. [199, 8192] then takes 17.6 us, not 16.4.
constexpr bool EndTogether(std::int64_t iterations, std::int64_t extra) {
  return iterations == 0 || extra == 0 || iterations > 8;
}

// The most threads of a block if each has `row_bytes` bytes of a row.
constexpr int BackwardThreads(int row_bytes) {
  return row_bytes == 48 ? 384 : 512;
}
inline constexpr int kMaxStages = 2;

// Vectors of a row that one thread holds: few, or more. The code for masked rows takes more
// registers, so their larger number is kMaskedVectors.
inline constexpr int kFewVectors = 2;
constexpr int MoreVectors(int element_bytes) {
  return element_bytes == 2 ? 3 : 4;
}
inline constexpr int kMaskedVectors = 3;

// Bytes of a ring for one vector of a thread: 16, and a thread's part of a line. The extra line
// lets a warp's vectors start at any offset of a line.
inline constexpr int kRingVectorBytes = kVectorBytes + kLineBytes / kWarpThreads;

// The kernel for column sums. A block has 8 threads along columns and 32 along rows. Beside the
// kernel for dx, it takes up to kFewRows rows and kFewBytes bytes of dy. If no row is well
// conditioned, each block reads all of x: up to kFewReads bytes in all.
inline constexpr int kColumnThreads = 8, kRowThreads = 32;
inline constexpr int kFewRows = kColumnThreads * kRowThreads;
inline constexpr std::int64_t kFewBytes = std::int64_t{4} << 20;
inline constexpr std::int64_t kFewReads = std::int64_t{128} << 20;

// --- Choices -------------------------------------------------------------------------------------

namespace row_plan {

constexpr int AccumBytes(const RowTask& task) {
  return task.element_bytes == 8 ? 8 : 4;
}
constexpr int VectorColumns(const RowTask& task) {
  return kVectorBytes / task.element_bytes;
}
constexpr bool ReadsVectors(const RowTask& task) {
  return task.aligned && task.aligned_params && task.features % VectorColumns(task) == 0;
}

// Rows this far apart start at an equal offset from a 16-byte boundary.
inline int AlignmentPeriod(const RowTask& task) {
  return static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
}

// How rows are split if a block has `block_columns` columns and a thread `vectors` vectors.
constexpr Layout LayoutOf(const RowTask& task, int vectors, std::int64_t block_columns) {
  const std::int64_t bytes = task.features * task.element_bytes, row = bytes / kVectorBytes;
  if (!task.aligned_params || bytes == 0 || bytes % kVectorBytes != 0 ||
      (vectors - 1) * CeilDiv(row, vectors) > row) {
    return Layout::kMasked;
  }
  const std::int64_t of_block = block_columns * task.element_bytes / kVectorBytes;
  return of_block % vectors == 0 && row % vectors == 0 ? Layout::kFull : Layout::kPartial;
}
constexpr bool Masked(const RowTask& task, int vectors) {
  return LayoutOf(task, vectors, 0) == Layout::kMasked;
}

// The columns of each block of a cluster. Masked: also those before the row, at its widest.
constexpr std::int64_t BlockColumns(const RowTask& task, int cluster, bool masked) {
  const int width = VectorColumns(task);
  const std::int64_t columns = std::max<std::int64_t>(1, task.features) + (masked ? width - 1 : 0);
  return RoundUp(CeilDiv(columns, cluster), width);
}

constexpr int MaxCluster(const RowTask& task, const RowPlanLimits& limits) {
  const int architecture = limits.architecture != 0 ? limits.architecture : task.architecture;
  return architecture < 90 ? 1 : limits.max_cluster != 0 ? limits.max_cluster : kMaxCluster;
}

// Threads for `parts` parts of a row: a power of two up to a warp, or whole warps.
constexpr int ThreadsFor(std::int64_t parts) {
  int threads = 1;
  while (threads < kWarpThreads && threads < parts) threads *= 2;
  return parts > kWarpThreads ? static_cast<int>(RoundUp(parts, kWarpThreads)) : threads;
}

// Narrow rows, if task.features is small enough. A kernel needs shared memory beside tiles: per
// warp, and per block.
inline std::optional<NarrowPlan> ChooseNarrow(const RowTask& task, int warp_extra,
                                              int block_extra) {
  NarrowPlan plan{};
  const int most = NarrowColumns(task.element_bytes);
  if (task.features < 1 || task.features > kWarpThreads * most) return std::nullopt;
  const auto features = static_cast<int>(task.features);
  plan.row_threads = 1;
  while (plan.row_threads * most < features) plan.row_threads *= 2;
  plan.columns = std::min(features, static_cast<int>(CeilDiv(features, plan.row_threads)) | 1);
  const int row_bytes = features * task.element_bytes, at_once = kWarpThreads / plan.row_threads;
  // Few rows are spread over all multiprocessors' warps.
  constexpr int kMaxWarps = kNarrowThreads / kWarpThreads;
  const std::int64_t spread = task.rows / (at_once * task.multiprocessors * kMaxWarps);
  const int most_steps = static_cast<int>(std::clamp<std::int64_t>(spread, 1, plan.row_threads));
  plan.tile_steps = std::clamp(TileBytes(task.arrays) / (row_bytes * at_once), 1, most_steps);
  plan.tile_rows = plan.tile_steps * at_once;
  // A tile has an equal offset from a line in shared and in global memory. The bytes beyond the
  // tile may be read, but are not used.
  const int bytes = plan.tile_rows * row_bytes + SureColumns(most) * task.element_bytes;
  plan.tile_bytes = static_cast<int>(RoundUp(kLineBytes - 1 + bytes, kLineBytes));
  plan.warp_bytes = 2 * task.arrays * plan.tile_bytes;
  const std::int64_t tiles = CeilDiv(task.rows, plan.tile_rows);
  for (plan.warps = kMaxWarps;; plan.warps /= 2) {
    plan.shared_bytes = plan.warps * (plan.warp_bytes + warp_extra) + block_extra;
    const bool fits = plan.shared_bytes <= task.shared_bytes - kSparedBytes;
    if (plan.warps == 1 || (fits && plan.warps / 2 < tiles)) return plan;
  }
}

// Forward: a row in one block of up to `max_threads` threads with `vectors` vectors each.
inline std::optional<ForwardSplit> SplitInBlock(const RowTask& task, int vectors, int max_threads) {
  const std::int64_t all = task.features / VectorColumns(task), owners = CeilDiv(all, vectors);
  // Threads lack at most their last vectors.
  if (owners > max_threads || (vectors - 1) * owners > all) return std::nullopt;
  ForwardSplit split{};
  split.layout = all % vectors == 0 ? Layout::kFull : Layout::kPartial;
  split.vectors = vectors;
  split.cluster = 1;
  split.block_columns = static_cast<int>(task.features);
  split.row_threads = ThreadsFor(owners);
  split.full = all == std::int64_t{split.row_threads} * vectors;
  return split;
}

// Forward, with the number of vectors that runs fastest.
inline std::optional<ForwardSplit> SplitInBlock(const RowTask& task, int max_threads) {
  const int few_threads = std::min(max_threads, kFewThreads);
  const std::int64_t all = task.features / VectorColumns(task);
  // Three vectors, if each thread then has exactly three and four would leave a tenth of them idle.
  const int thirds = ThreadsFor(all / 3), quarters = ThreadsFor(CeilDiv(all, 4));
  if (all % 3 == 0 && 3 * thirds == all && 10 * all < 36 * quarters &&
      (thirds <= 128 || thirds == 256)) {
    if (const auto split = SplitInBlock(task, 3, few_threads)) return split;
  }
  // Wide rows of 16-bit elements have four vectors only if a multiprocessor then runs all the
  // threads that its registers allow.
  const bool half = task.element_bytes == 2;
  const int threads = ThreadsFor(CeilDiv(task.features, VectorColumns(task) * 4));
  if (!half || threads <= 128 || threads == 256) {
    if (const auto split = SplitInBlock(task, 4, few_threads)) return split;
  }
  return SplitInBlock(task, 8, half ? few_threads : max_threads);
}

// Forward, many rows. Shared memory of a warp: for a row in flight, of `arrays` arrays; and for one
// parameter at a time on its way to registers.
constexpr int StageBytes(int arrays) {
  return arrays * kManyRowsVectors * kWarpThreads * kVectorBytes + kLineBytes;
}
constexpr int ParameterBytes(const RowTask& task) {
  return kWarpThreads * kManyRowsVectors * VectorColumns(task) * AccumBytes(task);
}

// Forward, for blocks that take rows one after the other. Takes the number of blocks that costs
// least. Costs are: warps that a row does not need, too few warps on a multiprocessor, and blocks
// that wait for each other.
inline std::optional<ForwardSplit> SplitMasked(const RowTask& task, const RowPlanLimits& limits,
                                               int max_threads, int least_blocks) {
  constexpr int kEnoughWarps = 16;
  const int width = VectorColumns(task);
  const auto with_residual =
      static_cast<int>((task.shared_bytes - kSparedBytes) / (StageBytes(2) + ParameterBytes(task)));
  const int threads = std::min({max_threads, kManyRowsThreads, kWarpThreads * with_residual});
  const int room = ThreadsPerMultiprocessor(task.element_bytes) / kWarpThreads;
  const bool anywhere = task.features % width != 0;
  double least_cost = 0;
  std::optional<ForwardSplit> best;
  for (int cluster = least_blocks; cluster <= MaxCluster(task, limits); ++cluster) {
    std::int64_t columns = BlockColumns(task, cluster, anywhere);
    if (cluster > 1) columns = RoundUp(columns, kWarpThreads * kManyRowsVectors * width);
    if (columns > std::int64_t{width} * kManyRowsVectors * threads) continue;
    const auto blocks = static_cast<int>(CeilDiv(BlockColumns(task, 1, anywhere), columns));
    const int row_threads =
        std::max(kWarpThreads, ThreadsFor(CeilDiv(columns, width * kManyRowsVectors)));
    const int warps = static_cast<int>(CeilDiv(row_threads, kWarpThreads));
    const double idle = std::max(1.0, double{kEnoughWarps} / (room / warps * warps));
    const double cost = (blocks == 1 ? 1.05 : 1.25 + 0.05 * blocks) * idle * blocks * warps;
    if (best && cost >= least_cost) continue;
    least_cost = cost;
    best = ForwardSplit{};
    best->layout = Layout::kMasked;
    best->vectors = kManyRowsVectors;
    best->row_threads = row_threads;
    best->cluster = blocks;
    best->block_columns = static_cast<int>(columns);
  }
  return best;
}

// Adds the shared memory and the period of the kernel for many rows.
inline ForwardSplit WithStages(const RowTask& task, const RowPlanLimits& limits,
                               ForwardSplit split) {
  split.period = std::max(split.rows_per_block, AlignmentPeriod(task));
  // With these stages a multiprocessor has about 32 KB in flight.
  const bool rereads = task.centered && task.element_bytes == 2;
  split.stages = limits.max_stages != 0 ? limits.max_stages : rereads || split.cluster > 1 ? 2 : 1;
  split.stage_bytes = StageBytes(task.arrays);
  const int warps = split.threads() / kWarpThreads, param_bytes = ParameterBytes(task);
  if (warps * (2 * split.stage_bytes + param_bytes) > task.shared_bytes - kSparedBytes) {
    split.stages = 1;
  }
  split.warp_bytes = split.stages * split.stage_bytes + param_bytes;
  split.shared_bytes = warps * split.warp_bytes;
  return split;
}

// Forward, short rows: each thread has one vector of a row. Few rows are spread over all
// multiprocessors first.
inline ForwardSplit SplitShort(const RowTask& task) {
  constexpr int kEnoughThreads = 1024;  // of a multiprocessor
  const std::int64_t vectors = task.features / VectorColumns(task);
  ForwardSplit split{};
  split.layout = Layout::kFull;
  split.vectors = 1;
  split.cluster = 1;
  split.block_columns = static_cast<int>(task.features);
  split.row_threads = ThreadsFor(vectors);
  split.full = true;
  const std::int64_t least = std::int64_t{kEnoughThreads} * task.multiprocessors;
  split.thread_rows = static_cast<int>(
      std::clamp<std::int64_t>(task.rows * split.row_threads / least, 1, kShortRows));
  split.rows_per_block = kShortThreads / split.row_threads * split.thread_rows;
  return split;
}

inline std::optional<ForwardSplit> SplitForward(const RowTask& task, const RowPlanLimits& limits) {
  if (limits.stream || !task.aligned) return std::nullopt;
  const int max_threads = limits.max_threads != 0
                              ? std::clamp(limits.max_threads, kWarpThreads, kForwardThreads)
                              : kForwardThreads;
  const int width = VectorColumns(task);
  const bool whole_vectors = task.aligned_params && task.features > 0 && task.features % width == 0;
  // Wide layer norm rows: with a block per row, each block would load all parameters again.
  const bool wide = task.centered && task.element_bytes <= 4 &&
                    task.features * task.element_bytes > (task.element_bytes == 2 ? 40 : 80) * 1024;
  // Other numbers of vectors would leave some of a row's threads idle.
  const std::int64_t vectors = whole_vectors ? task.features / width : 0;
  const bool is_short = vectors > 0 && vectors <= kWarpThreads && (vectors & (vectors - 1)) == 0;
  // Rows of 5 vectors can only be split as masked rows.
  const int least_blocks = vectors > 5 ? 2 : 1;
  std::optional<ForwardSplit> split;
  if (is_short) split = SplitShort(task);
  if (wide) split = SplitMasked(task, limits, max_threads, 2);
  if (!split && whole_vectors) split = SplitInBlock(task, max_threads);
  if (!split) split = SplitMasked(task, limits, max_threads, least_blocks);
  if (!split) return split;
  if (!is_short) {
    split->rows_per_block =
        split->row_threads > kWarpThreads || split->cluster > 1 ? 1 : 64 / split->row_threads;
  }
  return split->layout == Layout::kMasked ? WithStages(task, limits, *split) : *split;
}

// Dynamic shared memory of a block if `blocks` of them share a multiprocessor. kSparedBytes covers
// 1 KB that CUDA keeps, and static shared memory of less than 3 KB.
constexpr std::int64_t SharedBudget(const RowTask& task, int blocks) {
  return task.shared_bytes / blocks - kSparedBytes;
}

// For `threads` threads: a sum for each of their elements; their ring.
constexpr int SumBytes(const RowTask& task, int vectors, int threads) {
  return threads * vectors * VectorColumns(task) * AccumBytes(task);
}
constexpr int RingBytes(const RowTask& task, int vectors, int threads, int stages) {
  return stages * task.arrays * vectors * kRingVectorBytes * threads;
}

// Gives a block teams and stages, and computes its shared memory. Several teams add up their column
// sums two arrays at a time.
inline BackwardSplit WithTeams(const RowTask& task, int teams, int stages, BackwardSplit split) {
  split.teams = teams;
  split.stages = stages;
  const int threads = split.threads(), sums = SumBytes(task, split.vectors, threads);
  split.ring_bytes = RingBytes(task, split.vectors, threads, stages);
  split.dx_sum_bytes = task.sums_dx ? sums : 0;
  split.shared_bytes = split.ring_bytes + (teams > 1 ? 2 * sums : 0) + split.dx_sum_bytes;
  return split;
}

// How many teams a multiprocessor can run. They are in one block. In a cluster, each is a block.
inline int TeamsThatFit(const RowTask& task, const BackwardSplit& split) {
  const bool one = split.cluster > 1;
  int teams = BackwardThreads(kVectorBytes * split.vectors) / split.team_threads();
  while (teams > 0 && WithTeams(task, one ? 1 : teams, 1, split).shared_bytes >
                          SharedBudget(task, one ? teams : 1)) {
    --teams;
  }
  return teams;
}

// The fraction of a multiprocessor's threads that then has work.
inline double PartAtWork(const RowTask& task, const BackwardSplit& split) {
  const int bytes = split.team_rows() * split.block_columns * task.element_bytes;
  const int of_thread = kVectorBytes * split.vectors;
  return static_cast<double>(TeamsThatFit(task, split) * bytes) /
         (BackwardThreads(of_thread) * of_thread);
}

// The fraction of a GPC's 16 multiprocessors that clusters of `cluster` blocks can use. It counts
// as 1 for more than 8 blocks, however many multiprocessors are left.
constexpr double PartOfGpc(int cluster) {
  return cluster > 8 ? 1.0 : static_cast<double>(16 / cluster * cluster) / 16;
}

// Splits rows among threads of `vectors` vectors. None if no cluster can hold a row.
inline std::optional<BackwardSplit> SplitRows(const RowTask& task, const RowPlanLimits& limits,
                                              int vectors) {
  const int elements = vectors * VectorColumns(task);
  const bool masked = Masked(task, vectors);
  // What a block can hold in registers and in shared memory.
  const std::int64_t bytes =
      RingBytes(task, vectors, 1, 1) + (task.sums_dx ? SumBytes(task, vectors, 1) : 0);
  const int max_threads = BackwardThreads(kVectorBytes * vectors);
  const int max_warps = max_threads / kWarpThreads;
  const int limit = limits.max_threads != 0
                        ? std::min(max_threads, std::max(kWarpThreads, limits.max_threads))
                        : max_threads;
  const std::int64_t warps_of_memory = SharedBudget(task, 1) / bytes / kWarpThreads;
  const std::int64_t held =
      std::min<std::int64_t>(limit, warps_of_memory * kWarpThreads) * elements;
  // Blocks have whole lines: otherwise two blocks read the sectors between them. The exception is a
  // last block that would get less than half of these columns.
  const auto columns_of = [&](int cluster) {
    const std::int64_t least = BlockColumns(task, cluster, masked);
    const std::int64_t lines = RoundUp(least, kLineBytes / task.element_bytes);
    const std::int64_t rest = task.features - (cluster - 1) * lines;
    return !masked && cluster > 1 && 2 * rest >= lines ? lines : least;
  };
  // The loop below takes the fewest blocks that give enough of a multiprocessor's threads work.
  // Blocks of less than three warps are slow, so they are taken only if no others fit.
  const auto at_work = [&](int cluster) {
    const std::int64_t columns = columns_of(cluster), parts = CeilDiv(columns, elements);
    const std::int64_t warps = CeilDiv(parts, kWarpThreads);
    if (columns > held) return 0.0;
    if (cluster > 1 && warps < 3) return 0.01;
    return static_cast<double>(parts * (max_warps / warps)) / (kWarpThreads * max_warps);
  };
  const double enough = vectors == 3 && !masked ? 0.9 : 0.875;
  // More than 8 blocks only if 8 cannot hold the row: not every GPU can run such clusters.
  int best = 1;
  for (int cluster = 2; cluster <= MaxCluster(task, limits); ++cluster) {
    if (at_work(best) >= (cluster <= 8 ? enough : 0.01)) break;
    if (at_work(cluster) > at_work(best)) best = cluster;
  }
  const std::int64_t columns = columns_of(best);
  if (columns > held) return std::nullopt;
  BackwardSplit split{};
  split.vectors = vectors;
  split.cluster = best;
  split.block_columns = static_cast<int>(columns);
  split.layout = LayoutOf(task, vectors, columns);
  split.row_threads = std::max(masked ? kWarpThreads : 1, ThreadsFor(CeilDiv(columns, elements)));
  split.period = AlignmentPeriod(task);
  return split;
}

// Also chooses how many vectors a thread has.
inline std::optional<BackwardSplit> ChooseVectors(const RowTask& task,
                                                  const RowPlanLimits& limits) {
  if (Masked(task, kFewVectors)) {
    // A limit of neither number is no limit here.
    const auto split = [&](int vectors, int other) {
      return limits.vectors == other ? std::nullopt : SplitRows(task, limits, vectors);
    };
    const auto few = split(kFewVectors, kMaskedVectors), more = split(kMaskedVectors, kFewVectors);
    const auto at_work = [&](const std::optional<BackwardSplit>& s) {
      return s ? PartAtWork(task, *s) * PartOfGpc(s->cluster) : 0.0;
    };
    return 0.95 * at_work(few) > at_work(more) ? few : more;
  }
  const auto split = [&](int vectors) {
    const bool can = (limits.vectors == 0 || limits.vectors == vectors) && !Masked(task, vectors);
    return can ? SplitRows(task, limits, vectors) : std::nullopt;
  };
  const auto few = split(kFewVectors), more = split(MoreVectors(task.element_bytes));
  if (!few || !more) return few ? few : more;
  const double with_few = PartAtWork(task, *few);
  // More vectors take fewer instructions per element, but registers do not suffice for wider
  // elements. So float32 takes more vectors only if few vectors need large clusters or leave
  // threads idle. Float64: only if few vectors need over 8 blocks or leave multiprocessors idle.
  const bool few_is_better = task.element_bytes == 2 ? 1.05 * PartAtWork(task, *more) < with_few
                             : task.element_bytes == 8
                                 ? few->cluster <= 8 && PartOfGpc(few->cluster) > 0.8
                                 : few->cluster <= 2 || (few->cluster <= 4 && with_few >= 0.9);
  return few_is_better ? few : more;
}

// Few rows are spread over all multiprocessors before a block gets several teams. The number of
// stages follows from the bytes that a multiprocessor then has in flight. If these are more than
// needed, some multiprocessors starve others. More are needed if few teams wait long for a row's
// sums and no third array is in flight. This holds for clusters. It also holds for 16-bit elements
// if a team is alone or rows are masked. 16-bit rows of several warps need a few more bytes.
inline BackwardSplit SpreadRows(const RowTask& task, const RowPlanLimits& limits,
                                const BackwardSplit& split) {
  const std::int64_t iterations = CeilDiv(task.rows, split.team_rows());
  const int fit = std::max(1, TeamsThatFit(task, split));
  const int most = split.cluster > 1 ? 1 : fit, blocks = split.cluster > 1 ? fit : 1;
  const int teams = static_cast<int>(
      std::clamp<std::int64_t>(CeilDiv(iterations, task.multiprocessors), 1, most));
  const bool half = task.element_bytes == 2;
  const bool waits = task.arrays == 2 && (split.cluster > 1 ||
                                          (half && (most == 1 || split.layout == Layout::kMasked)));
  const int needed = waits ? 36 : half && split.row_threads > kWarpThreads ? 31 : 28;
  const int of_thread = task.arrays * kVectorBytes * split.vectors;
  const double in_flight =
      PartAtWork(task, split) * BackwardThreads(kVectorBytes * split.vectors) * of_thread;
  int stages = in_flight < needed * 1024 ? 2 : 1;
  if (limits.max_stages != 0) stages = std::min(limits.max_stages, kMaxStages);
  for (; stages > 1; --stages) {
    const BackwardSplit spread = WithTeams(task, teams, stages, split);
    if (spread.shared_bytes <= SharedBudget(task, blocks)) return spread;
  }
  return WithTeams(task, teams, 1, split);
}

// Whether it is faster to add up column sums beside the kernel for dx. dy and x, read twice, must
// fit the L2 cache.
inline bool AddsFewRows(const RowTask& task) {
  const std::int64_t bytes = task.rows * task.features * task.element_bytes;
  const int width = ReadsVectors(task) ? VectorColumns(task) : 1;
  const std::int64_t reads = bytes * CeilDiv(task.features, kColumnThreads * width);
  return task.groups == 1 && task.rows > 1 && task.rows <= kFewRows && bytes <= kFewBytes &&
         !task.sums_dx && (!task.reads_mean || (task.knows_epsilon && reads <= kFewReads));
}

// The plan for narrow rows in place of a masked split's.
template <typename Split>
void TryNarrow(const RowTask& task, int warp_extra, int block_extra, RowPlan<Split>& plan) {
  if (plan.split.layout != Layout::kMasked) return;
  if (const auto narrow = ChooseNarrow(task, warp_extra, block_extra)) {
    plan.narrow = *narrow, plan.split.kernel = RowKernel::kNarrow;
  }
}

}  // namespace row_plan

inline ForwardPlan ChooseForwardPlan(const RowTask& task, const RowPlanLimits& limits = {}) {
  using namespace row_plan;
  ForwardPlan plan{.reads_vectors = ReadsVectors(task)};
  if (const auto split = SplitForward(task, limits)) {
    plan.split = *split;
    plan.split.kernel = split->layout == Layout::kMasked ? RowKernel::kManyRows
                        : split->vectors == 1            ? RowKernel::kShort
                                                         : RowKernel::kOneRow;
    const int bias = static_cast<int>(task.features) * AccumBytes(task);
    TryNarrow(task, 0, task.residual_bias ? bias : 0, plan);
  }
  return plan;
}

inline BackwardPlan ChooseBackwardPlan(const RowTask& task, const RowPlanLimits& limits = {}) {
  using namespace row_plan;
  BackwardPlan plan{.reads_vectors = ReadsVectors(task),
                    .sums = task.sums ? SumsBy::kAfterDx : SumsBy::kNobody};
  if (limits.stream || !task.aligned) return plan;
  const auto split = ChooseVectors(task, limits);
  if (!split) return plan;
  plan.split = SpreadRows(task, limits, *split);
  plan.split.kernel = RowKernel::kManyRows;
  // A limit is for the kernel of dx, so that kernel adds up the sums.
  if (task.sums) {
    const bool few = limits == RowPlanLimits{} && AddsFewRows(task);
    plan.sums = few ? SumsBy::kBesideDx : SumsBy::kDxKernel;
  }
  // Column sums of each warp, and each thread's sums of dx.
  const int columns = static_cast<int>(task.features) +
                      (task.sums_dx ? kWarpThreads * NarrowColumns(task.element_bytes) : 0);
  TryNarrow(task, columns * AccumBytes(task), 0, plan);
  return plan;
}

// --- Schedules: what each block has --------------------------------------------------------------

// Splits a group's rows among about `clusters` clusters.
inline ForwardSchedule ScheduleForward(const ForwardSplit& split, std::int64_t rows,
                                       std::int64_t row_bytes, std::int64_t clusters) {
  constexpr std::int64_t kMaxIterations = 1 << 20;
  const std::int64_t at_once =
      std::max<std::int64_t>(1, clusters / split.period_blocks()) * split.period;
  const std::int64_t most = std::min(CeilDiv(rows, at_once), kMaxIterations);
  ForwardSchedule schedule{};
  schedule.row_stride = RoundUp(CeilDiv(rows, most), split.period);
  schedule.iterations = static_cast<int>(CeilDiv(rows, schedule.row_stride));
  schedule.byte_stride = schedule.row_stride * row_bytes;
  schedule.bytes_ahead = split.stages * schedule.byte_stride;
  return schedule;
}
// How many clusters have rows.
constexpr std::int64_t ClustersOf(const ForwardSplit& split, const ForwardSchedule& schedule) {
  return schedule.row_stride / split.period * split.period_blocks();
}

// Splits a group's rows among `clusters_per_group` clusters.
inline BackwardSchedule ScheduleBackward(const BackwardSplit& split, std::int64_t rows,
                                         std::int64_t clusters_per_group) {
  const std::int64_t iterations = CeilDiv(rows, split.team_rows());
  const std::int64_t teams = clusters_per_group * split.teams, period = split.period;
  const std::int64_t sweeps = period / std::gcd(period, teams);
  return {.clusters_per_group = clusters_per_group,
          .sweeps = static_cast<int>(sweeps),
          .iterations = static_cast<int>(iterations / (teams * sweeps)),
          .extra = static_cast<int>(iterations % (teams * sweeps))};
}

// Splits tiles among about `resident` blocks, and at most `most` blocks for each group.
inline TileSchedule ScheduleTiles(const NarrowPlan& plan, std::int64_t groups, std::int64_t rows,
                                  std::int64_t resident, std::int64_t most) {
  const std::int64_t tiles = CeilDiv(rows, plan.tile_rows);
  const std::int64_t blocks =
      std::min({CeilDiv(tiles, plan.warps), most, std::max<std::int64_t>(1, resident / groups)});
  return {.blocks_per_group = blocks,
          .iterations = tiles / (blocks * plan.warps),
          .extra = tiles % (blocks * plan.warps)};
}

// --- Descriptions --------------------------------------------------------------------------------

// The numbers of a plan. kernels: the names, by RowKernel. file: of the kernels for wider rows.
template <typename Split>
Description DescribeRows(const RowPlan<Split>& plan, const char* const (&kernels)[5],
                         const char* file, std::vector<Description::Number> more) {
  const RowKernel kernel = plan.kernel();
  const NarrowPlan& narrow = plan.narrow;
  const Split& split = plan.split;
  Description description{kernels[static_cast<int>(kernel)], "row_norm/stream.cuh", {}};
  if (kernel == RowKernel::kNarrow) {
    description.file = "row_norm/narrow.cuh";
    description.numbers = {
        {"row_threads", narrow.row_threads, "threads that share a row in one block"},
        {"columns", narrow.columns, "columns of a thread"},
        {"tile_steps", narrow.tile_steps, "rows of a thread in a tile"},
        {"tile_rows", narrow.tile_rows, "rows of a tile"},
        {"tile_bytes", narrow.tile_bytes, "shared memory for a tile of one array, in bytes"},
        {"warps", narrow.warps, "warps of a block"},
        {"threads", narrow.threads(), "threads of a block"},
        {"shared_bytes", narrow.shared_bytes, "shared memory of a block, in bytes"}};
  } else if (kernel != RowKernel::kStream) {
    description.file = file;
    description.numbers = {
        {"layout", static_cast<int>(split.layout),
         "0: all threads have an equal number of vectors; 1: some lack their last one; 2: "
         "unaligned rows"},
        {"vectors", split.vectors, "vectors of 16 bytes of a row that a thread has"},
        {"row_threads", split.row_threads, "threads that share a row in one block"},
        {"cluster", split.cluster, "blocks that share a row"},
        {"block_columns", split.block_columns, "columns of each block that shares a row"},
        {"threads", split.threads(), "threads of a block"},
        {"stages", split.stages, "rows that a thread has in flight from global to shared memory"},
        {"shared_bytes", split.shared_bytes, "shared memory of a block, in bytes"},
        {"period", split.period,
         "rows this far apart start at an equal offset from a 16-byte boundary"}};
    description.numbers.insert(description.numbers.end(), more.begin(), more.end());
  }
  description.numbers.push_back(
      {"reads_vectors", plan.reads_vectors,
       "1: kernels that read rows again read vectors of 16 bytes; 0: single elements"});
  return description;
}

inline Description Describe(const ForwardPlan& plan) {
  return DescribeRows(
      plan,
      {"ForwardStreamKernel", "ForwardKernel", "ForwardShortKernel", "ForwardRowsKernel",
       "ForwardNarrowKernel"},
      "row_norm/forward.cuh",
      {{"rows_per_block", plan.split.rows_per_block, "rows of a block, or of one turn of its loop"},
       {"thread_rows", plan.split.thread_rows, "rows of a thread"}});
}

inline Description Describe(const BackwardPlan& plan) {
  Description description = DescribeRows(
      plan, {"BackwardStreamKernel", "", "", "BackwardKernel", "BackwardNarrowKernel"},
      "row_norm/backward.cuh",
      {{"teams", plan.split.teams, "groups of threads of a block that take row after row"}});
  description.numbers.push_back({"sums_by", static_cast<int>(plan.sums),
                                 "column sums come from 0: nobody, 1: the kernel for dx, 2: a "
                                 "kernel after it, 3: one beside it"});
  return description;
}

}  // namespace gradops
