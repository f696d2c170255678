// How bias_gelu.cu cuts arrays into packs, spans, tiles and slices; see there. Plain C++, no CUDA.
// Its constants were measured on an H200 (TUNING.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/integers.h"
#include "common/shape.h"

namespace gradops {

inline constexpr int kGeluThreads = 256;     // of a block
inline constexpr int kGeluLanes = 32;        // packs of a tile, if nothing speaks for others
inline constexpr int kLinePacks = 128 / 16;  // of a line of the cache

// How a group is cut.
struct GeluCut {
  std::int64_t packs;   // whole ones
  std::int64_t rest;    // elements after them
  std::int64_t span;    // packs
  std::int64_t copies;  // rows of a span
  std::int64_t spans;   // the last one perhaps in part
  std::int64_t tiles;   // of a span
  std::int64_t slices;  // of spans; a slice takes `turns` of as many spans as a block at once
  int lanes;            // packs of a tile
  int inverse_lanes;    // in 2^-16, rounded up
  int at_once;          // spans
  int turns;

  // Tiles of so many packs.
  constexpr void CutSpans(int tile_packs) {
    lanes = tile_packs;
    inverse_lanes = static_cast<int>(CeilDiv(1 << 16, lanes));
    at_once = kGeluThreads / lanes;
    tiles = CeilDiv(span, lanes);
    spans = CeilDiv(packs + (rest > 0), span);
  }
  // Threads that have a pack, of those that might.
  constexpr double PartAtWork() const {
    return static_cast<double>(span) / static_cast<double>(tiles * lanes);
  }
  // Whether a block adds up all rows of a span.
  constexpr bool folded() const { return tiles == 1; }
  // Partial rows of dbias that a slice leaves, of a group of `rows`.
  constexpr std::int64_t partial_rows(std::int64_t rows) const {
    return folded() ? 1 : std::min(copies, rows);
  }
};

// Of packs of `width`; turns and slices are the caller's.
//
// What decides where rows are many: of a line of the cache that two tiles share, each reads all, as
// they are at work at different times. So spans begin where lines do (backward only: forward, other
// tiles follow at once), or a tile is a whole span, whose neighbours are in the same block.
// most_copies: rows that a span may be made to have. resident: blocks that the GPU has at once.
inline GeluCut CutGroup(const RowShape& shape, int width, bool has_columns,
                        std::int64_t most_copies, std::int64_t resident) {
  const std::int64_t elements = shape.rows * shape.features;
  GeluCut cut{};
  cut.packs = elements / width, cut.rest = elements % width;
  cut.span = kGeluLanes, cut.copies = 1;
  if (!has_columns) {
    cut.CutSpans(kGeluLanes);
    return cut;
  }
  cut.copies = width / std::gcd<std::int64_t>(shape.features, width);
  cut.span = shape.features * cut.copies / width;
  const std::int64_t times = std::max<std::int64_t>(1, kGeluLanes / cut.span);
  cut.copies *= times, cut.span *= times;
  const std::int64_t lines = kLinePacks / std::gcd<std::int64_t>(cut.span, kLinePacks);
  const std::int64_t copies = cut.copies * lines, span = cut.span * lines;
  const std::int64_t blocks = most_copies / copies * CeilDiv(span, kGeluLanes) * shape.groups;
  if (width > 1 && copies <= most_copies && blocks >= resident &&
      cut.packs / span >= 2 * kGeluThreads / kGeluLanes) {
    cut.copies = copies, cut.span = span;
  } else if (lines > 1 && cut.packs >= resident * kGeluThreads &&
             8 * (kGeluThreads / cut.span * cut.span) >= 7 * kGeluThreads) {
    cut.CutSpans(static_cast<int>(cut.span));
    return cut;
  }
  cut.CutSpans(kGeluLanes);
  // A span of several rows that is one tile stays one: its block adds the rows up.
  if (cut.copies > 1 && cut.folded()) return cut;
  for (int lanes = kGeluLanes / 2; lanes >= 8; lanes /= 2) {
    GeluCut narrow = cut;
    narrow.CutSpans(lanes);
    if (cut.PartAtWork() < 0.875 && narrow.PartAtWork() > cut.PartAtWork()) cut = narrow;
  }
  return cut;
}

// Backward: with the slices that take least time, 0 if there is no way to leave at most so many
// partial rows of dbias (0: it is not wanted). Where spans have several rows and tiles, also with
// larger tiles; others gain nothing by them.
inline GeluCut CutBackward(const RowShape& shape, int width, int element_bytes, bool has_columns,
                           std::int64_t most_partial_rows, std::int64_t resident) {
  const bool sums = most_partial_rows > 0;
  const auto traffic = static_cast<double>(3 * shape.elements() * element_bytes);
  // In bytes that might be read instead. The last blocks should keep all multiprocessors busy; each
  // wave of blocks starts and ends; partial rows are written and read, by another kernel.
  constexpr double kPerWave = 0.05, kKernel = 8e6;
  const auto cost = [&](const GeluCut& cut) {
    const std::int64_t blocks = cut.slices * cut.tiles * shape.groups;
    const auto waves = static_cast<double>(CeilDiv(blocks, resident));
    const double stream = traffic / cut.PartAtWork() * waves * static_cast<double>(resident) /
                          static_cast<double>(blocks) * (1 + kPerWave * waves);
    const std::int64_t rows = sums ? cut.slices * cut.partial_rows(shape.rows) : 0;
    const int sum_bytes = std::max(4, element_bytes);
    return rows <= 1
               ? stream
               : stream + kKernel +
                     static_cast<double>(2 * rows * shape.groups * shape.features * sum_bytes);
  };
  const GeluCut least =
      CutGroup(shape, width, has_columns, sums ? most_partial_rows : shape.rows, resident);
  GeluCut best = least;
  best.slices = 0;
  const int most_lanes = least.copies > 1 && !least.folded() ? 4 * least.lanes : least.lanes;
  for (int lanes = least.lanes; lanes <= most_lanes; lanes *= 2) {
    GeluCut cut = least;
    cut.CutSpans(lanes);
    std::int64_t most = CeilDiv(cut.spans, cut.at_once);
    if (sums) most = std::min(most, most_partial_rows / cut.partial_rows(shape.rows));
    if (most == 0) continue;
    const auto consider = [&](std::int64_t slices) {
      cut.slices = std::clamp<std::int64_t>(slices, 1, most);
      if (best.slices == 0 || cost(cut) < cost(best)) best = cut;
    };
    for (int slices = 1; slices <= 8; ++slices) consider(slices);
    for (int waves = 1; waves <= 4; ++waves) {
      consider(waves * resident / (cut.tiles * shape.groups));
    }
  }
  return best;
}

}  // namespace gradops
