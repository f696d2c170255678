// Batch norm on the CPU: one sweep over memory for statistics or sums, one for y or dx.
//
// Memory is seen as runs of elements. Channels last: a run is a row of channels, or, where these
// are few, several rows, and each column of a run has its channel; sums are columns of sums.
// Channels first: a run is all inner elements of one row and channel; sums are over the run.
//
// Statistics are of differences from the channel's first element, so that a large mean costs no
// digits, and are put together part by part: Chan, Golub, LeVeque, Algorithms for computing the
// sample variance (1983). Parts are cut by the shape alone, and put together in a fixed order.
#include "ops/batch_norm.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "common/math.h"
#include "cpu/column_sum.h"
#include "cpu/parallel.h"
#include "cpu/wide.h"

namespace gradops {
namespace {

constexpr std::int64_t kMaxParts = 64;  // more would add more traffic than threads to use them
constexpr std::int64_t kMaxChunks = 1024;
constexpr std::int64_t kRunWidth = 256;           // columns that a run has at least, if it can
constexpr std::int64_t kCachedBytes = 128 << 10;  // of runs that are read twice

// How a group's elements are cut into runs.
struct Runs {
  std::int64_t channels, width, elements;  // elements: of a group
  bool first;                              // channels first: a run has one channel

  explicit Runs(const ChannelShape& shape)
      : channels(shape.channels()),
        width(shape.inner > 1 ? shape.inner
                              : channels * std::max<std::int64_t>(
                                               1, kRunWidth / std::max<std::int64_t>(1, channels))),
        elements(channels * shape.terms()),
        first(shape.inner > 1) {}

  std::int64_t count() const { return width == 0 ? 0 : (elements + width - 1) / width; }
  std::int64_t width_of(std::int64_t run) const { return std::min(width, elements - run * width); }
};

// One number for each channel of a group, as it is needed along a run.
template <typename A, bool kFirst>
struct AlongRun {
  const A* values;
  A operator()(std::int64_t i) const { return kFirst ? values[0] : values[i]; }
};

// Numbers of all groups' channels, computed once in a call; channels last, for each of a run's
// columns.
template <typename A, bool kFirst>
class PerChannel {
 public:
  template <typename Fn>  // fn(group, channel)
  PerChannel(const CpuContext& pool, const ChannelShape& shape, const Fn& fn)
      : runs_(shape), pitch_(kFirst ? runs_.channels : runs_.width) {
    const std::int64_t n = shape.outer.groups * pitch_;
    values_ = std::make_unique_for_overwrite<A[]>(static_cast<std::size_t>(n));
    ForEach(pool, n,
            [&](std::int64_t i) { values_[i] = fn(i / pitch_, i % pitch_ % runs_.channels); });
  }
  // Of columns [start, ...) of a group's run.
  AlongRun<A, kFirst> operator()(std::int64_t group, std::int64_t run, std::int64_t start) const {
    return {values_.get() + group * pitch_ + (kFirst ? run % runs_.channels : start)};
  }

 private:
  Runs runs_;
  std::int64_t pitch_;
  std::unique_ptr<A[]> values_;
};

// A run in the accumulation type, block by block; zeros where there is no array.
template <typename T>
class WideRun : public WideRow<T> {
 public:
  WideRun(const void* array, const Runs& runs, std::int64_t group, std::int64_t run)
      : WideRow<T>(array == nullptr
                       ? nullptr
                       : static_cast<const T*>(array) + group * runs.elements + run * runs.width,
                   0, runs.width_of(run)) {}
};

// fn(group, run) for each run, in the pool.
template <typename Fn>
void ForRuns(const CpuContext& pool, const ChannelShape& shape, std::int64_t bytes_per_element,
             const Fn& fn) {
  const Runs runs(shape);
  const std::int64_t count = runs.count(), all = shape.outer.groups * count;
  const std::int64_t chunk = RowsPerChunk(all, runs.width * bytes_per_element, kMaxChunks);
  ParallelFor(pool, (all + chunk - 1) / chunk, [&](std::int64_t c) {
    for (std::int64_t i = c * chunk; i < std::min(all, (c + 1) * chunk); ++i) {
      fn(i / count, i % count);
    }
  });
}

// --- Parts ---------------------------------------------------------------------------------------

// How a group's runs are cut into parts that have partial results of their own for each channel.
struct Parts {
  std::int64_t count, rows;  // rows: of a part; channels first: rows, each with a run a channel

