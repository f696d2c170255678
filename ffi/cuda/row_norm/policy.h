// Row layout of layer norm's kernels on a GPU: what decides it, and the forward kernel's table. The
// backward kernel's table: cuda/row_norm/backward_policy.h. Plain C++, no CUDA.
//
// Pictures of float32 rows: a pack (vector of 16 bytes) has 4 columns. Array starts are aligned.
//
// One row on one block: 1024 columns, forward. Its 64 lanes (threads) have 4 packs each.
//   Pack           [0 .. 63]  [64 .. 127]  [128 .. 191]  [192 .. 255]
//   lane           [0 .. 63]  [0 .. 63]    [0 .. 63]     [0 .. 63]
// A row of 1020 columns has no pack 255. Lane 63 lacks it, and repeats pack 254 of lane 62.
//
// A framed row on one block: row 1 of 1001 columns, forward. Its skip is 1.
//   Memory         [row 0, c0, c1, c2] [c3, c4, c5, c6]  ..  [c999, c1000, row 2, row 2]
//   pack            0                   1                ..   250
// Each warp of the row has the next 32 P packs. Each of its lanes has every 32nd pack.
//
// A block of several rows: 64 columns, backward. The 8 lanes of a row have 2 packs each.
//   Thread         [0 .. 7]  [8 .. 15]  [16 .. 23]  [24 .. 31]  [32 .. 39]  ..
//   unit            0         0          0           0           1          ..
//   row of unit     0         1          2           3           0          ..
// Lane l has packs l and l + 8. A unit's turn has 4 rows. Forward: 16 teams of 4 lanes, a row each.
//
// A cluster of 3 blocks: row 1 of 24001 columns, forward. Its skip is 1. The share is 8192 columns.
//   Block           0            1                2
//   columns        [0 .. 8190]  [8191 .. 16382]  [16383 .. 24000]
//   packs          [0 .. 2047]  [2048 .. 4095]   [4096 .. 6000]
//
//  Word     In the code         Meaning
//  Pack     Pack<T, W>, packs   16-byte vector. A thread has P per row. Streamed: also one element.
//  Lane     lane, lanes         A thread of a row in its block. Some `lane`s are of a warp.
//  Share    share               The columns of a row, or of its frame, that one block has.
//  Division kEven, kUneven      How packs are divided among lanes. Even: each lane that owns packs
//                               has P. Uneven: some owners lack their last pack.
//  Framed   kFramed             Packs are counted in the frame. Rows or parameters are unaligned,
//                               or of a few narrow widths. Forward: also if blocks share rows.
//  Frame    skip(), SetSkip     The row from the last 16-byte boundary on, at or before its start.
//                               The skip is the number of columns before the row.
//  Class    classes             Rows `classes` apart are in one class: they have an equal skip.
//  Place    Place, NarrowPlace  A thread's lane, row and columns. PlaceOfLane: which part it reads.
//  Counts   counts, Counts(i)   Whether a thread adds its packs to sums. If not, another thread
//                               owns them. RowCounts is a different thing: numbers of columns.
//  Lacks    Lacks(i), Whole(i)  Framed. Lacks: the row has no column of pack i. Whole: all rows of
//                               the warp have the whole pack.
//  Team     teams               Forward: the threads of a block that work on one row.
//  Unit     units               Backward: a warp, or all warps of one row in a block.
//           scalars.unit        Forward: differences are divided by this unit, then squared.
//  Deal     Deal, NarrowDeal    Which blocks take which rows of a group (RowShape).
//  Slot     slot, slots         The rows of a group that one block or cluster takes. Backward, a
//                               slot also has a partial row of column sums.
//           Slot(), slot_bytes  Room in shared memory for a thread's packs or for a chunk.
//  Item     item                Backward: a group and a slot. Streamed: a group and a few columns.
//  Turn     Turns, unit_rows()  Backward: a unit's next row, or 32 / lanes rows if lanes < 32.
//                               Narrow: a warp's next chunk, which is a few neighbouring rows.
//  Round    plan.rounds         Forward: a team takes one row per round.
//           deal.rounds         Backward: turns of each unit in a pass. Narrow: of each warp.
//  Pass     passes              Backward, framed: turns of a unit whose rows are in one class.
//           (comments)          Forward: a loop over the held row. Mean and deviation take two.
//  Ring     RowRing, ..         The next rows in shared memory. Each thread copies its own packs.
//                               To order a row is to start its copy. Then the row is under way.
//  Stage    stages              A ring's room for one turn or round. A ring has 1 or 2 stages.
//  Held     HeldRow, held       Forward: packs in registers. `held`: columns that a block can hold.
//  Part     Part, parts         A warp's or block's mean and squares, or its sum. `Lanes(parts)`:
//                               parts are a thread's packs.
//  Moments  Moments             A row's mean (mean + delta) and 1 / deviation (rstd).
//  Usual    UsualRow, usual     Backward: the rounding of the row's saved mean does not matter, and
//                               products are far from the limits of floats.
//  Wide     wide                Forward layer norm: over 40 KiB a row (16-bit), 80 KiB (float32).
//                               From sm_90 on, blocks share them even if one block could hold them.
//           Widen, LoadWide     Wide values have the type of the arithmetic, Accum<T>.
//  Narrow   NarrowPlan          Rows that would be framed, of up to 480 elements (float64: 224):
//                               narrow_policy.h. Elsewhere: rows of up to one warp.
//  Stream   stream              Unaligned arrays, or rows that no plan holds. A row is read twice.
//  Plan     ForwardPlan, ..     What is chosen for a RowTask: division, threads, shared memory.
//  Override RowOverride         What tests force upon that choice, through ForcedRowPlan().
//
// A row belongs to the fewest threads that hold it in registers: some lanes of a warp, some warps
// or, from sm_90 on, the blocks of a cluster. Unaligned rows may start at any element, and have
// any length. A row's result depends only on its threads and, if unaligned, on its distance from a
// 16-byte boundary. The number of rows does not matter, nor how they reach the chip.
//
// Forward: a block loads one row (or two warps' worth of narrow rows) and ends. The hardware then
// starts the next block, which keeps all multiprocessors busy to the end. If rows are unaligned or
// shared by blocks, a block takes rows one after the other: parameters cost more than rows.
//
//   Bytes of a row                       Bytes of a thread   Threads of a row
//   up to 2 Ki                           64                  1 to 32 lanes
//   up to 32 Ki (not 16-bit elements)    64                  64 to 512
//   up to 8 Ki, 14 to 16 Ki (16-bit)     64                  64 to 256
//   up to 128 Ki (not 16-bit elements)   128                 up to 1024
//   up to 64 Ki (16-bit elements)        128                 up to 512
//   unaligned, up to 32 Ki               64                  32 to 512
//   wider, from sm_90 on                 64                  2 to 16 blocks of up to 512
//
// Some widths, like 768 16-bit elements, have 48 bytes per thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/integers.h"
#include "cuda/common/cache_line.h"

