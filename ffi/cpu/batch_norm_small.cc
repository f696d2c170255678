// Batch norm and group norm of small groups: see batch_norm_small.h. Memory is read or written once
// per array.
//
// Statistics are made as in layer norm. The mean comes from differences to the bundle's first
// element. The variance comes from differences to that mean, corrected by the mean's error.
#include "cpu/batch_norm_small.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "cpu/parallel.h"
#include "cpu/side_by_side.h"
#include "cpu/silu.h"

namespace gradops {
namespace {

template <typename A>
using Elements = Side<A, kSmallGroup>;

// Where a group's elements are, channel by channel. The elements of a bundle follow one another.
class Channels {
 public:
  explicit Channels(const ChannelShape& shape)
      : count(shape.channels()), terms(shape.terms()), elements(count * terms) {
    std::int64_t column = 0;
    for (std::int64_t row = 0; row < shape.outer.rows; ++row) {
      for (std::int64_t c = 0; c < count; ++c) {
        for (std::int64_t i = 0; i < shape.inner; ++i, ++column) {
          columns_[c * terms + row * shape.inner + i] = static_cast<std::int16_t>(column);
        }
      }
    }
  }
  // The columns of a channel's elements.
  const std::int16_t* operator[](std::int64_t channel) const {
    return columns_.data() + channel * terms;
  }
  const std::int64_t count, terms, elements;

