// Softmax cross-entropy, CUDA. README.md has the words.
//
// Forward reads each logit once. A thread keeps the largest logit so far, and the sum of
// exp(x - largest). If a larger logit comes, the sum is multiplied by exp(old - new). The numbers
// of threads, warps and blocks are merged in the same way, in a fixed order.
//
// Backward reads each logit and writes its derivative to the same place of dx, which may be x.
#include <cooperative_groups.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/cross_entropy/plan.h"
#include "ops/cross_entropy.h"

namespace gradops {
namespace {

constexpr int kThreads = kCrossEntropyThreads;
constexpr int kLoads = kCrossEntropyLoads;

template <typename A>
inline constexpr A kInfinity = std::numeric_limits<A>::infinity();

// --- Arithmetic ----------------------------------------------------------------------------------

// exp(x) for differences of logits of type T. For 16-bit logits 22 bits are right, enough for a
// result of 11 bits and for sums.
template <typename T>
__device__ __forceinline__ Accum<T> Exp(Accum<T> x) {
  if constexpr (sizeof(T) == 2) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
    return result;
  } else if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return exp(x);
  }
}

// What is subtracted from logits: the largest one. It is 0 instead of an infinity, because the
// difference of infinities is NaN.
template <typename A>
__device__ __forceinline__ A Base(A largest) {
  return isinf(largest) ? A{0} : largest;
}

// Some logits of a row. NaN never is the largest, but it makes the total NaN.
template <typename T>
struct RowNumbers {
  using A = Accum<T>;
  A largest;
  A total;        // of exp(x - Base(largest))
  A differences;  // the sum of x - origin, for the row's origin

  static __device__ __forceinline__ RowNumbers OfNone() { return {-kInfinity<A>, 0, 0}; }

  __device__ __forceinline__ void Raise(A other) {
    const A higher = max(largest, other);
    if (higher == largest) return;
    total *= Exp<T>(largest - higher);
    largest = higher;
  }
  __device__ __forceinline__ void Merge(const RowNumbers& other) {
    const A higher = max(largest, other.largest), base = Base(higher);
    total = total * Exp<T>(largest - base) + other.total * Exp<T>(other.largest - base);
    largest = higher;
    differences += other.differences;
  }
  __device__ __forceinline__ void Add(A x, A origin) {
    Raise(x);
    total += Exp<T>(x - Base(largest));
    differences += x - origin;
  }
};

// --- Rows that start anywhere --------------------------------------------------------------------

// Elements [0, count) of an array: `head` ones before the first multiple of kBytes, vectors of 16
// bytes from there on, and the rest.
template <typename T, int kBytes>
struct Split {
  std::int64_t head, vectors, tail;

  __device__ __forceinline__ Split(const T* x, std::int64_t count) {
    const auto before = reinterpret_cast<std::uintptr_t>(x) % kBytes / sizeof(T);
    constexpr int kElements = kBytes / int{sizeof(T)};
    head = min(count, static_cast<std::int64_t>(before == 0 ? 0 : kElements - before));
    vectors = (count - head) / kVec<T>;
    tail = head + vectors * kVec<T>;
  }
};

// A vector of elements of -inf.
template <typename T>
__device__ __forceinline__ uint4 NoLogits() {
  if constexpr (std::is_same_v<T, double>) return {0, 0xfff00000u, 0, 0xfff00000u};
  const unsigned word = std::is_same_v<T, float>  ? 0xff800000u
                        : std::is_same_v<T, Half> ? 0xfc00fc00u
                                                  : 0xff80ff80u;
  return {word, word, word, word};
}

// --- Forward -------------------------------------------------------------------------------------

// The calling thread's part of x[0, count). Threads are numbered 0 to `threads` - 1.
template <typename T, bool kDifferences>
__device__ __forceinline__ RowNumbers<T> NumbersOfThread(const T* x, std::int64_t count,
                                                         Accum<T> origin, int thread, int threads) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  const Split<T, kVecBytes> split(x, count);
  RowNumbers<T> row = RowNumbers<T>::OfNone();
  for (std::int64_t i = thread; i < split.head; i += threads) row.Add(static_cast<A>(x[i]), origin);
  if (split.tail + thread < count) row.Add(static_cast<A>(x[split.tail + thread]), origin);
  const T* const body = x + split.head;
  for (std::int64_t first = thread; first < split.vectors; first += kLoads * threads) {
    Vector<T, W> vectors[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::int64_t i = first + k * threads;
      AsWords(vectors[k]) = i < split.vectors ? LoadWordsOnce(body + i * W) : NoLogits<T>();
    }
    A largest = -kInfinity<A>;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      A values[W];
      Widen(vectors[k], values);
#pragma unroll
      for (int j = 0; j < W; ++j) largest = max(largest, values[j]);
      KeepPacked(vectors[k]);
    }
    row.Raise(largest);
    const A base = Base(row.largest);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      A values[W], sum = 0;
      Widen(vectors[k], values);
