// Bundles that are taken in one pass over the arrays: which kernel does so, and how it divides
// them. Plain C++, no CUDA. README.md has the words.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/description.h"
#include "common/integers.h"
#include "cuda/batch_norm/plan.h"

namespace gradops {

// --- A block has a bundle ------------------------------------------------------------------------

inline constexpr int kBundleWarps = 16;   // the most warps of a block
inline constexpr int kPieceVectors = 64;  // the most vectors of a piece

// A block takes one bundle of a group, if x has one row: the bundle then lies in one stretch of
// memory. If its arrays fit into shared memory, they are read once. If only x fits, dy is read
// twice. A channel is cut into pieces, and each piece is the work of a run of lanes of one warp. So
// each sum of a piece belongs to one channel. Runs are shorter than a warp if channels are short.
// In this picture, a channel has 4 vectors, a piece has 2, and there are two runs:
//
//   channel         0           1           2
//   vector     0  1  2  3  0  1  2  3  0  1  2  3
//   run        0  0  1  1  0  0  1  1  0  0  1  1
struct BundlePieces {
  int bundle;           // channels
  int channels;         // 1 if vectors may cross channels: the bundle then counts as one channel
  int channel_vectors;  // vectors of a channel
  int piece_vectors;    // vectors of a piece; the last piece of a channel may have fewer
  int channel_pieces;   // pieces of a channel
  int lane_bits;        // a run has 1 << lane_bits lanes
  int warps, runs;      // of a block; no warps: a block cannot take the bundle
  int array_bytes;      // of a bundle of x
  int numbers_bytes;    // of the channels' numbers
  int shared_bytes;

  constexpr int pieces() const { return channels * channel_pieces; }
};

// --- A run of lanes has a bundle -----------------------------------------------------------------

inline constexpr int kSmallThreads = 256;  // threads of a block
inline constexpr int kSmallVectors = 2;    // the most vectors of a lane

// A run of lanes has all vectors of a small bundle in registers. The bundle is a matrix of vectors.
// Its columns are padded to a power of two, and its places are counted row by row: lane i has the
// places i and i + lanes.
struct SmallLayout {
  struct Place {
    int row, column;
  };

  int lane_bits;    // a run has 1 << lane_bits lanes
  int rows;         // 0: the bundle is not small
  int row_vectors;  // columns
  int column_bits;  // there are 1 << column_bits columns with padding
  int bundle_row;   // elements of a row