  Parts(const ChannelShape& shape, std::int64_t bytes_per_element, std::int64_t partial_rows) {
    const Runs runs(shape);
    const std::int64_t all = runs.first ? shape.outer.rows : runs.count();
    const std::int64_t row_bytes =
        (runs.first ? runs.channels : 1) * runs.width * bytes_per_element;
    rows = RowsPerChunk(all, row_bytes, std::min(partial_rows, kMaxParts));
    count = std::max<std::int64_t>(1, (all + rows - 1) / rows);
  }
};

// work(group, part, first channel, end channel), in the pool; channels last, of all channels.
template <typename Work>
void ForParts(const CpuContext& pool, const ChannelShape& shape, const Parts& parts,
              std::int64_t bytes_per_element, const Work& work) {
  const Runs runs(shape);
  const std::int64_t all_rows = runs.first ? shape.outer.rows : runs.count();
  const std::int64_t channel_bytes =
      std::min(parts.rows, all_rows) * runs.width * bytes_per_element;
  const std::int64_t block =
      runs.first ? std::min(runs.channels, RowsPerChunk(runs.channels, channel_bytes, kMaxChunks))
                 : runs.channels;
  const std::int64_t blocks = (runs.channels + block - 1) / block;
  ParallelFor(pool, shape.outer.groups * parts.count * blocks, [&](std::int64_t i) {
    const std::int64_t channel = i % blocks * block;
    work(i / blocks / parts.count, i / blocks % parts.count, channel,
         std::min(runs.channels, channel + block));
  });
}

// What a part adds up of each column or channel, kSums sums of terms.
template <int kSums>
using Sums = std::array<std::vector<double>, kSums>;

template <int kSums>
Sums<kSums> Zeros(std::int64_t n) {
  Sums<kSums> sums;
  for (auto& sum : sums) sum.assign(static_cast<std::size_t>(n), 0.0);
  return sums;
}

// --- Statistics ----------------------------------------------------------------------------------

// Mean and squared deviations from it of so many elements.
struct Moments {
  double count = 0, mean = 0, squares = 0;

