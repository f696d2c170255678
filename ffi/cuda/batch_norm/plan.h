// How batch norm's elements are divided among the threads of a GPU. Plain C++, no CUDA. The policy,
// cuda/batch_norm/policy.h, chooses the division for a shape. x is [groups, rows, channels, inner].
//
//   pack   A vector of 16 bytes, or one element if vectors do not fit the arrays (width 1).
//   step   One pack for each thread of a block. A block has kChannelThreads threads; some may have
//          no pack. A thread stays with its channels, and keeps its sums in registers.
//   tile   A run of channels of one group, with all their elements. Tiles are cut in two ways.
//
// In this picture, a block has 8 threads. a5 is the pack of thread 5 in step a. Step b is the next.
//
//          columns: lanes = 4, at_once = 2                 plane: row_packs = 3
//           tile 0      tile 1      tile 2                tile 0   tile 1   tile 2
//   row 0 |a0 a1 a2 a3|a0 a1 a2 a3|a0 a1|         row 0 |a0 a1 a2|a0 a1 a2|a0 a1 a2|
//   row 1 |a4 a5 a6 a7|a4 a5 a6 a7|a4 a5|         row 1 |a3 a4 a5|a3 a4 a5|a3 a4 a5|
//   row 2 |b0 b1 b2 b3|b0 b1 b2 b3|b0 b1|         row 2 |a6 a7 b0|a6 a7 b0|a6 a7 b0|
//
//   columns  Channels last (inner is 1), or channels first, mostly with a small inner. A group is a
//            matrix, and a column is one element wide. A tile has `lanes` packs of each row. A step
//            has `at_once` rows. Tiles end where a channel and a pack end. If a row of x has few
//            channels, a row of the matrix is several rows of x (`fold`).
//   plane    Channels first. A tile is one channel, and a row is its `inner` elements. Each row is
//            cut into packs, and the packs of all rows are put end to end. If rows do not end with
//            a pack, neighbouring channels share their end packs, masked.
//
// There is at most one block for each multiprocessor. The steps are divided among blocks in two
// ways. In this picture, letters are blocks, and each line has the six steps of a tile:
//
//            dealt: stride 2,     dealt: stride 1,     shares
//            tile_stride 2        tile_stride 2
//   tile 0   A B A B A B          A A A A A A          A A A A B B
//   tile 1   C D C D C D          B B B B B B          B B B C C C
//   tile 2                        A A A A A A          C D D D D D
//
//   dealt    A tile goes to one block, or to `stride` blocks that take its steps in turn. Then all
//            blocks work on one stretch of memory, and each has few tiles to add up.
//   shares   The steps of all tiles of all groups are one sequence. Each block has an equally long
//            stretch of the sequence, with parts of a few tiles.
//   unit     Shares consist of units. A unit is one step. If the workspace has too few partial rows
//            for that, a unit is several steps of one tile.
//   part     A block's steps of one tile. Its tile starts at index `element` in x. A part leaves a
//            partial result for each channel, in a partial row of the workspace.
//   origin   Forward adds up distances from the origin: one of the channel's elements in the part.
//   barrier  MeetBlocks, between the passes. A block waits for all blocks, its tile's blocks, or
//            only its own threads. Then partial results are combined.
//   ring     A few consecutive steps of a part. Copies to shared memory are one ring ahead.
//   slot     A place in shared memory: for a step, a pack (SlotOf) or a number (SlotOfChannel).
//
//   first pass    first step ------------------> last step
//                 [kept rings]         [last ring]            stay in shared memory
//                              [  cached_steps   ]            a block's share of the L2 cache
//   second pass   first step <------------------ last step
//
// The first kept_rings rings of a block stay. All other rings use one place in turn. The second
// pass loads these rings again, last step first, because the L2 cache has the latest steps. If such
// rings are many, and a tile has several blocks, the last ones go to whichever block is free. These
// shared rings are consecutive steps of a tile, not of a part (stream.cuh).
//
// Kernels know the way to cut tiles at compile time (As), and compute results of divisions once per
// part. Otherwise divisions and rare cases would be most of their code. All threads would wait for
// that code in short steps.
#pragma once

