// GELU and bias + GELU, CUDA. README.md has the words and a picture.
//
// Backward recomputes gelu'(x + bias) and writes dx. For dbias, it leaves one partial row per
// slice, or one per slice and row of a band. A kernel in column_sum.cuh adds up these rows in a
// fixed order. Array dx may be dy's buffer: a thread reads each element before it writes that
// element. Traffic: forward reads x and writes y; backward reads dy and x, and writes dx. The
// formulas are in common/gelu.h.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/gelu.h"
#include "cuda/common/column_sum.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/gelu/plan.h"
#include "ops/bias_gelu.h"

namespace gradops {
namespace {

constexpr int kStages = 2;  // vectors of each array that a thread of backward has under way
// A thread adds up dz of this many bands before it adds the result to the sum. Rounding errors then
// hardly grow with the number of rows.
constexpr int kBandsPerSum = 128;

// A thread's place in every band, and its first band.
struct Place {
  std::int64_t vector;  // number in a band
  std::int64_t first;   // first band
  bool inside;

  __device__ Place(const GeluPlan& plan, std::int64_t slice) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int band = thread * plan.inverse >> 20;  // thread / tile_vectors
    vector = std::int64_t{blockIdx.x} * plan.tile_vectors + (thread - band * plan.tile_vectors);
    first = slice * plan.block_bands + band;
    inside = vector < plan.band_vectors && band < plan.block_bands;
  }
};

// The part of the bias for a vector of a band; zeros if there is no bias.
template <typename A, int W>
__device__ __forceinline__ void LoadBias(const Param& param, const GeluPlan& plan,
                                         std::int64_t group, std::int64_t features,
                                         std::int64_t vector, A (&bias)[W]) {
#pragma unroll
  for (A& value : bias) value = 0;
  if (param.data == nullptr) return;
  const A* const all = static_cast<const A*>(param.data) + group * param.group_stride;
  if constexpr (W % kVec<A> == 0) {
    if (plan.band_rows == 1 && Aligned(all)) {
#pragma unroll
      for (int j = 0; j < W; j += kVec<A>) {
        const auto part = LoadVector<kVec<A>>(all + vector * W + j);
#pragma unroll
        for (int k = 0; k < kVec<A>; ++k) bias[j + k] = part.v[k];
      }
      return;
    }
  }
  std::int64_t column = vector * W;
  if (plan.band_rows > 1) column %= features;
  if (column + W <= features) {
#pragma unroll
    for (int j = 0; j < W; ++j) bias[j] = __ldg(all + column + j);
    return;
  }
#pragma unroll
  for (A& value : bias) {
    value = __ldg(all + column);
    if (++column == features) column = 0;
  }
}

// --- Forward -------------------------------------------------------------------------------------

template <typename T, bool kApproximate, int W>
__global__ void __launch_bounds__(kGeluThreads, kGeluForwardBlocks)
    GeluForwardKernel(const __grid_constant__ BiasGeluFwdArgs args,
                      const __grid_constant__ GeluPlan plan, std::int64_t first_slice,
                      std::int64_t first_group) {
  using A = Accum<T>;
  constexpr int kMost = MostGeluVectors(sizeof(T));
  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = first_group + blockIdx.z, slice = first_slice + blockIdx.y;
  const Place place(plan, slice * plan.thread_vectors);
  if (!place.inside) return;
  const std::int64_t first = place.first * plan.band_vectors + place.vector;
  const T* const x = static_cast<const T*>(args.x) + group * rows * features + first * W;
  T* const y = static_cast<T*>(args.y) + group * rows * features + first * W;
  const std::int64_t stride = plan.block_bands * plan.band_vectors;
  const std::int64_t left = plan.vectors - first;
  const auto has = [&](int k) { return k < plan.thread_vectors && k * stride < left; };
  const A limit = gelu::LimitOf<T, kApproximate, false>(args.strict);
  const auto value = [limit](A z) {
    return Gelu<T, kApproximate>(GeluTail<T, kApproximate>(gelu::NanBeyond<false>(limit, z)));
  };
  Vector<T, W> vectors[kMost];
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (has(k)) vectors[k] = LoadVectorOnce<W>(x + k * stride * W);
  }
  A bias[W];
  LoadBias(args.bias, plan, group, features, place.vector, bias);
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    if (!has(k)) continue;
    A values[W];
    Widen(vectors[k], values);
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = value(values[j] + bias[j]);
    StoreVectorOnce(y + k * stride * W, Narrow<T>(values));
  }
  // The elements after the last whole vector: the thread that would have the next vector takes
  // them.
  if (plan.rest == 0 || slice + 1 < plan.slices) return;
  for (int k = 0; k < plan.thread_vectors; ++k) {
    if (k * stride != left) continue;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (j >= plan.rest) continue;
      const std::int64_t i = left * W + j;
      y[i] = static_cast<T>(value(static_cast<A>(x[i]) + bias[j]));
    }
  }
}

