// Bundles that are taken in one pass over the arrays: which kernel does so, and how it divides
// them. Plain C++, no CUDA. README.md has the words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "common/description.h"
#include "common/integers.h"
#include "cuda/batch_norm/plan.h"

namespace gradops {

// --- A block or a cluster has a bundle -----------------------------------------------------------

inline constexpr int kBundleWarps = 16;  // the most warps of a block
// A multiprocessor has room for two blocks of 20 warps. So a thread has up to 48 registers.
inline constexpr int kRegisterWarps = 20;
inline constexpr int kClusterBits = 3;    // a cluster has at most 1 << kClusterBits blocks
inline constexpr int kPieceVectors = 64;  // the most vectors of a piece
static_assert(kBundleWarps <= kRegisterWarps);

// A block or a cluster takes one bundle of a group, if x has one row: the bundle then lies in one
// stretch of memory. The blocks keep it in shared memory, so it is read once. A channel is cut into
// pieces, and each piece is the work of a run of lanes of one warp. A piece has elements of one
// channel, and so has its sum. Runs are shorter than a warp if channels are short. In this picture,
// a channel has 4 vectors, a piece has 2, there are two blocks, and a block has two runs:
//
//   channel         0           1           2
//   vector     0  1  2  3  0  1  2  3  0  1  2  3
//   block      0  0  0  0  0  0  1  1  1  1  1  1
//   run        0  0  1  1  0  0  0  0  1  1  0  0
struct BundlePieces {
  int bundle;           // channels
  int channels;         // 1 if vectors may cross channels: the bundle then counts as one channel
  int channel_vectors;  // vectors of a channel
  int piece_vectors;    // vectors of a piece; the last piece of a channel may have fewer
  int channel_pieces;   // pieces of a channel
  int block_bits;       // 1 << block_bits blocks take the bundle
  int block_pieces;     // pieces of a block; the last block may have fewer
  int sum_pieces;       // pieces whose sums are in shared memory: backward, the block's
  int lane_bits;        // a run has 1 << lane_bits lanes
  int sum_bits;         // 1 << sum_bits lanes add up the sums of a channel's pieces
  int warps, runs;      // of a block; no warps: these blocks cannot take the bundle
  int array_bytes;      // of a block's part of x
  int numbers_bytes;    // of the channels' numbers
  int shared_bytes;     // of a block
  double per_element;   // 1 / elements of a bundle

  constexpr int pieces() const { return channels * channel_pieces; }
};

// --- A run of lanes has a bundle -----------------------------------------------------------------

inline constexpr int kSmallThreads = 256;  // threads of a block

// The most vectors of a lane, for vectors of `width` elements.
constexpr int SmallVectors(int width) {
  return width > 1 ? 2 : 8;
}

// A run of lanes has all vectors of a small bundle in registers, if x has one row: lane i has the
// vectors i, i + lanes, and so on.
struct SmallLayout {
  int lane_bits;       // a run has 1 << lane_bits lanes
  int vectors;         // of a bundle; 0: the bundle is not small
  double per_element;  // 1 / elements of a bundle
};

// --- A block has a panel -------------------------------------------------------------------------

inline constexpr int kPanelWarps = 8;    // the most warps of a block
inline constexpr int kPanelNumbers = 4;  // of each bundle, at most
inline constexpr int kPanelSums = 2;     // of each thread and sum column, at most

// A block takes a panel, if channels are last: some neighbouring bundles of a group, or some whole
// groups. A group is a matrix then, and a panel has some of its columns. The columns of further
// groups follow. Threads are numbered row by row, and each stays in its column of vectors. In this
// picture, rows have 8 vectors, a panel has 4, and a step has two rows. These are the threads:
//
//           panel 0          panel 1
//   row 0   0  1  2  3       0  1  2  3
//   row 1   4  5  6  7       4  5  6  7
//   row 2   0  1  2  3       0  1  2  3
//
// A thread has sums for each element of its vector. Forward, it has one sum for the vector if
// bundles are whole vectors. These are the sum columns.
struct PanelLayout {
  int groups;        // 1: a panel is a part of a group, or a group
  int bundle;        // channels
  int channels;      // of a panel; 0: no block takes panels. The last panel may have fewer.
  int rows;          // of x
  int row_vectors;   // of a panel
  int step_rows;     // the rows of a step
  int sum_elements;  // neighbouring elements of a sum column
  // A run of 1 << lane_bits lanes adds up what threads have of a bundle. 1 << column_bits of them
  // have neighbouring sum columns.
  int lane_bits, column_bits;
  int warps;          // of a block
  int array_bytes;    // of a panel of x
  int numbers_bytes;  // of the bundles' numbers
  int shared_bytes;
  // The distances, in shared memory, between a thread's sums of neighbouring elements, and between
  // the numbers of neighbouring bundles. They are odd, so that lanes do not share banks.
  int sum_pitch, number_pitch;
  double per_element;  // 1 / elements of a bundle