  void Merge(double other_count, double other_mean, double other_squares) {
    if (other_count == 0) return;
    const double total = count + other_count, delta = other_mean - mean;
    mean += delta * (other_count / total);
    squares += other_squares + delta * delta * (count * other_count / total);
    count = total;
  }
};

// Channels last: columns [start, start + n) of runs [first, end), all as wide as that.
template <typename T>
void AddColumnMoments(const BatchNormFwdArgs& args, const Runs& runs, std::int64_t group,
                      std::int64_t first, std::int64_t end, std::int64_t start, std::int64_t n,
                      const Accum<T>* shift, Moments* moments) {
  using A = Accum<T>;
  const std::int64_t at_once = std::clamp<std::int64_t>(
      kCachedBytes / (runs.width * static_cast<std::int64_t>(sizeof(T))), 4, kRowsPerSum);
  A sums[kBlock], means[kBlock];
  for (std::int64_t run = first; run < end; run += at_once) {
    const std::int64_t last = std::min(end, run + at_once);
    const A count = static_cast<A>(last - run);
    std::fill_n(sums, n, A{0});
    for (std::int64_t r = run; r < last; ++r) {
      WideRun<T> row(args.x, runs, group, r);
      const A* const x = row(start);
      for (std::int64_t i = 0; i < n; ++i) sums[i] += x[i] - shift[i];
    }
    for (std::int64_t i = 0; i < n; ++i) means[i] = sums[i] / count, sums[i] = 0;
    for (std::int64_t r = run; r < last; ++r) {
      WideRun<T> row(args.x, runs, group, r);
      const A* const x = row(start);
      for (std::int64_t i = 0; i < n; ++i) {
        const A deviation = (x[i] - shift[i]) - means[i];
        sums[i] += deviation * deviation;
      }
    }
    for (std::int64_t i = 0; i < n; ++i) moments[i].Merge(count, means[i], sums[i]);
  }
}

template <typename T>
void ColumnMoments(const BatchNormFwdArgs& args, const Runs& runs, std::int64_t group,
                   std::int64_t first, std::int64_t end, const Accum<T>* shift,
                   std::vector<Moments>& of_channels) {
  std::vector<Moments> columns(static_cast<std::size_t>(std::min(kBlock, runs.width)));
  const std::int64_t whole = std::min(end, runs.elements / runs.width);  // runs of full width
  for (std::int64_t start = 0; start < runs.width; start += kBlock) {
    const std::int64_t n = std::min(kBlock, runs.width - start);
    std::fill_n(columns.begin(), n, Moments{});
    AddColumnMoments<T>(args, runs, group, first, std::max(first, whole), start, n, shift + start,
                        columns.data());
    if (whole < end) {  // the last one is narrower: width_of(whole) is a multiple of channels
      const std::int64_t rest = std::min(n, runs.width_of(whole) - start);
      if (rest > 0) {
        AddColumnMoments<T>(args, runs, group, std::max(first, whole), end, start, rest,
                            shift + start, columns.data());
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const Moments& m = columns[static_cast<std::size_t>(i)];
      of_channels[static_cast<std::size_t>((start + i) % runs.channels)].Merge(m.count, m.mean,
                                                                               m.squares);
    }
  }
}

template <typename T>
Moments RunMoments(const BatchNormFwdArgs& args, const Runs& runs, std::int64_t group,
                   std::int64_t run, Accum<T> shift) {
  using A = Accum<T>;
  WideRun<T> row(args.x, runs, group, run);
  Moments moments;
  ForBlocks(runs.width, [&](std::int64_t start, std::int64_t n) {
    const A* const x = row(start);
    const A mean = LaneSums<A, 1>(n, [&](std::int64_t i) { return std::array{x[i] - shift}; })[0] /
                   static_cast<A>(n);
    const A squares = LaneSums<A, 1>(n, [&](std::int64_t i) {
      const A deviation = (x[i] - shift) - mean;
      return std::array{deviation * deviation};
    })[0];
    moments.Merge(static_cast<double>(n), mean, squares);
  });
  return moments;
}

// The batch's statistics, to where they are wanted.
template <typename T, bool kFirst>
void Statistics(const CpuContext& pool, const BatchNormFwdArgs& args) {
  using A = Accum<T>;
  const Runs runs(args.shape);
  const std::int64_t channels = runs.channels;
  const Parts parts(args.shape, sizeof(T), args.partial_rows);
  auto* const workspace = static_cast<A*>(args.workspace);  // [groups, partial_rows, 4, channels]
  const auto partial = [&](std::int64_t group, std::int64_t part, int value) {
    return workspace + ((group * args.partial_rows + part) * 4 + value) * channels;
  };
  const auto first_of = [&](std::int64_t group, std::int64_t channel) {
    const std::int64_t i = group * runs.elements + channel * args.shape.inner;
    return static_cast<A>(static_cast<const T*>(args.x)[i]);
  };
  const PerChannel<A, kFirst> shift(pool, args.shape, first_of);

  ForParts(pool, args.shape, parts, sizeof(T),
           [&](std::int64_t group, std::int64_t part, std::int64_t channel, std::int64_t end) {
             std::vector<Moments> moments(static_cast<std::size_t>(end - channel));
             const std::int64_t row = part * parts.rows;
             if constexpr (kFirst) {
               for (std::int64_t r = row; r < std::min(args.shape.outer.rows, row + parts.rows);
                    ++r) {
                 for (std::int64_t c = channel; c < end; ++c) {
                   const Moments m =
                       RunMoments<T>(args, runs, group, r * channels + c, shift(group, c, 0)(0));
                   moments[static_cast<std::size_t>(c - channel)].Merge(m.count, m.mean, m.squares);
                 }
               }
             } else {
               ColumnMoments<T>(args, runs, group, row, std::min(runs.count(), row + parts.rows),
                                shift(group, 0, 0).values, moments);
             }
             for (std::int64_t c = channel; c < end; ++c) {
               const Moments& m = moments[static_cast<std::size_t>(c - channel)];
               partial(group, part, 0)[c] = static_cast<A>(m.mean);
               partial(group, part, 1)[c] = static_cast<A>(m.squares);
               partial(group, part, 2)[c] = static_cast<A>(m.count);
             }
           });

  ForEach(pool, args.shape.outer.groups * channels, [&](std::int64_t i) {
    const std::int64_t group = i / channels, c = i % channels;
    Moments all;
    for (std::int64_t part = 0; part < parts.count; ++part) {
      all.Merge(partial(group, part, 2)[c], partial(group, part, 0)[c], partial(group, part, 1)[c]);
    }
    const double mean = static_cast<double>(first_of(group, c)) + all.mean;
    const A variance = static_cast<A>(all.squares / std::max(1.0, all.count));
    const A rounded = static_cast<A>(mean);
    static_cast<A*>(args.batch_mean)[i] = rounded;
    static_cast<A*>(args.batch_variance)[i] = variance;
    static_cast<A*>(args.batch_rstd)[i] = InverseDeviation(variance, static_cast<A>(args.epsilon));
    // In units of the first element, as the mean itself may have more digits than a double.
    static_cast<A*>(args.batch_delta)[i] = static_cast<A>(
        (static_cast<double>(first_of(group, c)) - static_cast<double>(rounded)) + all.mean);
  });
}

// --- What y and dx are made of -------------------------------------------------------------------

// Given statistics, [channels] in the accumulation type, or shared by all groups.
template <typename A>
struct Given {
  Param param;
  A operator()(std::int64_t group, std::int64_t channel) const {
    return param.data == nullptr
               ? A{0}
               : static_cast<const A*>(param.data)[group * param.group_stride + channel];
  }
};

// z = (x - mean) * factor + offset is what the activation is applied to, but for the residual.
template <typename A, bool kFirst>
struct Affine {
  PerChannel<A, kFirst> mean, factor, offset;

  Affine(const CpuContext& pool, const ChannelShape& shape, const Param& scale, const Param& bias,
         const Given<A>& mean, const Given<A>& rstd, const Given<A>& delta)
      : Affine(pool, shape, WideParam<A, 1>(pool, scale, shape.outer, 0),
               WideParam<A, 0>(pool, bias, shape.outer, 0), mean, rstd, delta) {}

 private:
  Affine(const CpuContext& pool, const ChannelShape& shape, const WideParam<A, 1>& scale,
         const WideParam<A, 0>& bias, const Given<A>& mean, const Given<A>& rstd,
         const Given<A>& delta)
      : mean(pool, shape, mean),
        factor(pool, shape,
               [&](std::int64_t g, std::int64_t c) { return rstd(g, c) * scale.at(g, c); }),
        offset(pool, shape, [&](std::int64_t g, std::int64_t c) {
          return bias.at(g, c) - delta(g, c) * (rstd(g, c) * scale.at(g, c));
        }) {}
};

template <typename T, bool kFirst>
ffi::Error Forward(const CpuContext& pool, const BatchNormFwdArgs& args) {
  using A = Accum<T>;
  const std::int64_t elements = args.shape.elements();
  if (args.mean.data == nullptr) {
    if (elements > 0) {
      Statistics<T, kFirst>(pool, args);
    } else {
      const std::int64_t n = args.shape.outer.groups * args.shape.channels();
      const A rstd = InverseDeviation(A{0}, static_cast<A>(args.epsilon));
      for (std::int64_t i = 0; i < n; ++i) {
        for (void* const zero : {args.batch_mean, args.batch_variance, args.batch_delta}) {
          static_cast<A*>(zero)[i] = 0;
        }
        static_cast<A*>(args.batch_rstd)[i] = rstd;
      }
    }
  }
  if (args.y == nullptr || elements == 0) return ffi::Error::Success();

  const bool own = args.mean.data == nullptr;
  const auto statistic = [&](const Param& given, const void* batch) {
    return Given<A>{own ? Param{batch, args.shape.channels(), kDtype<A>} : given};
  };
  const Affine<A, kFirst> affine(
      pool, args.shape, args.scale, args.bias, statistic(args.mean, args.batch_mean),
      statistic(args.rstd, args.batch_rstd), statistic(args.delta, args.batch_delta));
  const Runs runs(args.shape);
  ForRuns(pool, args.shape, 2 * sizeof(T), [&](std::int64_t group, std::int64_t run) {
    WideRun<T> x_run(args.x, runs, group, run), residual_run(args.residual, runs, group, run);
    T* const y = static_cast<T*>(args.y) + group * runs.elements + run * runs.width;
    ForBlocks(runs.width_of(run), [&](std::int64_t start, std::int64_t n) {
      const A* const x = x_run(start);
      const A* const residual = residual_run(start);
      const auto mean = affine.mean(group, run, start);
      const auto factor = affine.factor(group, run, start);
      const auto offset = affine.offset(group, run, start);
      const auto z = [&](std::int64_t i) {
        return (x[i] - mean(i)) * factor(i) + offset(i) + residual[i];
      };
      if (args.relu) {
        StoreEach(y + start, n, [&](std::int64_t i) {
          const A value = z(i);
          return value < 0 ? A{0} : value;  // NaN stays
        });
      } else {
        StoreEach(y + start, n, z);
      }
    });
  });
  return ffi::Error::Success();
}

// dz, element by element of a run's block.
template <typename T, bool kFirst>
class MaskedGrad {
 public:
  using A = Accum<T>;
  MaskedGrad(const BatchNormBwdArgs& args, const Affine<A, kFirst>& affine, const Runs& runs,
             std::int64_t group, std::int64_t run)
      : args_(args),
        affine_(affine),
        group_(group),
        run_(run),
        dy_run_(args.dy, runs, group, run),
        y_run_(args.relu ? args.y : nullptr, runs, group, run) {}

  // Columns [start, start + n); x are these of the input. Valid until the next call.
  const A* operator()(std::int64_t start, std::int64_t n, const A* x) {
    const A* const dy = dy_run_(start);
    if (!args_.relu) return dy;
    if (args_.y != nullptr) {
      const A* const y = y_run_(start);
      for (std::int64_t i = 0; i < n; ++i) masked_[i] = y[i] > 0 ? dy[i] : A{0};
    } else {
      const auto mean = affine_.mean(group_, run_, start);
      const auto factor = affine_.factor(group_, run_, start);
      const auto offset = affine_.offset(group_, run_, start);
      for (std::int64_t i = 0; i < n; ++i) {
        masked_[i] = (x[i] - mean(i)) * factor(i) + offset(i) > 0 ? dy[i] : A{0};
      }
    }
    return masked_;
  }

 private:
  const BatchNormBwdArgs& args_;
  const Affine<A, kFirst>& affine_;
  std::int64_t group_, run_;
  WideRun<T> dy_run_, y_run_;
  A masked_[kBlock];
};

// sum(dz) and sum(dz * (x - mean)) of each channel, [groups, channels].
template <typename T, bool kFirst>
Sums<2> GradientSums(const CpuContext& pool, const BatchNormBwdArgs& args,
                     const Affine<Accum<T>, kFirst>& affine) {
  using A = Accum<T>;
  const Runs runs(args.shape);
  const std::int64_t channels = runs.channels, bytes = 2 * sizeof(T);
  const Parts parts(args.shape, bytes, args.partial_rows);
  auto* const workspace = static_cast<A*>(args.workspace);  // [groups, partial_rows, 2, channels]
  const auto partial = [&](std::int64_t group, std::int64_t part, std::size_t sum) {
    return workspace +
           ((group * args.partial_rows + part) * 2 + static_cast<std::int64_t>(sum)) * channels;
  };
  ForParts(
      pool, args.shape, parts, bytes,
      [&](std::int64_t group, std::int64_t part, std::int64_t channel, std::int64_t end) {
        Sums<2> totals = Zeros<2>(end - channel);
        const std::int64_t row = part * parts.rows;
        if constexpr (kFirst) {
          for (std::int64_t r = row; r < std::min(args.shape.outer.rows, row + parts.rows); ++r) {
            for (std::int64_t c = channel; c < end; ++c) {
              const std::int64_t run = r * channels + c;
              WideRun<T> x_run(args.x, runs, group, run);
              MaskedGrad<T, true> dz_run(args, affine, runs, group, run);
              ForBlocks(runs.width, [&](std::int64_t start, std::int64_t n) {
                const A* const x = x_run(start);
                const A* const dz = dz_run(start, n, x);
                const A mean = affine.mean(group, run, start)(0);
                const auto sums = LaneSums<A, 2>(
                    n, [&](std::int64_t i) { return std::array{dz[i], dz[i] * (x[i] - mean)}; });
                for (std::size_t s = 0; s < 2; ++s) {
                  totals[s][static_cast<std::size_t>(c - channel)] += sums[s];
                }
              });
            }
          }
        } else {
          const std::int64_t last = std::min(runs.count(), row + parts.rows);
          std::vector<A> sums[2];
          for (auto& sum : sums) sum.resize(static_cast<std::size_t>(runs.width));
          for (std::int64_t first = row; first < last; first += kRowsPerSum) {
            for (auto& sum : sums) std::fill(sum.begin(), sum.end(), A{0});
            for (std::int64_t run = first; run < std::min(last, first + kRowsPerSum); ++run) {
              WideRun<T> x_run(args.x, runs, group, run);
              MaskedGrad<T, false> dz_run(args, affine, runs, group, run);
              ForBlocks(runs.width_of(run), [&](std::int64_t start, std::int64_t n) {
                const A* const x = x_run(start);
                const A* const dz = dz_run(start, n, x);
                const auto mean = affine.mean(group, run, start);
                A* __restrict__ const plain = sums[0].data() + start;
                A* __restrict__ const shifted = sums[1].data() + start;
                for (std::int64_t i = 0; i < n; ++i) {
                  plain[i] += dz[i], shifted[i] += dz[i] * (x[i] - mean(i));
                }
              });
            }
            for (std::size_t s = 0; s < 2; ++s) {
              for (std::int64_t i = 0; i < runs.width; ++i) {
                totals[s][static_cast<std::size_t>(i % channels)] +=
                    sums[s][static_cast<std::size_t>(i)];
              }
            }
          }
        }
        for (std::size_t s = 0; s < 2; ++s) {
          std::transform(totals[s].begin(), totals[s].end(), partial(group, part, s) + channel,
                         [](double total) { return static_cast<A>(total); });
        }
      });
  Sums<2> all = Zeros<2>(args.shape.outer.groups * channels);
  ForEach(pool, args.shape.outer.groups * channels, [&](std::int64_t i) {
    for (std::size_t s = 0; s < 2; ++s) {
      for (std::int64_t part = 0; part < parts.count; ++part) {
        all[s][static_cast<std::size_t>(i)] += partial(i / channels, part, s)[i % channels];
      }
    }
  });
  return all;
}

template <typename T, bool kFirst>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  using A = Accum<T>;
  const Runs runs(args.shape);
  const std::int64_t n = args.shape.outer.groups * runs.channels;
  const Given<A> rstd{args.rstd}, delta{args.delta};
  const Affine<A, kFirst> affine(pool, args.shape, args.scale, args.bias, Given<A>{args.mean}, rstd,
                                 delta);
  std::vector<A> own[2];  // means of dz and dz * x_hat
  const bool given = args.mean_dz.data != nullptr;
  if (!given) {
    for (auto& mean : own) mean.resize(static_cast<std::size_t>(n));
    const Sums<2> sums =
        args.shape.elements() > 0 ? GradientSums<T, kFirst>(pool, args, affine) : Zeros<2>(n);
    const WideGrad<A> dscale(args.dscale, args.shape.outer), dbias(args.dbias, args.shape.outer);
    const double terms = static_cast<double>(std::max<std::int64_t>(1, args.shape.terms()));
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t group = i / runs.channels, channel = i % runs.channels;
      const double of_dz = sums[0][at];
      const double of_x_hat = (sums[1][at] - static_cast<double>(delta(group, channel)) * of_dz) *
                              static_cast<double>(rstd(group, channel));
      if (dscale.data() != nullptr) dscale.data()[i] = static_cast<A>(of_x_hat);
      if (dbias.data() != nullptr) dbias.data()[i] = static_cast<A>(of_dz);
      own[0][at] = static_cast<A>(of_dz / terms), own[1][at] = static_cast<A>(of_x_hat / terms);
    }
    if (const ffi::Error error = dscale.Store(pool); error.failure()) return error;
    if (const ffi::Error error = dbias.Store(pool); error.failure()) return error;
  }
  if (args.dx == nullptr || args.shape.elements() == 0) return ffi::Error::Success();

