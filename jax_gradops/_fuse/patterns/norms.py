"""Layer norm and RMS norm, with the addition before them."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.forms import Dims
from jax_gradops._fuse.patterns.candidate import (
    Affine,
    Before,
    Candidate,
    Left,
    dtype_of,
    label_sizes,
    number_new_axes,
    only_leaves,
    parameter,
    same_layout,
)
from jax_gradops._fuse.polynomial import Axes, Function, Leaf, Mean, Monomial, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import strict_infinities
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
    strict: bool  # an infinite variance makes zeros, not NaN: the code subtracts no two variances


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
    square = {frozenset([(values.root_atom, 2.0)])}
    strict = not centered or all(f.polynomial.terms.keys() != square for f in values.forms.values())
    return Normalized(centered, over, epsilon, scale, bias, dtype_of(values, deviation), strict)


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
    atoms = polynomial.atoms_of(base[0].of)
    if any(isinstance(a, Leaf) for a in atoms):
        return "epsilon, or a part of the variance, is an array"
    used = {
        a
        for form in values.forms.values()
        for a in polynomial.atoms_of(form.polynomial.terms.items())
    }
    array = polynomial.of_atom(values.root_atom).key
    stopped = {a for a in used if isinstance(a, Function) and a.name == "stop_gradient"}
    if any(a.of == array for a in stopped):
        return ""  # the array itself: the search from its copy has the reason
    if stopped:
        return "a statistic passes through stop_gradient"
    if any(_is_power(a) and base[0] in polynomial.atoms_of(a.of) for a in used):
        return "a number is added to the square root. It is no epsilon: that is inside of the root"
    if not any(isinstance(a, Mean) for a in atoms):
        return ""
    if _variance(values, polynomial.from_key(base[0].of)) is None:
        return "the square root is not of a variance or a mean square of one array"
    return "the result is not (x - mean) / sqrt(variance + epsilon), with statistics of x"


def _is_power(atom: polynomial.Atom) -> bool:
    return isinstance(atom, Function) and atom.name == "power"


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
    first = first_axis(values, found.over)
    if first is None:
        if found.centered:
            return None  # perhaps a batch norm or a group norm
        raise Left(NOT_LAST)
    if unbiased(values, found):
        raise Left("the variance is divided by n - 1")
    groups = _groups(values, found, first)
    if groups is None:
        return None
    if found.bias.terms and not found.centered:
        return None  # the norm without the bias is found on its own
    affine = groups.affine(values, found)
    norm, with_addition = (
        (layer_norm.layer_norm, layer_norm.add_layer_norm)
        if found.centered
        else (layer_norm.rms_norm, layer_norm.add_rms_norm)
    )
    call, add = (
        functools.partial(_row_norm, f, affine, groups, epsilon=found.epsilon, strict=found.strict)
        for f in (norm, with_addition)
    )
    raise_for_range(found, norm.__name__)
    before = Before("arrays", with_addition.__name__, add)
    return Candidate(norm.__name__, call, (values.root, *affine.leaves), v, before=before)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Rows with parameters of their own: those of a sample, or of a model in an ensemble.

    Attributes:
      dims: the dims of the root.
      count: the number of the root's axes, from the first one, along which the parameters vary.
        These are labels: parts of the array's axes.
      first: the first array axis of a row.
    """

    dims: Dims
    count: int
    first: int

    def affine(self, values: Values, found: Normalized) -> Affine:
        """The parameters. Their axes are those along which they vary, and those of a row."""
        flat = tuple((part,) for axis in self.dims for part in axis)
        rows = sum(map(len, self.dims[: self.first]))
        axes = (*range(self.count), *range(rows, len(flat)))
        scale, bias = (parameter(values, p, axes, flat) for p in (found.scale, found.bias))
        return Affine(scale, bias, with_offset=True)

    def call(self, norm: Any, affine: Affine, leaves: Any, x: Any, *others: Any) -> Any:
        """Calls a norm under `jax.vmap` over the axes along which the parameters vary."""
        sizes = list(label_sizes(self.dims, x.shape).values())
        lead, row = sizes[: self.count], x.shape[self.first :]
        like: Any = jax.ShapeDtypeStruct(sizes, x.dtype)
        given = affine.arguments(like, leaves)
        numbers = {name: v for name, v in given.items() if isinstance(v, float)}
        arrays = {n: v.reshape(*lead, *row) for n, v in given.items() if n not in numbers}
        shape = list(x.shape)
        if shape[: self.count] != lead:
            shape = [*lead, math.prod(x.shape[: self.first]) // math.prod(lead), *row]
        begin = len(shape) - len(row) - self.count

        def each(xs: Any, given: Any) -> Any:
            return norm(*xs, **given, **numbers, begin_norm_axis=begin)

        for _ in range(self.count):
            each = jax.vmap(each)
        found = each([a.reshape(shape) for a in (x, *others)], arrays)
        return jax.tree.map(lambda y: y.reshape(x.shape), found)


def _groups(values: Values, found: Normalized, first: int) -> _Groups | None:
    """The groups of rows that have parameters of their own. None if each row has its own."""
    dims = values.forms[values.root].dims
    rows = [part.label for axis in dims[:first] for part in axis]
    both = found.scale, found.bias
    leaves = [a for p in both for m in p.terms for a, _ in m]
    varying = frozenset(n for p in both for n in p.axes) - found.over
    if not all(only_leaves(p, found.over | varying) for p in both):
        return None
    if any(p.axes and not p.axes >= found.over for p in both):
        return None  # a group norm with one group
    if not all(a.axes <= found.over or a.axes >= found.over for a in leaves):
        return None  # a gate or a mask of the rows stays outside
    count = len(varying)
    if varying != frozenset(rows[:count]) or (count and count == len(rows)):
        return None
    return _Groups(dims, count, first)


def norm_before_affine(values: Values, v: Var) -> Candidate | None:
    """A norm whose scale and bias the op cannot take: they vary along other axes than a row's.

    The op normalises. The scale and the bias follow in `jax.numpy`.
    """
    new = number_new_axes(values, v)
    if new is None:
        return None
    found = normalized(values, values.forms[v].polynomial)
    first = None if found is None else first_axis(values, found.over)
    if found is None or first is None or unbiased(values, found):
        return None
    dims = values.forms[v].dims
    axes: Any = frozenset(part.label for axis in dims for part in axis)
    if not axes > found.over or not all(only_leaves(p, axes) for p in (found.scale, found.bias)):
        return None
    every = range(len(dims))
    scale, bias = (parameter(values, p, every, dims) for p in (found.scale, found.bias))
    affine = Affine(scale, bias, with_offset=False)
    norm = layer_norm.layer_norm if found.centered else layer_norm.rms_norm
    raise_for_range(found, norm.__name__)
    dtype = values.root.aval.dtype
    if not found.dtype == v.aval.dtype == dtype:
        raise Left(f"its scale and bias are applied in {found.dtype}, and its input is {dtype}")
    call = functools.partial(
        _with_affine,
        functools.partial(norm, begin_norm_axis=first, epsilon=found.epsilon),
        found.strict,
        affine,
        tuple((i, math.prod(part.size for part in dims[i])) for i in new),
    )
    operands = (values.root, *affine.leaves)
    return Candidate(norm.__name__, call, operands, v, "without the scale and the bias")


def _with_affine(norm: Any, strict: bool, affine: Affine, new: Any, x: Any, *leaves: Any) -> Any:
    """Calls a norm, repeats its result along new axes, and applies the scale and the bias."""
    with strict_infinities(strict):
        y = norm(x)
    for axis, size in new:
        y = jnp.repeat(jnp.expand_dims(y, axis), size, axis)
    given = affine.arguments(y, leaves)
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return wide * given.get("scale", 1) + given.get("bias", 0)


def _raise_for_layout(values: Values, v: Var) -> None:
    """Raises `Left` if a value is a norm in another dtype, or with axes in another order."""
    old, new = values.root.aval.dtype, v.aval.dtype
    form, dims = values.forms[v], values.forms[values.root].dims
    if sorted(form.dims, key=str) != sorted(dims, key=str) or v not in values.program.users:
        return
    found = normalized(values, form.polynomial)
    if found is None:
        return
    raise_for_range(found, "layer_norm" if found.centered else "rms_norm")
    if form.dims != dims:
        raise Left("its result is transposed, and the statistics are not of the transposed array")
    raise Left(f"its result is used in {new.name}, and its input is {old.name}")


def _row_norm(
    norm: Any, affine: Affine, groups: _Groups, *arrays: Any, strict: bool, **options: Any
) -> Any:
    """Calls a norm of one array, or of the sum of two. The second one may have a bias."""
    split = len(arrays) - len(affine.leaves)
    if split == 3:
        options["residual_bias"] = arrays[2].reshape(-1)
    norm = functools.partial(norm, **options)
    with strict_infinities(strict):
        return groups.call(norm, affine, arrays[split:], *arrays[: min(split, 2)])
