// Times global norm's CUDA launchers without JAX, in the way of time_gelu.cu. The leaves are
// GPT-2's (124M). It times the norm alone, and the norm with in-place clipping, with and without
// something to clip. A kernel between them computes the factor, as in XLA's program.
//
//   nvcc -std=c++20 -arch=sm_90 -O3 --expt-relaxed-constexpr -Iffi -isystem JAXLIB/include
//     tests/gpu/time_clip.cu -o time_clip    (JAXLIB: the folder of the Python package jaxlib)
//   ./time_clip [types: bf16 f32]
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/clip/global_norm.cu"
#include "driver.cuh"
#include "timing.cuh"

namespace gradops {
namespace {

__global__ void FactorKernel(const float* normal, float* factors, float wanted) {
  factors[0] = *normal >= 0 ? wanted : 0;
  factors[1] = 1;
}

std::vector<std::int64_t> Gpt2Leaves() {
  constexpr std::int64_t kWidth = 768;
  std::vector<std::int64_t> sizes{50257 * kWidth, 1024 * kWidth};
  for (int layer = 0; layer < 12; ++layer) {
    for (const std::int64_t columns : {3, 1, 4, 4}) {
      sizes.push_back(columns * kWidth * kWidth), sizes.push_back(columns * kWidth);
    }
    for (int i = 0; i < 4; ++i) sizes.push_back(kWidth);
  }
  sizes.push_back(kWidth), sizes.push_back(kWidth);
  return sizes;
}

template <typename T>
void Run(const char* type) {
  const std::vector<std::int64_t> sizes = Gpt2Leaves();
  Arrays arrays;
  std::vector<Leaf> trees[kSets];
  std::int64_t elements = 0;
  for (auto& tree : trees) {
    for (const std::int64_t size : sizes) {
      T* const data = arrays.Filled<T>(size);
      tree.push_back({data, size, kDtype<T>, data});
    }
  }
  for (const std::int64_t size : sizes) elements += size;
  SumOfSquaresArgs sum{};
  sum.groups = 1, sum.dtype = ffi::F32, sum.workspace_doubles = kMaxPartialSums;
  sum.workspace = arrays.Empty<double>(sum.workspace_doubles);
  for (void** result : {&sum.huge, &sum.normal, &sum.tiny}) *result = arrays.Empty<float>(1);
  float* const factors = arrays.Empty<float>(2);
  const auto bytes = static_cast<std::size_t>(elements) * sizeof(T);
  void* const from = arrays.Empty<T>(elements);
  void* const to = arrays.Empty<T>(elements);
  Check(cudaDeviceSynchronize());
  const Timing copy = Time(
      [&](int) { Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Stream())); });
  const auto norm = [&](int k) {
    sum.leaves = trees[k];
    for (Leaf& leaf : sum.leaves) leaf.result = nullptr;
    Check(SumOfSquares(CudaContext{Stream()}, sum));
  };
  const auto clip = [&](int k, float wanted) {
    norm(k);
    FactorKernel<<<1, 1, 0, Stream()>>>(static_cast<const float*>(sum.normal), factors, wanted);
    Check(Scale(CudaContext{Stream()}, ScaleArgs{.groups = 1,
                                                 .leaves = trees[k],
                                                 .dtype = ffi::F32,
                                                 .factors = factors,
                                                 .second_factors = factors + 1}));
  };
  const auto print = [&](const char* what, double reads, const Timing& time) {
    std::printf("%-4s %-14s %7.1f us (%.1f-%.1f)  %.3f of copy (%.1f us)\n", type, what,
                time.median, time.low, time.high, reads / 2 * copy.median / time.median,
                copy.median);
    std::fflush(stdout);
  };
  print("norm", 1, Time(norm));
  print("nothing to clip", 1, Time([&](int k) { clip(k, 1); }));
  print("clip", 3, Time([&](int k) { clip(k, 0.999f); }));
}

}  // namespace
}  // namespace gradops

int main(int argc, char** argv) {
  std::vector<std::string> types(argv + 1, argv + argc);
  if (types.empty()) types = {"bf16", "f32"};
  for (const std::string& type : types) {
    const int status = gradops::ForType(type, [&]<typename T>() { gradops::Run<T>(type.c_str()); });
    if (status != 0) return status;
  }
  return 0;
}
