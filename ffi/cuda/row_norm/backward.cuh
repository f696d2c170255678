// The kernel of backward.cu for many rows.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/math.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/reciprocal.cuh"
#include "cuda/common/row_sum.cuh"
#include "cuda/row_norm/place.cuh"
#include "cuda/row_norm/ring.cuh"

namespace gradops {
namespace {

// --- Column sums ---------------------------------------------------------------------------------

// Each cluster stores its column sums of a group here: in the workspace or, if each group has one
// cluster, in the results. Null: the sums are not wanted, or another kernel adds them up.
template <typename A>
struct PartialSums {
  A* results[3];  // dscale, dbias, dresidual_bias
  std::int64_t group_pitch, cluster_pitch;
};

// After this many iterations a thread adds its sums in registers to the cluster's sums. This keeps
// rounding errors almost independent of the number of rows. Double needs no limit.
constexpr int kIterationsPerSum = 128;

// Stores sums at p, or adds them to the sums there. p is aligned to 16 bytes, or to a single value.
template <int N, typename A>
__device__ __forceinline__ void StoreOrAdd(A* p, const A (&values)[N], bool store) {
  constexpr int kStep = N == 1 ? 1 : kVec<A>;
  for (int j = 0; j < N; j += kStep) {
    Vector<A, kStep> vector{};
    if (!store) vector = *reinterpret_cast<const Vector<A, kStep>*>(p + j);
    for (int k = 0; k < kStep; ++k)
      vector.v[k] = store ? values[j + k] : vector.v[k] + values[j + k];
    StoreVector(p + j, vector);
  }
}

// Adds up the sums of teams, each with `pitch` sums in shared memory. Stores them, or adds them to
// the sums at `to`. All threads of the block call it.
template <typename A>
__device__ __forceinline__ void AddTeams(const A* part, int teams, int pitch, int columns, A* to,
                                         bool store) {
  for (int column = static_cast<int>(threadIdx.x); column < columns;
       column += static_cast<int>(blockDim.x)) {
    A total[1] = {part[column]};
    for (int team = 1; team < teams; ++team) total[0] += part[team * pitch + column];
    StoreOrAdd(to + column, total, store);
  }
}

// Adds up the column sums of a block's threads. Stores them, or adds them to the cluster's sums.
template <typename T, int P, Layout kLayout>
class BlockSums {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;
  static constexpr bool kMasked = kLayout == Layout::kMasked;

 public:
  // shared: 2 * P * W values per thread; not used if the block has one team.
  __device__ BlockSums(const BackwardSplit& split, const Place<T, P, kLayout, false>& place,
                       unsigned char* shared)
      : split_(split), place_(place), shared_(reinterpret_cast<A*>(shared)) {}

  // All threads of the block call it. s is the part of `shared` to use, 0 or 1. `to` is the place
  // of the group's first column, or null. If `first`, the sums are stored, not added.
  __device__ __forceinline__ void Give(int s, A (&sums)[P][W], A* to, bool first) const {
    const int row_threads = split_.row_threads;
    if (row_threads < kWarp) {
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        if (distance < row_threads) continue;  // these threads have other columns
#pragma unroll
        for (int i = 0; i < P; ++i) {
          for (int j = 0; j < W; ++j) {
            sums[i][j] += __shfl_xor_sync(0xffffffffu, sums[i][j], distance);
          }
        }
      }
    }
    if (split_.teams == 1) {
      if (to == nullptr || place_.row > 0) return;
      to += place_.first_column - place_.misalignment() + place_.base;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (place_.Lacks(i) || !place_.Owns(i)) continue;
        if constexpr (!kMasked) {
          StoreOrAdd(to + place_.Begin(i), sums[i], first);
        } else {
          for (int j = 0; j < W; ++j) {
            const A one[1] = {sums[i][j]};
            if (place_.Has(i, j)) StoreOrAdd(to + place_.Begin(i) + j, one, first);
          }
        }
      }
      return;
    }
    // Layout: [sum][team][column]. A block of several teams has whole rows.
    const int elements = P * W * row_threads;
    A* const part = shared_ + s * split_.teams * elements;
    if (place_.row == 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (!place_.Owns(i)) continue;
        for (int j = 0; j < W; ++j) {
          const int column = place_.base + place_.Begin(i) + j - place_.misalignment();
          if (!kMasked || place_.Has(i, j)) part[place_.team * elements + column] = sums[i][j];
        }
      }
    }
    __syncthreads();  // all teams' sums are written
    if (to == nullptr) return;
    AddTeams(part, split_.teams, elements, place_.high() - place_.misalignment(), to, first);
  }

 private:
  const BackwardSplit& split_;
  const Place<T, P, kLayout, false>& place_;
  A* const shared_;
};

