// Runs the kernels of batch norm and group norm without JAX, on small awkward shapes and exact
// cudaMalloc buffers. The expected results are long expressions in double on the host.
// compute-sanitizer's four tools run the program too.
//
// tests/gpu/run.sh check builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "batch_norm_cases.cuh"
#include "cuda/batch_norm/backward.cu"
#include "cuda/batch_norm/bundle_backward.cu"
#include "cuda/batch_norm/bundle_forward.cu"
#include "cuda/batch_norm/forward.cu"
#include "driver.cuh"

#include "batch_norm_known.cuh"  // must come last: uses the headers above

namespace gradops {
namespace {

// The calls of a case, and the checks of their results. S is the dtype of scale, bias and their
// gradients.
template <typename T, typename S>
struct CaseRun {
  using A = Accum<T>;

  CaseRun(const ChannelDevice& device, const Case& of)
      : device(device),
        c(of),
        x(Filled(sizeof(T) > 2 ? 100 : 2, 2)),
        residual(Filled(0, 1)),
        dy(Filled(0.1, 1)) {}

  // Returns the number of calls.
  int Run() {
    Forward();
    CheckForward();
    Backward();
    CheckBackward();
    return 6;
  }

  // An array of x's shape.
  Array<T> Filled(double mean_step, double size) {
    return Array<T>(n, c.shift, arrays, [&](std::int64_t i) {
      const std::int64_t channel = i / c.inner % c.channels;
      return mean_step * static_cast<double>(channel % 7) +
             (channel % 11 == 3 ? 0 : size * Random());
    });
  }

  // scale and bias of a channel.
  std::pair<double, double> AffineOf(std::int64_t group, std::int64_t channel) const {
    const std::int64_t p = group * stride + channel;
    return std::pair(c.scale ? scale[p] : 1.0, c.scale ? bias[p] : 0.0);
  }
  // The number of a channel's bundle.
  std::int64_t BundleOf(std::int64_t group, std::int64_t channel) const {
    return (group * c.channels + channel) / c.bundle;
  }
  double XHat(std::int64_t bundle, std::int64_t at) const {
    return (x[at] - mean[bundle] - delta[bundle]) * rstd[bundle];
  }
  // Calls fn(channel, index in x) for each element of a bundle, which starts at a channel.
  void ForElements(std::int64_t group, std::int64_t first, const auto& fn) const {
    for (std::int64_t channel = first; channel < first + c.bundle; ++channel) {
      for (std::int64_t i = 0; i < c.terms(); ++i) fn(channel, c.at(group, channel, i));
    }
  }
  // Calls fn(group, first channel) for each bundle.
  void ForBundles(const auto& fn) const {
    for (std::int64_t group = 0; group < c.groups; ++group) {
      for (std::int64_t channel = 0; channel < c.channels; channel += c.bundle) fn(group, channel);
    }
  }

  // One call for all, then one for the statistics, and one for y from given statistics.
  void Forward() {
    fwd.shape = {{c.groups, c.rows, c.channels}, c.inner}, fwd.dtype = kDtype<T>;
    fwd.bundle = c.bundle, fwd.relu = c.relu, fwd.silu = c.silu, fwd.epsilon = epsilon;
    fwd.x = x.device, fwd.residual = c.residual ? residual.device : nullptr;
    if (c.scale)
      fwd.scale = {scale.device, stride, kDtype<S>}, fwd.bias = {bias.device, stride, kDtype<S>};
    fwd.y = y.device;
    fwd.batch_mean = mean.device, fwd.batch_variance = variance.device;
    fwd.batch_rstd = rstd.device, fwd.batch_delta = delta.device;
    fwd.workspace = workspace, fwd.partial_rows = c.partial_rows;
    Check(BatchNormFwdOn(device, nullptr, fwd));
    BatchNormFwdArgs statistics = fwd;
    given = fwd;
    statistics.y = nullptr, statistics.residual = nullptr;
    statistics.batch_mean = again[0].device, statistics.batch_variance = again[1].device;
    statistics.batch_rstd = again[2].device, statistics.batch_delta = again[3].device;
    Check(BatchNormFwdOn(device, nullptr, statistics));
    given.mean = {mean.device, c.channels / c.bundle, kDtype<A>};
    given.rstd = {rstd.device, c.channels / c.bundle, kDtype<A>};
    given.delta = {delta.device, c.channels / c.bundle, kDtype<A>};
    given.batch_mean = given.batch_variance = given.batch_rstd = given.batch_delta = nullptr;
    given.workspace = nullptr, given.partial_rows = 0, given.y = y_given.device;
    Check(BatchNormFwdOn(device, nullptr, given));
    Check(cudaDeviceSynchronize());
    y.Download(), y_given.Download(), mean.Download(), variance.Download(), rstd.Download(),
        delta.Download();
    for (auto& array : again) array.Download();
  }

