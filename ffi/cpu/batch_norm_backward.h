// Batch norm and group norm on the CPU, backward, in two sweeps over memory. The first sweep makes
// sum(dz) and sum(dz * (x - mean)) of each channel. The second sweep makes dx. In group norm, the
// sums of a bundle's channels are first multiplied by their scales and added up, in double.
//
// A few rows at a time are added up in the accumulation type, and these sums in double. The shape
// alone decides how arrays are cut into parts. The sums of the parts are added in a fixed order.
//
// Computing silu's derivative takes longer than reading dz from memory. In float32 and float64, dx
// has dz's type: the first sweep stores dz in dx, and the second sweep reads x and dx.
//
// Memory traffic otherwise: dy and x are read twice, and dx is written. relu with a residual also
// reads y twice and writes dresidual. Whole channels in a piece stay in a cache: memory is then
// read once.
//
// The two ops are compiled in files of their own (batch_norm_bwd.cc, group_norm_bwd.cc): GCC
// inlines less in a large file. It inlines large functions only if no other file can call them.
// Hence the namespace without a name.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/batch_norm_pieces.h"
#include "cpu/column_sum.h"
#include "cpu/silu.h"
#include "ops/batch_norm.h"

namespace gradops {

// Group norm, for samples of any size (group_norm_bwd.cc).
ffi::Error LargeGroupNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

namespace {

// The activation's argument is (x - mean) * factor + offset. In batch norm,
//   dx = (dz - level - (x - mean) * slope) * factor.
// Where means are weighted by scale, which group norm needs,
//   dx = dz * factor - (level + (x - mean) * slope) * rstd.
// In this form, no factor has the square of rstd, which may be larger than a float can hold.
enum { kMean, kFactor, kOffset, kLevel, kSlope, kRstd };
template <typename A, bool kFirst, bool kWeighted>
using Numbers = Coefficients<A, kFirst, kWeighted ? kRstd + 1 : kRstd>;

// What dz is: dy; dy where relu's argument or y is positive, else 0; dy times silu's derivative.
enum class Act { kNone, kReluOfArgument, kReluOfOutput, kSilu };

// Whether the first sweep stores dz in dx. Not if dx has x's memory: the second sweep reads x.
template <typename T, Act kAct>
bool KeepsDz(const BatchNormBwdArgs& args) {
  return kAct == Act::kSilu && std::is_same_v<T, Accum<T>> && args.dx != nullptr &&
         args.dx != args.x;
}

// dz and x - mean of the elements from `offset` on, element by element.
template <typename T, Act kAct, bool kWeighted, bool kFirst>
class Terms {
 public:
  using A = Accum<T>;
  // `start` is the channel, or, with channels last, the column.
  Terms(const BatchNormBwdArgs& args, const Numbers<A, kFirst, kWeighted>& numbers,
        std::int64_t offset, std::int64_t group, std::int64_t start)
      : dy_(static_cast<const T*>(args.dy) + offset),
        x_(static_cast<const T*>(args.x) + offset),
        y_(kAct == Act::kReluOfOutput ? static_cast<const T*>(args.y) + offset : nullptr),
        kept_(KeepsDz<T, kAct>(args) ? static_cast<T*>(args.dx) + offset : nullptr),
        mean_(numbers.Get(kMean, group, start)),
        factor_(numbers.Get(kFactor, group, start)),
        offset_(numbers.Get(kOffset, group, start)) {}

