// Which configuration a row gets, and parameters along a row. For layer_norm.cu alone.
#pragma once

#include <cstdint>

#include "cuda/vec.cuh"
#include "ops/layer_norm.h"

namespace gradops {
namespace {

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

}  // namespace
}  // namespace gradops
