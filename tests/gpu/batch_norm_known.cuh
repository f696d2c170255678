// Tests of batch norm's driver with results that are known without the formulas.
//
// This file is included after the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "batch_norm_cases.cuh"
#include "driver.cuh"

namespace gradops {
namespace {

// Channels that are numerically hard. One is constant, one has a large mean, and one has a first
// element far from the others. Two have NaN or infinity, which must not change other channels.
int RunHard(const Size& size) {
  const Case c{size, {}};
  Arrays arrays;
  const Array<float> x(c.elements(), 0, arrays, [&](std::int64_t i) {
    const std::int64_t channel = i / c.inner % c.channels;
    const double value = Random();
    const bool first = i < c.channels * c.inner && i % c.inner == 0;
    if (channel == 0) return 1234567.0;
    if (channel == 1) return 1e6 + value;
    if (channel == 2 && first) return 1e5;
    if (channel == 3 && value > 0.999) return static_cast<double>(NAN);
    if (channel == 4 && value > 0.999) return static_cast<double>(INFINITY);
    return value;
  });
  Array<float> y(c.elements(), 0, arrays);
  Array<float> mean(c.channels, 0, arrays), variance(c.channels, 0, arrays);
  Array<float> rstd(c.channels, 0, arrays), delta(c.channels, 0, arrays);
  BatchNormFwdArgs fwd{};
  fwd.shape = {{1, c.rows, c.channels}, c.inner}, fwd.dtype = kDtype<float>, fwd.epsilon = 1e-3;
  fwd.x = x.device, fwd.y = y.device;
  fwd.batch_mean = mean.device, fwd.batch_variance = variance.device;
  fwd.batch_rstd = rstd.device, fwd.batch_delta = delta.device;
  fwd.partial_rows = 512, fwd.workspace = arrays.Empty<float>(512 * 4 * c.channels);
  Check(BatchNormFwd(CudaContext{nullptr}, fwd));
  Check(cudaDeviceSynchronize());
  y.Download(), mean.Download(), variance.Download(), rstd.Download(), delta.Download();
  for (std::int64_t channel = 0; channel < c.channels; ++channel) {
    const bool lost = channel == 3 || channel == 4;
    double sum = 0, square = 0;
    for (std::int64_t i = 0; i < c.terms(); ++i) sum += x[c.at(0, channel, i)];
    const double want = sum / static_cast<double>(c.terms());
    for (std::int64_t i = 0; i < c.terms(); ++i) {
      square += (x[c.at(0, channel, i)] - want) * (x[c.at(0, channel, i)] - want);
      const bool is_nan = std::isnan(y[c.at(0, channel, i)]);
      Near(c, "NaN", c.at(0, channel, i), is_nan ? 1 : 0, lost ? 1 : 0, 0);
    }
    if (lost) continue;
    square /= static_cast<double>(c.terms());
    Near(c, "mean", channel, mean[channel] + delta[channel], want, 1e-6 * std::sqrt(square) + 1e-9);
    Near(c, "variance", channel, variance[channel], square, channel == 0 ? 0 : 1e-5 * square);
  }
  return 1;
}

// A tile's blocks may be a cluster, or may synchronize through the grid. Results are bitwise equal.
int RunBarriers(ChannelDevice device) {
  const Case c{{1, 4096, 2048, 1}, {}};
  device.multiprocessors = 64;  // all clusters fit, however multiprocessors are grouped
  for (const bool backward : {false, true}) {
    ChannelTask task = TaskOf<float>(backward, {{1, c.rows, c.channels}, c.inner}, device);
    task.aligned = task.statistics = task.apply = true, task.partial_rows = 512;
    if (!ChooseBatchNormPlan(task).channels.fits_cluster()) {
      std::printf("%s: no clusters\n", c.Text().c_str());
      std::exit(1);
    }
  }
  Arrays arrays;
  const auto random = [](std::int64_t) { return Random(); };
  const Array<float> x(c.elements(), 0, arrays, random), dy(c.elements(), 0, arrays, random);
  const auto run = [&] {
    Array<float> y(c.elements(), 0, arrays), dx(c.elements(), 0, arrays);
    Array<float> statistics[4] = {{c.channels, 0, arrays},
                                  {c.channels, 0, arrays},
                                  {c.channels, 0, arrays},
                                  {c.channels, 0, arrays}};
    Array<float> sums[2] = {{c.channels, 0, arrays}, {c.channels, 0, arrays}};
    float* const workspace = arrays.Empty<float>(512 * 4 * c.channels);
    BatchNormFwdArgs fwd{};
    fwd.shape = {{1, c.rows, c.channels}, c.inner}, fwd.dtype = kDtype<float>, fwd.epsilon = 1e-3;
    fwd.x = x.device, fwd.y = y.device;
    fwd.batch_mean = statistics[0].device, fwd.batch_variance = statistics[1].device;
    fwd.batch_rstd = statistics[2].device, fwd.batch_delta = statistics[3].device;
    fwd.partial_rows = 512, fwd.workspace = workspace;
    Check(BatchNormFwdOn(device, nullptr, fwd));
    BatchNormBwdArgs bwd{};
    bwd.shape = fwd.shape, bwd.dtype = fwd.dtype, bwd.dy = dy.device, bwd.x = x.device;
    bwd.mean = {statistics[0].device, 0, kDtype<float>};
    bwd.rstd = {statistics[2].device, 0, kDtype<float>};
    bwd.delta = {statistics[3].device, 0, kDtype<float>};
    bwd.dx = dx.device, bwd.partial_rows = 512, bwd.workspace = workspace;
    bwd.dscale = {sums[0].device, kDtype<float>}, bwd.dbias = {sums[1].device, kDtype<float>};
    Check(BatchNormBwdOn(device, nullptr, bwd));
    Check(cudaDeviceSynchronize());
    std::vector<float> all;
    for (auto* array : {&y, &dx, &statistics[0], &statistics[1], &statistics[2], &statistics[3],
                        &sums[0], &sums[1]}) {
      array->Download();
      all.insert(all.end(), array->host.begin(), array->host.end());
    }
    return all;
  };
  const std::vector<float> clustered = run();
  device.clusters = false;
  const std::vector<float> grid = run();
  if (std::memcmp(clustered.data(), grid.data(), clustered.size() * sizeof(float)) != 0) {
    std::printf("%s: a cluster's results are others than the grid's\n", c.Text().c_str());
    std::exit(1);
  }
  return 4;
}

// Without elements, the kernels must give the statistics and sums of nothing.
template <typename T>
int RunEmpty() {
  using A = Accum<T>;
  Arrays arrays;
  Array<A> results[4] = {{3, 0, arrays}, {3, 0, arrays}, {3, 0, arrays}, {3, 0, arrays}};
  BatchNormFwdArgs fwd{};
  fwd.shape = {{1, 0, 3}, 1}, fwd.bundles = 3, fwd.dtype = kDtype<T>, fwd.epsilon = 0.25;
  fwd.batch_mean = results[0].device, fwd.batch_variance = results[1].device;
  fwd.batch_rstd = results[2].device, fwd.batch_delta = results[3].device;
  Check(BatchNormFwd(CudaContext{nullptr}, fwd));
  Array<A> sums[2] = {{3, 0, arrays}, {3, 0, arrays}};
  BatchNormBwdArgs bwd{};
  bwd.shape = fwd.shape, bwd.dtype = fwd.dtype;
  bwd.dscale = {sums[0].device, kDtype<A>}, bwd.dbias = {sums[1].device, kDtype<A>};
  Check(BatchNormBwd(CudaContext{nullptr}, bwd));
  Check(cudaDeviceSynchronize());
  const Case c{{1, 0, 3, 1}, {}};
  for (int i = 0; i < 4; ++i) {
    results[i].Download();
    for (int k = 0; k < 3; ++k) Near(c, "of nothing", k, results[i][k], i == 2 ? 2.0 : 0.0, 1e-6);
  }
  for (auto& sum : sums) {
    sum.Download();
    for (int k = 0; k < 3; ++k) Near(c, "sum of nothing", k, sum[k], 0, 0);
  }
  return 2;
}

}  // namespace
}  // namespace gradops
