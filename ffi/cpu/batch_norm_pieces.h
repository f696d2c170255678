// What both directions of batch norm and group norm on the CPU share: how arrays are cut, and
// numbers per channel.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "common/shape.h"
#include "cpu/column_sum.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"
#include "cpu/wide.h"

namespace gradops {

// How the elements of a group lie in memory. Channels first: a row has `inner` elements of each
// channel. Channels last: a row has `width` columns, and column i belongs to channel i % channels.
// Such a row is one of x's rows. If channels are few, it is several of them. The last row may be
// shorter.
template <bool kFirst>
struct Layout {
  std::int64_t groups, channels, inner, width, rows, elements;

  explicit Layout(const ChannelShape& shape, std::int64_t min_width = 256)
      : groups(shape.outer.groups),
        channels(shape.channels()),
        inner(shape.inner),
        width(channels * (kFirst ? inner
                                 : std::max<std::int64_t>(
                                       1, min_width / std::max<std::int64_t>(1, channels)))),
        rows(width == 0 ? 0 : (channels * shape.terms() + width - 1) / width),
        elements(channels * shape.terms()) {}

  // Where a row starts, and how many columns it has.
  std::int64_t offset(std::int64_t group, std::int64_t row) const {
    return group * elements + row * width;
  }
  std::int64_t width_of(std::int64_t row) const { return std::min(width, elements - row * width); }
  // A layout with longer rows for large arrays of few channels. It is for work element by element,
  // because each start of a row costs time. A column's channel is the same in both.
  static Layout Wide(const ChannelShape& shape) {
    const Layout layout(shape);
    return layout.elements < 256 * kBlock ? layout : Layout(shape, kBlock);
  }
};

// Channels [channel, end_channel) of rows [row, end_row) of a group. Channels last: all channels.
struct Piece {
  std::int64_t group, part, row, end_row, channel, end_channel;
  std::int64_t channels() const { return end_channel - channel; }
  // This piece with all rows, in the rows of another layout.
  Piece OfWhole(const auto& layout) const {
    Piece piece = *this;
    piece.end_row = layout.rows;
    return piece;
  }
};

// How groups are cut into pieces. A group is cut into parts with equal numbers of rows. With
// channels first, a part is cut further, into blocks of channels.
template <bool kFirst>
struct Pieces {
  Layout<kFirst> layout;
  std::int64_t rows, parts, channels, blocks;  // rows of a part; parts; channels of a block; blocks

  // A block has a multiple of `unit` channels. Channels last: parts have at least min_bytes.
  Pieces(const Layout<kFirst>& layout, std::int64_t bytes_per_element, std::int64_t max_parts,
         std::int64_t unit = 1, std::int64_t min_bytes = kMinChunkBytes)
      : layout(layout) {
    // With channels first, parts are shorter: pieces of long parts would lie in many places.
    rows = std::min(layout.rows, RowsPerChunk(layout.rows, layout.width * bytes_per_element,
                                              max_parts, kFirst ? kMinChunkBytes : kLongChunkBytes,
                                              kFirst ? kMinChunkBytes : min_bytes));
    CutChannels(bytes_per_element, unit);
  }

  // Pieces for sums over bundles of `bundle` channels. There is room for `max_parts` partial sums.
  // Pieces have whole bundles if there are enough bundles for many threads, and no bundle is too
  // large. Such a piece stays in a cache until it is read again. Channels last: this is only for
  // group norm, and the piece is a sample.
  static Pieces ForSums(const Layout<kFirst>& layout, std::int64_t bundle,
                        std::int64_t bytes_per_element, std::int64_t max_parts) {
    constexpr std::int64_t kMinBundles = 16, kMaxBytes = 1 << 20;
    constexpr std::int64_t kMaxParts = 64;  // more would add traffic, but keep no more threads busy
    const std::int64_t pieces = layout.groups * (kFirst ? layout.channels / bundle : 1);
    const std::int64_t elements = kFirst ? layout.rows * layout.inner * bundle : layout.elements;
    const bool whole = (kFirst || bundle > 1) && pieces >= kMinBundles &&
                       elements * bytes_per_element <= kMaxBytes;
    // Each part has work for each column. Of short parts, it is most of the work. With several
    // samples, there are enough parts if they are longer.
    const std::int64_t min_bytes =
        bundle > 1 ? std::min<std::int64_t>(layout.groups, 4) * kMinChunkBytes : kMinChunkBytes;
    return Pieces(layout, bytes_per_element, whole ? 1 : std::min(max_parts, kMaxParts),
                  whole ? bundle : 1, min_bytes);
  }
  // Whether each piece has whole bundles.
  bool HasWhole(std::int64_t bundle) const { return parts == 1 && channels % bundle == 0; }

