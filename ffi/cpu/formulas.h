// The building blocks of formulas (common/exponential.h) for lanes.
#pragma once

#include <cstdint>
#include <limits>

#include "common/exponential.h"
#include "cpu/lanes.h"

namespace gradops {

template <int n>
GRADOPS_INLINE auto Bits(const Lanes<float, n>& x) {
  return x.template As<std::uint32_t>();
}
template <int n>
GRADOPS_INLINE auto Bits(const Lanes<double, n>& x) {
  return x.template As<std::uint64_t>();
}
template <int n>
GRADOPS_INLINE auto FromBits(const Lanes<std::uint32_t, n>& bits) {
  return bits.template As<float>();
}
template <int n>
GRADOPS_INLINE auto FromBits(const Lanes<std::uint64_t, n>& bits) {
  return bits.template As<double>();
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> ClampedAbs(const Lanes<A, n>& x, A limit) {
  return Min(Lanes<A, n>(limit), FromBits(Bits(x) & (~gelu::BitsOf<A>{0} >> 1)));
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> PositivePart(const Lanes<A, n>& x) {
  return Max(Lanes<A, n>(A{0}), x);
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> SelectBySign(const Lanes<A, n>& x, const Lanes<A, n>& negative,
                                        const Lanes<A, n>& positive) {
  return IfNegative(x, negative, positive);
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> Reciprocal(const Lanes<A, n>& x) {
  return A{1} / x;
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> MulAdd(const Lanes<A, n>& a, const Lanes<A, n>& b,
                                  const Lanes<A, n>& c) {
  return Lanes<A, n>::Map(
      [&](int i) { return lanes::MulAdd(a.registers[i], b.registers[i], c.registers[i]); });
}
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> MulSub(const Lanes<A, n>& c, const Lanes<A, n>& a,
                                  const Lanes<A, n>& b) {
  return Lanes<A, n>::Map(
      [&](int i) { return lanes::MulSub(c.registers[i], a.registers[i], b.registers[i]); });
}
// m - a b, rounded once. Without fma, mantissas are cut into halves. m must then be near to a b.
template <typename A, int n>
GRADOPS_INLINE Lanes<A, n> MinusProduct(const Lanes<A, n>& m, const Lanes<A, n>& a,
                                        const Lanes<A, n>& b) {
#if defined(GRADOPS_FMA)
  return MulSub(m, a, b);
#else
  using F = Lanes<A, n>;
  constexpr int kLower = std::numeric_limits<A>::digits / 2 + gelu::kIsDouble<A>;
  const auto upper = [](const F& x) -> F {
    return FromBits(Bits(x) & -(gelu::BitsOf<A>{1} << kLower));
  };
  const F a_upper = upper(a), b_upper = upper(b);
  return (m - a_upper * b_upper) - (a_upper * (b - b_upper) + (a - a_upper) * b);
#endif
}

}  // namespace gradops
