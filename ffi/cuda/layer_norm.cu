// Layer norm and RMS norm, CUDA.
//
// A row belongs to a team of threads: part of a warp, a warp, some warps, or a whole block. Thread
// t of a team of n holds columns [(i n + t) W, (i n + t + 1) W) for i = 0, 1, ... in registers. W
// elements are 16 bytes where all rows start at 16-byte boundaries. Else W is 1: the team's threads
// access neighbouring elements, which coalesce whatever the alignment, and a thread's columns stay
// the same from row to row, so that parameters and column sums stay in registers. (Peeling 16-byte
// pieces would shift the columns from row to row; reading scale and bias then costs more L1 cycles
// than x and y together.) Wider rows are streamed, and read again from L2.
//
// Forward: one pass over registers for the mean, one for the variance of what is left, one for y.
// Traffic: x read, y written.
//
// Backward (formulas: common/math.h): persistent blocks, each with a slot in a group: a share of
// the group's rows, and one partial row of column sums. The next rows are on their way to shared
// memory (cp.async) while one is worked on; every thread copies what it will itself read, so the
// ring needs no barriers. Column sums stay in registers; then teams, and then slots
// (column_sum.cuh), are added in a fixed order. Traffic: dy and x read, dx written, and a partial
// row per block.
#include <cuda_pipeline.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "common/math.h"
#include "cuda/column_sum.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/layer_norm.h"

namespace gradops {
namespace {

// --- Policy --------------------------------------------------------------------------------------

// How a row of at most kColumns elements is held: by kTeam threads, kPacks times W elements each.
template <int W, int kTeam_, int kPacks_>
struct Tile {
  static constexpr int kWidth = W, kTeam = kTeam_, kPacks = kPacks_;
  static constexpr int kColumns = W * kTeam * kPacks;
};

// The first tile that holds a row is taken; wider rows are streamed. A thread has up to 64 bytes of
// x forward. The small teams keep all threads busy; the large ones hold what a block can.
template <typename T, int V = kVec<T>>
using ForwardTiles = TypeList<Tile<V, 8, 1>, Tile<V, 8, 4>, Tile<V, 32, 4>, Tile<V, 128, 4>,
                              Tile<V, 256, 4>, Tile<V, 512, 4>, Tile<V, 1024, 4>>;
template <typename T>
inline constexpr int kElements = sizeof(T) == 8 ? 8 : 16;
template <typename T, int P = kElements<T>>
using ForwardElementTiles =
    TypeList<Tile<1, 8, 4>, Tile<1, 32, P>, Tile<1, 128, P>, Tile<1, 512, P>>;

// Backward, a thread holds x, dy, scale and two sums: kElements of each without spills.
template <typename T, int V = kVec<T>, int P = kElements<T> / kVec<T>>
using BackwardTiles = TypeList<Tile<V, 8, 1>, Tile<V, 8, P>, Tile<V, 32, P>, Tile<V, 64, P>,
                               Tile<V, 128, P>, Tile<V, 256, P>, Tile<V, 512, P>>;
template <typename T, int P = kElements<T>>
using BackwardElementTiles =
    TypeList<Tile<1, 8, 4>, Tile<1, 64, 8>, Tile<1, 256, 8>, Tile<1, 512, P>>;

constexpr int kStreamThreads = 1024;

template <typename Tile>
constexpr int kForwardThreads = Tile::kTeam < 128 ? 128 : Tile::kTeam;
template <typename Tile>
constexpr int kBackwardThreads = Tile::kTeam < 256 ? 256 : Tile::kTeam;
// Blocks per multiprocessor, asked of the compiler: forward 1,024 threads of 64 registers, each
// with up to 64 bytes under way (768 where a thread has many addresses), backward 512 threads of
// 128.
template <typename Tile>
constexpr int kForwardBlocks = (Tile::kWidth == 1 ? 768 : 1024) / kForwardThreads<Tile>;
template <typename Tile>
constexpr int kBackwardBlocks = 512 / kBackwardThreads<Tile>;
constexpr int kMaxStages = 3;  // of the ring

// Calls fn.operator()<Tile>() with the first tile that holds `columns`; false if none does.
template <typename... Tiles, typename Fn>
bool DispatchTile(TypeList<Tiles...>, std::int64_t columns, const Fn& fn) {
  return ((columns <= Tiles::kColumns && (fn.template operator()<Tiles>(), true)) || ...);
}

// --- Packs of elements ---------------------------------------------------------------------------

// What one access moves: 16 bytes or one element.
template <typename T, int W>
struct alignas(W * sizeof(T)) Pack {
  static_assert(W == 1 || W == kVec<T>);
  T v[W];
};

// Loads what no thread writes; p is aligned to the pack.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> LoadPack(const T* p) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.v[0] = __ldg(p);
  } else {
    *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
  }
  return pack;
}