  // x - mean, and dz, `skipped` elements after the loop's place `at`, in the same columns. A call
  // would pass lanes through memory: relu took a third longer in bfloat16.
  GRADOPS_INLINE auto centered(auto at, std::int64_t skipped = 0) const {
    return at(x_ + skipped) - mean_(at);
  }
  GRADOPS_INLINE auto dz(auto at, std::int64_t skipped = 0) const {
    const auto dy = at(dy_ + skipped);
    const std::remove_cv_t<decltype(dy)> zero = 0;
    if constexpr (kAct == Act::kReluOfArgument) {
      return IfGreater(centered(at, skipped) * factor_(at) + offset_(at), zero, dy, zero);
    } else if constexpr (kAct == Act::kSilu) {
      return dy * SiluDerivative<A>(centered(at, skipped) * factor_(at) + offset_(at));
    } else if constexpr (kAct == Act::kReluOfOutput) {
      return IfGreater(at(y_ + skipped), zero, dy, zero);
    } else {
      return dy;
    }
  }
  void PrefetchAhead(std::int64_t skipped, std::int64_t width, auto at) const {
    PrefetchRowAhead(dy_ + skipped, width, at), PrefetchRowAhead(x_ + skipped, width, at);
    if constexpr (kAct == Act::kReluOfOutput) PrefetchRowAhead(y_ + skipped, width, at);
  }
  // The terms of the sums.
  GRADOPS_INLINE auto operator()(std::int64_t skipped, auto at) const {
    const auto gradient = dz(at, skipped);
    if constexpr (kAct == Act::kSilu && std::is_same_v<T, A>) {
      if (kept_ != nullptr) at.Store(kept_ + skipped, gradient);
    }
    return std::array{gradient, gradient * centered(at, skipped)};
  }

 private:
  const T *dy_, *x_, *y_;
  T* kept_;
  Along<A, kFirst> mean_, factor_, offset_;
};

// For each of some channels: sum(dz) and sum(dz * (x - mean)).
using Sums = std::array<std::vector<double>, 2>;

Sums Zeros(std::int64_t n) {
  const std::vector<double> zeros(static_cast<std::size_t>(n));
  return {zeros, zeros};
}

template <typename T, Act kAct, bool kWeighted>
void AddSums(const BatchNormBwdArgs& args, const Layout<true>& layout,
             const Numbers<Accum<T>, true, kWeighted>& numbers, const Piece& piece, Sums& sums) {
  using A = Accum<T>;
  for (std::int64_t channel = piece.channel; channel < piece.end_channel; ++channel) {
    const std::int64_t offset = layout.offset(piece.group, piece.row) + channel * layout.inner;
    const Terms<T, kAct, kWeighted, true> terms(args, numbers, offset, piece.group, channel);
    const auto added = SumRuns<A, 2>(piece.end_row - piece.row, layout.inner, layout.width, terms);
    for (std::size_t s = 0; s < 2; ++s) {
      sums[s][static_cast<std::size_t>(channel - piece.channel)] = added[s];
    }
  }
}

template <typename T, Act kAct, bool kWeighted>
void AddSums(const BatchNormBwdArgs& args, const Layout<false>& layout,
             const Numbers<Accum<T>, false, kWeighted>& numbers, const Piece& piece, Sums& totals) {
  using A = Accum<T>;
  alignas(64) A sums[2][kSumColumns<T>];
  for (std::int64_t row = piece.row; row < piece.end_row; row += kRowsPerSum) {
    const std::int64_t end = std::min(piece.end_row, row + kRowsPerSum);
    const auto add_columns = [&](std::int64_t start, std::int64_t n) {
      for (auto& sum : sums) std::fill_n(sum, n, A{0});
      const std::int64_t offset = layout.offset(piece.group, row) + start;
      const Terms<T, kAct, kWeighted, false> terms(args, numbers, offset, piece.group, start);
      const auto add = [&](std::int64_t first, std::int64_t rows, std::int64_t columns) {
        const std::int64_t width = layout.width, skipped = first * width;
        AddRows(
            rows, columns,
            [=](std::int64_t r, auto at) {
              terms.PrefetchAhead(skipped + r * width, width, at);
              return terms(skipped + r * width, at);
            },
            sums);
      };
      const std::int64_t last = layout.width_of(end - 1);  // only the last row may be shorter
      if (last == layout.width) {
        add(0, end - row, n);
      } else {
        add(0, end - row - 1, n);
        add(end - row - 1, 1, std::min(n, last - start));
      }
      for (std::size_t s = 0; s < 2; ++s) {
        for (std::int64_t i = 0; i < n; i += layout.channels) {
          double* const total = totals[s].data() + start;
          const std::int64_t count = std::min(layout.channels, n - i);
          for (std::int64_t c = 0; c < count; ++c) total[c] += static_cast<double>(sums[s][i + c]);
        }
      }
    };
    for (std::int64_t start = 0; start < layout.width; start += kSumColumns<T>) {
      add_columns(start, std::min(kSumColumns<T>, layout.width - start));
    }
  }
}

template <typename T, Act kAct, bool kWeighted, bool kFirst>
void Apply(const BatchNormBwdArgs& args, const Layout<kFirst>& layout,
           const Numbers<Accum<T>, kFirst, kWeighted>& numbers, const Piece& piece, bool streamed) {
  using A = Accum<T>;
  // Of four rows at a time, only group norm of float32 was seen to gain, by up to 13 %. Other
  // dtypes were not tried.
  constexpr int kRows = kWeighted && !kFirst && sizeof(T) == 4 ? 4 : 1;
  ForBlocksOf<kRows>(layout, piece, [&](const Block& block) {
    const Terms<T, kAct, kWeighted, kFirst> terms(args, numbers, block.offset, piece.group,
                                                  block.start);
    const Along<A, kFirst> factor = numbers.Get(kFactor, piece.group, block.start),
                           level = numbers.Get(kLevel, piece.group, block.start),
                           slope = numbers.Get(kSlope, piece.group, block.start);
    T* const dx = static_cast<T*>(args.dx) + block.offset;
    if constexpr (kWeighted) {
      const Along<A, kFirst> rstd = numbers.Get(kRstd, piece.group, block.start);
      StoreRowsForLanes<kLanes<A>, kRows>(
          dx, block.rows, layout.width, block.n, streamed, [=](auto at) {
            const auto f = factor(at), l = level(at), s = slope(at), r = rstd(at);
            return [=](std::int64_t skipped) {
              return terms.dz(at, skipped) * f - (l + terms.centered(at, skipped) * s) * r;
            };
          });
    } else {
      StoreForLanes<kLanes<A>>(dx, block.n, streamed, [=](auto at) {
        return (terms.dz(at) - level(at) - terms.centered(at) * slope(at)) * factor(at);
      });
      if (args.dresidual != nullptr) {
        StoreForLanes<kLanes<A>>(static_cast<T*>(args.dresidual) + block.offset, block.n, streamed,
                                 [=](auto at) { return terms.dz(at); });
      }
    }
  });
  if (streamed) StreamFence();
}

// A call on arrays with elements.
template <typename T, Act kAct, bool kWeighted, bool kFirst>
class BackwardCall {
  using A = Accum<T>;
  using Numbers = gradops::Numbers<A, kFirst, kWeighted>;
  // Whether dz depends on the activation's argument. Otherwise nothing reads kOffset.
  static constexpr bool kHasArgument = kAct == Act::kReluOfArgument || kAct == Act::kSilu;

