// silu(z) = z / (1 + exp(-z)), and its derivative, for one number and for lanes.
//
// Formulas use exp(-|z|), which does not overflow. Both are finite for all finite numbers. A NaN
// stays a NaN.
#pragma once

#include <limits>

#include "common/exponential.h"
#include "cpu/formulas.h"

namespace gradops {

// Calls fn(s, 1 - s) for s = 1 / (1 + exp(-z)). Neither of the two loses digits near 0. F is A, or
// lanes of A.
template <typename A, typename F, typename Fn>
GRADOPS_INLINE auto WithSigmoid(const F& z, const Fn& fn) {
  using gelu::ClampedAbs, gelu::SelectBySign;  // for one number; those for lanes are found, too
  const F size = ClampedAbs(z, std::numeric_limits<A>::max()), one = A{1};
  const F e = gelu::ExpOfNegative<A>(F(A{0}) - size);
  const F larger = one / (one + e), smaller = e * larger;
  return fn(F(SelectBySign(z, smaller, larger)), F(SelectBySign(z, larger, smaller)));
}

template <typename A, typename F>
GRADOPS_INLINE F Silu(const F& z) {
  return WithSigmoid<A>(z, [&](const F& s, const F&) { return z * s; });
}

template <typename A, typename F>
GRADOPS_INLINE F SiluDerivative(const F& z) {
  return WithSigmoid<A>(z, [&](const F& s, const F& rest) { return s * (F(A{1}) + z * rest); });
}

}  // namespace gradops
