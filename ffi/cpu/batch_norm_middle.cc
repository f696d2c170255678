// Batch norm and group norm on the CPU, channels last, for groups that fit into a core's caches: a
// plain loop over each group. All scratch is on the stack. Memory is read or written once per
// array.
//
// Rows of few channels are joined to one longer row. Sums run along columns: a few rows are added
// up in the accumulation type, and these sums in double. Statistics are made as in
// batch_norm_small.cc.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "common/math.h"
#include "cpu/batch_norm_large.h"
#include "cpu/batch_norm_small.h"
#include "cpu/column_sum.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "cpu/wide.h"

namespace gradops {
namespace {

// The elements of a group in rows of `width` columns. Column i is of channel i % channels. The last
// row may be shorter.
class Group {
 public:
  static constexpr std::int64_t kMinWidth = 64, kMaxWidth = kMiddleChannels + kMinWidth;
  Group(const ChannelShape& shape, std::int64_t bundle)
      : channels(shape.channels()),
        bundle(bundle),
        width(channels * ((kMinWidth + channels - 1) / channels)),
        elements(channels * shape.terms()) {}
  // One number for each column of a row.
  template <typename A>
  struct Row {
    alignas(64) A values[kMaxWidth];
  };
  template <typename A>
  void Set(Row<A>& row, std::int64_t channel, A value) const {
    for (std::int64_t i = channel; i < width; i += channels) row.values[i] = value;
  }
  // Sets all channels of the bundle that begins at `first`.
  template <typename A>
  void SetBundle(Row<A>& row, std::int64_t first, A value) const {
    for (std::int64_t c = first; c < first + bundle; ++c) Set(row, c, value);
  }
  // The sum over the channels of the bundle that begins at `first`.
  double OfBundle(const double* sums, std::int64_t first) const {
    double sum = sums[first];
    for (std::int64_t c = first + 1; c < first + bundle; ++c) sum += sums[c];
    return sum;
  }
  // Calls fn(start, n) for each row.
  template <typename Fn>
  void ForRows(const Fn& fn) const {
    for (std::int64_t start = 0; start < elements; start += width) {
      fn(start, std::min(width, elements - start));
    }
  }
  // The sums of each channel over its elements. terms(start, at) returns kSums terms at the loop's
  // place `at`, in the row that begins at `start`.
  template <typename A, int kSums, typename Terms>
  void Sum(const Terms& terms, double (&sums)[kSums][kMiddleChannels]) const {
    constexpr std::int64_t kRowsAtATime = 16;
    Row<A> few[kSums];
    double totals[kSums][kMaxWidth];
    for (int s = 0; s < kSums; ++s) {
      std::fill_n(few[s].values, width, A{0});
      std::fill_n(totals[s], width, 0.0);
    }
    const auto move = [&] {
      for (int s = 0; s < kSums; ++s) MoveSums(few[s].values, width, totals[s]);
    };
    std::int64_t rows = 0;
    ForRows([&](std::int64_t start, std::int64_t n) {
      ForLanes<kLanes<A>>(n, [&](auto at) {
        const auto term = terms(start, at);
        for (int s = 0; s < kSums; ++s) at.Store(few[s].values, at(few[s].values) + term[s]);
      });
      if (++rows % kRowsAtATime == 0) move();
    });
    move();
    for (int s = 0; s < kSums; ++s) {
      std::fill_n(sums[s], channels, 0.0);
      for (std::int64_t i = 0; i < width; i += channels) {
        for (std::int64_t c = 0; c < channels; ++c) sums[s][c] += totals[s][i + c];
      }
    }
  }

