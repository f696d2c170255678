// Times layer norm's CUDA launchers without JAX, for tuning. A build of the package would take too
// long for this. Each figure is the median of 9 replays of a CUDA graph. The graph has 6 calls (60
// if rows are few) over three sets of buffers. With many rows, the sets are several times the L2
// cache.
//
// "of copy" compares the op's rate with cudaMemcpyAsync of an array of x's size. The op's traffic
// is the least possible. Results are compared with float64 on 128 rows and in all column sums.
//
//   nvcc -std=c++20 -arch=sm_90 -O3 --expt-relaxed-constexpr -Iffi -isystem JAXLIB/include
//     tests/gpu/time_norms.cu -o time_norms          (JAXLIB: the folder of the Python package
//     jaxlib)
//   ./time_norms [-t bf16|f16|f32|f64] [-h features,...] [-o "LN fwd"] [-x times as many rows]
//     [-r rows] [-pool bytes: all arrays in one allocation, from there on, at multiples of 256, as
//     XLA's allocator has them] [-n: no comparison] [-a 1: with a residual, or 2: and its bias; not
//     compared] and limits of the plan (RowPlanLimits in cuda/row_norm/plan.h): [-arch 80]
//     [-threads 256] [-cluster 8] [-stages 2] [-stream] [-vectors 3]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/row_norm/backward.cu"
#include "cuda/row_norm/forward.cu"
#include "driver.cuh"
#include "timing.cuh"

namespace gradops {
namespace {

struct Options {
  std::string type = "bf16", only;
  std::vector<std::int64_t> features{64,   128,  256,  512,   1000,  1024,  2048, 4096,
                                     4097, 5120, 8192, 12288, 16384, 32768, 65536};
  std::int64_t times = 1, rows = 0;
  int added = 0, pool = 0;
  bool compare = true;
  RowPlanLimits limits;
};

constexpr std::int64_t kPoolBytes = std::int64_t{8} << 30;
constexpr std::int64_t kCompared = 64;  // rows at each end

template <typename T>
__global__ void Fill(T* p, std::int64_t n, std::uint32_t seed, float size, float mean) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    auto h = static_cast<std::uint32_t>(i + seed * 77777777u) * 2654435761u;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    const float sum = (h & 0xffff) / 65536.f + (h >> 16) / 65536.f - 1.f;  // of two uniform numbers
    p[i] = static_cast<T>(2.4f * sum * size + mean);
  }
}

template <typename T>
__device__ double Wide(T value) {
  return static_cast<double>(static_cast<Accum<T>>(value));
}

__device__ double BlockSum(double value) {
  __shared__ double warps[32];
  value = WarpSum<kWarp>(value);
  __syncthreads();  // the values of the last call have been read
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();  // the values of this call have been written
  double total = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) total += warps[w];
  return total;
}

__device__ void Worst(double* worst, double error) {
  if (isnan(error)) error = 1e9;
  atomicMax(reinterpret_cast<unsigned long long*>(worst), __double_as_longlong(error));
}

// The error of y (if dx is null) or of dx against float64, relative to max(1, |expected|).
template <typename T>
__global__ void CompareRows(const T* dy, const T* x, const float* scale, const float* bias,
                            const T* y, const T* dx, std::int64_t features, bool centered,
                            std::int64_t first, double* worst) {
  const std::int64_t at = (first + blockIdx.x) * features;
  double mean = 0, square = 0, mean_wdy = 0, mean_wdy_x_hat = 0;
  const auto for_columns = [&](const auto& fn) {
    for (std::int64_t c = threadIdx.x; c < features; c += blockDim.x) fn(c);
  };
  if (centered) for_columns([&](std::int64_t c) { mean += Wide(x[at + c]); });
  mean = BlockSum(mean) / features;
  for_columns(
      [&](std::int64_t c) { square += (Wide(x[at + c]) - mean) * (Wide(x[at + c]) - mean); });
  const double rstd = 1 / sqrt(BlockSum(square) / features + 1e-6);
  const auto x_hat = [&](std::int64_t c) { return (Wide(x[at + c]) - mean) * rstd; };
  if (dx == nullptr) {
    for_columns([&](std::int64_t c) {
      const double expected = x_hat(c) * scale[c] + (centered ? bias[c] : 0.f);
      Worst(worst, fabs(Wide(y[at + c]) - expected) / fmax(1.0, fabs(expected)));
    });
    return;
  }
  const auto wdy = [&](std::int64_t c) { return Wide(dy[at + c]) * scale[c]; };
  for_columns([&](std::int64_t c) { mean_wdy += wdy(c), mean_wdy_x_hat += wdy(c) * x_hat(c); });
  mean_wdy = centered ? BlockSum(mean_wdy) / features : BlockSum(0.0);
  mean_wdy_x_hat = BlockSum(mean_wdy_x_hat) / features;
  for_columns([&](std::int64_t c) {
    const double expected = (wdy(c) - mean_wdy - x_hat(c) * mean_wdy_x_hat) * rstd;
    Worst(worst, fabs(Wide(dx[at + c]) - expected) / fmax(1.0, fabs(expected)));
  });
}

