// silu(z) = z / (1 + exp(-z)), and its derivative, for one number and for lanes.
//
// Formulas use exp(-|z|), which does not overflow. Both are finite for all finite numbers. A NaN
// stays a NaN. silu of -inf, and the derivative at both infinities, are NaN.
#pragma once

#include "common/exponential.h"
#include "cpu/formulas.h"

namespace gradops {

// s = 1 / (1 + exp(-z)), and its derivative s (1 - s). Both have all digits where they are small.
template <typename F>
struct Sigmoid {
  F value, derivative;
};

// F is A, or lanes of A.
template <typename A, typename F>
GRADOPS_INLINE Sigmoid<F> SigmoidOf(const F& z) {
  using gelu::SelectBySign;  // for one number; the one for lanes is found, too
  const F one = A{1}, minus_size = SelectBySign(z, z, F(A{0}) - z);  // -|z|
  const F e = gelu::ExpOfNegative<A>(minus_size);
  const F larger = one / (one + e), smaller = e * larger;
  return {SelectBySign(z, smaller, larger), larger * smaller};
}

template <typename A, typename F>
GRADOPS_INLINE F Silu(const F& z) {
  return z * SigmoidOf<A>(z).value;
}

template <typename A, typename F>
GRADOPS_INLINE F SiluDerivative(const F& z) {
  using gelu::MulAdd;
  const Sigmoid<F> s = SigmoidOf<A>(z);
  return MulAdd(z, s.derivative, s.value);
}

}  // namespace gradops
