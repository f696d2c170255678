// The formulas of statistics, y, activations and dz, for all kernels of batch norm.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "cuda/batch_norm/tiles.cuh"
#include "ops/batch_norm.h"

namespace gradops {
namespace {

// --- Forward -------------------------------------------------------------------------------------

constexpr const char* kForward = "batch_norm_fwd";

// Whether squares added up in float have to be added up again in double. The sum of n squares
// overflows if distances are about 1.8e19 / sqrt(n), although their variance is a float. An element
// that is NaN or infinite also spoils the sum of distances, and a second look would give NaN again.
// Float16 never overflows.
template <typename T>
__device__ __forceinline__ bool NeedsSecondLook(const double2& sum) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>) {
    return Overflowed(sum.y) && isfinite(sum.x);
  } else {
    return false;
  }
}

// Computes a bundle's statistics; the mean is origin + offset. Returns the three numbers that y is
// computed from. If `stores`, stores all four statistics.
template <typename A>
__device__ __forceinline__ void SetStatistics(const BatchNormFwdArgs& args, bool stores,
                                              std::int64_t i, A origin, double offset,
                                              double variance, A (&mean_rstd_delta)[3]) {
  const A mean = static_cast<A>(static_cast<double>(origin) + offset);
  const A rstd = InverseDeviation(static_cast<A>(variance), Epsilon<A>(args.epsilon, args.strict));
  // Computed from the origin, because the exact mean may have more digits than a double.
  const A delta =
      static_cast<A>((static_cast<double>(origin) - static_cast<double>(mean)) + offset);
  if (stores) {
    static_cast<A*>(args.batch_mean)[i] = mean;
    static_cast<A*>(args.batch_variance)[i] = static_cast<A>(variance);
    static_cast<A*>(args.batch_rstd)[i] = rstd;
    static_cast<A*>(args.batch_delta)[i] = delta;
  }
  mean_rstd_delta[0] = mean, mean_rstd_delta[1] = rstd, mean_rstd_delta[2] = delta;
}

// A channel's numbers for y = (x - mean) * factor + offset.
enum AffineNumbers { kAffineMean, kFactor, kOffset, kAffine };
static_assert(kAffine == kForwardNeeds.parameters);

template <typename A>
__device__ __forceinline__ void SetAffine(A scale, A bias, A mean, A rstd, A delta,
                                          A (&numbers)[kAffine]) {
  numbers[kAffineMean] = mean, numbers[kFactor] = rstd * scale;
  numbers[kOffset] = bias - delta * numbers[kFactor];
}

// Turns elements of x into elements of y. `terms`: the residual's elements.
template <typename T, int W, bool kGrouped = true, typename A = Accum<T>>
__device__ __forceinline__ void Apply(const BatchNormFwdArgs& args, const A (&numbers)[kAffine][W],
                                      bool residual, const A (&terms)[W], A (&values)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    values[j] = (values[j] - numbers[kAffineMean][j]) * numbers[kFactor][j] + numbers[kOffset][j];
    if (residual) values[j] += terms[j];
  }
  if (args.relu) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = values[j] < 0 ? A{0} : values[j];  // NaN stays NaN
  }
  if (kGrouped && args.silu) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] *= Sigmoid<T>(values[j]);
  }
}

// --- Backward ------------------------------------------------------------------------------------

constexpr const char* kBackward = "batch_norm_bwd";

// What dz is: dy, or dy where relu's argument was positive and 0 elsewhere, or dy times silu's
// derivative. The sign of relu's argument is taken from y, or the argument is computed again from
// x.
enum class Mask { kNone, kOfY, kOfX, kSilu };

// Turns dy into dz. The activation's argument is x * factor + offset. `x` is the distance from the
// mean, or x_hat if `factor` is the scale. NaN is not positive.
template <Mask kMask, typename T, int W, typename A = Accum<T>>
__device__ __forceinline__ void MaskGrad(const A (&x)[W], const A (&factor)[W],
                                         const A (&offset)[W], const A (&y)[W], A (&dy)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const A argument = x[j] * factor[j] + offset[j];
    if constexpr (kMask == Mask::kOfY) dy[j] = y[j] > 0 ? dy[j] : A{0};
    if constexpr (kMask == Mask::kOfX) dy[j] = argument > 0 ? dy[j] : A{0};
    if constexpr (kMask == Mask::kSilu) {
      const A sigmoid = Sigmoid<T>(argument);
      dy[j] *= sigmoid * (1 + argument * (1 - sigmoid));
    }
  }
}

}  // namespace
}  // namespace gradops
