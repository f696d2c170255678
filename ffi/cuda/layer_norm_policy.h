// How layer norm's rows are laid out on a GPU: what decides it, and the forward kernel's table. The
// backward kernel's: cuda/layer_norm_bwd_policy.h. Plain C++, no CUDA.
//
// A row belongs to the fewest threads that hold it in registers: some lanes of a warp, some warps,
// or, from sm_90 on, the blocks of a cluster, each with a share of the columns. A row's result
// depends on none but these and, if rows start anywhere, on how far from a 16-byte boundary its own
// does; so neither on how many rows there are nor on how they reach the chip.
// Wider rows are streamed: a block per row, which reads it twice.
//
// Forward: a block has one row (two warps' worth of narrow ones), loads it, and ends; whatever
// comes next to a multiprocessor is up to the hardware, which keeps all of them busy to the end.
// Rows that start anywhere, or of which several blocks have a share: blocks have them one after the
// other, as their parameters cost more than they do.
//
//   bytes of a row (of 16-bit elements)            bytes of a thread    threads of a row
//   up to 2 Ki                                     64 (or 48: 768)      1 to 32 lanes
//   up to 32 Ki (8 Ki, and 16 Ki)                  64                   64 to 512 (256)
//   up to 128 Ki (64 Ki)                           128                  up to 1024 (512)
//   start anywhere: up to 32 Ki                    64                   32 to 512
//     (up to 480 elements: layer_norm_narrow_policy.h)
//   more, from sm_90 on                            64                   2 to 16 blocks of up to 512
//                                                                       (256, if that suffices)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/integers.h"
#include "cuda/cache_line.h"

namespace gradops {

// How rows are divided into threads' packs of 16 bytes (Place in cuda/layer_norm_rows.cuh).
enum class Division : int {
  kEven,    // all threads have as many
  kUneven,  // some lack the last one
  kFramed,  // rows, or parameters, start anywhere; or, forward, blocks share rows
};

// What the choice depends on.
struct RowTask {
  std::int64_t rows, features;
  int element_bytes;    // of x
  int arrays;           // that are read: x, a residual; dy, x, dsum
  bool aligned;         // x and the like start at 16-byte boundaries
  bool aligned_params;  // and so do scale and bias
  int architecture;     // 10 * major + minor
  int multiprocessors;
  std::int64_t shared_bytes;  // of a multiprocessor
  bool sums_dx = false;       // backward: dresidual_bias is wanted
  bool centered = true;       // layer norm
};

// What tests may force; 0: as the table says. A row that does not fit what is forced is streamed.
struct RowOverride {
  int architecture = 0;  // as if the GPU were this one
  int max_cluster = 0;   // blocks that may share a row
  int max_threads = 0;   // of a row in one block
  int max_stages = 0;    // backward: 1 or 2, if there is room
  bool stream = false;
  int packs = 0;  // of a thread, backward: as many, or streamed

  bool operator==(const RowOverride&) const = default;
};

inline constexpr int kMaxCluster = 16;

namespace row_policy {

// What becomes of rows, shared by so many blocks, whose threads have so many packs each.
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

// Columns of each of a cluster's blocks; framed: of the widest frame.
constexpr std::int64_t Share(const RowTask& task, int cluster, bool framed) {
  const int pack = 16 / task.element_bytes;
  const std::int64_t columns = std::max<std::int64_t>(1, task.features) + (framed ? pack - 1 : 0);
  return RoundUp(CeilDiv(columns, cluster), pack);
}

constexpr int MaxCluster(const RowTask& task, const RowOverride& forced) {
  const int architecture = forced.architecture != 0 ? forced.architecture : task.architecture;
  return architecture < 90 ? 1 : forced.max_cluster != 0 ? forced.max_cluster : kMaxCluster;
}

// Threads for so many parts of a row: a power of two up to a warp, or whole warps.
constexpr int Lanes(std::int64_t parts) {
  int lanes = 1;
  while (lanes < 32 && lanes < parts) lanes *= 2;
  return parts > 32 ? static_cast<int>(RoundUp(parts, 32)) : lanes;
}

}  // namespace row_policy

struct ForwardPlan {
  bool stream;  // none of what follows holds
  Division division;
  int packs;      // of 16 bytes, that a thread has of a row
  int lanes;      // threads of a row in one block
  int cluster;    // blocks that share a row
  int share;      // columns of each of them
  bool full;      // all threads have as many packs, and all of these
  int log_lanes;  // log2 of the lanes of a row that has no more than a warp
  int teams;      // of a block, each with a row at a time