// The same for what is read once: it shall not push parameters out of the L1 cache.
template <int W, typename T>
__device__ __forceinline__ Pack<T, W> LoadPackOnce(const T* p) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.v[0] = __ldcs(p);
  } else {
    *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(p));
  }
  return pack;
}

// Makes the compiler convert 16-bit elements anew in every pass over them: converted ones would
// take twice the registers.
template <typename T, int W>
__device__ __forceinline__ void KeepPacked(Pack<T, W>& pack) {
  if constexpr (sizeof(T) == 2 && W > 1) {
    auto& words = *reinterpret_cast<uint4*>(&pack);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
}

template <int W, typename T>
__device__ __forceinline__ void StorePack(T* p, const Pack<T, W>& pack) {
  if constexpr (W == 1) {
    *p = pack.v[0];
  } else {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&pack);
  }
}

// W values of a parameter or of column sums; `p` is aligned to min(W * sizeof(A), 16) bytes.
template <int W, typename A>
__device__ __forceinline__ void LoadParam(const A* p, A absent, A (&values)[W]) {
  constexpr int kStep = W == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    if (p == nullptr) {
#pragma unroll
      for (int k = 0; k < kStep; ++k) values[j + k] = absent;
    } else {
      const auto pack = LoadPack<kStep>(p + j);
#pragma unroll
      for (int k = 0; k < kStep; ++k) values[j + k] = pack.v[k];
    }
  }
}

template <int W, typename A>
__device__ __forceinline__ void StoreSums(A* p, const A (&values)[W]) {
  constexpr int kStep = W == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    Pack<A, kStep> pack;
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] = values[j + k];
    StorePack(p + j, pack);
  }
}

template <typename A>
__device__ __forceinline__ const A* GroupRow(const Param& param, std::int64_t group) {
  if (param.data == nullptr) return nullptr;
  return static_cast<const A*>(param.data) + group * param.group_stride;
}

// Which group's parameters to use; saves the division where all groups share them.
__device__ __forceinline__ std::int64_t ParamGroup(const LayerNormFwdArgs& args, std::int64_t row) {
  return args.scale.group_stride == 0 && args.bias.group_stride == 0 ? 0 : row / args.shape.rows;
}

__device__ __forceinline__ float Rsqrt(float value) {
  return rsqrtf(value);
}
__device__ __forceinline__ double Rsqrt(double value) {
  return rsqrt(value);
}

// --- Forward -------------------------------------------------------------------------------------

// y for one pack of columns. Without centering, shift and offset are 0.
template <typename T, int W>
__device__ __forceinline__ void StoreOutput(const Pack<T, W>& x, T* y, const Accum<T>* scale,
                                            const Accum<T>* bias, Accum<T> shift, Accum<T> offset,
                                            Accum<T> rstd, std::int64_t column) {
  using A = Accum<T>;
  A scales[W], biases[W];
  LoadParam(scale == nullptr ? nullptr : scale + column, A{1}, scales);
  LoadParam(bias == nullptr ? nullptr : bias + column, A{0}, biases);
  Pack<T, W> out;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const A x_hat = ((static_cast<A>(x.v[j]) - shift) - offset) * rstd;
    out.v[j] = static_cast<T>(x_hat * scales[j] + biases[j]);
  }
  StorePack(y + column, out);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(kForwardThreads<Tile>, kForwardBlocks<Tile>)
    ForwardKernel(const LayerNormFwdArgs args) {
  using A = Accum<T>;
  constexpr int W = Tile::kWidth, kTeam = Tile::kTeam, kPacks = Tile::kPacks;
  constexpr int kThreads = kForwardThreads<Tile>, kTeams = kThreads / kTeam;
  using Sum = TeamSum<A, kThreads, kTeam, 1>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);

  const int features = static_cast<int>(args.shape.features);
  const A inverse_n = A{1} / static_cast<A>(features > 0 ? features : 1);
  const int lane = static_cast<int>(threadIdx.x) % kTeam;
  const auto column = [=](int i) { return (i * kTeam + lane) * W; };
  const std::int64_t rows = args.shape.groups * args.shape.rows;
  // The block's teams leave the loop together, as a warp may be shared by several.
  for (std::int64_t first = std::int64_t{blockIdx.x} * kTeams; first < rows;
       first += std::int64_t{gridDim.x} * kTeams) {
    const std::int64_t row = first + threadIdx.x / kTeam;
    const int columns = row < rows ? features : 0;  // a team without a row does nothing
    const T* const x_row = static_cast<const T*>(args.x) + row * features;
    Pack<T, W> x[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (column(i) < columns) x[i] = LoadPackOnce<W>(x_row + column(i));
    }

    A shift = 0, offset = 0;
    if (args.centered) {
      if (columns > 0) shift = static_cast<A>(x_row[0]);
      A total[1] = {0};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) < columns) {
#pragma unroll
          for (int j = 0; j < W; ++j) total[0] += static_cast<A>(x[i].v[j]) - shift;
        }
      }
      sum(total);
      offset = total[0] * inverse_n;
    }
    A squares[1] = {0};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      KeepPacked(x[i]);
      if (column(i) < columns) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A centered = (static_cast<A>(x[i].v[j]) - shift) - offset;
          squares[0] += centered * centered;
        }
      }
    }
    sum(squares);
    const A rstd = Rsqrt(squares[0] * inverse_n + static_cast<A>(args.epsilon));

    const std::int64_t group = ParamGroup(args, row);
    const A* const scale = GroupRow<A>(args.scale, group);
    const A* const bias = GroupRow<A>(args.bias, group);
    T* const y = static_cast<T*>(args.y) + row * features;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      KeepPacked(x[i]);
      if (column(i) < columns) StoreOutput(x[i], y, scale, bias, shift, offset, rstd, column(i));
    }
    if (lane == 0 && row < rows) {
      if (args.centered) static_cast<A*>(args.mean)[row] = shift + offset;
      static_cast<A*>(args.rstd)[row] = rstd;
    }
  }
}

