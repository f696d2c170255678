// Narrow unaligned rows: warps work on tiles of rows in shared memory, where results replace
// operands. NarrowPlan (plan.h) explains how.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/reciprocal.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/row_norm/backward.cuh"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/place.cuh"

namespace gradops {
namespace {

// A thread's columns in its rows. In each step of a tile, a warp has 32 / row_threads rows.
template <typename T>
struct NarrowPlace {
  static constexpr int K = NarrowColumns(sizeof(T));

  int row_thread, row;  // thread of the row; row of the step
  int begin;            // first column
  unsigned
      owned;  // bit k: the thread owns column begin + k; otherwise another thread does, or none

  __device__ NarrowPlace(const NarrowPlan& plan, std::int64_t features) {
    const int in_warp = static_cast<int>(threadIdx.x % kWarp);
    row_thread = in_warp & (plan.row_threads - 1);
    row = in_warp >> Log2(plan.row_threads);
    const int first = row_thread * plan.columns;
    begin = min(first, static_cast<int>(features) - plan.columns);
    const unsigned all = (1u << plan.columns) - 1;
    owned = all & ~((1u << min(first - begin, plan.columns)) - 1);
  }
  __device__ __forceinline__ bool Owns(int k) const { return (owned & 1u << k) != 0; }
};

// Calls fn(k) for each of a thread's columns; if rows have one thread, also for some beyond.
template <int K, typename Fn>
__device__ __forceinline__ void ForColumns(int columns, const Fn& fn) {
  constexpr int kSure = SureColumns(K);
#pragma unroll
  for (int k = 0; k < kSure; ++k) fn(k);
#pragma unroll
  for (int k = kSure; k < K; k += 2) {
    if (k < columns) fn(k), fn(k + 1);
  }
}

// A thread's columns of a parameter, plus `added`; or `absent` if there is no parameter.
template <typename T, typename A, int K>
__device__ __forceinline__ void LoadNarrowParam(const Param& param, std::int64_t group, int begin,
                                                int columns, A absent, A added, A (&values)[K]) {
#pragma unroll
  for (A& value : values) value = absent;
  if (param.data == nullptr) return;
  WithType(param, group, [&](const auto* data) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < columns) values[k] = static_cast<A>(__ldg(data + begin + k)) + added;
    }
  });
}

// Sums over the threads of a row. Each thread gets the sums.
template <int kValues, typename A>
__device__ __forceinline__ void OverLanes(int row_threads, A (&values)[kValues]) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    if (distance >= row_threads) continue;
    A others[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) others[i] = __shfl_xor_sync(0xffffffffu, values[i], distance);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += others[i];
  }
}

// An element at a shared address.
template <typename T>
__device__ __forceinline__ Accum<T> LoadElement(std::uint32_t address) {
  if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
    } else {
      return static_cast<float>(__ushort_as_half(bits));
    }
  } else {
    Accum<T> value[1];
    LoadShared(address, value);
    return value[0];
  }
}
template <typename T>
__device__ __forceinline__ void StoreElement(std::uint32_t address, Accum<T> value) {
  if constexpr (sizeof(T) == 2) {
    std::uint32_t word;  // its lower half is stored
    if constexpr (std::is_same_v<T, Half>) {
      const __half2 pair = __floats2half2_rn(value, 0.f);
      word = reinterpret_cast<const std::uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(value, 0.f);
      word = reinterpret_cast<const std::uint32_t&>(pair);
    }
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  } else {
    StoreShared(address, value);
  }
}

// A thread's columns of a row of a tile. Columns beyond the row that ForColumns visits are 0: the
// next row has them, or no row.
template <typename T, typename A, int K>
__device__ __forceinline__ void LoadColumns(const NarrowPlan& plan, std::uint32_t at,
                                            A (&values)[K]) {
  ForColumns<K>(plan.columns, [&](int k) { values[k] = LoadElement<T>(at + k * sizeof(T)); });
  if (plan.row_threads == 1) {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = k < plan.columns ? values[k] : A{0};
  }
}

// Copies a warp's tiles to shared memory and back. All lanes of the warp call it.
template <typename T, int kArrays>
class NarrowTiles {
  static constexpr int kSize = sizeof(T), W = kVec<T>;

