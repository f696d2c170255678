// GELU and its derivative for one element: one definition for host and device. Float formulas are
// templates over F: float, or several of them (cpu/lanes.h), which have the primitives below, too.
//
//   exact  y = x Phi(x)
//   tanh   y = x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3)
//
// Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415. Both weights w(x) are the
// complement of w(-x). So with a = |x| and the tail q = w(-a), which never cancels,
//
//   y = max(x, 0) - a q
//   y' = D for x < 0, else 1 - D, where D is y' at -a
//   exact  q = exp(-a^2/2) R(a)             D = exp(-a^2/2) (R(a) - a / sqrt(2 pi))
//   tanh   q = e r                          D = e r (1 - a v'(a) r)
//          e = exp(-v(a)), r = 1 / (1 + e)
//
// One exponential and one reciprocal serve value and derivative, without branches, and the tail is
// not 0 before it underflows. a is clamped to where q no longer counts, so nothing is inf * 0; NaN
// stays NaN.
//
// By element type:
//   float   R = s P8(a s), s = 1/(a + 3): relative error 4.7e-9. At a = 0 the polynomial is its
//           first term and at a = 3 its terms hardly cancel, so little is lost to rounding. The
//           exponent is an exact plus a small part: without, y near -3 is 5.8 ulp off (exact) and
//           13.5 (tanh).
//   16 bit  R = s P5(s), s = 1/(a + 3.5): 3.1e-6. The exponential is one instruction on the device,
//           and has relative error 5.9e-6 on the host.
//   double  the library's erfc and exp.
//
// The coefficients are ours: minimax in relative error against 0.5 erfcx(a / sqrt 2), by linear
// programming on 1,500 Chebyshev points over a in [0, 14.8], where a > 3.2 counts 1/50; each was
// rounded to float before the next ones were fitted. Those of the exponentials likewise.
//
// Largest errors against long double, on the host: 4.6 million floats in [-15, 15], without fma,
// with it, and with it and the reciprocal perturbed by an ulp, as a device's may be; all finite
// 16-bit inputs, where the exponential was perturbed by 2 ulp too. ulp of y' are of max(|y'|, 1/8).
//
//                              exact                  tanh
//   float    y, x in (-3, 0)   3.8, 4.1, 4.9 ulp      7.1, 6.0, 6.8 ulp
//   float    y, x > 0          3.2, 3.2, 4.4 ulp      2.4, 2.4, 4.2 ulp
//   float    y, x < -3         7e-7 relative          1.6e-5 relative
//   float    y'                5.3, 4.9, 6.4 ulp      4.8, 4.5, 5.7 ulp
//   float    y', x < -3        2.5e-7 relative        1.7e-5 relative
//   float16  y; y'             0.52; 0.51 ulp         0.51; 0.51 ulp
//   bfloat16 y; y'             0.52; 0.50 ulp         0.51; 0.50 ulp
//   double   y, x > -3; y'     14; 4.3 ulp            16; 5.7 ulp
//   double   y, |x| < 12       2.5e-14 relative       5.2e-14 relative
//
// On an H200, all 2^32 floats against double (tests/gpu/check_gelu.cu sweep): y, x > -3: 4.3
// and 6.7 ulp; y, x < -3: 5.9e-7 and 8.4e-6 relative; y': 5.4 and 4.8 ulp. NaN gives NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace gradops {
namespace gelu {

// Exponentials are kept times 2^40 until the last product, so that results underflow gradually
// while no factor does.
inline constexpr float kDown = 0x1p-40f;

inline constexpr float kLog2e = 1.44269504f;
inline constexpr float kInvSqrt2Pi = 0.398942280f;

// c0 + s (c1 + s (c2 + ...))
template <typename F>
GRADOPS_HOST_DEVICE inline F Horner(F /*s*/, float c0) {
  return c0;
}
template <typename F, typename... Rest>
GRADOPS_HOST_DEVICE inline F Horner(F s, float c0, Rest... rest) {
  return c0 + s * Horner(s, rest...);
}

// The next three choose without comparing floats on the host: GCC keeps such comparisons as
// branches (they may trap), and then vectorises no loop around them. Of floats >= 0, the bits order
// as they do.
GRADOPS_HOST_DEVICE inline std::int32_t Bits(float x) {
  return std::bit_cast<std::int32_t>(x);
}
GRADOPS_HOST_DEVICE inline float FromBits(std::int32_t bits) {
  return std::bit_cast<float>(bits);
}

// min(|x|, limit), NaN for NaN.
GRADOPS_HOST_DEVICE inline float ClampedAbs(float x, float limit) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(x)), "f"(limit));
  return result;
