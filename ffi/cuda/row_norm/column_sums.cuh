// Column sums of layer norm's backward kernel over the threads of a block.
#pragma once

#include <cstdint>

#include "cuda/common/vector.cuh"
#include "cuda/row_norm/backward_policy.h"
#include "cuda/row_norm/rows.cuh"

namespace gradops {
namespace {

// Where the column sums of (group, slot) are stored: in the workspace or, if no partial sums are
// left to add, in the results. Null: the sums are not wanted.
template <typename A>
struct SlotSums {
  A* results[3];  // dscale, dbias, dresidual_bias
  std::int64_t group_pitch, slot_pitch;
};

// After this many turns a thread adds its sums in registers to the slot's sums. So rounding errors
// hardly grow with the number of rows. Double needs no limit.
constexpr int kTurnsPerSum = 128;

// Stores sums at p, or adds them to the sums there. p is aligned to 16 bytes, or to a single value.
template <int N, typename A>
__device__ __forceinline__ void StoreOrAdd(A* p, const A (&values)[N], bool store) {
  constexpr int kStep = N == 1 ? 1 : kVec<A>;
#pragma unroll
  for (int j = 0; j < N; j += kStep) {
    Pack<A, kStep> pack{};
    if (!store) pack = *reinterpret_cast<const Pack<A, kStep>*>(p + j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] = store ? values[j + k] : pack.v[k] + values[j + k];
    StorePack(p + j, pack);
  }
}

// Adds up the column sums of a block's threads, and stores or adds them in the slot.
template <typename T, int P, Division kDivision>
class BlockSums {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;
  static constexpr bool kFramed = kDivision == Division::kFramed;

 public:
  // shared: 2 * P * W values per thread; not used if the block has one unit.
  __device__ BlockSums(const BackwardPlan& plan, const Place<T, P, kDivision, false>& place,
                       unsigned char* shared)
      : plan_(plan), place_(place), shared_(reinterpret_cast<A*>(shared)) {}

  // Gives sum s to the slot. All threads of the block call it. slot: its first column; or null.
  __device__ __forceinline__ void Give(int s, A (&sums)[P][W], A* slot, bool first) const {
    const int lanes = plan_.lanes;
    if (lanes < kWarp) {
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        if (distance < lanes) continue;  // these lanes have other columns
#pragma unroll
        for (int i = 0; i < P; ++i) {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            sums[i][j] += __shfl_xor_sync(0xffffffffu, sums[i][j], distance);
          }
        }
      }
    }
    if (plan_.units == 1) {
      if (slot == nullptr || place_.row > 0) return;
      slot += place_.first_column - place_.skip() + place_.base;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (place_.Lacks(i) || !place_.Counts(i)) continue;
        if constexpr (!kFramed) {
          StoreOrAdd(slot + place_.Begin(i), sums[i], first);
        } else {
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const A one[1] = {sums[i][j]};
            if (place_.Has(i, j)) StoreOrAdd(slot + place_.Begin(i) + j, one, first);
          }
        }
      }
      return;
    }
    // Layout: [sum][unit][column]. A block of several units has whole rows.
    const int elements = P * W * lanes;
    A* const part = shared_ + s * plan_.units * elements;
    if (place_.row == 0) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (!place_.Counts(i)) continue;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          const int column = place_.base + place_.Begin(i) + j - place_.skip();
          if (!kFramed || place_.Has(i, j)) part[place_.unit * elements + column] = sums[i][j];
        }
      }
    }
    __syncthreads();  // all units' sums are written
    if (slot == nullptr) return;
    for (int column = static_cast<int>(threadIdx.x); column < place_.high() - place_.skip();
         column += static_cast<int>(blockDim.x)) {
      A total[1] = {part[column]};
      for (int unit = 1; unit < plan_.units; ++unit) total[0] += part[unit * elements + column];
      StoreOrAdd(slot + column, total, first);
    }
  }

 private:
  const BackwardPlan& plan_;
  const Place<T, P, kDivision, false>& place_;
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
    for (int at = 0; at < P * W / N; ++at) StorePack(Chunk(at), Pack<A, N>{});
  }
  // Adds dx to the sums of pack i.
  __device__ __forceinline__ void Add(int i, const A (&dx)[W]) const {
#pragma unroll
    for (int j = 0; j < W; j += N) {
      A* const p = Chunk((i * W + j) / N);
      auto pack = *reinterpret_cast<const Pack<A, N>*>(p);
#pragma unroll
      for (int k = 0; k < N; ++k) pack.v[k] += dx[j + k];
      StorePack(p, pack);
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

}  // namespace
}  // namespace gradops
