// GELU and its derivative for one element: one definition for host and device. The formulas are
// templates over F: float, double, or registers full of one of the two (cpu/lanes.h). Each F has
// the primitives of common/exponential.h.
//
//   exact  y = x Phi(x)
//   tanh   y = x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3)
//
// Source: Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415. Both forms are y = x w(x),
// and their weights satisfy w(x) = 1 - w(-x). a is |x|. The tail q = w(-a) never suffers from
// cancellation.
//
//   y = max(x, 0) - a q
//   y' = D for x < 0, else 1 - D. D is y' at -a.
//   exact  q = exp(-a^2/2) R(a)             D = exp(-a^2/2) (R(a) - a / sqrt(2 pi))
//   tanh   q = e r                          D = e r (1 - a v'(a) r)
//          e = exp(-v(a)), r = 1 / (1 + e)
//
// One exponential and one reciprocal serve both the value and the derivative. No branch is needed.
// The tail becomes 0 only when it underflows. a is clamped to a limit: q has no effect beyond that
// limit, and inf * 0 cannot occur. A NaN stays a NaN.
//
// R by element type:
//   double  R = P9(a) / P10(a). Relative error: 5.1e-17, or 1.1e-16 with rounded coefficients.
//           All coefficients are positive, so that little is lost to rounding.
//   float   R = s P8(a s), s = 4/(a + 3). Relative error: 4.7e-9. At a = 0 the polynomial is its
//           first term, and at a = 3 its terms hardly cancel. a s is a normal number if a is.
//           The exponent is the sum of an exact and a small part, as in double. Without this, y
//           near -3 is off by 5.8 ulp (exact) and 13.5 ulp (tanh). The exponential of tanh has
//           base 2: its integer part is taken off without a product. So the coefficients of the
//           cubic include log2(e).
//   16 bit  R = s P5(s), s = 1/(a + 3.5). Relative error: 3.1e-6. The exponential is one
//           instruction on the device. On the host its relative error is 5.9e-6.
//
// The coefficients are our own. Against R(a) = 0.5 erfcx(a / sqrt 2), they minimise the largest
// relative error. The coefficients of the exponentials were found in this way, too.
//   float, 16 bit  Linear programming on 1,500 Chebyshev points over a in [0, 14.8]. Points with
//                  a > 3.2 count 1/50. Each coefficient was rounded to float before the next ones
//                  were fitted.
//   double         Least squares with Lawson's weights, 60 digits, 160 points over [0, 39]. The
//                  first coefficient of P9 is half of P10's, so that y'(0) is 1/2.
//
// Largest errors on the host, against long double (double: __float128). The inputs are 4.3 million
// floats in [-15, 15], 6 million floats in [-3, 0], 2 million doubles in [-38, 38], and all finite
// 16-bit numbers. A cell lists the error without fma and with fma. For float, the third error is
// with fma and a reciprocal that is changed by one ulp, as a device may do. For 16-bit numbers the
// exponential was changed by 2 ulp, too. An ulp of y' is an ulp of max(|y'|, 1/8).
//
//                              exact                  tanh
//   float    y, x in (-3, 0)   4.0, 4.0, 5.3 ulp      8.9, 6.9, 8.8 ulp
//   float    y, x > 0          3.9, 3.9, 5.3 ulp      2.6, 2.6, 4.5 ulp
//   float    y, x < -3         7e-7 relative          1.6e-5 relative
//   float    y'                5.5, 5.1, 6.6 ulp      5.0, 4.7, 6.2 ulp
//   float    y', x < -3        2.5e-7 relative        1.6e-5 relative
//   float16  y; y'             0.52; 0.51 ulp         0.51; 0.51 ulp
//   bfloat16 y; y'             0.52; 0.50 ulp         0.51; 0.50 ulp
//   double   y, x in (-3, 0)   8.1, 6.8 ulp           6.5, 6.2 ulp
//   double   y, x > 0          3.3, 3.3 ulp           2.2, 2.2 ulp
//   double   y, x < -3         1.7e-15 relative       2.4e-13 relative (x > -12: 3.4e-14)
//   double   y'                6.5, 5.5 ulp           4.8, 4.4 ulp
//
// Largest errors on an H200: all 2^32 floats against double (tests/gpu/check_gelu.cu sweep). NaN
// gives NaN.
//
//                              exact                  tanh
//   y, x > -3                  4.5 ulp                7.7 ulp
//   y, x < -3                  5.4e-7 relative        1.1e-5 relative
//   y'                         5.6 ulp                5.1 ulp
#pragma once

#include <limits>
#include <type_traits>

#include "common/dtype.h"
#include "common/exponential.h"
#include "common/math.h"