#else
  const std::int32_t magnitude = Bits(x) & 0x7fffffff;
  const std::int32_t nan = (0x7f800000 - magnitude) >> 31;  // all ones, which is a NaN, or 0
  const std::int32_t bound = Bits(limit);
  return FromBits((magnitude < bound ? magnitude : bound) | nan);
#endif
}

// max(x, 0); 0 for some NaN.
GRADOPS_HOST_DEVICE inline float PositivePart(float x) {
#if defined(__CUDA_ARCH__)
  return fmaxf(x, 0.0f);
#else
  return FromBits(Bits(x) > 0 ? Bits(x) : 0);
#endif
}

// x < 0 ? negative : positive; either for 0 and NaN.
GRADOPS_HOST_DEVICE inline float SelectBySign(float x, float negative, float positive) {
#if defined(__CUDA_ARCH__)
  return x < 0.0f ? negative : positive;
#else
  const std::int32_t sign = Bits(x) >> 31;
  return FromBits((Bits(negative) & sign) | (Bits(positive) & ~sign));
#endif
}

// Relative error at most 2^-23 on the device, 2^-24 on the host; for normal x.
GRADOPS_HOST_DEVICE inline float Reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// x without the lower half of its mantissa, so that products of such numbers are exact.
GRADOPS_HOST_DEVICE inline float Upper12Bits(float x) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xfffff000u);
}

// round(z log2(e) / 2) for 0 <= z < 2^8, and 2^40 over 2 to its power. Adding 1.5 * 2^23 leaves the
// integer in the last bits of the sum.
template <typename F>
struct Exponent {
  F n, scale;
};
template <typename F>
GRADOPS_HOST_DEVICE inline Exponent<F> HalfExponent(F z) {
  constexpr float kMagic = 0x1.8p23f;
  const F sum = z * (0.5f * kLog2e) + kMagic;
  constexpr std::int32_t kBias = 127 + 40 + 0x4b400000;  // kMagic's bits
  return {sum - kMagic, FromBits((kBias - Bits(sum)) << 23)};
}

// 2^40 exp(-(hi + lo) / 2) for 0 <= hi + lo <= 225; hi has no rounding error and dominates.
template <typename F>
GRADOPS_HOST_DEVICE inline F ExpMinusHalf(F hi, F lo) {
  const Exponent<F> e = HalfExponent(hi + lo);
  // 2 ln 2 in two parts; n times the first is exact, and so is the difference where it counts.
  const F r = (e.n * 0x1.62e4p0f - hi) - lo + e.n * 0x1.7f7d1cp-19f;
  return e.scale * Horner(r, 1.0f, 0.5f, 0.124999985f, 0.02083314f, 0.0026042678f, 0.00026155714f,
                          2.159665e-05f);
}

// The same to 16 bits or more.
template <typename F>
GRADOPS_HOST_DEVICE inline F ShortExpMinusHalf(F z) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(z, -0.5f * kLog2e, 40.0f)));
  return result;
#else
  const Exponent<F> e = HalfExponent(z);
  const F r = e.n * 1.38629436f - z;
  return e.scale * Horner(r, 1.0f, 0.5f, 0.12501383f, 0.02094627f, 0.0025789125f);
#endif
}

// exp(-a^2/2) 2^40 and R(a).
template <typename F>
struct Gaussian {
  F a, exponential, ratio;
};
template <bool kShort, typename F>
GRADOPS_HOST_DEVICE inline Gaussian<F> GaussianTail(F x) {
  const F a = ClampedAbs(x, 14.8f);
  if constexpr (kShort) {
    const F s = Reciprocal(a + 3.5f);
    const F ratio =
        s * Horner(s, 0.40384948f, 1.1825544f, 8.065995f, -16.79352f, 157.54895f, -161.96097f);
    return {a, ShortExpMinusHalf(a * a), ratio};
  } else {
    const F s = Reciprocal(a + 3.0f);
    const F ratio = s * Horner(a * s, 1.5f, -2.0904796f, 1.0689933f, 0.20790806f, -0.2668536f,
                               -0.0868413f, -0.043377828f, 0.18660364f, -0.07712412f);
    const F upper = Upper12Bits(a);
    return {a, ExpMinusHalf(upper * upper, (a - upper) * (a + upper)), ratio};
  }
}

