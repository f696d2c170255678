// GELU and bias + GELU, CUDA.
//
// With a bias a thread owns one pack of columns, so that bias and the bias gradient's sum stay in
// registers, and strides over rows with several of them under way. A block is a tile of columns and
// a slice of rows; narrow rows share a block. Without a bias the array is flat. A pack is 16 bytes
// where all rows start at 16-byte boundaries, else one element.
//
// Backward recomputes gelu'(x + bias), writes dx, and leaves one partial row of dbias per slice of
// rows, which column_sum.cuh adds in a fixed order. dx may be dy's buffer: every element is read by
// the thread that writes it, before it does. Traffic: x read, y written; dy and x read, dx written.
// Formulas: common/gelu.h.
#include <algorithm>
#include <cstdint>

#include "common/gelu.h"
#include "cuda/column_sum.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "ops/bias_gelu.h"

namespace gradops {
namespace {

constexpr int kThreads = 256;
// Packs of x (backward: and of dy) that a thread works on, while as many more are under way.
constexpr int kBatch = 2;
// Asked of the compiler, which then has 128 registers a thread and does not spill.
constexpr int kBlocks = 2;
// Rows whose dz a thread adds up before it adds that to the sum, so that rounding errors hardly
// grow with the number of rows.
constexpr std::int64_t kRowsPerSum = 128;
// Enough blocks that multiprocessors run out of work together; backward each leaves a partial row.
constexpr int kForwardBlocksPerMultiprocessor = 16;
constexpr int kBackwardBlocksPerMultiprocessor = 4;

// y, or dx where kBackward, for one pack; adds dx before rounding to `sums`.
template <typename T, bool kApproximate, bool kBackward, int W>
__device__ __forceinline__ Pack<T, W> Apply(const Pack<T, W>& x, const Pack<T, W>& dy,
                                            const Accum<T> (&bias)[W], Accum<T> (&sums)[W]) {
  using A = Accum<T>;
  Pack<T, W> out;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const A z = static_cast<A>(x.v[j]) + bias[j];
    if constexpr (kBackward) {
      const A dz = static_cast<A>(dy.v[j]) * GeluDerivative<T, kApproximate>(z);
      sums[j] += dz;
      out.v[j] = static_cast<T>(dz);
    } else {
      out.v[j] = static_cast<T>(Gelu<T, kApproximate>(z));
    }
  }
  return out;
}

// A thread's packs: `count` of them, `stride` elements apart.
template <typename T, bool kApproximate, bool kBackward, int W>
__device__ __forceinline__ void ApplyEach(const T* dy, const T* x, T* out, std::int64_t stride,
                                          std::int64_t count, const Accum<T> (&bias)[W],
                                          Accum<T> (&sums)[W]) {
  struct Batch {
    Pack<T, W> x[kBatch], dy[kBatch];
  };
  const auto load = [&](Batch& batch, std::int64_t first) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k < count) {
        batch.x[k] = LoadPackOnce<W>(x + (first + k) * stride);
        if constexpr (kBackward) batch.dy[k] = LoadPackOnce<W>(dy + (first + k) * stride);
      }
    }
  };
  Batch batch, next;
  load(batch, 0);
  for (std::int64_t first = 0; first < count; first += kBatch) {
    load(next, first + kBatch);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k < count) {
        StorePack(out + (first + k) * stride,
                  Apply<T, kApproximate, kBackward>(batch.x[k], batch.dy[k], bias, sums));
      }
    }
    batch = next;
  }
}

// How many of start, start + step, ... lie below end.
__device__ __forceinline__ std::int64_t StepsBelow(std::int64_t end, std::int64_t start,
                                                   std::int64_t step) {
  return start < end ? (end - start + step - 1) / step : 0;
}

// --- Flat arrays ---------------------------------------------------------------------------------

// Elements [0, count), of which those after the last whole pack go one by one.
template <typename T, bool kApproximate, bool kBackward, int W>
__global__ void __launch_bounds__(kThreads, kBlocks)
    FlatKernel(const T* dy, const T* x, T* out, std::int64_t count) {
  const Accum<T> no_bias[W] = {};
  Accum<T> no_sums[W] = {};
  const std::int64_t packs = count / W;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  ApplyEach<T, kApproximate, kBackward>(kBackward ? dy + thread * W : nullptr, x + thread * W,
                                        out + thread * W, step * W, StepsBelow(packs, thread, step),
                                        no_bias, no_sums);
  if constexpr (W > 1) {
    const std::int64_t rest = packs * W + thread;
    if (rest < count) {
      const Accum<T> zero[1] = {};
      Accum<T> unused[1] = {};
      Pack<T, 1> dy_rest{};
      if constexpr (kBackward) dy_rest = LoadPackOnce<1>(dy + rest);
      StorePack(out + rest, Apply<T, kApproximate, kBackward>(LoadPackOnce<1>(x + rest), dy_rest,
                                                              zero, unused));
    }
  }
}

