// How layer norm's kernels load scale and bias.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/reduce.cuh"
#include "cuda/row_norm/rows.cuh"
#include "ops/row_norm.h"

namespace gradops {
namespace {

// Calls fn with a pointer of the parameter's type.
template <typename Fn>
__device__ __forceinline__ void WithType(const Param& param, std::int64_t group, const Fn& fn) {
  const std::int64_t offset = group * param.group_stride;
  switch (param.dtype) {
    case ffi::F16: return fn(static_cast<const Half*>(param.data) + offset);
    case ffi::BF16: return fn(static_cast<const BFloat16*>(param.data) + offset);
    case ffi::F32: return fn(static_cast<const float*>(param.data) + offset);
    default: return fn(static_cast<const double*>(param.data) + offset);
  }
}

// W values from global memory, plus `added`. p is aligned to them, up to 16 bytes.
template <int W, typename A, typename P>
__device__ __forceinline__ void LoadWide(const P* p, A added, A (&values)[W]) {
  if constexpr (W * sizeof(P) % kVecBytes == 0) {
    constexpr int kStep = kVec<P>;
#pragma unroll
    for (int j = 0; j < W; j += kStep) {
      Widen(LoadPackAgain<kStep>(p + j), reinterpret_cast<A(&)[kStep]>(values[j]));
    }
  } else if constexpr (W * sizeof(P) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(p);
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(reinterpret_cast<const P*>(&words)[j]);
  } else {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = static_cast<A>(__ldg(p + j));
  }
  if (added != 0) {
#pragma unroll
    for (A& value : values) value += added;
  }
}

// W values of a parameter, plus `added`. P: its type. void: any type, or no parameter; then the
// values are `absent`.
template <typename P, int W, typename A>
__device__ __forceinline__ void LoadParamPack(const Param& param, std::int64_t group,
                                              std::int64_t column, A absent, A added,
                                              A (&values)[W]) {
  if constexpr (!std::is_void_v<P>) {
    const P* const data = static_cast<const P*>(param.data) + group * param.group_stride;
    LoadWide(data + column, added, values);
  } else if (param.data == nullptr) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = absent;
  } else {
    WithType(param, group, [&](const auto* data) { LoadWide(data + column, added, values); });
  }
}

// A thread's columns of a parameter, plus `added`; or `absent` if there is no parameter.
template <typename T, int P, Division kDivision, bool kOneUnit, typename A>
__device__ __forceinline__ void LoadParam(const Param& param, std::int64_t group,
                                          const Place<T, P, kDivision, kOneUnit>& place, A absent,
                                          A added, A (&values)[P][kVec<T>]) {
  constexpr int W = kVec<T>;
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[i][j] = absent;
  }
  if (param.data == nullptr) return;
  WithType(param, group, [&](const auto* data) {
    data += place.first_column - place.skip() + place.base;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.Lacks(i)) continue;
      if constexpr (kDivision != Division::kFramed) {
        LoadWide(data + place.Begin(i), added, values[i]);
      } else {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          if (place.Has(i, j)) {
            values[i][j] = static_cast<A>(__ldg(data + place.Begin(i) + j)) + added;
          }
        }
      }
    }
  });
}

// --- Forward ------------------------------------------------------------------------------------

template <typename ParamT>
__device__ __forceinline__ int WidthOf(ffi::DataType dtype) {
  if constexpr (std::is_void_v<ParamT>) {
    return dtype == ffi::F64 ? 8 : dtype == ffi::F32 ? 4 : 2;
  } else {
    return sizeof(ParamT);
  }
}

// A parameter from one of a group's columns on, as if that were the first group's first column.
template <typename ParamT>
__device__ __forceinline__ Param From(const Param& param, std::int64_t group, int column) {
  if (param.data == nullptr) return param;
  const std::int64_t width = WidthOf<ParamT>(param.dtype);
  const std::int64_t first = group * param.group_stride + column;
  return {static_cast<const char*>(param.data) + first * width, 0, param.dtype};
}

