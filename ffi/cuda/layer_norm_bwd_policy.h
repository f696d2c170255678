// How layer norm's backward kernel has rows laid out on a GPU; see cuda/layer_norm_policy.h. Plain
// C++, no CUDA.
//
// Few blocks stay, as column sums do, in registers (dx's: in shared memory). Each unit of
// threads, which have 16 elements of a row each (8 of float64), takes row after row from its ring
// in shared memory:
//
//   bulk    sm_90 and newer: one thread orders whole rows
//   async   sm_80: each thread orders its own 16 bytes at a time
//
//   features                              threads per row            without clusters
//   (float64: half of it; direct: half of it, up to 4096)
//   up to 512                             1 to 32 lanes; framed: 32  the same
//   up to 8192                            64 to 512 threads          the same
//   up to 131072                          2 to 16 blocks of those    streamed
//
// Below 8192 features, too, a row gets a cluster where one block of it would leave two or more of a
// multiprocessor's 16 warps without work (2561 to 3584 and 4097 to 7168 features; direct: half).
// Wide rows get smaller blocks where rings of large ones leave multiprocessors without a second
// one: with dsum, and with sums of dx, which take shared memory (8192 features: 2 and 4 blocks).
//
// 16-bit elements: threads have 24 of them, in blocks of 384, where of 16 each more of the threads
// would be without work, or a row's cluster larger: 192, 384, 640, 768, 1536, 2304, 3072, 4608 and
// 6144 features, for instance; or where there is no other way to hold the row. Their rings have
// single chunks, so that as many units find room.
//
// Direct: threads have 8 elements of a row each, and load the next one to registers while they work
// on this one, without a ring: float32 that is not framed, of up to 4096 features. So a
// multiprocessor has the 32 KB under way that it takes, and a row's slot in a ring is not idle
// while it is worked on; widths that leave more than a quarter of the threads without work (40,
// 160, 260 features) keep the ring. So do wider rows, which would wait for more blocks (8192: as
// fast, 16384: 5 % slower), 16-bit elements, of which there would be too few for each thread's
// other work, and 64-bit ones, for which registers are too few. But 16-bit rows that are no more
// than units are direct (not from the output), with the same 16 elements a thread as in a ring,
// which would only delay them: by 1.3 us.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cuda/layer_norm_policy.h"

namespace gradops {

enum class RowCopy : int { kAsync = 1, kBulk = 2 };

struct BackwardPlan {
  bool stream;  // none of what follows holds
  Division division;
  bool direct;  // without a ring
  RowCopy copy;
  int packs;         // of 16 bytes, that a thread has of a row
  int lanes;         // threads of a row in one block: a power of two up to 32, or full warps
  int units;         // of a block, each of max(32, lanes) threads with rows of its own
  int cluster;       // blocks that share a row
  int share;         // columns of each of them
  int stages;        // of a ring; direct: 0
  int array_bytes;   // of a unit's rows of one array in one stage; direct: 0
  int dx_sum_bytes;  // of a block: where threads sum dx up; 0: they do not
  int shared_bytes;  // of a block; dx's sums are the last of it
  int blocks;        // of a multiprocessor
  int classes;       // every so many-th row's frame starts as many columns before it