// --- Rows with a bias ----------------------------------------------------------------------------

// How rows are cut: a block has `lanes` packs of columns, and kThreads / lanes rows at a time.
struct Cut {
  int lanes;            // a power of two
  std::int64_t tiles;   // of columns
  std::int64_t slices;  // of a group's rows
};

// Partial sums of dbias: slice s of group g writes sums + (g * group_pitch + s * slice_pitch).
template <typename A>
struct SliceSums {
  A* sums;  // null if not wanted
  std::int64_t group_pitch, slice_pitch;
};

// One block per (group, slice, tile).
template <typename T, bool kApproximate, bool kBackward, int W>
__global__ void __launch_bounds__(kThreads, kBlocks)
    RowsKernel(const T* dy, const T* x, T* out, Param bias_param, RowShape shape, Cut cut,
               SliceSums<Accum<T>> slice_sums) {
  using A = Accum<T>;
  __shared__ A shared[kBackward ? W * kThreads : 1];
  const int lanes = cut.lanes, rows_at_once = kThreads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int row_in_block = static_cast<int>(threadIdx.x) / lanes;
  const std::int64_t step = cut.slices * rows_at_once;
  const std::int64_t items = shape.groups * cut.slices * cut.tiles;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::int64_t slice = item / cut.tiles % cut.slices;
    const std::int64_t group = item / cut.tiles / cut.slices;
    const std::int64_t column = (item % cut.tiles * lanes + lane) * W;
    const bool inside = column < shape.features;
    A bias[W] = {}, sums[W] = {};
    if (inside) {
      if (bias_param.data != nullptr) {
        const A* const p = static_cast<const A*>(bias_param.data) + group * bias_param.group_stride;
#pragma unroll
        for (int j = 0; j < W; ++j) bias[j] = __ldg(p + column + j);
      }
      const std::int64_t first_row = slice * rows_at_once + row_in_block;
      const std::int64_t base = (group * shape.rows + first_row) * shape.features + column;
      const std::int64_t count = StepsBelow(shape.rows, first_row, step);
      const std::int64_t stride = step * shape.features;
      constexpr bool kCutSums = kBackward && !std::is_same_v<A, double>;
      for (std::int64_t done = 0; done < count; done += kRowsPerSum) {
        A part[W] = {};
        const std::int64_t offset = base + done * stride;
        ApplyEach<T, kApproximate, kBackward>(
            kBackward ? dy + offset : nullptr, x + offset, out + offset, stride,
            kCutSums ? min(count - done, kRowsPerSum) : count, bias, part);
#pragma unroll
        for (int j = 0; j < W; ++j) sums[j] += part[j];
        if (!kCutSums) break;
      }
    }
    if constexpr (kBackward) {
      if (slice_sums.sums == nullptr) continue;  // the same for all threads
      A* const partial =
          slice_sums.sums + group * slice_sums.group_pitch + slice * slice_sums.slice_pitch;
      if (rows_at_once > 1) {
#pragma unroll
        for (int j = 0; j < W; ++j) shared[j * kThreads + threadIdx.x] = sums[j];
        __syncthreads();  // all sums are written
        if (row_in_block == 0) {
          for (int r = 1; r < rows_at_once; ++r) {
#pragma unroll
            for (int j = 0; j < W; ++j) sums[j] += shared[j * kThreads + r * lanes + lane];
          }
        }
        __syncthreads();  // all sums are read before the next item's are written
      }
      if (row_in_block == 0 && inside) {
#pragma unroll
        for (int j = 0; j < W; ++j) partial[column + j] = sums[j];
      }
    }
  }
}

// --- Launchers -----------------------------------------------------------------------------------

// max_slices: what the workspace holds, where dbias is wanted.
Cut CutRows(const RowShape& shape, int width, int blocks_per_multiprocessor,
            std::int64_t max_slices) {
  const std::int64_t packs = CeilDiv(shape.features, width);
  Cut cut{.lanes = 1, .tiles = 0, .slices = 0};
  while (cut.lanes < kThreads && cut.lanes < packs) cut.lanes *= 2;
  cut.tiles = CeilDiv(packs, cut.lanes);
  const std::int64_t blocks = std::int64_t{blocks_per_multiprocessor} * MultiprocessorCount();
  const std::int64_t useful = CeilDiv(shape.rows, kThreads / cut.lanes);
  cut.slices = std::clamp<std::int64_t>(blocks / (cut.tiles * shape.groups), 1,
                                        std::max<std::int64_t>(1, std::min(useful, max_slices)));
  return cut;
}

