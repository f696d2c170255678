// Batch norm and group norm on the CPU, forward, in two sweeps over memory. The first sweep makes
// the statistics, and the second sweep makes y. Statistics are those of channels. In group norm,
// the channels of a bundle are then put together, in double. If a bundle's elements lie together,
// it counts as one channel. With channels last, the columns of a bundle of up to kSumColumns
// channels are added up in each block of rows, and the blocks are put together in double.
//
// The statistics use differences from a guess of the channel's mean. Elements are taken in blocks:
// with channels last, kRowsPerSum rows; with channels first, a piece. If the guess is off by more
// than 1.4 deviations, the mean of the block replaces the guess. The block is then read again, from
// a cache. Neither a large mean nor a bad guess costs digits then. The guess is the mean of 16
// samples. With normal numbers, it is off by 1.4 deviations once in 10^8 cases. A mean of 8 samples
// was off by one deviation in nearly every block of 1,024 channels. Such a block took half as long
// again. The blocks are put together in double. Source: Chan, Golub, LeVeque, Algorithms for
// computing the sample variance (1983). The shape alone decides how arrays are cut into parts. The
// parts are put together in a fixed order.
//
// Squares of elements above about 1e18 add up to more than a float holds, although their variance
// is a float. Such a sum is infinite. The elements of that channel are then read again, in double.
//
// Memory traffic: x is read twice and y is written. Whole channels in a piece stay in a cache:
// memory is then read once.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "common/math.h"
#include "common/stored_squares.h"
#include "cpu/batch_norm_large.h"
#include "cpu/batch_norm_pieces.h"
#include "cpu/batch_norm_small.h"
#include "cpu/column_sum.h"
#include "cpu/silu.h"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// For each of some channels: the mean minus a base that the caller knows, and the sum of the
// squared deviations from the mean.
struct Moments {
  std::vector<double> means, squares;

  explicit Moments(std::int64_t n)
      : means(static_cast<std::size_t>(n)), squares(static_cast<std::size_t>(n)) {}
};

// Merges the moments of `added` elements into the moments of `count` elements, for n channels.
// other_squares are StoredSquares.
template <typename A>
void Merge(double count, double* __restrict__ means, double* __restrict__ squares, double added,
           const A* __restrict__ other_means, const A* __restrict__ other_squares, std::int64_t n) {
  const double share = added / (count + added), weight = count * share;
  for (std::int64_t i = 0; i < n; ++i) {
    const double delta = static_cast<double>(other_means[i]) - means[i];
    means[i] += delta * share;
    squares[i] += LoadedSquares(other_squares[i]) + delta * delta * weight;
  }
}

// A guess of the mean: shift + rest. shift is taken off first, then rest. rest has the digits that
// do not fit into shift. Without rest, differences from a large mean would all be multiples of a
// number that is not small. Their squares would all be rounded in one direction.
template <typename A>
struct Guess {
  A shift, rest = 0;
  // The guess moved by `by`.
  Guess operator+(A by) const {
    const A moved = shift + (rest + by);
    return {moved, (rest + by) - (moved - shift)};
  }
};

// The moments of n elements, relative to `base`. sum adds up their differences from a guess.
// sum_squares adds up the squared differences.
template <typename A, typename Sum>
void ToMoments(A base, Guess<A> guess, Sum sum, Sum sum_squares, double n, double& mean,
               double& squares) {
  const double offset = static_cast<double>(sum) / n;
  mean = (static_cast<double>(guess.shift) - static_cast<double>(base)) +
         (static_cast<double>(guess.rest) + offset);
  const double left = static_cast<double>(sum_squares) - offset * static_cast<double>(sum);
  squares = left < 0 ? 0 : left;
}

