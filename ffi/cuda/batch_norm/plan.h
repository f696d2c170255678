// How batch norm's elements are divided among the threads of a GPU, and the rule that chooses it.
// Plain C++, no CUDA. README.md has the words and pictures. x is [groups, rows, channels, inner].
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/description.h"
#include "common/integers.h"
#include "cuda/common/cache_line.h"

namespace gradops {

inline constexpr int kChannelThreads = 512;  // threads of a block

// --- The task ------------------------------------------------------------------------------------

// What the kernel of a direction needs. All numbers are counts.
struct ChannelNeeds {
  int arrays;            // Arrays that stay in shared memory from the first pass for the second.
  int chunk_steps;       // Steps of a chunk: copies are this many steps ahead.
  int long_chunk_steps;  // Steps of a chunk if many threads have no vector.
  int parameters;        // Numbers of a channel in the second pass.
  int origins;           // Numbers of a channel in the first pass.
  int partial_numbers;   // Numbers of a channel in a partial result.
};
inline constexpr ChannelNeeds kForwardNeeds{1, 4, 6, 3, 1, 4};
inline constexpr ChannelNeeds kBackwardNeeds{2, 3, 3, 6, 0, 2};

// The GPU. Tests pass devices that differ from the current one.
struct ChannelDevice {
  int multiprocessors;
  std::int64_t shared_bytes;  // Shared memory of a multiprocessor.
  std::int64_t l2_bytes;
  bool clusters;                  // The GPU can run a tile's blocks as a cluster.
  bool prefers_separate = false;  // A separate kernel computes y wherever that is possible.
};

// What the choice depends on.
struct ChannelTask {
  ChannelDevice device;
  bool backward;
  std::int64_t groups, rows, channels, inner;  // of x
  int element_bytes;
  int accum_bytes;            // Bytes of the accumulation type.
  bool aligned;               // All arrays start at 16-byte boundaries.
  bool statistics;            // There is a first pass, which adds up.
  bool apply;                 // There is a second pass in this kernel.
  int transient_arrays;       // Arrays that are copied ahead, but do not stay.
  std::int64_t partial_rows;  // Partial rows in the workspace.
  bool separate = false;      // ChooseBatchNormPlan: another kernel makes the second pass.
  std::int64_t bundle = 1;    // Channels of a bundle.

  constexpr const ChannelNeeds& needs() const { return backward ? kBackwardNeeds : kForwardNeeds; }
  constexpr std::int64_t elements() const { return groups * rows * channels * inner; }
};

// --- The plan ------------------------------------------------------------------------------------

// The distance between a thread's vectors in two steps: in vectors of a row, in elements of x.
struct VectorDistance {
  std::int64_t vectors, elements;
};

// A thread's vector in one step. `vector` is its number in the row; -1: the thread has none. `at`
// is the index in x where the vector would start if its row started with a vector.
struct VectorPlace {
  std::int64_t vector, at;
};

// A block's steps of a tile: `count` steps from `first` on, at distances of tile_blocks.
struct ChannelPart {
  std::int64_t tile, first, count;
  std::int64_t later_steps;  // Steps of the block's later parts.
  int first_chunk;           // The part's first chunk, in the numbers of all chunks of the block.
  std::int64_t group;        // The tile's group.
  std::int64_t channel;      // The tile's first channel.
  std::int64_t element;      // The index in x where the tile starts.
  int channels;              // Channels of the tile.
};

// All steps of a block. Interleaved: `start` is the block's first step in each of its tiles.
// Contiguous: the steps [start, stop), counted through all tiles.
struct BlockSteps {
  std::int64_t start, stop, first_tile;
  int parts;
};

// Items are dealt to takers in turn: taker i gets items i, i + takers, and so on, Of(i) in all.
struct EvenSplit {
  std::int64_t least, rest;
  constexpr std::int64_t Of(std::int64_t i) const { return least + (i < rest ? 1 : 0); }
};

// A vector at `start` whose elements [first, last) are the tile's.
struct EdgeVector {
  std::int64_t start;
  int first, last;
  constexpr bool has(int j) const { return first <= j && j < last; }
};

struct ChannelPlan {
  bool plane;
  bool unaligned;              // Planes: rows start and end within vectors.
  bool ragged;                 // Columns: x ends within a row of the matrix.
  int width;                   // Elements of a vector.
  int row_threads, step_rows;  // Columns: vectors of a tile in a row, rows of a step.
  std::int64_t channels, inner;
  std::int64_t bundle;         // Channels of a bundle.
  std::int64_t fold;           // Columns: rows of x in a row of the matrix.
  std::int64_t tile_channels;  // Channels of a tile. A group's last tile may have fewer.
  std::int64_t tiles;          // Tiles of a group.
  std::int64_t all_tiles;      // Tiles of all groups.
  std::int64_t rows;           // Rows of a tile. With fold, the last row may be incomplete.
  std::int64_t row_elements;   // Distance from one row to the next in x.
  std::int64_t row_vectors;    // Planes: vectors of a row.
  std::int64_t group_rows;     // Rows of x in a group.
  std::int64_t group_elements;
  std::int64_t steps;                          // Steps of a tile.
  std::int64_t whole_steps;                    // First steps without edge vectors.
  std::int64_t grain_steps, grains;            // Steps of a grain, grains of a tile.
  std::int64_t tile_blocks, concurrent_tiles;  // Contiguous: 1 and 0.
  EvenSplit step_split, whole_step_split;      // Interleaved: a tile's steps and whole_steps.
  EvenSplit tile_split;                        // Interleaved: all tiles.
  VectorDistance to_next, to_previous;         // To a thread's vector in the block's other steps.
  int blocks;
  int warp_rows;  // Columns: rows of a step in a warp, which adds these up with shuffles.
  // Columns: distance between a thread's neighbouring columns in the block's sums. The padding puts
  // neighbouring columns into different banks.
  int sums_pitch;
  int row_pitch;               // Columns: vectors from one row of a step to the next in a stage.
  int array_stage_bytes;       // One array's part of a stage.
  std::uint32_t unknown_zero;  // 0, but the compiler of a kernel cannot know that.
  double inverse_elements;     // 1 / (elements of a bundle).
  bool first_pass;
  bool combines_locally;            // Each block combines the partial results of its tiles itself.
  bool clustered;                   // A tile's blocks are a cluster.
  int channel_bits, channel_pitch;  // Where SharedIndex puts a channel's numbers.
  int cached_steps;  // A block's last steps that stay in the L2 cache. 0: copies have no hints.
  int chunk_steps;
  int part_chunks;  // Chunks of a part that is a whole tile.
  int kept_chunks;  // First chunks of a block that stay for the second pass.
  // Dynamic chunks of a tile, and how many of them are given to each block. 0: there are none.
  int dynamic_chunks, static_chunks;
  // Offsets in shared memory, in bytes.
  int origins_offset;
  int transient_offset;  // The stages of the transient array.
  int scratch_bytes;     // The stages of the other arrays.
  int shared_bytes;      // The end.