 public:
  // shared: the warp's tiles, of `count` arrays for each stage. array_bytes: the size of each
  // array. Nothing beyond it may be read.
  __device__ NarrowTiles(const NarrowPlan& plan, const unsigned char* shared, int count,
                         std::int64_t array_bytes)
      : plan_(plan),
        shared_(SharedAddress(shared)),
        stage_bytes_(count * plan.tile_bytes),
        array_bytes_(array_bytes) {}

  // The shared address of array a's tile, which begins `first` bytes into its array.
  __device__ __forceinline__ std::uint32_t At(int stage, int a, std::int64_t first) const {
    return shared_ + static_cast<std::uint32_t>(stage * stage_bytes_ + a * plan_.tile_bytes) +
           (static_cast<std::uint32_t>(first) & (kLineBytes - 1));
  }

  // Starts copies of `bytes` from `first` on, of each array that is not null. The caller commits.
  __device__ __forceinline__ void StartCopy(int stage, const void* const (&arrays)[kArrays],
                                            std::int64_t first, int bytes) const {
    const int before = static_cast<int>(first) & (kVecBytes - 1), end = before + bytes;
    const std::int64_t begin = first - before;
    if (array_bytes_ - begin < end + kVecBytes) return StartLastCopy(stage, arrays, begin, end);
    const int own = Lane() * kVecBytes;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      if (arrays[a] == nullptr) continue;
      std::uint32_t to = At(stage, a, begin) + static_cast<std::uint32_t>(own);
      const char* from = static_cast<const char*>(arrays[a]) + begin + own;
#pragma unroll 1
      for (int at = own; at < end; at += kStep) {
        CopyAsync(to, from);
        to += kStep, from += kStep;
      }
    }
  }

  // Stores array a's tile, which all lanes of the warp have written, in the array.
  __device__ __forceinline__ void WriteBack(int stage, int a, void* array, std::int64_t first,
                                            int bytes) const {
    const int before = static_cast<int>(first) & (kVecBytes - 1), end = before + bytes;
    char* const to = static_cast<char*>(array) + (first - before);
    const std::uint32_t from = At(stage, a, first - before);
    const int vectors = before > 0 ? kVecBytes : 0;
#pragma unroll 1
    for (int at = vectors + Lane() * kVecBytes; at + kVecBytes <= end; at += kStep) {
      uint4 words;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(from + static_cast<std::uint32_t>(at))
                   : "memory");
      asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + at),
                   "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    }
    if (((before | end) & (kVecBytes - 1)) == 0) return;
    // The tile may have only a part of its first and of its last vector. Each lane stores one
    // element.
    const int tail = end & -kVecBytes, which = Lane() % W * kSize;
    const bool of_head = Lane() < W;
    const int at = of_head ? before + which : tail + which;
    if (of_head ? before > 0 && at < min(end, kVecBytes)
                : Lane() < 2 * W && tail >= vectors && at < end) {
      *reinterpret_cast<T*>(to + at) =
          *static_cast<const T*>(__cvta_shared_to_generic(from + static_cast<std::uint32_t>(at)));
    }
  }

 private:
  static constexpr int kStep = kWarp * kVecBytes;  // bytes that a warp copies at once
  __device__ __forceinline__ static int Lane() { return static_cast<int>(threadIdx.x % kWarp); }

  // StartCopy at the end of the arrays. The last vector's elements are copied one by one: memcheck
  // takes a cp.async of fewer bytes for one of 16.
  __device__ void StartLastCopy(int stage, const void* const (&arrays)[kArrays], std::int64_t begin,
                                int end) const {
    const auto there = static_cast<int>(array_bytes_ - begin);
#pragma unroll 1
    for (int at = Lane() * kVecBytes; at < end; at += kStep) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        if (arrays[a] == nullptr) continue;
        const char* const from = static_cast<const char*>(arrays[a]) + begin;
        auto* const to = static_cast<char*>(__cvta_shared_to_generic(At(stage, a, begin)));
        if (at + kVecBytes <= there) {
          CopyAsync(to + at, from + at);
        } else {
#pragma unroll 1
          for (int j = at; j < end; j += kSize) {
            *reinterpret_cast<T*>(to + j) = *reinterpret_cast<const T*>(from + j);
          }
        }
      }
    }
  }

  const NarrowPlan& plan_;
  const std::uint32_t shared_;
  const int stage_bytes_;
  const std::int64_t array_bytes_;
};

