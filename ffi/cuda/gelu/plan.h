// How GELU's arrays are cut into vectors, bands, tiles and slices, and the rule that chooses it.
// Plain C++, no CUDA. README.md has the words and a picture. The constants were measured on an H200
// (benchmarks/tuning/README.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/description.h"
#include "common/integers.h"
#include "common/shape.h"
#include "cuda/common/cache_line.h"

namespace gradops {

inline constexpr int kGeluThreads = 256;      // threads of a block
inline constexpr int kMostGeluThreads = 320;  // backward: most threads of a block
inline constexpr int kGeluTileVectors = 32;   // usual vectors of a tile
// Blocks of a multiprocessor.
inline constexpr int kGeluForwardBlocks = 4, kGeluBackwardBlocks = 2;

// Forward: the most vectors of a thread, all loaded before any is worked on. With double, 6 take
// more time.
constexpr int MostGeluVectors(int element_bytes) {
  return element_bytes == 8 ? 5 : 6;
}

// What the choice depends on.
struct GeluTask {
  RowShape shape;
  int element_bytes;
  bool aligned;               // All arrays start at 16-byte boundaries.
  bool has_columns;           // There is a bias or dbias.
  std::int64_t partial_rows;  // Backward: partial rows of dbias in the workspace. 0: no dbias.
  int multiprocessors;
};

struct GeluPlan {
  std::int64_t vectors;       // Whole vectors of a group.
  std::int64_t rest;          // Elements after the whole vectors.
  std::int64_t band_vectors;  // Vectors of a band.
  std::int64_t band_rows;
  std::int64_t bands;   // The last band may be incomplete.
  std::int64_t tiles;   // Tiles of a band.
  std::int64_t slices;  // Forward: a slice has thread_vectors * block_bands bands.
  int tile_vectors;     // Vectors of a tile in a band.
  int inverse;          // 2^20 / tile_vectors, rounded up.
  int block_bands;      // Bands that a block takes at once.
  int thread_vectors;   // Forward: the vectors of a thread.
  int width;            // Elements of a vector.
  bool backward;
  std::int64_t rows;  // Rows of a group.