namespace gradops {

// How rows are divided into threads' packs, 16-byte vectors (Place in cuda/row_norm/rows.cuh).
enum class Division : int {
  kEven,    // All threads have an equal number of packs.
  kUneven,  // Some threads lack their last pack.
  kFramed,  // Rows or parameters are unaligned. Forward: also if blocks share rows.
};

// What the choice depends on.
struct RowTask {
  std::int64_t rows, features;
  int element_bytes;    // Of x.
  int arrays;           // Arrays that are read: x and a residual, or dy, x and dsum.
  bool aligned;         // x and the other arrays start at 16-byte boundaries.
  bool aligned_params;  // Scale and bias start there too.
  int architecture;     // 10 * major + minor.
  int multiprocessors;
  std::int64_t shared_bytes;  // Of a multiprocessor.
  bool sums_dx = false;       // Backward: dresidual_bias is wanted.
  bool centered = true;       // Layer norm.
};

// What tests may force. 0: as the table says. A row that does not fit what is forced is streamed.
struct RowOverride {
  int architecture = 0;  // As if the GPU were this one.
  int max_cluster = 0;   // The most blocks that may share a row.
  int max_threads = 0;   // The most threads of a row in one block.
  int max_stages = 0;    // 1 or 2, if there is room.
  bool stream = false;
  int packs = 0;  // Backward: packs of a thread. If they do not fit, rows are streamed.