// The error of dscale against float64, relative to the sum of its terms' absolute values.
template <typename T, typename A>
__global__ void CompareSums(const T* dy, const T* x, const A* mean, const A* rstd, const A* dscale,
                            std::int64_t rows, std::int64_t features, double* worst) {
  const std::int64_t c = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (c >= features) return;
  double sum = 0, size = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double shift = mean == nullptr ? 0.0 : static_cast<double>(mean[r]);
    const double term = Wide(dy[r * features + c]) * (Wide(x[r * features + c]) - shift) * rstd[r];
    sum += term, size += fabs(term);
  }
  if (size > 0) Worst(worst, fabs(sum - dscale[c]) / size);
}

template <typename T>
void Run(const Options& options) {
  using A = Accum<T>;
  const std::int64_t elements =
      options.times * (std::int64_t{1} << 28) / std::max<std::int64_t>(2, sizeof(T));
  const std::int64_t widest = *std::max_element(options.features.begin(), options.features.end());
  const std::int64_t narrowest =
      *std::min_element(options.features.begin(), options.features.end());
  char *pool = nullptr, *pool_end = nullptr;
  const auto allocate = [&](auto*& p, std::int64_t n) {
    const auto bytes = static_cast<std::size_t>(n) * sizeof(*p);
    if (options.pool == 0) {
      Check(cudaMalloc(&p, bytes));
      return;
    }
    if (pool == nullptr) {
      const auto size = static_cast<std::size_t>(options.times * kPoolBytes);
      Check(cudaMalloc(&pool, size));
      pool_end = pool + size;
      pool += options.pool;
    }
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(pool);
    pool += (bytes + 255) / 256 * 256;
    if (pool > pool_end) std::printf("the pool is too small\n"), std::exit(1);
  };
  T *x[kSets], *dy[kSets], *y[kSets], *dx[kSets], *residual[kSets], *sum[kSets];
  for (int k = 0; k < kSets; ++k) {
    for (T** array : {&x[k], &dy[k], &y[k], &dx[k]}) allocate(*array, elements + widest);
    if (options.added > 0) {
      for (T** array : {&residual[k], &sum[k]}) allocate(*array, elements + widest);
      Fill<<<4096, 256>>>(residual[k], elements + widest, 21u + k, 1.f, 0.5f);
      Fill<<<4096, 256>>>(sum[k], elements + widest, 31u + k, 1.f, 0.5f);
    }
    Fill<<<4096, 256>>>(x[k], elements + widest, 1u + k, 1.f, 0.5f);
    Fill<<<4096, 256>>>(dy[k], elements + widest, 11u + k, 1.f, 0.3f);
  }
  float *scale, *bias;
  A *mean, *rstd, *dscale, *dbias, *dresidual_bias, *workspace;
  double* worst;
  for (float** p : {&scale, &bias}) allocate(*p, widest);
  for (A** p : {&mean, &rstd}) allocate(*p, elements / narrowest + 1);
  for (A** p : {&dscale, &dbias, &dresidual_bias}) allocate(*p, widest);
  allocate(workspace, 3 * ((std::int64_t{1} << 24) + widest));
  allocate(worst, 2);
  Fill<<<64, 256>>>(scale, widest, 5, 0.3f, 1.f);
  Fill<<<64, 256>>>(bias, widest, 6, 0.3f, 0.f);

  const auto bytes = static_cast<std::size_t>(elements) * sizeof(T);
  Check(cudaDeviceSynchronize());
  const int calls = options.rows > 0 ? 60 : 6;
  const auto copied = [&](int k) {
    Check(cudaMemcpyAsync(y[k], x[k], bytes, cudaMemcpyDeviceToDevice, Stream()));
  };
  const Timing copy = Time(copied);
  const double rate = 2.0 * static_cast<double>(bytes) / copy.median;
  std::printf("%s copy %.1f us, %.3f TB/s\n", options.type.c_str(), copy.median, rate * 1e-6);
  for (const std::int64_t features : options.features) {
    const std::int64_t rows = options.rows > 0 ? options.rows : elements / features;
    for (const bool centered : {true, false}) {
      const auto forward = [&](int k) {
        RowNormFwdArgs args{};
        args.shape = {1, rows, features}, args.dtype = kDtype<T>, args.centered = centered;
        args.epsilon = 1e-6, args.x = x[k], args.scale = {scale, 0, ffi::F32};
        if (centered) args.bias = {bias, 0, ffi::F32}, args.mean = mean;
        args.y = y[k], args.rstd = rstd;
        if (options.added > 0) args.residual = residual[k], args.sum = sum[k];
        if (options.added > 1) args.residual_bias = {bias, 0, ffi::F32};
        Check(RowNormFwd(CudaContext{Stream()}, args, options.limits));
      };
      const auto backward = [&](int k) {
        RowNormBwdArgs args{};
        args.shape = {1, rows, features}, args.dtype = kDtype<T>, args.centered = centered;
        args.dy = dy[k], args.x = x[k], args.scale = {scale, 0, ffi::F32};
        args.mean = centered ? mean : nullptr, args.rstd = rstd, args.dx = dx[k];
        args.dscale = {dscale, kDtype<A>};
        if (centered) args.dbias = {dbias, kDtype<A>};
        if (options.added > 0) args.dsum = sum[k];
        if (options.added > 1) args.dresidual_bias = {dresidual_bias, kDtype<A>};
        args.workspace = workspace;
        args.partial_rows = std::max<std::int64_t>(
            1, std::min({rows, std::int64_t{512}, (std::int64_t{1} << 23) / features}));
        Check(RowNormBwd(CudaContext{Stream()}, args, options.limits));
      };
      for (const bool is_forward : {true, false}) {
        const std::string name =
            std::string(centered ? "LN " : "RMS ") + (is_forward ? "fwd" : "bwd");
        if (name.find(options.only) == std::string::npos) continue;
        double errors[2] = {};
        Check(cudaMemset(worst, 0, sizeof(errors)));
        forward(0);  // also computes the statistics for the backward pass
        if (options.compare && options.added == 0) {
          T* const result = is_forward ? nullptr : dx[0];
          if (!is_forward) backward(0);
          Check(cudaStreamSynchronize(Stream()));
          const std::int64_t compared = std::min(rows, kCompared);
          for (const std::int64_t first : {std::int64_t{0}, rows - compared}) {
            CompareRows<<<static_cast<unsigned>(compared), 256>>>(
                dy[0], x[0], scale, bias, y[0], result, features, centered, first, worst);
          }
          if (!is_forward) {
            CompareSums<<<GridBlocks(CeilDiv(features, 64)), 64>>>(
                dy[0], x[0], centered ? mean : nullptr, rstd, dscale, rows, features, worst + 1);
          }
          Check(cudaMemcpy(errors, worst, sizeof(errors), cudaMemcpyDeviceToHost));
        }
        const Timing time = is_forward ? Time(forward, calls) : Time(backward, calls);
        const double arrays = options.added > 0 ? 4 : is_forward ? 2 : 3;
        const double traffic = arrays * rows * features * sizeof(T);
        std::printf("%s %8lld x %-6lld %-7s %7.1f us (%.1f-%.1f)  %.3f of copy  errors %.1e %.1e\n",
                    options.type.c_str(), static_cast<long long>(rows),
                    static_cast<long long>(features), name.c_str(), time.median, time.low,
                    time.high, traffic / time.median / rate, errors[0], errors[1]);
        std::fflush(stdout);
      }
    }
  }
}