// The terms of AddRows for rows from `first` on: differences from guesses, and their squares.
template <typename T>
auto Differences(const T* first, std::int64_t width, const Accum<T>* shifts,
                 const Accum<T>* rests) {
  return [=](std::int64_t r, auto at) {
    PrefetchRowAhead(first + r * width, width, at);
    if constexpr (sizeof(T) == 4) PrefetchNear(first + r * width, at);
    const auto difference = (at(first + r * width) - at(shifts)) - at(rests);
    return std::array{difference, difference * difference};
  };
}

// The moments of n columns from x on, in `rows` rows, with channels last.
template <typename T>
void ColumnMoments(const T* x, std::int64_t rows, std::int64_t width, std::int64_t n,
                   const Accum<T>* base, double* means, double* squares) {
  using A = Accum<T>;
  constexpr std::int64_t kSamples = 16;
  alignas(64) A shifts[kSumColumns<T>];
  alignas(64) A rests[kSumColumns<T>];
  alignas(64) A sums[2][kSumColumns<T>];
  alignas(64) A sampled[1][kSumColumns<T>] = {};
  const auto guess = [&](std::int64_t i) { return Guess<A>{shifts[i], rests[i]}; };
  const auto set_guess = [&](std::int64_t i, Guess<A> to) {
    shifts[i] = to.shift, rests[i] = to.rest;
  };
  const std::int64_t samples = std::min(rows, kSamples), step = rows / samples * width;
  const auto sample = [=](std::int64_t r, auto at) {
    return std::array{at(x + r * step) - at(base)};
  };
  AddRows(samples, n, sample, sampled);
  for (std::int64_t i = 0; i < n; ++i)
    set_guess(i, Guess<A>{base[i]} + sampled[0][i] / static_cast<A>(samples));

  for (std::int64_t row = 0; row < rows; row += kRowsPerSum) {
    const std::int64_t count = std::min(kRowsPerSum, rows - row);
    const A terms = static_cast<A>(count), far_factor = A{1.5} / terms;
    const T* const first = x + row * width;
    for (const bool again : {false, true}) {
      for (auto& sum : sums) std::fill_n(sum, n, A{0});
      AddRows(count, n, Differences(first, width, shifts, rests), sums);
      if (again) break;
      // Neither side overflows unless the sum of squares has overflowed.
      const auto is_far = [&](std::int64_t i) {
        return !(sums[0][i] * (sums[0][i] * far_factor) <= sums[1][i]);
      };
      int far = 0;
      for (std::int64_t i = 0; i < n; ++i) far |= is_far(i) ? 1 : 0;
      if (far == 0) break;
      // Other channels keep their guesses: results do not depend on other channels.
      for (std::int64_t i = 0; i < n; ++i) {
        if (is_far(i)) set_guess(i, guess(i) + sums[0][i] / terms);
      }
    }
    double of_means[kSumColumns<T>], of_squares[kSumColumns<T>];
    for (std::int64_t i = 0; i < n; ++i) {
      ToMoments(base[i], guess(i), sums[0][i], sums[1][i], static_cast<double>(count), of_means[i],
                of_squares[i]);
    }
    int second_looks = 0;
    for (std::int64_t i = 0; i < n; ++i) second_looks |= Overflowed(sums[1][i]) ? 1 : 0;
    if (second_looks != 0) {
      for (std::int64_t i = 0; i < n; ++i) {
        if (!NeedsSecondLook(sums[0][i], sums[1][i])) continue;
        LargeMoments(first + i, count, 1, width, base[i], of_means[i], of_squares[i]);
      }
    }
    Merge(static_cast<double>(row), means, squares, static_cast<double>(count), of_means,
          of_squares, n);
  }
}

