// How layer norm's rows are laid out on a GPU: the two tables that decide it. Plain C++, no CUDA.
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
//   up to 32 Ki (less than 8 Ki)                   64                   64 to 512 (64 to 128)
//   up to 128 Ki (64 Ki)                           128                  up to 1024 (64 to 512)
//   up to 16 times that, from sm_90 on             128                  2 to 16 blocks of those
//   start anywhere: up to 40 Ki (24 Ki)            64                   1 to 640 (384)
//   up to 16 times that, from sm_90 on             64                   2 to 16 blocks of those
//
// Backward: few blocks stay, as column sums do, in registers (dx's: in shared memory). Each unit of
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
// would be without work, or a row's cluster larger (multiples of 192 up to 768, 1536, 2304, 3072,
// 4608, 6144 features; 320, 640).
//
// Direct: threads have 8 elements of a row each, and load the next one to registers while they work
// on this one, without a ring: float32 that is not framed, of up to 4096 features. So a
// multiprocessor has the 32 KB under way that it takes, and a row's slot in a ring is not idle
// while it is worked on; widths that leave more than a quarter of the threads without work (40,
// 160, 260 features) keep the ring. So do wider rows, which would wait for more blocks (8192: as
// fast, 16384: 5 % slower), 16-bit elements, of which there would be too few for each thread's
// other work, and 64-bit ones, for which registers are too few.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>

namespace gradops {

enum class RowCopy : int { kAsync = 1, kBulk = 2 };

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
  int max_stages = 0;
  bool stream = false;
  bool ring = false;  // backward: nothing is direct
  int packs = 0;      // of a thread in a ring, backward: as many, or streamed
};

inline constexpr int kMaxCluster = 16;

