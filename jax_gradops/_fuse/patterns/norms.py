"""Layer norm and RMS norm, with the addition before them."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns.candidate import (
    Affine,
    Before,
    Candidate,
    Left,
    dtype_of,
    only_leaves,
    parameter,
    same_layout,
)
from jax_gradops._fuse.polynomial import Axes, Function, Leaf, Mean, Monomial, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._ops.row_norm import layer_norm

NOT_LAST = "the means are not over the last axes"


class Normalized(NamedTuple):
    """(root - mean) / sqrt(variance + epsilon) * scale + bias, or without means."""

    centered: bool
    over: Axes  # the axes of the means
    epsilon: float
    scale: Polynomial
    bias: Polynomial
    dtype: Any  # of the square root


def normalized(values: Values, p: Polynomial) -> Normalized | None:
    """The parts of a polynomial that is a norm of the root."""
    inverse = {a for m in p.terms for a, e in m if _is_inverse_root(a, e)}
    if len(inverse) != 1:
        return None
    (deviation,) = inverse
    assert isinstance(deviation, Function)
    statistics = _variance(values, polynomial.from_key(deviation.of))
    if statistics is None:
        return None
    centered, over, epsilon = statistics
    factor: Monomial = frozenset([(deviation, -0.5)])
    bias = Polynomial({m: c for m, c in p.terms.items() if not factor <= m})
    rest = p.without(bias.terms).divided(factor)
    root: Monomial = frozenset([(values.root_atom, 1.0)])
    if rest is None:
        return None
    scale = Polynomial({m: c for m, c in rest.terms.items() if root <= m}).divided(root)
    if scale is None or not scale.terms:
        return None
    expected = polynomial.of_monomial(root)
    if centered:
        expected = expected + polynomial.mean(expected, over).scaled(-1)
    if not rest.close_to(expected * scale):
        if centered and rest.close_to(polynomial.of_monomial(root) * scale):
            raise Left("the mean is not subtracted from the array, although the variance has it")
        return None
    return Normalized(centered, over, epsilon, scale, bias, dtype_of(values, deviation))


def _is_inverse_root(atom: polynomial.Atom, exponent: float) -> bool:
    return _is_power(atom) and exponent == -0.5


def _variance(values: Values, p: Polynomial) -> tuple[bool, Axes, float] | None:
    """Whether p is variance + epsilon or mean square + epsilon, over which axes."""
    root = values.root_atom
    square: Monomial = frozenset([(root, 2.0)])
    means = [
        a for m in p.terms if len(m) == 1 for a, e in m if e == 1 and isinstance(a, Mean)
        and a.of == square
    ]  # fmt: skip
    if len(means) != 1:
        return None
    over = means[0].over
    expected = polynomial.of_atom(means[0])
    epsilon = p.terms.get(polynomial.ONE, 0.0)
    if epsilon < 0:
        return None
    mean = polynomial.mean(polynomial.of_atom(root), over)
    for centered in (False, True):
        if centered:
            expected = expected + (mean * mean).scaled(-1)
        if p.close_to(expected + polynomial.constant(epsilon)):
            return centered, over, epsilon
    return None


def unbiased(values: Values, found: Normalized) -> bool:
    """Whether the variance was divided by n - 1. Its factor is in the scale then."""
    n = math.prod(values.sizes[i] for i in found.over)
    factors = [abs(c) for c in found.scale.terms.values()]
    wanted = math.sqrt((n - 1) / n)
    return (
        found.centered
        and len(factors) == 1
        and polynomial.close(factors[0], wanted, 2e-6)
        and (not polynomial.close(factors[0], 1, 2e-6))
    )


def raise_for_range(found: Normalized, op: str) -> None:
    """Raises `Left` if usual arrays are NaN or infinite in the code. They are not in the op.

    Such arrays are rows without a variance, and in float16 also numbers above 255. The derivative
    of 1/sqrt(epsilon) has the power -3/2.
    """
    if found.dtype == jnp.float16:
        raise Left(
            "its statistics are in float16, where the square of a number above 255 is infinite. "
            "Compute them in float32"
        )
    if found.epsilon <= float(jnp.finfo(found.dtype).max) ** (-2 / 3):
        row = "one constant" if found.centered else "zeros"
        raise Left(
            f"epsilon is {found.epsilon:.3g}: for a row of {row}, the code or its derivative is "
            f"NaN, and the op is not. Add a larger epsilon, or call jax_gradops.{op}"
        )


def why_left(values: Values, shows: Var) -> str:
    """Why the square root of a mean square is not part of a norm. Empty if it is none at all."""
    form = values.forms.get(shows)
    base = [a for m in form.polynomial.terms for a, _ in m if _is_power(a)] if form else []
    if len(base) != 1:
        return ""
    atoms = _atoms(base[0].of)
    if any(isinstance(a, Leaf) for a in atoms):
        return "epsilon, or a part of the variance, is an array"
    used = {a for form in values.forms.values() for a in _atoms(form.polynomial.terms.items())}
    if any(isinstance(a, Function) and a.name == "stop_gradient" for a in used):
        return "a statistic passes through stop_gradient"
    if not any(isinstance(a, Mean) for a in atoms):
        return ""
    if _variance(values, polynomial.from_key(base[0].of)) is None:
        return "the square root is not of a variance or a mean square of one array"
    return "the result is not (x - mean) / sqrt(variance + epsilon), with statistics of x"


def _is_power(atom: polynomial.Atom) -> bool:
    return isinstance(atom, Function) and atom.name == "power"


def _atoms(terms: Iterable[tuple[Monomial, float]]) -> set[polynomial.Atom]:
    """The atoms of a polynomial, with those inside of functions."""
    found: set[polynomial.Atom] = set()
    for monomial, _ in terms:
        for atom, _ in monomial:
            found.add(atom)
            if isinstance(atom, Function):
                found |= _atoms(atom.of)
    return found


def first_axis(values: Values, over: Axes) -> int | None:
    """The first of the array's axes that means are over. None if these are not the last axes."""
    labels = [{p.label for p in axis} for axis in values.forms[values.root].dims]
    first = next((i for i, axis in enumerate(labels) if axis and axis <= over), len(labels))
    return first if frozenset(n for axis in labels[first:] for n in axis) == over else None