// The tiles of a group that a warp works on, one an iteration.
struct WarpTiles {
  std::int64_t first_row, row_stride;  // The first tile's row; rows from tile to tile.
  int most, count;                     // The most tiles of a warp of the block; tiles of this warp.

  __device__ WarpTiles(const TileSchedule& schedule, const NarrowPlan& plan,
                       std::int64_t block_of_group, int warp) {
    const std::int64_t first = block_of_group * plan.warps;
    first_row = (first + warp) * plan.tile_rows;
    row_stride = schedule.blocks_per_group * plan.warps * plan.tile_rows;
    most = static_cast<int>(schedule.iterations + (first < schedule.extra));
    count = static_cast<int>(schedule.iterations + (first + warp < schedule.extra));
  }
};

// --- Forward -------------------------------------------------------------------------------------

// Whether the sum of squares of any row of the caller's warp may have overflowed. All lanes call
// it. Squares of float16s do not overflow.
template <typename T, typename A>
__device__ __forceinline__ bool AnyOverflowed(A variance) {
  if constexpr (std::is_same_v<T, Half>) return false;
  return __any_sync(0xffffffffu, static_cast<int>(Overflowed(variance))) != 0;
}

// Replaces a variance if the sum of squares of x - delta has overflowed. All lanes call it.
template <typename T, int K, typename A>
__device__ __forceinline__ void ReplaceOverflowed(const NarrowPlan& plan, const A (&x)[K],
                                                  const A (&weights)[K], A delta,
                                                  A inverse_features, A& variance) {
  A squares[1] = {};
  ForColumns<K>(plan.columns, [&](int k) {
    const A part = (x[k] - delta) * kLargeUnit<A>;
    squares[0] += part * weights[k] * part;
  });
  OverLanes(plan.row_threads, squares);
  const A large = squares[0] * inverse_features / kLargeUnit<A> / kLargeUnit<A>;
  if (Overflowed(variance)) variance = large;
}

// Mean and 1 / deviation of a row, in two passes. x: the thread's columns; on return, x - mean.
// weights: 1 for columns that the thread owns, else 0.
template <typename T, int K, typename A>
__device__ __forceinline__ Moments<A> NarrowMoments(const NarrowPlan& plan, A (&x)[K],
                                                    const A (&weights)[K], A features,
                                                    const ForwardScalars<A>& scalars) {
  using Rule = MeanRule<T, 32 * K>;
  A first = 0;
  if constexpr (!Rule::kExact) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    first = __shfl_sync(0xffffffffu, x[0], lane & ~(plan.row_threads - 1));
  }
  A total[1] = {};
  ForColumns<K>(plan.columns, [&](int k) {
    total[0] += (Rule::kExact ? x[k] * Rule::kFactor : x[k] - first) * weights[k];
  });
  OverLanes(plan.row_threads, total);
  const A mean = Rule::Mean(first, total[0], features, scalars.inverse_features);
  A sums[1 + Rule::kHasDelta] = {};  // sums of d^2 and d with d = x - mean
  ForColumns<K>(plan.columns, [&](int k) {
    x[k] -= mean;
    const A counted = x[k] * weights[k];
    sums[0] += counted * x[k];
    if constexpr (Rule::kHasDelta) sums[Rule::kHasDelta] += counted;
  });
  OverLanes(plan.row_threads, sums);
  A delta = 0;
  if constexpr (Rule::kHasDelta) {
    delta = sums[Rule::kHasDelta] * scalars.inverse_features;
    sums[0] -= sums[Rule::kHasDelta] * delta;
  }
  A variance = sums[0] * scalars.inverse_features;
  if (variance < 0) variance = 0;
  if (AnyOverflowed<T>(variance)) {
    ReplaceOverflowed<T>(plan, x, weights, delta, scalars.inverse_features, variance);
  }
  return {mean, delta, InverseDeviation(variance, scalars.epsilon)};
}