  // dx = factor * (dz - mean_dz - x_hat * mean_dz_x_hat) with x_hat = (x - mean - delta) * rstd
  const auto mean_of = [&](std::size_t which, const Param& param) {
    return Given<A>{given ? param : Param{own[which].data(), runs.channels, kDtype<A>}};
  };
  const Given<A> mean_dz = mean_of(0, args.mean_dz), mean_x_hat = mean_of(1, args.mean_dz_x_hat);
  const PerChannel<A, kFirst> slopes(pool, args.shape, [&](std::int64_t g, std::int64_t c) {
    return mean_x_hat(g, c) * rstd(g, c);
  });
  const PerChannel<A, kFirst> levels(pool, args.shape, [&](std::int64_t g, std::int64_t c) {
    return mean_dz(g, c) - delta(g, c) * rstd(g, c) * mean_x_hat(g, c);
  });
  ForRuns(pool, args.shape, 3 * sizeof(T), [&](std::int64_t group, std::int64_t run) {
    WideRun<T> x_run(args.x, runs, group, run);
    MaskedGrad<T, kFirst> dz_run(args, affine, runs, group, run);
    const std::int64_t offset = group * runs.elements + run * runs.width;
    T* const dx = static_cast<T*>(args.dx) + offset;
    T* const dresidual =
        args.dresidual == nullptr ? nullptr : static_cast<T*>(args.dresidual) + offset;
    ForBlocks(runs.width_of(run), [&](std::int64_t start, std::int64_t count) {
      const A* const x = x_run(start);
      const A* const dz = dz_run(start, count, x);
      const auto mean = affine.mean(group, run, start);
      const auto factor = affine.factor(group, run, start);
      const auto level = levels(group, run, start);
      const auto slope = slopes(group, run, start);
      StoreEach(dx + start, count, [&](std::int64_t i) {
        return (dz[i] - level(i) - (x[i] - mean(i)) * slope(i)) * factor(i);
      });
      if (dresidual != nullptr) {
        StoreEach(dresidual + start, count, [&](std::int64_t i) { return dz[i]; });
      }
    });
  });
  return ffi::Error::Success();
}

}  // namespace

ffi::Error BatchNormFwd(CpuContext pool, const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_fwd", args.dtype, [&]<typename T>() {
    return args.shape.inner > 1 ? Forward<T, true>(pool, args) : Forward<T, false>(pool, args);
  });
}

ffi::Error BatchNormBwd(CpuContext pool, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "batch_norm_bwd", args.dtype, [&]<typename T>() {
    return args.shape.inner > 1 ? Backward<T, true>(pool, args) : Backward<T, false>(pool, args);
  });
}

}  // namespace gradops