#include <cstdint>

#include "cuda/common/cache_line.h"

namespace gradops {

inline constexpr int kChannelThreads = 512;  // threads of a block

// Distance from a thread's pack in a step to its next one: in packs of a row, in elements of x.
struct ChannelStride {
  std::int64_t packs, elements;
};

// A thread's pack in one step. `at` is the index in x where it would start if its row started with
// a pack. `pack` is its number in the row; columns: in the tile's row, or -1 if there is none.
struct ChannelPlace {
  std::int64_t pack, at;
};

// A block's steps of a tile: `count` steps, from `first` on, in distances of the plan's `stride`.
// A block numbers the rings of all its parts; the numbers of this part start at `ring`.
struct ChannelPart {
  std::int64_t tile, first, count;
  std::int64_t later;  // steps of the block's later parts
  int ring;
  // The tile's group, its first channel, the index in x where it starts, and how many channels.
  std::int64_t group, channel, element;
  int channels;
};

// All steps of a block. Dealt: `start` is the block's first step in each of its tiles. Shares: the
// steps [start, stop), counted through all tiles.
struct ChannelShare {
  std::int64_t start, stop, first_tile;
  int parts;
};

// `all` things are dealt in turn to `of` takers: taker i gets things i, i + of, and so on. Of(i) is
// the number of things that taker i gets.
struct ChannelTurns {
  std::int64_t least, rest;
  constexpr ChannelTurns() = default;
  constexpr ChannelTurns(std::int64_t all, std::int64_t of) : least(all / of), rest(all % of) {}
  constexpr std::int64_t Of(std::int64_t i) const { return least + (i < rest ? 1 : 0); }
};

// A pack at `start` whose elements [first, last) are the tile's.
struct ChannelSpan {
  std::int64_t start;
  int first, last;
  constexpr bool has(int j) const { return first <= j && j < last; }
};

struct ChannelPlan {
  bool plane;
  bool framed;         // Planes: rows start and end within packs.
  bool ragged;         // Columns: x ends within a row of the matrix.
  int width;           // Elements of a pack.
  int lanes, at_once;  // Columns: packs of a tile in a row, rows of a step.
  std::int64_t channels, inner;
  std::int64_t fold;
  std::int64_t tile_channels;  // Channels of a tile. A group's last tile may have fewer.
  std::int64_t tiles;          // Tiles of a group.
  std::int64_t all_tiles;      // Tiles of all groups.
  std::int64_t rows;           // Rows of a tile. With fold, the last row may be incomplete.
  std::int64_t row_elements;   // Distance from one row to the next in x.
  std::int64_t row_packs;      // Planes: packs of a row.
  std::int64_t group_rows;     // Rows of x in a group.
  std::int64_t group_elements;
  std::int64_t steps;              // Steps of a tile.
  std::int64_t whole_steps;        // First steps that are known to have whole packs only.
  std::int64_t unit_steps, units;  // Steps of a unit, units of a tile.
  // Dealt: `stride` blocks take the steps of a tile in turn, and blocks work on `tile_stride` tiles
  // at a time. Shares: 1 and 0.
  std::int64_t stride, tile_stride;
  ChannelTurns step_turns, whole_turns, tile_turns;  // Dealt: steps, whole_steps and tiles.
  ChannelStride forward, backward;
  int blocks;
  // Columns: a warp has `warp_rows` rows of a step, and adds these up with shuffles. sums_pitch is
  // the distance between a thread's neighbouring columns in the block's sums.
  int warp_rows, sums_pitch;
  int row_slots;            // Columns: packs from a step's row to the next in shared memory.
  int slot_bytes;           // Shared memory for one array's packs of one step.
  std::uint32_t nothing;    // 0, but the compiler of a kernel cannot know that.
  double inverse_elements;  // 1 / (elements of a channel).
  bool sums;                // There is a first pass.
  bool own_sums;            // Each block combines the partial results of its tiles itself.
  bool clustered;           // A tile's blocks are a cluster.
  // These say where SlotOfChannel puts the numbers of a tile's channels in shared memory.
  int channel_shift, channel_pitch;
  // The second pass should find this many of a block's last steps in the L2 cache. 0: no hints.
  int cached_steps;
  int ring_steps;  // Steps of a ring.
  int part_rings;  // Rings of a part that is a whole tile.
  int kept_rings;  // Rings of a block that stay for the second pass; its last ring stays too.
  // Rings of a tile that no block keeps. Each block is given `given_rings` of them; the others go
  // to whichever block is free. 0: each block has its own steps.
  int shared_rings, given_rings;
  // Offsets in shared memory, in bytes.
  int origins_at;     // The origins.
  int other_at;       // The ring of an array that does not stay.
  int scratch_bytes;  // The rings of the arrays that stay.
  int shared_bytes;   // The end.