 public:
  BackwardCall(const CpuContext& pool, const BatchNormBwdArgs& args)
      : pool_(pool),
        args_(args),
        layout_(args.shape),
        wide_(Layout<kFirst>::Wide(args.shape)),
        dscale_(args.dscale, args.shape.outer),
        dbias_(args.dbias, args.shape.outer),
        streamed_(Prepare(args)),
        of_elements_(Pieces<kFirst>::ForElements(wide_, 3 * sizeof(T))) {}

  // dx from given means.
  void ApplyGiven() const {
    if (args_.dx == nullptr) return;
    if (of_elements_.parts > 1) {
      ApplyAll(AllNumbers());
    } else {
      ForPiecesReversed(pool_, of_elements_,
                        [&](const Piece& piece) { ApplyTo(piece, NumbersOf(piece)); });
    }
  }

  // The sums, and dx.
  ffi::Error Compute() const {
    const auto pieces =
        Pieces<kFirst>::ForSums(layout_, args_.bundle, 2 * sizeof(T), args_.partial_rows);
    if (pieces.HasWhole(args_.bundle)) {
      ForPieces(pool_, pieces, [&](const Piece& piece) { BothSweeps(piece); });
    } else {
      const Numbers numbers = AllNumbers();
      ForPieces(pool_, pieces, [&](const Piece& piece) { PartialSums(piece, numbers); });
      ForChannelBlocks(pool_, layout_, args_.bundle,
                       [&](std::int64_t group, std::int64_t channel, std::int64_t n) {
                         Finish(numbers, group, channel,
                                MergeParts(pieces.parts, group, channel, n));
                       });
      if (args_.dx != nullptr) {
        ForPiecesReversed(pool_, of_elements_,
                          [&](const Piece& piece) { SecondSweep(piece, numbers); });
      }
    }
    const ffi::Error error = dscale_.Store(pool_);
    return error.failure() ? error : dbias_.Store(pool_);
  }

