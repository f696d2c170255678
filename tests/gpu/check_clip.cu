// Runs the kernels of global norm and clipping without JAX. Trees are small and awkward, and have
// exact cudaMalloc buffers. The program is for compute-sanitizer's four tools.
//
// tests/gpu/run.sh check builds and runs it.
#include <cstdio>
#include <vector>

#include "cuda/clip/global_norm.cu"
#include "driver.cuh"

namespace gradops {
namespace {

// Adds a leaf of [groups, count] numbers. If it is not scaled in place, also adds its result.
template <typename T>
void AddTo(std::vector<Leaf>& leaves, Arrays& arrays, std::int64_t groups, std::int64_t count,
           bool in_place) {
  T* const data = arrays.Filled<T>(groups * count);
  leaves.push_back({data, count, kDtype<T>, in_place ? data : arrays.Empty<T>(groups * count)});
}

// Runs a tree of leaves with these sizes. Leaves have all dtypes in turn, float64 only if asked.
int Run(const std::vector<std::int64_t>& sizes, std::int64_t groups, bool with_double) {
  for (const bool in_place : {true, false}) {
    Arrays arrays;
    std::vector<Leaf> leaves;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      switch (i % (with_double ? 4 : 3)) {
        case 0: AddTo<float>(leaves, arrays, groups, sizes[i], in_place); break;
        case 1: AddTo<BFloat16>(leaves, arrays, groups, sizes[i], in_place); break;
        case 2: AddTo<Half>(leaves, arrays, groups, sizes[i], in_place); break;
        default: AddTo<double>(leaves, arrays, groups, sizes[i], in_place);
      }
    }
    SumOfSquaresArgs sum{};
    sum.groups = groups, sum.leaves = leaves, sum.dtype = with_double ? ffi::F64 : ffi::F32;
    sum.workspace_doubles = groups * CeilDiv(kMaxPartialSums, groups);
    sum.workspace = arrays.Empty<double>(sum.workspace_doubles);
    for (void** result : {&sum.huge, &sum.normal, &sum.tiny}) {
      *result = with_double ? static_cast<void*>(arrays.Empty<double>(groups))
                            : static_cast<void*>(arrays.Empty<float>(groups));
    }
    for (Leaf& leaf : sum.leaves) leaf.result = nullptr;
    Check(SumOfSquares(CudaContext{nullptr}, sum));
    ScaleArgs scale{.groups = groups,
                    .leaves = leaves,
                    .dtype = sum.dtype,
                    .factors = sum.normal,
                    .second_factors = sum.huge};
    Check(Scale(CudaContext{nullptr}, scale));
    // The first and the last of three groups are not scaled.
    scale.second_factors = sum.normal;
    const float narrow[] = {1, 0.5f, 1};
    const double wide[] = {1, 0.5, 1};
    const auto width = with_double ? sizeof(double) : sizeof(float);
    if (groups <= 3) {
      Check(cudaMemcpy(sum.normal, with_double ? static_cast<const void*>(wide) : narrow,
                       static_cast<std::size_t>(groups) * width, cudaMemcpyHostToDevice));
      Check(Scale(CudaContext{nullptr}, scale));
    }
    Check(cudaDeviceSynchronize());
  }
  return 2;
}

int RunAll() {
  int calls = 0;
  for (const bool with_double : {false, true}) {
    for (const std::int64_t groups : {1, 3, 700}) {
      calls += Run({1}, groups, with_double);
      calls += Run({1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 255, 1000}, groups, with_double);
    }
    for (const std::int64_t groups : {1, 3}) {
      calls += Run({4095, 4096, 4097, 8192, 16'385, 65'537, 100'003, 262'144}, groups, with_double);
    }
    calls += Run(std::vector<std::int64_t>(300, 5), 1, with_double);   // two tables, one is large
    calls += Run(std::vector<std::int64_t>(2100, 3), 1, with_double);  // two large tables
    calls += Run({3'000'001, 2'000'000, 1'000'003}, 1, with_double);   // several chunks per block
  }
  return calls;
}

}  // namespace
}  // namespace gradops

int main() {
  std::printf("ran everything that was asked for: %d calls\n", gradops::RunAll());
  return 0;
}