template <typename T, bool kCentered>
__global__ void __launch_bounds__(kNarrowThreads, sizeof(T) == 8 ? 2 : 3)
    ForwardNarrowKernel(const __grid_constant__ RowNormFwdArgs args,
                        const __grid_constant__ NarrowPlan plan,
                        const __grid_constant__ TileSchedule schedule,
                        const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int K = NarrowColumns(sizeof(T)), kSize = sizeof(T);
  extern __shared__ __align__(128) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // the grid's last plane may not be full
  const NarrowPlace<T> place(plan, features);
  const int warp = KeptOfWarp(static_cast<int>(threadIdx.x / kWarp));
  const int row_bytes = static_cast<int>(features) * kSize;
  const bool has_residual = args.residual != nullptr;
  const WarpTiles own(schedule, plan, blockIdx.x, warp);
  const NarrowTiles<T, 2> tiles(plan, shared + warp * plan.warp_bytes, has_residual ? 2 : 1,
                                groups * rows * row_bytes);
  const auto rows_of = [&](std::int64_t row) {
    return static_cast<int>(min(std::int64_t{plan.tile_rows}, rows - row));
  };
  // Starts the copies of an iteration's tile. It begins with `row`, `first` bytes into the arrays.
  const auto start_copy = [&](int iteration, std::int64_t row, std::int64_t first) {
    const void* const arrays[] = {args.x, args.residual};
    if (iteration < own.count)
      tiles.StartCopy(iteration & 1, arrays, first, rows_of(row) * row_bytes);
    CommitCopies();
  };
  std::int64_t row = own.first_row, first = (group * rows + row) * row_bytes;
  const std::int64_t stride_bytes = own.row_stride * row_bytes;
  start_copy(0, row, first);
  start_copy(1, row + own.row_stride, first + stride_bytes);

  A scale[K], weights[K];
  [[maybe_unused]] A bias[K];
  LoadNarrowParam<T>(args.scale, group, place.begin, plan.columns, A{1}, scalars.scale_offset,
                     scale);
  if constexpr (kCentered) {
    LoadNarrowParam<T>(args.bias, group, place.begin, plan.columns, A{0}, A{0}, bias);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) weights[k] = place.Owns(k) ? A{1} : A{0};
  // A residual's bias is in shared memory: registers do not suffice for it.
  A* const residual_bias = reinterpret_cast<A*>(shared + plan.warps * plan.warp_bytes);
  const bool has_residual_bias = args.residual_bias.data != nullptr;
  if (has_residual_bias) {
    WithType(args.residual_bias, group, [&](const auto* data) {
      for (int c = static_cast<int>(threadIdx.x); c < features; c += static_cast<int>(blockDim.x)) {
        residual_bias[c] = static_cast<A>(__ldg(data + c));
      }
    });
    __syncthreads();  // the whole bias is there
  }

#pragma unroll 1
  for (int iteration = 0; iteration < own.count; ++iteration) {
    const int stage = iteration & 1, count = rows_of(row);
    WaitForCopies<1>();
    __syncwarp();  // all lanes' copies have arrived
#pragma unroll 1
    for (int tile_row = 0; tile_row < count; tile_row += kWarp >> Log2(plan.row_threads)) {
      // Lanes without a row repeat the sums of the last row.
      const int of_tile = min(tile_row + place.row, count - 1);
      const bool has_row = tile_row + place.row < count;
      const auto in_tile = static_cast<std::uint32_t>(of_tile * row_bytes + place.begin * kSize);
      const std::uint32_t at = tiles.At(stage, 0, first) + in_tile;
      A x[K];
      LoadColumns<T>(plan, at, x);
      if (has_residual) {
        const std::uint32_t residual_at = tiles.At(stage, 1, first) + in_tile;
        ForColumns<K>(plan.columns, [&](int k) {
          A other = k < plan.columns ? LoadElement<T>(residual_at + k * kSize) : A{0};
          if (has_residual_bias && k < plan.columns) other += residual_bias[place.begin + k];
          x[k] = static_cast<A>(static_cast<T>(x[k] + other));
        });
        __syncwarp();  // all lanes have read what is overwritten below
        ForColumns<K>(plan.columns, [&](int k) {
          if (has_row && place.Owns(k)) StoreElement<T>(residual_at + k * kSize, x[k]);
        });
      }
      Moments<A> moments{};
      if constexpr (kCentered) {
        moments =
            NarrowMoments<T>(plan, x, weights, static_cast<A>(static_cast<int>(features)), scalars);
      } else {
        A squares[1] = {};
        ForColumns<K>(plan.columns, [&](int k) { squares[0] += x[k] * weights[k] * x[k]; });
        OverLanes(plan.row_threads, squares);
        A variance = squares[0] * scalars.inverse_features;
        if (AnyOverflowed<T>(variance)) {
          ReplaceOverflowed<T>(plan, x, weights, A{0}, scalars.inverse_features, variance);
        }
        moments.rstd = InverseDeviation(variance, scalars.epsilon);
      }
      __syncwarp();  // all lanes have read what is overwritten below
      if (!has_row) continue;
      if (place.row_thread == 0) {
        StoreStatistics<kCentered>(args, group * rows + row + of_tile, moments);
      }
      const A shift = -moments.delta * moments.rstd;
      ForColumns<K>(plan.columns, [&](int k) {
        A y;
        if constexpr (kCentered) {
          y = (x[k] * moments.rstd + shift) * scale[k] + bias[k];
        } else {
          y = x[k] * moments.rstd * scale[k];
        }
        if (place.Owns(k)) StoreElement<T>(at + k * kSize, y);
      });
    }
    __syncwarp();  // all results are in shared memory
    tiles.WriteBack(stage, 0, args.y, first, count * row_bytes);
    if (has_residual) tiles.WriteBack(stage, 1, args.sum, first, count * row_bytes);
    __syncwarp();  // the tiles are read before new copies overwrite them
    start_copy(iteration + 2, row + 2 * own.row_stride, first + 2 * stride_bytes);
    row += own.row_stride, first += stride_bytes;
  }
}

