// What both directions of batch norm on the CPU share: how arrays are cut, and numbers per channel.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "common/shape.h"
#include "cpu/column_sum.h"
#include "cpu/parallel.h"
#include "cpu/stream.h"
#include "cpu/wide.h"

namespace gradops {

// How the elements of a group lie. Channels first: in rows of channels, each `inner` elements in
// one. Channels last: in rows of `width` columns, of which column i is of channel i % channels:
// one of x's rows, or, where channels are few, several, and then the last row may be shorter.
template <bool kFirst>
struct Layout {
  std::int64_t groups, channels, inner, width, rows, elements;

  explicit Layout(const ChannelShape& shape)
      : groups(shape.outer.groups),
        channels(shape.channels()),
        inner(shape.inner),
        width(channels * (kFirst ? inner
                                 : std::max<std::int64_t>(
                                       1, kMinWidth / std::max<std::int64_t>(1, channels)))),
        rows(width == 0 ? 0 : (channels * shape.terms() + width - 1) / width),
        elements(channels * shape.terms()) {}

  // Where a row starts, and how many columns it has.
  std::int64_t offset(std::int64_t group, std::int64_t row) const {
    return group * elements + row * width;
  }
  std::int64_t width_of(std::int64_t row) const { return std::min(width, elements - row * width); }

 private:
  static constexpr std::int64_t kMinWidth = 256;
};

// Rows [row, end_row) of a group, and of these channels [channel, end_channel). Channels last: all.
struct Piece {
  std::int64_t group, part, row, end_row, channel, end_channel;
  std::int64_t channels() const { return end_channel - channel; }
};

// How groups are cut into pieces: into parts of as many rows, and, channels first, these further.
template <bool kFirst>
struct Pieces {
  Layout<kFirst> layout;
  std::int64_t rows, parts, channels, blocks;  // of a part; parts; of a block; blocks

  Pieces(const Layout<kFirst>& layout, std::int64_t bytes_per_element, std::int64_t max_parts)
      : layout(layout) {
    rows = std::min(layout.rows,
                    RowsPerChunk(layout.rows, layout.width * bytes_per_element, max_parts));
    CutChannels(bytes_per_element);
  }

  // For sums over channels, of which there may be `max_parts` partial ones. Whole channels, which
  // stay in a cache until they are read again, where there are enough of them for many threads, and
  // none is too large.
  static Pieces ForSums(const Layout<kFirst>& layout, std::int64_t bytes_per_element,
                        std::int64_t max_parts) {
    constexpr std::int64_t kMinChannels = 16, kMaxBytes = 1 << 20;
    constexpr std::int64_t kMaxParts = 64;  // more would be more traffic than threads to use them
    const bool whole = kFirst && layout.groups * layout.channels >= kMinChannels &&
                       layout.rows * layout.inner * bytes_per_element <= kMaxBytes;
    return Pieces(layout, bytes_per_element, whole ? 1 : std::min(max_parts, kMaxParts));
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
  void CutChannels(std::int64_t bytes_per_element) {
    parts = (layout.rows + rows - 1) / std::max<std::int64_t>(1, rows);
    channels = layout.channels;
    if (kFirst) {
      channels = std::min(
          channels, RowsPerChunk(channels, rows * layout.inner * bytes_per_element, channels));
    }
    blocks = (layout.channels + channels - 1) / std::max<std::int64_t>(1, channels);
  }
};

// One number a channel, as it is needed along a row: of all columns, or of one channel's elements.
template <typename A, bool kFirst>
struct Along {
  std::conditional_t<kFirst, A, const A*> value;
  A operator[](std::int64_t i) const {
    if constexpr (kFirst) {
      return value;
    } else {
      return value[i];
    }
  }
};

// kCount numbers for each group and channel; channels last, for each column of a row.
template <typename A, bool kFirst, int kCount>
class Coefficients {
 public:
  explicit Coefficients(const Layout<kFirst>& layout)
      : layout_(layout),
        pitch_(kFirst ? layout.channels : layout.width),
        values_(std::make_unique_for_overwrite<A[]>(
            static_cast<std::size_t>(kCount * layout.groups * pitch_))) {}

