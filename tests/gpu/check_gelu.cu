// Runs GELU's kernels without JAX, on small awkward shapes and exact cudaMalloc buffers. This part
// is for compute-sanitizer's four tools. The argument "sweep" instead compares the float formulas
// on all floats with long expressions in double on the GPU.
//
// tests/gpu/run.sh check and sweep build and run it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/gelu/bias_gelu.cu"
#include "driver.cuh"

namespace gradops {
namespace {

// --- Small shapes --------------------------------------------------------------------------------

template <typename T>
int Run(const RowShape& shape, bool bias, bool dbias, bool approximate, bool shared = false,
        std::int64_t most_partial_rows = 40) {
  using A = Accum<T>;
  Arrays arrays;
  const std::int64_t n = shape.elements(), parameters = shape.groups * shape.features;
  const T* const x = arrays.Filled<T>(n);
  const Param param =
      bias ? Param{arrays.Filled<A>(parameters), shared ? 0 : shape.features, kDtype<A>} : Param{};
  Check(BiasGeluFwd(CudaContext{nullptr}, BiasGeluFwdArgs{.shape = shape,
                                                          .dtype = kDtype<T>,
                                                          .approximate = approximate,
                                                          .x = x,
                                                          .bias = param,
                                                          .y = arrays.Empty<T>(n)}));
  BiasGeluBwdArgs bwd{};
  bwd.shape = shape, bwd.dtype = kDtype<T>, bwd.approximate = approximate;
  bwd.dy = arrays.Filled<T>(n), bwd.x = x, bwd.bias = param;
  bwd.dx = approximate ? const_cast<void*>(bwd.dy) : arrays.Empty<T>(n);
  if (dbias) {
    bwd.partial_rows =
        std::clamp<std::int64_t>(512 / shape.groups, 1, std::min(shape.rows, most_partial_rows));
    bwd.workspace = arrays.Empty<A>(shape.groups * bwd.partial_rows * shape.features);
    bwd.dbias = arrays.Empty<A>(parameters);
  }
  Check(BiasGeluBwd(CudaContext{nullptr}, bwd));
  Check(cudaDeviceSynchronize());
  return 1;
}

template <typename T>
int RunAll() {
  int calls = 0;
  for (const std::int64_t features : {1, 3, 8, 24, 33, 129, 1000, 4096, 5001}) {
    for (const std::int64_t rows : {1, 5, 67, 300}) {
      for (const std::int64_t groups : {1, 3}) {
        for (const bool approximate : {true, false}) {
          const RowShape shape{groups, rows, features};
          calls += Run<T>(shape, true, true, approximate);
          calls += Run<T>(shape, false, false, approximate);
          if (features == 24) calls += Run<T>(shape, false, true, approximate, true);
          if (features == 129) calls += Run<T>(shape, true, true, approximate, true);
          if (features < 1000) calls += Run<T>(shape, true, false, approximate);
        }
      }
    }
  }
  // Blocks have whole spans, or spans that end at cache lines.
  for (const bool approximate : {true, false}) {
    calls += Run<T>({1, 200003, 33}, true, true, approximate, false, 512);
    calls += Run<T>({1, 6601, 1001}, true, true, approximate, false, 512);
    calls += Run<T>({1, 7801, 840}, true, true, approximate, false, 512);
    calls += Run<T>({1, 1951, 3336}, true, true, approximate, false, 512);
  }
  // More groups than partial rows.
  calls += Run<T>({100, 16, 129}, true, true, true) + Run<T>({300, 3, 11}, true, true, false);
  // More groups than one launch takes.
  calls += Run<T>({70001, 1, 8}, true, true, true) + Run<T>({70001, 2, 3}, true, false, false);
  return calls;
}

// --- All floats ----------------------------------------------------------------------------------

struct Errors {
  // value: of y for x > -3, and derivative: of y', in units in the last place. tail: of y for other
  // x, relative.
  double value, derivative, tail;
};

__device__ void Worst(double* worst, double error) {
  atomicMax(reinterpret_cast<unsigned long long*>(worst), __double_as_longlong(error));
}

// One unit in the last place of the float next to x.
__device__ double Spacing(double x) {
  int exponent;
  frexp(fmax(fabs(x), 0x1p-126), &exponent);
  return ldexp(1.0, exponent - 24);
}

template <bool kApproximate>
__global__ void Sweep(Errors* errors) {
  Errors worst{};
  const auto threads = std::uint64_t{gridDim.x} * blockDim.x;
  for (auto bits = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; bits < 1ull << 32;
       bits += threads) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(bits));
    const auto tail = GeluTail<float, kApproximate>(x);
    const double y = Gelu<float, kApproximate>(tail);
    const double slope = GeluDerivative<float, kApproximate>(tail);
    if (isnan(x) || isnan(y) || isnan(slope)) {
      if (!isnan(x) || !isnan(y) || !isnan(slope)) worst.value = 1e300;
      continue;
    }
    // Beyond 40, y is 0 or x.
    const double a = fmin(fmax(static_cast<double>(x), -40.0), 40.0);
    double weight, want_slope;
    if constexpr (kApproximate) {
      const double c = 2 * 0.79788456080286535588;  // 2 sqrt(2/pi)
      const double v = c * (a + 0.044715 * a * a * a);
      weight = 1 / (1 + exp(-v));
      want_slope = weight + a * weight * (1 / (1 + exp(v))) * c * (1 + 3 * 0.044715 * a * a);
    } else {
      weight = 0.5 * erfc(-a * 0.70710678118654752440);
      want_slope = weight + a * 0.39894228040143267794 * exp(-0.5 * a * a);
    }
    const double want = x < -40.f ? 0.0 : static_cast<double>(x) * weight;
    const double tiny = 0x1p-126;  // an error by underflow is allowed
    const double error = isinf(want) && y == want ? 0.0 : fmax(0.0, fabs(y - want) - tiny);
    if (x > -3.f) {
      worst.value = fmax(worst.value, error / Spacing(isinf(want) ? 1.0 : want));
    } else {
      worst.tail = fmax(worst.tail, error == 0 ? 0.0 : error / fmax(fabs(want), 1e-300));
    }
    worst.derivative =
        fmax(worst.derivative, fabs(slope - want_slope) / Spacing(fmax(fabs(want_slope), 0.125)));
  }
  Worst(&errors->value, worst.value);
  Worst(&errors->derivative, worst.derivative);
  Worst(&errors->tail, worst.tail);
}

