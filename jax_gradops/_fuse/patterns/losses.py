"""Softmax cross-entropy with integer labels."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns.candidate import Candidate, Left, Parameter, parameter
from jax_gradops._fuse.polynomial import Axes, Function, Leaf, Mean, Monomial, Pick, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import resolve_implementation
from jax_gradops._kernel.array_types import reshard_like
from jax_gradops._ops.cross_entropy.cross_entropy import sums_of
from jax_gradops._ops.cross_entropy.loss import Options, loss_of, nan_if, nan_if_infinite

# What may be between a maximum and its subtraction. The last operand is the maximum.
_MOVES = {"max", "stop_gradient", "broadcast_in_dim", "reshape", "expand_dims"}
_OP = "softmax_cross_entropy_with_integer_labels"


class _Loss(NamedTuple):
    """sign * (lse - (1 - smoothing) * root[label] - smoothing * mean(root) + z_loss * lse²).

    The lse is the logarithm of the sum of exp(root) along `axis`, an axis of the root. If
    `whole_term`, the code has (1 - smoothing) * (lse - root)[label]: for a label that is no class,
    this part of the lse has no gradient, too.
    """

    sign: float  # -1 for a log-likelihood
    labels: Leaf
    axis: int
    fill: str
    smoothing: float
    z_loss: float
    whole_term: bool = False


def loss(values: Values, v: Var) -> Candidate | None:
    """Cross-entropy, or its negative, of the rows of the root."""
    form = values.forms[v]
    weights, rest = _weights(values, v)
    found = _loss(values, rest)
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
    rows_of_root = [i for i in range(len(root)) if i != axis]
    weight = parameter(values, polynomial.of_monomial(weights), rows_of_root)
    earlier = (f.polynomial for u, f in values.forms.items() if u is not v)
    if weights and any(_loss(values, p) for p in earlier):
        return None  # the product is not a part of the loss
    shift = _shift(values)
    if not shift & {"max", "finite"}:
        raise Left(OVERFLOW)
    given = {"label_smoothing": found.smoothing, "z_loss": found.z_loss}
    given = {name: number for name, number in given.items() if number}
    call = functools.partial(
        _cross_entropy,
        weight,
        axis=axis,
        sign=found.sign,
        fill=found.fill,
        whole_term=found.whole_term,
        finite="finite" in shift,
        dtype=v.aval.dtype.name,
        **given,
    )
    options = ", ".join(f"{name}={number:.7g}" for name, number in given.items())
    operands = (values.root, found.labels.var, *weight.leaves)
    unit = float(jnp.finfo(v.aval.dtype).eps)  # the op's result is rounded to this dtype
    return Candidate(_OP, call, operands, v, options, rounding=unit)


def _loss(values: Values, p: Polynomial) -> _Loss | None:
    atoms = [atom for monomial in p.terms for atom, _ in monomial]
    logs = {a for a in atoms if isinstance(a, Function) and a.name == "log"}
    picks = {a for a in atoms if isinstance(a, Pick) and a.of}
    if len(logs) != 1:
        return None
    (log,) = logs
    if not picks:
        _raise_for_probabilities(values, p, log)
    if len(picks) != 1:
        return None
    (picked,) = picks
    if picked.of != polynomial.monomial_of(values.root_atom):
        return None
    if not _is_lse(values, log, frozenset([picked.over])):
        return None
    found = _coefficients(p, log, picked)
    if found is None:
        return None
    if p.close_to(_formula(values, log, picked, found)):
        return found
    valid = polynomial.pick(polynomial.constant(1.0), picked.index, picked.over, picked.fill)
    if p.close_to(_formula(values, log, picked, found, valid)):
        return found._replace(whole_term=True)
    return None


OVERFLOW = (
    "exp(x) overflows where the op does not, because the largest x is not subtracted. Use "
    "jax.nn.logsumexp"
)
OTHER_FORMULA = "the result is not log(sum(exp(x))) - x[label], with label smoothing and z-loss"
SHARED = "the log-probabilities, or log(sum(exp(x))), are used elsewhere, too"
PROBABILITIES = "the labels are probabilities of all classes, not class numbers"


def why_left(values: Values, shows: Var) -> str:
    """Why a logarithm and a label's element are no loss. Empty if there is no such element."""
    after = {shows}
    for v, form in values.forms.items():
        equation = values.program.equation_of(v)
        if equation is None or not after & {u for u in equation.invars if isinstance(u, Var)}:
            continue
        after.add(v)
        atoms = [a for monomial in form.polynomial.terms for a, _ in monomial]
        logs = {a for a in atoms if isinstance(a, Function) and a.name == "log"}
        picks = {a for a in atoms if isinstance(a, Pick) and a.of}
        if logs and picks:
            return OTHER_FORMULA
    return ""


def _weights(values: Values, v: Var) -> tuple[Monomial, Polynomial]:
    """The arrays that are factors of each term of a value, and the polynomial without them."""
    p = values.forms[v].polynomial
    of_all = [{(a, e) for a, e in m if isinstance(a, Leaf) and e == 1} for m in p.terms]
    weights: Monomial = frozenset(set.intersection(*of_all) if of_all else ())
    rest = p.divided(weights) if weights else p
    return (weights, rest) if rest is not None else (frozenset(), p)


def _is_lse(values: Values, log: Function, over: Axes) -> bool:
    """Whether a logarithm is of the sum of exp(root)."""
    exps = polynomial.function("exp", polynomial.of_atom(values.root_atom))
    size = math.prod(values.sizes[i] for i in over)
    return polynomial.from_key(log.of).close_to(polynomial.mean(exps, over).scaled(size))