  void CheckForward() {
    for (std::int64_t i = 0; i < n; ++i) Near(c, "y of given statistics", i, y_given[i], y[i], 0);
    ForBundles([&](std::int64_t group, std::int64_t first) { CheckForward(group, first); });
  }
  void CheckForward(std::int64_t group, std::int64_t first) {
    const std::int64_t p = BundleOf(group, first);
    const auto terms = static_cast<double>(c.terms() * c.bundle);
    long double sum = 0, square = 0;
    ForElements(group, first, [&](std::int64_t, std::int64_t at) { sum += x[at]; });
    const long double want = sum / terms;
    ForElements(group, first, [&](std::int64_t, std::int64_t at) {
      const long double distance = x[at] - want;
      square += distance * distance;
    });
    const auto want_variance = static_cast<double>(square / terms);
    const double want_rstd = 1 / std::sqrt(want_variance + epsilon);
    Near(c, "mean", p, mean[p] + delta[p], static_cast<double>(want),
         4 * accum * std::sqrt(want_variance) + 4e-16 * std::fabs(static_cast<double>(want)));
    Near(c, "variance", p, variance[p], want_variance, 8 * accum * want_variance + 1e-14 * accum);
    Near(c, "rstd", p, rstd[p], want_rstd, 8 * accum * want_rstd);
    Near(c, "mean alone", p, again[0][p], mean[p], 0);
    Near(c, "variance alone", p, again[1][p], variance[p], 0);
    Near(c, "rstd alone", p, again[2][p], rstd[p], 0);
    Near(c, "delta alone", p, again[3][p], delta[p], 0);
    ForElements(group, first, [&](std::int64_t channel, std::int64_t at) {
      const auto [a, b] = AffineOf(group, channel);
      const double x_hat = static_cast<double>(x[at] - want) * want_rstd;
      double z = x_hat * a + b + (c.residual ? residual[at] : 0.0);
      const double size = std::fabs(x_hat * a) + 3;
      if (c.relu) z = std::max(z, 0.0);
      if (c.silu) z *= Logistic(z);
      Near(c, "y", at, y[at], z, unit * std::fabs(z) + 16 * accum * size);
    });
  }
  static double Logistic(double z) { return 1 / (1 + std::exp(-z)); }

  // One call for the sums, and one for all.
  void Backward() {
    bwd.shape = fwd.shape, bwd.dtype = kDtype<T>;
    bwd.bundle = c.bundle, bwd.relu = c.relu, bwd.silu = c.silu, bwd.weighted = c.bundle > 1;
    bwd.dy = dy.device, bwd.x = x.device;
    bwd.y = has_y ? y.device : nullptr;
    bwd.scale = fwd.scale;
    if ((c.relu && !has_y) || c.silu) bwd.bias = fwd.bias;
    bwd.mean = given.mean, bwd.rstd = given.rstd, bwd.delta = given.delta;
    bwd.workspace = workspace, bwd.partial_rows = c.partial_rows;
    bwd.dscale = {dscale.device, kDtype<S>}, bwd.dbias = {dbias.device, kDtype<S>};
    if (c.bundle > 1) bwd.sum_dz = sum_dz.device, bwd.sum_dz_x_hat = sum_dz_x_hat.device;
    BatchNormBwdArgs sums = bwd;
    sums.dscale.data = sums_alone[0].device, sums.dbias.data = sums_alone[1].device;
    Check(BatchNormBwdOn(device, nullptr, sums));
    bwd.dx = c.in_place ? dy.device : dx.device;
    if (c.residual) bwd.dresidual = dresidual.device;
    Check(BatchNormBwdOn(device, nullptr, bwd));
    Check(cudaDeviceSynchronize());
    Array<T>& dx_array = c.in_place ? dy : dx;
    const std::vector<T> dy_host = dy.host;
    dx_array.Download();
    dx_host = dx_array.host;
    dy.host = dy_host;
    if (c.residual) dresidual.Download();
    dscale.Download(), dbias.Download(), sum_dz.Download(), sum_dz_x_hat.Download();
    for (auto& array : sums_alone) array.Download();
  }