// Each thread's sums of dx. Only that thread reads and writes them. They are in shared memory as
// registers are short. The 16-byte vectors of neighbouring threads lie side by side.
template <typename T, int P>
class DxSums {
  using A = Accum<T>;
  static constexpr int W = kVec<T>, N = kVec<A>;

 public:
  // shared: P * W values per thread.
  __device__ explicit DxSums(unsigned char* shared)
      : own_(reinterpret_cast<A*>(shared) + threadIdx.x * N) {}

  __device__ __forceinline__ void Clear() const {
#pragma unroll
    for (int at = 0; at < P * W / N; ++at) StoreVector(Chunk(at), Vector<A, N>{});
  }
  // Adds dx to the sums of vector i.
  __device__ __forceinline__ void Add(int i, const A (&dx)[W]) const {
    for (int j = 0; j < W; j += N) {
      A* const p = Chunk((i * W + j) / N);
      auto vector = *reinterpret_cast<const Vector<A, N>*>(p);
      for (int k = 0; k < N; ++k) vector.v[k] += dx[j + k];
      StoreVector(p, vector);
    }
  }
  __device__ __forceinline__ void Get(A (&sums)[P][W]) const {
#pragma unroll
    for (int c = 0; c < P * W; ++c) sums[c / W][c % W] = Chunk(c / N)[c % N];
  }

 private:
  __device__ __forceinline__ A* Chunk(int at) const {
    return own_ + at * static_cast<int>(blockDim.x) * N;
  }
  A* const own_;
};

// --- dx ------------------------------------------------------------------------------------------

// How many sums over a row its gradient needs: of wdy * centered; layer norm, of wdy; from the
// input, of centered, if the row is not well conditioned.
constexpr int RowSumsOf(bool centered, bool from_output) {
  return !centered ? 1 : from_output ? 2 : 3;
}

// Layer norm: x - mean. RMS norm: x. From the output: x_hat.
template <bool kCentered, bool kFromOutput, typename A>
__device__ __forceinline__ A Centered(A value, A mean, A scale, A bias) {
  if constexpr (kFromOutput) {
    // The reciprocal of a subnormal scale is infinite.
    return abs(scale) < std::numeric_limits<A>::min() ? A{0} : (value - bias) * Reciprocal(scale);
  }
  return kCentered ? value - mean : value;
}

// What the gradient with respect to a row needs beside the row's elements.
template <bool kCentered, bool kFromOutput, typename A>
struct RowGradient {
  // x_hat = centered * factor + shift. shift corrects the saved mean's rounding.
  A rstd, factor, shift = 0, mean_wdy = 0, mean_wdy_x_hat;

  // totals: the sums over the row. careful: they have the sum of what is centered, too, and the
  // saved mean's rounding is corrected.
  __device__ __forceinline__ RowGradient(const A (&totals)[RowSumsOf(kCentered, kFromOutput)],
                                         A mean, A rstd, bool careful, A inverse_n)
      : rstd(rstd), factor(kFromOutput ? A{1} : rstd), mean_wdy_x_hat(totals[0]) {
    if constexpr (kCentered && !kFromOutput) {
      if (careful) {
        const A delta = MeanRounding(totals[2] * inverse_n, mean);
        mean_wdy_x_hat -= delta * totals[1];
        shift = -delta * rstd;
      }
    }
    if constexpr (kCentered) mean_wdy = totals[1] * inverse_n;
    mean_wdy_x_hat *= factor * inverse_n;
  }
  __device__ __forceinline__ A XHat(A centered) const {
    return kCentered && !kFromOutput ? centered * factor + shift : centered * factor;
  }
  __device__ __forceinline__ A Dx(A wdy, A x_hat) const {
    return NormInputGrad(wdy, x_hat, mean_wdy, mean_wdy_x_hat, rstd);
  }
};

