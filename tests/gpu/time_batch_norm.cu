// Times batch norm's CUDA launchers without JAX, for tuning. A build of the package would take too
// long for this. Each figure is the median of 9 replays of a CUDA graph. The graph has 6 calls over
// three sets of buffers.
//
// "of copy" compares the op's rate with cudaMemcpyAsync of an array of x's size. The op's traffic
// is counted without caches. Forward it is 3 arrays (x twice, y). Backward it is 5 arrays (dy and x
// twice, dx). check_batch_norm.cu compares results; this program does not.
//
//   nvcc -std=c++20 -arch=sm_90 -O3 --expt-relaxed-constexpr -Iffi -isystem JAXLIB/include
//     tests/gpu/time_batch_norm.cu -o time_batch_norm    (JAXLIB: the folder of the Python package
//     jaxlib)
//   ./time_batch_norm [-t bf16|f16|f32|f64] [-l last|first] [-o fwd|bwd] [-s 256x56x56x64 (batch,
//     two of space, channels)] [-relu] [-residual] [-statistics: these alone]
//     [-groups 32: group norm] [-silu: of group norm]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/batch_norm/backward.cu"
#include "cuda/batch_norm/bundle_backward.cu"
#include "cuda/batch_norm/bundle_forward.cu"
#include "cuda/batch_norm/forward.cu"
#include "driver.cuh"
#include "timing.cuh"