  // Framed:
  int step;                  // rows that begin at different places of a pack: a power of two, not
                             // less than teams
  int log_step, log_blocks;  // log2 of it, and of the number of blocks that have a step's rows
  int stages;                // rows that a thread has under way
  int stage_bytes, warp_bytes, shared_bytes;  // for one of them, of a warp; for all; of a block
  int rounds;           // rows that a team works on, one after the other, at most
  std::int64_t apart;   // from one of them to the next
  std::int64_t stride;  // the same in bytes
  std::int64_t ahead;   // from a row to the one that is ordered in its place

  constexpr int threads() const { return teams * lanes; }
  constexpr bool framed() const { return division == Division::kFramed; }

  // Deals out `rows` rows, such that about `blocks` blocks have them; returns how many do.
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

inline constexpr int kForwardThreads = 1024;  // of a block, at most
inline constexpr int kFewThreads = 512;       // of one whose threads have few packs
// Framed: threads that a multiprocessor has registers for; of a block, at most; packs of a thread.
constexpr int RowsThreads(int element_bytes) {
  return element_bytes == 2 ? 512 : element_bytes == 4 ? 768 : 640;
}
inline constexpr int kRowThreads = 512;
inline constexpr int kRowsPacks = 4;
inline constexpr int kSparedBytes = 4 * 1024;  // of a multiprocessor's shared memory: not a block's

inline ForwardPlan ChooseForwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  ForwardPlan plan{};
  const int limit = forced.max_threads != 0 ? std::clamp(forced.max_threads, 32, kForwardThreads)
                                            : kForwardThreads;
  const int few = std::min(limit, kFewThreads), pack = 16 / task.element_bytes;
  // Whether a block of at most so many threads can hold a row with so many packs a thread.
  const auto holds = [&](int packs, int threads) {
    const std::int64_t all = task.features / pack, owners = CeilDiv(all, packs);
    if (owners > threads) return false;
    plan.division = all % packs == 0 ? Division::kEven : Division::kUneven;
    plan.packs = packs;
    plan.cluster = 1;
    plan.share = static_cast<int>(task.features);
    plan.lanes = Lanes(owners);
    plan.full = all == std::int64_t{plan.lanes} * packs;
    return (packs - 1) * owners <= all;  // threads lack no more than their last packs
  };
  const bool whole_packs = task.aligned_params && task.features > 0 && task.features % pack == 0;
  const bool half = task.element_bytes == 2;
  // Wide rows of 16-bit elements: only where a multiprocessor then has all the threads that it has
  // registers for.
  const int of_row = Lanes(CeilDiv(task.features, pack * 4));
  const bool few_fit = !half || of_row <= 128 || of_row == 256;
  // Three, of rows of which all threads have as many, where four would leave a tenth of them idle.
  const auto thirds = [&] {
    const std::int64_t all = task.features / pack;
    const int lanes = Lanes(all / 3);
    return all % 3 == 0 && 3 * lanes == all && 10 * all < 36 * Lanes(CeilDiv(all, 4)) &&
           (lanes <= 128 || lanes == 256) && holds(3, few);
  };
  const auto fits = [&] {
    return thirds() || (few_fit && holds(4, few)) || holds(8, half ? few : limit);
  };
  // Of shared memory, for a warp: a row under way, of so many arrays; parameters, one at a time, on
  // their way to registers. And for a block, at most.
  const auto stage_bytes = [](int arrays) { return arrays * kRowsPacks * 512 + kLineBytes; };
  const int param_bytes = 32 * kRowsPacks * pack * (task.element_bytes == 8 ? 8 : 4);
  const std::int64_t shared_bytes = task.shared_bytes - kSparedBytes;
  // The same for blocks that have rows one after the other: of all numbers of blocks the one that
  // costs least, in warps that a row does not need, in too few of them that a multiprocessor has
  // room for, and in waiting for each other.
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
  // A few widths of up to 5 packs cannot be divided otherwise.
  const bool framed = !whole_packs || task.features <= 5 * pack;
  // Layer norm's parameters, which wide rows' blocks each read anew.
  const bool wide = task.centered && task.element_bytes <= 4 &&
                    task.features * task.element_bytes > (half ? 40 : 80) * 1024;
  plan.stream =
      forced.stream || !task.aligned ||
      !((wide && fits_framed(2)) || (whole_packs && fits()) || fits_framed(framed ? 1 : 2));
  if (plan.stream) return plan;
  plan.teams = plan.lanes > 32 || plan.cluster > 1 ? 1 : 64 / plan.lanes;
  while (2 << plan.log_lanes <= std::min(plan.lanes, 32)) ++plan.log_lanes;
  if (plan.framed()) {
    // So many rows on, a frame starts as many columns before its row.
    const int classes =
        static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
    plan.step = std::max(plan.teams, classes);
    while (1 << plan.log_step < plan.step) ++plan.log_step;
    while (plan.teams << plan.log_blocks < plan.step) ++plan.log_blocks;
    // What a multiprocessor has under way then is about 32 KB.
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