// A thread's part of a row, and of the gradient with respect to that row.
template <typename T, int P, Layout kLayout, bool kCentered, bool kFromOutput>
struct ThreadRow {
  using A = Accum<T>;
  static constexpr int W = kVec<T>, kValues = RowSumsOf(kCentered, kFromOutput);
  static constexpr bool kMasked = kLayout == Layout::kMasked, kShift = kCentered && !kFromOutput;
  static constexpr int kBiases = kFromOutput ? P : 1;

  const Place<T, P, kLayout, false>& place;
  const A (&scale)[P][W];
  const A (&bias)[kBiases][W];
  const Vector<T, W> (&dy_vectors)[P];
  const Vector<T, W> (&x_vectors)[P];
  const A mean, rstd;

  __device__ __forceinline__ A Bias(int i, int j) const {
    return kFromOutput ? bias[i % kBiases][j] : A{0};
  }

  // Adds the thread's columns to the sums over the row.
  __device__ __forceinline__ void AddUp(bool well_conditioned, A (&totals)[kValues]) const {
    if (!kShift || well_conditioned) {
      AddUpIf<true>(totals);
    } else {
      AddUpIf<false>(totals);
    }
  }
  template <bool kWellConditioned>
  __device__ __forceinline__ void AddUpIf(A (&totals)[kValues]) const {
    place.ForVectors([&]<bool kAll>(int i) {
      if (!kAll && place.Lacks(i)) return;
      A dy[W], x[W];
      Widen(x_vectors[i], x);
      Widen(dy_vectors[i], dy);
      for (int j = 0; j < W; ++j) {
        if (!kAll && !place.Has(i, j)) continue;
        const A centered = Centered<kCentered, kFromOutput>(x[j], mean, scale[i][j], Bias(i, j)),
                wdy = dy[j] * scale[i][j];
        // The first term is not added to 0. That would take an instruction: -0 + 0 is 0.
        const bool alone = !kMasked && i == 0 && j == 0;
        totals[0] = alone ? wdy * centered : totals[0] + wdy * centered;
        if constexpr (kCentered) totals[1] = alone ? wdy : totals[1] + wdy;
        if constexpr (kShift && !kWellConditioned) totals[2] += place.Owns(i) ? centered : A{0};
      }
    });
  }

  // Stores dx, adds to the column sums and, if wanted, to the sums of dx.
  template <bool kWellConditioned>
  __device__ __forceinline__ void Finish(const RowRing<T, P, kLayout>& ring,
                                         const DxSums<T, P>& dx_sums, bool has_dsum, bool sums_dx,
                                         const A (&totals)[kValues], A inverse_n, T* to,
                                         A (&dscale)[P][W], A (&dbias)[P][W]) const {
    if (!kWellConditioned && has_dsum) ring.WaitForThird();
    const RowGradient<kCentered, kFromOutput, A> row(totals, mean, rstd, !kWellConditioned,
                                                     inverse_n);
    // kWellConditioned: NormInputGrad is multiplied out, which takes fewer instructions.
    const A slope = -row.mean_wdy_x_hat * rstd * row.factor, offset = -row.mean_wdy * rstd;
    place.ForVectors([&]<bool kAll>(int i) {
      if (!kAll && place.Lacks(i)) return;
      A dy[W], x[W], dx[W];
      Widen(x_vectors[i], x);
      Widen(dy_vectors[i], dy);
      for (int j = 0; j < W; ++j) {
        const A centered = Centered<kCentered, kFromOutput>(x[j], mean, scale[i][j], Bias(i, j));
        if constexpr (kCentered) dbias[i][j] += dy[j];
        if constexpr (kWellConditioned) {
          const A scaled = dy[j] * rstd;
          dscale[i][j] += (kFromOutput ? dy[j] : scaled) * centered;
          const A rest = kCentered ? centered * slope + offset : centered * slope;
          dx[j] = scaled * scale[i][j] + rest;
        } else {
          const A x_hat = row.XHat(centered);
          dscale[i][j] += dy[j] * x_hat;
          dx[j] = row.Dx(dy[j] * scale[i][j], x_hat);
        }
      }
      if (!kWellConditioned && has_dsum) {
        A dsum[W];
        Widen(ring.Third(i), dsum);
        for (int j = 0; j < W; ++j) dx[j] += dsum[j];
      }
      if (!kWellConditioned && sums_dx) dx_sums.Add(i, dx);
      const auto out = Narrow<T>(dx);
      if (!kAll) {
        place.Store(place.InRow(to, i), out, i);
      } else if (place.Owns(i)) {
        StoreVectorOnce(place.InRow(to, i), out);
      }
    });
  }
};