// --- Backward ------------------------------------------------------------------------------------

// Partial sums of dbias: slice s of group g writes sums + (g * group_pitch + s * slice_pitch).
template <typename A>
struct SliceSums {
  A* sums;  // null if not wanted
  std::int64_t group_pitch, slice_pitch;
};

// The arrays of backward. dx may be dy. Vectors are counted from the arrays' beginning.
template <typename T>
struct GradArrays {
  const T *dy, *x;
  T* dx;
};

// Computes dx of a thread's vectors in a slice, and adds up the thread's dz to `sums`. `stages` has
// the thread's stages, kMostGeluThreads apart: dy's vector and x's vector of each stage.
template <typename T, bool kApproximate, int W>
__device__ __forceinline__ void ForSlice(const BiasGeluBwdArgs& args, const GradArrays<T>& arrays,
                                         const GeluPlan& plan, std::int64_t group,
                                         const Place& place,
                                         Vector<T, W> (*stages)[kMostGeluThreads], Accum<T>* sums) {
  using A = Accum<T>;
  constexpr bool kCutSums = !std::is_same_v<A, double>;
  constexpr bool kPipeline = W > 1;  // asynchronous copies to shared memory are of 16 bytes
  const auto [dy, x, dx] = arrays;
  const A limit = gelu::LimitOf<T, kApproximate, true>(args.strict);
  const std::int64_t stride = plan.slices * plan.block_bands * plan.band_vectors;
  const std::int64_t group_end = (group + 1) * plan.vectors;
  std::int64_t vector = group * plan.vectors + place.first * plan.band_vectors + place.vector;
  const auto fetch = [&](std::int64_t from, int stage) {
    if (from < group_end) {
      CopyAsync(&stages[2 * stage][threadIdx.x], dy + from * W);
      CopyAsync(&stages[2 * stage + 1][threadIdx.x], x + from * W);
    }
    CommitCopies();
  };
  if constexpr (kPipeline) {
    for (int k = 0; k < kStages; ++k) fetch(vector + k * stride, k);
  }
  int stage = 0;
  A bias[W];
  LoadBias(args.bias, plan, group, args.shape.features, place.vector, bias);
  A part[W] = {};
  const auto dx_of = [&](const Vector<T, W>& of_dy, const Vector<T, W>& of_x) {
    A dz[W], z[W];
    Widen(of_x, z);
    Widen(of_dy, dz);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const A argument = gelu::NanBeyond<true>(limit, z[j] + bias[j]);
      dz[j] *= GeluDerivative<T, kApproximate>(GeluTail<T, kApproximate>(argument));
      part[j] += dz[j];
    }
    return Narrow<T>(dz);
  };
  const auto end_part = [&] {
#pragma unroll
    for (int j = 0; j < W; ++j) sums[j] += part[j], part[j] = 0;
  };
  while (vector < group_end) {
    const std::int64_t end = kCutSums ? min(group_end, vector + kBandsPerSum * stride) : group_end;
#pragma unroll 1
    for (; vector < end; vector += stride) {
      Vector<T, W> out;
      if constexpr (kPipeline) {
        WaitForCopies<kStages - 1>();
        out = dx_of(stages[2 * stage][threadIdx.x], stages[2 * stage + 1][threadIdx.x]);
        fetch(vector + kStages * stride, stage);
        stage = (stage + 1) % kStages;
      } else {
        out = dx_of(LoadVectorOnce<W>(dy + vector * W), LoadVectorOnce<W>(x + vector * W));
      }
      StoreVectorOnce(dx + vector * W, out);
    }
    end_part();
  }
  if (plan.rest > 0 && vector == group_end) {  // the elements after the last whole vector
    Vector<T, W> of_dy{}, of_x{};
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (j < plan.rest) of_dy.v[j] = dy[vector * W + j], of_x.v[j] = x[vector * W + j];
    }
    const auto out = dx_of(of_dy, of_x);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (j < plan.rest) dx[vector * W + j] = out.v[j];
    }
    end_part();
  }
}

// Adds up a block's sums, [block_bands][elements of a tile], to a slice's partial rows.
template <typename A, int W>
__device__ __forceinline__ void AddUpSlice(const GeluPlan& plan, const RowShape& shape,
                                           const A* shared, A* partial) {
  const auto [groups, rows, features] = shape;
  const int elements = plan.tile_vectors * W;
  const auto add_up = [&](int element) {
    A total = shared[element];
    for (int r = 1; r < plan.block_bands; ++r) total += shared[r * elements + element];
    return total;
  };
  if (plan.one_tile()) {
    for (int column = static_cast<int>(threadIdx.x); column < features;
         column += static_cast<int>(blockDim.x)) {
      A total = add_up(column);
      for (int row = 1; row < plan.band_rows; ++row) {
        total += add_up(row * static_cast<int>(features) + column);
      }
      partial[column] = total;
    }
  } else {
    const std::int64_t first = std::int64_t{blockIdx.x} * elements;
    const std::int64_t end = min(plan.band_vectors * W, rows * features);
    for (int i = static_cast<int>(threadIdx.x); i < elements && first + i < end;
         i += static_cast<int>(blockDim.x)) {
      partial[first + i] = add_up(i);
    }
  }
}