def _shift(values: Values) -> set[str]:
    """The names of the functions of the root in what is subtracted before the exponentials."""
    names: set[str] = set()
    for v in values.forms:
        equation = values.program.equation_of(v)
        if equation is not None and equation.primitive.name == "exp":
            of = [form for u, form in values.forms.items() if u is equation.invars[0]]
            atoms = {a for form in of for a in polynomial.atoms_of(form.polynomial.terms.items())}
            names |= {a.name for a in atoms if isinstance(a, Function)}
    before = values.program.equation_of(values.root)
    if before is None or before.primitive.name != "sub":
        return names
    # The root itself may be x - max(x).
    array, subtracted = before.invars
    while (equation := values.program.equation_of(subtracted)) is not None:
        if equation.primitive.name == "reduce_max" and equation.invars[0] is array:
            return names | {"max"}
        if equation.primitive.name not in _MOVES:
            break
        subtracted = equation.invars[-1]
    return names


def _coefficients(p: Polynomial, log: Function, picked: Pick) -> _Loss | None:
    of_label = p.terms.get(polynomial.monomial_of(picked), 0.0)
    sign = -1.0 if of_label > 0 else 1.0
    smoothing = 1 - abs(of_label)
    smoothing = 0.0 if abs(smoothing) < 1e-5 else smoothing
    z_loss = sign * p.terms.get(polynomial.monomial_of(log, 2.0), 0.0)
    if not 0 <= smoothing < 1 or z_loss < 0:
        return None
    return _Loss(sign, picked.index, picked.over, picked.fill, smoothing, z_loss)


def _formula(
    values: Values, log: Function, picked: Pick, found: _Loss, valid: Polynomial | None = None
) -> Polynomial:
    """The formula of `_Loss`. With `valid`, the terms of the label are 0 for some labels."""
    root, lse = polynomial.of_atom(values.root_atom), polynomial.of_atom(log)
    of_label = (lse if valid is None else lse * valid) + polynomial.of_atom(picked).scaled(-1)
    of_all = lse + polynomial.mean(root, frozenset([picked.over])).scaled(-1)
    smoothed = of_label.scaled(1 - found.smoothing) + of_all.scaled(found.smoothing)
    return (smoothed + (lse * lse).scaled(found.z_loss)).scaled(found.sign)


def _raise_for_probabilities(values: Values, p: Polynomial, log: Function) -> None:
    """Raises `Left` if p has lse * mean(labels) and mean(root * labels), for an array of labels."""
    means = [a for monomial in p.terms for a, _ in monomial if isinstance(a, Mean)]
    for mean in means:
        labels = [a for a, _ in mean.of if isinstance(a, Leaf)]
        if len(labels) != 1 or not mean.over <= labels[0].axes:
            continue
        of_labels = polynomial.mean(polynomial.of_atom(labels[0]), mean.over)
        both = (polynomial.of_atom(log) * of_labels).terms.keys() <= p.terms.keys()
        if both and (values.root_atom, 1.0) in mean.of and _is_lse(values, log, mean.over):
            if _is_comparison(values, labels[0].var):
                raise Left("the labels are not compared with 0, 1, 2, and so on")
            raise Left(PROBABILITIES)


def _is_comparison(values: Values, v: Var) -> bool:
    equation = values.program.equation_of(v)
    if equation is not None and equation.primitive.name == "convert_element_type":
        equation = values.program.equation_of(equation.invars[0])
    return equation is not None and equation.primitive.name == "eq"


def _cross_entropy(
    weight: Parameter,
    x: jax.Array,
    index: jax.Array,
    *weights: jax.Array,
    axis: int,
    sign: float,
    fill: str,
    whole_term: bool,
    finite: bool,
    dtype: str,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """The loss times a weight, with what the replaced code does with labels that are no class.

    `finite`: before the exponentials, the code subtracts the largest logit only if it is finite, as
    `jax.nn.logsumexp` does. `jax.nn.log_softmax` subtracts an infinity, too: the row is NaN.
    """
    chosen = resolve_implementation(None, _OP) if axis == x.ndim - 1 else "xla"
    logits = jnp.moveaxis(x, axis, -1)
    *rows, classes = logits.shape
    index = index.reshape(rows)
    if index.dtype.itemsize < 4:  # there may be more classes than numbers of the dtype
        index = index.astype(jnp.int32)
    labels = jnp.clip(index, 0, classes - 1).astype(jnp.int32)
    options = Options(label_smoothing, z_loss, None, None, chosen)
    row, labels, _ = sums_of(logits, labels, options)
    if finite:
        row = row._replace(largest=jnp.where(jnp.isinf(row.largest), 0, row.largest))
    else:
        row = nan_if_infinite(row)
    inside = reshard_like((index >= 0) & (index < classes), labels)

    def picked(value: jax.Array) -> jax.Array:
        """What the code has instead of the label's value, if the label is no class."""
        if fill == "nearest":
            return value
        constant = lax.stop_gradient(value)
        others = {"nan": constant + nan_if(~inside, value.dtype), "zero": 0 * constant}
        return jnp.where(inside, value, others.get(fill, constant))

    log_total = jnp.log(row.total)
    if whole_term:
        term = picked(log_total + (row.largest - row.logit_of_label))
    else:
        term = log_total + (row.largest - picked(row.logit_of_label))
    y = reshard_like(loss_of(row, term, classes, options), index)
    if weights:
        y = y * weight.array(dict(zip(weight.leaves, weights, strict=True)), x)
    return (y if sign > 0 else -y).astype(dtype)