// In vectors that the thread does not own, dy and x are 0. The scale must be 0 too: an infinite
// scale would give NaN, and a bias would give an x_hat other than 0.
template <typename T, int P, Layout kLayout, typename A>
__device__ __forceinline__ void MaskScale(const Place<T, P, kLayout, false>& place,
                                          A (&scale)[P][kVec<T>]) {
#pragma unroll
  for (int i = 0; i < P; ++i) {
    for (int j = 0; j < kVec<T>; ++j) scale[i][j] = place.Owns(i) ? scale[i][j] : A{0};
  }
}

// Gives the block's column sums to the cluster's sums, which begin at `at`.
template <bool kCentered, typename T, int P, Layout kLayout, typename A>
__device__ __forceinline__ void GiveSums(const BlockSums<T, P, kLayout>& block,
                                         const DxSums<T, P>& dx_sums, bool sums_dx,
                                         const PartialSums<A>& sums, std::int64_t at,
                                         A (&dscale)[P][kVec<T>], A (&dbias)[P][kVec<T>],
                                         bool store) {
  const auto give = [&](int part, A(&values)[P][kVec<T>], int s) {
    A* const to = sums.results[s] == nullptr ? nullptr : sums.results[s] + at;
    block.Give(part, values, to, store);
  };
  give(0, dscale, 0);
  if constexpr (kCentered) give(1, dbias, 1);
  if (sums_dx) {
    // In the place of dscale's sums, which have been read. RMS norm: of dbias's, which are absent.
    dx_sums.Get(dscale);
    give(kCentered ? 0 : 1, dscale, 2);
  }
}

