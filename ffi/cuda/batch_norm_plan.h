// How batch norm's elements are divided among the threads of a GPU. Plain C++, no CUDA. Which of
// these divisions a shape gets: cuda/batch_norm_policy.h.
//
// A step is what a block's threads take at a time, one pack of 16 bytes each. A thread stays with
// its channels from step to step, and keeps what it adds up in registers. Two ways:
//
//   plane    a tile is one channel, all of whose elements are put in a row; a pack takes the next
//            of them. Where inner does not end where a pack does, packs at both ends of each row
//            are shared with the neighbouring channels, and masked.
//   columns  x is a matrix, of whose columns a tile has `lanes` packs; each of a step's `at_once`
//            rows has a thread for each of them. Tiles are cut where both a channel and a pack end.
//            Where the channels of a row are few, a row of the matrix is several of x (`fold`).
//
// There is a block for each multiprocessor. Either tiles are dealt out to blocks whole, or each to
// as many blocks as the others, which take turns with its steps: so all blocks are at work on the
// same stretch of memory, and have few tiles to add up. Or the steps of all groups' tiles, tile by
// tile, are one sequence, and each block has as many of them, in a row: it has parts of a few
// tiles. A tile's blocks leave a partial result each. Where the workspace has fewer partial rows
// than that, steps are taken by units, of which a tile has no more than that.
//
// What a block has loaded first it keeps in shared memory; the rest is loaded again for the second
// pass, last step first, as the L2 cache has the latest ones. Where there is much of it, and a tile
// has several blocks, the end of it goes to whichever of these comes first (batch_norm_stream.cuh).
//
// Kernels know the way (As), and part by part what takes divisions: these and what is seldom needed
// would be most of their code, for which all threads wait in short steps.
#pragma once

#include <cstdint>

#include "cuda/cache_line.h"

namespace gradops {

inline constexpr int kChannelThreads = 512;  // of a block

// From one step of a thread to the next: packs of a row, elements of x.
struct ChannelStride {
  std::int64_t packs, elements;
};

// A thread's pack in one step: its number in the row, and where in x it would start if the row
// started with a pack. Columns: its number in the tile, or -1 where the thread has none.
struct ChannelPlace {
  std::int64_t pack, at;
};

// Steps of a block in a tile: so many, from the first one on, and every stride-th of the plan.
// Rings of these steps have numbers of the block's own, from `ring` on.
struct ChannelPart {
  std::int64_t tile, first, count;
  std::int64_t later;  // steps that the block has after these
  int ring;
  // Of the tile: its group and channels, and where in x it starts.
  std::int64_t group, channel, element;
  int channels;
};

// All steps of a block: so many parts, of one tile after the other. Where tiles are dealt out,
// start is the first step in a tile; otherwise it and stop are counted through all tiles.
struct ChannelShare {
  std::int64_t start, stop, first_tile;
  int parts;
};

// How many of `all` things each of those who take turns with them has: the i-th first takes the
// i-th.
struct ChannelTurns {
  std::int64_t least, rest;
  constexpr ChannelTurns() = default;
  constexpr ChannelTurns(std::int64_t all, std::int64_t of) : least(all / of), rest(all % of) {}
  constexpr std::int64_t Of(std::int64_t i) const { return least + (i < rest ? 1 : 0); }
};

// Elements [first, last) of the pack at `start` are the tile's.
struct ChannelSpan {
  std::int64_t start;
  int first, last;
  constexpr bool has(int j) const { return first <= j && j < last; }
};

struct ChannelPlan {
  bool plane;
  bool framed;         // planes: rows start and end within packs
  bool ragged;         // columns: x ends within a row
  int width;           // elements of a pack
  int lanes, at_once;  // columns
  std::int64_t channels, inner;
  std::int64_t fold;
  std::int64_t tile_channels;  // of a tile; the last one of a group may have fewer
  std::int64_t tiles;          // of a group
  std::int64_t all_tiles;      // of all of them
  std::int64_t rows;           // of a tile; with fold, the last one may be part of one
  std::int64_t row_elements;   // from one row to the next
  std::int64_t row_packs;      // plane: of a row
  std::int64_t group_rows;     // of x
  std::int64_t group_elements;
  std::int64_t steps;        // of a tile
  std::int64_t whole_steps;  // the first so many, in which every thread's pack is whole, if any
  std::int64_t unit_steps, units;  // of a unit, of a tile
  // Where tiles are dealt out: so many blocks take turns with a tile's steps, and so many tiles are
  // at work on at a time; otherwise 1 and 0.
  std::int64_t stride, tile_stride;
  ChannelTurns step_turns, whole_turns, tile_turns;  // of steps, of those that are whole, of tiles
  ChannelStride forward, backward;
  int blocks;
  // Columns: so many rows of a step belong to one warp, which adds them up for itself; from one of
  // a thread's columns to the next, in the block's sums.
  int warp_rows, sums_pitch;
  int row_slots;          // columns: from one row of a step to the next, in shared memory, in packs
  int slot_bytes;         // of an array's packs of a step there
  std::uint32_t nothing;  // 0, which a compiler of kernels cannot know
  double inverse_elements;  // 1 over those of a channel
  bool sums;                // there is a first pass
  bool own_sums;            // and each block puts its tiles' partial results together for itself
  bool clustered;           // and those of a tile are a cluster
  // A tile's channels in shared memory (SlotOfChannel), of each number that they have.
  int channel_shift, channel_pitch;
  // Of a block, so many of the last steps are to be found in the L2 cache by the second pass; 0: it
  // keeps what it likes.
  int cached_steps;
  int ring_steps;  // so many of a part's steps are a ring
  int part_rings;  // of a part that is a whole tile
  int kept_rings;  // of a block, there from the first pass to the second, as is the last ring
  // Rings of a tile, not kept, that its blocks take as they come, but for the first so many of
  // each; 0: each has its own steps.
  int shared_rings, given_rings;
  int origins_at;     // bytes of shared memory, before the origins,
  int other_at;       // before the ring of an array that does not stay,
  int scratch_bytes;  // and before the others' rings
  int shared_bytes;