namespace gradops {
namespace {

struct Shape {
  std::int64_t batch, height, width, channels;
  std::int64_t elements() const { return batch * height * width * channels; }
};

struct Options {
  std::string type = "bf16", layout, only;
  std::vector<Shape> shapes{{256, 112, 112, 64}, {256, 56, 56, 256},  {256, 56, 56, 64},
                            {256, 28, 28, 128},  {256, 14, 14, 1024}, {256, 14, 14, 256},
                            {256, 7, 7, 2048},   {256, 7, 7, 512}};
  bool relu = false, residual = false, statistics = false, silu = false;
  std::int64_t groups = 0;  // of group norm; 0: batch norm
};

constexpr std::int64_t kAllPartialRows = 512;

template <typename T>
void Run(const Options& options, const Shape& of) {
  using A = Accum<T>;
  Arrays arrays;
  const std::int64_t n = of.elements(), channels = of.channels;
  T *x[kSets], *dy[kSets], *y[kSets], *dx[kSets], *residual[kSets], *dresidual[kSets];
  for (int k = 0; k < kSets; ++k) {
    x[k] = arrays.Filled<T>(n), dy[k] = arrays.Filled<T>(n);
    y[k] = arrays.Empty<T>(n), dx[k] = arrays.Empty<T>(n);
    residual[k] = options.residual ? arrays.Filled<T>(n) : nullptr;
    dresidual[k] = options.residual && options.relu ? arrays.Empty<T>(n) : nullptr;
  }
  const Param scale{arrays.Filled<float>(channels), 0, ffi::F32};
  const Param bias{arrays.Filled<float>(channels), 0, ffi::F32};
  const bool grouped = options.groups > 0;
  const std::int64_t samples = grouped ? of.batch : 1, numbers = samples * channels;
  const std::int64_t bundle = grouped ? channels / options.groups : 1;
  const std::int64_t partial_rows = kAllPartialRows / samples;
  A* const mean = arrays.Empty<A>(numbers);
  A* const variance = arrays.Empty<A>(numbers);
  A* const rstd = arrays.Empty<A>(numbers);
  A* const delta = arrays.Empty<A>(numbers);
  A* const dscale = arrays.Empty<A>(numbers);
  A* const dbias = arrays.Empty<A>(numbers);
  A* const workspace = arrays.Empty<A>(kAllPartialRows * 4 * channels);
  const auto bytes = static_cast<std::size_t>(n) * sizeof(T);
  Check(cudaDeviceSynchronize());
  const Timing copy = Time([&](int k) {
    Check(cudaMemcpyAsync(y[k], x[k], bytes, cudaMemcpyDeviceToDevice, Stream()));
  });
  const double rate = 2.0 * static_cast<double>(bytes) / copy.median;
  for (const bool last : {true, false}) {
    if (!options.layout.empty() && options.layout != (last ? "last" : "first")) continue;
    const std::int64_t space = of.height * of.width;
    const std::int64_t rows = of.batch / samples;
    const ChannelShape shape{{samples, last ? rows * space : rows, channels}, last ? 1 : space};
    const auto forward = [&](int k) {
      BatchNormFwdArgs args{};
      args.shape = shape, args.dtype = kDtype<T>, args.epsilon = 1e-5;
      args.relu = options.relu, args.silu = options.silu, args.bundle = bundle;
      args.x = x[k], args.residual = residual[k], args.scale = scale, args.bias = bias;
      args.y = options.statistics ? nullptr : y[k];
      args.batch_mean = mean, args.batch_variance = variance;
      args.batch_rstd = rstd, args.batch_delta = delta;
      args.workspace = workspace, args.partial_rows = partial_rows;
      Check(BatchNormFwd(CudaContext{Stream()}, args));
    };
    const auto backward = [&](int k) {
      BatchNormBwdArgs args{};
      args.shape = shape, args.dtype = kDtype<T>;
      args.relu = options.relu, args.silu = options.silu, args.bundle = bundle;
      args.dy = dy[k], args.x = x[k], args.y = options.residual ? y[k] : nullptr;
      args.scale = scale, args.bias = bias;
      const std::int64_t stride = grouped ? options.groups : 0;
      args.mean = {mean, stride, kDtype<A>}, args.rstd = {rstd, stride, kDtype<A>};
      args.delta = {delta, stride, kDtype<A>};
      args.dx = options.statistics ? nullptr : dx[k], args.dresidual = dresidual[k];
      args.dscale = {dscale, kDtype<A>}, args.dbias = {dbias, kDtype<A>};
      args.workspace = workspace, args.partial_rows = partial_rows;
      Check(BatchNormBwd(CudaContext{Stream()}, args));
    };
    for (const bool is_forward : {true, false}) {
      if (!options.only.empty() && options.only != (is_forward ? "fwd" : "bwd")) continue;
      forward(0);
      const Timing time = is_forward ? Time(forward) : Time(backward);
      const double traffic = (is_forward ? 3.0 : 5.0) * static_cast<double>(bytes);
      std::printf(
          "%s %lldx%lldx%lldx%-4lld %-5s %s %7.1f us (%.1f-%.1f)  %.3f of copy (%.1f us, %.3f "
          "TB/s)\n",
          options.type.c_str(), static_cast<long long>(of.batch), static_cast<long long>(of.height),
          static_cast<long long>(of.width), static_cast<long long>(channels),
          last ? "last" : "first", is_forward ? "fwd" : "bwd", time.median, time.low, time.high,
          traffic / time.median / rate, copy.median, rate * 1e-6);
      std::fflush(stdout);
    }
  }
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (flag == "-t") {
      options.type = value();
    } else if (flag == "-l") {
      options.layout = value();
    } else if (flag == "-o") {
      options.only = value();
    } else if (flag == "-s") {
      long long n[4] = {};
      if (std::sscanf(value().c_str(), "%lldx%lldx%lldx%lld", n, n + 1, n + 2, n + 3) != 4)
        return 2;
      options.shapes = {{n[0], n[1], n[2], n[3]}};
    } else if (flag == "-relu") {
      options.relu = true;
    } else if (flag == "-silu") {
      options.silu = true;
    } else if (flag == "-groups") {
      options.groups = std::atoll(value().c_str());
    } else if (flag == "-residual") {
      options.residual = true;
    } else if (flag == "-statistics") {
      options.statistics = true;
    } else {
      std::printf("unknown %s\n", flag.c_str());
      return 2;
    }
  }
  for (const Shape& shape : options.shapes) {
    const int status = ForType(options.type, [&]<typename T>() { Run<T>(options, shape); });
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace
}  // namespace gradops

int main(int argc, char** argv) {
  return gradops::Main(argc, argv);
}