int Main(int argc, char** argv) {
  Options options;
  RowPlanLimits& limits = options.limits;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    const auto number = [&] { return std::atoi(value().c_str()); };
    if (flag == "-t") {
      options.type = value();
    } else if (flag == "-h") {
      options.features.clear();
      std::string list = value();
      for (char* p = std::strtok(list.data(), ","); p != nullptr; p = std::strtok(nullptr, ",")) {
        options.features.push_back(std::atoll(p));
      }
    } else if (flag == "-o") {
      options.only = value();
    } else if (flag == "-x") {
      options.times = number();
    } else if (flag == "-r") {
      options.rows = number();
    } else if (flag == "-pool") {
      options.pool = number();
    } else if (flag == "-a") {
      options.added = number();
    } else if (flag == "-n") {
      options.compare = false;
    } else if (flag == "-arch") {
      limits.architecture = number();
    } else if (flag == "-threads") {
      limits.max_threads = number();
    } else if (flag == "-cluster") {
      limits.max_cluster = number();
    } else if (flag == "-stages") {
      limits.max_stages = number();
    } else if (flag == "-vectors") {
      limits.vectors = number();
    } else if (flag == "-stream") {
      limits.stream = true;
    } else {
      std::printf("unknown %s\n", flag.c_str());
      return 2;
    }
  }
  return ForType(options.type, [&]<typename T>() { Run<T>(options); });
}

}  // namespace
}  // namespace gradops

int main(int argc, char** argv) {
  return gradops::Main(argc, argv);
}