  // This plan, with the way to cut tiles and the width of packs known to the compiler.
  template <bool kPlane, int W>
  constexpr ChannelPlan As() const {
    ChannelPlan known = *this;
    known.plane = kPlane, known.width = W;
    if (!kPlane || W == 1) known.framed = false;
    if (kPlane || W == 1) known.ragged = false;
    return known;
  }

  // --- Steps of a tile ---

  constexpr ChannelPlace PlaceOf(const ChannelPart& part, std::int64_t step, int thread) const {
    if (plane) {
      const std::int64_t i = step * kChannelThreads + thread;
      return PlaceOfPack(part, i / row_packs, i % row_packs);
    }
    const int pack = thread % lanes, of_step = thread / lanes;
    const bool idle = of_step >= at_once || pack * width >= part.channels * inner * fold;
    const std::int64_t row = step * at_once + of_step;
    return {idle ? -1 : pack, part.element + row * row_elements + pack * width};
  }

  constexpr void Move(ChannelPlace& place, const ChannelStride& stride) const {
    place.at += stride.elements;
    if (!plane) return;
    place.pack += stride.packs;
    if (place.pack >= row_packs) {
      place.pack -= row_packs;
      place.at += row_elements - row_packs * width;
    }
  }

  // The index after the tile's last element; columns: after the group's last element.
  constexpr std::int64_t Limit(const ChannelPart& part) const {
    return plane ? part.element + (rows - 1) * row_elements + inner
                 : (part.group + 1) * group_elements;
  }

  // The index in x where the pack starts.
  constexpr std::int64_t Start(const ChannelPlace& place) const {
    return framed ? place.at & -std::int64_t{width} : place.at;
  }

  // Whether all of the pack is the tile's. Steps after the tile's last one are allowed.
  constexpr bool Whole(const ChannelPlace& place, std::int64_t limit) const {
    if (Start(place) + width > limit) return false;
    if (!plane) return place.pack >= 0;
    if (!framed) return true;
    const int before = static_cast<int>(place.at & (width - 1));
    return (place.pack > 0 || before == 0) && inner - place.pack * width + before >= width;
  }

  // --- Parts ---

  // The number, in the tile, of the part's i-th step.
  constexpr std::int64_t StepOf(const ChannelPart& part, std::int64_t i) const {
    return part.first + i * stride;
  }
  constexpr std::int64_t LastStep(const ChannelPart& part) const {
    return StepOf(part, part.count - 1);
  }
  // How many first steps of the part have no incomplete pack.
  constexpr int WholeSteps(const ChannelPart& part) const {
    if (stride > 1) return static_cast<int>(whole_turns.Of(part.first));
    const std::int64_t behind = whole_steps - part.first;
    return static_cast<int>(behind < 0 ? 0 : behind < part.count ? behind : part.count);
  }
  // How many first steps of the part need no place in the L2 cache.
  constexpr int PassingSteps(const ChannelPart& part) const {
    if (cached_steps == 0) return 0;
    const std::int64_t passing = part.count + part.later - cached_steps;
    return static_cast<int>(passing < 0 ? 0 : passing < part.count ? passing : part.count);
  }
  // Columns: elements of each channel in the part.
  constexpr std::int64_t ChannelElements(const ChannelPart& part) const {
    const std::int64_t step_rows = at_once * fold;
    const std::int64_t beyond = (LastStep(part) + 1) * step_rows - group_rows;
    return (part.count * step_rows - (beyond > 0 ? beyond : 0)) * inner;
  }