// The moments of all channels of a piece of x. `base` is the first element of each channel. With
// channels last, `base` has this element for each column.
template <typename T>
void MomentsOf(const T* x, const Layout<false>& layout, const Piece& piece,
               const Coefficients<Accum<T>, false, 1>& base, Moments& moments) {
  using A = Accum<T>;
  const std::int64_t channels = layout.channels;
  const std::int64_t end =
      std::min(piece.end_row, layout.elements / layout.width);  // the end of the whole rows
  const std::int64_t rows = end - piece.row;
  double count = 0;
  for (std::int64_t start = 0; rows > 0 && start < layout.width; start += kSumColumns<T>) {
    const std::int64_t n = std::min(kSumColumns<T>, layout.width - start);
    double means[kSumColumns<T>] = {}, squares[kSumColumns<T>] = {};
    ColumnMoments(x + layout.offset(piece.group, piece.row) + start, rows, layout.width, n,
                  base.Get(0, piece.group, start).value, means, squares);
    count = 0;
    for (std::int64_t i = 0; i < n; i += channels, count += static_cast<double>(rows)) {
      Merge(count, moments.means.data() + start, moments.squares.data() + start,
            static_cast<double>(rows), means + i, squares + i, std::min(channels, n - i));
    }
  }
  if (end == piece.end_row) return;
  const T* row = x + layout.offset(piece.group, end);
  for (std::int64_t i = 0; i < layout.width_of(end); i += channels, count += 1) {
    A means[kBlock], squares[kBlock] = {};
    for (std::int64_t c = 0; c < channels; ++c) {
      means[c] = static_cast<A>(row[i + c]) - base.One(0, piece.group, c);
    }
    Merge(count, moments.means.data(), moments.squares.data(), 1, means, squares, channels);
  }
}

template <typename T>
void MomentsOf(const T* x, const Layout<true>& layout, const Piece& piece,
               const Coefficients<Accum<T>, true, 1>& bases, Moments& moments) {
  using A = Accum<T>;
  constexpr std::int64_t kSamples = 16;
  const std::int64_t rows = piece.end_row - piece.row, terms = rows * layout.inner;
  const auto count = static_cast<double>(terms);
  std::array<std::int64_t, kSamples> samples;  // their distances from a channel's first element
  for (std::size_t k = 0; k < kSamples; ++k) {
    const std::int64_t i = static_cast<std::int64_t>(k) * terms / kSamples;
    samples[k] = i / layout.inner * layout.width + i % layout.inner;
  }
  for (std::int64_t channel = piece.channel; channel < piece.end_channel; ++channel) {
    const T* const first = x + layout.offset(piece.group, piece.row) + channel * layout.inner;
    const A base = bases.Get(0, piece.group, channel).value;
    A sampled = 0;
    for (const std::int64_t i : samples) sampled += static_cast<A>(first[i]) - base;
    Guess<A> guess = Guess<A>{base} + sampled / A{kSamples};
    std::array<double, 2> sums;
    bool large = false;
    for (const bool again : {false, true}) {
      sums = SumRuns<A, 2>(rows, layout.inner, layout.width, [=](std::int64_t offset, auto at) {
        const auto difference = (at(first + offset) - guess.shift) - guess.rest;
        return std::array{difference, difference * difference};
      });
      large = NeedsSecondLook(sums[0], sums[1]);
      if (again || large || sums[0] * sums[0] <= 2.0 / 3 * count * sums[1]) break;
      guess = guess + static_cast<A>(sums[0] / count);
    }
    const auto i = static_cast<std::size_t>(channel - piece.channel);
    double &mean = moments.means[i], &squares = moments.squares[i];
    if (large) {
      LargeMoments(first, rows, layout.inner, layout.width, base, mean, squares);
    } else {
      ToMoments(base, guess, sums[0], sums[1], count, mean, squares);
    }
  }
}

// The moments of the bundles of a piece, relative to the first element of each bundle, with
// channels last. A bundle has up to kSumColumns channels.
template <typename T>
class BundleMoments {
  using A = Accum<T>;