  // What dz of an element has to be.
  double Dz(std::int64_t group, std::int64_t channel, std::int64_t at) const {
    if (!c.relu && !c.silu) return dy[at];
    if (has_y) return y[at] > 0 ? dy[at] : 0.0;
    const auto [a, b] = AffineOf(group, channel);
    const double z = XHat(BundleOf(group, channel), at) * a + b;
    if (c.silu) return dy[at] * Logistic(z) * (1 + z * (1 - Logistic(z)));
    return z > 0 ? dy[at] : 0.0;
  }

  // The last call computes dx from given means.
  void CheckBackward() {
    ForBundles([&](std::int64_t group, std::int64_t first) { CheckBundle(group, first); });
    CheckDx(dx_host);
    mean_dz.Upload(), mean_dz_x_hat.Upload(), dy.Upload();
    bwd.mean_dz = {mean_dz.device, c.channels / c.bundle, kDtype<A>};
    bwd.mean_dz_x_hat = {mean_dz_x_hat.device, c.channels / c.bundle, kDtype<A>};
    bwd.sum_dz = bwd.sum_dz_x_hat = nullptr;
    bwd.dscale = bwd.dbias = {}, bwd.workspace = nullptr, bwd.partial_rows = 0;
    bwd.dx = dx.device;
    Check(BatchNormBwdOn(device, nullptr, bwd));
    Check(cudaDeviceSynchronize());
    dx.Download();
    CheckDx(dx.host);
  }
  // Checks the sums of a bundle, and sets what its dx has to be.
  void CheckBundle(std::int64_t group, std::int64_t first) {
    const std::int64_t p = BundleOf(group, first);
    const auto terms = static_cast<double>(c.terms() * c.bundle);
    double sums[2] = {}, size = 0;  // of scale * dz, and of scale * dz * x_hat
    for (std::int64_t channel = first; channel < first + c.bundle; ++channel) {
      size += CheckSums(group, channel, sums);
    }
    if (c.bundle > 1) {
      Near(c, "sum_dz", p, sum_dz[p], sums[0], loose * 16 * accum * size);
      Near(c, "sum_dz_x_hat", p, sum_dz_x_hat[p], sums[1], loose * 16 * accum * size);
    }
    const double weight = c.bundle > 1 ? 1 : AffineOf(group, first).first;
    mean_dz.host[static_cast<std::size_t>(p)] = static_cast<A>(sums[0] / terms / weight);
    mean_dz_x_hat.host[static_cast<std::size_t>(p)] = static_cast<A>(sums[1] / terms / weight);
    ForElements(group, first, [&](std::int64_t channel, std::int64_t at) {
      const double d = Dz(group, channel, at), scaled = d * AffineOf(group, channel).first;
      want_dx[static_cast<std::size_t>(at)] =
          rstd[p] * (scaled - sums[0] / terms - XHat(p, at) * sums[1] / terms);
      if (c.residual) Near(c, "dresidual", at, dresidual[at], d, 0);
    });
  }
  // Checks the sums of a channel, and adds them to the bundle's. Returns the size of their terms.
  double CheckSums(std::int64_t group, std::int64_t channel, double (&sums)[2]) {
    const std::int64_t p = group * c.channels + channel, bundle = BundleOf(group, channel);
    long double dz_sum = 0, x_hat_sum = 0;
    double size = 0, size_x_hat = 0;
    for (std::int64_t i = 0; i < c.terms(); ++i) {
      const std::int64_t at = c.at(group, channel, i);
      const double d = Dz(group, channel, at);
      dz_sum += d, x_hat_sum += d * XHat(bundle, at);
      // Where silu's derivative is almost 0, its error is not.
      const double term = std::max(std::fabs(d), c.silu ? std::fabs(double{dy[at]}) : 0.0);
      size += term, size_x_hat += term * std::fabs(XHat(bundle, at));
    }
    const auto of_dz = static_cast<double>(dz_sum), of_x_hat = static_cast<double>(x_hat_sum);
    Near(c, "dbias", p, dbias[p], of_dz, kUnit<S> * std::fabs(of_dz) + loose * 8 * accum * size);
    Near(c, "dscale", p, dscale[p], of_x_hat,
         kUnit<S> * std::fabs(of_x_hat) + loose * 16 * accum * (size_x_hat + size));
    Near(c, "dscale alone", p, sums_alone[0][p], dscale[p], 0);
    Near(c, "dbias alone", p, sums_alone[1][p], dbias[p], 0);
    const double a = AffineOf(group, channel).first;
    sums[0] += a * of_dz, sums[1] += a * of_x_hat;
    return std::fabs(a) * (size + size_x_hat);
  }
  void CheckDx(const std::vector<T>& got) const {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      Near(c, "dx", i, static_cast<double>(static_cast<A>(got[at])), want_dx[at],
           unit * std::fabs(want_dx[at]) + 64 * accum * (std::fabs(want_dx[at]) + 50));
    }
  }

