// Batch norm on the CPU, backward, in two sweeps over memory. The first sweep makes sum(dz) and
// sum(dz * (x - mean)) of each channel. The second sweep makes dx.
//
// A few rows at a time are added up in the accumulation type, and these sums in double. The shape
// alone decides how arrays are cut into parts. The sums of the parts are added in a fixed order.
//
// Memory traffic: dy and x are read twice, and dx is written. relu with a residual also reads y
// twice and writes dresidual. Whole channels in a piece stay in a cache: memory is then read once.
#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/batch_norm_pieces.h"
#include "cpu/batch_norm_small.h"
#include "cpu/column_sum.h"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// dx = (dz - level - (x - mean) * slope) * factor; relu's argument is (x - mean) * factor + offset.
enum { kMean, kFactor, kOffset, kLevel, kSlope, kNumbers };
template <typename A, bool kFirst>
using Numbers = Coefficients<A, kFirst, kNumbers>;

// Where dz is dy and not 0: everywhere, where relu's argument is positive, or where y is positive.
enum class Mask { kNone, kArgument, kOutput };

// dz and x - mean of the elements from `offset` on, element by element.
template <typename T, bool kFirst, Mask kMask>
class Terms {
 public:
  using A = Accum<T>;
  // `start` is the channel, or, with channels last, the column.
  Terms(const BatchNormBwdArgs& args, const Numbers<A, kFirst>& numbers, std::int64_t offset,
        std::int64_t group, std::int64_t start)
      : dy_(static_cast<const T*>(args.dy) + offset),
        x_(static_cast<const T*>(args.x) + offset),
        y_(kMask == Mask::kOutput ? static_cast<const T*>(args.y) + offset : nullptr),
        mean_(numbers.Get(kMean, group, start)),
        factor_(numbers.Get(kFactor, group, start)),
        offset_(numbers.Get(kOffset, group, start)) {}

  // x - mean, and dz, `skipped` elements after the loop's place `at`, in the same columns.
  auto centered(auto at, std::int64_t skipped = 0) const { return at(x_ + skipped) - mean_(at); }
  auto dz(auto at, std::int64_t skipped = 0) const {
    const auto dy = at(dy_ + skipped);
    const std::remove_cv_t<decltype(dy)> zero = 0;
    if constexpr (kMask == Mask::kArgument) {
      return IfGreater(centered(at, skipped) * factor_(at) + offset_(at), zero, dy, zero);
    } else if constexpr (kMask == Mask::kOutput) {
      return IfGreater(at(y_ + skipped), zero, dy, zero);
    } else {
      return dy;
    }
  }
  void PrefetchAhead(std::int64_t skipped, std::int64_t width, auto at) const {
    PrefetchRowAhead(dy_ + skipped, width, at), PrefetchRowAhead(x_ + skipped, width, at);
    if constexpr (kMask == Mask::kOutput) PrefetchRowAhead(y_ + skipped, width, at);
  }
  auto operator()(std::int64_t skipped, auto at) const {
    const auto gradient = dz(at, skipped);
    return std::array{gradient, gradient * centered(at, skipped)};
  }

 private:
  const T *dy_, *x_, *y_;
  Along<A, kFirst> mean_, factor_, offset_;
};

// For each of some channels: sum(dz) and sum(dz * (x - mean)).
using Sums = std::array<std::vector<double>, 2>;

Sums Zeros(std::int64_t n) {
  const std::vector<double> zeros(static_cast<std::size_t>(n));
  return {zeros, zeros};
}

template <typename T, Mask kMask>
void AddSums(const BatchNormBwdArgs& args, const Layout<true>& layout,
             const Numbers<Accum<T>, true>& numbers, const Piece& piece, Sums& sums) {
  using A = Accum<T>;
  for (std::int64_t channel = piece.channel; channel < piece.end_channel; ++channel) {
    const std::int64_t offset = layout.offset(piece.group, piece.row) + channel * layout.inner;
    const Terms<T, true, kMask> terms(args, numbers, offset, piece.group, channel);
    const auto added = SumRuns<A, 2>(piece.end_row - piece.row, layout.inner, layout.width, terms);
    for (std::size_t s = 0; s < 2; ++s) {
      sums[s][static_cast<std::size_t>(channel - piece.channel)] = added[s];
    }
  }
}