// A row per block, read twice. Each thread keeps count, mean and centered sum of squares of what it
// has seen and merges it with that of the next few packs: Chan, Golub, LeVeque (1983).
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads) ForwardStreamKernel(const LayerNormFwdArgs args) {
  using A = Accum<T>;
  constexpr int kPacks = W == 1 ? 8 : W == 2 ? 2 : 4;
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = TeamSum<A, kStreamThreads, kStreamThreads, 1>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);

  const std::int64_t features = args.shape.features, rows = args.shape.groups * args.shape.rows;
  const A inverse_n = A{1} / static_cast<A>(features);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const x_row = static_cast<const T*>(args.x) + row * features;
    const A shift = args.centered ? static_cast<A>(x_row[0]) : A{0};
    A count = 0, mean = 0, squares = 0;  // of x - shift
    for (std::int64_t first = threadIdx.x * W; first < features; first += kPacks * kStep) {
      Pack<T, W> x[kPacks];
      A part_sum = 0, part_squares = 0;
      int packs = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first + i * kStep < features) x[i] = LoadPack<W>(x_row + first + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first + i * kStep < features) {
          ++packs;
#pragma unroll
          for (int j = 0; j < W; ++j) part_sum += static_cast<A>(x[i].v[j]) - shift;
        }
      }
      const A part_count = static_cast<A>(packs * W);
      const A part_mean = args.centered ? part_sum / part_count : A{0};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        KeepPacked(x[i]);
        if (first + i * kStep < features) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const A centered = (static_cast<A>(x[i].v[j]) - shift) - part_mean;
            part_squares += centered * centered;
          }
        }
      }
      const A delta = part_mean - mean;
      const A fraction = part_count / (count + part_count);
      squares += part_squares + delta * delta * count * fraction;
      mean += delta * fraction;
      count += part_count;
    }
    A total[1] = {mean * count};
    sum(total);
    const A offset = total[0] * inverse_n;
    A total_squares[1] = {squares + count * (mean - offset) * (mean - offset)};
    sum(total_squares);
    const A rstd = Rsqrt(total_squares[0] * inverse_n + static_cast<A>(args.epsilon));

    const std::int64_t group = ParamGroup(args, row);
    const A* const scale = GroupRow<A>(args.scale, group);
    const A* const bias = GroupRow<A>(args.bias, group);
    T* const y = static_cast<T*>(args.y) + row * features;
    // Backwards: what was read last is still in the caches.
    const std::int64_t vectors = (features / W - 1 - threadIdx.x) / kStreamThreads;
#pragma unroll 4
    for (std::int64_t i = vectors; i >= 0; --i) {
      const std::int64_t column = i * kStep + threadIdx.x * W;
      if (column < features) {
        const auto x = LoadPack<W>(x_row + column);
        StoreOutput(x, y, scale, bias, shift, offset, rstd, column);
      }
    }
    if (threadIdx.x == 0) {
      if (args.centered) static_cast<A*>(args.mean)[row] = shift + offset;
      static_cast<A*>(args.rstd)[row] = rstd;
    }
  }
}

