// What common/gelu.h's formulas are made of: numbers as bits, fused products and sums, polynomials,
// and exponentials of them. Templates over F: float or double, or several of them (cpu/lanes.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/dtype.h"

namespace gradops::gelu {

template <typename A>
inline constexpr bool kIsDouble = std::is_same_v<A, double>;
// Integers with as many bits. Unsigned, as a NaN's may overflow.
template <typename A>
using BitsOf = std::conditional_t<kIsDouble<A>, std::uint64_t, std::uint32_t>;

// Exponentials are kept times 2 to this power until the last product, so that results underflow
// gradually while no factor does.
template <typename A>
inline constexpr int kUpPower = kIsDouble<A> ? 128 : 40;
template <typename A>
inline constexpr A kUp = kIsDouble<A> ? A(0x1p128) : A(0x1p40);
template <typename A>
inline constexpr A kDown = A(1) / kUp<A>;

template <typename A>
GRADOPS_HOST_DEVICE inline BitsOf<A> Bits(A x) {
  return std::bit_cast<BitsOf<A>>(x);
}
GRADOPS_HOST_DEVICE inline float FromBits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
GRADOPS_HOST_DEVICE inline double FromBits(std::uint64_t bits) {
  return std::bit_cast<double>(bits);
}

// min(|x|, limit), NaN for NaN.
GRADOPS_HOST_DEVICE inline float ClampedAbs(float x, float limit) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(x)), "f"(limit));
  return result;
#else
  const float a = std::fabs(x);
  return a > limit ? limit : a;
#endif
}
GRADOPS_HOST_DEVICE inline double ClampedAbs(double x, double limit) {
  const double a = FromBits(Bits(x) & (~BitsOf<double>{0} >> 1));
  return a > limit ? limit : a;
}

// max(x, 0); 0 for some NaN. Double's unit is the one that has most to do: here and below integers'
// take over.
GRADOPS_HOST_DEVICE inline float PositivePart(float x) {
  return std::fmax(x, 0.0f);
}
GRADOPS_HOST_DEVICE inline double PositivePart(double x) {
  return FromBits(Bits(x) & ~static_cast<std::uint64_t>(static_cast<std::int64_t>(Bits(x)) >> 63));
}

// x < 0 ? negative : positive; either for 0 and NaN.
GRADOPS_HOST_DEVICE inline float SelectBySign(float x, float negative, float positive) {
  return x < 0 ? negative : positive;
}
GRADOPS_HOST_DEVICE inline double SelectBySign(double x, double negative, double positive) {
  return static_cast<std::int64_t>(Bits(x)) < 0 ? negative : positive;
}

// Relative error at most an ulp, half of one on the host; for x and 1 / x that are normal numbers.
GRADOPS_HOST_DEVICE inline float Reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}
GRADOPS_HOST_DEVICE inline double Reciprocal(double x) {
#if defined(__CUDA_ARCH__)
  double result;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // 20 bits
  const double error = fma(-x, result, 1.0);
  return fma(result, fma(error, error, error), result);  // less error^3
#else
  return 1.0 / x;
#endif
}