template <typename T, bool kApproximate, bool kBackward, int W>
void LaunchFlat(cudaStream_t stream, const void* dy, const void* x, void* out, std::int64_t count) {
  const std::int64_t blocks =
      std::min(CeilDiv(CeilDiv(count, W), kThreads * kBatch),
               std::int64_t{kForwardBlocksPerMultiprocessor} * MultiprocessorCount());
  FlatKernel<T, kApproximate, kBackward, W><<<GridBlocks(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<T*>(out), count);
}

template <typename T, bool kApproximate>
ffi::Error Forward(cudaStream_t stream, const BiasGeluFwdArgs& args) {
  constexpr const char* kOp = "bias_gelu_fwd";
  const std::int64_t count = args.shape.elements();
  if (count == 0) return ffi::Error::Success();
  const bool aligned = Aligned(args.x, args.y);
  if (args.bias.data == nullptr) {
    if (aligned) {
      LaunchFlat<T, kApproximate, false, kVec<T>>(stream, nullptr, args.x, args.y, count);
    } else {
      LaunchFlat<T, kApproximate, false, 1>(stream, nullptr, args.x, args.y, count);
    }
    return LastError(kOp);
  }
  const auto launch = [&]<int W>() {
    const Cut cut = CutRows(args.shape, W, kForwardBlocksPerMultiprocessor, args.shape.rows);
    RowsKernel<T, kApproximate, false, W>
        <<<GridBlocks(args.shape.groups * cut.slices * cut.tiles), kThreads, 0, stream>>>(
            nullptr, static_cast<const T*>(args.x), static_cast<T*>(args.y), args.bias, args.shape,
            cut, {});
  };
  if (aligned && args.shape.features % kVec<T> == 0) {
    launch.template operator()<kVec<T>>();
  } else {
    launch.template operator()<1>();
  }
  return LastError(kOp);
}

template <typename T, bool kApproximate>
ffi::Error Backward(cudaStream_t stream, const BiasGeluBwdArgs& args) {
  using A = Accum<T>;
  constexpr const char* kOp = "bias_gelu_bwd";
  const auto [groups, rows, features] = args.shape;
  auto* const dbias = static_cast<A*>(args.dbias);
  ColumnSums wanted;
  wanted.Add({dbias, kDtype<A>});
  if (args.shape.elements() == 0) {
    if (dbias == nullptr) return ffi::Error::Success();
    return ToError(kOp, ZeroColumnSums(stream, wanted, groups, features));
  }
  const bool aligned = Aligned(args.dy, args.x, args.dx);
  if (args.bias.data == nullptr && dbias == nullptr) {
    if (aligned) {
      LaunchFlat<T, kApproximate, true, kVec<T>>(stream, args.dy, args.x, args.dx,
                                                 args.shape.elements());
    } else {
      LaunchFlat<T, kApproximate, true, 1>(stream, args.dy, args.x, args.dx, args.shape.elements());
    }
    return LastError(kOp);
  }
  std::int64_t slices = 1;
  const auto launch = [&]<int W>() {
    const Cut cut = CutRows(args.shape, W, kBackwardBlocksPerMultiprocessor,
                            dbias == nullptr ? args.shape.rows : args.partial_rows);
    slices = cut.slices;
    const SliceSums<A> sums =
        slices == 1 || dbias == nullptr
            ? SliceSums<A>{dbias, args.shape.features, 0}
            : SliceSums<A>{static_cast<A*>(args.workspace), args.partial_rows * args.shape.features,
                           args.shape.features};
    RowsKernel<T, kApproximate, true, W>
        <<<GridBlocks(args.shape.groups * cut.slices * cut.tiles), kThreads, 0, stream>>>(
            static_cast<const T*>(args.dy), static_cast<const T*>(args.x), static_cast<T*>(args.dx),
            args.bias, args.shape, cut, sums);
  };
  if (aligned && features % kVec<T> == 0) {
    launch.template operator()<kVec<T>>();
  } else {
    launch.template operator()<1>();
  }
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return ToError(kOp, status);
  if (slices > 1 && dbias != nullptr) {
    return ToError(kOp, LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted,
                                           groups, args.partial_rows, slices, features));
  }
  return LastError(kOp);
}

}  // namespace

ffi::Error BiasGeluFwd(CudaContext stream, const BiasGeluFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "bias_gelu_fwd", args.dtype, [&]<typename T>() {
    return args.approximate ? Forward<T, true>(stream, args) : Forward<T, false>(stream, args);
  });
}

ffi::Error BiasGeluBwd(CudaContext stream, const BiasGeluBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "bias_gelu_bwd", args.dtype, [&]<typename T>() {
    return args.approximate ? Backward<T, true>(stream, args) : Backward<T, false>(stream, args);
  });
}

}  // namespace gradops