  // This plan with tiles of other sizes.
  constexpr GeluPlan WithTiles(std::int64_t size) const {
    GeluPlan plan = *this;
    plan.tile_vectors = static_cast<int>(size);
    plan.inverse = static_cast<int>(CeilDiv(1 << 20, size));
    plan.block_bands = std::max(1, kGeluThreads / plan.tile_vectors);
    plan.tiles = CeilDiv(band_vectors, size);
    plan.bands = CeilDiv(vectors + (rest > 0), band_vectors);
    return plan;
  }
  // This plan with bands that are `times` times as long. They have to be cut into tiles again.
  constexpr GeluPlan WithLongerBands(std::int64_t times) const {
    GeluPlan plan = *this;
    plan.band_rows *= times, plan.band_vectors *= times;
    return plan;
  }
  constexpr GeluPlan WithWholeLines() const {
    return WithLongerBands(kLineVectors / std::gcd<std::int64_t>(band_vectors, kLineVectors));
  }
  constexpr int threads() const { return tile_vectors * block_bands; }
  // The part of the tiles' places that is within the band; and the part of a block's kGeluThreads
  // threads that have a vector.
  constexpr double PartOfTiles() const {
    return static_cast<double>(band_vectors) / static_cast<double>(tiles * tile_vectors);
  }
  constexpr double PartAtWork() const {
    return tiles == 0 ? 0 : PartOfTiles() * threads() / kGeluThreads;
  }
  // Whether a block adds up all rows of a band.
  constexpr bool one_tile() const { return tiles == 1; }
  // Partial rows of dbias that a slice leaves.
  constexpr std::int64_t partial_rows() const { return one_tile() ? 1 : std::min(band_rows, rows); }
};

namespace gelu_choice {

// Blocks that the GPU runs at once.
constexpr std::int64_t Resident(const GeluTask& task, bool backward) {
  return std::int64_t{backward ? kGeluBackwardBlocks : kGeluForwardBlocks} * task.multiprocessors;
}

// Vectors have 16 bytes if every group starts at a 16-byte boundary.
constexpr int Width(const GeluTask& task) {
  const int width = 16 / task.element_bytes;
  const bool whole = task.shape.groups == 1 || task.shape.rows * task.shape.features % width == 0;
  return task.aligned && whole ? width : 1;
}

// Bands of the fewest whole rows that end where a vector does. If these are short, a band is
// several of them.
constexpr GeluPlan ShortestBands(const GeluTask& task, int width, bool backward) {
  const auto [groups, rows, features] = task.shape;
  GeluPlan plan{};
  plan.width = width, plan.backward = backward, plan.rows = rows;
  plan.vectors = rows * features / width, plan.rest = rows * features % width;
  plan.band_vectors = kGeluTileVectors, plan.band_rows = 1;
  if (!task.has_columns) return plan;
  plan.band_rows = width / std::gcd<std::int64_t>(features, width);
  plan.band_vectors = features * plan.band_rows / width;
  return plan.WithLongerBands(std::max<std::int64_t>(1, kGeluTileVectors / plan.band_vectors));
}

// Backward, small arrays. If bands of narrow rows fill a block, tiles are whole bands.
constexpr GeluPlan CutShortestBands(const GeluTask& task, int width) {
  const GeluPlan bands = ShortestBands(task, width, /*backward=*/true);
  const std::int64_t size = bands.band_vectors;
  if (size % kLineVectors != 0 && bands.vectors >= Resident(task, true) * kGeluThreads &&
      8 * (kGeluThreads / size * size) >= 7 * kGeluThreads) {
    return bands.WithTiles(size);
  }
  GeluPlan plan = bands.WithTiles(kGeluTileVectors);
  // A band of several rows that is one tile stays one tile: its block adds the rows up.
  if (plan.band_rows > 1 && plan.one_tile()) return plan;
  for (int tile_vectors = kGeluTileVectors / 2; tile_vectors >= 8; tile_vectors /= 2) {
    const GeluPlan narrow = plan.WithTiles(tile_vectors);
    if (plan.PartOfTiles() < 0.875 && narrow.PartOfTiles() > plan.PartOfTiles()) plan = narrow;
  }
  return plan;
}

// The time that a plan takes backward, in bytes that could be read in it. All threads of a wave of
// blocks take as long as the thread with most vectors, and fewer than kGeluThreads leave bandwidth
// unused. Each wave takes time to start and to end. Lines that two tiles share cost more than their
// bytes, because the tiles are read at different times. Another kernel adds up the partial rows.
constexpr double BackwardCost(const GeluTask& task, const GeluPlan& plan) {
  constexpr double kPerWave = 0.05, kSharedLines = 1.3, kKernel = 8e6;
  const std::int64_t groups = task.shape.groups, resident = Resident(task, true);
  const auto waves = static_cast<double>(CeilDiv(plan.slices * plan.tiles * groups, resident));
  const auto vectors = static_cast<double>(CeilDiv(plan.bands, plan.block_bands * plan.slices));
  double cost = static_cast<double>(3 * 16 * std::max(plan.threads(), kGeluThreads) * resident) *
                vectors * waves * (1 + kPerWave * waves);
  const std::int64_t run = plan.one_tile() ? plan.block_bands * plan.band_vectors
                                           : plan.band_vectors;  // vectors without a gap
  if (run % kLineVectors != 0) cost *= kSharedLines;
  const std::int64_t rows = task.partial_rows > 0 ? plan.slices * plan.partial_rows() : 0;
  if (rows > 1) {
    const int sum_bytes = std::max(4, task.element_bytes);
    cost += kKernel + static_cast<double>(2 * rows * groups * task.shape.features * sum_bytes);
  }
  return cost;
}

// The plan for vectors of `width` elements that takes the least time. It has 0 slices if every plan
// leaves more partial rows of dbias than the workspace has.
constexpr GeluPlan ChooseBackward(const GeluTask& task, int width) {
  const std::int64_t groups = task.shape.groups, resident = Resident(task, true);
  const GeluPlan shortest = CutShortestBands(task, width);
  GeluPlan best = shortest;
  best.slices = 0;
  double least_cost = 0;
  const auto consider = [&](GeluPlan plan, std::int64_t slices) {
    plan.slices = slices;
    const double cost = BackwardCost(task, plan);
    if (least_cost == 0 || cost < least_cost) best = plan, least_cost = cost;
  };
  const auto consider_slices = [&](const GeluPlan& plan) {
    std::int64_t most = CeilDiv(plan.bands, plan.block_bands);
    if (task.partial_rows > 0) most = std::min(most, task.partial_rows / plan.partial_rows());
    if (most == 0) return most;
    const double wave = static_cast<double>(resident) / static_cast<double>(plan.tiles * groups);
    for (int waves = 1; waves <= 4; ++waves) {
      consider(plan, std::clamp(static_cast<std::int64_t>(waves * wave), std::int64_t{1}, most));
      if (plan.tiles * groups * most <= waves * resident) break;
    }
    return most;
  };
  const std::int64_t most = consider_slices(shortest);
  for (int slices = 1; slices <= std::min<std::int64_t>(8, most); ++slices)
    consider(shortest, slices);
  if (!task.has_columns || shortest.vectors < 8 * resident * kGeluThreads) return best;
  // For large arrays: bands that end with cache lines, in tiles of all sizes.
  const GeluPlan lines = shortest.WithWholeLines();
  for (int size = 2 * kLineVectors; size <= kMostGeluThreads; size += kLineVectors) {
    const GeluPlan plan = lines.WithTiles(std::min<std::int64_t>(size, lines.band_vectors));
    consider_slices(plan);
    if (plan.one_tile()) break;
  }
  return best;
}

}  // namespace gelu_choice

// The plan for forward. What the blocks that run at once read should lie close together. Blocks of
// neighbouring tiles start one after the other, so tiles of long bands are wide.
constexpr GeluPlan ChooseGeluForwardPlan(const GeluTask& task) {
  using namespace gelu_choice;
  constexpr std::int64_t kLongBand = 4096;
  const std::int64_t resident = Resident(task, /*backward=*/false);
  GeluPlan bands = ShortestBands(task, Width(task), /*backward=*/false);
  if (task.has_columns && bands.vectors >= resident * kGeluThreads) {
    const GeluPlan lines = bands.WithWholeLines();
    if (lines.band_vectors <= bands.vectors) bands = lines;  // else tiles lie beyond the array
  }
  GeluPlan best{};
  for (const int tile_vectors : {256, 128, 64, kGeluTileVectors, 40, 24, 16, 8}) {
    if (tile_vectors > 40 && bands.band_vectors < kLongBand) continue;
    const GeluPlan plan = bands.WithTiles(tile_vectors);
    if (plan.PartAtWork() > best.PartAtWork()) best = plan;
    if (best.PartAtWork() > 0.93) break;
  }
  // Few bands are spread over all multiprocessors before a thread gets several vectors.
  const std::int64_t blocks =
      CeilDiv(best.bands, best.block_bands) * best.tiles * task.shape.groups;
  best.thread_vectors = static_cast<int>(
      std::clamp<std::int64_t>(blocks / (2 * resident), 1, MostGeluVectors(task.element_bytes)));
  best.slices = CeilDiv(best.bands, std::int64_t{best.block_bands} * best.thread_vectors);
  return best;
}

// The plan for backward. If rows start within vectors, the workspace may have too few partial rows
// for vectors of 16 bytes.
constexpr GeluPlan ChooseGeluBackwardPlan(const GeluTask& task) {
  const GeluPlan plan = gelu_choice::ChooseBackward(task, gelu_choice::Width(task));
  return plan.slices > 0 ? plan : gelu_choice::ChooseBackward(task, 1);
}

// The plan in numbers, for tests and people.
inline Description Describe(const GeluPlan& plan) {
  return {plan.backward ? "GeluBackwardKernel" : "GeluForwardKernel",
          "gelu/bias_gelu.cu",
          {{"width", plan.width, "elements of a vector"},
           {"vectors", plan.vectors, "whole vectors of a group"},
           {"band_vectors", plan.band_vectors, "vectors of a band"},
           {"band_rows", plan.band_rows, "rows of a band, which ends where a vector ends"},
           {"bands", plan.bands, "bands of a group"},
           {"tiles", plan.tiles, "tiles of a band"},
           {"tile_vectors", plan.tile_vectors, "vectors of a tile in a band"},
           {"inverse", plan.inverse, "2^20 / tile_vectors, rounded up"},
           {"block_bands", plan.block_bands, "bands that a block takes at once"},
           {"thread_vectors", plan.thread_vectors, "vectors of a thread"},
           {"slices", plan.slices, "parts of the bands, one for each block of a tile"},
           {"partial_rows", plan.partial_rows(), "partial rows of dbias for each block"}}};
}

}  // namespace gradops
