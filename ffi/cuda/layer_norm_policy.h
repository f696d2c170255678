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
// Rows that start anywhere: a block has up to 8 of them, one after the other, to load parameters,
// single elements there, less often.
//
//   bytes of a row (of 16-bit elements)            bytes of a thread    threads of a row
//   up to 2 Ki                                     64                   1 to 32 lanes
//   up to 32 Ki (8 Ki, and 16 Ki)                  64                   64 to 512 (256)
//   up to 128 Ki (64 Ki)                           128                  up to 1024 (512)
//   up to 16 times that, from sm_90 on             128                  2 to 16 blocks of those
//   start anywhere: up to 40 Ki (24 Ki)            64                   1 to 640 (384)
//   up to 16 times that, from sm_90 on             64                   2 to 16 blocks of those
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/integers.h"

namespace gradops {

// How rows are divided into threads' packs of 16 bytes (Place in cuda/layer_norm_rows.cuh).
enum class Division : int {
  kEven,    // all threads have as many
  kUneven,  // some lack the last one
  kFramed,  // rows, or parameters, start anywhere
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
};

// What tests may force; 0: as the table says. A row that does not fit what is forced is streamed.
struct RowOverride {
  int architecture = 0;  // as if the GPU were this one
  int max_cluster = 0;   // blocks that may share a row
  int max_threads = 0;   // of a row in one block
  int max_stages = 0;    // backward: 1 or 2, if there is room
  bool stream = false;
  int packs = 0;  // of a thread, backward: as many, or streamed
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
  int packs;                 // of 16 bytes, that a thread has of a row
  int lanes;                 // threads of a row in one block
  int cluster;               // blocks that share a row
  int share;                 // columns of each of them
  bool full;                 // all threads have as many packs, and all of these
  int log_lanes;             // log2 of the lanes of a row that has no more than a warp
  int teams;                 // of a block, each with a row at a time
  int rounds;                // rows that a team works on, one after the other
  int step;                  // from one of them to the next: a power of two, not less than teams
  int log_step, log_blocks;  // log2 of it, and of the number of blocks that have a step's rows
  int shared_bytes;          // of a block, for the parameters of framed rows

  constexpr int threads() const { return teams * lanes; }
};

inline constexpr int kForwardThreads = 1024;  // of a block, at most
inline constexpr int kFewThreads = 512;       // of one whose threads have few packs
// The same for framed rows, whose threads take more registers; and for their parameters, in as much
// shared memory as a block has on any GPU since sm_80.
inline constexpr int kFramedThreads = 640;
inline constexpr int kFramedBytes = 96 * 1024;
constexpr int FramedThreads(int element_bytes) {
  return std::min(kFramedThreads, kFramedBytes / (element_bytes == 2 ? 256 : 128));
}
inline constexpr int kMaxRounds = 8;

inline ForwardPlan ChooseForwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  ForwardPlan plan{};
  const int limit = forced.max_threads != 0 ? std::clamp(forced.max_threads, 32, kForwardThreads)
                                            : kForwardThreads;
  const int few = std::min(limit, kFewThreads), pack = 16 / task.element_bytes;
  const int param_bytes = 2 * (task.element_bytes == 8 ? 8 : 4);
  // Whether so many blocks of at most so many threads can hold a row with so many packs a thread.
  const auto holds = [&](bool framed, int cluster, int packs, int threads) {
    const std::int64_t share = Share(task, cluster, framed);
    const std::int64_t last = std::max<std::int64_t>(1, task.features) - (cluster - 1) * share;
    if (share * task.element_bytes > std::int64_t{16} * packs * threads) return false;
    const bool even = share % (pack * packs) == 0 && last % (pack * packs) == 0;
    plan.division = framed ? Division::kFramed : even ? Division::kEven : Division::kUneven;
    plan.packs = packs;
    plan.cluster = cluster;
    plan.share = static_cast<int>(share);
    plan.lanes = Lanes(CeilDiv(share, pack * packs));
    plan.full = even && !framed && last == share && share == plan.lanes * packs * pack;
    // Whether threads lack no more than their last packs.
    const auto enough = [&](std::int64_t columns) {
      const std::int64_t all = CeilDiv(columns, pack), owners = CeilDiv(all, packs);
      return all > 0 && (packs - 1) * owners <= all;
    };
    return framed || (enough(share) && enough(last));
  };
  const bool whole_packs = task.aligned_params && task.features > 0 && task.features % pack == 0;
  const bool half = task.element_bytes == 2;
  // Wide rows of 16-bit elements: only where a multiprocessor then has all the threads that it has
  // registers for.
  const int of_row = Lanes(CeilDiv(task.features, pack * 4));
  const bool few_fit = !half || of_row <= 128 || of_row == 256;
  const auto fits = [&](bool framed) {
    for (int cluster = 1; cluster <= MaxCluster(task, forced); ++cluster) {
      if (framed) {
        const int threads = std::min(limit, FramedThreads(task.element_bytes));
        if (holds(true, cluster, 4, threads)) return true;
        continue;
      }
      if (cluster == 1 && few_fit && holds(false, 1, 4, few)) return true;
      if (holds(false, cluster, 8, half ? few : limit)) return true;
    }
    return false;
  };
  // A few widths of up to 5 packs cannot be divided otherwise.
  plan.stream = forced.stream || !task.aligned ||
                !((whole_packs && fits(false)) ||
                  ((!whole_packs || task.features <= 5 * pack) && fits(true)));
  if (plan.stream) return plan;
  plan.teams = plan.lanes > 32 || plan.cluster > 1 ? 1 : 64 / plan.lanes;
  while (2 << plan.log_lanes <= std::min(plan.lanes, 32)) ++plan.log_lanes;
  plan.rounds = 1, plan.step = plan.teams;
  if (plan.division == Division::kFramed) {
    // So many rows on, a frame starts as many columns before its row.
    const int classes =
        static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
    plan.step = std::max(plan.teams, classes);
    while (1 << plan.log_step < plan.step) ++plan.log_step;
    while (plan.teams << plan.log_blocks < plan.step) ++plan.log_blocks;
    plan.rounds = static_cast<int>(std::clamp<std::int64_t>(
        task.rows * plan.cluster / (std::int64_t{4} * plan.teams * task.multiprocessors), 1,
        kMaxRounds));
    plan.shared_bytes = plan.threads() * plan.packs * pack * param_bytes;
  }
  return plan;
}

}  // namespace gradops