#pragma unroll
      for (int j = 0; j < W; ++j) sum += Exp<T>(values[j] - base);
      row.total += sum;
      if (kDifferences && first + k * threads < split.vectors) {
        A differences = 0;
#pragma unroll
        for (int j = 0; j < W; ++j) differences += values[j] - origin;
        row.differences += differences;
      }
    }
  }
  return row;
}

template <typename T>
__device__ __forceinline__ RowNumbers<T> NumbersOfWarp(RowNumbers<T> row) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    RowNumbers<T> other;
    other.largest = __shfl_xor_sync(0xffffffffu, row.largest, distance);
    other.total = __shfl_xor_sync(0xffffffffu, row.total, distance);
    other.differences = __shfl_xor_sync(0xffffffffu, row.differences, distance);
    row.Merge(other);
  }
  return row;
}

// Merges the numbers of all warps of the blocks of a row. Only warp 0 of block 0 gets them.
template <typename T>
__device__ __forceinline__ RowNumbers<T> NumbersOfBlocks(const RowNumbers<T>& of_warp,
                                                         int cluster) {
  constexpr int kWarps = kThreads / kWarp, kMostBlocks = 8;
  __shared__ RowNumbers<T> all[kMostBlocks * kWarps];  // of block 0: the numbers of all warps
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  RowNumbers<T>* place = all + warp;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    const auto blocks = cooperative_groups::this_cluster();
    place = blocks.map_shared_rank(all, 0) + blocks.block_rank() * kWarps + warp;
    ClusterWait();  // block 0 has started
  }
#endif
  if (lane == 0) *place = of_warp;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The numbers of all blocks are in block 0's shared memory.
  if (cluster > 1) {
    cooperative_groups::this_cluster().sync();
  } else {
    __syncthreads();  // the numbers of all warps are in shared memory
  }
#else
  __syncthreads();  // the numbers of all warps are in shared memory
#endif
  RowNumbers<T> row = RowNumbers<T>::OfNone();
  if (warp == 0) {
    for (int i = lane; i < cluster * kWarps; i += kWarp) row.Merge(all[i]);
    row = NumbersOfWarp(row);
  }
  return row;
}

template <typename T, bool kDifferences>
__device__ __forceinline__ void StoreNumbers(const CrossEntropyFwdArgs& args, std::int64_t row,
                                             const RowNumbers<T>& numbers, Accum<T> origin,
                                             Accum<T> logit) {
  using A = Accum<T>;
  static_cast<A*>(args.largest)[row] = numbers.largest;
  static_cast<A*>(args.total)[row] = numbers.total;
  static_cast<A*>(args.logit_of_label)[row] = logit;
  if constexpr (kDifferences) {
    const A more = static_cast<A>(args.shape.features) * (origin - Base(numbers.largest));
    static_cast<A*>(args.sum_of_differences)[row] = numbers.differences + more;
  }
}

// The column of a row's label, which is outside [0, features) for a label of another shard.
__device__ __forceinline__ std::int64_t ColumnOf(std::int32_t label, const Param& classes,
                                                 std::int64_t row, std::int64_t rows) {
  const auto* first = static_cast<const std::int32_t*>(classes.data);
  if (classes.group_stride != 0) first += row / rows * classes.group_stride;
  return std::int64_t{label} - __ldg(first);
}