def row_norm(values: Values, v: Var) -> Candidate | None:
    """Layer norm or RMS norm over the last axes."""
    if not same_layout(values, v):
        _raise_for_layout(values, v)
        return None
    found = normalized(values, values.forms[v].polynomial)
    if found is None:
        return None
    dims = values.forms[values.root].dims
    first = first_axis(values, found.over)
    if first is None:
        if found.centered:
            return None  # perhaps a batch norm or a group norm
        raise Left(NOT_LAST)
    if unbiased(values, found):
        raise Left("the variance is divided by n - 1")
    if not only_leaves(found.scale, found.over) or not only_leaves(found.bias, found.over):
        return None
    parameters = (found.scale, found.bias)
    if any(p.axes and p.axes != found.over for p in parameters):
        return None  # a group norm with one group
    if found.bias.terms and not found.centered:
        return None  # the norm without the bias is found on its own
    axes = range(first, len(dims))
    affine = Affine(
        parameter(values, found.scale, axes), parameter(values, found.bias, axes), with_offset=True
    )
    norm, with_addition = (
        (layer_norm.layer_norm, layer_norm.add_layer_norm)
        if found.centered
        else (layer_norm.rms_norm, layer_norm.add_rms_norm)
    )
    call, add = (
        functools.partial(_row_norm, f, affine, begin_norm_axis=first, epsilon=found.epsilon)
        for f in (norm, with_addition)
    )
    raise_for_range(found, norm.__name__)
    before = Before("arrays", with_addition.__name__, add)
    return Candidate(norm.__name__, call, (values.root, *affine.leaves), v, before=before)


def _raise_for_layout(values: Values, v: Var) -> None:
    """Raises `Left` if a value is a norm in another dtype, or with axes in another order."""
    old, new = values.root.aval.dtype, v.aval.dtype
    form, dims = values.forms[v], values.forms[values.root].dims
    if sorted(form.dims, key=str) != sorted(dims, key=str) or v not in values.program.users:
        return
    if normalized(values, form.polynomial) is None:
        return
    if form.dims != dims:
        raise Left("its result is transposed, and the statistics are not of the transposed array")
    raise Left(f"its result is used in {new.name}, and its input is {old.name}")


def _row_norm(norm: Any, affine: Affine, *arrays: Any, **options: Any) -> Any:
    """Calls a norm of one array, or of the sum of two. The second one may have a bias."""
    split = len(arrays) - len(affine.leaves)
    options |= affine.arguments(arrays[0], arrays[split:])
    if split == 3:
        options["residual_bias"] = arrays[2].reshape(-1)
    return norm(*arrays[: min(split, 2)], **options)
