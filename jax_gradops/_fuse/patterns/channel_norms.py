"""Batch norm, group norm and instance norm, with the activation after them."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns import norms
from jax_gradops._fuse.patterns.candidate import (
    Affine,
    Candidate,
    Left,
    only_leaves,
    parameter,
    same_layout,
)
from jax_gradops._fuse.polynomial import Axes, Function, Leaf, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import strict_infinities
from jax_gradops._ops.batch_norm.batch_norm import batch_norm
from jax_gradops._ops.batch_norm.group_norm import group_norm


class _Layout(NamedTuple):
    op: str
    axis: int  # of the channels
    groups: int  # the label of the groups; -1 for one group, or for batch norm


def channel_norm(values: Values, v: Var) -> Candidate | None:
    """Batch norm, group norm or instance norm of the root."""
    if not same_layout(values, v):
        return None
    p, activation = _before_activation(values.forms[v].polynomial)
    p, residual = _without_residual(values, p)
    found = norms.normalized(values, p)
    if found is None or not found.centered:
        return None
    layout = _layout(values, found.over, found.scale.axes | found.bias.axes)
    over_rows = norms.first_axis(values, found.over) is not None
    if layout is None and not over_rows:
        raise Left(norms.NOT_LAST)
    if layout is None or (residual is not None and layout.op != "batch_norm"):
        return None
    if activation == "silu" and layout.op == "batch_norm":
        return None
    if norms.unbiased(values, found):
        raise Left("the variance is divided by n - 1")
    channels = frozenset(
        q.label for q in values.forms[values.root].dims[layout.axis] if isinstance(q.label, int)
    )
    if not only_leaves(found.scale, channels) or not only_leaves(found.bias, channels):
        if not over_rows:
            raise Left("its scale and bias vary along other axes than the channels'")
        return None
    norms.raise_for_range(found, layout.op)
    affine = Affine(
        parameter(values, found.scale, [layout.axis]),
        parameter(values, found.bias, [layout.axis]),
        with_offset=False,
    )
    options = {"axis": layout.axis, "epsilon": found.epsilon, "activation": activation}
    options["strict"] = found.strict
    operands = (values.root, *affine.leaves)
    if layout.op == "batch_norm":
        operands += () if residual is None else (residual,)
        call = functools.partial(_batch_norm, affine, residual is not None, **options)
        return Candidate(
            "batch_norm", call, operands, v, activation or "", _statistics(values, found.over)
        )
    inner = math.prod(
        q.size for q in values.forms[values.root].dims[layout.axis] if q.label in found.over
    )
    call = functools.partial(_group_norm, affine, inner, **options)
    return Candidate("group_norm", call, operands, v, activation or "")


def _before_activation(p: Polynomial) -> tuple[Polynomial, str | None]:
    """What relu or silu was applied to, and which."""
    atoms = {a for m in p.terms for a, _ in m if isinstance(a, Function)}
    if p.single is not None and len(atoms) == 1:
        (atom,) = atoms
        if atom.name == "relu" and p.close_to(polynomial.of_atom(atom)):
            return polynomial.from_key(atom.of), "relu"
    for atom in atoms:
        if atom.name == "tanh":  # silu is y / 2 + y / 2 tanh(y / 2)
            half = polynomial.from_key(atom.of)
            for sign in (1.0, -1.0):
                y = half.scaled(sign)
                if p.close_to(y + y * polynomial.of_atom(atom).scaled(sign)):
                    return y.scaled(2.0), "silu"
    return p, None


def _without_residual(values: Values, p: Polynomial) -> tuple[Polynomial, Var | None]:
    """Takes an array of the root's type out of a sum."""
    dims = values.forms[values.root].dims
    labels = tuple(tuple(q.label for q in axis) for axis in dims)
    for monomial, c in p.terms.items():
        if len(monomial) == 1 and polynomial.close(c, 1):
            ((atom, exponent),) = monomial
            if isinstance(atom, Leaf) and exponent == 1 and atom.labels == labels:
                if atom.var.aval.dtype == values.root.aval.dtype:
                    return p.without([monomial]), atom.var
    return p, None


def _layout(values: Values, over: Axes, parameters: Axes) -> _Layout | None:
    """Which norm has statistics over these axes, and parameters along those."""
    dims = values.forms[values.root].dims
    kept = [(i, q) for i, axis in enumerate(dims) for q in axis if q.label not in over]
    axes = {i for i, _ in kept}
    if len(axes) == 1 and len(dims) > 1:
        (axis,) = axes
        if len(kept) == len(dims[axis]) and axis > 0:
            return _Layout("batch_norm", axis, -1)
    if not dims or (dims[0] and [i for i, _ in kept].count(0) != len(dims[0])):
        return None
    of_channels = [(i, q) for i, q in kept if i > 0]
    if not of_channels:  # one group
        along = [i for i, axis in enumerate(dims) if {q.label for q in axis} & parameters]
        return _Layout("group_norm", along[0], -1) if len(along) == 1 and along[0] > 0 else None
    if len(of_channels) == 1:
        axis, group = of_channels[0]
        first = dims[axis][0].label == group.label
        return _Layout("group_norm", axis, group.label) if first else None  # pyright: ignore
    return None


def _statistics(values: Values, over: Axes) -> tuple[Polynomial, ...]:
    """The mean, the variance and the mean square of the root."""
    root = polynomial.of_atom(values.root_atom)
    mean, square = polynomial.mean(root, over), polynomial.mean(root * root, over)
    return mean, square + (mean * mean).scaled(-1), square


def _batch_norm(
    affine: Affine, has_residual: bool, x: Any, *arrays: Any, strict: bool, **options: Any
) -> Any:
    """The output, mean, variance and mean square. The statistics have derivatives here."""
    if has_residual:
        options["residual"], arrays = arrays[-1], arrays[:-1]
    with strict_infinities(strict):
        y, mean, variance = batch_norm(x, **affine.arguments(x, arrays), **options)
    mean, variance = with_derivatives(options["axis"], x, mean, variance)
    return y, mean, variance, variance + mean * mean


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_derivatives(axis: int, x: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
    """Batch statistics that depend on x. `batch_norm` returns them without a derivative."""
    return mean, variance


@with_derivatives.defjvp
def _derivatives(axis: int, primals: Any, tangents: Any) -> Any:
    x, mean, variance = primals
    others = tuple(i for i in range(x.ndim) if i != axis)
    mean, variance = with_derivatives(axis, x, mean, variance)  # for second derivatives
    x, dx = (a.astype(mean.dtype) for a in (x, tangents[0]))
    centered = x - jnp.expand_dims(mean, others)
    along = (jnp.mean(dx, others), 2 * jnp.mean(centered * dx, others))
    return (mean, variance), along


def _group_norm(
    affine: Affine, inner: int, x: Any, *arrays: Any, strict: bool, **options: Any
) -> Any:
    groups = x.shape[options["axis"]] // inner
    with strict_infinities(strict):
        return group_norm(x, **affine.arguments(x, arrays), num_groups=groups, **options)