template <typename T, bool kDifferences, int kRowThreads>
__global__ void __launch_bounds__(kThreads, 4)
    ForwardKernel(const __grid_constant__ CrossEntropyFwdArgs args, int cluster) {
  using A = Accum<T>;
  constexpr int kRows = kThreads / kRowThreads;
  const auto [groups, rows, features] = args.shape;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const std::int64_t block = kRows > 1 ? ItemOfBlock() : ItemOfBlock() / cluster;
  const std::int64_t row = block * kRows + threadIdx.x / kRowThreads;
  if (row >= groups * rows) return;
  const std::int32_t label = __ldg(static_cast<const std::int32_t*>(args.labels) + row);
  const T* const x = static_cast<const T*>(args.x) + row * features;
  if (label == kIgnoredLabel) {
    if (thread == 0) StoreNumbers<T, kDifferences>(args, row, {0, 1, 0}, A{0}, A{0});
    return;
  }
  if (cluster > 1) ClusterArrive();
  A origin = 0;
  if constexpr (kDifferences) {
    origin = features > 0 ? static_cast<A>(x[0]) : A{0};
    if (!isfinite(origin)) origin = 0;
  }
  const int rank = kRows > 1 ? 0 : static_cast<int>(ItemOfBlock() % cluster);
  const std::int64_t begin = features * rank / cluster, end = features * (rank + 1) / cluster;
  RowNumbers<T> numbers = NumbersOfWarp(
      NumbersOfThread<T, kDifferences>(x + begin, end - begin, origin, thread, kRowThreads));
  if constexpr (kRows == 1) numbers = NumbersOfBlocks(numbers, cluster);
  if (thread > 0 || rank > 0) return;
  // Without classes there is nothing to read.
  const std::int64_t column = features > 0 ? ColumnOf(label, args.classes, row, rows) : -1;
  const bool has_label = column >= 0 && column < features;
  StoreNumbers<T, kDifferences>(args, row, numbers, origin,
                                has_label ? static_cast<A>(x[column]) : A{0});
}

// --- Backward ------------------------------------------------------------------------------------

// What makes the derivatives of a row.
template <typename T>
struct RowDerivative {
  using A = Accum<T>;
  A largest, factor, target, uniform;
  std::int64_t label;  // the column of the label
  bool ignored;

  __device__ __forceinline__ RowDerivative(const CrossEntropyBwdArgs& args, std::int64_t row) {
    const auto number = [row](const void* numbers) {
      return __ldg(static_cast<const A*>(numbers) + row);
    };
    const std::int32_t of_row = __ldg(static_cast<const std::int32_t*>(args.labels) + row);
    label = ColumnOf(of_row, args.classes, row, args.shape.rows);
    ignored = of_row == kIgnoredLabel;
    largest = number(args.largest), factor = number(args.factor), target = number(args.target);
    uniform = args.uniform == nullptr ? A{0} : number(args.uniform);
  }
  __device__ __forceinline__ A operator()(A x, std::int64_t column) const {
    const A derivative = factor * Exp<T>(x - largest) + uniform;
    return ignored ? A{0} : column == label ? derivative + target : derivative;
  }
  template <int W>
  __device__ __forceinline__ Vector<T, W> operator()(const Vector<T, W>& vector,
                                                     std::int64_t column) const {
    A values[W];
    Widen(vector, values);
#pragma unroll
    for (A& value : values) value = factor * Exp<T>(value - largest) + uniform;
    const std::int64_t place = label - column;
    if (place >= 0 && place < W) {
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] += j == place ? target : A{0};
    }
    return Narrow<T>(values);
  }
};

template <typename T, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    BackwardKernel(const __grid_constant__ CrossEntropyBwdArgs args, std::int64_t chunks) {
  using A = Accum<T>;
  constexpr int W = kVec<T>, kRows = kThreads / kRowThreads;
  const auto [groups, rows, features] = args.shape;
  const int thread = static_cast<int>(threadIdx.x) % kRowThreads;
  const std::int64_t item = ItemOfBlock();
  const std::int64_t row = kRows > 1 ? item * kRows + threadIdx.x / kRowThreads : item / chunks;
  const std::int64_t chunk = kRows > 1 ? 0 : item % chunks;
  if (row >= groups * rows) return;
  const T* const x = static_cast<const T*>(args.x) + row * features;
  T* const dx = static_cast<T*>(args.dx) + row * features;
  Split<T, 128> split(x, features);  // stores begin with cache lines
  if (Misalignment(x) != Misalignment(dx)) split.head = split.tail = features, split.vectors = 0;
  const RowDerivative<T> derivative(args, row);
  const auto element = [&](std::int64_t i) {
    dx[i] = static_cast<T>(derivative(static_cast<A>(x[i]), i));
  };
  if (chunk == 0) {
    for (std::int64_t i = thread; i < split.head; i += kRowThreads) element(i);
    if (split.tail + thread < features) element(split.tail + thread);
  }
  // A chunk's loads; or, for a warp, all loads of the row.
  for (std::int64_t first = chunk * kLoads * kRowThreads + thread; first < split.vectors;
       first += kRows > 1 ? kLoads * kRowThreads : split.vectors) {
    Vector<T, W> vectors[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::int64_t i = first + k * kRowThreads;
      if (i < split.vectors && !derivative.ignored) {
        AsWords(vectors[k]) = LoadWordsOnce(x + split.head + i * W);
      }
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::int64_t i = first + k * kRowThreads, column = split.head + i * W;
      if (i >= split.vectors) break;
      Vector<T, W> out = derivative(vectors[k], column);
      if (derivative.ignored) AsWords(out) = {0, 0, 0, 0};
      StoreVectorOnce(dx + column, out);
    }
  }
}

