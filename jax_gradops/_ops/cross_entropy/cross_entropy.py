"""Softmax cross-entropy with integer labels: public functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import accum_dtype, match_vma, reshard_like
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._ops.cross_entropy.kernels import BWD, FWD, IGNORED, RowSums, Sums
from jax_gradops._ops.cross_entropy.loss import (
    Options,
    Poison,
    checked_labels,
    checked_options,
    class_labels,
    loss_of_rows,
    poisoned,
)


def sums_of(
    logits: jax.Array, labels: jax.Array, options: Options
) -> tuple[RowSums, jax.Array, Any]:
    """The sums of each row, the labels with the same types, and the number of classes.

    Labels are those of `class_labels`.
    """
    names, classes = options.axis_name, logits.shape[-1]
    numbers = jnp.arange(classes, dtype=jnp.int32)
    if names:
        numbers = numbers + lax.axis_index(names) * classes
        classes = classes * lax.axis_size(names)
    operands = prepare(FWD, logits, labels, numbers)
    sums = Sums(options.label_smoothing > 0, names, options.implementation)
    # With XLA's operations, JAX itself differentiates.
    row = RowSums(*(sums.compute if options.implementation == "xla" else sums)(*operands))
    matched: Any = match_vma(labels, row.largest)[0]
    return row, reshard_like(matched, row.largest), classes


def _sums_where(
    logits: jax.Array, labels: jax.Array, where: jax.Array, options: Options
) -> tuple[RowSums, jax.Array, Any]:
    """As `sums_of`, with some logits left out. The logit of the label always counts."""
    ignored = (labels == IGNORED)[..., None]
    wide = jnp.where(ignored, 0, logits.astype(accum_dtype(logits.dtype)))
    counted = jnp.where(where | ignored, wide, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(counted, -1, initial=-jnp.inf))
    total = jnp.sum(jnp.exp(counted - largest[..., None]), -1)
    logit = jnp.take_along_axis(wide, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    differences = None
    if options.label_smoothing:  # a sum with -inf times 0 would be NaN
        differences = jnp.sum(jnp.where(where, wide - largest[..., None], 0), -1)
    number = jnp.sum(where, -1, dtype=wide.dtype)
    return RowSums(largest, total, logit, differences), labels, number


@functools.partial(jax.jit, static_argnames="options")
def _apply(
    logits: jax.Array,
    labels: jax.Array,
    counted: jax.Array | None,
    where: jax.Array | None,
    *,
    options: Options,
) -> jax.Array:
    """The loss of each row. `counted` says which rows count, and `where` which logits."""
    classes = logits.shape[-1] * (lax.axis_size(options.axis_name) if options.axis_name else 1)
    found = class_labels(labels, classes, options.ignore_index)
    if counted is not None:
        found = jnp.where(counted, found, IGNORED)
    if where is None:
        row, found, number = sums_of(logits, found, options)
    else:
        row, found, number = _sums_where(logits, found, where, options)
    loss = loss_of_rows(row, found, number, options)
    return reshard_like(poisoned(loss, found), labels)


@functools.partial(jax.jit, static_argnames="options")
def _apply_backward(
    dloss: jax.Array, logits: jax.Array, labels: jax.Array, lse: jax.Array, *, options: Options
) -> jax.Array:
    classes, smoothing = logits.shape[-1], options.label_smoothing
    found = class_labels(labels, classes, options.ignore_index)
    (scale,) = Poison()(dloss.astype(lse.dtype), found)
    operands = match_vma(
        logits,
        found,
        jnp.arange(classes, dtype=jnp.int32),
        lse,
        scale * (1 + 2 * options.z_loss * lse),
        scale * (smoothing - 1),
        scale * (-smoothing / classes) if smoothing else None,
    )
    (dx,) = invoke(BWD, *prepare(BWD, *operands), implementation=options.implementation)
    return reshard_like(dx, logits)


# --- Public functions ----------------------------------------------------------------------------


@_checks.with_hints
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    axis_name: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Softmax cross-entropy of logits and integer labels, with a fused backward pass.

    It replaces `optax.losses.softmax_cross_entropy_with_integer_labels`. For each row z of logits
    and its label t:

    .. math:: \text{loss} = \text{lse} - (1 - s)\,z_t - s\,\text{mean}(z)
              + \text{z\_loss} \cdot \text{lse}^2, \qquad
              \text{lse} = \log \sum_c e^{z_c}, \qquad s = \text{label\_smoothing}

    The backward pass reads the logits once and writes their gradient. If nothing needs the logits
    later, the gradient takes over their memory.

    Args:
      logits: an array in float16, bfloat16, float32 or float64. Classes are along `axis`.
      labels: integers, of the shape of logits without `axis`. A label that is no class makes the
        loss of its row NaN. The gradient of this row is 0 if the cotangent of its loss is 0, as
        after a mask. Otherwise it is NaN. Optax differs: a label from ``-classes`` to -1 counts
        from the last class. For another label that is no class, Optax's loss is NaN and its
        gradient is finite. `jax_gradops.fuse` keeps what the code has.
      axis: the axis of the classes. If it is a tuple of axes, a label is an index of these axes,
        flattened in this order. For other axes than the last one, XLA's operations are used.
      where: bools that say what counts, as in Optax. If `where` has the labels' number of axes, it
        is broadcast to their shape, and says which rows count. A row that does not count has the
        loss 0 and the gradient 0. If `where` has the logits' number of axes, it is broadcast to
        their shape, and says which logits count. XLA's operations are then used. A row without
        any logit that counts does not count. The logit of a label always counts.
      label_smoothing: the part of each label that is spread over all classes, in [0, 1].
      z_loss: the factor of the squared logsumexp, at least 0.
      ignore_index: rows with this label have the loss 0 and the gradient 0, whatever their logits.
      axis_name: the name of a mapped axis of `jax.shard_map`, `jax.pmap` or `jax.vmap`, or a tuple
        of names, over which the classes are sharded. Each shard has equally many. Labels are
        numbers of all classes. Under `jax.jit` with sharded classes, no name is needed.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      The loss of each row, in the labels' shape. Its dtype is float32, or float64 for float64
      logits.

    Raises:
      TypeError: for an unsupported dtype.
      ValueError: for a wrong shape or option. Also for ``implementation="ffi"`` if no kernel is
        available.
      NameError: for an `axis_name` that is not bound, as from `jax.lax.psum`. The error is also a
        ValueError.

    All arithmetic is in float32 (float64 for float64). Loss and gradient are made of differences
    to the row's largest logit: 11 equal logits of 1e38 have the loss log 11. A logit of -inf is a
    class that cannot be. A logit of +inf or NaN makes its row NaN, and no other row.

    If the rows are sharded, nothing is sent between devices. If the classes are sharded, two
    all-reduces of a number per row are sent. The gradient is sharded as the logits are.

    References:
      ONNX Runtime, SoftmaxCrossEntropyLossGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> import jax_gradops
    >>> loss = jax_gradops.softmax_cross_entropy_with_integer_labels(
    ...     jnp.zeros((2, 4)), jnp.array([1, -100]), ignore_index=-100)
    >>> print(loss)
    [1.3862944 0.       ]
    """
    op = "softmax_cross_entropy_with_integer_labels"
    x = _checks.array(op, "logits", logits)
    if x.ndim == 0:
        raise ValueError(f"{op}: logits must have at least one axis, got a scalar")
    axes = _checks.axes(op, "axis", axis, x.ndim)
    checked = checked_labels(op, labels, x, axes)
    options = checked_options(
        op, checked, label_smoothing, z_loss, ignore_index, implementation, axis_name
    )
    mask = None if where is None else _checked_where(op, where, checked.shape, x.shape)
    counted = mask
    if mask is not None and mask.ndim > checked.ndim:
        if options.axis_name:
            raise ValueError(
                f"{op}: with axis_name, where must have labels' shape {checked.shape}, got "
                f"{mask.shape}"
            )
        counted, mask = jnp.any(mask, axes), _classes_last(mask, axes)
    else:
        mask = None
    if axes != (x.ndim - 1,):
        x, options = _classes_last(x, axes), options._replace(implementation="xla")
    return _apply(x, checked, counted, mask, options=options)


