// Row layout of layer norm's kernels on a GPU: what decides it, and the forward kernel's table. The
// backward kernel's table: cuda/layer_norm_bwd_policy.h. Plain C++, no CUDA.
//
// A row belongs to the fewest threads that hold it in registers: some lanes of a warp, some warps
// or, from sm_90 on, the blocks of a cluster. Each block of a cluster has a share of the columns.
// Unaligned rows may start at any element, not only at 16-byte boundaries. A row's result depends
// only on its threads and, if unaligned, on its distance from such a boundary. The number of rows
// does not matter, nor how they reach the chip. Wider rows are streamed: a block reads each twice.
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
// Some widths, like 768 16-bit elements, have 48 bytes per thread. Unaligned rows of up to 480
// elements (float64: 224): layer_norm_narrow_policy.h. Wide layer norm rows are shared by blocks
// even if one block could hold them (`wide` below).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/integers.h"
#include "cuda/cache_line.h"

namespace gradops {

// How rows are divided into threads' packs, 16-byte vectors (Place in cuda/layer_norm_rows.cuh).
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
  int teams;      // Teams of a block. A team is the threads that work on one row at a time.

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
