"""Softmax cross-entropy with integer labels."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns.candidate import Candidate, Left
from jax_gradops._fuse.polynomial import Atom, Function, Leaf, Mean, Pick, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._ops.cross_entropy.cross_entropy import (
    softmax_cross_entropy_with_integer_labels as cross_entropy,
)


class _Loss(NamedTuple):
    sign: float  # -1 for a log-likelihood
    labels: Leaf
    axis: int  # of the root's axes
    fill: str
    smoothing: float
    z_loss: float


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
    given = {"label_smoothing": found.smoothing, "z_loss": found.z_loss}
    given = {name: number for name, number in given.items() if number}
    call = functools.partial(
        _cross_entropy,
        axis=axis,
        sign=found.sign,
        fill=found.fill,
        dtype=v.aval.dtype.name,
        **given,
    )
    options = ", ".join(f"{name}={number:.7g}" for name, number in given.items())
    operands = (values.root, found.labels.var)
    return Candidate("softmax_cross_entropy_with_integer_labels", call, operands, v, options)


def _loss(values: Values, p: Polynomial) -> _Loss | None:
    atoms = [atom for monomial in p.terms for atom, _ in monomial]
    logs = {a for a in atoms if isinstance(a, Function) and a.name == "log"}
    picks = {a for a in atoms if isinstance(a, Pick) and a.of}
    if len(logs) == 1 and not picks:
        _raise_for_probabilities(values, atoms)
    if len(logs) != 1 or len(picks) != 1:
        return None
    (log,), (picked,) = logs, picks
    root, over = polynomial.of_atom(values.root_atom), frozenset([picked.over])
    sum_of_exps = polynomial.mean(polynomial.function("exp", root), over)
    sum_of_exps = sum_of_exps.scaled(values.sizes[picked.over])
    coefficient = p.terms.get(frozenset([(picked, 1.0)]))
    if not polynomial.from_key(log.of).close_to(sum_of_exps) or not coefficient:
        return None
    if picked.of != frozenset([(values.root_atom, 1.0)]):
        return None
    sign = -1.0 if coefficient > 0 else 1.0
    z_loss = sign * p.terms.get(frozenset([(log, 2.0)]), 0.0)
    smoothing = 1 - abs(coefficient)
    smoothing = smoothing if smoothing > 1e-6 else 0.0
    lse = polynomial.of_atom(log)
    of_label = lse + polynomial.of_atom(picked).scaled(-1)
    of_all = lse + polynomial.mean(root, over).scaled(-1)
    others = of_all.scaled(smoothing) + (lse * lse).scaled(z_loss)
    p, expected = p.scaled(sign), of_label.scaled(1 - smoothing) + others
    found = _Loss(sign, picked.index, picked.over, picked.fill, smoothing, z_loss)
    if picked.fill != "zero":
        return found if p.close_to(expected) and z_loss >= 0 else None
    valid = polynomial.pick(polynomial.constant(1.0), picked.index, picked.over, "zero")
    of_label = lse * valid + polynomial.of_atom(picked).scaled(-1)
    if p.close_to(of_label):
        return found
    if p.close_to(expected) or p.close_to(of_label.scaled(1 - smoothing) + others):
        raise Left("labels that are no class give a loss of their own")
    return None


def _raise_for_probabilities(values: Values, atoms: list[Atom]) -> None:
    """Raises `Left` for a sum over classes of the root times another array."""
    for atom in atoms:
        factors = {a for a, _ in atom.of} if isinstance(atom, Mean) else set()
        others = [a for a in factors if isinstance(a, Leaf) and isinstance(atom, Mean)]
        if values.root_atom in factors and any(a.axes & atom.over for a in others):
            raise Left("the labels are numbers for all classes, not integers")


def _cross_entropy(
    x: jax.Array,
    index: jax.Array,
    *,
    axis: int,
    sign: float,
    fill: str,
    dtype: str,
    **options: Any,
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
    y = cross_entropy(x, labels, axis, **options)
    if fill == "zero":
        y = jnp.where(inside, y, jnp.zeros((), y.dtype))
    return (y if sign > 0 else -y).astype(dtype)
