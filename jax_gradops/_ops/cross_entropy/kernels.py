"""The kernels of softmax cross-entropy, and their differentiation.

A kernel reduces each row of logits to a few numbers (`RowSums`). The loss is a formula of these
numbers. JAX differentiates this formula. The derivative by the logits is a kernel, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import Arrays, accum_dtype
from jax_gradops._kernel.invoke import invoke
from jax_gradops._kernel.primitive import Operands, Operation
from jax_gradops._kernel.shards import Shards
from jax_gradops._kernel.spec import Kernel, Named, Result, Stages, along_features

#: The label of an ignored row (kIgnoredLabel in ffi/ops/cross_entropy.h).
IGNORED = np.iinfo(np.int32).min

# --- References: the meaning of the kernels in jax.numpy -----------------------------------------


def _base(largest: jax.Array) -> jax.Array:
    """What is subtracted from logits. It is no infinity: the difference of infinities is NaN."""
    return jnp.where(jnp.isinf(largest), 0, largest)


def _is_label(labels: jax.Array, classes: jax.Array) -> jax.Array:
    return labels[..., None] == along_features(classes, labels[..., None])


def _fwd_reference(x: jax.Array, labels: jax.Array, classes: jax.Array) -> Arrays:
    ignored = labels == IGNORED
    wide = jnp.where(ignored[..., None], 0, x.astype(accum_dtype(x.dtype)))
    # A loss does not change if all logits and `largest` do. So its derivative needs no derivative
    # of `largest`.
    largest = lax.stop_gradient(jnp.max(wide, -1, initial=-jnp.inf))
    differences = wide - _base(largest)[..., None]
    total = jnp.sum(jnp.exp(differences), -1)
    logit = jnp.sum(jnp.where(_is_label(labels, classes), wide, 0), -1)
    return largest, jnp.where(ignored, 1, total), logit, jnp.sum(differences, -1)


def _bwd_reference(
    x: jax.Array,
    labels: jax.Array,
    classes: jax.Array,
    largest: jax.Array,
    factor: jax.Array,
    target: jax.Array,
    uniform: jax.Array | None,
) -> Arrays:
    wide = x.astype(accum_dtype(x.dtype))
    dx = factor[..., None] * jnp.exp(wide - largest[..., None])
    if uniform is not None:
        dx = dx + uniform[..., None]
    dx = dx + jnp.where(_is_label(labels, classes), target[..., None], 0)
    return (jnp.where((labels == IGNORED)[..., None], 0, dx).astype(x.dtype),)


def _combine(partial: Named, shards: Shards) -> tuple[Named, Named]:
    """Combines the numbers of shards that have some of the classes each."""
    (largest,) = shards.largest("n", [partial["largest"]])
    own = _base(partial["largest"]) - _base(largest)
    parts = {"total": partial["total"] * jnp.exp(partial["largest"] - _base(largest))}
    if "sum_of_differences" in partial:
        parts["sum_of_differences"] = partial["sum_of_differences"] + own * shards.lengths["d"]
    totals = shards.total("n", list(parts.values()))
    # This sum is of all shards, too, where other kernels' sums stay each shard's own.
    combined = {"largest": largest, "logit_of_label": partial["logit_of_label"]}
    return combined | dict(zip(parts, totals, strict=True)), {}


# --- Kernels -------------------------------------------------------------------------------------

# `classes` are the numbers of the classes. If they are sharded, each shard sees its own.
FWD = Kernel(
    name="softmax_cross_entropy_fwd",
    operands={"x": "nd", "labels": "n", "classes": "d"},
    results={
        "largest": Result("n", sum=False),
        "total": Result("n", sum=False),
        "logit_of_label": Result("n"),
        "sum_of_differences": Result("n", sum=False),
    },
    reference=_fwd_reference,
    stages=Stages("d", (), _combine),
)
BWD = Kernel(
    name="softmax_cross_entropy_bwd",
    operands={
        "x": "nd", "labels": "n", "classes": "d",
        "largest": "n", "factor": "n", "target": "n", "uniform": "n",
    },
    results={"dx": Result("nd", "x")},
    reference=_bwd_reference,
    in_place={"dx": "x"},
)  # fmt: skip


# --- Differentiation -----------------------------------------------------------------------------


class RowSums(NamedTuple):
    """The numbers of each row of logits x.

    Attributes:
      largest: the largest logit m. It counts as a constant. A loss does not change with m. So its
        derivative is right.
      total: the sum of exp(x - m), or of exp(x) if m is infinite.
      logit_of_label: the logit of the row's label. 0 if no class is the label.
      sum_of_differences: the sum of x - m, or of x if m is infinite. None if not wanted.
    """

    largest: jax.Array
    total: jax.Array
    logit_of_label: jax.Array
    sum_of_differences: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Sums(Operation):
    """`RowSums` of logits, labels and classes.

    Attributes:
      differences: whether the sum of differences is wanted.
      names: names of mapped axes over which the classes are sharded.
    """

    differences: bool
    names: tuple[Any, ...] | None
    implementation: Implementation

    @property
    def axis_names(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.names or ()

    def common(self, mapped: Any) -> tuple[int, ...]:
        del mapped
        return (0, 1, 2, 3)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        skip = [] if self.differences else ["sum_of_differences"]
        axis_names = {"d": self.names} if self.names else None
        return invoke(
            FWD, *operands, skip=skip, axis_names=axis_names, implementation=self.implementation
        )

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        results = self(*operands)
        changes = _Tangents(self.differences, self.implementation)(
            *operands, _base(results[0]), tangents[0]
        )
        if self.names:
            changes = [None if c is None else lax.psum(c, self.names) for c in changes]
        return results, changes


@dataclasses.dataclass(frozen=True)
class _Tangents(Operation):
    """The tangents of `RowSums` of one shard. The transpose is the backward pass.

    The operands are the logits, the labels, the classes, what is subtracted from the logits, and
    the logits' tangent.
    """

    differences: bool
    implementation: Implementation
    linear = (4,)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        x, labels, classes, largest, dx = operands
        ignored = (labels == IGNORED)[..., None]
        wide, change = (jnp.where(ignored, 0, a.astype(largest.dtype)) for a in (x, dx))
        exponentials = jnp.exp(wide - largest[..., None])
        of_label = jnp.where(_is_label(labels, classes), change, 0)
        sums = [jnp.sum(a, -1) for a in (exponentials * change, of_label, change)]
        return None, *sums[:2], sums[2] if self.differences else None

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        x, labels, classes, largest, _ = operands
        _, factor, target, uniform = cotangents
        zero = jnp.zeros_like(largest)
        (dx,) = invoke(
            BWD,
            x,
            labels,
            classes,
            largest,
            zero if factor is None else factor,
            zero if target is None else target,
            uniform,
            implementation=self.implementation,
        )
        return None, None, None, None, dx
