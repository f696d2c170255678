// Building blocks of the formulas in common/gelu.h: the bits of numbers, fused products and sums,
// polynomials, exponentials. Templates over F: float, double, or registers of one of the two
// (cpu/lanes.h).
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
// The unsigned integer with A's width. It is unsigned, because a NaN's bits may overflow.
template <typename A>
using BitsOf = std::conditional_t<kIsDouble<A>, std::uint64_t, std::uint32_t>;

// Exponentials are kept multiplied by 2 to this power until the last product. This lets results
// underflow gradually, while no factor underflows.
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

// min(|x|, limit). NaN gives NaN.
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

// max(x, 0). Some NaN give 0. The double versions here and below use integer operations, because
// the double unit is the busiest one.
GRADOPS_HOST_DEVICE inline float PositivePart(float x) {
  return std::fmax(x, 0.0f);
}
GRADOPS_HOST_DEVICE inline double PositivePart(double x) {
  return FromBits(Bits(x) & ~static_cast<std::uint64_t>(static_cast<std::int64_t>(Bits(x)) >> 63));
}

// x < 0 ? negative : positive. For 0 and NaN the result may be either of the two.
GRADOPS_HOST_DEVICE inline float SelectBySign(float x, float negative, float positive) {
  return x < 0 ? negative : positive;
}
GRADOPS_HOST_DEVICE inline double SelectBySign(double x, double negative, double positive) {
  return static_cast<std::int64_t>(Bits(x)) < 0 ? negative : positive;
}

// 1 / x. The relative error is at most one ulp, on the host half. x and 1 / x are normal numbers.
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
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(result) : "d"(x));  // accurate to 20 bits
  const double error = fma(-x, result, 1.0);
  return fma(result, fma(error, error, error), result);  // leaves error^3
#else
  return 1.0 / x;
#endif
}

// a b + c and c - a b. They are rounded once if the processor has fma. On the CPU, compilers are
// given no choice: they would fuse products and sums differently in each copy of a loop.
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

// The polynomial c0 + s (c1 + s (c2 + ...)). Its coefficients have type A.
template <typename F, typename A>
GRADOPS_HOST_DEVICE inline F Horner(F /*s*/, A c0) {
  return c0;
}
template <typename F, typename A, typename... Rest>
GRADOPS_HOST_DEVICE inline F Horner(F s, A c0, Rest... rest) {
  return MulAdd(s, Horner(s, rest...), F(c0));
}
// Horner(s, c...) times kDown.
template <typename F, typename... A>
GRADOPS_HOST_DEVICE inline F HornerDown(F s, A... c) {
  return Horner(s, c * kDown<A>...);
}

// 1.5 times 2 to the power of the mantissa's length. If it is added to a number, the sum's last
// bits hold the number, rounded to an integer.
template <typename A>
inline constexpr A kMagic = kIsDouble<A> ? A(0x1.8p52) : A(0x1.8p23);

// The power of two in an exponential, 2^(n + kUpPower). Its source is sum = kMagic + kUpPower + n.
// minus_n is -n. If `bits` is added to a number's bits, the number's exponent grows by n +
// kUpPower. n is from -162 (double: -1,117) to 0, so n + kUpPower is a normal exponent.
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

// e times the power of two that `bits` stands for (Exponent).
template <typename A, typename F, typename I>
GRADOPS_HOST_DEVICE inline F Scaled(F e, I bits) {
  return FromBits(Bits(e) + bits);
}

// exp(r / 2) for |r| <= ln 2.
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline F ExpHalf(F r) {
  if constexpr (kIsDouble<A>) {
    return Horner(r, 1.0, 0.5, 0.12500000000000028, 0.020833333333333013, 0.002604166666658073,
                  0.0002604166666717252, 2.1701388974886122e-05, 1.55009918013328e-06,
                  9.688083109015442e-08, 5.3823411080865e-09, 2.6982792641222287e-10,
                  1.2207152245483941e-11);
  } else {
    return Horner(r, 1.0f, 0.5f, 0.124999985f, 0.02083314f, 0.0026042678f, 0.00026155714f,
                  2.159665e-05f);
  }
}

// 2^kUpPower exp(r / 2 + n ln 2) for |r| <= ln 2. `bits` stands for n (Exponent).
template <typename A, typename F, typename I>
GRADOPS_HOST_DEVICE inline F ExpHalf(F r, I bits) {
  return Scaled<A>(ExpHalf<A>(r), bits);
}

// 2^(kUpPower + n + f) for |f| <= 1/2. The coefficients are ExpHalf's times powers of 2 ln 2.
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

// exp(x) for x <= 0, in F: A, or lanes of A. A result below 2^-150 (double: 2^-1074) may be 0. NaN
// and +inf give NaN.
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline F ExpOfNegative(F x) {
  // n is x / ln 2, rounded to an integer, and n times the upper part of ln 2 is exact.
  constexpr A kUpper = kIsDouble<A> ? A(0x1.62e42feep-1) : A(0x1.62e4p-1);
  constexpr A kLower = kIsDouble<A> ? A(1.90821492927058770002e-10) : A(1.4286068203094173e-06);
  constexpr A kLeast = kIsDouble<A> ? A(-770) : A(-110);
  F limited;
  if constexpr (std::is_same_v<A, F>) {
    limited = x < kLeast ? kLeast : x;
  } else {
    limited = Max(F(kLeast), x);
  }
  // The sum's last bits are the biased exponent of 2^(n + kUpPower). The power is a factor here: a
  // sum of bits, as in Scaled, would lose a NaN.
  constexpr A kBase = kMagic<A> + kUpPower<A> + (std::numeric_limits<A>::max_exponent - 1);
  const F sum = MulAdd(limited, F(A(1.4426950408889634)), F(kBase));
  const F power = FromBits(Bits(sum) << (std::numeric_limits<A>::digits - 1));
  const F minus_n = F(kBase) - sum;
  const F rest = MulAdd(minus_n, F(kLower), MulAdd(minus_n, F(kUpper), limited));
  return ExpHalf<A>(rest + rest) * power * F(kDown<A>);
}

// 2^y in float, accurate to at least 16 bits.
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
