// How layer norm's backward kernel has rows laid out on a GPU; see cuda/layer_norm_policy.h. Plain
// C++, no CUDA.
//
// Few blocks stay, as column sums do, in registers (dx's: in shared memory). Each unit of threads
// takes row after row. Each thread has its part of the next ones on their way to its own part of a
// ring in shared memory, and what it reads of one it orders of a later one: so a multiprocessor has
// as much under way as it takes, all the time, and no thread waits for others but in a row's sums
// (framed: and for its warp's).
//
//   bytes of a row          of a thread                       threads of a row
//   up to 1 Ki              32                                1 to 32 lanes
//   up to 16 Ki (with 48    32; or, of 16-bit elements and    64 to 512 (with 48 up to 384)
//   bytes 18, with 64 32)   framed, 48 where that puts more
//                           of them to work; 64, of wider
//                           elements, where 32 would take
//                           larger clusters, or cannot
//   up to 16 times that     as above                          2 to 16 blocks of those, from sm_90
//                                                             on; else streamed
//
// Framed rows have at least 32 lanes, and more than 480 elements (else layer_norm_narrow_policy.h).
// Rows that one block holds get a cluster, too, of blocks of at least three warps, where one would
// leave more than an eighth (of 48 bytes a tenth) of a multiprocessor's 512 (or 384) threads
// without work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/layer_norm_policy.h"

namespace gradops {

struct BackwardPlan {
  bool stream;  // none of what follows holds
  Division division;
  int packs;         // of 16 bytes, that a thread has of a row
  int lanes;         // threads of a row in one block: a power of two up to 32, or full warps
  int units;         // of a block, each of max(32, lanes) threads with rows of its own
  int cluster;       // blocks that share a row
  int share;         // columns of each of them
  int stages;        // of the ring: rows that a thread has under way
  int ring_bytes;    // of a block, first in its shared memory; then come its units' column sums
  int dx_sum_bytes;  // of a block: where threads sum dx up; 0: they do not; last
  int shared_bytes;  // of a block
  int classes;       // every so many-th row's frame starts as many columns before it