  // The place of a lane's vector. There may be no such row or column.
  constexpr Place PlaceOf(int vector, int lane) const {
    const int place = (vector << lane_bits) + lane;
    return {place >> column_bits, place & ((1 << column_bits) - 1)};
  }
};

// --- The choice ----------------------------------------------------------------------------------

struct BundlePlan {
  bool backward;
  int width;  // elements of a vector; 0: no kernel takes bundles in one pass
  int held;   // arrays in a block's shared memory
  BundlePieces block;
  SmallLayout small;
};

namespace bundle_choice {

// The fewest lanes, as a power of two, with which each has at most `each` of the vectors.
constexpr int LaneBits(std::int64_t vectors, int each) {
  int bits = 0;
  while ((std::int64_t{each} << bits) < vectors) ++bits;
  return bits;
}

// `held` arrays stay in shared memory, and two numbers for each channel.
constexpr BundlePieces CutBundle(const ChannelTask& task, int width, int held) {
  constexpr int kNumbers = 2;
  // Backward, each piece is in one channel. Forward, vectors may cross channels.
  const bool joined = !task.backward && task.inner % width != 0;
  const std::int64_t elements = task.bundle * task.inner, channels = joined ? 1 : task.bundle;
  if (task.rows != 1 || elements / channels % width != 0) return {};
  const std::int64_t vectors = elements / channels / width;  // of a channel
  const std::int64_t bytes = CeilDiv(elements * task.element_bytes, 16) * 16;
  const std::int64_t piece = std::min<std::int64_t>(vectors, kPieceVectors);
  const std::int64_t pieces = CeilDiv(vectors, piece) * channels;
  const std::int64_t of_numbers = CeilDiv(task.bundle * kNumbers * task.accum_bytes, 16) * 16;
  const std::int64_t all = held * bytes + of_numbers + (pieces * 2 + 2 * kBundleWarps) * 8;
  if (all > MaxChannelBytes(task.device.shared_bytes)) return {};
  // The kernels use up to 64 registers: a multiprocessor runs 32 warps. With up to 48 KB, it runs
  // four blocks.
  const std::int64_t most_warps = all <= 48 * 1024 ? kBundleWarps / 2 : kBundleWarps;
  constexpr std::int64_t kWarpVectors = 4 * kWarpThreads;
  const std::int64_t warps =
      std::clamp<std::int64_t>(elements / width / kWarpVectors, 1, most_warps);
  const int lane_bits = LaneBits(std::min<std::int64_t>(vectors, kWarpThreads), 1);
  return {.bundle = static_cast<int>(task.bundle),
          .channels = static_cast<int>(channels),
          .channel_vectors = static_cast<int>(vectors),
          .piece_vectors = static_cast<int>(piece),
          .channel_pieces = static_cast<int>(pieces / channels),
          .lane_bits = lane_bits,
          .warps = static_cast<int>(warps),
          .runs = static_cast<int>(warps) * (kWarpThreads >> lane_bits),
          .array_bytes = static_cast<int>(bytes),
          .numbers_bytes = static_cast<int>(of_numbers),
          .shared_bytes = static_cast<int>(all)};
}

constexpr SmallLayout CutSmall(const ChannelTask& task, int width) {
  constexpr std::int64_t kMost = kWarpThreads * kSmallVectors;  // vectors
  // With more rows of single elements, the other kernels are faster.
  const std::int64_t most_rows = width > 1 ? kMost : 16;
  const std::int64_t row = task.bundle * task.inner;
  // The other kernels are better for a single matrix.
  if (task.groups == 1 && task.rows > 1) return {};
  if (task.rows > most_rows || row % width != 0 || row / width > kMost) return {};
  const int column_bits = LaneBits(row / width, 1);
  if (task.rows << column_bits > kMost) return {};
  int lane_bits = LaneBits(task.rows << column_bits, kSmallVectors);
  if (task.backward && task.bundle > 1) {
    // Each channel has sums. All vectors of a lane are in one column, with a channel per element.
    if (task.inner != 1) return {};
    lane_bits = std::max(lane_bits, column_bits);
  }
  if (1 << lane_bits > kWarpThreads) return {};
  return {.lane_bits = lane_bits,
          .rows = static_cast<int>(task.rows),
          .row_vectors = static_cast<int>(row / width),
          .column_bits = column_bits,
          .bundle_row = static_cast<int>(row)};
}

}  // namespace bundle_choice

// The plan for a task with elements. Backward: y is not given.
constexpr BundlePlan ChooseBundlePlan(const ChannelTask& task) {
  using namespace bundle_choice;
  // The most elements of a channel if vectors have one element, and the most bytes of a channel if
  // only x stays in shared memory. For longer channels, BatchNormBwdKernel is as fast.
  constexpr std::int64_t kMostElements = 2048, kMostBytes = 32 * 1024;
  if (!task.statistics) return {};
  for (const int width : {16 / task.element_bytes, 1}) {
    if (width > 1 && !task.aligned) continue;
    const SmallLayout small = CutSmall(task, width);
    if (small.rows > 0) return {task.backward, width, 0, {}, small};
    if (task.backward && width == 1 && task.inner > kMostElements) continue;
    const int arrays = task.backward ? 2 : 1;
    const BundlePieces all = CutBundle(task, width, arrays);
    if (all.warps > 0) return {task.backward, width, arrays, all, {}};
    if (!task.backward || width == 1 || task.inner * task.element_bytes > kMostBytes) continue;
    const BundlePieces of_x = CutBundle(task, width, 1);
    if (of_x.warps > 0) return {task.backward, width, 1, of_x, {}};
  }
  return {};
}

// The plan in numbers, for tests and people. The kernel has no name if there is no such plan.
inline Description Describe(const BundlePlan& plan) {
  const std::string file = plan.backward ? "batch_norm/backward.cu" : "batch_norm/forward.cu";
  if (plan.width == 0) return {};
  if (plan.small.rows > 0) {
    return {plan.backward ? "SmallBundleBwdKernel" : "SmallBundleFwdKernel",
            file,
            {{"width", plan.width, "elements of a vector"},
             {"lanes", 1 << plan.small.lane_bits, "lanes of a warp that share a bundle"},
             {"rows", plan.small.rows, "rows of a bundle"},
             {"row_vectors", plan.small.row_vectors, "vectors of a row of a bundle"},
             {"columns", 1 << plan.small.column_bits, "vectors of a row with padding"}}};
  }
  return {plan.backward ? "BundleBwdKernel" : "BundleFwdKernel",
          file,
          {{"width", plan.width, "elements of a vector"},
           {"held", plan.held, "arrays that stay in shared memory"},
           {"channel_vectors", plan.block.channel_vectors, "vectors of a channel"},
           {"channel_pieces", plan.block.channel_pieces, "pieces of a channel"},
           {"lanes", 1 << plan.block.lane_bits, "lanes that work on a piece"},
           {"warps", plan.block.warps, "warps of a block"},
           {"shared_bytes", plan.block.shared_bytes, "shared memory of a block, in bytes"}}};
}

}  // namespace gradops
