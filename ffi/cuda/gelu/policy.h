// How bias_gelu.cu cuts arrays into packs, spans, tiles and slices, which that file explains. Plain
// C++, no CUDA. The constants were measured on an H200 (benchmarks/tuning/README.md).
//
// The picture has one group, [rows, features]. t5 is a pack of thread 5 of the 8 in a block.
//
//             tile 0: lanes = 4   tile 1       backward, 2 slices   forward, 2 turns
//   span 0   | t0 t1 t2 t3 | t0 t1 t2 t3 |     slice 0              slice 0      at_once = 2
//   span 1   | t4 t5 t6 t7 | t4 t5 t6 t7 |     slice 0              slice 0
//   span 2   | t0 t1 t2 t3 | t0 t1 t2 t3 |     slice 1              slice 0
//   span 3   | t4 t5 t6 t7 | t4 t5 t6 t7 |     slice 1              slice 0
//   span 4   | t0 t1 t2 t3 | t0 t1 t2 t3 |     slice 0              slice 1
//
//   group        x is [groups, rows, features]. vmap adds the groups. All groups are cut alike.
//   span         `copies` rows of x: a line of the picture. Without bias and dbias, a warp's packs.
//   tile         `lanes` packs at one place of all spans.
//   slice        The spans that a block takes. A block has one tile and one slice of a group.
//   cut          A GeluCut: these sizes for one call.
//   step         The distance, in packs, from a thread's pack to its next one. Each pack is a turn.
//   stage        Backward: a place in shared memory for a pack of dy and a pack of x.
//   column sums  dbias: unrounded dx, summed over rows. A block adds up its threads' sums. A slice
//                leaves one partial row, or one per row of a span. column_sum.cuh adds these up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/integers.h"
#include "common/shape.h"
#include "cuda/common/cache_line.h"

namespace gradops {

inline constexpr int kGeluThreads = 256;      // threads of a block
inline constexpr int kMostGeluThreads = 320;  // backward: most threads of a block
inline constexpr int kGeluLanes = 32;         // usual packs of a tile

// How a group is cut.
struct GeluCut {
  std::int64_t packs;   // Whole packs.
  std::int64_t rest;    // Elements after the whole packs.
  std::int64_t span;    // Packs of a span.
  std::int64_t copies;  // Rows of a span.
  std::int64_t spans;   // The last span may be incomplete.
  std::int64_t tiles;   // Tiles of a span.
  std::int64_t slices;  // Slices of the spans; forward: of turns * at_once spans.
  int lanes;            // Packs of a tile.
  int inverse_lanes;    // 2^20 / lanes, rounded up.
  int at_once;          // Spans that a block takes at once.
  int turns;            // Forward: the packs of a thread.