 public:
  BundleMoments(const T* x, const Layout<false>& layout, const Piece& piece, std::int64_t bundle)
      : bundle_(bundle),
        bundles_(layout.channels / bundle),
        bases_(static_cast<std::size_t>(bundles_)),
        counts_(static_cast<std::size_t>(bundles_)),
        moments_(bundles_) {
    const T* const group = x + layout.offset(piece.group, 0);
    for (std::size_t b = 0; b < bases_.size(); ++b) {
      bases_[b] = static_cast<A>(group[static_cast<std::int64_t>(b) * bundle]);
    }
    const std::int64_t end =
        std::min(piece.end_row, layout.elements / layout.width);  // the end of the whole rows
    Add(group + piece.row * layout.width, end - piece.row, layout.width);
    if (end < piece.end_row) {
      Add(group + end * layout.width, layout.width_of(end) / layout.channels, layout.channels);
    }
  }
  Moments Get() && { return std::move(moments_); }

 private:
  // Adds rows of `width` columns.
  void Add(const T* x, std::int64_t rows, std::int64_t width) {
    const std::int64_t most = kSumColumns<T> / bundle_ * bundle_;
    for (std::int64_t start = 0; rows > 0 && start < width; start += most) {
      AddColumns(x, rows, width, start, std::min(most, width - start));
    }
  }

  // Adds n columns from `start` on.
  void AddColumns(const T* x, std::int64_t rows, std::int64_t width, std::int64_t start,
                  std::int64_t n) {
    constexpr std::int64_t kSamples = 16;
    alignas(64) A shifts[kSumColumns<T>];
    alignas(64) A rests[kSumColumns<T>];
    alignas(64) A sums[2][kSumColumns<T>];
    A totals[2][kSumColumns<T> / 2];  // of the bundles, which have at least two channels
    // Calls fn(first column, number here, number in a row of x) for the bundles.
    const auto for_bundles = [&](const auto& fn) {
      for (std::int64_t i = 0, v = 0; i < n; i += bundle_, ++v) {
        fn(i, v, static_cast<std::size_t>((start / bundle_ + v) % bundles_));
      }
    };
    const auto guess = [&](std::int64_t i) { return Guess<A>{shifts[i], rests[i]}; };
    const auto set_guess = [&](std::int64_t i, Guess<A> to) {
      std::fill_n(shifts + i, bundle_, to.shift), std::fill_n(rests + i, bundle_, to.rest);
    };
    for_bundles([&](std::int64_t i, std::int64_t, std::size_t b) {
      A sampled = 0;
      for (std::int64_t k = 0; k < kSamples; ++k) {
        const std::int64_t row = k * rows / kSamples, column = start + i + k * bundle_ / kSamples;
        sampled += static_cast<A>(x[row * width + column]) - bases_[b];
      }
      set_guess(i, Guess<A>{bases_[b]} + sampled / A{kSamples});
    });
    for (std::int64_t row = 0; row < rows; row += kRowsPerSum) {
      const std::int64_t count = std::min(kRowsPerSum, rows - row);
      const A terms = static_cast<A>(count * bundle_), far_factor = A{1.5} / terms;
      const T* const first = x + row * width + start;
      for (const bool again : {false, true}) {
        for (auto& sum : sums) std::fill_n(sum, n, A{0});
        AddRows(count, n, Differences(first, width, shifts, rests), sums);
        // Neither side overflows unless the sum of squares has overflowed.
        const auto is_far = [&](std::int64_t v) {
          return !(totals[0][v] * (totals[0][v] * far_factor) <= totals[1][v]);
        };
        bool far = false;
        for_bundles([&](std::int64_t i, std::int64_t v, std::size_t) {
          for (int s = 0; s < 2; ++s) totals[s][v] = PairwiseSum(sums[s] + i, bundle_);
          far |= is_far(v);
        });
        if (again || !far) break;
        // Other bundles keep their guesses: results do not depend on other bundles.
        for_bundles([&](std::int64_t i, std::int64_t v, std::size_t) {
          if (is_far(v)) set_guess(i, guess(i) + totals[0][v] / terms);
        });
      }
      for_bundles([&](std::int64_t i, std::int64_t v, std::size_t b) {
        double mean, squares;
        if (NeedsSecondLook(totals[0][v], totals[1][v])) {
          LargeMoments(first + i, count, bundle_, width, bases_[b], mean, squares);
        } else {
          ToMoments(bases_[b], guess(i), totals[0][v], totals[1][v], static_cast<double>(terms),
                    mean, squares);
        }
        Merge(counts_[b], &moments_.means[b], &moments_.squares[b], static_cast<double>(terms),
              &mean, &squares, 1);
        counts_[b] += static_cast<double>(terms);
      });
    }
  }