  // The same plan, of which the compiler knows the way and the width of packs.
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

  // One behind the tile's last element; columns: its group's.
  constexpr std::int64_t Limit(const ChannelPart& part) const {
    return plane ? part.element + (rows - 1) * row_elements + inner
                 : (part.group + 1) * group_elements;
  }

  // Where the pack starts.
  constexpr std::int64_t Start(const ChannelPlace& place) const {
    return framed ? place.at & -std::int64_t{width} : place.at;
  }

  // Whether all of the pack is the tile's; also of steps after the last one.
  constexpr bool Whole(const ChannelPlace& place, std::int64_t limit) const {
    if (Start(place) + width > limit) return false;
    if (!plane) return place.pack >= 0;
    if (!framed) return true;
    const int before = static_cast<int>(place.at & (width - 1));
    return (place.pack > 0 || before == 0) && inner - place.pack * width + before >= width;
  }

  // --- Parts ---

  // The tile's step that is the part's i-th.
  constexpr std::int64_t StepOf(const ChannelPart& part, std::int64_t i) const {
    return part.first + i * stride;
  }
  constexpr std::int64_t LastStep(const ChannelPart& part) const {
    return StepOf(part, part.count - 1);
  }
  // How many of its steps, the first ones, are whole.
  constexpr int WholeSteps(const ChannelPart& part) const {
    if (stride > 1) return static_cast<int>(whole_turns.Of(part.first));
    const std::int64_t behind = whole_steps - part.first;
    return static_cast<int>(behind < 0 ? 0 : behind < part.count ? behind : part.count);
  }
  // How many of them, the first ones, need no place in the L2 cache.
  constexpr int PassingSteps(const ChannelPart& part) const {
    if (cached_steps == 0) return 0;
    const std::int64_t passing = part.count + part.later - cached_steps;
    return static_cast<int>(passing < 0 ? 0 : passing < part.count ? passing : part.count);
  }
  // Columns: elements of each channel.
  constexpr std::int64_t ChannelElements(const ChannelPart& part) const {
    const std::int64_t step_rows = at_once * fold;
    const std::int64_t beyond = (LastStep(part) + 1) * step_rows - group_rows;
    return (part.count * step_rows - (beyond > 0 ? beyond : 0)) * inner;
  }

