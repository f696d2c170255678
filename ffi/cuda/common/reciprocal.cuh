// Reciprocals on the GPU.
#pragma once

namespace gradops {
namespace {

// These avoid the calls that a division compiles to. Reciprocal of a float is exact to one ulp. The
// others have Newton steps, and are as good as exact if x and 1 / x are normal numbers.
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float PreciseReciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return fmaf(result, fmaf(-x, result, 1.f), result);
}
__device__ __forceinline__ double Reciprocal(double x) {
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // 20 bits
#pragma unroll
  for (int i = 0; i < 2; ++i) result = fma(result, fma(-x, result, 1.0), result);  // Newton
  return result;
}
__device__ __forceinline__ double PreciseReciprocal(double x) {
  return Reciprocal(x);
}

}  // namespace
}  // namespace gradops
