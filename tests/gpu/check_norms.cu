// Runs the kernels of layer norm and RMS norm in all dtypes, also with plans that this GPU does not
// choose. Shapes are small and awkward, and cudaMalloc buffers are exact. The program is for
// compute-sanitizer's four tools. It runs without JAX: no other kernels run, and initcheck knows
// all writes.
//
// tests/gpu/run.sh check builds and runs it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/row_norm/backward.cu"
#include "cuda/row_norm/forward.cu"
#include "driver.cuh"

namespace gradops {
namespace {

// The options of a call.
struct Variant {
  bool centered = true, sum = false, from_output = false, parameters = true, narrow = false;
  bool offset = false, residual_bias = false;
  std::int64_t groups = 1;
};

template <typename T>
void Run(std::int64_t rows, std::int64_t features, const Variant& v, const RowPlanLimits& limits) {
  using A = Accum<T>;
  Arrays arrays;
  const RowShape shape{v.groups, rows, features};
  const std::int64_t n = shape.elements(), all_rows = shape.all_rows();
  const std::int64_t parameters = v.groups * features, stride = v.groups > 1 ? features : 0;
  const auto parameter = [&]() -> Param {
    if (!v.parameters) return {};
    if (v.narrow) return {arrays.Filled<BFloat16>(parameters), stride, ffi::BF16};
    return {arrays.Filled<A>(parameters), stride, kDtype<A>};
  };
  RowNormFwdArgs fwd{};
  fwd.shape = shape, fwd.dtype = kDtype<T>, fwd.centered = v.centered, fwd.epsilon = 1e-6;
  fwd.scale_offset = v.offset ? 1.0 : 0.0;
  fwd.x = arrays.Filled<T>(n), fwd.y = arrays.Empty<T>(n);
  if (v.sum) fwd.residual = arrays.Filled<T>(n), fwd.sum = arrays.Empty<T>(n);
  if (v.residual_bias) fwd.residual_bias = parameter();
  fwd.scale = parameter();
  if (v.centered) fwd.bias = parameter(), fwd.mean = arrays.Empty<A>(all_rows);
  fwd.rstd = arrays.Empty<A>(all_rows);
  Check(RowNormFwd(CudaContext{nullptr}, fwd, limits));
  Check(cudaDeviceSynchronize());

  RowNormBwdArgs bwd{};
  bwd.shape = shape, bwd.dtype = kDtype<T>, bwd.centered = v.centered;
  bwd.epsilon = fwd.epsilon, bwd.scale_offset = fwd.scale_offset;
  bwd.from_output = v.from_output, bwd.dy = arrays.Filled<T>(n), bwd.rstd = fwd.rstd;
  bwd.x = v.from_output ? fwd.y : fwd.x, bwd.dx = arrays.Empty<T>(n);
  if (v.sum) bwd.dsum = fwd.sum;
  bwd.scale = fwd.scale;
  if (v.from_output) bwd.bias = fwd.bias;
  if (v.centered && !v.from_output) bwd.mean = fwd.mean;
  if (v.parameters) {
    bwd.partial_rows = rows;
    const int sums = 1 + v.centered + v.residual_bias;
    bwd.workspace = arrays.Empty<A>(v.groups * rows * sums * features);
    bwd.dscale = {arrays.Empty<A>(parameters), kDtype<A>};
    if (v.centered) bwd.dbias = {arrays.Empty<A>(parameters), kDtype<A>};
    if (v.residual_bias) bwd.dresidual_bias = {arrays.Empty<A>(parameters), kDtype<A>};
  }
  Check(RowNormBwd(CudaContext{nullptr}, bwd, limits));
  Check(cudaDeviceSynchronize());
}

// The cases to run; -1 or empty selects all.
struct Filter {
  std::vector<std::string> dtypes;
  std::int64_t plan = -1, features = -1, rows = -1, variant = -1;
};

template <typename T>
int RunAll(const char* dtype, const Filter& filter) {
  // max_threads = 32 alone gives clusters of more than 8 blocks. For nine blocks, synccheck (CUDA
  // 13.0) reports "missing wait". It does so for any program with such clusters
  // (benchmarks/tuning/README.md).
  const RowPlanLimits plans[] = {{},
                                 {.architecture = 80},
                                 {.max_cluster = 8, .max_threads = 32},
                                 {.stream = true},
                                 {.max_stages = 2},
                                 {.max_threads = 32},
                                 {.vectors = 3}};
  const Variant variants[] = {{},
                              {.centered = false},
                              {.sum = true, .narrow = true, .residual_bias = true},
                              {.from_output = true},
                              {.centered = false, .sum = true, .from_output = true},
                              {.parameters = false},
                              {.groups = 3},
                              {.offset = true},
                              {.centered = false, .narrow = true},
                              {.sum = true, .residual_bias = true, .groups = 3},
                              {.centered = false, .sum = true, .residual_bias = true},
                              {.sum = true, .from_output = true, .residual_bias = true}};
  const std::int64_t widths[] = {1,    7,    40,   64,   257,   1000, 2049,
                                 2560, 3000, 4096, 8193, 16385, 40000};
  const auto wanted = [](std::int64_t only, std::int64_t value) {
    return only < 0 || only == value;
  };
  int calls = 0;
  if (!filter.dtypes.empty() &&
      std::find(filter.dtypes.begin(), filter.dtypes.end(), dtype) == filter.dtypes.end()) {
    return 0;
  }
  for (std::int64_t plan = 0; plan < std::ssize(plans); ++plan) {
    for (const std::int64_t features : widths) {
      if ((plans[plan].max_threads != 0 || plans[plan].vectors != 0) && features > 10000) continue;
      // 300 rows: more than one per multiprocessor. 1061 rows: blocks have several, one after
      // another.
      for (const std::int64_t rows : {1, 5, 67, 300, 1061}) {
        if (rows == 300 && features > 1000) continue;
        if (rows == 1061 && features != 257 && features != 2049 && features != 2560) continue;
        for (std::int64_t variant = 0; variant < std::ssize(variants); ++variant) {
          if (!wanted(filter.plan, plan) || !wanted(filter.features, features) ||
              !wanted(filter.rows, rows) || !wanted(filter.variant, variant)) {
            continue;
          }
          Doing() = std::string(dtype) + " -plan " + std::to_string(plan) + " -features " +
                    std::to_string(features) + " -rows " + std::to_string(rows) + " -variant " +
                    std::to_string(variant);
          Run<T>(rows, features, variants[variant], plans[plan]);
          ++calls;
        }
      }
    }
  }
  std::printf("%s: %d calls forward and backward\n", dtype, calls);
  std::fflush(stdout);
  return calls;
}

}  // namespace
}  // namespace gradops

// check_norms [f32|bf16|f16|f64 ...] [-plan N] [-features N] [-rows N] [-variant N]
int main(int argc, char** argv) {
  gradops::Filter filter;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    std::int64_t* const number = flag == "-plan"       ? &filter.plan
                                 : flag == "-features" ? &filter.features
                                 : flag == "-rows"     ? &filter.rows
                                 : flag == "-variant"  ? &filter.variant
                                                       : nullptr;
    if (number == nullptr) {
      filter.dtypes.push_back(flag);
    } else if (i + 1 < argc) {
      *number = std::atoll(argv[++i]);
    }
  }
  const int calls =
      gradops::RunAll<float>("f32", filter) + gradops::RunAll<gradops::BFloat16>("bf16", filter) +
      gradops::RunAll<gradops::Half>("f16", filter) + gradops::RunAll<double>("f64", filter);
  std::printf("ran everything that was asked for: %d calls\n", calls);
  return calls > 0 ? 0 : 2;
}