  const std::int64_t bundle_, bundles_;
  std::vector<A> bases_;
  std::vector<double> counts_;  // elements so far
  Moments moments_;
};

enum { kMean, kFactor, kOffset, kNumbers };  // y = act((x - mean) * factor + offset + residual)

// Stores y of a piece.
template <typename T, bool kFirst>
void Apply(const BatchNormFwdArgs& args, const Layout<kFirst>& layout,
           const Coefficients<Accum<T>, kFirst, kNumbers>& numbers, const Piece& piece,
           bool streamed) {
  using A = Accum<T>;
  const A least = args.relu ? A{0} : -std::numeric_limits<A>::infinity();
  const T* const all_x = static_cast<const T*>(args.x);
  const T* const all_residual = static_cast<const T*>(args.residual);
  // Milliseconds on two cores of a Zen 5 with AVX-512, for one row and for four rows at a time:
  //                                        one row     four rows
  //   float32 [8192, 2048]                 4.5         4.1
  //   only this loop, small pages          2.4         2.1
  //   only this loop, huge pages           2.2         1.5
  //   bfloat16 [16, 56, 56, 256]           2.0         2.3
  //   float32, batch norm's backward       5.8 to 7.3  5.7 to 7.8
  //
  // float64 was not tried.
  constexpr int kRows = !kFirst && sizeof(T) == 4 ? 4 : 1;
  ForBlocksOf<kRows>(layout, piece, [&](const Block& block) {
    const T* const x = all_x + block.offset;
    const auto mean = numbers.Get(kMean, piece.group, block.start),
               factor = numbers.Get(kFactor, piece.group, block.start),
               shift = numbers.Get(kOffset, piece.group, block.start);
    const auto normalised = [=](auto at) {
      const auto m = mean(at), f = factor(at), s = shift(at);
      return [=](std::int64_t skipped) {
        if constexpr (kRows > 1) PrefetchNear(x + skipped, at);
        return (at(x + skipped) - m) * f + s;
      };
    };
    const auto store = [&](const auto& fn) {
      StoreRowsForLanes<kLanes<A>, kRows>(static_cast<T*>(args.y) + block.offset, block.rows,
                                          layout.width, block.n, streamed, fn);
    };
    if (args.silu) {  // group norm, without a residual
      store([=](auto at) {
        const auto of_row = normalised(at);
        return [=](std::int64_t skipped) { return Silu<A>(of_row(skipped)); };
      });
    } else if (all_residual == nullptr) {
      store([=](auto at) {
        const auto of_row = normalised(at);
        return [=](std::int64_t skipped) { return Max(least, of_row(skipped)); };  // NaN stays
      });
    } else {
      const T* const residual = all_residual + block.offset;
      store([=](auto at) {
        const auto of_row = normalised(at);
        return [=](std::int64_t skipped) {
          if constexpr (kRows > 1) PrefetchNear(residual + skipped, at);
          return Max(least, of_row(skipped) + at(residual + skipped));
        };
      });
    }
  });
  if (streamed) StreamFence();
}

// The statistics of arrays without elements: mean and variance are 0.
template <typename A>
void EmptyStatistics(const BatchNormFwdArgs& args) {
  const std::int64_t n = args.shape.outer.groups * args.bundles;
  for (void* const zeros : {args.batch_mean, args.batch_variance, args.batch_delta}) {
    std::fill_n(static_cast<A*>(zeros), n, A{0});
  }
  std::fill_n(static_cast<A*>(args.batch_rstd), n,
              InverseDeviation(A{0}, Epsilon<A>(args.epsilon, args.strict)));
}

