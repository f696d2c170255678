"""What softmax cross-entropy is, as data: see `op_spec`. The labels follow from the logits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.cross_entropy import cross_entropy as module
from jax_gradops._ops.cross_entropy import linear, oracle
from jax_gradops._ops.cross_entropy.kernels import BWD, FWD
from jax_gradops._ops.op_spec import Form, OpSpec, PlanTask


def _call(
    logits: jax.Array, labels_of: oracle.LabelsOf = oracle.labels_of, **options: Any
) -> jax.Array:
    labels = labels_of(logits, options.get("ignore_index"))
    return module.softmax_cross_entropy_with_integer_labels(logits, labels, **options)


def _linear_call(
    x: jax.Array, scale: jax.Array, labels_of: oracle.LabelsOf = oracle.labels_of, **options: Any
) -> jax.Array:
    ignore_index = options.get("ignore_index")
    labels = oracle.class_of(jnp.asarray(labels_of(x, ignore_index)), ignore_index)
    kernel = oracle.matrix(scale.astype(accum_dtype(x.dtype, scale.dtype)))
    return linear.linear_softmax_cross_entropy(x, kernel, labels, rows_per_chunk=16, **options)


def _plan(task: PlanTask) -> dict[str, Any]:
    from jax_gradops import _plans

    return _plans.cross_entropy_plan(
        groups=1,
        rows=math.prod(task.shape[:-1]),
        features=task.shape[-1],
        element_bytes=task.element_bytes,
        backward=task.direction == "bwd",
        multiprocessors=task.gpu.multiprocessors,
        has_clusters=task.gpu.architecture >= 90,
    )


def _form(name: str, **options: Any) -> Form:
    return Form(
        _call,
        oracle.softmax_cross_entropy,
        (FWD, BWD),
        oracle.softmax_cross_entropy_vjp,
        name,
        options,
        traffic={} if name else {"fwd": 1, "bwd": 2},
        in_place="x",
    )


PLAIN = _form("")
SMOOTHED = _form("smoothed", label_smoothing=0.1, z_loss=1e-4, ignore_index=oracle.IGNORE_INDEX)
LINEAR = Form(
    _linear_call,
    oracle.linear_softmax_cross_entropy,
    (FWD, BWD),
    oracle.linear_softmax_cross_entropy_vjp,
    options={"label_smoothing": 0.1, "z_loss": 1e-4, "ignore_index": oracle.IGNORE_INDEX},
    parameters=1,
    roundings=4,  # of the kernel, the logits and their gradients
)
SPECS = (
    OpSpec("linear_softmax_cross_entropy", "rows", (LINEAR,)),
    OpSpec("softmax_cross_entropy_with_integer_labels", "rows", (PLAIN, SMOOTHED), plan=_plan),
)