def _checked_where(op: str, where: Any, labels: Sequence[int], logits: Sequence[int]) -> jax.Array:
    """The mask in the shape of labels or of logits."""
    mask = _checks.array(op, "where", where, ("bool",))
    for shape in (labels, logits):
        if mask.ndim == len(shape) and all(map(lambda m, n: m in (1, n), mask.shape, shape)):
            return jnp.broadcast_to(mask, shape)
    raise ValueError(
        f"{op}: where must have the axes of labels {labels} or of logits {logits}, each of the "
        f"same size or 1, got {mask.shape}"
    )


def _classes_last(a: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Makes one last axis of the axes of the classes."""
    rows = [i for i in range(a.ndim) if i not in axes]
    shape = [a.shape[i] for i in rows]
    return jnp.transpose(a, (*rows, *axes)).reshape(*shape, math.prod(a.shape[i] for i in axes))


@_checks.with_hints
def softmax_cross_entropy_backward(
    dloss: ArrayLike,
    logits: ArrayLike,
    labels: ArrayLike,
    lse: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""The gradient of softmax cross-entropy (SoftmaxCrossEntropyLossGrad, without weights).

    .. math:: dz_c = d\text{loss} \cdot \bigl(p_c (1 + 2\,\text{z\_loss}\cdot\text{lse})
              - (1 - s)\,[c = t] - s / \text{classes}\bigr), \qquad p_c = e^{z_c - \text{lse}}

    Args:
      dloss: the gradient of each row's loss, in any float dtype.
      logits: an array in float16, bfloat16, float32 or float64. Classes are along the last axis.
      labels: integers, of the shape of logits without the last axis. A label that is no class
        makes the gradient of its row NaN, or 0 if its dloss is 0.
      lse: the logsumexp of each row, in float32, or float64 for float64 logits.
      label_smoothing: as in `jax_gradops.softmax_cross_entropy_with_integer_labels`.
      z_loss: as there.
      ignore_index: as there.
      implementation: as there.

    Returns:
      The gradient of the logits, in their shape and dtype. It may take over their memory.

    Raises:
      TypeError: for an unsupported dtype.
      ValueError: for a wrong shape or option. Also for ``implementation="ffi"`` if no kernel is
        available.

    An lse of large magnitude has lost digits. The gradient of
    `jax_gradops.softmax_cross_entropy_with_integer_labels` uses the largest logit instead.

    References:
      ONNX Runtime, SoftmaxCrossEntropyLossGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dx = backward.softmax_cross_entropy_backward(
    ...     jnp.ones(1), jnp.zeros((1, 4)), jnp.array([1]), jnp.log(jnp.full(1, 4.0)))
    >>> print(dx.round(6))
    [[ 0.25 -0.75  0.25  0.25]]
    """
    op = "softmax_cross_entropy_backward"
    x = _checks.array(op, "logits", logits)
    if x.ndim == 0:
        raise ValueError(f"{op}: logits must have at least one axis, got a scalar")
    checked = checked_labels(op, labels, x, (x.ndim - 1,))
    rows = {"dloss": _checks.array(op, "dloss", dloss), "lse": _checks.array(op, "lse", lse)}
    for name, row in rows.items():
        if row.shape != checked.shape:
            raise ValueError(
                f"{op}: {name} must have labels' shape {checked.shape}, got {row.shape}"
            )
    options = checked_options(op, checked, label_smoothing, z_loss, ignore_index, implementation)
    wide = rows["lse"].astype(accum_dtype(x.dtype))
    return _apply_backward(rows["dloss"], x, checked, wide, options=options)