  const std::int64_t channels, bundle, width, elements;
};

// Calls fn(group) for each group, in the thread pool.
template <typename T, typename Fn>
void ForGroups(const CpuContext& pool, const ChannelShape& shape, std::int64_t arrays,
               const Fn& fn) {
  constexpr std::int64_t kMaxChunks = 256;
  const std::int64_t groups = shape.outer.groups;
  const std::int64_t bytes = arrays * shape.elements() / groups * std::int64_t{sizeof(T)};
  const std::int64_t chunk = RowsPerChunk(groups, bytes, kMaxChunks);
  ParallelFor(pool, (groups + chunk - 1) / chunk, [&](std::int64_t i) {
    for (std::int64_t g = i * chunk; g < std::min(groups, (i + 1) * chunk); ++g) fn(g);
    StreamFence();
  });
}

template <typename T>
ffi::Error Forward(const CpuContext& pool, const BatchNormFwdArgs& args) {
  using A = Accum<T>;
  const Group of(args.shape, args.bundle);
  const auto n = static_cast<double>(args.shape.terms() * args.bundle);
  const bool own = args.mean.data == nullptr;
  const A least = args.relu ? A{0} : -std::numeric_limits<A>::infinity();
  const bool streamed = PrepareResult(args.y, args.shape.elements() * std::int64_t{sizeof(T)},
                                      {args.x, args.residual});
  ForGroups<T>(pool, args.shape, 2, [&](std::int64_t group) {
    const T* const x = static_cast<const T*>(args.x) + group * of.elements;
    Group::Row<A> mean, factor, shift;
    double sums[2][kMiddleChannels], first_sums[1][kMiddleChannels];
    if (own) {
      for (std::int64_t c = 0; c < of.channels; c += of.bundle) {
        of.SetBundle(mean, c, static_cast<A>(x[c]));
      }
      of.Sum<A, 1>(
          [&](std::int64_t start, auto at) { return std::array{at(x + start) - at(mean.values)}; },
          first_sums);
      for (std::int64_t c = 0; c < of.channels; c += of.bundle) {
        const double sum = of.OfBundle(first_sums[0], c);
        of.SetBundle(mean, c, static_cast<A>(x[c]) + static_cast<A>(sum / n));
      }
      of.Sum<A, 2>(
          [&](std::int64_t start, auto at) {
            const auto centered = at(x + start) - at(mean.values);
            return std::array{centered, centered * centered};
          },
          sums);
    }
    for (std::int64_t first = 0; first < of.channels; first += of.bundle) {
      const std::int64_t bundle = first / of.bundle;
      const auto given = [&](const Param& param) { return ReadParam(param, group, bundle, A{0}); };
      A m = given(args.mean), rstd = given(args.rstd), delta = given(args.delta);
      if (own) {
        const double sum = of.OfBundle(sums[0], first), offset = sum / n;
        const double sum_squares = of.OfBundle(sums[1], first);
        const A guess = mean.values[first];
        double mean_square = sum_squares / n;
        if (NeedsSecondLook(sum, sum_squares)) {
          double of_deviations, squares;  // squares: about the mean
          LargeMoments(x + first, args.shape.terms(), of.bundle, of.channels, guess, of_deviations,
                       squares);
          mean_square = squares / n + offset * offset;
        }
        const A variance = static_cast<A>(VarianceOf(mean_square, offset));
        m = static_cast<A>(static_cast<double>(guess) + offset);
        delta = static_cast<A>((static_cast<double>(guess) - static_cast<double>(m)) + offset);
        rstd = InverseDeviation(variance, Epsilon<A>(args.epsilon, args.strict));
        const std::int64_t i = group * args.bundles + bundle;
        static_cast<A*>(args.batch_mean)[i] = m;
        static_cast<A*>(args.batch_variance)[i] = variance;
        static_cast<A*>(args.batch_rstd)[i] = rstd;
        static_cast<A*>(args.batch_delta)[i] = delta;
      }
      of.SetBundle(mean, first, m);
      for (std::int64_t c = first; c < first + of.bundle; ++c) {
        const A f = rstd * ReadParam(args.scale, group, c, A{1});
        of.Set(factor, c, f);
        of.Set(shift, c, ReadParam(args.bias, group, c, A{0}) - delta * f);
      }
    }
    if (args.y == nullptr) return;
    T* const y = static_cast<T*>(args.y) + group * of.elements;
    const T* const residual = args.residual == nullptr
                                  ? nullptr
                                  : static_cast<const T*>(args.residual) + group * of.elements;
    of.ForRows([&](std::int64_t start, std::int64_t count) {
      const A *const m = mean.values, *const f = factor.values, *const s = shift.values;
      const T* const from = x + start;
      if (args.silu) {  // group norm, without a residual
        StoreForLanes<kLanes<A>>(y + start, count, streamed, [=](auto at) {
          return Silu<A>((at(from) - at(m)) * at(f) + at(s));
        });
      } else if (residual == nullptr) {
        StoreForLanes<kLanes<A>>(y + start, count, streamed, [=](auto at) {
          return Max(least, (at(from) - at(m)) * at(f) + at(s));  // NaN stays
        });
      } else {
        const T* const added = residual + start;
        StoreForLanes<kLanes<A>>(y + start, count, streamed, [=](auto at) {
          return Max(least, (at(from) - at(m)) * at(f) + at(s) + at(added));
        });
      }
    });
  });
  return ffi::Error::Success();
}

// Sets level and slope of a group's channels for dx. They follow from the sums, which become the
// gradients of the parameters. If `sums` is null, they follow from given means.
template <typename A>
void SetSlopes(const BatchNormBwdArgs& args, const Group& of, std::int64_t group,
               const double (*sums)[kMiddleChannels], A* dscale, A* dbias, Group::Row<A>& level,
               Group::Row<A>& slope) {
  const auto n = static_cast<double>(args.shape.terms() * of.bundle);
  for (std::int64_t first = 0; first < of.channels; first += of.bundle) {
    const std::int64_t bundle = first / of.bundle;
    const auto given = [&](const Param& param) { return ReadParam(param, group, bundle, A{0}); };
    const A rstd = given(args.rstd), delta = given(args.delta);
    A mean_dz = given(args.mean_dz), mean_dz_x_hat = given(args.mean_dz_x_hat);
    if (sums != nullptr) {
      double sum_dz = 0, sum_dz_x_hat = 0;
      for (std::int64_t c = first; c < first + of.bundle; ++c) {
        const double of_x_hat =
            (sums[1][c] - static_cast<double>(delta) * sums[0][c]) * static_cast<double>(rstd);
        const std::int64_t i = group * of.channels + c;
        if (dscale != nullptr) dscale[i] = static_cast<A>(of_x_hat);
        if (dbias != nullptr) dbias[i] = static_cast<A>(sums[0][c]);
        const double weight =
            args.weighted ? static_cast<double>(ReadParam(args.scale, group, c, A{1})) : 1.0;
        sum_dz += weight * sums[0][c], sum_dz_x_hat += weight * of_x_hat;
      }
      const std::int64_t i = group * args.bundles + bundle;
      if (args.sum_dz != nullptr) {
        static_cast<A*>(args.sum_dz)[i] = static_cast<A>(sum_dz);
        static_cast<A*>(args.sum_dz_x_hat)[i] = static_cast<A>(sum_dz_x_hat);
      }
      mean_dz = static_cast<A>(sum_dz / n), mean_dz_x_hat = static_cast<A>(sum_dz_x_hat / n);
    }
    of.SetBundle(slope, first, mean_dz_x_hat * rstd);
    of.SetBundle(level, first, mean_dz - delta * (mean_dz_x_hat * rstd));
  }
}

template <typename T>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  using A = Accum<T>;
  const Group of(args.shape, args.bundle);
  const WideGrad<A> dscale(args.dscale, args.shape.outer), dbias(args.dbias, args.shape.outer);
  PrepareGrad(dscale, args.shape.outer), PrepareGrad(dbias, args.shape.outer);
  const std::int64_t bytes = args.shape.elements() * std::int64_t{sizeof(T)};
  const bool streamed = PrepareResult(args.dx, bytes, {args.dy, args.x, args.y});
  PrepareResult(args.dresidual, bytes, {args.dy, args.x, args.y});
  ForGroups<T>(pool, args.shape, 3, [&](std::int64_t group) {
    const std::int64_t offset = group * of.elements;
    const T* const dy = static_cast<const T*>(args.dy) + offset;
    const T* const x = static_cast<const T*>(args.x) + offset;
    const T* const y = args.y == nullptr ? nullptr : static_cast<const T*>(args.y) + offset;
    Group::Row<A> mean, factor, shift, level, slope, rstds;
    double sums[2][kMiddleChannels];
    for (std::int64_t first = 0; first < of.channels; first += of.bundle) {
      const auto given = [&](const Param& param) {
        return ReadParam(param, group, first / of.bundle, A{0});
      };
      const A rstd = given(args.rstd), delta = given(args.delta);
      of.SetBundle(mean, first, given(args.mean)), of.SetBundle(rstds, first, rstd);
      for (std::int64_t c = first; c < first + of.bundle; ++c) {
        const A f = rstd * ReadParam(args.scale, group, c, A{1});
        of.Set(factor, c, f);
        of.Set(shift, c, ReadParam(args.bias, group, c, A{0}) - delta * f);
      }
    }
    const auto centered = [=, &mean](std::int64_t start, auto at) {
      return at(x + start) - at(mean.values);
    };
    // Calls fn(dz). dz(start, at) is dy times the activation's derivative.
    const auto with_dz = [&](const auto& fn) {
      if (args.silu) {
        fn([=, &factor, &shift](std::int64_t start, auto at) {
          const auto argument = centered(start, at) * at(factor.values) + at(shift.values);
          return at(dy + start) * SiluDerivative<A>(argument);
        });
      } else if (!args.relu) {
        fn([=](std::int64_t start, auto at) { return at(dy + start); });
      } else if (y != nullptr) {
        fn([=](std::int64_t start, auto at) {
          const auto gradient = at(dy + start);
          const std::remove_cv_t<decltype(gradient)> zero = 0;
          return IfGreater(at(y + start), zero, gradient, zero);
        });
      } else {
        fn([=, &factor, &shift](std::int64_t start, auto at) {
          const auto gradient = at(dy + start);
          const std::remove_cv_t<decltype(gradient)> zero = 0;
          const auto argument = centered(start, at) * at(factor.values) + at(shift.values);
          return IfGreater(argument, zero, gradient, zero);
        });
      }
    };
    with_dz([&](const auto& dz) {
      const bool own = args.mean_dz.data == nullptr;
      if (own) {
        of.Sum<A, 2>(
            [&](std::int64_t start, auto at) {
              const auto gradient = dz(start, at);
              return std::array{gradient, gradient * centered(start, at)};
            },
            sums);
      }
      SetSlopes(args, of, group, own ? sums : nullptr, dscale.data(), dbias.data(), level, slope);
      if (args.dx == nullptr) return;
      T* const dx = static_cast<T*>(args.dx) + offset;
      of.ForRows([&](std::int64_t start, std::int64_t count) {
        const A *const f = factor.values, *const l = level.values, *const s = slope.values,
                       *const rstd = rstds.values;
        if (args.weighted) {  // see batch_norm_backward.h
          StoreForLanes<kLanes<A>>(dx + start, count, streamed, [=](auto at) {
            return dz(start, at) * at(f) - (at(l) + centered(start, at) * at(s)) * at(rstd);
          });
        } else {
          StoreForLanes<kLanes<A>>(dx + start, count, streamed, [=](auto at) {
            return (dz(start, at) - at(l) - centered(start, at) * at(s)) * at(f);
          });
        }
        if (args.dresidual == nullptr) return;
        T* const dresidual = static_cast<T*>(args.dresidual) + offset;
        StoreForLanes<kLanes<A>>(dresidual + start, count, streamed,
                                 [=](auto at) { return dz(start, at); });
      });
    });
  });
  const ffi::Error error = dscale.Store(pool);
  return error.failure() ? error : dbias.Store(pool);
}

}  // namespace

ffi::Error MiddleBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(pool, args); });
}

ffi::Error MiddleBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype,
                       [&]<typename T>() { return Backward<T>(pool, args); });
}

}  // namespace gradops