namespace row_policy {

constexpr std::int64_t DivideUp(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) {
  return DivideUp(a, b) * b;
}

// What becomes of rows, shared by so many blocks, whose threads have so many packs each.
constexpr Division DivisionOf(const RowTask& task, int packs, std::int64_t share) {
  const std::int64_t bytes = task.features * task.element_bytes, row = bytes / 16;
  if (!task.aligned_params || bytes == 0 || bytes % 16 != 0 ||
      (packs - 1) * DivideUp(row, packs) > row) {
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
  return RoundUp(DivideUp(columns, cluster), pack);
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

// --- Forward ------------------------------------------------------------------------------------

struct ForwardPlan {
  bool stream;  // none of what follows holds
  Division division;
  int packs;                 // of 16 bytes, that a thread has of a row
  int lanes;                 // threads of a row in one block
  int cluster;               // blocks that share a row
  int share;                 // columns of each of them
  bool full;                 // all threads have as many packs, and all of these
  int teams;                 // of a block, each with a row at a time
  int rounds;                // rows that a team works on, one after the other
  int step;                  // from one of them to the next: a power of two, not less than teams
  int log_step, log_blocks;  // log2 of it, and of the number of blocks that have a step's rows
  int shared_bytes;          // of a block, for the parameters of framed rows

  constexpr int threads() const { return teams * lanes; }
};

inline constexpr int kForwardThreads = 1024;  // of a block, at most
// The same for framed rows, whose threads take more registers; and for their parameters, in as much
// shared memory as a block has on any GPU since sm_80.
inline constexpr int kFramedThreads = 640;
inline constexpr int kFramedBytes = 96 * 1024;
constexpr int FramedThreads(int element_bytes) {
  return std::min(kFramedThreads, kFramedBytes / (element_bytes == 2 ? 256 : 128));
}
inline constexpr int kForwardWarps = kForwardThreads / 32;
inline constexpr int kMaxRounds = 8;

inline ForwardPlan ChooseForwardPlan(const RowTask& task, const RowOverride& forced = {}) {
  using namespace row_policy;
  ForwardPlan plan{};
  const int limit = forced.max_threads != 0 ? std::clamp(forced.max_threads, 32, kForwardThreads)
                                            : kForwardThreads;
  const int few = std::min(limit, 512), pack = 16 / task.element_bytes;
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
    plan.lanes = Lanes(DivideUp(share, pack * packs));
    plan.full = even && !framed && last == share && share == plan.lanes * packs * pack;
    // Whether threads lack no more than their last packs.
    const auto enough = [&](std::int64_t columns) {
      const std::int64_t all = DivideUp(columns, pack), owners = DivideUp(all, packs);
      return all > 0 && (packs - 1) * owners <= all;
    };
    return framed || (enough(share) && enough(last));
  };
  const bool whole_packs = task.aligned_params && task.features > 0 && task.features % pack == 0;
  // Of 16-bit elements, fewer threads have as much to do.
  const bool half = task.element_bytes == 2;
  const auto fits = [&](bool framed) {
    for (int cluster = 1; cluster <= MaxCluster(task, forced); ++cluster) {
      if (framed) {
        const int threads = std::min(limit, FramedThreads(task.element_bytes));
        if (holds(true, cluster, 4, threads)) return true;
        continue;
      }
      if (cluster == 1 && !(half && task.features >= 4096) && holds(false, 1, 4, few)) return true;
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

// --- Backward -----------------------------------------------------------------------------------

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
// longer than its bytes.
constexpr int RowDepth(int element_bytes, bool framed) {
  return element_bytes == 2 && !framed ? 2 : 1;  // framed, registers are short
}

// Of which elements rows may be direct.
constexpr bool MayBeDirect(int element_bytes) {
  return element_bytes == 4;
}

// Packs of a row that one thread holds: 16 elements, of float64 8; of 16 bits, where that leaves
// fewer threads without work, `more`: 24. Direct: 8 elements.
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

constexpr int MaxThreads(const RowOverride& forced, int packs) {
  const int most = BackwardThreads(16 * packs);
  return forced.max_threads != 0 ? std::min(forced.max_threads, most) : most;
}

// Of so many threads: a sum for each of their elements.
constexpr int SumBytes(const RowTask& task, int packs, int threads) {
  return threads * packs * 16 / task.element_bytes * (task.element_bytes == 8 ? 8 : 4);
}

// How many units with so many threads and columns a multiprocessor can run: of one block, or, of
// clusters, each a block. A unit's ring has a turn's chunks that are worked on, and as many under
// way. A single unit whose ring has no room for one more counts half: it waits for every turn.
inline double UnitsThatFit(const RowTask& task, const BackwardPlan& plan) {
  const int depth = RowDepth(task.element_bytes, plan.division == Division::kFramed);
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
    const int depth = RowDepth(task.element_bytes, framed);
    const std::int64_t ring =
        RingBudget(task, 1) - (task.sums_dx ? SumBytes(task, packs, threads) : 0);
    held = std::min(held, (ring / (2 * depth * 3) - 32) / task.element_bytes);
  }
  const auto share = [&](int cluster) { return Share(task, cluster, framed); };
  if (direct && share(1) > held) return false;
  // The fewest blocks that together leave no more than one of a multiprocessor's warps idle.
  const auto warps_in_use = [&](int cluster) {
    const std::int64_t warps = DivideUp(share(cluster), 32 * elements);
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
  plan.lanes = std::max(framed ? 32 : 1, Lanes(DivideUp(plan.share, elements)));
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
    // Sums of dx cost threads of more packs more; but it counts that a row needs no second warp.
    const double gain = task.sums_dx && plan.lanes <= 32 ? 1.2 : 1.05;
    const bool better = part(wide) > 0 && UnitsThatFit(task, wide) > 1 &&
                        (part(wide) >= gain * part(plan) ||
                         (part(wide) >= part(plan) && wide.cluster < plan.cluster));
    if (wide.lanes > 0 && wide.division != Division::kFramed && (better || forced.packs == many)) {
      plan = wide;
    }
  }
  return plan.lanes > 0;
}

// Units of a block, and blocks of a multiprocessor. Few rows are spread over all multiprocessors
// before a block gets several of them. Blocks of clusters are small, so that one can work while
// another waits for its cluster.
inline void SpreadRows(const RowTask& task, BackwardPlan& plan) {
  const std::int64_t chunks = DivideUp(task.rows, plan.unit_rows());
  const int most_units = std::max(1, BackwardThreads(16 * plan.packs) / plan.unit_threads());
  plan.units = plan.cluster > 1 ? 1
                                : static_cast<int>(std::clamp<std::int64_t>(
                                      DivideUp(chunks, task.multiprocessors), 1, most_units));
  plan.blocks = plan.cluster > 1 ? most_units : 1;
}

// Where units add up column sums, two at a time.
constexpr int UnitSumBytes(const RowTask& task, const BackwardPlan& plan) {
  return 2 * SumBytes(task, plan.packs, plan.threads());
}
constexpr int DxSumBytes(const RowTask& task, const BackwardPlan& plan) {
  return task.sums_dx ? SumBytes(task, plan.packs, plan.threads()) : 0;
}

// The ring, for which there may have to be fewer units and blocks.
inline void DivideRing(const RowTask& task, const RowOverride& forced, BackwardPlan& plan) {
  const int depth = RowDepth(task.element_bytes, plan.division == Division::kFramed);
  const auto budget = [&](int blocks) { return RingBudget(task, blocks) - DxSumBytes(task, plan); };
  plan.array_bytes = static_cast<int>(
      RoundUp(std::int64_t{plan.unit_rows()} * plan.share * task.element_bytes, 16));
  const auto stage_bytes = [&] {
    return std::int64_t{plan.units} * task.arrays * plan.array_bytes;
  };
  while (plan.units > 1 && 2 * depth * stage_bytes() > budget(1)) --plan.units;
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
  const bool may_be_direct = MayBeDirect(task.element_bytes) && !forced.ring;
  plan.stream = forced.stream || !task.aligned ||
                !((may_be_direct && DivideRows(task, forced, kDirectPacks, true, 512, plan)) ||
                  DivideRingRows(task, forced, plan));
  if (plan.stream) return plan;
  plan.copy = architecture >= 90 ? RowCopy::kBulk : RowCopy::kAsync;
  plan.classes =
      static_cast<int>(16 / std::gcd<std::int64_t>(16, task.features * task.element_bytes));
  SpreadRows(task, plan);
  if (plan.direct) {
    plan.shared_bytes = plan.units > 1 ? UnitSumBytes(task, plan) : 0;
  } else {
    DivideRing(task, forced, plan);
  }
  plan.dx_sum_bytes = DxSumBytes(task, plan);
  plan.shared_bytes += plan.dx_sum_bytes;
  return plan;
}

}  // namespace gradops