// --- Backward ------------------------------------------------------------------------------------

// A thread's columns of a row of a tile, and of the gradient with respect to that row.
template <typename T, bool kCentered, bool kFromOutput>
struct NarrowGradient {
  using A = Accum<T>;
  static constexpr int K = NarrowColumns(sizeof(T));
  static constexpr int kValues = RowSumsOf(kCentered, kFromOutput);
  static constexpr bool kShift = kCentered && !kFromOutput;

  const NarrowPlan& plan;
  const NarrowPlace<T>& place;
  const A (&scale)[K];
  const A (&bias)[K];
  A mean, rstd;
  A (&dy)[K];
  A (&x)[K];  // After AddUp, x is x - mean. From the output: x_hat.
  A factor, shift = 0, mean_wdy = 0, mean_wdy_x_hat;

  // Sums over the row: of wdy * x and of wdy. ill_conditioned: also of x.
  __device__ __forceinline__ void AddUp(bool ill_conditioned, A (&totals)[kValues]) {
    ForColumns<K>(plan.columns, [&](int k) {
      if constexpr (kFromOutput) {
        // The reciprocal of a subnormal scale is infinite.
        x[k] = abs(scale[k]) < std::numeric_limits<A>::min()
                   ? A{0}
                   : (x[k] - bias[k]) * Reciprocal(scale[k]);
      } else if constexpr (kShift) {
        x[k] -= mean;
      }
      const A wdy = dy[k] * scale[k];
      totals[0] += wdy * x[k];
      if constexpr (kCentered) totals[1] += wdy;
    });
    if (kShift && ill_conditioned) {
      ForColumns<K>(plan.columns, [&](int k) { totals[2] += place.Owns(k) ? x[k] : A{0}; });
      OverLanes(plan.row_threads, totals);
    } else {
      OverLanes(plan.row_threads, reinterpret_cast<A(&)[kValues - kShift]>(totals));
    }
  }