  constexpr int unit_threads() const { return std::max(32, lanes); }
  constexpr int threads() const { return units * unit_threads(); }
  constexpr int unit_rows() const { return lanes < 32 ? 32 / lanes : 1; }  // of a chunk
};

// Threads of a block, at most, which have so many bytes of a row each; and warps of any block.
constexpr int BackwardThreads(int row_bytes) {
  return row_bytes == 48 ? 384 : 512;
}
inline constexpr int kBackwardWarps = 512 / 32;
inline constexpr int kMaxStages = 8;

// Chunks that a unit works on at a time: where elements are small, waiting for one row's sums takes
// longer than its bytes. Framed, registers are short; with 24 elements a thread, a row's bytes are
// more, and rings of single chunks leave room for more units.
constexpr int RowDepth(int element_bytes, bool framed, int packs) {
  return element_bytes == 2 && !framed && packs == 2 ? 2 : 1;
}

// Of which elements rows may be direct: of 16 bits, where they are few.
constexpr bool MayBeDirect(int element_bytes, bool from_output) {
  return element_bytes == 4 || (element_bytes == 2 && !from_output);
}

// Packs of a row that one thread holds: 16 elements, of float64 8; of 16 bits, where that leaves
// fewer threads without work, `more`: 24. Direct: 8 elements, of 16 bits 16.
constexpr int RingPacks(int element_bytes, bool more) {
  return element_bytes == 2 ? 2 + more : 4;
}
inline constexpr int kDirectPacks = 2;

namespace row_policy {

// Of as many blocks on a multiprocessor: beside the ring, CUDA keeps 1 KB, and static memory is
// less than 3.
constexpr std::int64_t RingBudget(const RowTask& task, int blocks) {
  return task.shared_bytes / blocks - 4096;
}

// Of so many threads: a sum for each of their elements.
constexpr int SumBytes(const RowTask& task, int packs, int threads) {
  return threads * packs * 16 / task.element_bytes * (task.element_bytes == 8 ? 8 : 4);
}

// How many units with so many threads and columns a multiprocessor can run: of one block, or, of
// clusters, each a block. A unit's ring has a turn's chunks that are worked on, and as many under
// way. A single unit whose ring has no room for one more counts half: it waits for every turn.
inline double UnitsThatFit(const RowTask& task, const BackwardPlan& plan) {
  const int depth = RowDepth(task.element_bytes, plan.division == Division::kFramed, plan.packs);
  const std::int64_t chunk =
      RoundUp(std::int64_t{plan.unit_rows()} * plan.share * task.element_bytes, 16);
  const std::int64_t sums = task.sums_dx ? SumBytes(task, plan.packs, plan.unit_threads()) : 0;
  const auto fit = [&](int units, int stages) {
    const std::int64_t bytes = plan.direct ? sums : stages * task.arrays * chunk + sums;
    return plan.cluster > 1 ? bytes <= RingBudget(task, units)
                            : units * bytes <= RingBudget(task, 1);
  };
  int units = BackwardThreads(16 * plan.packs) / plan.unit_threads();
  while (units > 0 && !fit(units, 2 * depth)) --units;
  return units == 1 && !fit(1, 2 * depth + 1) ? 0.5 : units;
}

// Which part of a multiprocessor's threads then has work.
inline double PartAtWork(const RowTask& task, const BackwardPlan& plan) {
  const int bytes = plan.unit_rows() * plan.share * task.element_bytes;
  return UnitsThatFit(task, plan) * bytes / (BackwardThreads(16 * plan.packs) * 16 * plan.packs);
}

// Divides rows among threads of so many packs, of which a block has so many at most; false where no
// cluster can hold one, or, direct, had better not.
inline bool DivideRows(const RowTask& task, const RowOverride& forced, int packs, bool direct,
                       int most_threads, BackwardPlan& plan) {
  const int elements = packs * 16 / task.element_bytes;
  plan.direct = direct;
  plan.packs = packs;
  const bool framed = Framed(task, packs);
  const int threads = BackwardThreads(16 * packs), max_warps = threads / 32;
  // What a block can hold: in registers, and in a ring with one turn's chunks of the most arrays
  // there can be and the next one's.
  if (forced.max_threads != 0) most_threads = std::min(most_threads, forced.max_threads);
  std::int64_t held = std::int64_t{std::min(most_threads, threads)} * elements;
  if (!direct) {
    const int depth = RowDepth(task.element_bytes, framed, packs);
    const std::int64_t ring =
        RingBudget(task, 1) - (task.sums_dx ? SumBytes(task, packs, threads) : 0);
    held = std::min(held, ring / (2 * depth * 3) / 16 * 16 / task.element_bytes);
  }
  const auto share = [&](int cluster) { return Share(task, cluster, framed); };
  if (direct && share(1) > held) return false;
  // The fewest blocks that together leave no more than one of a multiprocessor's warps idle.
  const auto warps_in_use = [&](int cluster) {
    const std::int64_t warps = CeilDiv(share(cluster), 32 * elements);
    return share(cluster) > held ? 0 : static_cast<int>(warps * (max_warps / warps));
  };
  // More than 8 blocks only where 8 cannot hold the row: not every GPU can run that many.
  plan.cluster = 1;
  for (int cluster = 2; cluster <= MaxCluster(task, forced); ++cluster) {
    if (warps_in_use(plan.cluster) >= (cluster <= 8 ? max_warps - 1 : 1)) break;
    if (warps_in_use(cluster) > warps_in_use(plan.cluster)) plan.cluster = cluster;
  }
  const std::int64_t columns = share(plan.cluster);
  if (columns > held) return false;
  plan.share = static_cast<int>(columns);
  plan.division = DivisionOf(task, plan.packs, plan.share);
  plan.lanes = std::max(framed ? 32 : 1, Lanes(CeilDiv(plan.share, elements)));
  if (!direct) return true;
  // Threads without work have nothing under way, of which a multiprocessor needs three quarters.
  const bool enough = PartAtWork(task, plan) >= 0.75;
  return !framed && (enough || Framed(task, RingPacks(task.element_bytes, false)));
}

// For a ring. Wide rows get smaller blocks where the rings of large ones would not fit beside each
// other; and threads more packs where with fewer many of them would be without work.
inline bool DivideRingRows(const RowTask& task, const RowOverride& forced, BackwardPlan& plan) {
  const int few = RingPacks(task.element_bytes, false), many = RingPacks(task.element_bytes, true);
  const auto divide = [&](int packs, int most_threads) {
    BackwardPlan divided{};
    const bool can = forced.packs == 0 || forced.packs == packs;
    if (!can || !DivideRows(task, forced, packs, /*direct=*/false, most_threads, divided)) {
      divided.lanes = 0;
    }
    return divided;
  };
  const auto part = [&](const BackwardPlan& divided) {
    return divided.lanes == 0 ? 0.0 : PartAtWork(task, divided);
  };
  plan = divide(few, kBackwardWarps * 32);
  for (const int threads : {256, 128}) {
    if (plan.lanes < 256) break;
    const BackwardPlan smaller = divide(few, threads);
    if (smaller.cluster <= 8 && part(smaller) > part(plan)) plan = smaller;
  }
  if (many != few && !Framed(task, few)) {
    const BackwardPlan wide = divide(many, kBackwardWarps * 32);
    const bool several = part(wide) > 0 && UnitsThatFit(task, wide) > 1;
    const bool more = part(wide) >= 1.05 * part(plan) ||
                      (part(wide) >= part(plan) && wide.cluster < plan.cluster);
    const bool better = wide.cluster <= 2 && (plan.lanes == 0 || (several && more));
    if (wide.lanes > 0 && wide.division != Division::kFramed && (better || forced.packs == many)) {
      plan = wide;
    }
  }
  return plan.lanes > 0;
}

// Whether there are no more rows than units, which a ring only delays, and a thread has the same
// part of one without it: a row's result does not depend on how many others there are. From the
// output that is not so to the last bit: there the compiler fuses other products and sums.
inline bool FewRows(const RowTask& task, const BackwardPlan& plan) {
  const std::int64_t units =
      task.multiprocessors * std::int64_t{BackwardThreads(16 * plan.packs) / plan.unit_threads()};
  return task.element_bytes == 2 && !task.from_output && plan.packs == kDirectPacks &&
         plan.cluster == 1 && plan.division != Division::kFramed &&
         CeilDiv(task.rows, plan.unit_rows()) <= units;
}

// Units of a block, and blocks of a multiprocessor. Few rows are spread over all multiprocessors
// before a block gets several of them. Blocks of clusters are small, so that one can work while
// another waits for its cluster.
inline void SpreadRows(const RowTask& task, BackwardPlan& plan) {
  const std::int64_t chunks = CeilDiv(task.rows, plan.unit_rows());
  const int most_units = std::max(1, BackwardThreads(16 * plan.packs) / plan.unit_threads());
  plan.units = plan.cluster > 1 ? 1
                                : static_cast<int>(std::clamp<std::int64_t>(
                                      CeilDiv(chunks, task.multiprocessors), 1, most_units));
  plan.blocks = plan.cluster > 1 ? most_units : 1;
}

// Where several units add up column sums, two at a time.
constexpr int UnitSumBytes(const RowTask& task, const BackwardPlan& plan) {
  return plan.units == 1 ? 0 : 2 * SumBytes(task, plan.packs, plan.threads());
}
constexpr int DxSumBytes(const RowTask& task, const BackwardPlan& plan) {
  return task.sums_dx ? SumBytes(task, plan.packs, plan.threads()) : 0;
}

// The ring, for which there may have to be fewer units and blocks.
inline void DivideRing(const RowTask& task, const RowOverride& forced, BackwardPlan& plan) {
  const int depth = RowDepth(task.element_bytes, plan.division == Division::kFramed, plan.packs);
  const auto budget = [&](int blocks) { return RingBudget(task, blocks) - DxSumBytes(task, plan); };
  plan.array_bytes = static_cast<int>(
      RoundUp(std::int64_t{plan.unit_rows()} * plan.share * task.element_bytes, 16));
  const auto stage_bytes = [&] {
    return std::int64_t{plan.units} * task.arrays * plan.array_bytes;
  };
  const auto too_many = [&] {
    return std::max<std::int64_t>(2 * depth * stage_bytes(), UnitSumBytes(task, plan)) > budget(1);
  };
  while (plan.units > 1 && too_many()) --plan.units;
  while (plan.blocks > 1 && 2 * depth * stage_bytes() > budget(plan.blocks)) --plan.blocks;
  // One turn's chunks are worked on, and more are under way. Chunks are read twice; where few units
  // can work while another one waits, more have to be under way.
  std::int64_t wanted = 2 * depth + (plan.units == 1 ? 2 : plan.units == 2 || depth == 1 ? 1 : 0);
  if (forced.max_stages != 0) wanted = forced.max_stages;
  plan.stages = static_cast<int>(std::max<std::int64_t>(
      2 * depth,
      std::min({wanted, budget(plan.blocks) / stage_bytes(), std::int64_t{kMaxStages}})));
  // Column sums are added up in the ring's memory.
  plan.shared_bytes = static_cast<int>(
      std::max<std::int64_t>(plan.stages * stage_bytes(), UnitSumBytes(task, plan)));
}

}  // namespace row_policy

inline BackwardPlan ChooseBackwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  BackwardPlan plan{};
  const int architecture = forced.architecture != 0 ? forced.architecture : task.architecture;
  const bool may_be_direct = task.element_bytes == 4 && !forced.ring;
  plan.stream = forced.stream || !task.aligned ||
                !((may_be_direct && DivideRows(task, forced, kDirectPacks, true, 512, plan)) ||
                  DivideRingRows(task, forced, plan));
  if (plan.stream) return plan;
  if (!forced.ring && FewRows(task, plan)) plan.direct = true;
  plan.copy = architecture >= 90 ? RowCopy::kBulk : RowCopy::kAsync;
  plan.classes =
      static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
  SpreadRows(task, plan);
  if (plan.direct) {
    plan.shared_bytes = UnitSumBytes(task, plan);
  } else {
    DivideRing(task, forced, plan);
  }
  plan.dx_sum_bytes = DxSumBytes(task, plan);
  plan.shared_bytes += plan.dx_sum_bytes;
  return plan;
}

}  // namespace gradops