  // The index in x of the k-th of three sample elements of a channel, from the part's first steps.
  constexpr std::int64_t Sample(const ChannelPart& part, int channel, int k) const {
    const std::int64_t step = StepOf(part, k < part.count ? k : part.count - 1);
    std::int64_t row = step * at_once, i = (inner - 1) * k / 2;
    if (plane) {
      row = step * kChannelThreads / row_packs;
      i = step * kChannelThreads % row_packs * width;
      i = i < inner ? i : inner - 1;
    }
    return part.element + row * row_elements + channel * inner + i;
  }

  // --- Incomplete packs: only some of their elements are the tile's ---

  // How many times all threads have to call EdgeSpan.
  constexpr std::int64_t EdgeTurns(const ChannelPart& part) const {
    if (plane && framed) {
      return (3 * (EndRow(part) - FirstRow(part)) + kChannelThreads - 1) / kChannelThreads;
    }
    return !plane && ragged && LastStep(part) + 1 == steps ? 1 : 0;
  }

  // An incomplete pack, or an empty span. Columns: one of the thread's own packs.
  constexpr ChannelSpan EdgeSpan(const ChannelPart& part, std::int64_t turn, int thread) const {
    if (!plane) {
      const ChannelPlace place = PlaceOf(part, LastStep(part), thread);
      const std::int64_t left = Limit(part) - place.at;
      if (place.pack < 0 || left <= 0 || left >= width) return {0, 0, 0};
      return {place.at, 0, static_cast<int>(left)};
    }
    // A row's first pack, and its last two.
    const std::int64_t i = turn * kChannelThreads + thread, row = FirstRow(part) + i / 3;
    if (row >= EndRow(part)) return {0, 0, 0};
    const std::int64_t pack = i % 3 == 0 ? 0 : row_packs - i % 3;
    const std::int64_t step = (row * row_packs + pack) / kChannelThreads - part.first;
    if (step < 0 || step >= part.count * stride || step % stride != 0) return {0, 0, 0};
    const ChannelPlace place = PlaceOfPack(part, row, pack);
    if (Whole(place, Limit(part))) return {0, 0, 0};
    const int before = static_cast<int>(place.at & (width - 1));
    const std::int64_t left = inner - pack * width + before;
    if (left <= 0) return {0, 0, 0};
    return {Start(place), pack == 0 ? before : 0, static_cast<int>(left < width ? left : width)};
  }

  // --- Channels of a tile ---

  // Columns: how many columns a channel has, and the number of its i-th column in the tile. With
  // fold, there is only one tile.
  constexpr int ChannelColumns() const { return static_cast<int>(fold * inner); }
  constexpr int ColumnOf(int channel, int i, int of_tile) const {
    const int n = static_cast<int>(inner);
    if (fold == 1) return channel * n + i;
    return (i / n * of_tile + channel) * n + i % n;
  }

  // Where a channel's numbers are in shared memory. Channels last, a thread reads the numbers of
  // all channels of its pack. The j-th channels of neighbouring packs have neighbouring places, so
  // that neighbouring threads read from different banks.
  constexpr int SlotOfChannel(int channel) const {
    const int in_pack = channel & ((1 << channel_shift) - 1);
    return in_pack * channel_pitch + (channel >> channel_shift);
  }
  constexpr int channel_slots() const { return channel_pitch << channel_shift; }

  // The place of a thread's pack of a step in shared memory, in packs. If there is room, rows start
  // as far into a line of 128 bytes as the tile's first row does in global memory.
  constexpr int SlotOf(const ChannelPart& part, int thread) const {
    if (row_slots == lanes) return thread;
    const int skew = static_cast<int>(part.element / width % kLinePacks);
    return thread / lanes * row_slots + thread % lanes + skew;
  }