 private:
  // dresidual is stored in the way that dx is stored.
  static bool Prepare(const BatchNormBwdArgs& args) {
    const std::int64_t bytes = args.shape.elements() * std::int64_t{sizeof(T)};
    const bool streamed = PrepareResult(args.dx, bytes, {args.dy, args.x, args.y});
    PrepareResult(args.dresidual, bytes, {args.dy, args.x, args.y});
    return streamed;
  }

  // A number of the bundle of a channel.
  A OfBundle(const Param& param, std::int64_t group, std::int64_t channel) const {
    return ReadParam(param, group, channel / args_.bundle, A{0});
  }
  // Sets the numbers of the channels [channel, end) of one bundle. Only dx needs level and slope.
  // They are set again when the sums are known.
  void SetNumbers(const Numbers& numbers, std::int64_t group, std::int64_t channel,
                  std::int64_t end, A mean_dz, A mean_dz_x_hat) const {
    const A rstd = OfBundle(args_.rstd, group, channel);
    const A delta = OfBundle(args_.delta, group, channel);
    const A slope = mean_dz_x_hat * rstd, level = mean_dz - delta * slope;
    const A mean = OfBundle(args_.mean, group, channel);
    for (; channel < end; ++channel) {
      const A factor = rstd * ReadParam(args_.scale, group, channel, A{1});
      const A offset =
          kHasArgument ? ReadParam(args_.bias, group, channel, A{0}) - delta * factor : 0;
      if constexpr (kWeighted) {
        numbers.Set(group, channel, {mean, factor, offset, level, slope, rstd});
      } else {
        numbers.Set(group, channel, {mean, factor, offset, level, slope});
      }
    }
  }
  // Sets the numbers of the channels [channel, end).
  void SetGiven(const Numbers& numbers, std::int64_t group, std::int64_t channel,
                std::int64_t end) const {
    while (channel < end) {
      const std::int64_t next = std::min(end, (channel / args_.bundle + 1) * args_.bundle);
      SetNumbers(numbers, group, channel, next, OfBundle(args_.mean_dz, group, channel),
                 OfBundle(args_.mean_dz_x_hat, group, channel));
      channel = next;
    }
  }
  Numbers NumbersOf(const Piece& piece) const {
    Numbers numbers(wide_, piece.group);
    SetGiven(numbers, piece.group, piece.channel, piece.end_channel);
    return numbers;
  }
  Numbers AllNumbers() const {
    Numbers numbers(wide_);
    ForChannelBlocks(pool_, layout_, args_.bundle,
                     [&](std::int64_t group, std::int64_t channel, std::int64_t n) {
                       SetGiven(numbers, group, channel, channel + n);
                     });
    return numbers;
  }

  void ApplyTo(const Piece& piece, const Numbers& numbers) const {
    Apply<T, kAct, kWeighted>(args_, wide_, numbers, piece, streamed_);
  }
  void ApplyAll(const Numbers& numbers) const {
    ForPiecesReversed(pool_, of_elements_, [&](const Piece& piece) { ApplyTo(piece, numbers); });
  }

  // dx of a piece, after the sums.
  void SecondSweep(const Piece& piece, const Numbers& numbers) const {
    if (!KeepsDz<T, kAct>(args_)) return ApplyTo(piece, numbers);
    BatchNormBwdArgs kept = args_;
    kept.dy = args_.dx;
    Apply<T, Act::kNone, kWeighted>(kept, wide_, numbers, piece, streamed_);
  }

  // Both sweeps of a piece with whole bundles.
  void BothSweeps(const Piece& piece) const {
    Sums sums = Zeros(piece.channels());
    const Numbers numbers = NumbersOf(piece);
    AddSums<T, kAct, kWeighted>(args_, layout_, numbers, piece, sums);
    Finish(numbers, piece.group, piece.channel, sums);
    if (args_.dx != nullptr) SecondSweep(piece.OfWhole(wide_), numbers);
  }