// Adds a residual's bias to pack i of the residual.
template <typename ParamT, typename T, int P, Division kDivision, typename A>
__device__ __forceinline__ void AddResidualBias(const RowNormFwdArgs& args, std::int64_t group,
                                                const Place<T, P, kDivision, true>& place, int i,
                                                A (&residual)[kVec<T>]) {
  constexpr int W = kVec<T>, N = sizeof(T) == 2 ? W / 2 : W;
  const Param param = From<ParamT>(args.residual_bias, group, place.base + place.Begin(i));
#pragma unroll
  for (int j = 0; j < W; j += N) {
    A bias[N];
    LoadParamPack<ParamT>(param, 0, j, A{0}, A{0}, bias);
#pragma unroll
    for (int k = 0; k < N; ++k) residual[j + k] += bias[k];
  }
}

// Scale and bias of a thread's columns, kVec<T> / kSteps at a time.
//
// With half a pack at a time, some threads begin with the second half. If all threads read the
// first 16 of each 32 bytes of float32, the L1 cache would take twice as long.
template <typename T, typename ParamT, int P, Division kDivision, bool kCentered, int kSteps>
class Parameters {
  using A = Accum<T>;
  static constexpr int W = kVec<T>, N = W / kSteps;
  using RowPlace = Place<T, P, kDivision, true>;

 public:
  __device__ Parameters(const RowNormFwdArgs& args, std::int64_t group, const RowPlace& place)
      : place_(place),
        scale_(From<ParamT>(args.scale, group, place.base)),
        bias_(From<ParamT>(args.bias, group, place.base)) {}

  // Whether the thread has a pack's second half first. With 8 packs this does not pay.
  static constexpr bool kSwaps = kSteps == 2 && P <= 4;
  __device__ __forceinline__ static bool Swaps() { return kSwaps && (threadIdx.x & 4) != 0; }

  __device__ __forceinline__ void Load(int step) {
    const int part = step % kSteps ^ static_cast<int>(Swaps());
    const int column = place_.Begin(step / kSteps) + part * N;
    LoadParamPack<ParamT>(scale_, 0, column, A{1}, A{0}, values_[0][step % 2]);
    if constexpr (kCentered) {
      LoadParamPack<ParamT>(bias_, 0, column, A{0}, A{0}, values_[1][step % 2]);
    }
  }
  __device__ __forceinline__ A Scale(int step, int k) const { return values_[0][step % 2][k]; }
  __device__ __forceinline__ A Bias(int step, int k) const {
    return kCentered ? values_[kCentered][step % 2][k] : A{0};
  }

 private:
  const RowPlace& place_;
  const Param scale_, bias_;
  A values_[1 + kCentered][2][N];
};

// A warp's columns of a parameter of unaligned rows, on their way to registers. Lanes load
// neighbouring columns to `shared` (the warp's, as large). Each thread then reads its own columns.
template <typename T, int P>
class StagedParam {
  using A = Accum<T>;
  static constexpr int W = kVec<T>;

 public:
  __device__ explicit StagedParam(unsigned char* shared) : shared_(reinterpret_cast<A*>(shared)) {}

  // Columns that the row does not have are `absent`; all are if there is no parameter.
  __device__ __forceinline__ void Load(const Param& param, std::int64_t group,
                                       const Place<T, P, Division::kFramed, true>& place,
                                       std::int64_t features, A absent, A added) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int own_column = place.first_column - place.skip() + place.base;
    __syncwarp();  // earlier values have been read
    if (param.data == nullptr) {
#pragma unroll 4
      for (int k = 0; k < P * W; ++k) shared_[k * kWarp + lane] = absent;
    } else {
      WithType(param, group, [&](const auto* data) {
      // All at once, so that all loads are under way together.
#pragma unroll
        for (int k = 0; k < P * W; ++k) {
          const int column = own_column - lane * W + k * kWarp + lane;
          const bool has = column >= 0 && column < features;
          shared_[k * kWarp + lane] = has ? static_cast<A>(__ldg(data + column)) + added : absent;
        }
      });
    }
    __syncwarp();
  }

  // The thread's pack i.
  __device__ __forceinline__ void Get(int i, A (&values)[W]) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int j = 0; j < W; j += kVec<A>) {
      const auto part = LoadPlain<kVec<A>>(shared_ + (i * kWarp + lane) * W + j);
#pragma unroll
      for (int k = 0; k < kVec<A>; ++k) values[j + k] = part.v[k];
    }
  }

 private:
  A* const shared_;
};

}  // namespace
}  // namespace gradops