// --- Backward ------------------------------------------------------------------------------------

// Where the column sums of (group, slot) go: into the workspace, or, if a group has one slot, into
// the results. Null where not wanted.
template <typename A>
struct SlotSums {
  A* dscale;
  A* dbias;
  std::int64_t slots, group_pitch, slot_pitch;

  __device__ std::int64_t Offset(std::int64_t group, std::int64_t slot) const {
    return group * group_pitch + slot * slot_pitch;
  }
};

// One row per team on its way to shared memory. Thread t writes and reads [...][t] only.
template <typename T, typename Tile>
struct RingStage {
  static constexpr int kThreads = kBackwardThreads<Tile>;
  Pack<T, Tile::kWidth> x[Tile::kPacks][kThreads];
  Pack<T, Tile::kWidth> dy[Tile::kPacks][kThreads];
  Accum<T> mean[kThreads], rstd[kThreads];
};

// cp.async copies 4 bytes at least; narrower elements are loaded when they are needed.
template <typename T, typename Tile>
constexpr bool kHasRing = Tile::kWidth * sizeof(T) >= 4;

// For the sums of all teams, in the ring's memory.
template <typename T, typename Tile>
constexpr std::size_t kTeamSumsBytes =
    Tile::kTeam == kBackwardThreads<Tile>
        ? 0
        : 2 * sizeof(Accum<T>) * kBackwardThreads<Tile> * Tile::kPacks * Tile::kWidth;

// Until at most `stages` - 1 of this thread's groups of copies are under way.
__device__ __forceinline__ void WaitForOldest(int stages) {
  static_assert(kMaxStages == 3);
  if (stages == 3) {
    __pipeline_wait_prior(2);
  } else if (stages == 2) {
    __pipeline_wait_prior(1);
  } else {
    __pipeline_wait_prior(0);
  }
}