// --- Launchers -----------------------------------------------------------------------------------

CrossEntropyPlan PlanOf(const RowShape& shape, ffi::DataType dtype, bool backward) {
  const Device device = CurrentDevice();
  return ChooseCrossEntropyPlan({.shape = shape,
                                 .element_bytes = static_cast<int>(ByteWidthOf(dtype)),
                                 .backward = backward,
                                 .multiprocessors = device.multiprocessors,
                                 .has_clusters = device.architecture >= 90});
}

template <typename T, bool kDifferences>
ffi::Error Forward(cudaStream_t stream, const CrossEntropyFwdArgs& args,
                   const CrossEntropyPlan& plan) {
  const std::int64_t rows = args.shape.all_rows();
  if (rows == 0) return ffi::Error::Success();
  const Launch with(stream, BlockPerItem(CeilDiv(rows, plan.block_rows()) * plan.cluster),
                    dim3(kThreads), 0, plan.cluster);
  const auto launch = [&](auto kernel) {
    return ToError("softmax_cross_entropy_fwd",
                   cudaLaunchKernelEx(&with.config, kernel, args, plan.cluster));
  };
  return plan.row_threads == kWarp ? launch(&ForwardKernel<T, kDifferences, kWarp>)
                                   : launch(&ForwardKernel<T, kDifferences, kThreads>);
}

template <typename T>
ffi::Error Backward(cudaStream_t stream, const CrossEntropyBwdArgs& args,
                    const CrossEntropyPlan& plan) {
  if (args.shape.elements() == 0) return ffi::Error::Success();
  const std::int64_t rows = args.shape.all_rows();
  if (plan.row_threads == kWarp) {
    BackwardKernel<T, kWarp>
        <<<BlockPerItem(CeilDiv(rows, plan.block_rows())), kThreads, 0, stream>>>(args, 1);
  } else {
    BackwardKernel<T, kThreads>
        <<<BlockPerItem(rows * plan.chunks), kThreads, 0, stream>>>(args, plan.chunks);
  }
  return LastError("softmax_cross_entropy_bwd");
}

// A call with a given plan. tests/gpu/check_cross_entropy.cu has plans that this GPU does not
// choose.
ffi::Error ForwardWith(const CrossEntropyPlan& plan, cudaStream_t stream,
                       const CrossEntropyFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "softmax_cross_entropy_fwd", args.dtype, [&]<typename T>() {
    return args.sum_of_differences == nullptr ? Forward<T, false>(stream, args, plan)
                                              : Forward<T, true>(stream, args, plan);
  });
}

ffi::Error BackwardWith(const CrossEntropyPlan& plan, cudaStream_t stream,
                        const CrossEntropyBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "softmax_cross_entropy_bwd", args.dtype,
                       [&]<typename T>() { return Backward<T>(stream, args, plan); });
}

}  // namespace

ffi::Error CrossEntropyFwd(CudaContext stream, const CrossEntropyFwdArgs& args) {
  return ForwardWith(PlanOf(args.shape, args.dtype, /*backward=*/false), stream, args);
}

ffi::Error CrossEntropyBwd(CudaContext stream, const CrossEntropyBwdArgs& args) {
  return BackwardWith(PlanOf(args.shape, args.dtype, /*backward=*/true), stream, args);
}

}  // namespace gradops