// A call on arrays with elements.
template <typename T, bool kFirst>
class ForwardCall {
  using A = Accum<T>;
  using Numbers = Coefficients<A, kFirst, kNumbers>;

 public:
  ForwardCall(const CpuContext& pool, const BatchNormFwdArgs& args)
      : pool_(pool),
        args_(args),
        layout_(args.shape),
        wide_(Layout<kFirst>::Wide(args.shape)),
        sum_channels_(!kFirst && args.bundle <= kSumColumns<T> ? args.bundle : 1),
        streamed_(PrepareResult(args.y, args.shape.elements() * std::int64_t{sizeof(T)},
                                {args.x, args.residual})),
        of_elements_(Pieces<kFirst>::ForElements(wide_, 2 * sizeof(T))) {}

  // y of given statistics.
  void ApplyGiven() const {
    if (of_elements_.parts > 1) {
      const Numbers numbers(wide_);
      ForChannels(pool_, layout_, [&](std::int64_t group, std::int64_t channel) {
        SetGiven(numbers, group, channel);
      });
      ApplyAll(numbers);
      return;
    }
    ForPiecesReversed(pool_, of_elements_, [&](const Piece& piece) {
      const Numbers numbers(wide_, piece.group);
      for (std::int64_t c = piece.channel; c < piece.end_channel; ++c) {
        SetGiven(numbers, piece.group, c);
      }
      Apply<T>(args_, wide_, numbers, piece, streamed_);
    });
  }

  // The batch's own statistics, and y.
  void Compute() const {
    const auto pieces =
        Pieces<kFirst>::ForSums(layout_, args_.bundle, sizeof(T), args_.partial_rows);
    if (pieces.HasWhole(args_.bundle)) {
      ForPieces(pool_, pieces, [&](const Piece& piece) { BothSweeps(piece); });
      return;
    }
    ForPieces(pool_, pieces, [&](const Piece& piece) { PartialMoments(piece); });
    const Numbers numbers(wide_);
    ForChannelBlocks(
        pool_, layout_, args_.bundle,
        [&](std::int64_t group, std::int64_t channel, std::int64_t n) {
          Finish(numbers, group, channel,
                 OfBundles(group, channel,
                           MergeParts(pieces, group, channel / sum_channels_, n / sum_channels_)));
        });
    if (args_.y != nullptr) ApplyAll(numbers);
  }

 private:
  void ApplyAll(const Numbers& numbers) const {
    ForPiecesReversed(pool_, of_elements_, [&](const Piece& piece) {
      Apply<T>(args_, wide_, numbers, piece, streamed_);
    });
  }

  void SetNumbers(const Numbers& numbers, std::int64_t group, std::int64_t channel, A mean, A rstd,
                  A delta) const {
    const A factor = rstd * ReadParam(args_.scale, group, channel, A{1});
    const A offset = ReadParam(args_.bias, group, channel, A{0}) - delta * factor;
    numbers.Set(group, channel, {mean, factor, offset});
  }
  void SetGiven(const Numbers& numbers, std::int64_t group, std::int64_t channel) const {
    const auto given = [&](const Param& param) {
      return ReadParam(param, group, channel / args_.bundle, A{0});
    };
    SetNumbers(numbers, group, channel, given(args_.mean), given(args_.rstd), given(args_.delta));
  }

  A FirstElement(std::int64_t group, std::int64_t channel) const {
    const T* const x = static_cast<const T*>(args_.x) + layout_.offset(group, 0);
    return static_cast<A>(x[channel * layout_.inner]);
  }

  // The partial results of a part: [groups, partial_rows, 4, channels].
  A* Partial(std::int64_t group, std::int64_t part, int value) const {
    return static_cast<A*>(args_.workspace) +
           ((group * args_.partial_rows + part) * 4 + value) * layout_.channels;
  }