  // The partial results of a part: [groups, partial_rows, 2, channels].
  A* Partial(std::int64_t group, std::int64_t part) const {
    return static_cast<A*>(args_.workspace) +
           (group * args_.partial_rows + part) * 2 * layout_.channels;
  }
  void PartialSums(const Piece& piece, const Numbers& numbers) const {
    Sums sums = Zeros(piece.channels());
    AddSums<T, kAct, kWeighted>(args_, layout_, numbers, piece, sums);
    A* partial = Partial(piece.group, piece.part) + piece.channel;
    for (const std::vector<double>& sum : sums) {
      std::transform(sum.begin(), sum.end(), partial,
                     [](double value) { return static_cast<A>(value); });
      partial += layout_.channels;
    }
  }
  // The sums of n channels from `channel` on, over all parts.
  Sums MergeParts(std::int64_t parts, std::int64_t group, std::int64_t channel,
                  std::int64_t n) const {
    Sums all = Zeros(n);
    for (std::int64_t part = 0; part < parts; ++part) {
      const A* partial = Partial(group, part) + channel;
      for (std::vector<double>& sum : all) {
        for (std::int64_t c = 0; c < n; ++c)
          sum[static_cast<std::size_t>(c)] += static_cast<double>(partial[c]);
        partial += layout_.channels;
      }
    }
    return all;
  }

  // Stores the sums of the channels from `first` on, and sets the numbers for dx.
  void Finish(const Numbers& numbers, std::int64_t group, std::int64_t first,
              const Sums& sums) const {
    const auto elements = static_cast<double>(args_.shape.terms() * args_.bundle);
    const std::int64_t end = first + static_cast<std::int64_t>(sums[0].size());
    for (std::int64_t bundle = first; bundle < end; bundle += args_.bundle) {
      const auto delta = static_cast<double>(OfBundle(args_.delta, group, bundle));
      const auto rstd = static_cast<double>(OfBundle(args_.rstd, group, bundle));
      double sum_dz = 0, sum_dz_x_hat = 0;
      for (std::int64_t channel = bundle; channel < bundle + args_.bundle; ++channel) {
        const auto c = static_cast<std::size_t>(channel - first);
        const std::int64_t i = group * layout_.channels + channel;
        const double of_dz = sums[0][c];
        const double of_x_hat = (sums[1][c] - delta * of_dz) * rstd;
        if (dscale_.data() != nullptr) dscale_.data()[i] = static_cast<A>(of_x_hat);
        if (dbias_.data() != nullptr) dbias_.data()[i] = static_cast<A>(of_dz);
        const double weight =
            kWeighted ? static_cast<double>(ReadParam(args_.scale, group, channel, A{1})) : 1.0;
        sum_dz += weight * of_dz, sum_dz_x_hat += weight * of_x_hat;
      }
      const std::int64_t i = group * args_.bundles + bundle / args_.bundle;
      if (args_.sum_dz != nullptr) {
        static_cast<A*>(args_.sum_dz)[i] = static_cast<A>(sum_dz);
        static_cast<A*>(args_.sum_dz_x_hat)[i] = static_cast<A>(sum_dz_x_hat);
      }
      const A mean_dz = static_cast<A>(sum_dz / elements),
              mean_dz_x_hat = static_cast<A>(sum_dz_x_hat / elements);
      SetNumbers(numbers, group, bundle, bundle + args_.bundle, mean_dz, mean_dz_x_hat);
    }
  }

  const CpuContext& pool_;
  const BatchNormBwdArgs& args_;
  const Layout<kFirst> layout_, wide_;
  const WideGrad<A> dscale_, dbias_;
  const bool streamed_;
  const Pieces<kFirst> of_elements_;
};

// The sums of arrays without elements.
template <typename A>
void EmptySums(const BatchNormBwdArgs& args) {
  SetZero(args.dscale, args.shape.outer), SetZero(args.dbias, args.shape.outer);
  if (args.sum_dz == nullptr) return;
  const std::int64_t n = args.shape.outer.groups * args.bundles;
  std::fill_n(static_cast<A*>(args.sum_dz), n, A{0});
  std::fill_n(static_cast<A*>(args.sum_dz_x_hat), n, A{0});
}

template <typename T, Act kAct, bool kWeighted, bool kFirst>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  if (args.shape.elements() == 0) {
    EmptySums<Accum<T>>(args);
    return ffi::Error::Success();
  }
  const BackwardCall<T, kAct, kWeighted, kFirst> call(pool, args);
  if (args.mean_dz.data == nullptr) return call.Compute();
  call.ApplyGiven();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace gradops
