"""The loss of a row: its options, its label, and its formula."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import reshard_like
from jax_gradops._kernel.primitive import Operands, Operation
from jax_gradops._ops.cross_entropy.kernels import IGNORED, RowSums

_NO_CLASS = -1


class Options(NamedTuple):
    """What loss is computed. Each is a static argument."""

    label_smoothing: float
    z_loss: float
    ignore_index: int | None
    axis_name: tuple[Any, ...] | None
    implementation: Implementation


def checked_options(
    op: str,
    labels: jax.Array,
    label_smoothing: Any,
    z_loss: Any,
    ignore_index: Any,
    implementation: Implementation,
    axis_name: Any = None,
) -> Options:
    smoothing = _checks.number(op, "label_smoothing", label_smoothing, minimum=0)
    if smoothing > 1:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {smoothing}")
    if ignore_index is not None:
        try:
            ignore_index = operator.index(ignore_index)
        except TypeError as error:
            raise _checks.wrong(
                op, "ignore_index", "an integer or None", ignore_index, TypeError
            ) from error
        limits = jnp.iinfo(labels.dtype)
        if not limits.min <= ignore_index <= limits.max:
            raise ValueError(
                f"{op}: ignore_index must be a value of labels' dtype {labels.dtype}, from "
                f"{limits.min} to {limits.max}, got {ignore_index}"
            )
    z_loss = _checks.number(op, "z_loss", z_loss, minimum=0)
    names = _checks.axis_names(op, axis_name, "with sharded classes, none is needed")
    chosen = resolve_implementation(implementation, op)
    return Options(smoothing, z_loss, ignore_index, names, chosen)


def checked_labels(
    op: str, labels: ArrayLike, logits: jax.Array, axes: tuple[int, ...], name: str = "logits"
) -> jax.Array:
    shape = tuple(n for i, n in enumerate(logits.shape) if i not in axes)
    axis = axes[0] if len(axes) == 1 else axes
    expected = f"the shape of {name} {logits.shape} without axis {axis}: {shape}"
    if len(axes) == 1 and _checks.is_array(labels) and jnp.ndim(labels) == logits.ndim:
        raise ValueError(
            f"{op}: labels are class numbers. They must have {expected}, got "
            f"{jnp.shape(labels)}. For one-hot labels pass jnp.argmax(labels, {axis})"
        )
    checked = _checks.array(op, "labels", labels, _checks.INTEGER_DTYPES)
    if checked.shape != shape:
        raise ValueError(f"{op}: labels must have {expected}, got {checked.shape}")
    return checked


def class_labels(labels: jax.Array, classes: int, ignore_index: int | None) -> jax.Array:
    """Labels as the kernels read them: int32.

    An ignored row has the label `IGNORED`. A row of a label that is no class has the label -1.
    """
    limits = jnp.iinfo(labels.dtype)
    is_class = (labels >= 0) & (labels <= min(classes - 1, limits.max))
    found = jnp.where(is_class, labels, jnp.zeros_like(labels)).astype(jnp.int32)
    found = jnp.where(is_class, found, _NO_CLASS)
    if ignore_index is not None:
        found = jnp.where(labels == np.array(ignore_index, labels.dtype), IGNORED, found)
    return found


def loss_of(sums: RowSums, term: jax.Array, classes: Any, options: Options) -> jax.Array:
    """The loss of each row. `term` is the negative logarithm of the label's probability."""
    log_total, smoothing = jnp.log(sums.total), options.label_smoothing
    loss = (1 - smoothing) * term
    if sums.sum_of_differences is not None:
        loss = loss + smoothing * (log_total - sums.sum_of_differences / classes)
    if options.z_loss:
        loss = loss + options.z_loss * jnp.square(sums.largest + log_total)
    return loss


def loss_of_rows(sums: RowSums, labels: jax.Array, classes: Any, options: Options) -> jax.Array:
    """The loss of each row. All terms are differences to the row's largest logit.

    A label that is no class counts as a class of logit 0. See `poisoned`. A logit of +inf makes
    its row NaN.
    """
    sums = nan_if_infinite(sums)
    term = jnp.log(sums.total) + (sums.largest - sums.logit_of_label)
    return jnp.where(labels == IGNORED, 0, loss_of(sums, term, classes, options))


# --- Labels that are no class --------------------------------------------------------------------


def nan_if(condition: jax.Array, dtype: Any) -> jax.Array:
    """NaN or 0."""
    # The root of -1 makes the NaN. A NaN constant would always stop jax_debug_nans.
    return jnp.sqrt(jnp.where(condition, -1, 0).astype(dtype))


def nan_if_infinite(sums: RowSums) -> RowSums:
    """The sums, with a total of NaN if a logit is +inf. Its derivative is NaN, too."""
    return sums._replace(total=sums.total * (1 + nan_if(sums.total == jnp.inf, sums.total.dtype)))


@dataclasses.dataclass(frozen=True)
class Poison(Operation):
    """Makes the values of rows NaN if their label is no class. A value of 0 stays 0.

    The operands are the values and the labels of `class_labels`. The operation counts as linear in
    the values. So tangents and cotangents become NaN in the same way: a row whose cotangent is 0
    adds 0 to the gradient.
    """

    linear = (0,)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        values, labels = operands
        return (values + nan_if((labels == _NO_CLASS) & (values != 0), values.dtype),)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        return self(*operands), self(tangents[0], operands[1])

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        return *self(cotangents[0], operands[1]), None


def poisoned(loss: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each row, or NaN if its label is no class."""
    labels = reshard_like(labels, loss)
    return Poison()(loss, labels)[0] + nan_if(labels == _NO_CLASS, loss.dtype)