  // After the sums over the row.
  __device__ __forceinline__ void SetMeans(const A (&totals)[kValues], bool ill_conditioned,
                                           A inverse_n) {
    // x_hat = x * factor + shift. shift corrects the saved mean's rounding.
    factor = kFromOutput ? A{1} : rstd;
    mean_wdy_x_hat = totals[0];
    if constexpr (kShift) {
      const A delta = MeanRounding(ill_conditioned ? totals[2] * inverse_n : A{0}, mean);
      mean_wdy_x_hat -= delta * totals[1];
      shift = -delta * rstd;
    }
    if constexpr (kCentered) mean_wdy = totals[1] * inverse_n;
    mean_wdy_x_hat *= factor * inverse_n;
  }

  // Calls fn(k, dx) for each column, and adds to the column sums.
  template <typename Fn>
  __device__ __forceinline__ void ForDx(A (&dscale)[K], A (&dbias)[K], const Fn& fn) const {
    ForColumns<K>(plan.columns, [&](int k) {
      const A x_hat = kShift ? x[k] * factor + shift : x[k] * factor;
      dscale[k] += dy[k] * x_hat;
      if constexpr (kCentered) dbias[k] += dy[k];
      fn(k, NormInputGrad(dy[k] * scale[k], x_hat, mean_wdy, mean_wdy_x_hat, rstd));
    });
  }
};

