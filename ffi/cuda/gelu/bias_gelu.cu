// GELU and bias + GELU, CUDA.
//
// A group's rows follow each other without gaps. So they are cut into packs, vectors of 16 bytes,
// whatever their length, and only the array's end has single elements. A span is a number of whole
// rows that end where a pack does, if possible also where a cache line does. Packs at one place of
// all spans meet one part of the bias. A thread keeps that part, and takes the packs at its place
// from many spans. A block has a tile of a span's packs and a slice of the spans, with sizes from
// policy.h. Without bias and dbias, rows do not matter: a span is a warp's packs.
//
// Backward recomputes gelu'(x + bias) and writes dx. For dbias, it leaves one partial row per
// slice, or one per slice and row of a span. A kernel in column_sum.cuh adds up these rows in a
// fixed order. Array dx may be dy's buffer: a thread reads each element before it writes that
// element. Traffic: forward reads x and writes y; backward reads dy and x, and writes dx. The
// formulas are in common/gelu.h.
//
// The bytes under way decide the speed (TUNING.md). About 32 KB of loads per multiprocessor take
// all of the bandwidth. Beyond 64 KB, some multiprocessors get much less bandwidth than others do.
// Forward has many short blocks, so that other multiprocessors take over. Backward has long blocks,
// usually in one wave, with equal numbers of turns. Backward has just enough threads: each always
// has two packs of each array under way to shared memory.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/gelu.h"
#include "cuda/common/column_sum.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/gelu/policy.h"
#include "ops/bias_gelu.h"

namespace gradops {
namespace {

// The most packs of a thread, all loaded before any is worked on. With double, 6 take more time.
template <typename T>
constexpr int kForwardPacks = std::is_same_v<T, double> ? 5 : 6;
constexpr int kForwardBlocks = 4, kBackwardBlocks = 2;  // Per multiprocessor.
constexpr int kStages = 2;  // Packs of each array that a thread of backward has under way.
// A thread adds up dz of this many spans before it adds the result to the sum. Rounding errors then
// hardly grow with the number of rows.
constexpr int kSpansPerSum = 128;

// A thread's place in every span, and its first span.
struct Place {
  std::int64_t pack;   // number in a span
  std::int64_t first;  // first span
  bool inside;

