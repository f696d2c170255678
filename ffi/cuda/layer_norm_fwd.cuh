// The forward kernels of layer_norm.cu, whose comment describes them.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cuda/layer_norm_tiles.cuh"
#include "cuda/reduce.cuh"

namespace gradops {
namespace {

// y for one pack of columns. The row's mean is mean + delta; without centering, both are 0.
template <typename T, int W>
__device__ __forceinline__ void StoreOutput(const Pack<T, W>& x, T* y, const Accum<T>* scale,
                                            const Accum<T>* bias, Accum<T> mean, Accum<T> delta,
                                            Accum<T> rstd, std::int64_t column) {
  using A = Accum<T>;
  A scales[W], biases[W];
  LoadParam(scale == nullptr ? nullptr : scale + column, A{1}, scales);
  LoadParam(bias == nullptr ? nullptr : bias + column, A{0}, biases);
  Pack<T, W> out;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const A x_hat = ((static_cast<A>(x.v[j]) - mean) - delta) * rstd;
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
  using Sum = TeamSum<A, kThreads, kTeam, 2>;
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

    A mean = 0;
    if (args.centered) {
      const A shift = columns > 0 ? static_cast<A>(x_row[0]) : A{0};
      A total[1] = {0};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (column(i) < columns) {
#pragma unroll
          for (int j = 0; j < W; ++j) total[0] += static_cast<A>(x[i].v[j]) - shift;
        }
      }
      sum(total);
      mean = shift + total[0] * inverse_n;
    }
    A sums[2] = {};  // of x - mean and its square
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      KeepPacked(x[i]);
      if (column(i) < columns) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const A centered = static_cast<A>(x[i].v[j]) - mean;
          sums[0] += centered;
          sums[1] += centered * centered;
        }
      }
    }
    sum(sums);
    const A delta = args.centered ? sums[0] * inverse_n : A{0};
    const A rstd =
        InverseDeviation(VarianceOf(sums[1] * inverse_n, delta), static_cast<A>(args.epsilon));

    const std::int64_t group = ParamGroup(args, row);
    const A* const scale = GroupRow<A>(args.scale, group);
    const A* const bias = GroupRow<A>(args.bias, group);
    T* const y = static_cast<T*>(args.y) + row * features;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      KeepPacked(x[i]);
      if (column(i) < columns) StoreOutput(x[i], y, scale, bias, mean, delta, rstd, column(i));
    }
    if (lane == 0 && row < rows) {
      if (args.centered) static_cast<A*>(args.mean)[row] = mean + delta;
      static_cast<A*>(args.rstd)[row] = rstd;
    }
  }
}

// A row per block, read twice. Each thread keeps count, mean and centered sum of squares of what it
// has seen and merges it with that of the next few packs: Chan, Golub, LeVeque (1983). Means are of
// differences from the thread's own first element, so that an outlier among those costs accuracy in
// one thread's share alone; the shares' means then go through what elements do in a tile.
template <typename T, int W>
__global__ void __launch_bounds__(kStreamThreads) ForwardStreamKernel(const LayerNormFwdArgs args) {
  using A = Accum<T>;
  constexpr int kPacks = W == 1 ? 8 : W == 2 ? 2 : 4;
  constexpr int kUnroll = W == 2 ? 1 : 4;  // of double, more would spill
  constexpr std::int64_t kStep = kStreamThreads * W;
  using Sum = TeamSum<A, kStreamThreads, kStreamThreads, 2>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);

  const std::int64_t features = args.shape.features, rows = args.shape.groups * args.shape.rows;
  const A inverse_n = A{1} / static_cast<A>(features);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const x_row = static_cast<const T*>(args.x) + row * features;
    const bool has_shift = args.centered && threadIdx.x * W < features;
    const A shift = has_shift ? static_cast<A>(x_row[threadIdx.x * W]) : A{0};
    int packs_seen = 0;
    A share_mean = 0, squares = 0;  // of x - shift
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
      const A part_mean = args.centered ? part_sum / static_cast<A>(packs * W) : A{0};
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
      const A difference = part_mean - share_mean;
      const A count = static_cast<A>(packs_seen * W);  // may be 0
      packs_seen += packs;
      const A fraction = static_cast<A>(packs) / static_cast<A>(packs_seen);
      squares += part_squares + difference * (count * fraction * difference);
      share_mean += difference * fraction;
    }
    const A count = static_cast<A>(packs_seen * W);
    A mean = 0;
    if (args.centered) {
      const A row_shift = static_cast<A>(x_row[0]);
      A total[1] = {count * ((shift - row_shift) + share_mean)};
      sum(total);
      mean = row_shift + total[0] * inverse_n;
    }
    const A centered_mean = (shift - mean) + share_mean;
    A sums[2] = {count * centered_mean, squares + count * centered_mean * centered_mean};
    sum(sums);
    const A delta = args.centered ? sums[0] * inverse_n : A{0};
    const A rstd =
        InverseDeviation(VarianceOf(sums[1] * inverse_n, delta), static_cast<A>(args.epsilon));

    const std::int64_t group = ParamGroup(args, row);
    const A* const scale = GroupRow<A>(args.scale, group);
    const A* const bias = GroupRow<A>(args.bias, group);
    T* const y = static_cast<T*>(args.y) + row * features;
    // Backwards: what was read last is still in the caches.
    const std::int64_t vectors = (features / W - 1 - threadIdx.x) / kStreamThreads;
#pragma unroll kUnroll
    for (std::int64_t i = vectors; i >= 0; --i) {
      const std::int64_t column = i * kStep + threadIdx.x * W;
      if (column < features) {
        const auto x = LoadPack<W>(x_row + column);
        StoreOutput(x, y, scale, bias, mean, delta, rstd, column);
      }
    }
    if (threadIdx.x == 0) {
      if (args.centered) static_cast<A*>(args.mean)[row] = mean + delta;
      static_cast<A*>(args.rstd)[row] = rstd;
    }
  }
}

}  // namespace
}  // namespace gradops