// Adds column sums over the rows of each warp, then over the block's warps. Stores them, or adds
// them to the block's sums. All threads of the block call it. partial: the warps' sums of all
// columns.
template <typename T, int K, typename A>
__device__ __forceinline__ void GiveNarrow(const NarrowPlan& plan, const NarrowPlace<T>& place,
                                           int warp, std::int64_t features, A* partial,
                                           A (&values)[K], A* to, bool store) {
#pragma unroll 1
  for (int distance = plan.row_threads; distance < kWarp; distance *= 2) {
#pragma unroll
    for (A& value : values) value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (place.row == 0) {
    ForColumns<K>(plan.columns, [&](int k) {
      if (place.Owns(k)) partial[warp * features + place.begin + k] = values[k];
    });
  }
  __syncthreads();  // all warps' sums are written
  for (int column = static_cast<int>(threadIdx.x); column < features;
       column += static_cast<int>(blockDim.x)) {
    A total[1] = {partial[column]};
    for (int w = 1; w < plan.warps; ++w) total[0] += partial[w * features + column];
    StoreOrAdd(to + column, total, store);
  }
  __syncthreads();  // all sums are read before the next ones are written
}

// Gives the block's sums, which begin at `at`, all column sums. dx_sums: the thread's sums of dx.
template <bool kCentered, typename T, int K, typename A>
__device__ __forceinline__ void GiveNarrowSums(const NarrowPlan& plan, const NarrowPlace<T>& place,
                                               int warp, std::int64_t features, A* partial,
                                               const PartialSums<A>& sums, std::int64_t at,
                                               const A* dx_sums, A (&dscale)[K], A (&dbias)[K],
                                               bool store) {
  const auto give = [&](A(&values)[K], A* result) {
    if (result == nullptr) return;
    GiveNarrow<T>(plan, place, warp, features, partial, values, result + at, store);
  };
  give(dscale, sums.results[0]);
  if constexpr (kCentered) give(dbias, sums.results[1]);
  if (sums.results[2] != nullptr) {
#pragma unroll
    for (int k = 0; k < K; ++k) dscale[k] = dx_sums[k * static_cast<int>(blockDim.x)];
    give(dscale, sums.results[2]);
  }
}

// The statistics of a row.
template <bool kMean, typename A>
__device__ __forceinline__ void LoadStatistics(const RowNormBwdArgs& args, std::int64_t row,
                                               A& mean, A& rstd) {
  if constexpr (kMean) mean = __ldg(static_cast<const A*>(args.mean) + row);
  rstd = __ldg(static_cast<const A*>(args.rstd) + row);
}

// Bit r is set if row r of a tile, of `count` rows, is not well conditioned. A lane has the
// statistics of one row.
template <bool kMean, typename A>
__device__ __forceinline__ unsigned IllConditioned(int count, A mean, A rstd, A epsilon) {
  if constexpr (!kMean) return 0;
  const bool has_row = static_cast<int>(threadIdx.x % kWarp) < count;
  return __ballot_sync(0xffffffffu,
                       has_row && (epsilon < 0 || !WellConditioned(mean, rstd, epsilon)));
}

// Replaces dy of a row by dx in shared memory, and adds to the column sums. kMore: adds dsum, if it
// is there, to dx. If sums_dx, adds dx to the thread's sums of dx.
template <bool kMore, typename T, bool kCentered, bool kFromOutput, int K, typename A>
__device__ __forceinline__ void FinishNarrow(
    const NarrowGradient<T, kCentered, kFromOutput>& gradient, const RowNormBwdArgs& args,
    std::uint32_t dy_at, std::uint32_t dsum_at, bool sums_dx, A* dx_sums, A (&dscale)[K],
    A (&dbias)[K]) {
  constexpr int kSize = sizeof(T);
  gradient.ForDx(dscale, dbias, [&](int k, A dx) {
    if constexpr (kMore) {
      if (args.dsum != nullptr) dx += LoadElement<T>(dsum_at + k * kSize);
      if (sums_dx) dx_sums[k * static_cast<int>(blockDim.x)] += dx;
    }
    if (gradient.place.Owns(k)) StoreElement<T>(dy_at + k * kSize, dx);
  });
}

template <typename T, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(kNarrowThreads, 2)
    BackwardNarrowKernel(const __grid_constant__ RowNormBwdArgs args,
                         const __grid_constant__ NarrowPlan plan,
                         const __grid_constant__ TileSchedule schedule,
                         const __grid_constant__ PartialSums<Accum<T>> sums,
                         const Accum<T> inverse_n) {
  using A = Accum<T>;
  constexpr int K = NarrowColumns(sizeof(T)), kSize = sizeof(T);
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = RowSumsOf(kCentered, kFromOutput);
  extern __shared__ __align__(128) unsigned char shared[];

  if (EndTogether(schedule.iterations, schedule.extra)) LaunchNext();
  const auto [groups, rows, features] = args.shape;
  const NarrowPlace<T> place(plan, features);
  const int warp = KeptOfWarp(static_cast<int>(threadIdx.x / kWarp));
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int row_bytes = static_cast<int>(features) * kSize;
  const void* const arrays[] = {args.dy, args.x, args.dsum};
  const NarrowTiles<T, 3> tiles(plan, shared + warp * plan.warp_bytes, args.dsum != nullptr ? 3 : 2,
                                groups * rows * row_bytes);
  // partial: each warp's partial sums of all columns. dx_sums: each thread's sums of dx.
  A* const partial = reinterpret_cast<A*>(shared + plan.warps * plan.warp_bytes);
  A* const dx_sums = partial + plan.warps * features + threadIdx.x;
  const bool sums_dx = sums.results[2] != nullptr;
  const A epsilon = static_cast<A>(args.epsilon);
  const int iterations_per_sum = max(1, kIterationsPerSum / plan.tile_steps);
  const auto rows_of = [&](std::int64_t row) {
    return static_cast<int>(min(std::int64_t{plan.tile_rows}, rows - row));
  };
  for (std::int64_t item = blockIdx.x; item < groups * schedule.blocks_per_group;
       item += gridDim.x) {
    const std::int64_t group = GroupOf(item, schedule.blocks_per_group);
    const std::int64_t block = item - group * schedule.blocks_per_group;
    const WarpTiles own(schedule, plan, block, warp);
    // Copies the tile of iteration i. It begins with `row`, `first` bytes into the arrays.
    const auto start_copy = [&](int i, std::int64_t row, std::int64_t first) {
      if (i < own.count) tiles.StartCopy(i & 1, arrays, first, rows_of(row) * row_bytes);
      CommitCopies();
    };
    A next_mean = 0, next_rstd = 0;
    const auto load_statistics = [&](int iteration, std::int64_t row) {
      if (iteration >= own.count || lane >= rows_of(row)) return;
      LoadStatistics<kShift>(args, group * rows + row + lane, next_mean, next_rstd);
    };
    std::int64_t row = own.first_row, first = (group * rows + row) * row_bytes;
    const std::int64_t stride_bytes = own.row_stride * row_bytes;
    load_statistics(0, row);
    start_copy(0, row, first);
    start_copy(1, row + own.row_stride, first + stride_bytes);

    A scale[K];
    [[maybe_unused]] A bias[K];
    LoadNarrowParam<T>(args.scale, group, place.begin, plan.columns, A{1},
                       static_cast<A>(args.scale_offset), scale);
    // The scale is 0 for columns that other threads own, so they add nothing to a row's sums.
#pragma unroll
    for (int k = 0; k < K; ++k) scale[k] = place.Owns(k) ? scale[k] : A{0};
    if constexpr (kFromOutput) {
      LoadNarrowParam<T>(args.bias, group, place.begin, plan.columns, A{0}, A{0}, bias);
    }

    int iteration = 0;
#pragma unroll 1
    for (bool store = true; iteration < own.most; store = false) {
      // Column sums stay in registers for these iterations.
      const int end = min(own.most, iteration + iterations_per_sum);
      A dscale[K] = {}, dbias[K] = {};
      if (sums_dx) {
#pragma unroll
        for (int k = 0; k < K; ++k) dx_sums[k * static_cast<int>(blockDim.x)] = 0;
      }
#pragma unroll 1
      for (; iteration < end; ++iteration) {
        if (iteration >= own.count) continue;
        const int stage = iteration & 1, count = rows_of(row);
        const A means = next_mean, rstds = next_rstd;
        const unsigned ill_conditioned = IllConditioned<kShift>(count, means, rstds, epsilon);
        load_statistics(iteration + 1, row + own.row_stride);
        WaitForCopies<1>();
        __syncwarp();  // all lanes' copies have arrived
#pragma unroll 1
        for (int tile_row = 0; tile_row < count; tile_row += kWarp >> Log2(plan.row_threads)) {
          // Lanes without a row repeat the sums of the last row.
          const int of_tile = min(tile_row + place.row, count - 1);
          A dy[K], x[K];
          const A mean = __shfl_sync(0xffffffffu, means, of_tile);
          const A rstd = __shfl_sync(0xffffffffu, rstds, of_tile);
          NarrowGradient<T, kCentered, kFromOutput> gradient{plan, place, scale, bias,
                                                             mean, rstd,  dy,    x};
          const auto in_tile =
              static_cast<std::uint32_t>(of_tile * row_bytes + place.begin * kSize);
          const std::uint32_t dy_at = tiles.At(stage, 0, first) + in_tile;
          A totals[kValues] = {};
          LoadColumns<T>(plan, dy_at, gradient.dy);
          LoadColumns<T>(plan, tiles.At(stage, 1, first) + in_tile, gradient.x);
          gradient.AddUp(ill_conditioned != 0, totals);
          __syncwarp();  // all lanes have read what is overwritten below
          if (tile_row + place.row >= count) continue;
          gradient.SetMeans(totals, (ill_conditioned >> of_tile & 1) != 0, inverse_n);
          const std::uint32_t dsum_at = tiles.At(stage, 2, first) + in_tile;
          if (args.dsum == nullptr && !sums_dx) {
            FinishNarrow<false>(gradient, args, dy_at, dsum_at, sums_dx, dx_sums, dscale, dbias);
          } else {
            FinishNarrow<true>(gradient, args, dy_at, dsum_at, sums_dx, dx_sums, dscale, dbias);
          }
        }
        __syncwarp();  // all results are in shared memory
        tiles.WriteBack(stage, 0, args.dx, first, count * row_bytes);
        __syncwarp();  // the tiles are read before new copies overwrite them
        start_copy(iteration + 2, row + 2 * own.row_stride, first + 2 * stride_bytes);
        row += own.row_stride, first += stride_bytes;
      }

      const std::int64_t sums_at = group * sums.group_pitch + block * sums.cluster_pitch;
      GiveNarrowSums<kCentered>(plan, place, warp, features, partial, sums, sums_at, dx_sums,
                                dscale, dbias, store);
    }
  }
}

}  // namespace
}  // namespace gradops