template <bool kApproximate>
bool SweepAll() {
  Errors *errors, found;
  Check(cudaMalloc(&errors, sizeof(Errors)));
  Check(cudaMemset(errors, 0, sizeof(Errors)));
  Sweep<kApproximate><<<4096, 256>>>(errors);
  Check(cudaGetLastError());
  Check(cudaMemcpy(&found, errors, sizeof(Errors), cudaMemcpyDeviceToHost));
  Check(cudaFree(errors));
  std::printf("%s, all floats: y %.2f ulp for x > -3, %.1e relative below; y' %.2f ulp\n",
              kApproximate ? "tanh" : "exact", found.value, found.tail, found.derivative);
  // The promises of jax_gradops.gelu.
  return found.value <= (kApproximate ? 16 : 8) && found.tail <= (kApproximate ? 2e-5 : 1e-6) &&
         found.derivative <= 8;
}

}  // namespace
}  // namespace gradops

int main(int argc, char** argv) {
  using namespace gradops;
  if (argc > 1 && std::strcmp(argv[1], "sweep") == 0) {
    const bool tanh = SweepAll<true>(), exact = SweepAll<false>();
    return tanh && exact ? 0 : 1;
  }
  const int calls = RunAll<float>() + RunAll<BFloat16>() + RunAll<Half>() + RunAll<double>();
  std::printf("ran everything that was asked for: %d calls\n", calls);
  return 0;
}