template <typename T, typename Tile, bool kCentered>
__global__ void __launch_bounds__(kBackwardThreads<Tile>, kBackwardBlocks<Tile>)
    BackwardKernel(const LayerNormBwdArgs args, const SlotSums<Accum<T>> sums, int stages) {
  using A = Accum<T>;
  using Stage = RingStage<T, Tile>;
  constexpr int W = Tile::kWidth, kTeam = Tile::kTeam, kPacks = Tile::kPacks;
  constexpr int kThreads = kBackwardThreads<Tile>, kTeams = kThreads / kTeam;
  constexpr bool kRing = kHasRing<T, Tile>;
  constexpr int kValues = kCentered ? 3 : 1;
  using Sum = TeamSum<A, kThreads, kTeam, kValues>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Stage* const ring = reinterpret_cast<Stage*>(dynamic_shared);
  Sum sum(storage);

  const int features = static_cast<int>(args.shape.features);
  const A inverse_n = A{1} / static_cast<A>(features);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kTeam, team = thread / kTeam;
  const auto column = [=](int i) { return (i * kTeam + lane) * W; };
  const std::int64_t rows = args.shape.rows;
  const std::int64_t step = sums.slots * kTeams;
  for (std::int64_t item = blockIdx.x; item < args.shape.groups * sums.slots; item += gridDim.x) {
    const std::int64_t group = item / sums.slots, slot = item % sums.slots;
    const T* const x_group = static_cast<const T*>(args.x) + group * rows * features;
    const T* const dy_group = static_cast<const T*>(args.dy) + group * rows * features;
    const A* const mean_group =
        kCentered ? static_cast<const A*>(args.mean) + group * rows : nullptr;
    const A* const rstd_group = static_cast<const A*>(args.rstd) + group * rows;
    const A* const scale_group = GroupRow<A>(args.scale, group);
    A scale[kPacks][W], dscale[kPacks][W] = {}, dbias[kPacks][W] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (column(i) < features) {
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column(i), A{1}, scale[i]);
      }
    }

    const auto fetch = [&](int stage, std::int64_t row) {
      if constexpr (kRing) {
        if (row < rows) {
#pragma unroll
          for (int i = 0; i < kPacks; ++i) {
            if (column(i) >= features) continue;
            const std::int64_t offset = row * features + column(i);
            __pipeline_memcpy_async(&ring[stage].x[i][thread], x_group + offset, W * sizeof(T));
            __pipeline_memcpy_async(&ring[stage].dy[i][thread], dy_group + offset, W * sizeof(T));
          }
          if (kCentered) {
            __pipeline_memcpy_async(&ring[stage].mean[thread], mean_group + row, sizeof(A));
          }
          __pipeline_memcpy_async(&ring[stage].rstd[thread], rstd_group + row, sizeof(A));
        }
        __pipeline_commit();  // also where there is nothing: groups are counted
      }
    };
    std::int64_t first = slot * kTeams;  // row of the block's first team
    std::int64_t next_row = first + team;
    for (int stage = 0; stage < stages; ++stage, next_row += step) fetch(stage, next_row);

    // All of the block's teams make the same number of turns, as a warp may be shared by several.
    for (int stage = 0; first < rows; first += step) {
      const std::int64_t row = first + team;
      const bool active = row < rows;
      const int columns = active ? features : 0;
      Pack<T, W> x[kPacks], dy[kPacks];
      A mean = 0, rstd = 0;
      if constexpr (kRing) {
        WaitForOldest(stages);  // a thread sees its own copies: no barrier
        if (active) {
          if (kCentered) mean = ring[stage].mean[thread];
          rstd = ring[stage].rstd[thread];
        }
      } else if (active) {
        if (kCentered) mean = __ldg(mean_group + row);
        rstd = __ldg(rstd_group + row);
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) >= columns) continue;
        if constexpr (kRing) {
          x[i] = ring[stage].x[i][thread];
          dy[i] = ring[stage].dy[i][thread];
        } else {
          x[i] = LoadPackOnce<W>(x_group + row * features + column(i));
          dy[i] = LoadPackOnce<W>(dy_group + row * features + column(i));
        }
      }

      A total[kValues] = {};  // of wdy * shifted, wdy, shifted
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) >= columns) continue;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A shifted = static_cast<A>(x[i].v[j]) - mean;
          const A wdy = static_cast<A>(dy[i].v[j]) * scale[i][j];
          total[0] += wdy * shifted;
          if constexpr (kCentered) {
            total[1] += wdy;
            total[2] += shifted;
          }
        }
      }
      sum(total);
      // The sums depend on all that this thread read from the stage, so it is free now.
      fetch(stage, next_row);
      next_row += step;
      stage = stage + 1 == stages ? 0 : stage + 1;

      A delta = 0, mean_wdy = 0, sum_wdy_centered = total[0];
      if constexpr (kCentered) {
        // The saved mean is rounded: the mean of the differences from it is what it is off by.
        delta = total[2] * inverse_n;
        mean_wdy = total[1] * inverse_n;
        sum_wdy_centered -= delta * total[1];
      }
      const A mean_wdy_x_hat = sum_wdy_centered * rstd * inverse_n;
      T* const dx = static_cast<T*>(args.dx) + (group * rows + row) * features;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) >= columns) continue;
        KeepPacked(x[i]);
        KeepPacked(dy[i]);
        Pack<T, W> out;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A dy_j = static_cast<A>(dy[i].v[j]);
          const A x_hat = ((static_cast<A>(x[i].v[j]) - mean) - delta) * rstd;
          dscale[i][j] += dy_j * x_hat;
          if constexpr (kCentered) dbias[i][j] += dy_j;
          out.v[j] = static_cast<T>(
              NormInputGrad(dy_j * scale[i][j], x_hat, mean_wdy, mean_wdy_x_hat, rstd));
        }
        StorePack(dx + column(i), out);
      }
    }

    const std::int64_t offset = sums.Offset(group, slot);
    if constexpr (kTeams == 1) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) >= features) continue;
        if (sums.dscale != nullptr) StoreSums(sums.dscale + offset + column(i), dscale[i]);
        if (sums.dbias != nullptr) StoreSums(sums.dbias + offset + column(i), dbias[i]);
      }
    } else {
      // [sum][team][element][lane], so that neighbouring threads access neighbouring words.
      constexpr int kTeamElements = kPacks * W * kTeam, kBlockElements = kTeams * kTeamElements;
      A* const shared = reinterpret_cast<A*>(dynamic_shared);
      __syncthreads();  // no thread reads the ring any more, whose memory is used from here on
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const int element = team * kTeamElements + (i * W + j) * kTeam + lane;
          shared[element] = dscale[i][j];
          shared[kBlockElements + element] = dbias[i][j];
        }
      }
      __syncthreads();  // all teams' sums are written
      for (int element = thread; element < kTeamElements; element += kThreads) {
        const int index = element / kTeam;
        const int feature = (index / W * kTeam + element % kTeam) * W + index % W;
        if (feature >= features) continue;
        A total_dscale = 0, total_dbias = 0;
#pragma unroll
        for (int t = 0; t < kTeams; ++t) {
          total_dscale += shared[t * kTeamElements + element];
          total_dbias += shared[kBlockElements + t * kTeamElements + element];
        }
        if (sums.dscale != nullptr) sums.dscale[offset + feature] = total_dscale;
        if (sums.dbias != nullptr) sums.dbias[offset + feature] = total_dbias;
      }
      __syncthreads();  // all sums are read before the next item's rows come into the ring
    }
  }
}