  // Where a tile's channel has the k-th of three elements, of the part's first steps.
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

  // --- Packs that are the tile's in part ---

  // How often all threads have to ask for one.
  constexpr std::int64_t EdgeTurns(const ChannelPart& part) const {
    if (plane && framed) {
      return (3 * (EndRow(part) - FirstRow(part)) + kChannelThreads - 1) / kChannelThreads;
    }
    return !plane && ragged && LastStep(part) + 1 == steps ? 1 : 0;
  }

  // Such a pack; or nothing. Columns: of the thread's own ones.
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

  // With fold, there is one tile. The rest is of columns only.
  // How many columns a channel has, and which is its i-th one.
  constexpr int ChannelColumns() const { return static_cast<int>(fold * inner); }
  constexpr int ColumnOf(int channel, int i, int of_tile) const {
    const int n = static_cast<int>(inner);
    if (fold == 1) return channel * n + i;
    return (i / n * of_tile + channel) * n + i % n;
  }

  // Where a channel's numbers are in shared memory. Channels last, a thread reads those of a pack's
  // channels: each lies next to that of the same place in the next thread's pack, in another bank.
  constexpr int SlotOfChannel(int channel) const {
    const int in_pack = channel & ((1 << channel_shift) - 1);
    return in_pack * channel_pitch + (channel >> channel_shift);
  }
  constexpr int channel_slots() const { return channel_pitch << channel_shift; }

  // Where a step's packs are in shared memory: as far from a line of 128 bytes as in memory, if all
  // rows are, and there is room.
  constexpr int SlotOf(const ChannelPart& part, int thread) const {
    if (row_slots == lanes) return thread;
    const int skew = static_cast<int>(part.element / width % kLinePacks);
    return thread / lanes * row_slots + thread % lanes + skew;
  }

  // --- Parts of a block ---

  constexpr bool dealt() const { return tile_stride > 0; }
  // Whether blocks need each other's partial results, and whether those of a tile may be a cluster.
  constexpr bool meets() const { return sums && (!own_sums || stride > 1); }
  constexpr bool has_cluster_size() const {
    constexpr int kMaxCluster = 8;  // of every GPU that has clusters
    return own_sums && 1 < stride && stride <= kMaxCluster;
  }
  // Whether a block has one tile at most: then all that the second pass needs of it is in shared
  // memory.
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

  // Of the blocks that have steps of a tile: their number, and a block's number among them.
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
  // Planes: rows that a part has a pack of.
  constexpr std::int64_t FirstRow(const ChannelPart& part) const {
    return part.first * kChannelThreads / row_packs;
  }
  constexpr std::int64_t EndRow(const ChannelPart& part) const {
    const std::int64_t row = ((LastStep(part) + 1) * kChannelThreads - 1) / row_packs + 1;
    return row < rows ? row : rows;
  }
  // Where tiles are not dealt out: a block's first step, counted through all tiles.
  constexpr std::int64_t FirstStep(std::int64_t block) const {
    const std::int64_t unit = Share(block);
    const std::int64_t step = unit % units * unit_steps;
    return unit / units * steps + (step < steps ? step : steps);
  }
  // The first of a block's units. No memory has so many elements that this exceeds 64 bits.
  constexpr std::int64_t Share(std::int64_t block) const {
    return all_tiles * units * block / blocks;
  }
  // The last block whose share starts at the unit or before it.
  constexpr int BlockOf(std::int64_t unit) const {
    return static_cast<int>(((unit + 1) * blocks - 1) / (all_tiles * units));
  }
};

}  // namespace gradops