  static constexpr double unit = kUnit<T>, accum = kUnit<A>, epsilon = 1e-3;
  const ChannelDevice device;
  const Case c;
  // Errors of silu's derivative: for 16-bit elements, 21 bits are right.
  const double loose = c.silu ? (sizeof(T) == 2 ? 16 : 4) : 1;
  const std::int64_t n = c.elements(), params = c.parameters(), bundles = c.bundles(),
                     of_params = c.shared ? c.channels : params;
  const std::int64_t stride = c.shared ? 0 : c.channels;
  const bool has_y = c.relu && (c.has_y || c.residual);  // with a residual, relu's gradient needs y
  Arrays arrays;
  Array<T> x, residual, dy;
  Array<T> y{n, c.shift, arrays}, y_given{n, c.shift, arrays}, dx{n, c.shift, arrays},
      dresidual{n, c.shift, arrays};
  Array<S> scale{of_params, 0, arrays, [](std::int64_t) { return 1 + Random() / 2; }};
  Array<S> bias{of_params, 0, arrays, [](std::int64_t) { return Random(); }};
  Array<S> dscale{params, 0, arrays}, dbias{params, 0, arrays};
  Array<A> mean{bundles, 0, arrays}, variance{bundles, 0, arrays}, rstd{bundles, 0, arrays},
      delta{bundles, 0, arrays}, sum_dz{bundles, 0, arrays}, sum_dz_x_hat{bundles, 0, arrays};
  A* const workspace = arrays.Empty<A>(c.groups * c.partial_rows * 4 * c.channels);
  // Statistics and sums of calls without y and dx.
  Array<A> again[4] = {
      {bundles, 0, arrays}, {bundles, 0, arrays}, {bundles, 0, arrays}, {bundles, 0, arrays}};
  Array<S> sums_alone[2] = {{params, 0, arrays}, {params, 0, arrays}};
  Array<A> mean_dz{bundles, 0, arrays}, mean_dz_x_hat{bundles, 0, arrays};
  BatchNormFwdArgs fwd{}, given{};
  BatchNormBwdArgs bwd{};
  std::vector<T> dx_host;
  std::vector<double> want_dx = std::vector<double>(static_cast<std::size_t>(n));
};

template <typename T, typename S>
int Run(const ChannelDevice& device, const Case& c) {
  return CaseRun<T, S>(device, c).Run();
}

template <typename T, typename S>
int RunAll(const ChannelDevice& device) {
  int calls = RunEmpty<T>();
  const auto run = [&](const Size& size, const Options& options) {
    calls += Run<T, S>(device, {size, options});
  };
  // Channels last: several rows of x in a row of the matrix, then one row, tiles, single elements.
  run({1, 1, 1, 1}, {});
  run({1, 67, 3, 1}, {.relu = true, .has_y = false});
  run({3, 40, 8, 1}, {.relu = true, .residual = true, .partial_rows = 13});
  run({1, 1003, 64, 1}, {.relu = true, .in_place = true});
  run({2, 300, 33, 1}, {.residual = true, .partial_rows = 2});
  run({1, 200, 1000, 1}, {.relu = true, .in_place = true, .scale = false});
  run({1, 37, 1001, 1}, {.relu = true, .has_y = false, .partial_rows = 7});
  run({1, 300, 2056, 1}, {.partial_rows = 64, .shift = 1});
  run({300, 5, 12, 1}, {.relu = true, .shared = true, .partial_rows = 1});
  // Channels first: planes of whole vectors, framed planes, columns, single elements.
  run({1, 9, 5, 1024}, {.relu = true, .in_place = true});
  run({2, 7, 3, 1089}, {.relu = true, .residual = true, .partial_rows = 40});
  run({2, 3, 6, 777},
      {.relu = true, .has_y = false, .in_place = true, .shared = true, .partial_rows = 3});
  run({1, 40, 24, 49}, {.relu = true, .residual = true});
  run({1, 33, 130, 49}, {.relu = true, .has_y = false, .in_place = true});
  run({3, 11, 16, 36}, {.shared = true, .partial_rows = 1, .shift = 1});
  run({1, 2, 3, 300}, {.relu = true, .shift = 1});
  run({1, 700, 2560, 1}, {.relu = true, .residual = true});
  run({1, 70, 24, 1}, {.relu = true, .has_y = false});
  // A separate second pass: vectors of two channels, groups.
  run({2, 64, 5, 20}, {.relu = true, .residual = true, .partial_rows = 20});
  run({3, 64, 9, 49}, {.relu = true, .has_y = false, .in_place = true});
  // On 132 multiprocessors, some block of a plane has only a step without elements.
  run({1, 3, 3, sizeof(T) == 2 ? 1356 : 3799}, {});
  run({1, 7, 5, 3799}, {});
  // Columns of several groups.
  run({2, 2600, 33, 1}, {.residual = true, .partial_rows = 2});
  // Group norm. Channels last: panels, tiles with whole bundles, and tiles without. Channels first:
  // bundles, small bundles, planes.
  run({3, 40, 24, 1}, {.shared = true, .bundle = 3, .silu = true});
  run({3, 40, 24, 1}, {.shift = 1, .bundle = 3, .silu = true});
  run({120, 6, 40, 1}, {.bundle = 2, .silu = true});
  run({120, 6, 35, 1}, {.relu = true, .has_y = false, .bundle = 5});
  run({601, 2, 16, 1}, {.shared = true, .bundle = 8});
  run({601, 2, 24, 1}, {.bundle = 3, .silu = true});
  run({270, 3, 16, 1}, {.residual = true, .partial_rows = 3});
  run({2, 2600, 24, 1}, {.partial_rows = 64, .bundle = 3, .silu = true});
  run({2, 300, 640, 1}, {.partial_rows = 64, .bundle = 20, .silu = true});
  run({1, 200, 1280, 1}, {.relu = true, .has_y = false, .shared = true, .bundle = 40});
  run({2, 100, 1999 * 3, 1}, {.partial_rows = 5, .bundle = 1999});
  run({70, 1, 12, 1}, {.relu = true, .has_y = false, .partial_rows = 7, .bundle = 12});
  run({2, 1, 12, 1024}, {.partial_rows = 40, .bundle = 4, .silu = true});
  run({5, 1, 6, 64}, {.bundle = 2, .silu = true});
  run({1, 1, 37, 128}, {.relu = true, .residual = true});
  run({3, 2, 10, 777}, {.scale = false, .partial_rows = 9, .bundle = 5, .silu = true});
  run({2, 3, 64, 49}, {.shared = true, .bundle = 2, .silu = true});
  run({2, 33, 6, 5}, {.shared = true, .shift = 1, .bundle = 3, .silu = true});
  // On 132 multiprocessors, three blocks are on each.
  run({45, 1, 12, 6720}, {.bundle = 2, .silu = true});
  // Clusters: blocks share channels, a channel has all blocks, vectors have two channels.
  run({2, 1, 6, 40960 / sizeof(T)}, {.bundle = 3, .silu = true});
  run({2, 1, 6, 40960 / sizeof(T)}, {.relu = true, .has_y = false, .shared = true, .bundle = 3});
  run({1, 1, 3, 122880 / sizeof(T)}, {.residual = true});
  run({1, 1, 3, 122880 / sizeof(T)}, {.in_place = true});
  run({2, 1, 16, 15361}, {.shared = true, .bundle = 8, .silu = true});
  // The arrays do not fit in the shared memory of all blocks.
  run({1, 40000, 256 / sizeof(T), 1}, {.relu = true, .residual = true});
  return calls;
}

// The plan of the main kernel for these arrays.
template <typename T>
ChannelPlan PlanOf(const ChannelDevice& device, bool backward, const Size& size,
                   std::int64_t partial_rows, int transient_arrays) {
  ChannelTask task =
      TaskOf<T>(backward, {{size.groups, size.rows, size.channels}, size.inner}, device);
  task.aligned = task.statistics = task.apply = true;
  task.partial_rows = partial_rows, task.transient_arrays = transient_arrays;
  return ChooseBatchNormPlan(task).channels;
}

// Chunks with more steps, whose stages are used again many times. Many threads have no vector.
template <typename T, typename S>
int RunLongChunks(ChannelDevice device) {
  device.multiprocessors = 2;
  const Size size{1, 90, 128 / static_cast<std::int64_t>(sizeof(T)), 49};
  const ChannelPlan plan = PlanOf<T>(device, /*backward=*/false, size, 512, 0);
  if (plan.chunk_steps != kForwardNeeds.long_chunk_steps || plan.kept_chunks >= plan.part_chunks) {
    std::printf("%s: no long chunks\n", (Case{size, {}}.Text().c_str()));
    std::exit(1);
  }
  return Run<T, S>(device, {size, {}}) +
         Run<T, S>(device, {size, {.relu = true, .residual = true}}) +
         Run<T, S>(device, {size, {.relu = true, .has_y = false, .in_place = true}});
}

// Arrays that are so large for two multiprocessors that there are dynamic chunks.
template <typename T, typename S>
int RunDynamic(ChannelDevice device) {
  device.multiprocessors = 2;
  int calls = 0;
  const auto run = [&](const Size& size, const Options& options) {
    const int forward = options.residual ? 1 : 0;
    const int backward = options.relu && (options.has_y || options.residual) ? 1 : 0;
    if (PlanOf<T>(device, false, size, options.partial_rows, forward).dynamic_chunks == 0 ||
        PlanOf<T>(device, true, size, options.partial_rows, backward).dynamic_chunks == 0) {
      std::printf("%s: no dynamic chunks\n", (Case{size, options}.Text().c_str()));
      std::exit(1);
    }
    calls += Run<T, S>(device, {size, options});
  };
  run({1, 12'345, 512 / sizeof(T), 1}, {});
  run({1, 16'383, 200 / sizeof(T), 1}, {.relu = true, .residual = true});
  run({1, 3'001, 5, 49}, {.relu = true, .has_y = false, .in_place = true});
  return calls;
}

}  // namespace
}  // namespace gradops

// The argument `dynamic` runs arrays with dynamic chunks. Without it, all others run.
int main(int argc, char** argv) {
  using namespace gradops;
  const ChannelDevice device = CurrentChannelDevice();
  int calls = 0;
  if (argc == 1) {
    calls += RunLongChunks<float, Half>(device) + RunLongChunks<BFloat16, float>(device) +
             RunLongChunks<Half, double>(device) + RunLongChunks<double, BFloat16>(device) +
             RunHard({1, 3000, 16, 1}) + RunHard({1, 9, 6, 1024}) + RunHard({1, 31, 7, 101}) +
             RunBarriers(device);
    const auto run_all = [](const ChannelDevice& on) {
      return RunAll<float, Half>(on) + RunAll<BFloat16, float>(on) + RunAll<Half, double>(on) +
             RunAll<double, BFloat16>(on);
    };
    calls += run_all(device);
    // Some arrays are a little larger than this L2 cache.
    ChannelDevice other = device;
    other.prefers_separate = true, other.l2_bytes = 100'000;
    calls += run_all(other);
    // A GPU with little shared memory.
    other = device, other.shared_bytes = 102'400;
    calls += run_all(other);
  } else if (argc == 2 && std::strcmp(argv[1], "dynamic") == 0) {
    calls += RunDynamic<float, Half>(device) + RunDynamic<BFloat16, float>(device) +
             RunDynamic<Half, double>(device) + RunDynamic<double, BFloat16>(device);
  } else {
    std::printf("unknown %s\n", argv[1]);
    return 2;
  }
  std::printf("ran everything that was asked for: %d calls\n", calls);
  return 0;
}