  // Pieces for work that is done element by element.
  static Pieces ForElements(const Layout<kFirst>& layout, std::int64_t bytes_per_element) {
    constexpr std::int64_t kMaxChunks = 1024;
    return Pieces(layout, bytes_per_element, kMaxChunks);
  }

  std::int64_t count() const { return layout.groups * parts * blocks; }
  Piece operator[](std::int64_t i) const {
    const std::int64_t part = i / blocks % parts, channel = i % blocks * channels;
    return {.group = i / blocks / parts,
            .part = part,
            .row = part * rows,
            .end_row = std::min(layout.rows, (part + 1) * rows),
            .channel = channel,
            .end_channel = std::min(layout.channels, channel + channels)};
  }

 private:
  void CutChannels(std::int64_t bytes_per_element, std::int64_t unit) {
    parts = (layout.rows + rows - 1) / std::max<std::int64_t>(1, rows);
    channels = layout.channels;
    if (kFirst) {
      const std::int64_t units = channels / unit;
      channels = std::min(channels,
                          unit * RowsPerChunk(units, rows * layout.inner * unit * bytes_per_element,
                                              units, kMinChunkBytes));  // stays in a cache
    }
    blocks = (layout.channels + channels - 1) / std::max<std::int64_t>(1, channels);
  }
};

// One number per channel, in the form that a loop along a row needs. Channels first: the number of
// the row's channel. Channels last: the numbers of the row's columns.
template <typename A, bool kFirst>
struct Along {
  std::conditional_t<kFirst, A, const A*> value;
  // The number at the loop's place `at` (lanes.h).
  auto operator()(auto at) const {
    if constexpr (kFirst) {
      return value;
    } else {
      return at(value);
    }
  }
};

// kCount numbers for each channel of all groups, or of one group. Channels last: for each column of
// a row. If groups are small, the numbers of all groups take more memory than x. So a piece that
// has whole channels has its own numbers.
template <typename A, bool kFirst, int kCount>
class Coefficients {
 public:
  explicit Coefficients(const Layout<kFirst>& layout)
      : Coefficients(layout, /*first_group=*/0, layout.groups) {}
  Coefficients(const Layout<kFirst>& layout, std::int64_t group) : Coefficients(layout, group, 1) {}

  void Set(std::int64_t group, std::int64_t channel, const std::array<A, kCount>& values) const {
    A* const all = values_.get() + (group - first_group_) * kCount * pitch_;
    for (std::int64_t i = channel; i < pitch_; i += layout_.channels) {
      for (int k = 0; k < kCount; ++k) all[k * pitch_ + i] = values[k];
    }
  }
  // Number k of a channel, or, with channels last, of a column.
  const A& One(int k, std::int64_t group, std::int64_t start) const {
    return values_[((group - first_group_) * kCount + k) * pitch_ + start];
  }
  // Number k from a channel or column on.
  Along<A, kFirst> Get(int k, std::int64_t group, std::int64_t start) const {
    if constexpr (kFirst) {
      return {One(k, group, start)};
    } else {
      return {&One(k, group, start)};
    }
  }

 private:
  Coefficients(const Layout<kFirst>& layout, std::int64_t first_group, std::int64_t groups)
      : layout_(layout),
        first_group_(first_group),
        pitch_(kFirst ? layout.channels : layout.width),
        values_(std::make_unique_for_overwrite<A[]>(
            static_cast<std::size_t>(kCount * groups * pitch_))) {}