 private:
  std::array<std::int16_t, kSmallGroup> columns_;
};

// The shapes of arrays with one number per channel, or per bundle: a group is a row.
RowShape ChannelRows(const ChannelShape& shape) {
  return {shape.outer.groups, 1, shape.channels()};
}
template <class Args>
RowShape BundleRows(const Args& args) {
  return {args.shape.outer.groups, 1, args.bundles};
}

// Calls do_some(group, groups) for up to kSide groups at a time, in the thread pool. Each task
// calls start(for_some) once. start makes do_some and passes it to for_some.
template <typename T, typename Start>
void ForSides(const CpuContext& pool, const ChannelShape& shape, std::int64_t arrays,
              const Start& start) {
  constexpr std::int64_t kMaxChunks = 256, kMultiple = 64;  // whole cache lines of results
  const std::int64_t groups = shape.outer.groups;
  const std::int64_t bytes = arrays * shape.elements() / groups * std::int64_t{sizeof(T)};
  const std::int64_t chunk =
      (RowsPerChunk(groups, bytes, kMaxChunks) + kMultiple - 1) / kMultiple * kMultiple;
  ParallelFor(pool, (groups + chunk - 1) / chunk, [&](std::int64_t i) {
    const std::int64_t end = std::min(groups, (i + 1) * chunk);
    start([&](const auto& do_some) {
      for (std::int64_t group = i * chunk; group < end; group += kSide<Accum<T>>) {
        do_some(group, std::min<std::int64_t>(kSide<Accum<T>>, end - group));
      }
    });
  });
}

// --- Forward -------------------------------------------------------------------------------------

template <typename A>
struct Statistics {
  Lanes<A> mean, variance, rstd, delta;
};

// The variance of one lane's channel, added up in double: its squares have lost digits in float.
float WideVariance(const Elements<float>& x, const std::int16_t* columns, std::int64_t n,
                   int lane) {
  const double first = x.column(columns[0])[lane], per_term = 1 / static_cast<double>(n);
  double mean = 0, squares = 0;
  for (std::int64_t k = 0; k < n; ++k) mean += (x.column(columns[k])[lane] - first) * per_term;
  for (std::int64_t k = 0; k < n; ++k) {
    const double centered = (x.column(columns[k])[lane] - first) - mean;
    squares += centered * centered;
  }
  return static_cast<float>(squares * per_term);
}

template <typename A>
Statistics<A> StatisticsOf(const Elements<A>& x, const std::int16_t* columns, std::int64_t terms,
                           const Epsilon<A>& epsilon) {
  const Lanes<A> per_term = A{1} / static_cast<A>(terms), first = x[columns[0]];
  const Lanes<A> mean =
      first +
      SideSums<A, 1>(terms, [&](std::int64_t k) { return std::array{x[columns[k]] - first}; })[0] *
          per_term;
  const auto sums = SideSums<A, 2>(terms, [&](std::int64_t k) {
    const Lanes<A> centered = x[columns[k]] - mean;
    return std::array{centered, centered * centered};
  });
  const Lanes<A> offset = sums[0] * per_term;
  Lanes<A> variance = VarianceOf(sums[1] * per_term, offset);
  if constexpr (std::is_same_v<A, float>) {
    const Lanes<A> is_unsafe = IsUnsafe(variance, epsilon);
    if (is_unsafe.Sum() > 0) {
      A values[kSide<A>], unsafe[kSide<A>];
      StoreLanes(values, variance), StoreLanes(unsafe, is_unsafe);
      for (int lane = 0; lane < kSide<A>; ++lane) {
        if (unsafe[lane] != 0) values[lane] = WideVariance(x, columns, terms, lane);
      }
      variance = LoadLanes<kSide<A>>(values);
    }
  }
  const Lanes<A> rounded = mean + offset;
  return {.mean = rounded,
          .variance = variance,
          .rstd = InverseDeviation(variance, epsilon),
          .delta = (mean - rounded) + offset};
}

template <typename T>
ffi::Error Forward(const CpuContext& pool, const BatchNormFwdArgs& args) {
  using A = Accum<T>;
  const ChannelShape& shape = args.shape;
  const Channels channels(shape);
  const RowShape rows = ChannelRows(shape), bundle_rows = BundleRows(args);
  const bool own = args.mean.data == nullptr;
  const WideParam<A, 1> scale(pool, args.scale, rows, 0), rstd(pool, args.rstd, bundle_rows, 0);
  const WideParam<A, 0> bias(pool, args.bias, rows, 0), mean(pool, args.mean, bundle_rows, 0),
      delta(pool, args.delta, bundle_rows, 0);
  const bool streamed =
      PrepareResult(args.y, shape.elements() * std::int64_t{sizeof(T)}, {args.x, args.residual});
  // If channels have few elements, the statistics are as large as y.
  for (void* const statistic :
       {args.batch_mean, args.batch_variance, args.batch_rstd, args.batch_delta}) {
    PrepareResult(statistic, shape.outer.groups * args.bundles * std::int64_t{sizeof(A)}, {});
  }
  const A least = args.relu ? A{0} : -std::numeric_limits<A>::infinity();
  ForSides<T>(pool, shape, 2, [&](const auto& for_some) {
    SideParam<A, kSmallGroup> scales(scale, rows), biases(bias, rows), means(mean, bundle_rows),
        rstds(rstd, bundle_rows), deltas(delta, bundle_rows);
    Elements<A> x, residual;
    std::array<Elements<A>, 4> results;
    for_some([&](std::int64_t group, std::int64_t groups) {
      scales.MoveTo(scale, group, groups), biases.MoveTo(bias, group, groups);
      means.MoveTo(mean, group, groups), rstds.MoveTo(rstd, group, groups);
      deltas.MoveTo(delta, group, groups);
      const std::int64_t offset = group * channels.elements;
      LoadSide(static_cast<const T*>(args.x) + offset, groups, channels.elements, x);
      if (args.residual != nullptr) {
        LoadSide(static_cast<const T*>(args.residual) + offset, groups, channels.elements,
                 residual);
      }
      for (std::int64_t b = 0; b < args.bundles; ++b) {
        Statistics<A> statistics{means[b], Lanes<A>(0), rstds[b], deltas[b]};
        if (own) {
          statistics = StatisticsOf(x, channels[b * args.bundle], args.bundle * channels.terms,
                                    Epsilon<A>(args.epsilon, args.strict));
          results[0].Set(b, statistics.mean), results[1].Set(b, statistics.variance);
          results[2].Set(b, statistics.rstd), results[3].Set(b, statistics.delta);
        }
        for (std::int64_t c = b * args.bundle; c < (b + 1) * args.bundle; ++c) {
          const std::int16_t* const columns = channels[c];
          const Lanes<A> factor = statistics.rstd * scales[c];
          const Lanes<A> shift = biases[c] - statistics.delta * factor;
          for (std::int64_t k = 0; k < channels.terms; ++k) {
            const std::int64_t j = columns[k];
            Lanes<A> y = (x[j] - statistics.mean) * factor + shift;
            if (args.residual != nullptr) y += residual[j];
            x.Set(j, args.silu ? Silu<A>(y) : Max(Lanes<A>(least), y));  // NaN stays
          }
        }
      }
      if (args.y != nullptr) {
        StoreSide(static_cast<T*>(args.y) + offset, groups, channels.elements, x, streamed);
      }
      if (!own) return;
      const std::array to{args.batch_mean, args.batch_variance, args.batch_rstd, args.batch_delta};
      for (std::size_t i = 0; i < to.size(); ++i) {
        StoreSide(static_cast<A*>(to[i]) + group * args.bundles, groups, args.bundles, results[i]);
      }
    });
    if (streamed) StreamFence();
  });
  return ffi::Error::Success();
}

// --- Backward ------------------------------------------------------------------------------------

template <typename T>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  using A = Accum<T>;
  const ChannelShape& shape = args.shape;
  const Channels channels(shape);
  const RowShape rows = ChannelRows(shape), bundle_rows = BundleRows(args);
  const bool own = args.mean_dz.data == nullptr;
  const WideParam<A, 1> scale(pool, args.scale, rows, 0), rstd(pool, args.rstd, bundle_rows, 0);
  const WideParam<A, 0> bias(pool, args.bias, rows, 0), mean(pool, args.mean, bundle_rows, 0),
      delta(pool, args.delta, bundle_rows, 0), mean_dz(pool, args.mean_dz, bundle_rows, 0),
      mean_dz_x_hat(pool, args.mean_dz_x_hat, bundle_rows, 0);
  const WideGrad<A> dscale(args.dscale, shape.outer), dbias(args.dbias, shape.outer);
  PrepareGrad(dscale, shape.outer), PrepareGrad(dbias, shape.outer);
  const std::int64_t bytes = shape.elements() * std::int64_t{sizeof(T)};
  const bool streamed = PrepareResult(args.dx, bytes, {args.dy, args.x, args.y});
  PrepareResult(args.dresidual, bytes, {args.dy, args.x, args.y});
  const Lanes<A> per_element = A{1} / static_cast<A>(args.bundle * channels.terms), zero = 0;
  ForSides<T>(pool, shape, 3, [&](const auto& for_some) {
    SideParam<A, kSmallGroup> scales(scale, rows), biases(bias, rows), means(mean, bundle_rows),
        rstds(rstd, bundle_rows), deltas(delta, bundle_rows), levels(mean_dz, bundle_rows),
        slopes(mean_dz_x_hat, bundle_rows);
    Elements<A> dz, x, y, dscales, dbiases, sums_dz, sums_dz_x_hat;
    for_some([&](std::int64_t group, std::int64_t groups) {
      scales.MoveTo(scale, group, groups), biases.MoveTo(bias, group, groups);
      means.MoveTo(mean, group, groups), rstds.MoveTo(rstd, group, groups);
      deltas.MoveTo(delta, group, groups), levels.MoveTo(mean_dz, group, groups);
      slopes.MoveTo(mean_dz_x_hat, group, groups);
      const std::int64_t offset = group * channels.elements;
      const auto load = [&](const void* from, Elements<A>& to) {
        LoadSide(static_cast<const T*>(from) + offset, groups, channels.elements, to);
      };
      load(args.dy, dz), load(args.x, x);
      if (args.relu && args.y != nullptr) load(args.y, y);
      for (std::int64_t b = 0; b < args.bundles; ++b) {
        const std::int64_t first = b * args.bundle, end = first + args.bundle;
        const Lanes<A> own_rstd = rstds[b], own_delta = deltas[b];
        Lanes<A> sum_dz = zero, sum_dz_x_hat = zero;
        for (std::int64_t c = first; c < end; ++c) {
          const std::int16_t* const columns = channels[c];
          const Lanes<A> factor = own_rstd * scales[c];
          const Lanes<A> shift = biases[c] - own_delta * factor;
          const auto sums = SideSums<A, 2>(channels.terms, [&](std::int64_t k) {
            const std::int64_t j = columns[k];
            const Lanes<A> centered = x[j] - means[b];
            x.Set(j, centered);
            Lanes<A> gradient = dz[j];
            if (args.relu) {
              const Lanes<A> argument = args.y != nullptr ? y[j] : centered * factor + shift;
              gradient = IfGreater(argument, zero, gradient, zero);
              dz.Set(j, gradient);
            } else if (args.silu) {
              gradient = gradient * SiluDerivative<A>(centered * factor + shift);
              dz.Set(j, gradient);
            }
            return std::array{gradient, gradient * centered};
          });
          if (!own) continue;
          const Lanes<A> of_x_hat = (sums[1] - own_delta * sums[0]) * own_rstd;
          dscales.Set(c, of_x_hat), dbiases.Set(c, sums[0]);
          if (args.weighted) {
            sum_dz += scales[c] * sums[0], sum_dz_x_hat += scales[c] * of_x_hat;
          } else {
            sum_dz = sums[0], sum_dz_x_hat = of_x_hat;
          }
        }
        Lanes<A> level = levels[b], slope = slopes[b];
        if (own) {
          sums_dz.Set(b, sum_dz), sums_dz_x_hat.Set(b, sum_dz_x_hat);
          level = sum_dz * per_element, slope = sum_dz_x_hat * per_element;
        }
        slope = slope * own_rstd;
        level = level - own_delta * slope;
        for (std::int64_t c = first; c < end; ++c) {
          const std::int16_t* const columns = channels[c];
          const Lanes<A> factor = own_rstd * scales[c];
          for (std::int64_t k = 0; k < channels.terms; ++k) {  // see batch_norm_backward.h
            const std::int64_t j = columns[k];
            x.Set(j, args.weighted ? dz[j] * factor - (level + x[j] * slope) * own_rstd
                                   : (dz[j] - level - x[j] * slope) * factor);
          }
        }
      }
      const auto store = [&](void* to, const Elements<A>& from) {
        if (to == nullptr) return;
        StoreSide(static_cast<T*>(to) + offset, groups, channels.elements, from, streamed);
      };
      store(args.dx, x), store(args.dresidual, dz);
      const auto store_sums = [&](void* to, std::int64_t count, const Elements<A>& from) {
        if (to != nullptr) StoreSide(static_cast<A*>(to) + group * count, groups, count, from);
      };
      store_sums(dscale.data(), channels.count, dscales);
      store_sums(dbias.data(), channels.count, dbiases);
      store_sums(args.sum_dz, args.bundles, sums_dz);
      store_sums(args.sum_dz_x_hat, args.bundles, sums_dz_x_hat);
    });
    if (streamed) StreamFence();
  });
  const ffi::Error error = dscale.Store(pool);
  return error.failure() ? error : dbias.Store(pool);
}

}  // namespace

ffi::Error SmallBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(pool, args); });
}

ffi::Error SmallBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype,
                       [&]<typename T>() { return Backward<T>(pool, args); });
}

}  // namespace gradops