  constexpr int unit_threads() const { return std::max(32, lanes); }
  constexpr int threads() const { return units * unit_threads(); }
  constexpr int unit_rows() const { return lanes < 32 ? 32 / lanes : 1; }  // of a turn
};

// Whether all blocks end at about the same time that have so many turns, and some of them one more.
// If not, what comes after, launched early, crowds on the multiprocessors that are done first:
// [199, 8192] takes 17.6 us, not 16.4.
constexpr bool EndTogether(std::int64_t rounds, std::int64_t extra) {
  return rounds == 0 || extra == 0 || rounds > 8;
}

// Threads of a block, at most, which have so many bytes of a row each.
constexpr int BackwardThreads(int row_bytes) {
  return row_bytes == 48 ? 384 : 512;
}
inline constexpr int kMaxStages = 2;

// Packs of a row that one thread holds: few, or more; framed, whose code takes more registers.
inline constexpr int kFewPacks = 2;
constexpr int MorePacks(int element_bytes) {
  return element_bytes == 2 ? 3 : 4;
}
inline constexpr int kFramedPacks = 3;

// What a thread's pack takes of a ring: 16 bytes, and its part of the line by which a warp's packs
// may start later.
inline constexpr int kRingPackBytes = 16 + kLineBytes / 32;

namespace row_policy {

// Of as many blocks on a multiprocessor: beside what they ask for, CUDA keeps 1 KB, and static
// memory is less than 3.
constexpr std::int64_t SharedBudget(const RowTask& task, int blocks) {
  return task.shared_bytes / blocks - kSparedBytes;
}

// Of so many threads: a sum for each of their elements; and the ring.
constexpr int SumBytes(const RowTask& task, int packs, int threads) {
  return threads * packs * 16 / task.element_bytes * (task.element_bytes == 8 ? 8 : 4);
}
constexpr int RingBytes(const RowTask& task, int packs, int threads, int stages) {
  return stages * task.arrays * packs * kRingPackBytes * threads;
}

// Gives a block so many units and stages, and all shared memory they take. Where several units add
// up column sums, it is two at a time.
inline void Divide(const RowTask& task, int units, int stages, BackwardPlan& plan) {
  plan.units = units;
  plan.stages = stages;
  const int threads = plan.threads(), sums = SumBytes(task, plan.packs, threads);
  plan.ring_bytes = RingBytes(task, plan.packs, threads, stages);
  plan.dx_sum_bytes = task.sums_dx ? sums : 0;
  plan.shared_bytes = plan.ring_bytes + (units > 1 ? 2 * sums : 0) + plan.dx_sum_bytes;
}

// How many units a multiprocessor can run: of one block, or, of clusters, each a block.
inline int UnitsThatFit(const RowTask& task, BackwardPlan plan) {
  const auto fit = [&](int units) {
    Divide(task, plan.cluster > 1 ? 1 : units, 1, plan);
    return plan.shared_bytes <= SharedBudget(task, plan.cluster > 1 ? units : 1);
  };
  int units = BackwardThreads(16 * plan.packs) / plan.unit_threads();
  while (units > 0 && !fit(units)) --units;
  return units;
}

// Which part of a multiprocessor's threads then has work.
inline double PartAtWork(const RowTask& task, const BackwardPlan& plan) {
  const int bytes = plan.unit_rows() * plan.share * task.element_bytes;
  return static_cast<double>(UnitsThatFit(task, plan) * bytes) /
         (BackwardThreads(16 * plan.packs) * 16 * plan.packs);
}

// Which part of a GPC's 16 multiprocessors has clusters of so many; of more than 8, whatever is
// left.
constexpr double PartOfGpc(int cluster) {
  return cluster > 8 ? 1.0 : static_cast<double>(16 / cluster * cluster) / 16;
}

// Divides rows among threads of so many packs; false where no cluster can hold one.
inline bool DivideRows(const RowTask& task, const RowOverride& forced, int packs,
                       BackwardPlan& plan) {
  const int elements = packs * 16 / task.element_bytes;
  plan.packs = packs;
  const bool framed = Framed(task, packs);
  // What a block can hold: in registers, and in shared memory.
  const std::int64_t bytes =
      RingBytes(task, packs, 1, 1) + (task.sums_dx ? SumBytes(task, packs, 1) : 0);
  const int max_warps = BackwardThreads(16 * packs) / 32;
  const int limit = forced.max_threads != 0 ? std::max(32, forced.max_threads) : 32 * max_warps;
  const int threads = static_cast<int>(std::min<std::int64_t>(
      std::min(limit, 32 * max_warps), SharedBudget(task, 1) / bytes / 32 * 32));
  const std::int64_t held = std::int64_t{threads} * elements;
  // Whole lines: else blocks share sectors of memory, which are then read twice. Unless too little
  // were left for the last one.
  const auto share = [&](int cluster) {
    const std::int64_t least = Share(task, cluster, framed);
    const std::int64_t lines = RoundUp(least, kLineBytes / task.element_bytes);
    const std::int64_t rest = task.features - (cluster - 1) * lines;
    return !framed && cluster > 1 && 2 * rest >= lines ? lines : least;
  };
  // The fewest blocks by which enough of a multiprocessor's threads have work. Those of less than
  // three warps are slow: only where there are no others.
  const auto at_work = [&](int cluster) {
    const std::int64_t parts = CeilDiv(share(cluster), elements), warps = CeilDiv(parts, 32);
    if (share(cluster) > held) return 0.0;
    if (cluster > 1 && warps < 3) return 0.01;
    return static_cast<double>(parts * (max_warps / warps)) / (32 * max_warps);
  };
  const double enough = packs == 3 && !framed ? 0.9 : 0.875;
  // More than 8 blocks only where 8 cannot hold the row: not every GPU can run that many.
  plan.cluster = 1;
  for (int cluster = 2; cluster <= MaxCluster(task, forced); ++cluster) {
    if (at_work(plan.cluster) >= (cluster <= 8 ? enough : 0.01)) break;
    if (at_work(cluster) > at_work(plan.cluster)) plan.cluster = cluster;
  }
  const std::int64_t columns = share(plan.cluster);
  if (columns > held) return false;
  plan.share = static_cast<int>(columns);
  plan.division = DivisionOf(task, plan.packs, plan.share);
  plan.lanes = std::max(framed ? 32 : 1, Lanes(CeilDiv(plan.share, elements)));
  return true;
}

// Chooses the packs of a thread, too.
inline bool ChoosePacks(const RowTask& task, const RowOverride& forced, BackwardPlan& plan) {
  const auto divide = [&](int packs) {
    BackwardPlan divided{};
    if (!DivideRows(task, forced, packs, divided)) divided.lanes = 0;
    return divided;
  };
  if (Framed(task, kFewPacks)) {
    const auto framed = [&](int packs, int other) {
      return forced.packs == other ? BackwardPlan{} : divide(packs);
    };
    plan = framed(kFramedPacks, kFewPacks);
    const BackwardPlan few = framed(kFewPacks, kFramedPacks);
    const auto at_work = [&](const BackwardPlan& p) {
      return p.lanes == 0 ? 0.0 : PartAtWork(task, p) * PartOfGpc(p.cluster);
    };
    if (0.95 * at_work(few) > at_work(plan)) plan = few;
    return plan.lanes > 0;
  }
  const auto divide_by = [&](int packs) {
    const bool can = (forced.packs == 0 || forced.packs == packs) && !Framed(task, packs);
    return can ? divide(packs) : BackwardPlan{};
  };
  plan = divide_by(MorePacks(task.element_bytes));
  const BackwardPlan few = divide_by(kFewPacks);
  const auto better = [&] {
    if (few.lanes == 0 || plan.lanes == 0) return few.lanes > 0;
    const double with_few = PartAtWork(task, few);
    // More packs take fewer instructions an element, and, of wider elements, more registers than
    // there are: float32 takes them where else clusters were large or left threads idle, float64
    // where there were no such clusters on every GPU, or where they left multiprocessors idle.
    if (task.element_bytes == 2) return 1.05 * PartAtWork(task, plan) < with_few;
    if (task.element_bytes == 8) return few.cluster <= 8 && PartOfGpc(few.cluster) > 0.8;
    return few.cluster <= 2 || (few.cluster <= 4 && with_few >= 0.9);
  };
  if (better()) plan = few;
  return plan.lanes > 0;
}

// Few rows are spread over all multiprocessors before a block gets several units. How many rows a
// thread has under way follows from how much a multiprocessor then has: with more than it needs,
// some starve others. It needs more where few units wait long for a row's sums, and have no third
// array under way: those of clusters and, of 16-bit elements, those that are alone or framed; and a
// bit more where 16-bit rows have several warps.
inline void SpreadRows(const RowTask& task, const RowOverride& forced, BackwardPlan& plan) {
  const std::int64_t turns = CeilDiv(task.rows, plan.unit_rows());
  const int fit = std::max(1, UnitsThatFit(task, plan));
  const int most = plan.cluster > 1 ? 1 : fit, blocks = plan.cluster > 1 ? fit : 1;
  const int units =
      static_cast<int>(std::clamp<std::int64_t>(CeilDiv(turns, task.multiprocessors), 1, most));
  const bool half = task.element_bytes == 2;
  const bool waits =
      task.arrays == 2 &&
      (plan.cluster > 1 || (half && (most == 1 || plan.division == Division::kFramed)));
  const int needed = waits ? 36 : half && plan.lanes > 32 ? 31 : 28;
  const double under_way =
      PartAtWork(task, plan) * BackwardThreads(16 * plan.packs) * task.arrays * 16 * plan.packs;
  int stages = under_way < needed * 1024 ? 2 : 1;
  if (forced.max_stages != 0) stages = std::min(forced.max_stages, kMaxStages);
  for (; stages > 1; --stages) {
    Divide(task, units, stages, plan);
    if (plan.shared_bytes <= SharedBudget(task, blocks)) return;
  }
  Divide(task, units, 1, plan);
}

}  // namespace row_policy

inline BackwardPlan ChooseBackwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  BackwardPlan plan{};
  plan.stream = forced.stream || !task.aligned || !ChoosePacks(task, forced, plan);
  if (plan.stream) return plan;
  plan.classes =
      static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
  SpreadRows(task, forced, plan);
  return plan;
}

}  // namespace gradops
