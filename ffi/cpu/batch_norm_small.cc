// Batch norm of small groups: see batch_norm_small.h. Memory is read or written once per array.
//
// Statistics are made as in layer norm. The mean comes from differences to the channel's first
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

namespace gradops {
namespace {

template <typename A>
using Elements = Side<A, kSmallGroup>;

// Where a group's elements are, channel by channel.
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

// The shape of arrays with one number per channel: a group is a row of its channels.
RowShape ChannelRows(const ChannelShape& shape) {
  return {shape.outer.groups, 1, shape.channels()};
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
  const RowShape rows = ChannelRows(shape);
  const bool own = args.mean.data == nullptr;
  const WideParam<A, 1> scale(pool, args.scale, rows, 0), rstd(pool, args.rstd, rows, 0);
  const WideParam<A, 0> bias(pool, args.bias, rows, 0), mean(pool, args.mean, rows, 0),
      delta(pool, args.delta, rows, 0);
  const bool streamed =
      PrepareResult(args.y, shape.elements() * std::int64_t{sizeof(T)}, {args.x, args.residual});
  // If channels have few elements, the statistics are as large as y.
  for (void* const statistic :
       {args.batch_mean, args.batch_variance, args.batch_rstd, args.batch_delta}) {
    PrepareResult(statistic, shape.outer.groups * channels.count * std::int64_t{sizeof(A)}, {});
  }
  const A least = args.relu ? A{0} : -std::numeric_limits<A>::infinity();
  ForSides<T>(pool, shape, 2, [&](const auto& for_some) {
    SideParam<A, kSmallGroup> scales(scale, rows), biases(bias, rows), means(mean, rows),
        rstds(rstd, rows), deltas(delta, rows);
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
      for (std::int64_t c = 0; c < channels.count; ++c) {
        const std::int16_t* const columns = channels[c];
        Statistics<A> statistics{means[c], Lanes<A>(0), rstds[c], deltas[c]};
        if (own) {
          statistics = StatisticsOf(x, columns, channels.terms, Epsilon<A>(args.epsilon));
          results[0].Set(c, statistics.mean), results[1].Set(c, statistics.variance);
          results[2].Set(c, statistics.rstd), results[3].Set(c, statistics.delta);
        }
        const Lanes<A> factor = statistics.rstd * scales[c];
        const Lanes<A> shift = biases[c] - statistics.delta * factor;
        for (std::int64_t k = 0; k < channels.terms; ++k) {
          const std::int64_t j = columns[k];
          Lanes<A> y = (x[j] - statistics.mean) * factor + shift;
          if (args.residual != nullptr) y += residual[j];
          x.Set(j, Max(Lanes<A>(least), y));  // NaN stays
        }
      }
      if (args.y != nullptr) {
        StoreSide(static_cast<T*>(args.y) + offset, groups, channels.elements, x, streamed);
      }
      if (!own) return;
      const std::array to{args.batch_mean, args.batch_variance, args.batch_rstd, args.batch_delta};
      for (std::size_t i = 0; i < to.size(); ++i) {
        StoreSide(static_cast<A*>(to[i]) + group * channels.count, groups, channels.count,
                  results[i]);
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
  const RowShape rows = ChannelRows(shape);
  const bool own = args.mean_dz.data == nullptr;
  const WideParam<A, 1> scale(pool, args.scale, rows, 0), rstd(pool, args.rstd, rows, 0);
  const WideParam<A, 0> bias(pool, args.bias, rows, 0), mean(pool, args.mean, rows, 0),
      delta(pool, args.delta, rows, 0), mean_dz(pool, args.mean_dz, rows, 0),
      mean_dz_x_hat(pool, args.mean_dz_x_hat, rows, 0);
  const WideGrad<A> dscale(args.dscale, shape.outer), dbias(args.dbias, shape.outer);
  const std::int64_t bytes = shape.elements() * std::int64_t{sizeof(T)};
  const bool streamed = PrepareResult(args.dx, bytes, {args.dy, args.x, args.y});
  PrepareResult(args.dresidual, bytes, {args.dy, args.x, args.y});
  const Lanes<A> per_term = A{1} / static_cast<A>(channels.terms), zero = 0;
  ForSides<T>(pool, shape, 3, [&](const auto& for_some) {
    SideParam<A, kSmallGroup> scales(scale, rows), biases(bias, rows), means(mean, rows),
        rstds(rstd, rows), deltas(delta, rows), levels(mean_dz, rows), slopes(mean_dz_x_hat, rows);
    Elements<A> dz, x, y, dscales, dbiases;
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
      for (std::int64_t c = 0; c < channels.count; ++c) {
        const std::int16_t* const columns = channels[c];
        const Lanes<A> channel_rstd = rstds[c], channel_delta = deltas[c];
        const Lanes<A> factor = channel_rstd * scales[c];
        const Lanes<A> shift = biases[c] - channel_delta * factor;
        const auto sums = SideSums<A, 2>(channels.terms, [&](std::int64_t k) {
          const std::int64_t j = columns[k];
          const Lanes<A> centered = x[j] - means[c];
          x.Set(j, centered);
          Lanes<A> gradient = dz[j];
          if (args.relu) {
            const Lanes<A> argument = args.y != nullptr ? y[j] : centered * factor + shift;
            gradient = IfGreater(argument, zero, gradient, zero);
            dz.Set(j, gradient);
          }
          return std::array{gradient, gradient * centered};
        });
        Lanes<A> level = levels[c], slope = slopes[c];
        if (own) {
          const Lanes<A> of_x_hat = (sums[1] - channel_delta * sums[0]) * channel_rstd;
          dscales.Set(c, of_x_hat), dbiases.Set(c, sums[0]);
          level = sums[0] * per_term, slope = of_x_hat * per_term;
        }
        slope = slope * channel_rstd;
        level = level - channel_delta * slope;
        for (std::int64_t k = 0; k < channels.terms; ++k) {
          const std::int64_t j = columns[k];
          x.Set(j, (dz[j] - level - x[j] * slope) * factor);
        }
      }
      const auto store = [&](void* to, const Elements<A>& from) {
        if (to == nullptr) return;
        StoreSide(static_cast<T*>(to) + offset, groups, channels.elements, from, streamed);
      };
      store(args.dx, x), store(args.dresidual, dz);
      const auto store_sums = [&](const WideGrad<A>& to, const Elements<A>& from) {
        if (to.data() == nullptr) return;
        StoreSide(to.data() + group * channels.count, groups, channels.count, from);
      };
      store_sums(dscale, dscales), store_sums(dbias, dbiases);
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