  Layout<kFirst> layout_;
  std::int64_t first_group_, pitch_;
  std::unique_ptr<A[]> values_;
};

// Calls fn(group, channel) for each channel, in the thread pool if there are many.
template <bool kFirst, typename Fn>
void ForChannels(const CpuContext& pool, const Layout<kFirst>& layout, const Fn& fn) {
  ForEach(pool, layout.groups * layout.channels,
          [&](std::int64_t i) { fn(i / layout.channels, i % layout.channels); });
}

// Calls fn(group, channel, n) for blocks of about kBlock channels, in the thread pool. Blocks have
// whole bundles of `bundle` channels.
template <bool kFirst, typename Fn>
void ForChannelBlocks(const CpuContext& pool, const Layout<kFirst>& layout, std::int64_t bundle,
                      const Fn& fn) {
  const std::int64_t block = std::max<std::int64_t>(1, kBlock / bundle) * bundle;
  const std::int64_t blocks = (layout.channels + block - 1) / block;
  ParallelFor(pool, layout.groups * blocks, [&](std::int64_t i) {
    const std::int64_t channel = i % blocks * block;
    fn(i / blocks, channel, std::min(block, layout.channels - channel));
  });
}

// Calls fn(piece) for each piece, in the thread pool.
template <bool kFirst, typename Fn>
void ForPieces(const CpuContext& pool, const Pieces<kFirst>& pieces, const Fn& fn) {
  ParallelFor(pool, pieces.count(), [&](std::int64_t i) { fn(pieces[i]); });
}

// ForPieces from the last piece to the first. A second reading finds the end still in a cache.
template <bool kFirst, typename Fn>
void ForPiecesReversed(const CpuContext& pool, const Pieces<kFirst>& pieces, const Fn& fn) {
  ParallelFor(pool, pieces.count(), [&](std::int64_t i) { fn(pieces[pieces.count() - 1 - i]); });
}

// n <= kBlock elements in each of `rows` rows. The first row's elements begin at `offset`. `start`
// is their channel, or, with channels last, their first column.
struct Block {
  std::int64_t offset, start, n, rows;
};

// Calls fn(block) for all elements of a piece. Channels last: a block has kRows rows. Rows that are
// left over, or shorter, have a block each.
template <int kRows = 1, bool kFirst, typename Fn>
void ForBlocksOf(const Layout<kFirst>& layout, const Piece& piece, const Fn& fn) {
  for (std::int64_t row = piece.row, rows = 1; row < piece.end_row; row += rows) {
    const std::int64_t offset = layout.offset(piece.group, row);
    if constexpr (kFirst) {
      for (std::int64_t channel = piece.channel; channel < piece.end_channel; ++channel) {
        ForBlocks(layout.inner, [&](std::int64_t start, std::int64_t n) {
          fn(Block{offset + channel * layout.inner + start, channel, n, rows});
        });
      }
    } else {
      const bool whole =
          row + kRows <= piece.end_row && layout.width_of(row + kRows - 1) == layout.width;
      rows = whole ? kRows : 1;
      ForBlocks(layout.width_of(row), [&](std::int64_t start, std::int64_t n) {
        fn(Block{offset + start, start, n, rows});
      });
    }
  }
}

// Prefetches the memory 2 KB ahead. At the end of a row, this is the next row's memory. With
// several rows side by side, this helps only the last row: the memory after every other row has
// been read. Backward's sums gain nothing: [8192, 2048] took 7.3 and 6.8 ms without, 7.1 and 7.4
// with it.
template <typename T>
void PrefetchNear(const T* from, auto at) {
  at.PrefetchToL1(from, 2048 / std::int64_t{sizeof(T)});
}

// Stores to[r * pitch + i] = fn(at)(r * pitch) for all n elements of `rows` rows. Stores go past
// the caches if `streamed`. kRows rows share one load of each column's numbers.
template <int kCount, int kRows, typename T, typename Fn>
void StoreRowsForLanes(T* to, std::int64_t rows, std::int64_t pitch, std::int64_t n, bool streamed,
                       const Fn& fn) {
  if constexpr (kRows > 1) {
    const std::int64_t bytes = n * std::int64_t{sizeof(T)};
    const bool lines =
        BytesToLine(to) == 0 && pitch * std::int64_t{sizeof(T)} % 64 == 0 && bytes % 64 == 0;
    if (rows == kRows && !streamed) {
      ForStores<kCount, T>(n, [=](auto at) {
        const auto of_row = fn(at);
        for (std::int64_t r = 0; r < kRows; ++r) at.Store(to + r * pitch, of_row(r * pitch));
      });
      return;
    }
    if (rows == kRows && lines) {
      ForStores<kCount, T>(n, [=](auto at) {
        const auto of_row = fn(at);
        for (std::int64_t r = 0; r < kRows; ++r) at.Stream(to + r * pitch, of_row(r * pitch));
      });
      return;
    }
  }
  for (std::int64_t skipped = 0; skipped < rows * pitch; skipped += pitch) {
    StoreForLanes<kCount>(to + skipped, n, streamed, [=](auto at) { return fn(at)(skipped); });
  }
}

// How many columns are added up at a time, with channels last. Two cores of a Zen 5 with AVX-512,
// float32 [8192, 2048]: half a row takes 4.7 ms forward, 7.4 backward, a whole row 4.5 and 6.9.
template <typename T>
inline constexpr std::int64_t kSumColumns = sizeof(T) == 4 ? 2 * kBlock : kBlock;

// Prefetches elements of 16 bits that AddRows comes to two rows after `row`. A row has `width`
// elements. Two cores of a Zen 5, bfloat16 [8192, 2048]: forward took 3.3 ms without it and 2.7
// with it, backward 4.9 and 4.4. float32 would lose up to 4 %.
template <typename T>
void PrefetchRowAhead(const T* row, std::int64_t width, auto at) {
  if constexpr (sizeof(T) == 2) at.PrefetchToL2(row, 2 * width);
}

// Adds the terms(r, at)[s] of all rows r < rows to sums[s][i], column by column. Only a few rows
// are added up in one go: many squares in a row would all be rounded in the same direction
// (lanes.h). A turn takes one row of each quarter of the rows: the sums are loaded once for four
// rows. An older EPYC also reads memory faster at four places: 35 instead of 20 GB/s on one core,
// 41 instead of 30 on two. A Zen 5 that only reads is faster at two places. float32's sums backward
// then took up to 10 % longer, though.
template <typename A, int kSums, int kColumns, typename Terms>
void AddRows(std::int64_t rows, std::int64_t n, const Terms& terms, A (&sums)[kSums][kColumns]) {
  constexpr std::int64_t kTurns = 4;
  const std::int64_t quarter = rows / 4;
  const auto add_rows = [&](std::int64_t first, std::int64_t end, A(&to)[kSums][kColumns]) {
    for (std::int64_t r = first; r < end; ++r) {
      ForLanes<kLanes<A>>(n, [&](auto at) {
        const auto a = terms(r, at), b = terms(r + quarter, at), c = terms(r + 2 * quarter, at),
                   d = terms(r + 3 * quarter, at);
        for (int s = 0; s < kSums; ++s)
          at.Store(to[s], at(to[s]) + ((a[s] + b[s]) + (c[s] + d[s])));
      });
    }
  };
  add_rows(0, std::min(quarter, kTurns), sums);
  for (std::int64_t first = kTurns; first < quarter; first += kTurns) {
    alignas(64) A few[kSums][kColumns];
    for (auto& sum : few) std::fill_n(sum, n, A{0});
    add_rows(first, std::min(quarter, first + kTurns), few);
    for (int s = 0; s < kSums; ++s) {
      for (std::int64_t i = 0; i < n; ++i) sums[s][i] += few[s][i];
    }
  }
  for (std::int64_t r = 4 * quarter; r < rows; ++r) {
    ForLanes<kLanes<A>>(n, [&](auto at) {
      const auto term = terms(r, at);
      for (int s = 0; s < kSums; ++s) at.Store(sums[s], at(sums[s]) + term[s]);
    });
  }
}

// The sum of n numbers, added pair by pair. Overwrites the numbers.
template <typename A>
A PairwiseSum(A* numbers, std::int64_t n) {
  for (; n > 1; n -= n / 2) {
    const A* const rest = numbers + (n - n / 2);
    for (std::int64_t i = 0; i < n / 2; ++i) numbers[i] += rest[i];
  }
  return numbers[0];
}

// Channels first: the sums of terms(offset, at)[s] over all elements of `rows` runs. Each run has
// `inner` elements. Runs start `pitch` elements apart. `offset` counts from the first one.
template <typename A, int kSums, typename Terms>
std::array<double, kSums> SumRuns(std::int64_t rows, std::int64_t inner, std::int64_t pitch,
                                  const Terms& terms) {
  std::array<double, kSums> totals = {};
  if (rows < 4) {  // a sum for each element of a row would serve few rows
    for (std::int64_t row = 0; row < rows; ++row) {
      ForBlocks(inner, [&](std::int64_t start, std::int64_t n) {
        const std::int64_t first = row * pitch + start;
        const auto sums = LaneSums<A, kSums>(n, [&](auto at) { return terms(first, at); });
        for (int s = 0; s < kSums; ++s) totals[s] += static_cast<double>(sums[s]);
      });
    }
    return totals;
  }
  alignas(64) A sums[kSums][kBlock];
  for (std::int64_t row = 0; row < rows; row += kRowsPerSum) {
    ForBlocks(inner, [&](std::int64_t start, std::int64_t n) {
      for (auto& sum : sums) std::fill_n(sum, n, A{0});
      const std::int64_t first = row * pitch + start;
      AddRows(
          std::min(kRowsPerSum, rows - row), n,
          [&](std::int64_t r, auto at) { return terms(first + r * pitch, at); }, sums);
      for (int s = 0; s < kSums; ++s) totals[s] += static_cast<double>(PairwiseSum(sums[s], n));
    });
  }
  return totals;
}

}  // namespace gradops