  void Set(std::int64_t group, std::int64_t channel, const std::array<A, kCount>& values) const {
    for (int k = 0; k < kCount; ++k) {
      A* const all = values_.get() + (group * kCount + k) * pitch_;
      for (std::int64_t i = channel; i < pitch_; i += layout_.channels) all[i] = values[k];
    }
  }
  // From a channel on, or, channels last, from a column on.
  Along<A, kFirst> Get(int k, std::int64_t group, std::int64_t start) const {
    const A* const values = values_.get() + (group * kCount + k) * pitch_ + start;
    if constexpr (kFirst) {
      return {*values};
    } else {
      return {values};
    }
  }

 private:
  Layout<kFirst> layout_;
  std::int64_t pitch_;
  std::unique_ptr<A[]> values_;
};

// fn(group, channel) for each, in the pool where there are many.
template <bool kFirst, typename Fn>
void ForChannels(const CpuContext& pool, const Layout<kFirst>& layout, const Fn& fn) {
  ForEach(pool, layout.groups * layout.channels,
          [&](std::int64_t i) { fn(i / layout.channels, i % layout.channels); });
}

// fn(group, channel, n) for blocks of up to kBlock channels.
template <bool kFirst, typename Fn>
void ForChannelBlocks(const CpuContext& pool, const Layout<kFirst>& layout, const Fn& fn) {
  const std::int64_t blocks = (layout.channels + kBlock - 1) / kBlock;
  ParallelFor(pool, layout.groups * blocks, [&](std::int64_t i) {
    const std::int64_t channel = i % blocks * kBlock;
    fn(i / blocks, channel, std::min(kBlock, layout.channels - channel));
  });
}

// fn(piece) for each, in the pool.
template <bool kFirst, typename Fn>
void ForPieces(const CpuContext& pool, const Pieces<kFirst>& pieces, const Fn& fn) {
  ParallelFor(pool, pieces.count(), [&](std::int64_t i) { fn(pieces[i]); });
}

// The same from the last to the first, for what is read again: its end is still in a cache.
template <bool kFirst, typename Fn>
void ForPiecesReversed(const CpuContext& pool, const Layout<kFirst>& layout,
                       std::int64_t bytes_per_element, const Fn& fn) {
  constexpr std::int64_t kMaxChunks = 1024;
  const Pieces<kFirst> pieces(layout, bytes_per_element, kMaxChunks);
  ParallelFor(pool, pieces.count(), [&](std::int64_t i) { fn(pieces[pieces.count() - 1 - i]); });
}

// fn(offset, start, n) for all elements of a piece, n <= kBlock in one, whose numbers are those of
// `start`: a channel, or a column.
template <bool kFirst, typename Fn>
void ForBlocksOf(const Layout<kFirst>& layout, const Piece& piece, const Fn& fn) {
  for (std::int64_t row = piece.row; row < piece.end_row; ++row) {
    const std::int64_t offset = layout.offset(piece.group, row);
    if constexpr (kFirst) {
      for (std::int64_t channel = piece.channel; channel < piece.end_channel; ++channel) {
        ForBlocks(layout.inner, [&](std::int64_t start, std::int64_t n) {
          fn(offset + channel * layout.inner + start, channel, n);
        });
      }
    } else {
      ForBlocks(layout.width_of(row),
                [&](std::int64_t start, std::int64_t n) { fn(offset + start, start, n); });
    }
  }
}

// How many elements ahead memory is prefetched that is read from one end to the other.
template <typename T>
inline constexpr std::int64_t kAhead = 4096 / static_cast<std::int64_t>(sizeof(T));

// out[i] = fn(i) for each i < n <= kBlock, rounded to T.
template <typename T, typename Fn>
void StoreBlock(T* out, std::int64_t n, bool streamed, const Fn& fn) {
  constexpr std::int64_t kAtATime = 256;  // 512 and more: stores wait for one another
  alignas(64) T block[kAtATime];
  for (std::int64_t start = 0; start < n; start += kAtATime) {
    const std::int64_t count = std::min(kAtATime, n - start);
    for (std::int64_t i = 0; i < count; ++i) block[i] = static_cast<T>(fn(start + i));
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    if (streamed) {
      StreamCopy(out + start, block, bytes);
    } else {
      std::memcpy(out + start, block, static_cast<std::size_t>(bytes));
    }
  }
}

// sums[s][i] += the sum over r < rows of terms(r, i)[s]; prefetch(r) is called for each row. A few
// rows at a time: many squares in a row would all be rounded in the same direction (lanes.h). Two
// rows a turn, for fewer loads of the sums: 35 to 38 GB/s on two cores of a Xeon.
template <typename A, int kSums, typename Terms, typename PrefetchFn>
void AddRows(std::int64_t rows, std::int64_t n, const Terms& terms, const PrefetchFn& prefetch,
             A (&sums)[kSums][kBlock]) {
  constexpr std::int64_t kAtATime = 16;
  const auto add_rows = [&](std::int64_t first, std::int64_t end, A(&to)[kSums][kBlock]) {
    std::int64_t r = first;
    for (; r + 2 <= end; r += 2) {
      prefetch(r), prefetch(r + 1);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto term = terms(r, i), next = terms(r + 1, i);
        for (int s = 0; s < kSums; ++s) to[s][i] += term[s] + next[s];
      }
    }
    if (r < end) {
      prefetch(r);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto term = terms(r, i);
        for (int s = 0; s < kSums; ++s) to[s][i] += term[s];
      }
    }
  };
  add_rows(0, std::min(rows, kAtATime), sums);
  for (std::int64_t first = kAtATime; first < rows; first += kAtATime) {
    alignas(64) A few[kSums][kBlock];
    for (auto& sum : few) std::fill_n(sum, n, A{0});
    add_rows(first, std::min(rows, first + kAtATime), few);
    for (int s = 0; s < kSums; ++s) {
      for (std::int64_t i = 0; i < n; ++i) sums[s][i] += few[s][i];
    }
  }
}