template <typename T, Mask kMask>
void AddSums(const BatchNormBwdArgs& args, const Layout<false>& layout,
             const Numbers<Accum<T>, false>& numbers, const Piece& piece, Sums& totals) {
  using A = Accum<T>;
  alignas(64) A sums[2][kSumColumns<T>];
  for (std::int64_t row = piece.row; row < piece.end_row; row += kRowsPerSum) {
    const std::int64_t end = std::min(piece.end_row, row + kRowsPerSum);
    const auto add_columns = [&](std::int64_t start, std::int64_t n) {
      for (auto& sum : sums) std::fill_n(sum, n, A{0});
      const std::int64_t offset = layout.offset(piece.group, row) + start;
      const Terms<T, false, kMask> terms(args, numbers, offset, piece.group, start);
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

template <typename T, Mask kMask, bool kFirst>
void Apply(const BatchNormBwdArgs& args, const Layout<kFirst>& layout,
           const Numbers<Accum<T>, kFirst>& numbers, const Piece& piece, bool streamed) {
  using A = Accum<T>;
  ForBlocksOf(layout, piece, [&](const Block& block) {
    const Terms<T, kFirst, kMask> terms(args, numbers, block.offset, piece.group, block.start);
    const Along<A, kFirst> factor = numbers.Get(kFactor, piece.group, block.start),
                           level = numbers.Get(kLevel, piece.group, block.start),
                           slope = numbers.Get(kSlope, piece.group, block.start);
    StoreForLanes<kLanes<A>>(
        static_cast<T*>(args.dx) + block.offset, block.n, streamed, [=](auto at) {
          return (terms.dz(at) - level(at) - terms.centered(at) * slope(at)) * factor(at);
        });
    if (args.dresidual != nullptr) {
      StoreForLanes<kLanes<A>>(static_cast<T*>(args.dresidual) + block.offset, block.n, streamed,
                               [=](auto at) { return terms.dz(at); });
    }
  });
  if (streamed) StreamFence();
}

// A call on arrays with elements.
template <typename T, Mask kMask, bool kFirst>
class BackwardCall {
  using A = Accum<T>;

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
    const auto pieces = Pieces<kFirst>::ForSums(layout_, 2 * sizeof(T), args_.partial_rows);
    if (pieces.parts == 1) {
      ForPieces(pool_, pieces, [&](const Piece& piece) { WholeChannels(piece); });
    } else {
      const Numbers<A, kFirst> numbers = AllNumbers();
      ForPieces(pool_, pieces, [&](const Piece& piece) { PartialSums(piece, numbers); });
      ForChannelBlocks(
          pool_, layout_, [&](std::int64_t group, std::int64_t channel, std::int64_t n) {
            Finish(numbers, group, channel, MergeParts(pieces.parts, group, channel, n));
          });
      if (args_.dx != nullptr) ApplyAll(numbers);
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

  // Only dx needs level and slope. They are set again when the sums are known.
  void SetNumbers(const Numbers<A, kFirst>& numbers, std::int64_t group, std::int64_t channel,
                  A mean_dz, A mean_dz_x_hat) const {
    const auto given = [&](const Param& param) { return ReadParam(param, group, channel, A{0}); };
    const A rstd = given(args_.rstd), delta = given(args_.delta);
    const A factor = rstd * ReadParam(args_.scale, group, channel, A{1});
    const A slope = mean_dz_x_hat * rstd;
    numbers.Set(group, channel,
                {given(args_.mean), factor, given(args_.bias) - delta * factor,
                 mean_dz - delta * slope, slope});
  }
  void SetGiven(const Numbers<A, kFirst>& numbers, std::int64_t group, std::int64_t channel) const {
    SetNumbers(numbers, group, channel, ReadParam(args_.mean_dz, group, channel, A{0}),
               ReadParam(args_.mean_dz_x_hat, group, channel, A{0}));
  }
  Numbers<A, kFirst> NumbersOf(const Piece& piece) const {
    Numbers<A, kFirst> numbers(wide_, piece.group);
    for (std::int64_t c = piece.channel; c < piece.end_channel; ++c) {
      SetGiven(numbers, piece.group, c);
    }
    return numbers;
  }
  Numbers<A, kFirst> AllNumbers() const {
    Numbers<A, kFirst> numbers(wide_);
    ForChannels(pool_, layout_, [&](std::int64_t group, std::int64_t channel) {
      SetGiven(numbers, group, channel);
    });
    return numbers;
  }

  void ApplyTo(const Piece& piece, const Numbers<A, kFirst>& numbers) const {
    Apply<T, kMask>(args_, wide_, numbers, piece, streamed_);
  }
  void ApplyAll(const Numbers<A, kFirst>& numbers) const {
    ForPiecesReversed(pool_, of_elements_, [&](const Piece& piece) { ApplyTo(piece, numbers); });
  }

  // Both sweeps of a piece with whole channels.
  void WholeChannels(const Piece& piece) const {
    Sums sums = Zeros(piece.channels());
    const Numbers<A, kFirst> numbers = NumbersOf(piece);
    AddSums<T, kMask>(args_, layout_, numbers, piece, sums);
    Finish(numbers, piece.group, piece.channel, sums);
    if (args_.dx != nullptr) ApplyTo(piece.OfWhole(wide_), numbers);
  }

  // The partial results of a part: [groups, partial_rows, 2, channels].
  A* Partial(std::int64_t group, std::int64_t part) const {
    return static_cast<A*>(args_.workspace) +
           (group * args_.partial_rows + part) * 2 * layout_.channels;
  }
  void PartialSums(const Piece& piece, const Numbers<A, kFirst>& numbers) const {
    Sums sums = Zeros(piece.channels());
    AddSums<T, kMask>(args_, layout_, numbers, piece, sums);
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
  void Finish(const Numbers<A, kFirst>& numbers, std::int64_t group, std::int64_t first,
              const Sums& sums) const {
    const auto terms = static_cast<double>(args_.shape.terms());
    for (std::size_t c = 0; c < sums[0].size(); ++c) {
      const std::int64_t channel = first + static_cast<std::int64_t>(c),
                         i = group * layout_.channels + channel;
      const A delta = ReadParam(args_.delta, group, channel, A{0}),
              rstd = ReadParam(args_.rstd, group, channel, A{0});
      const double of_dz = sums[0][c];
      const double of_x_hat =
          (sums[1][c] - static_cast<double>(delta) * of_dz) * static_cast<double>(rstd);
      if (dscale_.data() != nullptr) dscale_.data()[i] = static_cast<A>(of_x_hat);
      if (dbias_.data() != nullptr) dbias_.data()[i] = static_cast<A>(of_dz);
      SetNumbers(numbers, group, channel, static_cast<A>(of_dz / terms),
                 static_cast<A>(of_x_hat / terms));
    }
  }

  const CpuContext& pool_;
  const BatchNormBwdArgs& args_;
  const Layout<kFirst> layout_, wide_;
  const WideGrad<A> dscale_, dbias_;
  const bool streamed_;
  const Pieces<kFirst> of_elements_;
};

template <typename T, Mask kMask, bool kFirst>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  if (args.shape.elements() == 0) {
    SetZero(args.dscale, args.shape.outer);
    SetZero(args.dbias, args.shape.outer);
    return ffi::Error::Success();
  }
  const BackwardCall<T, kMask, kFirst> call(pool, args);
  if (args.mean_dz.data == nullptr) return call.Compute();
  call.ApplyGiven();
  return ffi::Error::Success();
}

}  // namespace

ffi::Error BatchNormBwd(CpuContext pool, const BatchNormBwdArgs& args) {
  if (IsSmall(args.shape)) return SmallBatchNormBwd(pool, args);
  if (IsMiddle(args.shape)) return MiddleBatchNormBwd(pool, args);
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype, [&]<typename T>() {
    const auto with_mask = [&]<Mask kMask>() {
      return args.shape.inner > 1 ? Backward<T, kMask, true>(pool, args)
                                  : Backward<T, kMask, false>(pool, args);
    };
    if (!args.relu) return with_mask.template operator()<Mask::kNone>();
    return args.y == nullptr ? with_mask.template operator()<Mask::kArgument>()
                             : with_mask.template operator()<Mask::kOutput>();
  });
}

}  // namespace gradops