  // Cuts spans into tiles of `tile_packs` packs.
  constexpr void CutSpans(int tile_packs) {
    lanes = tile_packs;
    inverse_lanes = static_cast<int>(CeilDiv(1 << 20, lanes));
    at_once = std::max(1, kGeluThreads / lanes);
    tiles = CeilDiv(span, lanes);
    spans = CeilDiv(packs + (rest > 0), span);
  }
  constexpr int threads() const { return lanes * at_once; }
  // Makes spans `times` times as long.
  constexpr void Repeat(std::int64_t times) { copies *= times, span *= times; }
  constexpr void EndWithLines() { Repeat(kLinePacks / std::gcd<std::int64_t>(span, kLinePacks)); }
  // The part of the tiles' places that is within the span; and the part of a block's kGeluThreads
  // threads that have a pack.
  constexpr double PartOfTiles() const {
    return static_cast<double>(span) / static_cast<double>(tiles * lanes);
  }
  constexpr double PartAtWork() const {
    return tiles == 0 ? 0 : PartOfTiles() * threads() / kGeluThreads;
  }
  // Whether a block adds up all rows of a span.
  constexpr bool folded() const { return tiles == 1; }
  // Partial rows of dbias that a slice of a group of `rows` rows leaves.
  constexpr std::int64_t partial_rows(std::int64_t rows) const {
    return folded() ? 1 : std::min(copies, rows);
  }
};

// Spans for packs of `width` elements: the fewest whole rows that end where a pack does. If these
// are short, a span is several of them.
inline GeluCut ShortestSpans(const RowShape& shape, int width, bool has_columns) {
  const std::int64_t elements = shape.rows * shape.features;
  GeluCut cut{};
  cut.packs = elements / width, cut.rest = elements % width;
  cut.span = kGeluLanes, cut.copies = 1;
  if (has_columns) {
    cut.copies = width / std::gcd<std::int64_t>(shape.features, width);
    cut.span = shape.features * cut.copies / width;
    cut.Repeat(std::max<std::int64_t>(1, kGeluLanes / cut.span));
  }
  return cut;
}

// The cut for forward. A thread takes at most `most_turns` packs. The GPU runs `resident` blocks at
// once. What they read should lie close together. Blocks of neighbouring tiles start one after the
// other, so tiles of long spans are wide.
inline GeluCut CutForward(const RowShape& shape, int width, bool has_columns, int most_turns,
                          std::int64_t resident) {
  constexpr std::int64_t kLongSpan = 4096;
  GeluCut cut = ShortestSpans(shape, width, has_columns);
  if (has_columns && cut.packs >= resident * kGeluThreads) {
    GeluCut lines = cut;
    lines.EndWithLines();
    if (lines.span <= cut.packs) cut = lines;  // else tiles lie mostly beyond the array
  }
  GeluCut best{};
  for (const int tile_packs : {256, 128, 64, kGeluLanes, 40, 24, 16, 8}) {
    if (tile_packs > 40 && cut.span < kLongSpan) continue;
    cut.CutSpans(tile_packs);
    if (cut.PartAtWork() > best.PartAtWork()) best = cut;
    if (best.PartAtWork() > 0.93) break;
  }
  // Few spans are spread over all multiprocessors before a thread gets several.
  const std::int64_t blocks = CeilDiv(best.spans, best.at_once) * best.tiles * shape.groups;
  best.turns = static_cast<int>(std::clamp<std::int64_t>(blocks / (2 * resident), 1, most_turns));
  best.slices = CeilDiv(best.spans, std::int64_t{best.at_once} * best.turns);
  return best;
}

// A cut for backward of small arrays. If spans of narrow rows fill a block, tiles are whole spans.
inline GeluCut CutShortestSpans(const RowShape& shape, int width, bool has_columns,
                                std::int64_t resident) {
  GeluCut cut = ShortestSpans(shape, width, has_columns);
  if (cut.span % kLinePacks != 0 && cut.packs >= resident * kGeluThreads &&
      8 * (kGeluThreads / cut.span * cut.span) >= 7 * kGeluThreads) {
    cut.CutSpans(static_cast<int>(cut.span));
    return cut;
  }
  cut.CutSpans(kGeluLanes);
  // A span of several rows that is one tile stays one tile: its block adds the rows up.
  if (cut.copies > 1 && cut.folded()) return cut;
  for (int lanes = kGeluLanes / 2; lanes >= 8; lanes /= 2) {
    GeluCut narrow = cut;
    narrow.CutSpans(lanes);
    if (cut.PartOfTiles() < 0.875 && narrow.PartOfTiles() > cut.PartOfTiles()) cut = narrow;
  }
  return cut;
}

// The cut for backward that takes the least time, with its slices. It has 0 slices if every cut
// leaves more than `most_partial_rows` partial rows of dbias. most_partial_rows 0: no dbias.
inline GeluCut CutBackward(const RowShape& shape, int width, int element_bytes, bool has_columns,
                           std::int64_t most_partial_rows, std::int64_t resident) {
  const bool sums = most_partial_rows > 0;
  const GeluCut shortest = CutShortestSpans(shape, width, has_columns, resident);
  GeluCut best = shortest;
  double least_cost = 0;
  // The cost is a time, in bytes that could be read in it. All threads of a wave of blocks take as
  // long as the thread with most turns, and fewer than kGeluThreads leave bandwidth unused. Each
  // wave takes time to start and to end. Lines that two tiles share cost more than their bytes,
  // because the tiles are read at different times. Another kernel adds up the partial rows.
  const auto consider = [&](GeluCut cut, std::int64_t slices) {
    constexpr double kPerWave = 0.05, kSharedLines = 1.3, kKernel = 8e6;
    const auto waves = static_cast<double>(CeilDiv(slices * cut.tiles * shape.groups, resident));
    const auto turns = static_cast<double>(CeilDiv(cut.spans, cut.at_once * slices));
    double cost = static_cast<double>(3 * 16 * std::max(cut.threads(), kGeluThreads) * resident) *
                  turns * waves * (1 + kPerWave * waves);
    if ((cut.folded() ? cut.at_once * cut.span : cut.span) % kLinePacks != 0) cost *= kSharedLines;
    const std::int64_t rows = sums ? slices * cut.partial_rows(shape.rows) : 0;
    if (rows > 1) {
      const int sum_bytes = std::max(4, element_bytes);
      cost += kKernel + static_cast<double>(2 * rows * shape.groups * shape.features * sum_bytes);
    }
    if (least_cost == 0 || cost < least_cost) best = cut, best.slices = slices, least_cost = cost;
  };
  const auto consider_slices = [&](const GeluCut& cut) {
    std::int64_t most = CeilDiv(cut.spans, cut.at_once);
    if (sums) most = std::min(most, most_partial_rows / cut.partial_rows(shape.rows));
    if (most == 0) return most;
    const double wave =
        static_cast<double>(resident) / static_cast<double>(cut.tiles * shape.groups);
    for (int waves = 1; waves <= 4; ++waves) {
      consider(cut, std::clamp(static_cast<std::int64_t>(waves * wave), std::int64_t{1}, most));
      if (cut.tiles * shape.groups * most <= waves * resident) break;
    }
    return most;
  };
  best.slices = 0;
  const std::int64_t most = consider_slices(shortest);
  for (int slices = 1; slices <= std::min<std::int64_t>(8, most); ++slices)
    consider(shortest, slices);
  if (!has_columns || shortest.packs < 8 * resident * kGeluThreads) return best;
  // For large arrays: spans that end with cache lines, in tiles of all sizes.
  GeluCut cut = shortest;
  cut.EndWithLines();
  for (int lanes = 2 * kLinePacks; lanes <= kMostGeluThreads; lanes += kLinePacks) {
    cut.CutSpans(static_cast<int>(std::min<std::int64_t>(lanes, cut.span)));
    consider_slices(cut);
    if (cut.folded()) break;
  }
  return best;
}

}  // namespace gradops
