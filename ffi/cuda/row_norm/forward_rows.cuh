// Layer norm and RMS norm forward of unaligned rows, and of rows that no block holds alone. Blocks
// take the rows one after the other. A thread keeps its columns' scale and bias in registers for
// all rows. Loading them for each row would cost more than the row: they are loaded as single
// elements, or do not stay in the L1 cache. Meanwhile the next rows are copied to shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/row_norm/moments.cuh"
#include "cuda/row_norm/parameters.cuh"
#include "cuda/row_norm/rows.cuh"
#include "cuda/row_norm/sums.cuh"

namespace gradops {
namespace {

// A thread's packs of its team's rows, of x and of a residual if there is one, on their way to
// shared memory. Each thread copies and reads its own packs. A warp's packs have an equal offset
// from a 128-byte line in shared and in global memory (CopyAsync). The class refers to the kernel's
// parameters and keeps no copies: registers are short.
template <typename T, int P, bool kResidual>
class ForwardRing {
  static constexpr int W = kVec<T>;
  using RowPlace = Place<T, P, Division::kFramed, true>;

 public:
  // shared: the warp's part.
  __device__ ForwardRing(const RowNormFwdArgs& args, const ForwardPlan& plan, const RowPlace& place,
                         const unsigned char* shared)
      : args_(args),
        plan_(plan),
        place_(place),
        own_(SharedAddress(shared) + threadIdx.x % kWarp * kVecBytes) {}

  // Orders a row (starts its copy) for round `round`, or for plan.stages rounds later. The thread's
  // packs of the row begin `at` bytes into the arrays.
  __device__ __forceinline__ void Order(std::int64_t at, int round) const {
    const std::uint32_t slot = Slot(at, round);
    Copy(args_.x, at, slot);
    if (kResidual && args_.residual != nullptr) Copy(args_.residual, at, slot + P * kPackBytes);
  }
  // Waits for the row that was ordered plan.stages commits before.
  __device__ __forceinline__ void Wait() const {
    if (plan_.stages == 1) {
      WaitForCopies<0>();
    } else {
      WaitForCopies<1>();
    }
  }
  // Replaces pack i of x.
  __device__ __forceinline__ void Put(std::int64_t at, int round, int i,
                                      const Pack<T, W>& pack) const {
    const auto& words = reinterpret_cast<const uint4&>(pack);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(Slot(at, round) + i * kPackBytes),
                 "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  }
  // Pack i of x; pack i of the residual.
  __device__ __forceinline__ Pack<T, W> X(std::int64_t at, int round, int i) const {
    return Load(Slot(at, round) + i * kPackBytes);
  }
  __device__ __forceinline__ Pack<T, W> Residual(std::int64_t at, int round, int i) const {
    return Load(Slot(at, round) + (P + i) * kPackBytes);
  }

 private:
  static constexpr int kPackBytes = kWarp * kVecBytes;
  __device__ __forceinline__ std::uint32_t Slot(std::int64_t at, int round) const {
    const unsigned first = static_cast<unsigned>(at) - threadIdx.x % kWarp * kVecBytes;
    return own_ + (plan_.stages == 1 ? 0 : (round & 1) * plan_.stage_bytes) +
           (first & (kLineBytes - kVecBytes));
  }
  __device__ __forceinline__ static Pack<T, W> Load(std::uint32_t address) {
    Pack<T, W> pack;
    uint4& words = AsWords(pack);
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return pack;
  }
  __device__ __forceinline__ void Copy(const void* array, std::int64_t at, std::uint32_t to) const {
    const char* const from = static_cast<const char*>(array) + at;
    const auto begin = [&](int i) { return place_.Begin(i) * static_cast<int>(sizeof(T)); };
    if (place_.AllWhole()) {
#pragma unroll
      for (int i = 0; i < P; ++i) CopyAsync(to + i * kPackBytes, from + begin(i));
      return;
    }
    // Nothing beyond the array's end may be read.
    const auto [groups, rows, features] = args_.shape;
    const std::int64_t left = groups * rows * features * static_cast<int>(sizeof(T)) - at;
    if (left >= begin(P)) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        CopyAsyncIf(!place_.Lacks(i), to + i * kPackBytes, from + begin(i));
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < P; ++i) {
      if (place_.Lacks(i)) continue;
      const std::int64_t there = left - begin(i);
      if (there >= kVecBytes) {
        CopyAsync(to + i * kPackBytes, from + begin(i));
        continue;
      }
      // A cp.async of fewer bytes is not used: memcheck takes that for a copy of 16 bytes.
      auto* const slot = static_cast<T*>(__cvta_shared_to_generic(to + i * kPackBytes));
      const auto* const source = reinterpret_cast<const T*>(from + begin(i));
#pragma unroll 1
      for (int j = 0; j < static_cast<int>(there / sizeof(T)); ++j) slot[j] = source[j];
    }
  }