  // This plan, with some of it known to the compiler: the way to cut tiles, the width of vectors,
  // and whether a bundle may have several channels.
  template <bool kPlane, int W, bool kGrouped>
  constexpr ChannelPlan As() const {
    ChannelPlan known = *this;
    known.plane = kPlane, known.width = W;
    if (!kGrouped) known.bundle = 1;
    if (!kPlane || W == 1) known.unaligned = false;
    if (kPlane || W == 1) known.ragged = false;
    return known;
  }

  // A thread's vector in a step, and the thread's vector at a distance from it.
  constexpr VectorPlace PlaceOf(const ChannelPart& part, std::int64_t step, int thread) const {
    if (plane) {
      const std::int64_t i = step * kChannelThreads + thread;
      return PlaceOfVector(part, i / row_vectors, i % row_vectors);
    }
    const int vector = thread % row_threads, of_step = thread / row_threads;
    const bool idle = of_step >= step_rows || vector * width >= part.channels * inner * fold;
    const std::int64_t row = step * step_rows + of_step;
    return {idle ? -1 : vector, part.element + row * row_elements + vector * width};
  }

  constexpr void Move(VectorPlace& place, const VectorDistance& distance) const {
    place.at += distance.elements;
    if (!plane) return;
    place.vector += distance.vectors;
    if (place.vector >= row_vectors) {
      place.vector -= row_vectors;
      place.at += row_elements - row_vectors * width;
    }
  }

  // The index after the tile's last element; columns: after the group's last element.
  constexpr std::int64_t Limit(const ChannelPart& part) const {
    return plane ? part.element + (rows - 1) * row_elements + inner
                 : (part.group + 1) * group_elements;
  }

  constexpr std::int64_t Start(const VectorPlace& place) const {
    return unaligned ? place.at & -std::int64_t{width} : place.at;
  }

  // Whether all of the vector is the tile's. Steps after the tile's last one are allowed.
  constexpr bool Whole(const VectorPlace& place, std::int64_t limit) const {
    if (Start(place) + width > limit) return false;
    if (!plane) return place.vector >= 0;
    if (!unaligned) return true;
    const int before = static_cast<int>(place.at & (width - 1));
    return (place.vector > 0 || before == 0) && inner - place.vector * width + before >= width;
  }

  // The number, in the tile, of the part's i-th step.
  constexpr std::int64_t StepOf(const ChannelPart& part, std::int64_t i) const {
    return part.first + i * tile_blocks;
  }
  constexpr std::int64_t LastStep(const ChannelPart& part) const {
    return StepOf(part, part.count - 1);
  }
  // How many first steps of the part have no edge vector.
  constexpr int WholeSteps(const ChannelPart& part) const {
    if (tile_blocks > 1) return static_cast<int>(whole_step_split.Of(part.first));
    return Clamp(whole_steps - part.first, part.count);
  }
  // How many first steps of the part the L2 cache should evict first.
  constexpr int EvictFirstSteps(const ChannelPart& part) const {
    return cached_steps == 0 ? 0 : Clamp(part.count + part.later_steps - cached_steps, part.count);
  }
  // Columns: elements of each channel in the part.
  constexpr std::int64_t ChannelElements(const ChannelPart& part) const {
    const std::int64_t step_elements = step_rows * fold;
    const std::int64_t beyond = (LastStep(part) + 1) * step_elements - group_rows;
    return (part.count * step_elements - (beyond > 0 ? beyond : 0)) * inner;
  }

  // The index in x of the k-th of three sample elements of a channel, from the part's first steps.
  constexpr std::int64_t Sample(const ChannelPart& part, int channel, int k) const {
    const std::int64_t step = StepOf(part, k < part.count ? k : part.count - 1);
    std::int64_t row = step * step_rows, i = (inner - 1) * k / 2;
    if (plane) {
      row = step * kChannelThreads / row_vectors;
      i = step * kChannelThreads % row_vectors * width;
      i = i < inner ? i : inner - 1;
    }
    return part.element + row * row_elements + channel * inner + i;
  }

