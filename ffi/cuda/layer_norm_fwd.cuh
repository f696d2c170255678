// The forward kernels of layer_norm.cu, whose comment describes them.
#pragma once

#include <cstdint>

#include "cuda/layer_norm_tiles.cuh"
#include "cuda/reduce.cuh"

namespace gradops {
namespace {

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

}  // namespace
}  // namespace gradops