  __device__ Place(const GeluCut& cut, std::int64_t slice) {
    const auto thread = static_cast<int>(threadIdx.x);
    const int span = thread * cut.inverse_lanes >> 20;  // thread / lanes
    pack = std::int64_t{blockIdx.x} * cut.lanes + (thread - span * cut.lanes);
    first = slice * cut.at_once + span;
    inside = pack < cut.span && span < cut.at_once;
  }
};

// The part of the bias for pack `pack` of a span; zeros if there is no bias.
template <typename A, int W>
__device__ __forceinline__ void LoadBias(const Param& param, const GeluCut& cut, std::int64_t group,
                                         std::int64_t features, std::int64_t pack, A (&bias)[W]) {
#pragma unroll
  for (A& value : bias) value = 0;
  if (param.data == nullptr) return;
  const A* const all = static_cast<const A*>(param.data) + group * param.group_stride;
  if constexpr (W % kVec<A> == 0) {
    if (cut.copies == 1 && Aligned(all)) {
#pragma unroll
      for (int j = 0; j < W; j += kVec<A>) {
        const auto part = LoadPack<kVec<A>>(all + pack * W + j);
#pragma unroll
        for (int k = 0; k < kVec<A>; ++k) bias[j + k] = part.v[k];
      }
      return;
    }
  }
  std::int64_t column = pack * W;
  if (cut.copies > 1) column %= features;
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
__global__ void __launch_bounds__(kGeluThreads, kForwardBlocks)
    ForwardKernel(const __grid_constant__ BiasGeluFwdArgs args, const __grid_constant__ GeluCut cut,
                  std::int64_t first_slice, std::int64_t first_group) {
  using A = Accum<T>;
  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = first_group + blockIdx.z, slice = first_slice + blockIdx.y;
  const Place place(cut, slice * cut.turns);
  if (!place.inside) return;
  const std::int64_t first = place.first * cut.span + place.pack;
  const T* const x = static_cast<const T*>(args.x) + group * rows * features + first * W;
  T* const y = static_cast<T*>(args.y) + group * rows * features + first * W;
  const std::int64_t step = cut.at_once * cut.span;  // packs
  const std::int64_t left = cut.packs - first;
  const auto has = [&](int k) { return k < cut.turns && k * step < left; };
  Pack<T, W> packs[kForwardPacks<T>];
#pragma unroll
  for (int k = 0; k < kForwardPacks<T>; ++k) {
    if (has(k)) packs[k] = LoadPackOnce<W>(x + k * step * W);
  }
  A bias[W];
  LoadBias(args.bias, cut, group, features, place.pack, bias);
#pragma unroll
  for (int k = 0; k < kForwardPacks<T>; ++k) {
    if (!has(k)) continue;
    A values[W];
    Widen(packs[k], values);
#pragma unroll
    for (int j = 0; j < W; ++j)
      values[j] = Gelu<T, kApproximate>(GeluTail<T, kApproximate>(values[j] + bias[j]));
    StorePackOnce(y + k * step * W, Narrow<T>(values));
  }
  // The elements after the last whole pack: the thread that would have the next pack takes them.
  if (cut.rest == 0 || slice + 1 < cut.slices) return;
  for (int k = 0; k < cut.turns; ++k) {
    if (k * step != left) continue;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      if (j >= cut.rest) continue;
      const std::int64_t i = left * W + j;
      y[i] = static_cast<T>(
          Gelu<T, kApproximate>(GeluTail<T, kApproximate>(static_cast<A>(x[i]) + bias[j])));
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

template <typename T, bool kApproximate, int W>
__global__ void __launch_bounds__(kMostGeluThreads, kBackwardBlocks)
    BackwardKernel(const __grid_constant__ BiasGeluBwdArgs args,
                   const __grid_constant__ GeluCut cut,
                   const __grid_constant__ SliceSums<Accum<T>> slice_sums) {
  using A = Accum<T>;
  constexpr bool kCutSums = !std::is_same_v<A, double>;
  constexpr bool kRing = W > 1;  // asynchronous copies to shared memory are of 16 bytes
  __shared__ __align__(kVecBytes)
      A shared[W * kMostGeluThreads];  // [spans at once][a tile's elements]
  __shared__ __align__(128) Pack<T, W> ring[kStages * 2]
                                           [kMostGeluThreads];  // each thread's packs under way
  A* const sums = shared + threadIdx.x * W;
  LaunchNext();
  const auto [groups, rows, features] = args.shape;
  // dx may be dy. Packs are counted from the arrays' beginning.
  const T* const dy = static_cast<const T*>(args.dy);
  const T* const x = static_cast<const T*>(args.x);
  T* const dx = static_cast<T*>(args.dx);
  for (std::int64_t group = blockIdx.z; group < groups; group += gridDim.z) {
    const std::int64_t group_end = (group + 1) * cut.packs;
    for (std::int64_t slice = blockIdx.y; slice < cut.slices; slice += gridDim.y) {
      const Place place(cut, slice);
#pragma unroll
      for (int j = 0; j < W; ++j) sums[j] = 0;
      if (place.inside) {
        const std::int64_t step = cut.slices * cut.at_once * cut.span;
        std::int64_t pack = group * cut.packs + place.first * cut.span + place.pack;
        const auto fetch = [&](std::int64_t from, int stage) {
          if (from < group_end) {
            CopyAsync(&ring[2 * stage][threadIdx.x], dy + from * W);
            CopyAsync(&ring[2 * stage + 1][threadIdx.x], x + from * W);
          }
          CommitCopies();
        };
        if constexpr (kRing) {
          for (int k = 0; k < kStages; ++k) fetch(pack + k * step, k);
        }
        int stage = 0;
        A bias[W];
        LoadBias(args.bias, cut, group, features, place.pack, bias);
        A part[W] = {};
        // dx of one pack.
        const auto apply = [&](const Pack<T, W>& dy_pack, const Pack<T, W>& x_pack) {
          A dz[W], z[W];
          Widen(x_pack, z);
          Widen(dy_pack, dz);
#pragma unroll
          for (int j = 0; j < W; ++j) {
            dz[j] *= GeluDerivative<T, kApproximate>(GeluTail<T, kApproximate>(z[j] + bias[j]));
            part[j] += dz[j];
          }
          return Narrow<T>(dz);
        };
        const auto end_part = [&] {
#pragma unroll
          for (int j = 0; j < W; ++j) sums[j] += part[j], part[j] = 0;
        };
        while (pack < group_end) {
          const std::int64_t end =
              kCutSums ? min(group_end, pack + kSpansPerSum * step) : group_end;
#pragma unroll 1
          for (; pack < end; pack += step) {
            Pack<T, W> out;
            if constexpr (kRing) {
              WaitForCopies<kStages - 1>();
              out = apply(ring[2 * stage][threadIdx.x], ring[2 * stage + 1][threadIdx.x]);
              fetch(pack + kStages * step, stage);
              stage = (stage + 1) % kStages;
            } else {
              out = apply(LoadPackOnce<W>(dy + pack * W), LoadPackOnce<W>(x + pack * W));
            }
            StorePackOnce(dx + pack * W, out);
          }
          end_part();
        }
        if (cut.rest > 0 && pack == group_end) {  // the elements after the last whole pack
          Pack<T, W> dy_pack{}, x_pack{};
#pragma unroll
          for (int j = 0; j < W; ++j) {
            if (j < cut.rest) dy_pack.v[j] = dy[pack * W + j], x_pack.v[j] = x[pack * W + j];
          }
          const auto out = apply(dy_pack, x_pack);
#pragma unroll
          for (int j = 0; j < W; ++j) {
            if (j < cut.rest) dx[pack * W + j] = out.v[j];
          }
          end_part();
        }
      }
      if (slice_sums.sums == nullptr) continue;  // all threads do this, or none
      A* const partial =
          slice_sums.sums + group * slice_sums.group_pitch + slice * slice_sums.slice_pitch;
      __syncthreads();  // all sums are written
      const int elements = cut.lanes * W;
      const auto add_up = [&](int element) {
        A total = shared[element];
        for (int r = 1; r < cut.at_once; ++r) total += shared[r * elements + element];
        return total;
      };
      if (cut.folded()) {
        for (int column = static_cast<int>(threadIdx.x); column < features;
             column += static_cast<int>(blockDim.x)) {
          A total = add_up(column);
          for (int copy = 1; copy < cut.copies; ++copy) {
            total += add_up(copy * static_cast<int>(features) + column);
          }
          partial[column] = total;
        }
      } else {
        const std::int64_t first = std::int64_t{blockIdx.x} * elements;
        const std::int64_t end = min(cut.span * W, rows * features);
        for (int i = static_cast<int>(threadIdx.x); i < elements && first + i < end;
             i += static_cast<int>(blockDim.x)) {
          partial[first + i] = add_up(i);
        }
      }
      __syncthreads();  // all sums are read before the next ones are written
    }
  }
}

// --- Launchers -----------------------------------------------------------------------------------

constexpr std::int64_t kMostBlocks = 65535;  // in a grid's second and third dimensions

dim3 GridOf(const GeluCut& cut, std::int64_t slices, std::int64_t groups) {
  return {static_cast<unsigned>(cut.tiles), static_cast<unsigned>(std::min(slices, kMostBlocks)),
          static_cast<unsigned>(std::min(groups, kMostBlocks))};
}

// Calls fn.operator()<elements of a pack>(). Packs have 16 bytes if every group starts at a 16-byte
// boundary, otherwise one element.
template <typename T, typename Fn>
ffi::Error DispatchWidth(const RowShape& shape, bool aligned, const Fn& fn) {
  const bool whole = shape.groups == 1 || shape.rows * shape.features % kVec<T> == 0;
  return aligned && whole ? fn.template operator()<kVec<T>>() : fn.template operator()<1>();
}

template <typename T, bool kApproximate>
ffi::Error Forward(cudaStream_t stream, const BiasGeluFwdArgs& args) {
  if (args.shape.elements() == 0) return ffi::Error::Success();
  return DispatchWidth<T>(args.shape, Aligned(args.x, args.y), [&]<int W>() {
    const std::int64_t resident = std::int64_t{kForwardBlocks} * MultiprocessorCount();
    const GeluCut cut =
        CutForward(args.shape, W, args.bias.data != nullptr, kForwardPacks<T>, resident);
    // A loop over slices or groups in the kernel would take up to a twentieth of the kernel's time.
    for (std::int64_t group = 0; group < args.shape.groups; group += kMostBlocks) {
      for (std::int64_t slice = 0; slice < cut.slices; slice += kMostBlocks) {
        ForwardKernel<T, kApproximate, W>
            <<<GridOf(cut, cut.slices - slice, args.shape.groups - group), kGeluThreads, 0,
               stream>>>(args, cut, slice, group);
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
  const bool has_columns = args.bias.data != nullptr || dbias != nullptr;
  const std::int64_t most_rows = dbias == nullptr ? 0 : args.partial_rows;
  const auto cut_for = [&](int width) {
    return CutBackward(args.shape, width, sizeof(T), has_columns, most_rows,
                       std::int64_t{kBackwardBlocks} * MultiprocessorCount());
  };
  // If rows start within packs, there may be more partial rows than the workspace has: 0 slices.
  const GeluCut whole = cut_for(kVec<T>);
  const bool aligned = Aligned(args.dy, args.x, args.dx);
  return DispatchWidth<T>(args.shape, aligned && whole.slices > 0, [&]<int W>() {
    const GeluCut cut = W == kVec<T> ? whole : cut_for(W);
    const std::int64_t partial_rows = dbias == nullptr ? 0 : cut.partial_rows(rows);
    const bool at_once = cut.slices * partial_rows <= 1;
    const SliceSums<A> sums{at_once ? dbias : static_cast<A*>(args.workspace),
                            (at_once ? 1 : args.partial_rows) * features, partial_rows * features};
    BackwardKernel<T, kApproximate, W>
        <<<GridOf(cut, cut.slices, groups), 32 * CeilDiv(cut.threads(), 32), 0, stream>>>(args, cut,
                                                                                          sums);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess || at_once) return ToError(kOp, status);
    return ToError(kOp,
                   LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                                      args.partial_rows, cut.slices * partial_rows, features));
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