  // The bundle of a channel, in the numbers of a group's bundles.
  constexpr std::int64_t BundleOf(std::int64_t channel) const {
    return bundle == 1 ? channel : channel / bundle;
  }

  // How many times all threads have to call EdgeVectorOf.
  constexpr std::int64_t EdgeIterations(const ChannelPart& part) const {
    if (plane && unaligned) {
      return (3 * (EndRow(part) - FirstRow(part)) + kChannelThreads - 1) / kChannelThreads;
    }
    return !plane && ragged && LastStep(part) + 1 == steps ? 1 : 0;
  }

  // An edge vector, or an empty one. Columns: one of the thread's own vectors.
  constexpr EdgeVector EdgeVectorOf(const ChannelPart& part, std::int64_t iteration,
                                    int thread) const {
    if (!plane) {
      const VectorPlace place = PlaceOf(part, LastStep(part), thread);
      const std::int64_t left = Limit(part) - place.at;
      if (place.vector < 0 || left <= 0 || left >= width) return {0, 0, 0};
      return {place.at, 0, static_cast<int>(left)};
    }
    // A row's first vector, and its last two.
    const std::int64_t i = iteration * kChannelThreads + thread, row = FirstRow(part) + i / 3;
    if (row >= EndRow(part)) return {0, 0, 0};
    const std::int64_t vector = i % 3 == 0 ? 0 : row_vectors - i % 3;
    const std::int64_t step = (row * row_vectors + vector) / kChannelThreads - part.first;
    if (step < 0 || step >= part.count * tile_blocks || step % tile_blocks != 0) return {0, 0, 0};
    const VectorPlace place = PlaceOfVector(part, row, vector);
    if (Whole(place, Limit(part))) return {0, 0, 0};
    const int before = static_cast<int>(place.at & (width - 1));
    const std::int64_t left = inner - vector * width + before;
    if (left <= 0) return {0, 0, 0};
    return {Start(place), vector == 0 ? before : 0, static_cast<int>(left < width ? left : width)};
  }

  // Columns: how many columns a channel has, and the number of its i-th column in the tile. With
  // fold, there is only one tile.
  constexpr int ChannelColumns() const { return static_cast<int>(fold * inner); }
  constexpr int ColumnOf(int channel, int i, int of_tile) const {
    const int n = static_cast<int>(inner);
    if (fold == 1) return channel * n + i;
    return (i / n * of_tile + channel) * n + i % n;
  }

  // Where a channel's numbers are in shared memory. Channels last, the j-th channels of
  // neighbouring vectors have neighbouring places: neighbouring threads read different banks.
  constexpr int SharedIndex(int channel) const {
    const int in_vector = channel & ((1 << channel_bits) - 1);
    return in_vector * channel_pitch + (channel >> channel_bits);
  }
  constexpr int shared_channels() const { return channel_pitch << channel_bits; }

  // The place of a thread's vector in a stage, in vectors. If there is room, rows start as far into
  // a line of 128 bytes as the tile's first row does in global memory.
  constexpr int StagePlace(const ChannelPart& part, int thread) const {
    if (row_pitch == row_threads) return thread;
    const int skew = static_cast<int>(part.element / width % kLineVectors);
    return thread / row_threads * row_pitch + thread % row_threads + skew;
  }

  constexpr bool interleaved() const { return concurrent_tiles > 0; }
  // Whether blocks need each other's partial results; whether a tile's blocks may be a cluster.
  constexpr bool needs_barrier() const {
    return first_pass && (!combines_locally || tile_blocks > 1);
  }
  constexpr bool fits_cluster() const {
    constexpr int kMaxCluster = 8;  // blocks; every GPU with clusters allows this size
    return combines_locally && 1 < tile_blocks && tile_blocks <= kMaxCluster;
  }
  // Whether a block has at most one tile. Then shared memory has all channel numbers that the
  // second pass needs.
  constexpr bool has_one_tile() const { return combines_locally && concurrent_tiles == all_tiles; }

  constexpr BlockSteps StepsOfBlock(int block) const {
    if (interleaved()) [[likely]] {
      const int tile = tile_blocks > 1 ? block / static_cast<int>(tile_blocks) : block;
      return {block - tile * tile_blocks, 0, tile, static_cast<int>(tile_split.Of(tile))};
    }
    const std::int64_t start = FirstStep(block), stop = FirstStep(block + 1);
    const std::int64_t first_tile = start / steps;
    return {start, stop, first_tile,
            start == stop ? 0 : static_cast<int>((stop - 1) / steps - first_tile) + 1};
  }
  constexpr ChannelPart PartOf(const BlockSteps& block, int i) const {
    ChannelPart part{};
    if (interleaved()) [[likely]] {
      part.tile = block.first_tile + i * concurrent_tiles, part.first_chunk = i * part_chunks;
      part.first = block.start, part.count = step_split.Of(block.start);
      part.later_steps = (block.parts - 1 - i) * part.count;
    } else {
      part.tile = block.first_tile + i;
      const std::int64_t tile_start = part.tile * steps;
      part.first = block.start > tile_start ? block.start - tile_start : 0;
      part.count = (block.stop - tile_start < steps ? block.stop - tile_start : steps) - part.first;
      part.later_steps = block.stop - tile_start - part.first - part.count;
      const std::int64_t of_first = (block.first_tile + 1) * steps - block.start;
      const auto chunks = static_cast<int>((of_first + chunk_steps - 1) / chunk_steps);
      part.first_chunk = i == 0 ? 0 : chunks + (i - 1) * part_chunks;
    }
    if (tiles != all_tiles) [[unlikely]]
      part.group = part.tile / tiles;
    part.channel = (part.tile - part.group * tiles) * tile_channels;
    part.element = part.group * group_elements + part.channel * inner;
    const std::int64_t left = channels - part.channel;
    part.channels = static_cast<int>(left < tile_channels ? left : tile_channels);
    return part;
  }

