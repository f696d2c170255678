"""Softmax cross-entropy with integer labels."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns.candidate import Candidate, Left
from jax_gradops._fuse.polynomial import Function, Leaf, Mean, Pick, Polynomial, Root
from jax_gradops._fuse.search import Values
from jax_gradops._ops.cross_entropy.cross_entropy import (
    softmax_cross_entropy_with_integer_labels as cross_entropy,
)


class _Loss(NamedTuple):
    sign: float  # -1 for a log-likelihood
    labels: Leaf
    axis: int  # of the root's axes
    fill: str


def loss(values: Values, v: Var) -> Candidate | None:
    """Cross-entropy, or its negative, of the rows of the root."""
    form = values.forms[v]
    found = _loss(values, form.polynomial)
    if found is None:
        return None
    rows = [p.label for axis in form.dims for p in axis]
    root = [[p.label for p in axis] for axis in values.forms[values.root].dims]
    axis = next((i for i, labels in enumerate(root) if labels == [found.axis]), None)
    kept = [n for labels in root if labels != [found.axis] for n in labels]
    labels = [n for along in found.labels.labels for n in along]
    if axis is None or rows != kept:
        return None
    if labels != kept:
        raise Left("the labels have other axes than the loss")
    call = functools.partial(
        _cross_entropy, axis=axis, sign=found.sign, fill=found.fill, dtype=v.aval.dtype.name
    )
    return Candidate(
        "softmax_cross_entropy_with_integer_labels", call, (values.root, found.labels.var), v
    )


def _loss(values: Values, p: Polynomial) -> _Loss | None:
    atoms = [atom for monomial in p.terms for atom, _ in monomial]
    logs = {a for a in atoms if isinstance(a, Function) and a.name == "log"}
    picks = {a for a in atoms if isinstance(a, Pick) and a.of}
    if len(logs) != 1 or len(picks) != 1:
        return None
    (log,), (picked,) = logs, picks
    shift = _shift(values, polynomial.from_key(log.of), picked.over)
    root = frozenset([(Root(frozenset(range(len(values.sizes)))), 1.0)])
    if shift is None or picked.of != root:
        return None
    normalizer = polynomial.of_atom(log) + shift
    found = polynomial.of_atom(picked)
    expected = normalizer + found.scaled(-1)
    if picked.fill == "zero":
        valid = polynomial.pick(polynomial.constant(1.0), picked.index, picked.over, "zero")
        if p.close_to(expected) or p.close_to(expected.scaled(-1)):
            raise Left("labels that are no class give a loss of their own")
        expected = normalizer * valid + found.scaled(-1)
    for sign in (1.0, -1.0):
        if p.close_to(expected.scaled(sign)):
            return _Loss(sign, picked.index, picked.over, picked.fill)
    return None


def _shift(values: Values, p: Polynomial, over: int) -> Polynomial | None:
    """The array that was subtracted before the exponential in sum(exp(root - shift))."""
    if p.single is None or len(p.single[0]) != 1:
        return None
    ((mean, exponent),) = p.single[0]
    if not isinstance(mean, Mean) or exponent != 1 or mean.over != {over} or len(mean.of) != 1:
        return None
    ((exp, power),) = mean.of
    if not polynomial.close(p.single[1], values.sizes[over]) or power != 1:
        return None
    if not isinstance(exp, Function) or exp.name != "exp":
        return None
    root = polynomial.of_atom(Root(frozenset(range(len(values.sizes)))))
    shift = root + polynomial.from_key(exp.of).scaled(-1)
    return None if over in shift.axes else shift


def _cross_entropy(
    x: jax.Array, index: jax.Array, *, axis: int, sign: float, fill: str, dtype: str
) -> jax.Array:
    """The loss, with what the replaced code does with labels that are no class."""
    classes = x.shape[axis]
    rows = x.shape[:axis] + x.shape[axis + 1 :]
    index = index.reshape(rows)
    inside = (index >= 0) & (index < classes)
    if fill == "nan":
        labels = jnp.where(index < 0, jnp.asarray(classes, index.dtype), index)
    elif fill == "nearest":
        labels = jnp.clip(index, 0, classes - 1)
    else:
        labels = jnp.where(inside, index, jnp.zeros((), index.dtype))
    y = cross_entropy(x, labels, axis)
    if fill == "zero":
        y = jnp.where(inside, y, jnp.zeros((), y.dtype))
    return (y if sign > 0 else -y).astype(dtype)
