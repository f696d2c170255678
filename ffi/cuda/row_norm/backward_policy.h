// Row layout of layer norm's backward kernel on a GPU; see cuda/row_norm/policy.h. Plain C++, no
// CUDA.
//
// The grid is small: a few blocks per multiprocessor loop over all rows. Each thread keeps its
// column sums in registers for the whole loop. Sums of dx are in shared memory. Each unit of
// threads takes row after row. Each thread copies its part of the next rows to its own part of a
// ring in shared memory. When it has read a part, it orders that part of a later row (starts its
// copy). So a multiprocessor has enough bytes under way all the time. A thread waits for other
// threads only in a row's sums (framed: also for its warp).
//
//   Bytes of a thread   Threads of a row                Bytes of a row
//   32                  up to 512 of one block          up to 16 Ki
//   48                  up to 384 of one block          up to 18 Ki
//   64                  up to 512 of one block          up to 32 Ki
//   32, 48 or 64        2 to 16 such blocks (sm_90 on)  up to 16 times as above; else streamed
//
// 16-bit elements and framed rows: 48 bytes, unless 32 bytes put clearly more threads to work.
// Wider elements: 32 bytes, unless these take larger clusters or cannot hold the row; then 64.
// Framed rows have at least 32 lanes, and more than 480 elements (float64: 224); for narrower ones
// see narrow_policy.h. A cluster also shares a row that one block could hold, if that
// block left more than an eighth of a multiprocessor's threads idle. (Not framed, with 48 bytes: a
// tenth.) A multiprocessor has 512 threads, with 48 bytes 384. The blocks of such a cluster have at
// least three warps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/row_norm/policy.h"

namespace gradops {

struct BackwardPlan {
  bool stream;  // Rows are streamed: the other members mean nothing.
  Division division;
  int packs;         // Packs (16-byte vectors) of a row that a thread has.
  int lanes;         // Threads of a row in one block: a power of two up to 32, or full warps.
  int units;         // Units of a block: each has max(32, lanes) threads and rows of its own.
  int cluster;       // Blocks that share a row.
  int share;         // Columns of each block.
  int stages;        // Stages of the ring: rows that a thread has under way.
  int ring_bytes;    // A block's ring. It comes first in shared memory, then column sums.
  int dx_sum_bytes;  // A block's sums of dx, last in shared memory. 0: there are none.
  int shared_bytes;  // All shared memory of a block.
  int classes;       // Rows this far apart start at an equal offset from a 16-byte boundary.