  bool operator==(const RowOverride&) const = default;
};

inline constexpr int kMaxCluster = 16;

namespace row_policy {

// How rows are divided if a block has `share` columns and a thread `packs` packs.
constexpr Division DivisionOf(const RowTask& task, int packs, std::int64_t share) {
  const std::int64_t bytes = task.features * task.element_bytes, row = bytes / 16;
  if (!task.aligned_params || bytes == 0 || bytes % 16 != 0 ||
      (packs - 1) * CeilDiv(row, packs) > row) {
    return Division::kFramed;
  }
  const std::int64_t of_block = share * task.element_bytes / 16;
  return of_block % packs == 0 && row % packs == 0 ? Division::kEven : Division::kUneven;
}
constexpr bool Framed(const RowTask& task, int packs) {
  return DivisionOf(task, packs, 0) == Division::kFramed;
}

// Columns of each block of a cluster. Framed: of the widest frame.
constexpr std::int64_t Share(const RowTask& task, int cluster, bool framed) {
  const int pack = 16 / task.element_bytes;
  const std::int64_t columns = std::max<std::int64_t>(1, task.features) + (framed ? pack - 1 : 0);
  return RoundUp(CeilDiv(columns, cluster), pack);
}

constexpr int MaxCluster(const RowTask& task, const RowOverride& forced) {
  const int architecture = forced.architecture != 0 ? forced.architecture : task.architecture;
  return architecture < 90 ? 1 : forced.max_cluster != 0 ? forced.max_cluster : kMaxCluster;
}

// Threads for `parts` parts of a row: a power of two up to a warp, or whole warps.
constexpr int Lanes(std::int64_t parts) {
  int lanes = 1;
  while (lanes < 32 && lanes < parts) lanes *= 2;
  return parts > 32 ? static_cast<int>(RoundUp(parts, 32)) : lanes;
}

}  // namespace row_policy

struct ForwardPlan {
  bool stream;  // Rows are streamed: the other members mean nothing.
  Division division;
  int packs;      // Packs (16-byte vectors) of a row that a thread has.
  int lanes;      // Threads of a row in one block.
  int cluster;    // Blocks that share a row.
  int share;      // Columns of each block.
  bool full;      // All `lanes` threads have exactly `packs` packs of their own.
  int log_lanes;  // log2 of lanes, if a row has no more than a warp.
  int teams;      // Teams of a block.

  // Framed:
  int step;                  // Rows after which offsets in a pack repeat: a power of two,
                             // at least teams.
  int log_step, log_blocks;  // log2 of step, and of the number of blocks that have a step's rows.
  int stages;                // Rows that a thread has under way.
  int stage_bytes, warp_bytes, shared_bytes;  // For one stage of a warp; for a warp; for a block.
  int rounds;           // The most rows that a team works on, one after the other.
  std::int64_t apart;   // Rows from one of a team's rows to the next.
  std::int64_t stride;  // apart in bytes.
  std::int64_t ahead;   // Bytes from a row to the row that is ordered in its place.

  constexpr int threads() const { return teams * lanes; }
  constexpr bool framed() const { return division == Division::kFramed; }