  // --- Parts of a block ---

  constexpr bool dealt() const { return tile_stride > 0; }
  // Whether blocks need each other's partial results; whether a tile's blocks may be a cluster.
  constexpr bool meets() const { return sums && (!own_sums || stride > 1); }
  constexpr bool has_cluster_size() const {
    constexpr int kMaxCluster = 8;  // blocks; every GPU with clusters allows this size
    return own_sums && 1 < stride && stride <= kMaxCluster;
  }
  // Whether a block has at most one tile. Then shared memory has all channel numbers that the
  // second pass needs.
  constexpr bool has_own_numbers() const { return own_sums && tile_stride == all_tiles; }

  constexpr ChannelShare ShareOf(int block) const {
    if (dealt()) [[likely]] {
      const int tile = stride > 1 ? block / static_cast<int>(stride) : block;
      return {block - tile * stride, 0, tile, static_cast<int>(tile_turns.Of(tile))};
    }
    const std::int64_t start = FirstStep(block), stop = FirstStep(block + 1);
    const std::int64_t first_tile = start / steps;
    return {start, stop, first_tile,
            start == stop ? 0 : static_cast<int>((stop - 1) / steps - first_tile) + 1};
  }
  constexpr ChannelPart PartOf(const ChannelShare& share, int i) const {
    ChannelPart part{};
    if (dealt()) [[likely]] {
      part.tile = share.first_tile + i * tile_stride, part.ring = i * part_rings;
      part.first = share.start, part.count = step_turns.Of(share.start);
      part.later = (share.parts - 1 - i) * part.count;
    } else {
      part.tile = share.first_tile + i;
      const std::int64_t origin = part.tile * steps;
      part.first = share.start > origin ? share.start - origin : 0;
      part.count = (share.stop - origin < steps ? share.stop - origin : steps) - part.first;
      part.later = share.stop - origin - part.first - part.count;
      const std::int64_t of_first = (share.first_tile + 1) * steps - share.start;
      const auto rings = static_cast<int>((of_first + ring_steps - 1) / ring_steps);
      part.ring = i == 0 ? 0 : rings + (i - 1) * part_rings;
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
    if (dealt()) [[likely]]
      return static_cast<int>(stride);
    const std::int64_t tile = group * tiles + channel / tile_channels;
    return BlockOf((tile + 1) * units - 1) - BlockOf(tile * units) + 1;
  }
  constexpr std::int64_t NumberOf(const ChannelPart& part, int block) const {
    if (dealt()) [[likely]]
      return part.first;
    return block - BlockOf(part.tile * units);
  }

 private:
  constexpr ChannelPlace PlaceOfPack(const ChannelPart& part, std::int64_t row,
                                     std::int64_t pack) const {
    return {pack, part.element + row * row_elements + pack * width};
  }
  // Planes: the rows [FirstRow, EndRow) with packs in the part.
  constexpr std::int64_t FirstRow(const ChannelPart& part) const {
    return part.first * kChannelThreads / row_packs;
  }
  constexpr std::int64_t EndRow(const ChannelPart& part) const {
    const std::int64_t row = ((LastStep(part) + 1) * kChannelThreads - 1) / row_packs + 1;
    return row < rows ? row : rows;
  }
  // Shares: a block's first step, counted through all tiles.
  constexpr std::int64_t FirstStep(std::int64_t block) const {
    const std::int64_t unit = Share(block);
    const std::int64_t step = unit % units * unit_steps;
    return unit / units * steps + (step < steps ? step : steps);
  }
  // A block's first unit. No memory is large enough for this product to exceed 64 bits.
  constexpr std::int64_t Share(std::int64_t block) const {
    return all_tiles * units * block / blocks;
  }
  // The last block whose share starts at the unit or before it.
  constexpr int BlockOf(std::int64_t unit) const {
    return static_cast<int>(((unit + 1) * blocks - 1) / (all_tiles * units));
  }
};

}  // namespace gradops