  const RowNormFwdArgs& args_;
  const ForwardPlan& plan_;
  const RowPlace& place_;
  const std::uint32_t own_;
};

// kResidual: there may be a residual.
template <typename T, bool kCentered, bool kResidual>
__global__ void __launch_bounds__(RowsThreads(sizeof(T)), 1)
    ForwardRowsKernel(const __grid_constant__ RowNormFwdArgs args,
                      const __grid_constant__ ForwardPlan plan,
                      const __grid_constant__ ForwardScalars<Accum<T>> scalars) {
  using A = Accum<T>;
  constexpr int W = kVec<T>, P = kRowsPacks;
  // Layer norm of 16-bit elements: the parameters take most registers. The others hold the widened
  // row until its mean and deviation are known. Then the row is read from shared memory again.
  // Otherwise the row stays in registers, and the next row can be ordered into its place at once.
  constexpr bool kReread = kCentered && sizeof(T) == 2;
  using Sum =
      RowSum<A, kCentered ? 3 : 1, RowsThreads(sizeof(T)) / kWarp, kMaxCluster, /*kNarrow=*/false>;
  __shared__ typename Sum::Storage storage;
  extern __shared__ __align__(128) unsigned char shared[];

  const auto [groups, rows, features] = args.shape;
  const std::int64_t group = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (group >= groups) return;  // the grid's last plane may not be full
  const int cluster = plan.cluster, lanes = plan.lanes;
  Place<T, P, Division::kFramed, true> place(lanes, cluster, plan.share, features);

  // The team's rows: the first one, and then every plan.apart-th row.
  const int team = lanes <= kWarp ? static_cast<int>(threadIdx.x) >> plan.log_lanes : 0;
  const unsigned block = cluster > 1 ? ClusterId() : blockIdx.x;
  const std::int64_t first_row =
      (std::int64_t{block >> plan.log_blocks} << plan.log_step) +
      static_cast<int>(block & ((1u << plan.log_blocks) - 1)) * plan.teams + team;
  std::int64_t row = group * rows + first_row;
  const std::int64_t last = first_row + (plan.rounds - 1) * plan.apart;
  int own_rounds = first_row >= rows ? 0 : plan.rounds - (last >= rows);
  own_rounds = KeptOfWarp(own_rounds);  // tells the compiler that the warp has one value
  place.SetSkip(
      static_cast<int>(static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(features) % W));
  // The byte offset of the thread's packs of the row in each array.
  std::int64_t at = (row * features + (place.first_column - place.skip() + place.base)) *
                    static_cast<int>(sizeof(T));

  Sum sum(lanes, cluster, storage);
  if (cluster > 1) ClusterArrive();
  unsigned char* const of_warp = shared + threadIdx.x / kWarp * plan.warp_bytes;
  const ForwardRing<T, P, kResidual> ring(args, plan, place, of_warp);
#pragma unroll 1
  for (int s = 0; s < plan.stages; ++s) {
    if (s < own_rounds) ring.Order(at + s * plan.stride, s);
    CommitCopies();
  }
  A scale[P][W];
  [[maybe_unused]] A bias[kCentered ? P : 1][W];
  const StagedParam<T, P> staged(of_warp + plan.stages * plan.stage_bytes);
  staged.Load(args.scale, group, place, features, A{1}, scalars.scale_offset);
#pragma unroll
  for (int i = 0; i < P; ++i) staged.Get(i, scale[i]);
  if constexpr (kCentered) {
    staged.Load(args.bias, group, place, features, A{0}, A{0});
#pragma unroll
    for (int i = 0; i < P; ++i) staged.Get(i, bias[i]);
  }
  // A residual's bias stays in shared memory: registers do not suffice for it.
  const bool has_residual_bias = kResidual && args.residual_bias.data != nullptr;
  if (has_residual_bias) staged.Load(args.residual_bias, group, place, features, A{0}, A{0});
  const RowCounts<A> counts(plan, place, sum, features);
  if (cluster > 1) ClusterWait();  // all barriers are initialised

#pragma unroll 1
  for (int round = 0; round < own_rounds; ++round) {
    place.Forget();
    ring.Wait();
    HeldRow<T, P, !kReread> h;
#pragma unroll
    for (int i = 0; i < P; ++i) h.Hold(i, ring.X(at, round, i));
    const auto replace = [&] {
      __syncwarp();  // slots may overlap neighbouring lanes' slots of the row before
      if (round + plan.stages < own_rounds) {
        ring.Order(at + plan.ahead, round);  // in the place of this row
      }
      CommitCopies();
    };
    const auto store = [&](void* array, const Pack<T, W>(&packs)[P]) {
      T* const p = reinterpret_cast<T*>(static_cast<char*>(array) + at);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        StorePackOnceIf(place.HasAll(i), p + place.Begin(i), packs[i]);
      }
      if (place.AllWhole()) return;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (!place.Whole(i)) place.StoreSome(p + place.Begin(i), packs[i], i);
      }
    };
    // A residual with a bias has code of its own: a branch for each pack would spill.
    const auto add_residual = [&]<bool kBias>() {
      Pack<T, W> packs[P];
#pragma unroll
      for (int i = 0; i < P; ++i) {
        A ours[W], others[W];
        Widen(ring.X(at, round, i), ours);
        Widen(ring.Residual(at, round, i), others);
        if constexpr (kBias) {
          A added[W];
          staged.Get(i, added);
#pragma unroll
          for (int j = 0; j < W; ++j) others[j] += added[j];
        }
#pragma unroll
        for (int j = 0; j < W; ++j) ours[j] += others[j];
        packs[i] = Narrow<T>(ours);
        if (kReread) ring.Put(at, round, i, packs[i]);
        h.Hold(i, packs[i]);
      }
      store(args.sum, packs);
    };
    if (has_residual_bias) {
      add_residual.template operator()<true>();
    } else if (kResidual && args.residual != nullptr) {
      add_residual.template operator()<false>();
    }
    if (!kReread && plan.stages == 1) replace();
    Moments<A> moments{};
    if constexpr (kCentered) {
      moments = RowMoments(lanes, cluster, place, h, sum, counts, scalars);
    } else {
      moments.rstd = InverseRootMeanSquare(place, h, sum, scalars);
    }
    if (!kReread && plan.stages > 1) replace();
    if (place.lane == 0 && place.first_column == 0 && args.rstd != nullptr) {
      if constexpr (kCentered) static_cast<A*>(args.mean)[row] = moments.mean + moments.delta;
      static_cast<A*>(args.rstd)[row] = moments.rstd;
    }
    const A shift = -moments.delta * moments.rstd;
    Pack<T, W> packs[P];
#pragma unroll
    for (int i = 0; i < P; ++i) {
      A values[W];
      if constexpr (kReread) {
        Widen(ring.X(at, round, i), values);
      } else {
        h.Get(i, values);
      }
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if constexpr (kCentered) {
          const A x_hat = (values[j] - moments.mean) * moments.rstd + shift;
          values[j] = x_hat * scale[i][j] + bias[i][j];
        } else {
          values[j] = values[j] * moments.rstd * scale[i][j];
        }
      }
      packs[i] = Narrow<T>(values);
    }
    if (kReread) replace();
    store(args.y, packs);
    at += plan.stride;
    row += plan.apart;
  }
}

}  // namespace
}  // namespace gradops