// Adds to sums that this thread alone uses, in shared or global memory.
template <int W, typename A>
__device__ __forceinline__ void AddTo(A* p, const A (&values)[W]) {
  constexpr int kStep = W == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < W; j += kStep) {
    auto pack = *reinterpret_cast<const Pack<A, kStep>*>(p + j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] += values[j + k];
    StorePack(p + j, pack);
  }
}

// A block per row, which reads it twice. Column sums are in shared memory where they fit, else in
// the partial row itself; either way each thread owns its columns, which needs no barrier.
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads, 1)
    BackwardStreamKernel(const LayerNormBwdArgs args, const SlotSums<Accum<T>> sums,
                         bool sums_in_shared) {
  using A = Accum<T>;
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = TeamSum<A, kStreamThreads, kStreamThreads, 3>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Sum sum(storage);

  const std::int64_t features = args.shape.features, rows = args.shape.rows;
  const A inverse_n = A{1} / static_cast<A>(features);
  const std::int64_t start = threadIdx.x * W;
  const std::int64_t turns = (features - start + kStep - 1) / kStep;
  for (std::int64_t item = blockIdx.x; item < args.shape.groups * sums.slots; item += gridDim.x) {
    const std::int64_t group = item / sums.slots, slot = item % sums.slots;
    const std::int64_t sums_offset = sums.Offset(group, slot);
    A* const slot_sums[2] = {sums.dscale == nullptr ? nullptr : sums.dscale + sums_offset,
                             sums.dbias == nullptr ? nullptr : sums.dbias + sums_offset};
    A* block_sums[2] = {slot_sums[0], slot_sums[1]};
    if (sums_in_shared) {
      A* const shared = reinterpret_cast<A*>(dynamic_shared);
      if (slot_sums[0] != nullptr) block_sums[0] = shared;
      if (slot_sums[1] != nullptr)
        block_sums[1] = slot_sums[0] == nullptr ? shared : shared + features;
    }
    const A zeros[W] = {};
    for (std::int64_t i = 0; i < turns; ++i) {
      for (A* const s : block_sums) {
        if (s != nullptr) StoreSums(s + start + i * kStep, zeros);
      }
    }
    const A* const scale_group = GroupRow<A>(args.scale, group);
    for (std::int64_t row = group * rows + slot; row < (group + 1) * rows; row += sums.slots) {
      const T* const x_row = static_cast<const T*>(args.x) + row * features;
      const T* const dy_row = static_cast<const T*>(args.dy) + row * features;
      T* const dx_row = static_cast<T*>(args.dx) + row * features;
      const A mean = args.centered ? __ldg(static_cast<const A*>(args.mean) + row) : A{0};
      const A rstd = __ldg(static_cast<const A*>(args.rstd) + row);
      A total[3] = {};  // of wdy * shifted, wdy, shifted
#pragma unroll 2
      for (std::int64_t i = 0; i < turns; ++i) {
        const std::int64_t column = start + i * kStep;
        const auto x = LoadPack<W>(x_row + column);
        const auto dy = LoadPack<W>(dy_row + column);
        A scale[W];
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column, A{1}, scale);
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A shifted = static_cast<A>(x.v[j]) - mean;
          const A wdy = static_cast<A>(dy.v[j]) * scale[j];
          total[0] += wdy * shifted;
          total[1] += wdy;
          total[2] += shifted;
        }
      }
      sum(total);
      const A delta = args.centered ? total[2] * inverse_n : A{0};
      const A mean_wdy = args.centered ? total[1] * inverse_n : A{0};
      const A mean_wdy_x_hat = (total[0] - delta * total[1]) * rstd * inverse_n;
      // Backwards: what was read last is still in the caches.
#pragma unroll 2
      for (std::int64_t i = turns - 1; i >= 0; --i) {
        const std::int64_t column = start + i * kStep;
        const auto x = LoadPack<W>(x_row + column);
        const auto dy_pack = LoadPack<W>(dy_row + column);
        A scale[W], dy[W], dy_x_hat[W];
        LoadParam(scale_group == nullptr ? nullptr : scale_group + column, A{1}, scale);
        Pack<T, W> out;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          dy[j] = static_cast<A>(dy_pack.v[j]);
          const A x_hat = ((static_cast<A>(x.v[j]) - mean) - delta) * rstd;
          dy_x_hat[j] = dy[j] * x_hat;
          out.v[j] = static_cast<T>(
              NormInputGrad(dy[j] * scale[j], x_hat, mean_wdy, mean_wdy_x_hat, rstd));
        }
        StorePack(dx_row + column, out);
        if (block_sums[0] != nullptr) AddTo(block_sums[0] + column, dy_x_hat);
        if (block_sums[1] != nullptr) AddTo(block_sums[1] + column, dy);
      }
    }
    if (!sums_in_shared) continue;
    for (std::int64_t i = 0; i < turns; ++i) {
      const std::int64_t column = start + i * kStep;
      for (int s = 0; s < 2; ++s) {
        if (slot_sums[s] == nullptr) continue;
        A values[W] = {};
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] = block_sums[s][column + j];
        StoreSums(slot_sums[s] + column, values);
      }
    }
  }
}