// The sum of n numbers, pair by pair; overwrites them.
template <typename A>
A PairwiseSum(A* numbers, std::int64_t n) {
  for (; n > 1; n -= n / 2) {
    const A* const rest = numbers + (n - n / 2);
    for (std::int64_t i = 0; i < n / 2; ++i) numbers[i] += rest[i];
  }
  return numbers[0];
}

// Channels first: the sums of terms(i)[s] over all elements i of `rows` runs of `inner` elements,
// `pitch` apart; prefetch(i, n) is called for elements that are read later.
template <typename A, int kSums, typename Terms, typename PrefetchFn>
std::array<double, kSums> SumRuns(std::int64_t rows, std::int64_t inner, std::int64_t pitch,
                                  const Terms& terms, const PrefetchFn& prefetch) {
  std::array<double, kSums> totals = {};
  alignas(64) A sums[kSums][kBlock];
  for (std::int64_t row = 0; row < rows; row += kRowsPerSum) {
    ForBlocks(inner, [&](std::int64_t start, std::int64_t n) {
      for (auto& sum : sums) std::fill_n(sum, n, A{0});
      const std::int64_t first = row * pitch + start;
      AddRows(
          std::min(kRowsPerSum, rows - row), n,
          [=](std::int64_t r, std::int64_t i) { return terms(first + r * pitch + i); },
          [=](std::int64_t r) { prefetch(first + (r + 1) * pitch, n); }, sums);
      for (int s = 0; s < kSums; ++s) totals[s] += static_cast<double>(PairwiseSum(sums[s], n));
    });
  }
  return totals;
}

}  // namespace gradops
