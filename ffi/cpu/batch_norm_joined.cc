// Group norm on the CPU where the elements of a bundle lie together in memory, and channels are
// short: x is [samples, channels], or has few elements after the channels' axis. Loops run over the
// elements of a bundle. The parameters are expanded to one number per element of a sample. All
// other scratch is on the stack.
//
// Statistics are made as in batch_norm_small.cc. Memory is read or written once per array.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>

#include "common/math.h"
#include "cpu/batch_norm_large.h"
#include "cpu/batch_norm_small.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "cpu/wide.h"

namespace gradops {
namespace {

// A parameter with one number per element of a group. If it is absent: kAbsent.
template <typename A, int kAbsent>
class PerElement {
 public:
  PerElement(const CpuContext& pool, const Param& param, const ChannelShape& shape)
      : stride_(param.data == nullptr ? 0 : param.group_stride * shape.inner) {
    const std::int64_t elements = shape.channels() * shape.inner;
    const std::int64_t n = elements * (stride_ == 0 ? 1 : shape.outer.groups);
    values_ = std::make_unique_for_overwrite<A[]>(static_cast<std::size_t>(n));
    ForEach(pool, n / shape.inner, [&](std::int64_t channel) {
      std::fill_n(values_.get() + channel * shape.inner, shape.inner,
                  ReadParam(param, 0, channel, static_cast<A>(kAbsent)));
    });
  }
  const A* operator()(std::int64_t group, std::int64_t element) const {
    return values_.get() + group * stride_ + element;
  }

 private:
  std::int64_t stride_;
  std::unique_ptr<A[]> values_;
};

// Where the bundles are.
struct Bundles {
  template <class Args>
  explicit Bundles(const Args& args)
      : bundle(args.bundle),
        bundles(args.bundles),
        inner(args.shape.inner),
        elements(args.bundle * args.shape.inner),
        all(args.bundles * args.shape.outer.groups) {}
  const std::int64_t bundle, bundles, inner, elements, all;