  // The moments of a piece's channels, or of its bundles. Here and below, `layout` may be of other
  // channels than x's.
  template <bool kFirstHere>
  Moments MomentsOfPiece(const Layout<kFirstHere>& layout, const Piece& piece) const {
    if constexpr (!kFirstHere) {
      if (sum_channels_ > 1) {
        const T* const x = static_cast<const T*>(args_.x);
        return BundleMoments<T>(x, layout, piece, sum_channels_).Get();
      }
    }
    Moments moments(piece.channels());
    const Coefficients<A, kFirstHere, 1> base(layout, piece.group);
    for (std::int64_t c = piece.channel; c < piece.end_channel; ++c) {
      const T* const x = static_cast<const T*>(args_.x) + layout.offset(piece.group, 0);
      base.Set(piece.group, c, {static_cast<A>(x[c * layout.inner])});
    }
    MomentsOf(static_cast<const T*>(args_.x), layout, piece, base, moments);
    return moments;
  }

  // The moments of the bundles from `first_channel` on, relative to the first element of each
  // bundle. They are made from the moments of the channels.
  Moments OfBundles(std::int64_t group, std::int64_t first_channel, Moments channels) const {
    if (args_.bundle == sum_channels_) return channels;
    const std::int64_t bundles = static_cast<std::int64_t>(channels.means.size()) / args_.bundle;
    const auto terms = static_cast<double>(args_.shape.terms());
    Moments all(bundles);
    std::vector<double> added(static_cast<std::size_t>(args_.bundle));
    for (std::int64_t b = 0; b < bundles; ++b) {
      const std::int64_t first = first_channel + b * args_.bundle;
      const auto base = static_cast<double>(FirstElement(group, first));
      double* const means = channels.means.data() + b * args_.bundle;
      const double* const squares = channels.squares.data() + b * args_.bundle;
      for (std::int64_t c = 0; c < args_.bundle; ++c) {
        means[c] += static_cast<double>(FirstElement(group, first + c)) - base;
      }
      std::copy_n(means, args_.bundle, added.begin());
      const double mean =
          PairwiseSum(added.data(), args_.bundle) / static_cast<double>(args_.bundle);
      double sum_squares = 0;
      for (std::int64_t c = 0; c < args_.bundle; ++c) {
        sum_squares += squares[c] + terms * ((means[c] - mean) * (means[c] - mean));
      }
      all.means[static_cast<std::size_t>(b)] = mean;
      all.squares[static_cast<std::size_t>(b)] = sum_squares;
    }
    return all;
  }

  // Statistics and y of a piece with whole bundles.
  void BothSweeps(const Piece& piece) const {
    const Numbers numbers(wide_, piece.group);
    if (args_.bundle > 1 && args_.shape.outer.rows == 1) {  // a bundle's elements lie together
      const Layout<true> joined(
          ChannelShape{{layout_.groups, 1, args_.bundles}, layout_.inner * args_.bundle});
      const Piece bundles{.group = piece.group,
                          .part = 0,
                          .row = 0,
                          .end_row = 1,
                          .channel = piece.channel / args_.bundle,
                          .end_channel = piece.end_channel / args_.bundle};
      Finish(numbers, piece.group, piece.channel, MomentsOfPiece(joined, bundles));
    } else {
      Finish(numbers, piece.group, piece.channel,
             OfBundles(piece.group, piece.channel, MomentsOfPiece(layout_, piece)));
    }
    if (args_.y != nullptr) Apply<T>(args_, wide_, numbers, piece.OfWhole(wide_), streamed_);
  }