  constexpr int unit_threads() const { return std::max(32, lanes); }
  constexpr int threads() const { return units * unit_threads(); }
  constexpr int unit_rows() const { return lanes < 32 ? 32 / lanes : 1; }  // Per turn.
};

// Whether all blocks end at about the same time, if each has `rounds` turns and `extra` units one
// more. If not, the next kernel must not start early: it would crowd on the multiprocessors that
// are done first. [199, 8192] then takes 17.6 us, not 16.4.
constexpr bool EndTogether(std::int64_t rounds, std::int64_t extra) {
  return rounds == 0 || extra == 0 || rounds > 8;
}

// The most threads of a block if each has `row_bytes` bytes of a row.
constexpr int BackwardThreads(int row_bytes) {
  return row_bytes == 48 ? 384 : 512;
}
inline constexpr int kMaxStages = 2;

// Packs of a row that one thread holds: kFewPacks, or more. The code for framed rows takes more
// registers, so their larger number is kFramedPacks, not MorePacks.
inline constexpr int kFewPacks = 2;
constexpr int MorePacks(int element_bytes) {
  return element_bytes == 2 ? 3 : 4;
}
inline constexpr int kFramedPacks = 3;

// Bytes of a ring for one pack of a thread: 16, and a lane's part of a line. The extra line lets a
// warp's packs start at any offset of a line.
inline constexpr int kRingPackBytes = 16 + kLineBytes / 32;

namespace row_policy {

// Dynamic shared memory of a block if `blocks` of them share a multiprocessor. kSparedBytes covers
// 1 KB that CUDA keeps, and static shared memory of less than 3 KB.
constexpr std::int64_t SharedBudget(const RowTask& task, int blocks) {
  return task.shared_bytes / blocks - kSparedBytes;
}

// SumBytes: for `threads` threads, a sum for each of their elements. RingBytes: their ring.
constexpr int SumBytes(const RowTask& task, int packs, int threads) {
  return threads * packs * 16 / task.element_bytes * (task.element_bytes == 8 ? 8 : 4);
}
constexpr int RingBytes(const RowTask& task, int packs, int threads, int stages) {
  return stages * task.arrays * packs * kRingPackBytes * threads;
}

// Gives a block `units` units and `stages` stages, and computes its shared memory. Several units
// add up their column sums two arrays at a time.
inline void Divide(const RowTask& task, int units, int stages, BackwardPlan& plan) {
  plan.units = units;
  plan.stages = stages;
  const int threads = plan.threads(), sums = SumBytes(task, plan.packs, threads);
  plan.ring_bytes = RingBytes(task, plan.packs, threads, stages);
  plan.dx_sum_bytes = task.sums_dx ? sums : 0;
  plan.shared_bytes = plan.ring_bytes + (units > 1 ? 2 * sums : 0) + plan.dx_sum_bytes;
}

// How many units a multiprocessor can run. They are in one block; of a cluster, each is a block.
inline int UnitsThatFit(const RowTask& task, BackwardPlan plan) {
  const auto fit = [&](int units) {
    Divide(task, plan.cluster > 1 ? 1 : units, 1, plan);
    return plan.shared_bytes <= SharedBudget(task, plan.cluster > 1 ? units : 1);
  };
  int units = BackwardThreads(16 * plan.packs) / plan.unit_threads();
  while (units > 0 && !fit(units)) --units;
  return units;
}

// The fraction of a multiprocessor's threads that then has work.
inline double PartAtWork(const RowTask& task, const BackwardPlan& plan) {
  const int bytes = plan.unit_rows() * plan.share * task.element_bytes;
  return static_cast<double>(UnitsThatFit(task, plan) * bytes) /
         (BackwardThreads(16 * plan.packs) * 16 * plan.packs);
}

// The fraction of a GPC's 16 multiprocessors that clusters of `cluster` blocks can use. It counts
// as 1 for more than 8 blocks, however many multiprocessors are left.
constexpr double PartOfGpc(int cluster) {
  return cluster > 8 ? 1.0 : static_cast<double>(16 / cluster * cluster) / 16;
}

// Divides rows among threads of `packs` packs. Returns false if no cluster can hold a row.
inline bool DivideRows(const RowTask& task, const RowOverride& forced, int packs,
                       BackwardPlan& plan) {
  const int elements = packs * 16 / task.element_bytes;
  plan.packs = packs;
  const bool framed = Framed(task, packs);
  // What a block can hold in registers and in shared memory.
  const std::int64_t bytes =
      RingBytes(task, packs, 1, 1) + (task.sums_dx ? SumBytes(task, packs, 1) : 0);
  const int max_warps = BackwardThreads(16 * packs) / 32;
  const int limit = forced.max_threads != 0 ? std::max(32, forced.max_threads) : 32 * max_warps;
  const int threads = static_cast<int>(std::min<std::int64_t>(
      std::min(limit, 32 * max_warps), SharedBudget(task, 1) / bytes / 32 * 32));
  const std::int64_t held = std::int64_t{threads} * elements;
  // Shares are whole lines: otherwise two blocks read the sectors between them. Exception: the last
  // block would get less than half of such a share.
  const auto share = [&](int cluster) {
    const std::int64_t least = Share(task, cluster, framed);
    const std::int64_t lines = RoundUp(least, kLineBytes / task.element_bytes);
    const std::int64_t rest = task.features - (cluster - 1) * lines;
    return !framed && cluster > 1 && 2 * rest >= lines ? lines : least;
  };
  // The loop below takes the fewest blocks that give enough of a multiprocessor's threads work.
  // Blocks of less than three warps are slow, so they are taken only if no others fit.
  const auto at_work = [&](int cluster) {
    const std::int64_t parts = CeilDiv(share(cluster), elements), warps = CeilDiv(parts, 32);
    if (share(cluster) > held) return 0.0;
    if (cluster > 1 && warps < 3) return 0.01;
    return static_cast<double>(parts * (max_warps / warps)) / (32 * max_warps);
  };
  const double enough = packs == 3 && !framed ? 0.9 : 0.875;
  // More than 8 blocks only if 8 cannot hold the row: not every GPU can run such clusters.
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

// Also chooses how many packs a thread has.
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
    // More packs take fewer instructions per element, but registers do not suffice for wider
    // elements. So float32 takes more packs only if few packs need large clusters or leave threads
    // idle. Float64: only if few packs need over 8 blocks or leave multiprocessors idle.
    if (task.element_bytes == 2) return 1.05 * PartAtWork(task, plan) < with_few;
    if (task.element_bytes == 8) return few.cluster <= 8 && PartOfGpc(few.cluster) > 0.8;
    return few.cluster <= 2 || (few.cluster <= 4 && with_few >= 0.9);
  };
  if (better()) plan = few;
  return plan.lanes > 0;
}

// Few rows are spread over all multiprocessors before a block gets several units. The number of
// stages follows from the bytes that a multiprocessor then has under way. If these are more than
// needed, some multiprocessors starve others. More are needed if few units wait long for a row's
// sums and no third array is under way. This holds for clusters. It also holds for 16-bit elements
// if a unit is alone or framed. 16-bit rows of several warps need a few more bytes.
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
