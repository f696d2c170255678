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
// pass, last step first, as the L2 cache has the latest ones.
#pragma once

#include <cstdint>

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

// Steps of a block in a tile: so many, from the first one on, and every stride-th of the plan. The
// block's own number of the i-th of them is i + own.
struct ChannelPart {
  std::int64_t tile, first, count, own;
};

// All steps of a block: so many parts, of one tile after the other. Where tiles are dealt out,
// start is the first step in a tile; otherwise it and stop are counted through all tiles.
struct ChannelShare {
  std::int64_t start, stop, first_tile;
  int parts;
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
  ChannelStride forward, backward;
  int blocks;
  int kept_steps;     // of a block, in shared memory
  int origins_at;     // bytes of shared memory, before the origins
  int scratch_bytes;  // and before the kept steps
  int shared_bytes;

  // --- Steps of a tile ---

  constexpr ChannelPlace PlaceOf(std::int64_t tile, std::int64_t step, int thread) const {
    if (plane) {
      const std::int64_t i = step * kChannelThreads + thread;
      return PlaceOfPack(tile, i / row_packs, i % row_packs);
    }
    const int pack = thread % lanes, of_step = thread / lanes;
    const bool idle = of_step >= at_once || pack * width >= TileColumns(tile);
    const std::int64_t row = step * at_once + of_step;
    return {idle ? -1 : pack, FirstElement(tile) + row * row_elements + pack * width};
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
  constexpr std::int64_t Limit(std::int64_t tile) const {
    return plane ? FirstElement(tile) + (rows - 1) * row_elements + inner
                 : (tile / tiles + 1) * group_elements;
  }

  // Where the pack starts.
  constexpr std::int64_t Start(const ChannelPlace& place) const {
    return place.at & -std::int64_t{width};
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
    const std::int64_t behind = (whole_steps - part.first + stride - 1) / stride;
    return static_cast<int>(behind < 0 ? 0 : behind < part.count ? behind : part.count);
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
    return FirstElement(part.tile) + row * row_elements + channel * inner + i;
  }

  // --- Packs that are the tile's in part ---

  // How often all threads have to ask for one.
  constexpr std::int64_t EdgeTurns(const ChannelPart& part) const {
    if (plane && framed) {
      return (3 * (EndRow(part) - FirstRow(part)) + kChannelThreads - 1) / kChannelThreads;
    }
    return !plane && width > 1 && group_rows % fold != 0 && LastStep(part) + 1 == steps ? 1 : 0;
  }

  // Such a pack; or nothing. Columns: of the thread's own ones.
  constexpr ChannelSpan EdgeSpan(const ChannelPart& part, std::int64_t turn, int thread) const {
    if (!plane) {
      const ChannelPlace place = PlaceOf(part.tile, LastStep(part), thread);
      const std::int64_t left = Limit(part.tile) - place.at;
      if (place.pack < 0 || left <= 0 || left >= width) return {0, 0, 0};
      return {place.at, 0, static_cast<int>(left)};
    }
    // A row's first pack, and its last two.
    const std::int64_t i = turn * kChannelThreads + thread, row = FirstRow(part) + i / 3;
    if (row >= EndRow(part)) return {0, 0, 0};
    const std::int64_t pack = i % 3 == 0 ? 0 : row_packs - i % 3;
    const std::int64_t step = (row * row_packs + pack) / kChannelThreads - part.first;
    if (step < 0 || step >= part.count * stride || step % stride != 0) return {0, 0, 0};
    const ChannelPlace place = PlaceOfPack(part.tile, row, pack);
    if (Whole(place, Limit(part.tile))) return {0, 0, 0};
    const int before = static_cast<int>(place.at & (width - 1));
    const std::int64_t left = inner - pack * width + before;
    if (left <= 0) return {0, 0, 0};
    return {Start(place), pack == 0 ? before : 0, static_cast<int>(left < width ? left : width)};
  }

  // --- Channels of a tile ---

  constexpr std::int64_t FirstChannel(std::int64_t tile) const {
    return tile % tiles * tile_channels;
  }
  constexpr int TileChannels(std::int64_t tile) const {
    const std::int64_t left = channels - FirstChannel(tile);
    return static_cast<int>(left < tile_channels ? left : tile_channels);
  }
  // The rest is of columns only. With fold, there is one tile.
  constexpr int TileColumns(std::int64_t tile) const {
    return static_cast<int>(TileChannels(tile) * inner * fold);
  }
  // Of a tile's column, the channel's number in the tile.
  constexpr int ChannelOf(int column, int of_tile) const {
    return column / static_cast<int>(inner) % of_tile;
  }
  // How many columns a channel has, and which is its i-th one.
  constexpr int ChannelColumns() const { return static_cast<int>(fold * inner); }
  constexpr int ColumnOf(int channel, int i, int of_tile) const {
    const int n = static_cast<int>(inner);
    return (i / n * of_tile + channel) * n + i % n;
  }

  // --- Parts of a block ---

  constexpr bool dealt() const { return tile_stride > 0; }

  constexpr ChannelShare ShareOf(int block) const {
    if (dealt()) {
      const std::int64_t tile = block / stride;
      return {block % stride, 0, tile, static_cast<int>((all_tiles - tile - 1) / tile_stride) + 1};
    }
    const std::int64_t start = FirstStep(block), stop = FirstStep(block + 1);
    const std::int64_t first_tile = start / steps;
    return {start, stop, first_tile,
            start == stop ? 0 : static_cast<int>((stop - 1) / steps - first_tile) + 1};
  }
  constexpr ChannelPart PartOf(const ChannelShare& share, int i) const {
    if (dealt()) {
      return {share.first_tile + i * tile_stride, share.start,
              (steps - share.start - 1) / stride + 1, i * steps};
    }
    const std::int64_t tile = share.first_tile + i;
    const std::int64_t origin = tile * steps;
    const std::int64_t first = share.start > origin ? share.start - origin : 0;
    const std::int64_t end = share.stop - origin < steps ? share.stop - origin : steps;
    return {tile, first, end - first, origin + first - share.start};
  }

  // The block of a tile's first step, and that of its last one.
  constexpr int FirstBlock(std::int64_t tile) const {
    return dealt() ? static_cast<int>(tile % tile_stride * stride) : BlockOf(tile * units);
  }
  constexpr int LastBlock(std::int64_t tile) const {
    return dealt() ? FirstBlock(tile) + static_cast<int>(stride) - 1
                   : BlockOf((tile + 1) * units - 1);
  }

 private:
  constexpr std::int64_t FirstElement(std::int64_t tile) const {
    return tile / tiles * group_elements + FirstChannel(tile) * inner;
  }
  constexpr ChannelPlace PlaceOfPack(std::int64_t tile, std::int64_t row, std::int64_t pack) const {
    return {pack, FirstElement(tile) + row * row_elements + pack * width};
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