// P: the vectors of a row that a thread holds.
template <typename T, int P, Layout kLayout, bool kCentered, bool kFromOutput>
__global__ void __launch_bounds__(BackwardThreads(P* kVecBytes), 1)
    BackwardKernel(const __grid_constant__ RowNormBwdArgs args,
                   const __grid_constant__ BackwardSplit split,
                   const __grid_constant__ BackwardSchedule schedule,
                   const __grid_constant__ PartialSums<Accum<T>> sums, const Accum<T> inverse_n) {
  using A = Accum<T>;
  constexpr int W = kVec<T>;
  constexpr bool kMasked = kLayout == Layout::kMasked;
  constexpr bool kShift = kCentered && !kFromOutput;
  constexpr int kValues = RowSumsOf(kCentered, kFromOutput);
  constexpr bool kLimited = !std::is_same_v<A, double>;
  __shared__ __align__(kVecBytes) TeamSumStorage<A, kValues, kMaxCluster> storage;
  extern __shared__ __align__(128) unsigned char shared[];

  if (EndTogether(schedule.iterations, schedule.extra)) LaunchNext();
  const auto [groups, rows, features] = args.shape;
  Place<T, P, kLayout, false> place(split.row_threads, split.cluster, split.block_columns,
                                    features);
  const bool has_dsum = KeptOfWarp(args.dsum != nullptr) != 0;
  const bool sums_dx = sums.results[2] != nullptr;
  const DxSums<T, P> dx_sums(shared + split.shared_bytes - split.dx_sum_bytes);
  const BlockSums<T, P, kLayout> block(split, place, shared + split.ring_bytes);
  const T* const arrays[] = {static_cast<const T*>(args.dy), static_cast<const T*>(args.x),
                             static_cast<const T*>(args.dsum)};
  const unsigned clusters = gridDim.x / static_cast<unsigned>(split.cluster);
  const std::int64_t first_item = blockIdx.x / static_cast<unsigned>(split.cluster);
  const auto rows_of_sweep = [&](std::int64_t item, int sweep) {
    return TeamRows(schedule, split, item, place.team, place.row, sweep, rows);
  };
  RowRing<T, P, kLayout> ring(split, place, shared, arrays, groups * rows * features,
                              rows_of_sweep(first_item, 0).first * features + place.first_column);
  RowStats<A, kShift> stats(split.row_threads, static_cast<const A*>(args.mean),
                            static_cast<const A*>(args.rstd), static_cast<A>(args.epsilon),
                            has_dsum || sums_dx);
  TeamSum<A, kValues, kMaxCluster> over_row(split.row_threads, split.cluster, place.team,
                                            place.in_team, storage);
  if (split.cluster > 1) ClusterSync();  // all barriers are initialised

  for (std::int64_t item = first_item; item < groups * schedule.clusters_per_group;
       item += clusters) {
    const std::int64_t group = GroupOf(item, schedule.clusters_per_group);
    const std::int64_t cluster = item - group * schedule.clusters_per_group;
#pragma unroll 1
    for (int sweep = 0; sweep < (kMasked ? schedule.sweeps : 1); ++sweep) {
      const TeamRows team_rows = rows_of_sweep(item, sweep);
      const std::int64_t first_row = team_rows.first + place.row;
      if constexpr (kMasked) place.SetRow(first_row);
      // The block's first column of the first row. Masked: from the row's 16-byte boundary on.
      const std::int64_t first =
          team_rows.first * features + place.first_column - (kMasked ? place.misalignment() : 0);
      const std::int64_t stride = team_rows.row_stride * features;
      T* dx = static_cast<T*>(args.dx) + first;
      ring.Start(first, stride, team_rows.own);
      stats.Start(first_row, team_rows.row_stride, team_rows.own);
      A scale[P][W];
      LoadParam(args.scale, group, place, A{1}, static_cast<A>(args.scale_offset), scale);
      MaskScale(place, scale);
      [[maybe_unused]] A bias[kFromOutput ? P : 1][W];
      if constexpr (kFromOutput) LoadParam(args.bias, group, place, A{0}, A{0}, bias);
      int iteration = 0;
#pragma unroll 1
      for (bool store = sweep == 0; iteration < team_rows.most; store = false) {
        // Column sums stay in registers for these iterations. All teams of a block have an equal
        // number of iterations, because they meet at its barriers. A team's last one may have no
        // row.
        const int end =
            kLimited ? min(team_rows.most, iteration + kIterationsPerSum) : team_rows.most;
        A dscale[P][W] = {}, dbias[P][W] = {};
        if (sums_dx) dx_sums.Clear();
#pragma unroll 1
        for (; iteration < end; ++iteration) {
          A mean = 0, rstd;
          const bool well_conditioned = stats.Get(iteration, mean, rstd);
          Vector<T, W> dy_vectors[P], x_vectors[P];
          ring.Load(dy_vectors, x_vectors);
          const ThreadRow<T, P, kLayout, kCentered, kFromOutput> row{
              place, scale, bias, dy_vectors, x_vectors, mean, rstd};
          A totals[kValues] = {};
          row.AddUp(well_conditioned, totals);
          over_row(totals);
          if (split.cluster > 1) ring.ReplaceLater();
          // dy is widened again below: registers do not suffice to keep it widened too.
#pragma unroll
          for (int i = 0; i < P; ++i) KeepPacked(dy_vectors[i]);

          if (iteration < team_rows.own) {
            if (well_conditioned) {
              row.template Finish<true>(ring, dx_sums, has_dsum, sums_dx, totals, inverse_n, dx,
                                        dscale, dbias);
            } else {
              row.template Finish<false>(ring, dx_sums, has_dsum, sums_dx, totals, inverse_n, dx,
                                         dscale, dbias);
            }
          }
          dx += stride;
          if (split.cluster == 1) ring.ReplaceLater();
          ring.EndIteration(has_dsum);
        }

        const std::int64_t sums_at = group * sums.group_pitch + cluster * sums.cluster_pitch;
        GiveSums<kCentered>(block, dx_sums, sums_dx, sums, sums_at, dscale, dbias, store);
        // All sums are read before the next are written. Masked: all are written before the next
        // sweep, in which other threads add to them.
        if (split.teams > 1 || kMasked) __syncthreads();
      }
      // In the next sweep a block adds to columns that another block of the cluster stored.
      if (kMasked && split.cluster > 1 && sweep + 1 < schedule.sweeps) ClusterSync();
    }
  }
  if (split.cluster > 1) ClusterSync();  // no block ends while another may send to it
}

}  // namespace
}  // namespace gradops