  // The panels of x. Each has `groups` groups, or a group has several panels.
  constexpr std::int64_t PanelsOfGroup(std::int64_t all_channels) const {
    return groups > 1 ? 1 : CeilDiv(all_channels, std::int64_t{channels});
  }
  constexpr std::int64_t Panels(std::int64_t all_groups, std::int64_t all_channels) const {
    return CeilDiv(all_groups, std::int64_t{groups}) * PanelsOfGroup(all_channels);
  }
};

// --- The choice ----------------------------------------------------------------------------------

struct BundlePlan {
  bool backward;
  int width;  // elements of a vector; 0: no kernel takes bundles in one pass
  BundlePieces block;
  SmallLayout small;
  PanelLayout panel;
};

namespace bundle_choice {

// A block of a cluster has at most kMostBytes of shared memory. Larger bundles are faster in two
// passes. Backward, many blocks of up to kSmallBytes are faster than few large ones.
inline constexpr int kMostBytes = 75 * 1024, kSmallBytes = 48 * 1024;

inline constexpr int kLeastWarps = 6;  // of a block with enough vectors

// The fewest lanes, as a power of two, with which each has at most `each` of the items.
constexpr int LaneBits(std::int64_t items, int each) {
  int bits = 0;
  while ((std::int64_t{each} << bits) < items) ++bits;
  return bits;
}

// The bundle among 1 << block_bits blocks.
constexpr BundlePieces CutBundle(const ChannelTask& task, int width, int block_bits) {
  constexpr int kNumbers = 2;  // of each channel, in each block
  // Backward, each piece is in one channel. Forward, vectors may cross channels.
  const bool joined = !task.backward && task.inner % width != 0;
  const std::int64_t elements = task.bundle * task.inner, channels = joined ? 1 : task.bundle;
  if (task.rows != 1 || elements / channels % width != 0) return {};
  const std::int64_t vectors = elements / channels / width;  // of a channel
  const std::int64_t piece = std::min<std::int64_t>(vectors, kPieceVectors);
  const std::int64_t of_channel = CeilDiv(vectors, piece), all_pieces = of_channel * channels;
  const std::int64_t pieces = CeilDiv(all_pieces, std::int64_t{1} << block_bits);
  if (pieces * ((1 << block_bits) - 1) >= all_pieces) return {};  // a block would have none
  const std::int64_t block_elements = std::min(elements, pieces * piece * width);
  const std::int64_t bytes = RoundUp(block_elements * task.element_bytes, 16);
  const std::int64_t of_numbers = RoundUp(task.bundle * kNumbers * task.accum_bytes, 16);
  // Sums in pairs, as BundleBlock has them.
  const std::int64_t of_pieces = task.backward ? pieces : 0;
  const std::int64_t of_cluster = 2 + (task.backward ? CeilDiv(pieces, of_channel) + 1 : 0);
  const std::int64_t pairs = kBundleWarps + of_pieces + (block_bits > 0 ? of_cluster : 0);
  const std::int64_t all = (task.backward ? 2 : 1) * bytes + of_numbers + pairs * 2 * 8;
  if (all > MaxChannelBytes(task.device.shared_bytes)) return {};
  // A multiprocessor has the blocks that fit its shared memory, or fewer if x has few bundles. CUDA
  // takes 1 KB for each block.
  const std::int64_t all_blocks = task.groups * (task.channels / task.bundle) << block_bits;
  const std::int64_t blocks = std::min(task.device.shared_bytes / (all + 1024),
                                       CeilDiv(all_blocks, task.device.multiprocessors));
  const std::int64_t share = std::clamp<std::int64_t>(
      2 * kRegisterWarps / std::max<std::int64_t>(1, blocks), kLeastWarps, kBundleWarps);
  constexpr std::int64_t kWarpVectors = 4 * kWarpThreads;
  const std::int64_t warps =
      std::clamp<std::int64_t>(block_elements / width / kWarpVectors, 1, share);
  const int lane_bits = LaneBits(std::min<std::int64_t>(vectors, kWarpThreads), 1);
  return {.bundle = static_cast<int>(task.bundle),
          .channels = static_cast<int>(channels),
          .channel_vectors = static_cast<int>(vectors),
          .piece_vectors = static_cast<int>(piece),
          .channel_pieces = static_cast<int>(of_channel),
          .block_bits = block_bits,
          .block_pieces = static_cast<int>(pieces),
          .sum_pieces = static_cast<int>(of_pieces),
          .lane_bits = lane_bits,
          .sum_bits = LaneBits(std::min<std::int64_t>(of_channel, kWarpThreads), 1),
          .warps = static_cast<int>(warps),
          .runs = static_cast<int>(warps) * (kWarpThreads >> lane_bits),
          .array_bytes = static_cast<int>(bytes),
          .numbers_bytes = static_cast<int>(of_numbers),
          .shared_bytes = static_cast<int>(all),
          .per_element = 1 / static_cast<double>(elements)};
}

// The blocks for a bundle. A block takes it alone if a multiprocessor has room for two such blocks.
// The blocks of a cluster are as large as may be, but backward small ones are faster.
constexpr BundlePieces ChooseBlocks(const ChannelTask& task, int width) {
  const BundlePieces alone = CutBundle(task, width, 0);
  if (!task.device.clusters || width == 1) return alone;
  if (alone.warps > 0 && 2 * alone.shared_bytes <= MaxChannelBytes(task.device.shared_bytes)) {
    return alone;
  }
  BundlePieces cut{};
  for (int bits = 1; bits <= kClusterBits; ++bits) {
    cut = CutBundle(task, width, bits);
    if (cut.warps > 0 && cut.shared_bytes <= (task.backward ? kSmallBytes : kMostBytes)) break;
  }
  return cut.warps > 0 && cut.shared_bytes <= kMostBytes ? cut : alone;
}

constexpr SmallLayout CutSmall(const ChannelTask& task, int width) {
  const std::int64_t elements = task.bundle * task.inner, vectors = elements / width;
  // Backward, sums are per channel: a channel must be one element, or the whole bundle.
  if (task.backward && task.bundle > 1 && task.inner > 1) return {};
  if (task.rows != 1 || elements % width != 0) return {};
  if (vectors > kWarpThreads * SmallVectors(width)) return {};
  return {.lane_bits = LaneBits(vectors, SmallVectors(width)),
          .vectors = static_cast<int>(vectors),
          .per_element = 1 / static_cast<double>(elements)};
}

// Of 1 << lane_bits lanes, 1 << the result have neighbouring columns, and the others have other
// rows. The lanes then take the least time.
constexpr int ColumnBits(int lane_bits, std::int64_t columns, std::int64_t rows) {
  constexpr std::int64_t kColumn = 8;  // a column's end takes as long as 8 rows
  int best = 0;
  std::int64_t least = 0;
  for (int bits = lane_bits; bits >= 0; --bits) {
    const std::int64_t time = CeilDiv(columns, std::int64_t{1} << bits) *
                              (CeilDiv(rows, std::int64_t{1} << (lane_bits - bits)) + kColumn);
    if (bits == lane_bits || time < least) best = bits, least = time;
  }
  return best;
}

inline constexpr std::int64_t kPanelThreads = 128;  // of a block, if a row has fewer vectors

// The layout of panels with a number of channels.
constexpr PanelLayout PanelOf(const ChannelTask& task, int width, std::int64_t channels) {
  const std::int64_t row_vectors = channels / width, bundles = channels / task.bundle;
  const std::int64_t most_rows = std::max<std::int64_t>(1, kPanelThreads / row_vectors);
  const std::int64_t step_rows = CeilDiv(task.rows, CeilDiv(task.rows, most_rows));
  const std::int64_t warps = CeilDiv(step_rows * row_vectors, kWarpThreads);
  // Backward, each channel has sums.
  const int sum_elements = !task.backward && task.bundle % width == 0 ? width : 1;
  const std::int64_t sum_pitch = row_vectors | 1, number_pitch = CeilDiv(bundles, width) | 1;
  const std::int64_t array = RoundUp(task.rows * channels * task.element_bytes, 16);
  const std::int64_t numbers = RoundUp(kPanelNumbers * width * number_pitch * task.accum_bytes, 16);
  const std::int64_t sums =
      RoundUp(step_rows * kPanelSums * (width / sum_elements) * sum_pitch * task.accum_bytes, 16);
  const std::int64_t all = (task.backward ? 2 : 1) * array + numbers + sums;
  if (warps > kPanelWarps || all > MaxChannelBytes(task.device.shared_bytes)) return {};
  int lane_bits = 0;  // the most lanes with which all bundles have a run at the same time
  while (lane_bits < 5 && (bundles << (lane_bits + 1)) <= warps * kWarpThreads) ++lane_bits;
  return {.groups = static_cast<int>(std::max<std::int64_t>(1, channels / task.channels)),
          .bundle = static_cast<int>(task.bundle),
          .channels = static_cast<int>(channels),
          .rows = static_cast<int>(task.rows),
          .row_vectors = static_cast<int>(row_vectors),
          .step_rows = static_cast<int>(step_rows),
          .sum_elements = sum_elements,
          .lane_bits = lane_bits,
          .column_bits = ColumnBits(lane_bits, task.bundle / sum_elements, step_rows),
          .warps = static_cast<int>(warps),
          .array_bytes = static_cast<int>(array),
          .numbers_bytes = static_cast<int>(numbers),
          .shared_bytes = static_cast<int>(all),
          .sum_pitch = static_cast<int>(sum_pitch),
          .number_pitch = static_cast<int>(number_pitch),
          .per_element = 1 / static_cast<double>(task.rows * task.bundle)};
}

constexpr PanelLayout CutPanel(const ChannelTask& task, int width) {
  // What panels should have: bytes of a row in all arrays, bytes of an array, and panels for each
  // multiprocessor. What they must have: bytes of a row, or whole groups.
  constexpr std::int64_t kRowBytes = 128, kArrayBytes = 16 * 1024, kPanels = 2, kLeastBytes = 64;
  // With larger panels, the kernels of two passes are faster.
  const std::int64_t most_bytes = (task.backward ? 32 : 40) * 1024;
  // The other kernels are better for a single matrix.
  if (task.inner != 1 || task.channels % width != 0) return {};
  if (task.groups == 1 && task.rows > 1) return {};
  // A unit has the fewest channels that are whole bundles and whole vectors.
  const std::int64_t unit = std::lcm(task.bundle, std::int64_t{width});
  const std::int64_t bytes = unit * task.element_bytes, of_group = task.channels / unit;
  const std::int64_t row = CeilDiv(kRowBytes / (task.backward ? 2 : 1), bytes);
  const std::int64_t wanted =
      row * std::max<std::int64_t>(1, kArrayBytes / (row * bytes * task.rows));
  const std::int64_t least = CeilDiv(kLeastBytes, bytes), all = task.groups * of_group;
  const std::int64_t even = std::max(least, all / (kPanels * task.device.multiprocessors));
  const std::int64_t most = std::min(most_bytes / (bytes * task.rows),
                                     std::max<std::int64_t>(1, kPanelThreads * width / unit));
  std::int64_t units = std::min({wanted, even, most, all});
  if (units >= of_group) {
    units -= units % of_group;  // whole groups
  } else if (units < least) {
    return {};
  } else {
    units = CeilDiv(of_group, CeilDiv(of_group, units));  // panels of almost equal width
  }
  return PanelOf(task, width, units * unit);
}

}  // namespace bundle_choice

// The plan for a task with elements. Backward: y is not given.
constexpr BundlePlan ChooseBundlePlan(const ChannelTask& task) {
  using namespace bundle_choice;
  // The most elements of a channel if vectors have one element. For longer channels,
  // BatchNormBwdKernel is as fast.
  constexpr std::int64_t kMostElements = 2048;
  if (!task.statistics) return {};
  for (const int width : {16 / task.element_bytes, 1}) {
    if (width > 1 && !task.aligned) continue;
    const SmallLayout small = CutSmall(task, width);
    if (small.vectors > 0) return {task.backward, width, {}, small, {}};
    // Such small bundles are faster if each has a lane of its own.
    if (task.rows == 1 && task.inner == 1 && task.bundle < width) continue;
    const PanelLayout panel = CutPanel(task, width);
    if (panel.channels > 0) return {task.backward, width, {}, {}, panel};
    // No panel of vectors fits, or x is a single matrix. Panels of single elements would be slow.
    if (task.rows > 1 && task.inner == 1 && task.channels % width == 0) return {};
    if (task.backward && width == 1 && task.inner > kMostElements) continue;
    const BundlePieces block = ChooseBlocks(task, width);
    if (block.warps > 0) return {task.backward, width, block, {}, {}};
  }
  return {};
}

// The plan in numbers, for tests and people. The kernel has no name if there is no such plan.
inline Description Describe(const BundlePlan& plan) {
  const std::string direction = plan.backward ? "Bwd" : "Fwd";
  const std::string file =
      plan.backward ? "batch_norm/bundle_backward.cu" : "batch_norm/bundle_forward.cu";
  if (plan.width == 0) return {};
  if (plan.panel.channels > 0) {
    return {"Panel" + direction + "Kernel",
            file,
            {{"width", plan.width, "elements of a vector"},
             {"groups", plan.panel.groups, "groups of x in a panel; 1: also a part of one"},
             {"channels", plan.panel.channels, "channels of a panel, in all its groups"},
             {"row_vectors", plan.panel.row_vectors, "vectors of a row of a panel"},
             {"step_rows", plan.panel.step_rows, "rows that a block's threads load at a time"},
             {"lanes", 1 << plan.panel.lane_bits, "lanes that add up a bundle's sums"},
             {"warps", plan.panel.warps, "warps of a block"},
             {"shared_bytes", plan.panel.shared_bytes, "shared memory of a block, in bytes"}}};
  }
  if (plan.small.vectors > 0) {
    return {"SmallBundle" + direction + "Kernel",
            file,
            {{"width", plan.width, "elements of a vector"},
             {"lanes", 1 << plan.small.lane_bits, "lanes of a warp that share a bundle"},
             {"vectors", plan.small.vectors, "vectors of a bundle"}}};
  }
  return {"Bundle" + direction + "Kernel",
          file,
          {{"width", plan.width, "elements of a vector"},
           {"blocks", 1 << plan.block.block_bits, "blocks that share a bundle"},
           {"channel_vectors", plan.block.channel_vectors, "vectors of a channel"},
           {"channel_pieces", plan.block.channel_pieces, "pieces of a channel"},
           {"lanes", 1 << plan.block.lane_bits, "lanes that work on a piece"},
           {"warps", plan.block.warps, "warps of a block"},
           {"shared_bytes", plan.block.shared_bytes, "shared memory of a block, in bytes"}}};
}

}  // namespace gradops