// exp(-v(a)) 2^40 and 1 / (1 + exp(-v(a))).
inline constexpr float kCubic = 0.044715f;
// 4 sqrt(2/pi), so that 2 v = kTwiceV (a + kCubic a^3).
inline constexpr float kTwiceV = 3.19153824f;
template <typename F>
struct Logistic {
  F a, square, exponential, complement;
};
template <bool kShort, typename F>
GRADOPS_HOST_DEVICE inline Logistic<F> LogisticTail(F x) {
  const F a = ClampedAbs(x, 11.0f);
  const F square = a * a;
  F exponential;
  if constexpr (kShort) {
    exponential = ShortExpMinusHalf(a * (kTwiceV + kTwiceV * kCubic * square));
  } else {
    constexpr float kUpper = 3.19140625f, kLower = 0.0001319932f;  // kTwiceV in two parts
    const F upper = Upper12Bits(a);
    exponential =
        ExpMinusHalf(kUpper * upper, kUpper * (a - upper) + a * (kLower + 0.14270963f * square));
  }
  return {a, square, exponential, Reciprocal(1.0f + exponential * kDown)};
}

// The double forms; beyond 40 the tail is 0.
GRADOPS_HOST_DEVICE inline double ClampedAbs(double x) {
  const double a = std::fabs(x);
  return 40.0 < a ? 40.0 : a;
}
GRADOPS_HOST_DEVICE inline double PositivePart(double x) {
  return x > 0 ? x : 0;
}
GRADOPS_HOST_DEVICE inline double SelectBySign(double x, double negative, double positive) {
  return x < 0 ? negative : positive;
}
// Of numbers from 1 to 2; without the branches of a division.
GRADOPS_HOST_DEVICE inline double Reciprocal(double x) {
#if defined(__CUDA_ARCH__)
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // 20 bits
  result = fma(result, fma(-x, result, 1.0), result);         // Newton, 40
  return fma(result, fma(-x, result, 1.0), result);
#else
  return 1.0 / x;
#endif
}
GRADOPS_HOST_DEVICE inline double GaussianTail(double a) {
  return 0.5 * std::erfc(a * 0.70710678118654752440);
}
GRADOPS_HOST_DEVICE inline double LogisticExp(double a) {
  return std::exp(-1.5957691216057307117 * (a + 0.044715 * a * a * a));
}

}  // namespace gelu

// GELU for element type T, in and out in the compute type.
template <typename T, bool kApproximate, typename F>
GRADOPS_HOST_DEVICE inline F Gelu(F x) {
  using namespace gelu;
  constexpr bool kShort = sizeof(T) == 2;
  if constexpr (std::is_same_v<T, double>) {
    const double a = ClampedAbs(x);
    if constexpr (kApproximate) {
      const double e = LogisticExp(a);
      return PositivePart(x) - a * e * Reciprocal(1.0 + e);
    } else {
      return PositivePart(x) - a * GaussianTail(a);
    }
  } else if constexpr (kApproximate) {
    const Logistic<F> t = LogisticTail<kShort>(x);
    return PositivePart(x) - (t.a * t.exponential) * t.complement * kDown;
  } else {
    const Gaussian<F> t = GaussianTail<kShort>(x);
    return PositivePart(x) - (t.a * t.exponential) * t.ratio * kDown;
  }
}

// Its derivative.
template <typename T, bool kApproximate, typename F>
GRADOPS_HOST_DEVICE inline F GeluDerivative(F x) {
  using namespace gelu;
  constexpr bool kShort = sizeof(T) == 2;
  F d;
  if constexpr (std::is_same_v<T, double>) {
    const double a = ClampedAbs(x);
    if constexpr (kApproximate) {
      const double e = LogisticExp(a), r = Reciprocal(1.0 + e);
      d = e * r * (1.0 - a * r * 1.5957691216057307117 * (1.0 + 3 * 0.044715 * a * a));
    } else {
      d = GaussianTail(a) - a * 0.39894228040143267794 * std::exp(-0.5 * a * a);
    }
  } else if constexpr (kApproximate) {
    const Logistic<F> t = LogisticTail<kShort>(x);
    constexpr float kSlope = 0.5f * kTwiceV;
    const F a_slope = t.a * (kSlope + 3 * kSlope * kCubic * t.square);
    d = t.exponential * t.complement * (1.0f - a_slope * t.complement) * kDown;
  } else {
    const Gaussian<F> t = GaussianTail<kShort>(x);
    d = t.exponential * (t.ratio - t.a * kInvSqrt2Pi) * kDown;
  }
  return SelectBySign(x, d, F(1) - d);
}

}  // namespace gradops