  // Stores the moments of a piece in the workspace.
  void PartialMoments(const Piece& piece) const {
    const Moments moments = MomentsOfPiece(layout_, piece);
    const auto round = [](double value) { return static_cast<A>(value); };
    std::transform(moments.means.begin(), moments.means.end(),
                   Partial(piece.group, piece.part, 0) + piece.channel, round);
    std::transform(moments.squares.begin(), moments.squares.end(),
                   Partial(piece.group, piece.part, 1) + piece.channel, StoredSquares<A>);
  }

  // n moments from number `first` on, over all parts.
  Moments MergeParts(const Pieces<kFirst>& pieces, std::int64_t group, std::int64_t first,
                     std::int64_t n) const {
    Moments all(n);
    double count = 0;
    for (std::int64_t part = 0; part < pieces.parts; ++part) {
      const std::int64_t row = part * pieces.rows, end = std::min(layout_.rows, row + pieces.rows);
      const auto added = static_cast<double>(
          (std::min(end * layout_.width, layout_.elements) - row * layout_.width) /
          layout_.channels * sum_channels_);
      Merge(count, all.means.data(), all.squares.data(), added, Partial(group, part, 0) + first,
            Partial(group, part, 1) + first, n);
      count += added;
    }
    return all;
  }

  // Stores the statistics of the bundles from `first_channel` on. Sets the numbers of their
  // channels.
  void Finish(const Numbers& numbers, std::int64_t group, std::int64_t first_channel,
              const Moments& moments) const {
    const auto elements = static_cast<double>(args_.shape.terms() * args_.bundle);
    for (std::size_t k = 0; k < moments.means.size(); ++k) {
      const std::int64_t channel = first_channel + static_cast<std::int64_t>(k) * args_.bundle;
      const double offset = moments.means[k];
      const A first = FirstElement(group, channel);
      const A variance = static_cast<A>(moments.squares[k] / elements);
      const A mean = static_cast<A>(static_cast<double>(first) + offset);
      // Relative to the first element: the mean itself may have more digits than a double holds.
      const A delta =
          static_cast<A>((static_cast<double>(first) - static_cast<double>(mean)) + offset);
      const A rstd = InverseDeviation(variance, Epsilon<A>(args_.epsilon, args_.strict));
      const std::int64_t i = group * args_.bundles + channel / args_.bundle;
      static_cast<A*>(args_.batch_mean)[i] = mean;
      static_cast<A*>(args_.batch_variance)[i] = variance;
      static_cast<A*>(args_.batch_rstd)[i] = rstd;
      static_cast<A*>(args_.batch_delta)[i] = delta;
      for (std::int64_t c = channel; c < channel + args_.bundle; ++c) {
        SetNumbers(numbers, group, c, mean, rstd, delta);
      }
    }
  }

  const CpuContext& pool_;
  const BatchNormFwdArgs& args_;
  const Layout<kFirst> layout_, wide_;
  const std::int64_t sum_channels_;  // how many neighbouring channels have their moments together
  const bool streamed_;
  const Pieces<kFirst> of_elements_;
};

template <typename T, bool kFirst>
ffi::Error Forward(const CpuContext& pool, const BatchNormFwdArgs& args) {
  const bool own = args.mean.data == nullptr;
  if (args.shape.elements() == 0) {
    if (own) EmptyStatistics<Accum<T>>(args);
    return ffi::Error::Success();
  }
  const ForwardCall<T, kFirst> call(pool, args);
  if (own) {
    call.Compute();
  } else {
    call.ApplyGiven();
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error BatchNormFwd(CpuContext pool, const BatchNormFwdArgs& args) {
  if (IsSmall(args.shape)) return SmallBatchNormFwd(pool, args);
  const bool grouped = args.bundle > 1 || args.silu;
  if (grouped && IsJoined(args)) return JoinedGroupNormFwd(pool, args);
  if (IsMiddle(args.shape)) return MiddleBatchNormFwd(pool, args);
  return DispatchDtype(FloatTypes{}, "batch_norm_fwd", args.dtype, [&]<typename T>() {
    return args.shape.inner > 1 ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
  });
}

}  // namespace gradops