// --- Launchers -----------------------------------------------------------------------------------

// Whether all rows start at 16-byte boundaries, in arrays of T as well as of Accum<T>.
template <typename T, typename... Pointers>
bool Aligned(std::int64_t features, const Pointers*... pointers) {
  return features % kVec<T> == 0 &&
         ((reinterpret_cast<std::uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

template <typename T>
ffi::Error Forward(cudaStream_t stream, const LayerNormFwdArgs& args) {
  const std::int64_t rows = args.shape.all_rows(), features = args.shape.features;
  const bool aligned = Aligned<T>(features, args.x, args.y, args.scale.data, args.bias.data);
  if (rows == 0) return ffi::Error::Success();
  const auto launch = [&]<typename Tile>() {
    constexpr int kThreads = kForwardThreads<Tile>;
    ForwardKernel<T, Tile>
        <<<GridBlocks(CeilDiv(rows, kThreads / Tile::kTeam)), kThreads, 0, stream>>>(args);
  };
  const bool launched = aligned ? DispatchTile(ForwardTiles<T>{}, features, launch)
                                : DispatchTile(ForwardElementTiles<T>{}, features, launch);
  if (!launched && aligned) {
    ForwardStreamKernel<T, kVec<T>><<<GridBlocks(rows), kStreamThreads, 0, stream>>>(args);
  } else if (!launched) {
    ForwardStreamKernel<T, 1><<<GridBlocks(rows), kStreamThreads, 0, stream>>>(args);
  }
  return LastError(args.centered ? "layer_norm_fwd" : "rms_norm_fwd");
}

// How a persistent kernel runs on a device.
struct Residency {
  int stages, blocks;  // blocks per multiprocessor
  std::size_t shared_bytes;
};

template <typename T, typename Tile, bool kCentered>
cudaError_t FindResidency(Residency& residency) {
  constexpr std::size_t kStageBytes = kHasRing<T, Tile> ? sizeof(RingStage<T, Tile>) : 0;
  const auto bytes = [](int stages) {
    return std::max(static_cast<std::size_t>(stages) * kStageBytes, kTeamSumsBytes<T, Tile>);
  };
  static std::array<std::atomic<int>, 64> found{};  // 16 * blocks + stages by device
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const bool cached = device >= 0 && device < 64;
  int packed = cached ? found[static_cast<std::size_t>(device)].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    auto* const kernel = &BackwardKernel<T, Tile, kCentered>;
    int of_block = 0, of_multiprocessor = 0, blocks = 0;
    status = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    device);
    if (status != cudaSuccess) return status;
    // CUDA keeps 1 KB of each block; the kernel's static shared memory is less than another.
    const int budget = std::min(of_block, of_multiprocessor / kBackwardBlocks<Tile> - 1024) - 1024;
    int stages = kMaxStages;
    while (stages > 1 && bytes(stages) > static_cast<std::size_t>(budget)) --stages;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes(stages)));
    if (status != cudaSuccess) return status;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBackwardThreads<Tile>,
                                                           bytes(stages));
    if (status != cudaSuccess) return status;
    packed = 16 * std::max(1, blocks) + stages;
    if (cached) found[static_cast<std::size_t>(device)].store(packed, std::memory_order_relaxed);
  }
  residency = {.stages = packed % 16, .blocks = packed / 16, .shared_bytes = bytes(packed % 16)};
  return cudaSuccess;
}

// The wanted results in the workspace's order.
template <typename A>
ColumnSums<A> WantedSums(const LayerNormBwdArgs& args) {
  ColumnSums<A> wanted{};
  for (void* const result : {args.dscale, args.dbias}) {
    if (result != nullptr) wanted.results[wanted.count++] = static_cast<A*>(result);
  }
  return wanted;
}

