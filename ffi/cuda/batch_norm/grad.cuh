// What batch norm's backward kernel computes for an element: dz from dy, and dx from dz.
#pragma once

#include <cstdint>

#include "cuda/batch_norm/tiles.cuh"
#include "cuda/common/vector.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// What dz is: dy, or dy where relu's argument was positive and 0 elsewhere. The argument's sign is
// taken from y, or computed again from x.
enum class Mask { kNone, kOfY, kOfX };

// The arrays of a pass; dresidual is null if the pass does not write dresidual.
template <typename T>
struct GradArrays {
  const T *dy, *x, *y;
  T* dresidual;
};

// Copies the packs at `start` to a place in a ring. If dz and x stay there, only y is copied.
template <Mask kMask, typename T, typename Place>
__device__ __forceinline__ void CopyGrad(const GradArrays<T>& arrays, std::int64_t start,
                                         bool stays, Place& place) {
  if (!stays) place.Copy(0, arrays.dy + start), place.Copy(1, arrays.x + start);
  if constexpr (kMask == Mask::kOfY) place.CopyOther(arrays.y + start);
}
template <Mask kMask, typename Place, typename A, int W>
__device__ __forceinline__ void WidenGrad(const Place& place, A (&dy)[W], A (&x)[W], A (&y)[W]) {
  Widen(place.Get(0), dy);
  Widen(place.Get(1), x);
  if constexpr (kMask == Mask::kOfY) Widen(place.GetOther(), y);
}
// Loads the elements of a span.
template <Mask kMask, typename T, typename A, int W>
__device__ __forceinline__ void LoadGrad(const GradArrays<T>& arrays, const ChannelSpan& span,
                                         A (&dy)[W], A (&x)[W], A (&y)[W]) {
  LoadSpan(arrays.dy, span, dy);
  LoadSpan(arrays.x, span, x);
  if constexpr (kMask == Mask::kOfY) LoadSpan(arrays.y, span, y);
}

// Turns x into x - mean and dy into dz. NaN is not positive.
template <Mask kMask, typename A, int W>
__device__ __forceinline__ void MaskGrad(const A (&mean)[W], const A (&factor)[W],
                                         const A (&offset)[W], const A (&y)[W], A (&x)[W],
                                         A (&dy)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    x[j] -= mean[j];
    if constexpr (kMask == Mask::kOfY) dy[j] = y[j] > 0 ? dy[j] : A{0};
    if constexpr (kMask == Mask::kOfX) {
      dy[j] = x[j] * factor[j] + offset[j] > 0 ? dy[j] : A{0};
    }
  }
}

// A channel's numbers for relu's argument, (x - mean) * factor + offset.
template <typename A>
struct Affine {
  A mean, rstd, delta, factor, offset;

  __device__ __forceinline__ Affine(const BatchNormBwdArgs& args, std::int64_t group,
                                    std::int64_t channel) {
    mean = ParamAt<A>(args.mean, group, channel, 0);
    rstd = ParamAt<A>(args.rstd, group, channel, 0);
    delta = ParamAt<A>(args.delta, group, channel, 0);
    const A scale = ParamAt<A>(args.scale, group, channel, 1);
    const A bias = ParamAt<A>(args.bias, group, channel, 0);
    factor = rstd * scale, offset = bias - delta * factor;
  }
};

// Level and slope of dx = factor * (dz - level - (x - mean) * slope). They follow from the means of
// dz and dz * x_hat.
template <typename A>
struct Slope {
  A level, slope;
  __device__ __forceinline__ Slope(A level, A slope) : level(level), slope(slope) {}
  __device__ __forceinline__ Slope(A mean_dz, A mean_dz_x_hat, A rstd, A delta)
      : level(mean_dz - delta * (mean_dz_x_hat * rstd)), slope(mean_dz_x_hat * rstd) {}
};

// A channel's numbers that dx is computed from.
enum DxNumbers { kDxMean, kDxFactor, kDxOffset, kDxLevel, kDxSlope, kDxNumbers };
static_assert(kDxNumbers == kBackwardNeeds.parameters);

template <typename A>
__device__ __forceinline__ void SetDxNumbers(const Affine<A>& affine, const Slope<A>& line,
                                             A (&numbers)[kDxNumbers]) {
  numbers[kDxMean] = affine.mean, numbers[kDxFactor] = affine.factor;
  numbers[kDxOffset] = affine.offset;
  numbers[kDxLevel] = line.level, numbers[kDxSlope] = line.slope;
}

template <typename A, int W>
__device__ __forceinline__ void ApplyInputGrad(const A (&numbers)[kDxNumbers][W], const A (&dz)[W],
                                               A (&x)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    x[j] = (dz[j] - numbers[kDxLevel][j] - x[j] * numbers[kDxSlope][j]) * numbers[kDxFactor][j];
  }
}

}  // namespace
}  // namespace gradops