// a b + c and c - a b, rounded once where the processor can. On the CPU nothing is left to
// compilers, which fuse products and sums as they like, in each copy of a loop otherwise.
template <typename A>
GRADOPS_HOST_DEVICE inline A MulAdd(A a, A b, A c) {
#if defined(__CUDA_ARCH__) || (defined(__FMA__) && defined(__AVX2__)) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}
template <typename A>
GRADOPS_HOST_DEVICE inline A MulSub(A c, A a, A b) {
  return MulAdd(-a, b, c);
}

// m - a b, rounded once.
GRADOPS_HOST_DEVICE inline float MinusProduct(float m, float a, float b) {
  return std::fma(-a, b, m);
}
GRADOPS_HOST_DEVICE inline double MinusProduct(double m, double a, double b) {
  return std::fma(-a, b, m);
}

// c0 + s (c1 + s (c2 + ...)), c in A.
template <typename F, typename A>
GRADOPS_HOST_DEVICE inline F Horner(F /*s*/, A c0) {
  return c0;
}
template <typename F, typename A, typename... Rest>
GRADOPS_HOST_DEVICE inline F Horner(F s, A c0, Rest... rest) {
  return MulAdd(s, Horner(s, rest...), F(c0));
}
// The same times kDown.
template <typename F, typename... A>
GRADOPS_HOST_DEVICE inline F HornerDown(F s, A... c) {
  return Horner(s, c * kDown<A>...);
}

// Adding 1.5 times 2 to the mantissa's length leaves an integer in a sum's last bits.
template <typename A>
inline constexpr A kMagic = kIsDouble<A> ? A(0x1.8p52) : A(0x1.8p23);

// -n = kMagic + kUpPower - sum, and what moves a number's exponent by n + kUpPower when it is added
// to the bits; n from -162 (double: -1,117) to 0, so n + kUpPower is a normal number's.
template <typename F, typename I>
struct Exponent {
  F minus_n;
  I bits;
};
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline auto ExponentOf(F sum) {
  const auto bits = Bits(sum) << (std::numeric_limits<A>::digits - 1);
  return Exponent<F, decltype(bits)>{F(kMagic<A> + kUpPower<A>) - sum, bits};
}

// e times the power of two.
template <typename A, typename F, typename I>
GRADOPS_HOST_DEVICE inline F Scaled(F e, I bits) {
  return FromBits(Bits(e) + bits);
}

// 2^kUpPower exp(r / 2 + n ln 2), |r| <= ln 2.
template <typename A, typename F, typename I>
GRADOPS_HOST_DEVICE inline F ExpHalf(F r, I bits) {
  F e;
  if constexpr (kIsDouble<A>) {
    e = Horner(r, 1.0, 0.5, 0.12500000000000028, 0.020833333333333013, 0.002604166666658073,
               0.0002604166666717252, 2.1701388974886122e-05, 1.55009918013328e-06,
               9.688083109015442e-08, 5.3823411080865e-09, 2.6982792641222287e-10,
               1.2207152245483941e-11);
  } else {
    e = Horner(r, 1.0f, 0.5f, 0.124999985f, 0.02083314f, 0.0026042678f, 0.00026155714f,
               2.159665e-05f);
  }
  return Scaled<A>(e, bits);
}

// 2^(kUpPower + n + f), |f| <= 1/2: the same coefficients times powers of 2 ln 2.
template <typename A, typename F, typename I>
GRADOPS_HOST_DEVICE inline F Exp2(F f, I bits) {
  F e;
  if constexpr (kIsDouble<A>) {
    e = Horner(f, 1.0, 0.6931471805599453, 0.24022650695910125, 0.05550410866482073,
               0.009618129107596738, 0.0013333558146687446, 0.00015403530454421988,
               1.5252733546099225e-05, 1.3215436413317724e-06, 1.0178184715776787e-07,
               7.073615724324469e-09, 4.436335524565569e-10);
  } else {
    e = Horner(f, 1.0f, 0.6931472f, 0.24022648f, 0.055503596f, 0.009618503f, 0.0013391952f,
               0.00015329187f);
  }
  return Scaled<A>(e, bits);
}

// 2^y in float, to 16 bits or more.
template <typename F>
GRADOPS_HOST_DEVICE inline F ShortExp2(F y) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return result;
#else
  const F sum = y + kMagic<float>;
  const F f = y - (sum - kMagic<float>);
  const F e = Horner(f, 1.0f, 0.6931472f, 0.24025308f, 0.055804994f, 0.009524857f);
  return Scaled<float>(e, Bits(sum) << (std::numeric_limits<float>::digits - 1));
#endif
}

}  // namespace gradops::gelu