  // Deals out `rows` rows to about `blocks` blocks. Returns how many blocks have rows.
  constexpr std::int64_t Deal(std::int64_t rows, std::int64_t row_bytes, std::int64_t blocks) {
    const std::int64_t at_once = std::max<std::int64_t>(1, blocks >> log_blocks) * step;
    rounds = static_cast<int>(std::min<std::int64_t>(CeilDiv(rows, at_once), kMostRounds));
    apart = RoundUp(CeilDiv(rows, rounds), step);
    rounds = static_cast<int>(CeilDiv(rows, apart));
    stride = apart * row_bytes;
    ahead = stages * stride;
    return (apart >> log_step) << log_blocks;
  }
  static constexpr std::int64_t kMostRounds = 1 << 20;
};

inline constexpr int kForwardThreads = 1024;  // Most threads of a block.
inline constexpr int kFewThreads = 512;       // Most, if its threads have few packs.
// Framed: threads that a multiprocessor has registers for; of a block; packs of a thread.
constexpr int RowsThreads(int element_bytes) {
  return element_bytes == 2 ? 512 : element_bytes == 4 ? 768 : 640;
}
inline constexpr int kRowThreads = 512;
inline constexpr int kRowsPacks = 4;
inline constexpr int kSparedBytes = 4 * 1024;  // shared memory that blocks do not get

inline ForwardPlan ChooseForwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  ForwardPlan plan{};
  const int limit = forced.max_threads != 0 ? std::clamp(forced.max_threads, 32, kForwardThreads)
                                            : kForwardThreads;
  const int few = std::min(limit, kFewThreads), pack = 16 / task.element_bytes;
  // Whether a block of up to `threads` threads can hold a row with `packs` packs per thread.
  const auto holds = [&](int packs, int threads) {
    const std::int64_t all = task.features / pack, owners = CeilDiv(all, packs);
    if (owners > threads) return false;
    plan.division = all % packs == 0 ? Division::kEven : Division::kUneven;
    plan.packs = packs;
    plan.cluster = 1;
    plan.share = static_cast<int>(task.features);
    plan.lanes = Lanes(owners);
    plan.full = all == std::int64_t{plan.lanes} * packs;
    return (packs - 1) * owners <= all;  // threads lack at most their last packs
  };
  const bool whole_packs = task.aligned_params && task.features > 0 && task.features % pack == 0;
  const bool half = task.element_bytes == 2;
  // Wide rows of 16-bit elements: only if a multiprocessor then runs all the threads that its
  // registers allow.
  const int of_row = Lanes(CeilDiv(task.features, pack * 4));
  const bool few_fit = !half || of_row <= 128 || of_row == 256;
  // Three packs, if each thread then has exactly three and four would leave a tenth of them idle.
  const auto thirds = [&] {
    const std::int64_t all = task.features / pack;
    const int lanes = Lanes(all / 3);
    return all % 3 == 0 && 3 * lanes == all && 10 * all < 36 * Lanes(CeilDiv(all, 4)) &&
           (lanes <= 128 || lanes == 256) && holds(3, few);
  };
  const auto fits = [&] {
    return thirds() || (few_fit && holds(4, few)) || holds(8, half ? few : limit);
  };
  // Shared memory of a warp: for a row under way, of `arrays` arrays; and for one parameter at a
  // time on its way to registers. `shared_bytes`: the most that a block can have.
  const auto stage_bytes = [](int arrays) { return arrays * kRowsPacks * 512 + kLineBytes; };
  const int param_bytes = 32 * kRowsPacks * pack * (task.element_bytes == 8 ? 8 : 4);
  const std::int64_t shared_bytes = task.shared_bytes - kSparedBytes;
  // As `fits`, for blocks that take rows one after the other. Takes the number of blocks that costs
  // least. Costs are: warps that a row does not need, too few warps on a multiprocessor, and blocks
  // that wait for each other.
  const auto fits_framed = [&](int least_blocks) {
    constexpr int kEnoughWarps = 16;
    const auto with_residual = static_cast<int>(shared_bytes / (stage_bytes(2) + param_bytes));
    const int threads = std::min({limit, kRowThreads, 32 * with_residual});
    const int room = RowsThreads(task.element_bytes) / 32;
    const bool anywhere = task.features % pack != 0;
    double least_cost = 0;
    for (int cluster = least_blocks; cluster <= MaxCluster(task, forced); ++cluster) {
      std::int64_t share = Share(task, cluster, anywhere);
      if (cluster > 1) share = RoundUp(share, 32 * kRowsPacks * pack);  // whole warps
      if (share > std::int64_t{pack} * kRowsPacks * threads) continue;
      const auto blocks = static_cast<int>(CeilDiv(Share(task, 1, anywhere), share));
      const int lanes = std::max(32, Lanes(CeilDiv(share, pack * kRowsPacks)));
      const int warps = static_cast<int>(CeilDiv(lanes, 32));
      const double idle = std::max(1.0, double{kEnoughWarps} / (room / warps * warps));
      const double cost = (blocks == 1 ? 1.05 : 1.25 + 0.05 * blocks) * idle * blocks * warps;
      if (least_cost != 0 && cost >= least_cost) continue;
      least_cost = cost;
      plan.division = Division::kFramed;
      plan.packs = kRowsPacks;
      plan.cluster = blocks;
      plan.share = static_cast<int>(share);
      plan.lanes = lanes;
      plan.full = false;
    }
    return least_cost != 0;
  };
  // A few widths of up to 5 packs can only be divided as framed.
  const bool framed = !whole_packs || task.features <= 5 * pack;
  // Wide layer norm rows: with a block per row, each block would load all parameters again.
  const bool wide = task.centered && task.element_bytes <= 4 &&
                    task.features * task.element_bytes > (half ? 40 : 80) * 1024;
  plan.stream =
      forced.stream || !task.aligned ||
      !((wide && fits_framed(2)) || (whole_packs && fits()) || fits_framed(framed ? 1 : 2));
  if (plan.stream) return plan;
  plan.teams = plan.lanes > 32 || plan.cluster > 1 ? 1 : 64 / plan.lanes;
  while (2 << plan.log_lanes <= std::min(plan.lanes, 32)) ++plan.log_lanes;
  if (plan.framed()) {
    // Rows this far apart start at an equal offset from a 16-byte boundary.
    const int classes =
        static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
    plan.step = std::max(plan.teams, classes);
    while (1 << plan.log_step < plan.step) ++plan.log_step;
    while (plan.teams << plan.log_blocks < plan.step) ++plan.log_blocks;
    // With these stages a multiprocessor has about 32 KB under way.
    const bool rereads = task.centered && half;
    plan.stages = forced.max_stages != 0 ? forced.max_stages : rereads || plan.cluster > 1 ? 2 : 1;
    plan.stage_bytes = stage_bytes(task.arrays);
    const int warps = plan.threads() / 32;
    if (warps * (2 * plan.stage_bytes + param_bytes) > shared_bytes) plan.stages = 1;
    plan.warp_bytes = plan.stages * plan.stage_bytes + param_bytes;
    plan.shared_bytes = warps * plan.warp_bytes;
  }
  return plan;
}

}  // namespace gradops