  // How many blocks have steps of a tile, and a block's number among these.
  constexpr int BlocksOf(std::int64_t group, std::int64_t channel) const {
    if (interleaved()) [[likely]]
      return static_cast<int>(tile_blocks);
    const std::int64_t tile = group * tiles + channel / tile_channels;
    return BlockOfGrain((tile + 1) * grains - 1) - BlockOfGrain(tile * grains) + 1;
  }
  constexpr std::int64_t NumberOf(const ChannelPart& part, int block) const {
    if (interleaved()) [[likely]]
      return part.first;
    return block - BlockOfGrain(part.tile * grains);
  }

 private:
  constexpr static int Clamp(std::int64_t steps, std::int64_t most) {
    return static_cast<int>(steps < 0 ? 0 : steps < most ? steps : most);
  }
  constexpr VectorPlace PlaceOfVector(const ChannelPart& part, std::int64_t row,
                                      std::int64_t vector) const {
    return {vector, part.element + row * row_elements + vector * width};
  }
  // Planes: the rows [FirstRow, EndRow) with vectors in the part.
  constexpr std::int64_t FirstRow(const ChannelPart& part) const {
    return part.first * kChannelThreads / row_vectors;
  }
  constexpr std::int64_t EndRow(const ChannelPart& part) const {
    const std::int64_t row = ((LastStep(part) + 1) * kChannelThreads - 1) / row_vectors + 1;
    return row < rows ? row : rows;
  }
  // Contiguous: a block's first step, counted through all tiles. The block's first grain is a
  // product that cannot exceed 64 bits, as no memory is large enough for that.
  constexpr std::int64_t FirstStep(std::int64_t block) const {
    const std::int64_t grain = all_tiles * grains * block / blocks;
    const std::int64_t step = grain % grains * grain_steps;
    return grain / grains * steps + (step < steps ? step : steps);
  }
  // The last block whose first grain is this one or an earlier one.
  constexpr int BlockOfGrain(std::int64_t grain) const {
    return static_cast<int>(((grain + 1) * blocks - 1) / (all_tiles * grains));
  }
};

// All kernels of a call.
struct BatchNormPlan {
  bool backward;
  ChannelPlan channels;        // BatchNormFwdKernel or BatchNormBwdKernel
  std::int64_t apply_vectors;  // Vectors of a group for BatchNormApplyKernel. 0: it does not run.
};

// --- The choice ----------------------------------------------------------------------------------
// README.md has a table of the tiles that it chooses.

inline constexpr int kUsualRowThreads = 256;  // the most row_threads of a group's only tile
inline constexpr int kElementSteps = 4;       // steps of a chunk of single elements
inline constexpr int kSumsPadding = 16;       // see sums_pitch
inline constexpr int kChunkCounters = kChannelThreads / kWarpThreads;  // of a tile: one per warp

// The most shared memory of a block. CUDA keeps 1 KB of a multiprocessor's, and static shared
// memory takes less than another 1 KB.
constexpr std::int64_t MaxChannelBytes(std::int64_t of_multiprocessor) {
  return of_multiprocessor - 2048;
}

namespace channel_choice {

// How tiles go to blocks. tile_blocks and concurrent_tiles are ChannelPlan's.
struct Distribution {
  std::int64_t tile_blocks, concurrent_tiles;
  std::int64_t block_tiles;  // The most tiles of a block. Contiguous: a usual number.
};

// A block with less than kLeastSteps steps is not worth waiting for.
constexpr std::int64_t BlocksFor(const ChannelTask& task, std::int64_t tiles, std::int64_t steps) {
  constexpr std::int64_t kLeastSteps = 4;
  return std::clamp<std::int64_t>(CeilDiv(tiles * steps, kLeastSteps), 1,
                                  task.device.multiprocessors);
}

constexpr Distribution Distribute(const ChannelTask& task, std::int64_t tiles, std::int64_t steps) {
  const std::int64_t blocks = BlocksFor(task, tiles, steps);
  const std::int64_t block_tiles = CeilDiv(tiles, blocks);
  const std::int64_t concurrent_tiles = CeilDiv(tiles, block_tiles);
  std::int64_t tile_blocks = std::min(blocks / concurrent_tiles, steps);
  if (task.statistics) tile_blocks = std::min(tile_blocks, task.partial_rows);
  if (block_tiles > 1) tile_blocks = 1;
  const bool few_idle = 100 * tiles * tile_blocks >= 85 * block_tiles * blocks;
  return few_idle ? Distribution{tile_blocks, concurrent_tiles, block_tiles}
                  : Distribution{1, 0, 2};
}

// Bytes of a tile's partial results. A block combines them itself if they are few bytes from few
// blocks, and if the tile has whole bundles. Otherwise they are combined by all blocks, and all
// blocks wait for that.
constexpr std::int64_t PartialBytes(const ChannelTask& task, const Distribution& distribution,
                                    std::int64_t channels) {
  return distribution.tile_blocks * channels * task.needs().partial_numbers * task.accum_bytes;
}
constexpr bool CombinesLocally(const ChannelTask& task, const Distribution& distribution,
                               std::int64_t channels) {
  constexpr std::int64_t kMaxBytes = 96 << 10, kMaxBlocks = 48;
  return task.statistics && !task.separate && distribution.concurrent_tiles > 0 &&
         channels % task.bundle == 0 && distribution.tile_blocks <= kMaxBlocks &&
         PartialBytes(task, distribution, channels) <= kMaxBytes;
}

// How good tiles with these row_threads are: the product of two factors, minus penalties. The first
// factor is the part of the threads that have a vector; only half of it counts, because memory is
// the limit. The second factor is a block's ideal number of steps over its real one plus the
// overhead of its tiles. There are penalties for rows that are short to read or long to add up, and
// for tiles that end within a line of memory.
constexpr std::int64_t Score(const ChannelTask& task, std::int64_t rows, std::int64_t row_threads,
                             std::int64_t tiles, std::int64_t vectors) {
  const std::int64_t step_rows = kChannelThreads / row_threads;
  const std::int64_t steps = CeilDiv(rows, step_rows);
  const std::int64_t taken =
      1024 * step_rows * vectors * rows / (kChannelThreads * tiles) / (steps * step_rows);
  const std::int64_t all_tiles = task.groups * tiles;
  const std::int64_t blocks = BlocksFor(task, all_tiles, steps);
  const Distribution distribution = Distribute(task, all_tiles, steps);
  const std::int64_t ideal = CeilDiv(all_tiles * steps, blocks);
  // Blocks that do not work on one stretch of memory are slower.
  const std::int64_t slowest =
      distribution.concurrent_tiles > 0
          ? distribution.block_tiles * CeilDiv(steps, distribution.tile_blocks)
          : ideal * 9 / 8;
  // The overhead counts the sums and parameters of each tile, and changes from tile to tile.
  const std::int64_t channels = CeilDiv(task.channels, tiles);
  const std::int64_t per_tile = CombinesLocally(task, distribution, channels)
                                    ? 8 + PartialBytes(task, distribution, channels) / 8192
                                    : 20;
  const std::int64_t overhead =
      distribution.block_tiles * per_tile + (distribution.block_tiles - 1) * 12;
  std::int64_t penalty = row_threads < 8     ? 200
                         : row_threads < 16  ? 40
                         : row_threads < 32  ? 24
                         : row_threads < 128 ? 8
                         : row_threads > 256 ? 130
                         : row_threads > 128 ? 80
                                             : 0;
  if (tiles > 1 && row_threads % kLineVectors != 0) penalty += row_threads < 128 ? 100 : 40;
  return (1024 + taken) / 2 * ideal / (slowest + overhead) - penalty;
}

// Whether a multiprocessor has room for a tile's numbers and for the stages of one chunk, with
// `places` vectors of each array. A transient array is always counted: tiles do not depend on it.
constexpr bool Fits(const ChannelTask& task, std::int64_t channels, std::int64_t width,
                    std::int64_t places = kChannelThreads) {
  constexpr std::int64_t kMostUnused = 96;  // unused places for numbers (SharedIndex)
  const ChannelNeeds& needs = task.needs();
  const std::int64_t numbers =
      (needs.parameters + needs.origins) * (channels + kMostUnused) * task.accum_bytes;
  const std::int64_t stages = width == 1 ? 0 : needs.chunk_steps * places * 16;
  return numbers + (needs.arrays + 1) * stages <= MaxChannelBytes(task.device.shared_bytes);
}

// Sets what columns need. Returns false if vectors of this width cannot be cut into columns.
constexpr bool CutColumns(const ChannelTask& task, ChannelPlan& plan) {
  const std::int64_t row = task.channels * task.inner, width = plan.width;
  const std::int64_t least_fold = width / std::gcd(row, width);
  if (width > 1 && task.groups > 1 && plan.group_elements % width != 0) return false;
  plan.plane = plan.unaligned = false, plan.fold = 1, plan.tile_channels = task.channels;
  plan.row_threads = 0;
  std::int64_t best = std::numeric_limits<std::int64_t>::min();
  const std::int64_t vectors = least_fold * row / width;  // of the fewest rows that are whole
  const bool whole =
      (vectors <= kUsualRowThreads / 2 || (least_fold > 1 && vectors <= kUsualRowThreads)) &&
      Fits(task, task.channels, width);
  if (whole) {  // one tile: `fold` is just large enough for reads of some length
    const std::int64_t times = std::max<std::int64_t>(1, kUsualRowThreads / 4 / vectors);
    plan.fold = least_fold * std::min(times, CeilDiv(task.rows, least_fold));
    const std::int64_t row_threads = plan.fold * row / width;
    plan.row_threads = static_cast<int>(row_threads);
    best = Score(task, CeilDiv(task.rows, plan.fold), row_threads, 1, row_threads);
  }
  if (least_fold == 1 && (!whole || task.inner == 1)) {
    const std::int64_t least_channels = width / std::gcd(task.inner, width);
    const std::int64_t least_threads = least_channels * task.inner / width;
    const std::int64_t all = CeilDiv(vectors, least_threads);
    for (std::int64_t times = 1; times * least_threads <= kChannelThreads; ++times) {
      const std::int64_t tiles = CeilDiv(all, times), row_threads = times * least_threads;
      if (times > 1 && CeilDiv(all, tiles) != times) continue;
      if (!Fits(task, times * least_channels, width)) break;
      const std::int64_t score = Score(task, task.rows, row_threads, tiles, vectors);
      if (score <= best) continue;
      best = score, plan.row_threads = static_cast<int>(row_threads);
      plan.tile_channels = times * least_channels, plan.fold = 1;
    }
  }
  if (plan.row_threads == 0) return false;
  plan.step_rows = kChannelThreads / plan.row_threads;
  plan.tiles = CeilDiv(task.channels, plan.tile_channels);
  plan.rows = CeilDiv(task.rows, plan.fold);
  plan.row_elements = plan.fold * row, plan.row_vectors = 0;
  plan.steps = CeilDiv(plan.rows, plan.step_rows);
  plan.whole_steps = task.rows / plan.fold / plan.step_rows;
  plan.ragged = width > 1 && task.rows % plan.fold != 0;
  return true;
}

constexpr void CutPlanes(const ChannelTask& task, ChannelPlan& plan) {
  const std::int64_t width = plan.width;
  plan.plane = true, plan.unaligned = task.inner % width != 0, plan.fold = 1;
  plan.tile_channels = 1, plan.row_threads = kChannelThreads, plan.step_rows = 1;
  plan.tiles = task.channels, plan.rows = task.rows;
  plan.row_elements = task.channels * task.inner;
  // Enough for every place within a vector where a row may start.
  plan.row_vectors = CeilDiv(task.inner + (plan.unaligned ? width - 1 : 0), width);
  plan.steps = CeilDiv(plan.rows * plan.row_vectors, kChannelThreads);
  plan.whole_steps = plan.unaligned ? 0 : plan.rows * plan.row_vectors / kChannelThreads;
}

// Chooses planes or columns.
constexpr void CutTiles(const ChannelTask& task, ChannelPlan& plan) {
  const auto block_tiles = [&](const ChannelPlan& cut) {
    return Distribute(task, task.groups * cut.tiles, cut.steps).block_tiles;
  };
  plan.channels = task.channels, plan.inner = task.inner, plan.bundle = task.bundle;
  plan.group_rows = task.rows, plan.group_elements = task.rows * task.channels * task.inner;
  plan.width = task.aligned ? 16 / task.element_bytes : 1;
  const std::int64_t width = plan.width;
  // Rows whose ends are masked lose about two of their vectors.
  if (width > 1 && task.inner % width == 0 && task.inner >= 32 * width) {
    CutPlanes(task, plan);
    ChannelPlan columns = plan;
    if (block_tiles(plan) > 1 && CutColumns(task, columns) &&
        2 * block_tiles(columns) <= block_tiles(plan)) {
      plan = columns;
    }
  } else if (!CutColumns(task, plan)) {
    if (task.inner >= (width > 1 ? 4 * width : kUsualRowThreads)) {
      CutPlanes(task, plan);
    } else {
      plan.width = 1;
      CutColumns(task, plan);
    }
  }
  plan.all_tiles = task.groups * plan.tiles;
}

// Sets which steps a block has.
constexpr void DivideSteps(const ChannelTask& task, const Distribution& distribution,
                           ChannelPlan& plan) {
  plan.tile_blocks = distribution.tile_blocks;
  plan.concurrent_tiles = distribution.concurrent_tiles;
  const auto split = [](std::int64_t items, std::int64_t takers) {
    return EvenSplit{items / takers, items % takers};
  };
  plan.step_split = split(plan.steps, plan.tile_blocks);
  plan.whole_step_split = split(plan.whole_steps, plan.tile_blocks);
  plan.tile_split = split(plan.all_tiles, std::max<std::int64_t>(plan.concurrent_tiles, 1));
  const auto divide = [&](std::int64_t grain_steps) {
    plan.grain_steps = grain_steps;
    plan.grains = CeilDiv(plan.steps, grain_steps);
    plan.blocks = static_cast<int>(
        std::min(BlocksFor(task, plan.all_tiles, plan.steps), plan.all_tiles * plan.grains));
  };
  divide(1);
  if (plan.interleaved()) {
    plan.blocks = static_cast<int>(plan.tile_blocks * plan.concurrent_tiles);
  } else {
    // The most blocks that may have a part of one tile. Each needs a partial row.
    const std::int64_t least = plan.all_tiles * plan.grains / plan.blocks;  // grains of a block
    const std::int64_t most_parts =
        std::min<std::int64_t>({plan.blocks, plan.grains, (plan.grains - 1) / least + 2});
    if (task.statistics && most_parts > task.partial_rows) {
      divide(CeilDiv(plan.steps, task.partial_rows));
    }
  }
  const auto distance = [&](std::int64_t rows, std::int64_t vectors) {
    return VectorDistance{vectors, rows * plan.row_elements + vectors * plan.width};
  };
  if (plan.plane) {
    const std::int64_t vectors = plan.tile_blocks * kChannelThreads;
    const std::int64_t rows = vectors / plan.row_vectors, rest = vectors % plan.row_vectors;
    plan.to_next = distance(rows, rest);
    plan.to_previous = distance(-rows - 1, plan.row_vectors - rest);
  } else {
    plan.to_next = distance(plan.tile_blocks * plan.step_rows, 0);
    plan.to_previous = distance(-plan.tile_blocks * plan.step_rows, 0);
  }
}

// Sets how many chunks of the second pass are dynamic. None are if there are few, or if there is no
// room for counters after a tile's partial results.
constexpr void ChooseDynamicChunks(const ChannelTask& task, const Distribution& distribution,
                                   ChannelPlan& plan) {
  constexpr std::int64_t kLeastChunks = 16;  // per block
  if (plan.plane || plan.width == 1 || !plan.interleaved()) return;
  if (distribution.block_tiles > 1 || plan.tile_blocks == 1) return;
  if (plan.tile_blocks + kChunkCounters > task.partial_rows) return;
  const std::int64_t kept = plan.kept_chunks * plan.chunk_steps * plan.tile_blocks;
  const std::int64_t chunks =
      CeilDiv(std::max<std::int64_t>(plan.steps - kept, 0), plan.chunk_steps);
  if (chunks < kLeastChunks * plan.tile_blocks) return;
  if (chunks > std::numeric_limits<int>::max() / 16) return;
  plan.dynamic_chunks = static_cast<int>(chunks);
  plan.static_chunks =
      static_cast<int>(std::max<std::int64_t>(2, chunks / plan.tile_blocks * 3 / 4));
}

// Steps of a chunk. There are more if at least a fifth of the threads have no vector, and the
// multiprocessor has much shared memory.
constexpr int ChunkSteps(const ChannelTask& task, const ChannelPlan& plan) {
  constexpr std::int64_t kMuchMemory = 160 << 10;
  if (plan.width == 1) return kElementSteps;
  const bool few = !plan.plane && 5 * plan.row_threads * plan.step_rows <= 4 * kChannelThreads;
  return few && task.device.shared_bytes >= kMuchMemory ? task.needs().long_chunk_steps
                                                        : task.needs().chunk_steps;
}

// Sets which steps the second pass finds in the L2 cache. Without hints it finds only half of them.
// Very large arrays get no hints: little of them fits, and hints make them slower.
constexpr void ChooseCachedSteps(const ChannelTask& task, ChannelPlan& plan) {
  constexpr std::int64_t kMostTimes = 5;  // size of the L2 cache
  const std::int64_t bytes = task.elements() * task.element_bytes * task.needs().arrays;
  const std::int64_t cached = task.device.l2_bytes * 6 / 10;
  if (!task.statistics || plan.width == 1 || bytes <= cached) return;
  if (bytes > kMostTimes * task.device.l2_bytes) return;
  const std::int64_t vectors = plan.plane ? kChannelThreads : plan.step_rows * plan.row_threads;
  const std::int64_t step_bytes = vectors * 16 * task.needs().arrays;
  plan.cached_steps =
      static_cast<int>(std::max<std::int64_t>(1, cached / step_bytes / plan.blocks));
}

constexpr int WholeLines(std::int64_t bytes) {
  return static_cast<int>(CeilDiv(bytes, kLineBytes) * kLineBytes);
}

// Sets where a stage has a thread's vectors, and where channels' numbers are.
constexpr void PlaceVectors(const ChannelTask& task, ChannelPlan& plan) {
  const auto tile_channels = static_cast<int>(plan.tile_channels);
  plan.channel_bits = 0, plan.channel_pitch = tile_channels;
  if (!plan.plane && plan.inner == 1 && plan.width > 1) {
    while (1 << plan.channel_bits < plan.width) ++plan.channel_bits;
    // Four more than a multiple of eight: stores for 16-bit types then go to different banks too.
    plan.channel_pitch = static_cast<int>(CeilDiv(CeilDiv(tile_channels, plan.width), 8)) * 8 + 4;
  }
  // Rows start as far into a line as in global memory, if that takes little room.
  const int whole_lines = static_cast<int>(CeilDiv(plan.row_threads, kLineVectors)) * kLineVectors;
  const int skewed_places = plan.step_rows * whole_lines + kLineVectors;
  const bool skewed = !plan.plane && plan.tiles > 1 && plan.row_threads != whole_lines &&
                      4 * skewed_places <= 5 * kChannelThreads &&
                      Fits(task, tile_channels, plan.width, skewed_places);
  plan.row_pitch = skewed ? whole_lines : plan.row_threads;
  const int places = skewed ? skewed_places : plan.step_rows * plan.row_threads;
  plan.array_stage_bytes = WholeLines(places * plan.width * task.element_bytes);
}

// Sets the layout of a block's shared memory. The first region has either sums of threads and
// origins, or parameters and the stages of transient arrays: no thread needs these stages while
// sums are there. The other stages follow. Fits made sure that there is room for one chunk.
constexpr void DivideMemory(const ChannelTask& task, const Distribution& distribution,
                            ChannelPlan& plan) {
  PlaceVectors(task, plan);
  plan.warp_rows =
      plan.plane || kWarpThreads % plan.row_threads != 0 ? 1 : kWarpThreads / plan.row_threads;
  plan.sums_pitch = plan.step_rows / plan.warp_rows * plan.row_threads + kSumsPadding / plan.width;
  const int sums =
      plan.plane ? kChannelThreads * 2 : plan.sums_pitch * plan.width * 2 * task.accum_bytes;
  const int channel_bytes = plan.shared_channels() * task.accum_bytes;
  plan.chunk_steps = ChunkSteps(task, plan);
  plan.part_chunks = static_cast<int>(CeilDiv(plan.steps, plan.chunk_steps));
  const int chunk_bytes = plan.chunk_steps * plan.array_stage_bytes;  // of one array
  const int arrays = task.needs().arrays;
  plan.transient_offset = WholeLines(channel_bytes * task.needs().parameters);
  plan.origins_offset = std::max(task.statistics ? sums : 0, plan.transient_offset);
  const int origins_end =
      plan.origins_offset + (task.statistics ? channel_bytes * task.needs().origins : 0);
  const int transient_end =
      plan.transient_offset + (plan.width > 1 ? task.transient_arrays * chunk_bytes : 0);
  plan.scratch_bytes = WholeLines(std::max(origins_end, transient_end));
  plan.shared_bytes = plan.scratch_bytes + (plan.width > 1 ? arrays * chunk_bytes : 0);
  if (!task.statistics || !task.apply) return;
  const std::int64_t budget = MaxChannelBytes(task.device.shared_bytes) - plan.shared_bytes;
  const std::int64_t chunks =
      plan.interleaved() ? distribution.block_tiles *
                               CeilDiv(CeilDiv(plan.steps, plan.tile_blocks), plan.chunk_steps)
                         : CeilDiv(plan.steps * plan.all_tiles, plan.blocks) / plan.chunk_steps + 2;
  plan.kept_chunks =
      static_cast<int>(std::clamp<std::int64_t>(budget / (arrays * chunk_bytes), 0, chunks));
  plan.shared_bytes += plan.kept_chunks * arrays * chunk_bytes;
  ChooseDynamicChunks(task, distribution, plan);
}

// The plan of the kernel that makes the first pass, or both.
constexpr ChannelPlan ChooseChannelPlan(const ChannelTask& task) {
  ChannelPlan plan{};
  CutTiles(task, plan);
  const Distribution distribution = Distribute(task, plan.all_tiles, plan.steps);
  DivideSteps(task, distribution, plan);
  plan.first_pass = task.statistics;
  plan.inverse_elements =
      1.0 / (static_cast<double>(task.rows) * static_cast<double>(task.inner * task.bundle));
  plan.combines_locally = CombinesLocally(task, distribution, plan.tile_channels);
  ChooseCachedSteps(task, plan);
  DivideMemory(task, distribution, plan);
  return plan;
}

// Whether the second pass is a separate kernel. It is if arrays are large, and channels have few
// elements in a row: blocks that take memory in order are then faster than blocks that stay with
// their channels.
constexpr bool AppliesSeparately(const ChannelTask& task, const ChannelPlan& plan) {
  constexpr std::int64_t kMaxGroups = 65535;
  const std::int64_t width = 16 / task.element_bytes, group = task.elements() / task.groups;
  if (task.backward || !task.statistics || !task.aligned) return false;
  if (task.inner < width || group % width != 0) return false;
  if (task.groups > kMaxGroups || group / width >= std::int64_t{1} << 31) return false;
  // What the chip's memories may still hold of x.
  const std::int64_t on_chip =
      task.device.l2_bytes + task.device.multiprocessors * task.device.shared_bytes;
  return task.device.prefers_separate ||
         (!plan.plane && task.elements() * task.element_bytes > 4 * on_chip);
}

}  // namespace channel_choice

// The plan for a task with elements.
constexpr BatchNormPlan ChooseBatchNormPlan(const ChannelTask& task) {
  using namespace channel_choice;
  const ChannelPlan plan = ChooseChannelPlan(task);
  if (!AppliesSeparately(task, plan)) return {task.backward, plan, 0};
  // Also if y is not wanted, so that the statistics have the same bits with and without y.
  ChannelTask statistics = task;
  statistics.apply = false, statistics.separate = true;
  const std::int64_t vectors = task.elements() / task.groups / (16 / task.element_bytes);
  return {task.backward, ChooseChannelPlan(statistics), task.apply ? vectors : 0};
}

// The plan in numbers, for tests and people.
inline Description Describe(const BatchNormPlan& of) {
  const ChannelPlan& plan = of.channels;
  return {
      of.backward ? "BatchNormBwdKernel" : "BatchNormFwdKernel",
      of.backward ? "batch_norm/backward.cu" : "batch_norm/forward.cu",
      {{"plane", plan.plane,
        "1: channels first, a tile is a part of one channel; 0: channels last"},
       {"width", plan.width, "elements of a vector"},
       {"row_threads", plan.row_threads, "vectors of a tile in a row (channels last)"},
       {"step_rows", plan.step_rows, "rows of a step (channels last)"},
       {"fold", plan.fold, "rows of x in a row of the matrix"},
       {"tile_channels", plan.tile_channels, "channels of a tile"},
       {"tiles", plan.tiles, "tiles of a group"},
       {"steps", plan.steps, "steps of a tile"},
       {"tile_blocks", plan.tile_blocks, "blocks that share a tile"},
       {"concurrent_tiles", plan.concurrent_tiles,
        "tiles that are worked on at once; 0: blocks have contiguous steps"},
       {"blocks", plan.blocks, "blocks of the grid"},
       {"combines_locally", plan.combines_locally,
        "1: each block combines the partial results of its tiles itself"},
       {"row_pitch", plan.row_pitch, "vectors from one row of a step to the next in a stage"},
       {"array_stage_bytes", plan.array_stage_bytes, "one array's part of a stage, in bytes"},
       {"cached_steps", plan.cached_steps, "a block's last steps that stay in the L2 cache"},
       {"chunk_steps", plan.chunk_steps, "steps of a chunk: copies are this many steps ahead"},
       {"kept_chunks", plan.kept_chunks,
        "first chunks of a block that stay in shared memory for the second pass"},
       {"dynamic_chunks", plan.dynamic_chunks,
        "chunks of a tile that blocks take when they are free; 0: none"},
       {"static_chunks", plan.static_chunks, "of these, chunks that each block gets at the start"},
       {"shared_bytes", plan.shared_bytes, "shared memory of a block, in bytes"},
       {"apply_vectors", of.apply_vectors,
        "vectors of the separate kernel that computes y; 0: there is no such kernel"}}};
}

}  // namespace gradops
