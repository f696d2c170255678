// Times GELU's CUDA launchers without JAX, for tuning. A build of the package would take too long
// for this. Each figure is the median of 9 replays of a CUDA graph. The graph has 6 calls (60 if
// arrays are small) over three sets of buffers.
//
// "of copy" compares the op's rate with cudaMemcpyAsync of an array of x's size. The op's traffic
// is the least possible. Backward writes over dy. Tests compare results; this program does not.
//
//   nvcc -std=c++20 -arch=sm_90 -O3 --expt-relaxed-constexpr -Iffi -isystem JAXLIB/include
//     tests/gpu/time_gelu.cu -o time_gelu    (JAXLIB: the folder of the Python package jaxlib)
//   ./time_gelu [-t bf16,f32] [-s 32768x4096,... (rows, features)] [-f tanh|exact] [-o fwd|bwd]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/gelu/bias_gelu.cu"
#include "driver.cuh"
#include "timing.cuh"

namespace gradops {
namespace {

struct Options {
  std::string form, only;
  std::vector<RowShape> shapes{{1, 32768, 4096}};
};

template <typename T>
void Run(const Options& options, const char* type, const RowShape& shape) {
  using A = Accum<T>;
  Arrays arrays;
  T *x[kSets], *y[kSets];
  for (int k = 0; k < kSets; ++k) {
    x[k] = arrays.Filled<T>(shape.elements()), y[k] = arrays.Filled<T>(shape.elements());
  }
  const Param bias{arrays.Filled<A>(shape.features), 0, kDtype<A>};
  BiasGeluBwdArgs bwd{};
  bwd.shape = shape, bwd.dtype = kDtype<T>, bwd.bias = bias;
  bwd.partial_rows = std::max<std::int64_t>(  // about column_sum_workspace
      1, std::min<std::int64_t>({shape.rows, 512, (std::int64_t{1} << 23) / shape.features}));
  bwd.workspace = arrays.Empty<A>(bwd.partial_rows * shape.features);
  bwd.dbias = arrays.Empty<A>(shape.features);
  const auto bytes = static_cast<std::size_t>(shape.elements()) * sizeof(T);
  const int calls = bytes < (1 << 24) ? 60 : 6;
  Check(cudaDeviceSynchronize());
  // The driver copies at only 2.7 TB/s if the bytes are no multiple of 16, or are 512 MB.
  const std::size_t copied =
      bytes < 4096 ? bytes : std::min<std::size_t>(bytes, 1 << 28) / 4096 * 4096;
  const float copy =
      static_cast<float>(bytes) / static_cast<float>(copied) *
      Time(
          [&](int k) {
            Check(cudaMemcpyAsync(y[k], x[k], copied, cudaMemcpyDeviceToDevice, Stream()));
          },
          calls)
          .median;
  for (const bool approximate : {true, false}) {
    if (!options.form.empty() && options.form != (approximate ? "tanh" : "exact")) continue;
    for (const bool is_forward : {true, false}) {
      if (!options.only.empty() && options.only != (is_forward ? "fwd" : "bwd")) continue;
      const Timing time = Time(
          [&](int k) {
            if (is_forward) {
              Check(BiasGeluFwd(CudaContext{Stream()}, BiasGeluFwdArgs{.shape = shape,
                                                                       .dtype = kDtype<T>,
                                                                       .approximate = approximate,
                                                                       .x = x[k],
                                                                       .bias = bias,
                                                                       .y = y[k]}));
            } else {
              BiasGeluBwdArgs args = bwd;
              args.approximate = approximate, args.x = x[k], args.dy = args.dx = y[k];
              Check(BiasGeluBwd(CudaContext{Stream()}, args));
            }
          },
          calls);
      std::printf("%-4s %8lldx%-6lld %-5s %s %7.1f us (%.1f-%.1f)  %.3f of copy (%.1f us)\n", type,
                  static_cast<long long>(shape.rows), static_cast<long long>(shape.features),
                  approximate ? "tanh" : "exact", is_forward ? "fwd" : "bwd", time.median, time.low,
                  time.high, (is_forward ? 1.0 : 1.5) * copy / time.median, copy);
      std::fflush(stdout);
    }
  }
}

int Main(int argc, char** argv) {
  Options options;
  std::vector<std::string> types{"bf16"};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto values = [&] {
      std::vector<std::string> all;
      std::stringstream text(i + 1 < argc ? argv[++i] : "");
      for (std::string one; std::getline(text, one, ',');) all.push_back(one);
      return all;
    };
    if (flag == "-t") {
      types = values();
    } else if (flag == "-f") {
      options.form = values().at(0);
    } else if (flag == "-o") {
      options.only = values().at(0);
    } else if (flag == "-s") {
      options.shapes.clear();
      for (const std::string& text : values()) {
        long long rows = 0, features = 0;
        if (std::sscanf(text.c_str(), "%lldx%lld", &rows, &features) != 2) return 2;
        options.shapes.push_back({1, rows, features});
      }
    } else {
      std::printf("unknown %s\n", flag.c_str());
      return 2;
    }
  }
  for (const RowShape& shape : options.shapes) {
    for (const std::string& type : types) {
      const int status = ForType(type, [&]<typename T>() { Run<T>(options, type.c_str(), shape); });
      if (status != 0) return status;
    }
  }
  return 0;
}

}  // namespace
}  // namespace gradops

int main(int argc, char** argv) {
  return gradops::Main(argc, argv);
}
