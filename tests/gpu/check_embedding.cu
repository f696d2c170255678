// Runs the kernels of the embedding's gradient without JAX, on small awkward shapes and exact
// cudaMalloc buffers, and compares the sums. For compute-sanitizer's four tools.
//
// tests/gpu/run.sh check builds and runs it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/embedding/embedding.cu"
#include "driver.cuh"

namespace gradops {
namespace {

// The occurrences that have random rows: all of them, a quarter, none. Others have one row in the
// middle, which several warps and blocks share, or no row.
enum class Rows { kRandom, kOneOften, kOne, kSomeOutside };

std::int32_t RowOf(Rows rows, std::int64_t i, std::int64_t table_rows) {
  const auto number =
      static_cast<std::int32_t>((Random() + 1) / 2 * 0.999 * static_cast<double>(table_rows));
  if (rows == Rows::kOne || (rows == Rows::kOneOften && i % 4 != 0)) {
    return static_cast<std::int32_t>(table_rows / 2);
  }
  if (rows != Rows::kSomeOutside || i % 3 != 0) return number;
  return i % 2 == 0 ? -1 : static_cast<std::int32_t>(table_rows) + number;
}

template <typename T, typename O>
int Run(const RowShape& shape, std::int64_t table_rows, Rows rows) {
  using A = Accum<T>;
  Arrays arrays;
  const auto [groups, count, features] = shape;
  // Small integers: each order of the additions gives the same sum.
  Array<T> x(shape.elements(), 0, arrays,
             [](std::int64_t) { return static_cast<int>(8 * Random()); });
  std::vector<std::int32_t> own(static_cast<std::size_t>(groups * count));
  for (std::size_t i = 0; i < own.size(); ++i) {
    own[i] = RowOf(rows, static_cast<std::int64_t>(i), table_rows);
  }
  std::int32_t* const on_device = arrays.Empty<std::int32_t>(groups * count);
  Check(cudaMemcpy(on_device, own.data(), own.size() * 4, cudaMemcpyHostToDevice));
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(table_rows));
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::int32_t>(i);
  std::int32_t* const numbers_there = arrays.Empty<std::int32_t>(table_rows);
  Check(cudaMemcpy(numbers_there, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice));
  Array<O> dtable(groups * table_rows * features, 0, arrays);

  // As in jax_gradops/_ops/embedding/embedding.py.
  const std::int64_t blocks = CeilDiv(count + table_rows + 1, std::int64_t{128});
  const std::int64_t bytes = 20 * count + blocks * (16 * features + 4) + (1 << 13);
  EmbeddingBwdArgs args{};
  args.shape = shape, args.dtype = kDtype<T>, args.table_rows = table_rows;
  args.x = x.device, args.indices = on_device, args.numbers = {numbers_there, 0, ffi::S32};
  args.dtable = {dtable.device, kDtype<O>};
  args.partial_rows = CeilDiv(bytes, 4 * features * groups);
  args.workspace = arrays.Empty<A>(groups * args.partial_rows * features);
  Check(EmbeddingBwd(CudaContext{nullptr}, args));
  Check(cudaDeviceSynchronize());

  dtable.Download();
  std::vector<double> expected(dtable.host.size());
  for (std::int64_t i = 0; i < groups * count; ++i) {
    const std::int32_t row = own[static_cast<std::size_t>(i)];
    if (row < 0 || row >= table_rows) continue;
    const std::int64_t to = (i / count * table_rows + row) * features;
    for (std::int64_t f = 0; f < features; ++f) {
      expected[static_cast<std::size_t>(to + f)] += x[i * features + f];
    }
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double found = dtable[static_cast<std::int64_t>(i)];
    if (std::abs(found - expected[i]) <= kUnit<O> * std::abs(expected[i])) continue;
    std::printf("[%ld, %ld, %ld] into %ld rows, distribution %d: %g instead of %g at %zu\n", groups,
                count, features, table_rows, static_cast<int>(rows), found, expected[i], i);
    std::exit(1);
  }
  return 1;
}

template <typename T, typename O>
int RunAll() {
  int calls = 0;
  for (const Rows rows : {Rows::kRandom, Rows::kOneOften, Rows::kOne, Rows::kSomeOutside}) {
    for (const std::int64_t features : {1, 7, 24, 260}) {
      for (const std::int64_t table_rows : {1, 5, 50, 1000}) {
        for (const std::int64_t count : {1, 9, 33, 200, 3000}) {
          calls += Run<T, O>({1, count, features}, table_rows, rows);
        }
      }
    }
    calls += Run<T, O>({3, 100, 24}, 40, rows) + Run<T, O>({1, 9000, 8}, 20, rows);
  }
  return calls;
}

}  // namespace
}  // namespace gradops

int main() {
  using namespace gradops;
  const int calls = RunAll<BFloat16, float>() + RunAll<BFloat16, BFloat16>() +
                    RunAll<float, float>() + RunAll<float, Half>() + RunAll<double, double>();
  std::printf("ran everything: %d calls\n", calls);
}