// `blocks` run at a time, and work on `rows_per_block` rows each.
template <typename A>
SlotSums<A> CutIntoSlots(const LayerNormBwdArgs& args, std::int64_t blocks, int rows_per_block) {
  const auto [groups, rows, features] = args.shape;
  std::int64_t slots =
      std::min(CeilDiv(rows, rows_per_block), std::max<std::int64_t>(1, blocks / groups));
  const int count = WantedSums<A>(args).count;
  if (count > 0) slots = std::min(slots, args.partial_rows);
  if (slots == 1) {
    return {static_cast<A*>(args.dscale), static_cast<A*>(args.dbias), 1, features, 0};
  }
  auto* const workspace = static_cast<A*>(args.workspace);
  return {args.dscale == nullptr ? nullptr : workspace,
          args.dbias == nullptr ? nullptr : workspace + (count - 1) * features, slots,
          args.partial_rows * count * features, count * features};
}

template <typename T, int W>
cudaError_t LaunchStream(cudaStream_t stream, const LayerNormBwdArgs& args,
                         const SlotSums<Accum<T>>& sums) {
  int device = 0, of_block = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  const std::int64_t bytes = WantedSums<Accum<T>>(args).count * args.shape.features *
                             static_cast<std::int64_t>(sizeof(Accum<T>));
  const bool in_shared = bytes <= of_block - 2048;
  const int shared_bytes = in_shared ? static_cast<int>(bytes) : 0;
  auto* const kernel = &BackwardStreamKernel<T, W>;
  status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, of_block - 2048);
  if (status != cudaSuccess) return status;
  kernel<<<GridBlocks(args.shape.groups * sums.slots), kStreamThreads,
           static_cast<std::size_t>(shared_bytes), stream>>>(args, sums, in_shared);
  return cudaGetLastError();
}

template <typename T, bool kCentered>
ffi::Error Backward(cudaStream_t stream, const LayerNormBwdArgs& args) {
  using A = Accum<T>;
  constexpr const char* kOp = kCentered ? "layer_norm_bwd" : "rms_norm_bwd";
  const auto [groups, rows, features] = args.shape;
  const ColumnSums<A> wanted = WantedSums<A>(args);
  if (args.shape.elements() == 0) {  // sums over no rows: zeros
    LaunchColumnSum<A>(stream, nullptr, wanted, groups, 0, 0, features);
    return LastError(kOp);
  }
  const bool aligned = Aligned<T>(features, args.dy, args.x, args.dx, args.scale.data, args.dscale,
                                  args.dbias, args.workspace);
  cudaError_t status = cudaSuccess;
  SlotSums<A> sums{};
  const auto launch = [&]<typename Tile>() {
    constexpr int kThreads = kBackwardThreads<Tile>;
    Residency residency{};
    status = FindResidency<T, Tile, kCentered>(residency);
    if (status != cudaSuccess) return;
    sums = CutIntoSlots<A>(args, residency.blocks * MultiprocessorCount(), kThreads / Tile::kTeam);
    BackwardKernel<T, Tile, kCentered>
        <<<GridBlocks(args.shape.groups * sums.slots), kThreads, residency.shared_bytes, stream>>>(
            args, sums, residency.stages);
    status = cudaGetLastError();
  };
  const bool launched = aligned ? DispatchTile(BackwardTiles<T>{}, features, launch)
                                : DispatchTile(BackwardElementTiles<T>{}, features, launch);
  if (!launched) {
    sums = CutIntoSlots<A>(args, MultiprocessorCount(), 1);
    status = aligned ? LaunchStream<T, kVec<T>>(stream, args, sums)
                     : LaunchStream<T, 1>(stream, args, sums);
  }
  if (status != cudaSuccess) return ToError(kOp, status);
  if (sums.slots > 1) {
    LaunchColumnSum<A>(stream, static_cast<const A*>(args.workspace), wanted, groups,
                       args.partial_rows, sums.slots, features);
  }
  return LastError(kOp);
}

}  // namespace

ffi::Error LayerNormFwd(CudaContext stream, const LayerNormFwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_fwd", args.dtype,
                       [&]<typename T>() { return Forward<T>(stream, args); });
}

ffi::Error LayerNormBwd(CudaContext stream, const LayerNormBwdArgs& args) {
  return DispatchDtype(FloatTypes{}, "layer_norm_bwd", args.dtype, [&]<typename T>() {
    return args.centered ? Backward<T, true>(stream, args) : Backward<T, false>(stream, args);
  });
}

}  // namespace gradops