  // Calls fn(first, count) for all bundles of all groups, in the thread pool: up to `most` at a
  // time. `arrays` arrays of T are read or written.
  template <typename T, typename Fn>
  void ForRuns(const CpuContext& pool, std::int64_t arrays, std::int64_t most, const Fn& fn) const {
    constexpr std::int64_t kMaxChunks = 256;
    const std::int64_t bytes = arrays * elements * std::int64_t{sizeof(T)};
    const std::int64_t chunk = RowsPerChunk(all, bytes, kMaxChunks);
    ParallelFor(pool, (all + chunk - 1) / chunk, [&](std::int64_t i) {
      const std::int64_t end = std::min(all, (i + 1) * chunk);
      for (std::int64_t b = i * chunk; b < end; b += most) fn(b, std::min(most, end - b));
      StreamFence();
    });
  }
  // Calls fn(group, bundle, offset) for each bundle. The bundle's elements begin at `offset`.
  template <typename T, typename Fn>
  void ForEach(const CpuContext& pool, std::int64_t arrays, const Fn& fn) const {
    ForRuns<T>(pool, arrays, 1,
               [&](std::int64_t b, std::int64_t) { fn(b / bundles, b % bundles, b * elements); });
  }
  // Whether a result is stored past the caches. Only whole cache lines should be.
  template <typename T>
  bool Prepare(void* result, std::initializer_list<const void*> operands) const {
    const std::int64_t bytes = elements * std::int64_t{sizeof(T)};
    return PrepareResult(result, all * bytes, operands) && bytes % 64 == 0 &&
           BytesToLine(result) == 0;
  }
};

template <typename A>
struct Statistics {
  A mean, variance, rstd, delta;
};

// Bundles of up to kShort elements get their statistics kRun at a time. In each of three steps, a
// processor can then work on several bundles at once. One by one, each bundle waits for its
// divisions and its sums over lanes. Forward of float32 [64, 1024] in 32 groups takes 72 to 104 us
// of processor time with AVX2. One by one, it took 121 to 126.
constexpr int kRun = 8;
constexpr std::int64_t kShort = 512;

// Sets the statistics of `count` bundles that begin at x, up to kRun.
template <typename T>
void SetStatistics(const T* x, std::int64_t elements, std::int64_t count,
                   const Epsilon<Accum<T>>& epsilon, Statistics<Accum<T>>* statistics) {
  using A = Accum<T>;
  const auto n = static_cast<double>(elements);
  A guesses[kRun];
  std::array<A, 2> sums[kRun];
  for (std::int64_t b = 0; b < count; ++b) {
    const T* const own = x + b * elements;
    const A first = static_cast<A>(own[0]);
    const A sum = LaneSums<A, 1>(elements, [=](auto at) { return std::array{at(own) - first}; })[0];
    guesses[b] = first + static_cast<A>(static_cast<double>(sum) / n);
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const T* const own = x + b * elements;
    sums[b] = LaneSums<A, 2>(elements, [=, guess = guesses[b]](auto at) {
      const auto centered = at(own) - guess;
      return std::array{centered, centered * centered};
    });
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const A guess = guesses[b];
    const double offset = static_cast<double>(sums[b][0]) / n;
    double mean_square = static_cast<double>(sums[b][1]) / n;
    if (NeedsSecondLook(sums[b][0], sums[b][1])) {
      double of_deviations, squares;  // squares: about the mean
      LargeMoments(x + b * elements, 1, elements, elements, guess, of_deviations, squares);
      mean_square = squares / n + offset * offset;
    }
    const A variance = static_cast<A>(VarianceOf(mean_square, offset));
    const A mean = static_cast<A>(static_cast<double>(guess) + offset);
    const double rounding = static_cast<double>(guess) - static_cast<double>(mean);
    statistics[b] = {.mean = mean,
                     .variance = variance,
                     .rstd = InverseDeviation(variance, epsilon),
                     .delta = static_cast<A>(rounding + offset)};
  }
}

// Stores fn(at). An activation with an exponential computes the last elements in lanes, too.
template <bool kIsSlow, typename T, typename Fn>
void StoreAll(T* to, std::int64_t n, bool streamed, const Fn& fn) {
  constexpr int kCount = kLanes<Accum<T>>;
  if (kIsSlow && !streamed) {
    ForWholeLanes<kCount>(n, [=](auto at) { at.Store(to, fn(at)); });
  } else {
    StoreForLanes<kCount>(to, n, streamed, fn);
  }
}

template <typename T>
ffi::Error Forward(const CpuContext& pool, const BatchNormFwdArgs& args) {
  using A = Accum<T>;
  const Bundles of(args);
  const bool own = args.mean.data == nullptr;
  const PerElement<A, 1> scales(pool, args.scale, args.shape);
  const PerElement<A, 0> biases(pool, args.bias, args.shape);
  const A least = args.relu ? A{0} : -std::numeric_limits<A>::infinity();
  const bool streamed = of.Prepare<T>(args.y, {args.x});
  const Epsilon<A> epsilon(args.epsilon, args.strict);
  const auto apply = [&](std::int64_t group, std::int64_t offset, const Statistics<A>& of_bundle) {
    const std::int64_t element = offset - group * of.bundles * of.elements;
    const T* const x = static_cast<const T*>(args.x) + offset;
    T* const y = static_cast<T*>(args.y) + offset;
    const A *const scale = scales(group, element), *const bias = biases(group, element);
    const auto argument = [=, mean = of_bundle.mean, rstd = of_bundle.rstd,
                           delta = of_bundle.delta](auto at) {
      const auto factor = at(scale) * rstd;
      return (at(x) - mean) * factor + (at(bias) - factor * delta);
    };
    if (args.silu) {
      StoreAll<true>(y, of.elements, streamed, [=](auto at) { return Silu<A>(argument(at)); });
    } else {
      StoreAll<false>(y, of.elements, streamed, [=](auto at) { return Max(least, argument(at)); });
    }
  };
  const std::int64_t most = of.elements <= kShort ? kRun : 1;
  of.ForRuns<T>(pool, 2, most, [&](std::int64_t first, std::int64_t count) {
    Statistics<A> statistics[kRun];
    if (own) {
      const T* const x = static_cast<const T*>(args.x) + first * of.elements;
      SetStatistics(x, of.elements, count, epsilon, statistics);
    }
    for (std::int64_t b = 0; b < count; ++b) {
      const std::int64_t i = first + b, group = i / of.bundles;
      Statistics<A>& of_bundle = statistics[b];
      if (own) {
        static_cast<A*>(args.batch_mean)[i] = of_bundle.mean;
        static_cast<A*>(args.batch_variance)[i] = of_bundle.variance;
        static_cast<A*>(args.batch_rstd)[i] = of_bundle.rstd;
        static_cast<A*>(args.batch_delta)[i] = of_bundle.delta;
      } else {
        const auto given = [&](const Param& param) {
          return ReadParam(param, group, i % of.bundles, A{0});
        };
        of_bundle = {given(args.mean), 0, given(args.rstd), given(args.delta)};
      }
      if (args.y != nullptr) apply(group, i * of.elements, of_bundle);
    }
  });
  return ffi::Error::Success();
}

// The sums of a bundle, weighted by scale: of dz, and of dz * x_hat.
struct WeightedSums {
  double of_dz = 0, of_x_hat = 0;
};

// Stores the sums of each channel of a bundle in dscale and dbias, past the caches if `streamed`.
// They are sums of its elements' dz and dz * x_hat.
template <typename A, typename Centered>
WeightedSums ChannelSums(const Bundles& of, const A* dz, const A* scale, A rstd, A delta,
                         const Centered& centered, A* dscale, A* dbias, bool streamed) {
  if (of.inner == 1) {
    const auto sums = LaneSums<A, 2>(of.elements, [=](auto at) {
      const auto gradient = at(dz);
      const auto of_x_hat = gradient * ((centered(at) - delta) * rstd);
      if (streamed) {
        at.Stream(dscale, of_x_hat), at.Stream(dbias, gradient);
      } else if (dscale != nullptr) {
        at.Store(dscale, of_x_hat), at.Store(dbias, gradient);
      }
      return std::array{gradient * at(scale), of_x_hat * at(scale)};
    });
    return {static_cast<double>(sums[0]), static_cast<double>(sums[1])};
  }
  WeightedSums all;
  const std::int64_t channels_at_a_time = kBlock / of.inner;
  alignas(64) A products[kBlock];
  for (std::int64_t first = 0; first < of.bundle; first += channels_at_a_time) {
    const std::int64_t end = std::min(of.bundle, first + channels_at_a_time);
    const std::int64_t start = first * of.inner;
    ForLanes<kLanes<A>>((end - first) * of.inner, [=, &products](auto at) {
      const decltype(at) there{start + at.i};
      at.Store(products, there(dz) * centered(there));
    });
    for (std::int64_t c = first; c < end; ++c) {
      const A *const gradients = dz + c * of.inner, *const product =
                                                        products + (c - first) * of.inner;
      double sums[2][2] = {};  // of even and odd elements
      for (std::int64_t i = 0; i < of.inner; ++i) {
        sums[0][i % 2] += static_cast<double>(gradients[i]);
        sums[1][i % 2] += static_cast<double>(product[i]);
      }
      const double of_dz = sums[0][0] + sums[0][1];
      const double of_x_hat = ((sums[1][0] + sums[1][1]) - static_cast<double>(delta) * of_dz) *
                              static_cast<double>(rstd);
      if (dscale != nullptr) dscale[c] = static_cast<A>(of_x_hat), dbias[c] = static_cast<A>(of_dz);
      const auto weight = static_cast<double>(scale[c * of.inner]);
      all.of_dz += weight * of_dz, all.of_x_hat += weight * of_x_hat;
    }
  }
  return all;
}

template <typename T>
ffi::Error Backward(const CpuContext& pool, const BatchNormBwdArgs& args) {
  using A = Accum<T>;
  const Bundles of(args);
  const bool own = args.mean_dz.data == nullptr;
  const PerElement<A, 1> scales(pool, args.scale, args.shape);
  const PerElement<A, 0> biases(pool, args.bias, args.shape);
  const WideGrad<A> dscale(args.dscale, args.shape.outer), dbias(args.dbias, args.shape.outer);
  const bool streamed = of.Prepare<T>(args.dx, {args.dy, args.x});
  const bool streamed_sums[] = {PrepareGrad(dscale, args.shape.outer),
                                PrepareGrad(dbias, args.shape.outer)};
  const bool sums_are_lines = of.inner == 1 && of.bundle * std::int64_t{sizeof(A)} % 64 == 0;
  of.ForEach<T>(pool, 3, [&](std::int64_t group, std::int64_t b, std::int64_t offset) {
    const T* const dy = static_cast<const T*>(args.dy) + offset;
    const T* const x = static_cast<const T*>(args.x) + offset;
    const A *const scale = scales(group, b * of.elements), *const bias =
                                                               biases(group, b * of.elements);
    const auto given = [&](const Param& param) { return ReadParam(param, group, b, A{0}); };
    const A mean = given(args.mean), rstd = given(args.rstd), delta = given(args.delta);
    const auto centered = [=](auto at) { return at(x) - mean; };
    const auto argument = [=](auto at) {
      const auto factor = at(scale) * rstd;
      return centered(at) * factor + (at(bias) - factor * delta);
    };
    alignas(64) A dz[kJoinedBundle];
    if (args.silu) {
      ForWholeLanes<kLanes<A>>(of.elements, [=, &dz](auto at) {
        at.Store(dz, at(dy) * SiluDerivative<A>(argument(at)));
      });
    } else if (args.relu) {
      ForLanes<kLanes<A>>(of.elements, [=, &dz](auto at) {
        const auto gradient = at(dy);
        const std::remove_cv_t<decltype(gradient)> zero = 0;
        at.Store(dz, IfGreater(argument(at), zero, gradient, zero));
      });
    } else {
      ForLanes<kLanes<A>>(of.elements, [=, &dz](auto at) { at.Store(dz, at(dy)); });
    }
    A mean_dz = given(args.mean_dz), mean_dz_x_hat = given(args.mean_dz_x_hat);
    if (own) {
      const std::int64_t channel = (group * of.bundles + b) * of.bundle;
      const bool stored = dscale.data() != nullptr;  // dbias, too
      const WeightedSums sums = ChannelSums<A>(
          of, dz, scale, rstd, delta, centered, stored ? dscale.data() + channel : nullptr,
          stored ? dbias.data() + channel : nullptr,
          sums_are_lines && streamed_sums[0] && streamed_sums[1]);
      if (args.sum_dz != nullptr) {
        static_cast<A*>(args.sum_dz)[group * of.bundles + b] = static_cast<A>(sums.of_dz);
        static_cast<A*>(args.sum_dz_x_hat)[group * of.bundles + b] = static_cast<A>(sums.of_x_hat);
      }
      const auto n = static_cast<double>(of.elements);
      mean_dz = static_cast<A>(sums.of_dz / n), mean_dz_x_hat = static_cast<A>(sums.of_x_hat / n);
    }
    if (args.dx == nullptr) return;
    const A slope = mean_dz_x_hat * rstd, level = mean_dz - delta * slope;
    const A* const gradients = dz;
    StoreForLanes<kLanes<A>>(static_cast<T*>(args.dx) + offset, of.elements, streamed,
                             [=](auto at) {  // batch_norm_backward.h
                               return at(gradients) * (at(scale) * rstd) -
                                      (centered(at) * slope + level) * rstd;
                             });
  });
  const ffi::Error error = dscale.Store(pool);
  return error.failure() ? error : dbias.Store(pool);
}

}  // namespace

ffi::Error JoinedGroupNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "group_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(pool, args); });
}

ffi::Error JoinedGroupNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "group_norm_bwd", args.dtype,
                       [&]<typename T>() { return Backward<T>(pool, args); });
}

}  // namespace gradops