namespace gradops {
namespace gelu {

// How exact a formula has to be, by element type. kDouble is computed in double, else in float.
enum class Precision { k16Bits, kFloat, kDouble };
template <typename T>
inline constexpr Precision kPrecision = std::is_same_v<T, double> ? Precision::kDouble
                                        : sizeof(T) == 2          ? Precision::k16Bits
                                                                  : Precision::kFloat;

template <typename A>
inline constexpr A kHalfLog2e = A(0.72134752044448170368);

// 2^kUpPower exp(-a^2 / 2). A rounded square in the exponent would put the result off by many ulp.
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline F ExpMinusHalfSquare(F a) {
  // 2 ln 2 as the sum of two numbers. n times the first one is exact.
  constexpr A kLn4 = kIsDouble<A> ? A(0x1.62e42fefa3p0) : A(0x1.62e4p0f);
  constexpr A kLn4Rest = kIsDouble<A> ? A(0x1.3de6af278ece6p-41) : A(0x1.7f7d1cp-19f);
  const auto [minus_n, bits] =
      ExponentOf<A>(MulSub(F(kMagic<A> + kUpPower<A>), a * a, F(kHalfLog2e<A>)));
  return ExpHalf<A>(MulAdd(minus_n, F(kLn4Rest), MinusProduct(minus_n * kLn4, a, a)), bits);
}

// The part that value and derivative share. It is about half of the work of each. `exponential` is
// 2^kUpPower exp(-a^2/2). s is the s of the formulas above. In double it is a.
template <typename F>
struct Gaussian {
  F x, a, exponential, s;
};
template <Precision kNeeded, typename F>
GRADOPS_HOST_DEVICE inline Gaussian<F> GaussianTail(F x) {
  if constexpr (kNeeded == Precision::kDouble) {
    const F a = ClampedAbs(x, 39.0);
    return {x, a, ExpMinusHalfSquare<double>(a), a};
  } else {
    const F a = ClampedAbs(x, 14.8f);
    if constexpr (kNeeded == Precision::kFloat) {
      return {x, a, ExpMinusHalfSquare<float>(a), Reciprocal(MulAdd(a, F(0.25f), F(0.75f)))};
    } else {
      const F y = MulAdd(a * a, F(-kHalfLog2e<float>), F(float{kUpPower<float>}));
      return {x, a, ShortExp2(y), Reciprocal(a + 3.5f)};
    }
  }
}

// The factors a and R(a) / 2^kUpPower. With kProduct, they may be two other numbers with an equal
// product, if these take less time.
template <typename F>
struct Factors {
  F a, ratio;
};
template <Precision kNeeded, bool kProduct, typename F>
GRADOPS_HOST_DEVICE inline Factors<F> GaussianRatio(F a, F s) {
  if constexpr (kNeeded == Precision::k16Bits) {
    const F p =
        HornerDown(s, 0.40384948f, 1.1825544f, 8.065995f, -16.79352f, 157.54895f, -161.96097f);
    return {a, s * p};
  } else if constexpr (kNeeded == Precision::kFloat) {
    const F u = a * s;
    const F p = HornerDown(u, 1.5f / 4, -2.0904796f / 16, 1.0689933f / 64, 0.20790806f / 256,
                           -0.2668536f / 1024, -0.0868413f / 4096, -0.043377828f / 16384,
                           0.18660364f / 65536, -0.07712412f / 262144);
    return {kProduct ? u : a, kProduct ? p : s * p};
  } else {
    const F p =
        HornerDown(a, 143950.5122702771, 223086.70123772492, 171026.13938974394, 83298.9100386556,
                   28127.641324955293, 6800.892562570581, 1177.3122077082523, 141.19095376986368,
                   10.725450544139283, 0.39894228040024843);
    const F q = Horner(a, 287901.0245405542, 675885.184995682, 737380.1204927468, 493570.0353358429,
                       225148.95654077077, 73402.85230294777, 17399.22294940254, 2977.9687822807077,
                       354.9132368990367, 26.88471759148133, 1.0);
    return {a, p * Reciprocal(q)};
  }
}

// The shared part for tanh: x, a, a^2 and 2^kUpPower exp(-v(a)). The exponential is computed as
// 2^(kUpPower - w) with w = a (c + d a^2).
template <typename A>
inline constexpr A kTwoRootTwoOverPi = A(1.5957691216057307118);
template <typename A>
inline constexpr A kCubic = A(0.044715);
template <typename A>
inline constexpr A kC = A(2.3022081981443248891);  // 2 sqrt(2/pi) log2(e)
template <typename A>
inline constexpr A kD = kC<A> * kCubic<A>;
template <typename F>
struct Logistic {
  F x, a, square, exponential;
};
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline F LogisticMagnitude(F x) {
  return ClampedAbs(x, kIsDouble<A> ? A(21.8) : A(11.0));
}
// The arguments of Exp2: the fraction f, and the exponent as bits.
template <typename F, typename I>
struct Reduced {
  F f;
  I bits;
};
template <typename A, typename F>
GRADOPS_HOST_DEVICE inline auto LogisticReduced(F a, F square) {
  // c as the sum of two numbers. The first one has few bits, for processors without fma.
  constexpr A kUpper = kIsDouble<A> ? A(0x1.26aec2p1) : A(2.3017578125f);
  constexpr A kLower = kIsDouble<A> ? A(0x1.bce7594bb4a16p-27) : A(0.00045038564f);
  const F rest = MulAdd(square, F(kD<A>), F(kLower));
  const auto e = ExponentOf<A>(MulSub(F(kMagic<A> + kUpPower<A>), a, rest + kUpper));
  const F f = MulSub(MinusProduct(e.minus_n, a, F(kUpper)), a, rest);
  return Reduced<F, decltype(e.bits)>{f, e.bits};
}
template <Precision kNeeded, typename F>
GRADOPS_HOST_DEVICE inline Logistic<F> LogisticTail(F x) {
  using A = std::conditional_t<kNeeded == Precision::kDouble, double, float>;
  const F a = LogisticMagnitude<A>(x);
  const F square = a * a;
  if constexpr (kNeeded == Precision::k16Bits) {
    const F minus_slope = MulAdd(square, F(-kD<A>), F(-kC<A>));
    return {x, a, square, ShortExp2(MulAdd(a, minus_slope, F(A{kUpPower<A>})))};
  } else {
    const auto e = LogisticReduced<A>(a, square);
    return {x, a, square, Exp2<A>(e.f, e.bits)};
  }
}

// The size of x beyond which the formula, computed step by step, is NaN, because it has inf * 0.
// For y, x is -inf. For y', x is an infinity, or 3 x^2 overflows in the tanh form. The limit is
// infinite if the call is not strict: y and y' are then numbers.
template <typename T, bool kApproximate, bool kDerivative>
GRADOPS_HOST_DEVICE inline Accum<T> LimitOf(bool strict) {
  using A = Accum<T>;
  using Limits = std::numeric_limits<A>;
  constexpr A kRoot = kIsDouble<A> ? A(7.740561859404937e153) : A(1.0650232e19f);
  if (!strict) return Limits::infinity();
  return kApproximate && kDerivative ? kRoot : Limits::max();
}
template <bool kDerivative, typename A, typename F>
GRADOPS_HOST_DEVICE inline F NanBeyond(A limit, F x) {
  F size;
  if constexpr (kDerivative) {
    size = ClampedAbs(x, std::numeric_limits<A>::infinity());
  } else {
    size = F(A(0)) - x;
  }
  return IfGreater(size, F(limit), F(std::numeric_limits<A>::quiet_NaN()), x);
}

}  // namespace gelu

// The first of two steps for element type T. The argument and the results have the compute type.
template <typename T, bool kApproximate, typename F>
GRADOPS_HOST_DEVICE inline auto GeluTail(F x) {
  if constexpr (kApproximate) {
    return gelu::LogisticTail<gelu::kPrecision<T>>(x);
  } else {
    return gelu::GaussianTail<gelu::kPrecision<T>>(x);
  }
}

// The second step for GELU. It takes the result of GeluTail.
template <typename T, bool kApproximate, template <typename> typename Tail, typename F>
GRADOPS_HOST_DEVICE inline F Gelu(const Tail<F>& t) {
  using namespace gelu;
  if constexpr (kApproximate) {
    return MulSub(PositivePart(t.x), t.a * t.exponential,
                  Reciprocal(kUp<Accum<T>> + t.exponential));
  } else {
    const auto [a, ratio] = GaussianRatio<kPrecision<T>, true>(t.a, t.s);
    return MulSub(PositivePart(t.x), a * t.exponential, ratio);
  }
}

// The second step for the derivative. It takes the result of GeluTail.
template <typename T, bool kApproximate, template <typename> typename Tail, typename F>
GRADOPS_HOST_DEVICE inline F GeluDerivative(const Tail<F>& t) {
  using namespace gelu;
  using A = Accum<T>;
  F d;
  if constexpr (kApproximate) {
    const F complement = Reciprocal(kUp<A> + t.exponential);
    constexpr A kSlope = kTwoRootTwoOverPi<A> * kUp<A>;  // v'(0) times kUp
    const F a_slope = t.a * MulAdd(t.square, F(3 * kSlope * kCubic<A>), F(kSlope));
    d = t.exponential * (MulSub(F(A(1)), a_slope, complement) * complement);
  } else {
    constexpr A kInvSqrt2Pi = A(0.39894228040143267794) * kDown<A>;
    const auto [a, ratio] = GaussianRatio<kPrecision<T>, false>(t.a, t.s);
    d = t.exponential * MulSub(ratio, a, F(kInvSqrt2Pi));
  }
  return SelectBySign(t.x, d, A(1) - d);
}

}  // namespace gradops