template <typename T, bool kApproximate, int W>
__global__ void __launch_bounds__(kMostGeluThreads, kGeluBackwardBlocks)
    GeluBackwardKernel(const __grid_constant__ BiasGeluBwdArgs args,
                       const __grid_constant__ GeluPlan plan,
                       const __grid_constant__ SliceSums<Accum<T>> slice_sums) {
  using A = Accum<T>;
  __shared__ __align__(kVecBytes) A shared[W * kMostGeluThreads];  // each thread's sums
  __shared__ __align__(128) Vector<T, W> stages[kStages * 2][kMostGeluThreads];
  A* const sums = shared + threadIdx.x * W;
  LaunchNext();
  const GradArrays<T> arrays{static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                             static_cast<T*>(args.dx)};
  for (std::int64_t group = blockIdx.z; group < args.shape.groups; group += gridDim.z) {
    for (std::int64_t slice = blockIdx.y; slice < plan.slices; slice += gridDim.y) {
      const Place place(plan, slice);
#pragma unroll
      for (int j = 0; j < W; ++j) sums[j] = 0;
      if (place.inside)
        ForSlice<T, kApproximate, W>(args, arrays, plan, group, place, stages, sums);
      if (slice_sums.sums == nullptr) continue;  // all threads do this, or none
      A* const partial =
          slice_sums.sums + group * slice_sums.group_pitch + slice * slice_sums.slice_pitch;
      __syncthreads();  // all sums are written
      AddUpSlice<A, W>(plan, args.shape, shared, partial);
      __syncthreads();  // all sums are read before the next ones are written
    }
  }
}

// --- Launchers -----------------------------------------------------------------------------------

constexpr std::int64_t kMostBlocks = 65535;  // in a grid's second and third dimensions

dim3 GridOf(const GeluPlan& plan, std::int64_t slices, std::int64_t groups) {
  return {static_cast<unsigned>(plan.tiles), static_cast<unsigned>(std::min(slices, kMostBlocks)),
          static_cast<unsigned>(std::min(groups, kMostBlocks))};
}

// Calls fn.operator()<elements of a vector>().
template <typename T>
ffi::Error DispatchWidth(const GeluPlan& plan, const auto& fn) {
  return plan.width > 1 ? fn.template operator()<kVec<T>>() : fn.template operator()<1>();
}

template <typename T, bool kApproximate>
ffi::Error Forward(cudaStream_t stream, const BiasGeluFwdArgs& args) {
  if (args.shape.elements() == 0) return ffi::Error::Success();
  const GeluPlan plan = ChooseGeluForwardPlan({.shape = args.shape,
                                               .element_bytes = sizeof(T),
                                               .aligned = Aligned(args.x, args.y),
                                               .has_columns = args.bias.data != nullptr,
                                               .partial_rows = 0,
                                               .multiprocessors = MultiprocessorCount()});
  return DispatchWidth<T>(plan, [&]<int W>() {
    // A loop over slices or groups in the kernel would take up to a twentieth of the kernel's time.
    for (std::int64_t group = 0; group < args.shape.groups; group += kMostBlocks) {
      for (std::int64_t slice = 0; slice < plan.slices; slice += kMostBlocks) {
        GeluForwardKernel<T, kApproximate, W>
            <<<GridOf(plan, plan.slices - slice, args.shape.groups - group), kGeluThreads, 0,
               stream>>>(args, plan, slice, group);
      }
    }
    return LastError("bias_gelu_fwd");
  });
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
  const GeluPlan plan =
      ChooseGeluBackwardPlan({.shape = args.shape,
                              .element_bytes = sizeof(T),
                              .aligned = Aligned(args.dy, args.x, args.dx),
                              .has_columns = args.bias.data != nullptr || dbias != nullptr,
                              .partial_rows = dbias == nullptr ? 0 : args.partial_rows,
                              .multiprocessors = MultiprocessorCount()});
  const std::int64_t partial_rows = dbias == nullptr ? 0 : plan.partial_rows();
  const bool direct = plan.slices * partial_rows <= 1;  // the only partial row is dbias
  const SliceSums<A> sums{direct ? dbias : static_cast<A*>(args.workspace),
                          (direct ? 1 : args.partial_rows) * features, partial_rows * features};
  return DispatchWidth<T>(plan, [&]<int W>() {
    GeluBackwardKernel<T, kApproximate, W>
        <<<GridOf(plan, plan.slices, groups), 32 * CeilDiv(plan.threads(), 32), 0, stream>>>(
            args, plan, sums);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess || direct) return ToError(kOp, status);
    return ToError(kOp,
                   LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                                      args.partial_rows, plan.slices * partial_rows, features));
  });
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
