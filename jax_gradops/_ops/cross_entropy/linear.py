"""Softmax cross-entropy of a linear layer's outputs, without an array of all logits.

The rows are cut into chunks. A program makes the logits of one chunk, their losses, and their
gradients for a cotangent of 1. The next chunk uses the memory of these logits again. The
program's results are the losses and the gradients of the operands. The backward pass scales these
gradients. It computes them again if the losses' cotangents differ. After a reduction, they cannot.

Here the kernel has shape [classes, features], as an embedding. A kernel that is the transpose of an
embedding is transposed twice, which XLA leaves out. A loop needs a copy of any other transpose.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import accum_dtype, match_vma
from jax_gradops._kernel.call import Compute
from jax_gradops._kernel.invoke import formula, invoke, prepare
from jax_gradops._kernel.primitive import Operands, Operation, Unknown
from jax_gradops._kernel.rows import RowCall
from jax_gradops._kernel.spec import Kernel, Result
from jax_gradops._ops.cross_entropy.kernels import BWD, FWD, IGNORED, RowSums
from jax_gradops._ops.cross_entropy.loss import (
    Options,
    checked_labels,
    checked_options,
    class_labels,
    loss_of_rows,
    nan_if,
    poisoned,
)

# A chunk has at most this number of rows, and its logits at most this number of bytes. For each
# chunk, the gradient of the kernel is read and written in float32. In the time of the products of
# 4096 rows, an H100 reads and writes it 13 times.
_MOST_ROWS = 4096
_MOST_BYTES = 2**30
# Matrix units work on tiles of this number of rows.
_TILE = 128


class Static(NamedTuple):
    """The static arguments of the program."""

    options: Options
    rows_per_chunk: int | None
    precision: str | None  # of products
    reduction: str


# --- One chunk -----------------------------------------------------------------------------------


def _chunk(
    compute: Compute, gradients: bool, static: Static, kernel: Any, bias: Any, *rows: Any
) -> tuple[jax.Array, Any]:
    """The loss of each row, and the gradient of the logits if it is wanted.

    `rows` are x, labels, and the losses' cotangents: 1 if absent.
    """
    x, labels, cotangents = rows
    logits = lax.dot_general(x, kernel, (((1,), (1,)), ((), ())), precision=static.precision)
    options = static.options
    if bias is not None:
        logits = logits + bias[None]
    skip = frozenset() if options.label_smoothing else frozenset({"sum_of_differences"})
    classes = logits.shape[-1]
    operands = logits, labels, lax.iota(jnp.int32, classes)
    sums = compute(RowCall(FWD, ("x", "labels", "classes"), skip=skip), *operands)

    def loss(*sums: jax.Array) -> jax.Array:
        row = RowSums(largest, *sums, *[None] * len(skip))
        return loss_of_rows(row, labels, classes, options)

    largest, *others = sums
    losses, pullback = jax.vjp(loss, *others)
    if not gradients:
        return losses, None
    given = pullback(jnp.ones_like(losses) if cotangents is None else cotangents)
    names = tuple(name for name in BWD.operands if given[2:] or name != "uniform")
    (dlogits,) = compute(RowCall(BWD, names), *operands, largest, *given)
    return losses, dlogits


def _rows_of_chunk(rows: int, classes: int, itemsize: int) -> int:
    """The default number of rows of a chunk."""
    most = max(_TILE, min(_MOST_ROWS, _MOST_BYTES // max(1, classes * itemsize) // _TILE * _TILE))
    each = -(-rows // max(1, -(-rows // most)))  # chunks of about equal sizes
    return min(most, -(-each // _TILE) * _TILE)


def _program(
    compute: Compute,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    cotangents: jax.Array | None,
    *,
    wanted: tuple[str, ...],
    static: Static,
) -> Any:
    """The results of `LINEAR` for one device's rows. None stands for an unwanted one."""
    classes, features = kernel.shape
    count, accum = labels.size, accum_dtype(x.dtype)
    if isinstance(count, int):
        step = static.rows_per_chunk or _rows_of_chunk(count, classes, x.dtype.itemsize)
        step = max(1, min(step, count))
        chunks = max(1, -(-count // step))
    else:
        step, chunks = count, 1  # a symbolic dimension of jax.export
    missing = chunks * step - count

    def cut(array: jax.Array | None, fill: Any, *axes: int) -> jax.Array | None:
        if array is None:
            return None
        flat = array.reshape(count, *axes)
        padding = [(0, missing), *[(0, 0)] * len(axes)]
        flat = jnp.pad(flat, padding, constant_values=fill) if missing else flat
        return flat.reshape(chunks, step, *axes)

    layer = kernel.astype(x.dtype), None if bias is None else bias.astype(x.dtype)
    gradients, precision = wanted != ("loss",), static.precision

    def counted(chunk: jax.Array, labels: jax.Array) -> jax.Array:
        """The chunk, with 0 in ignored rows: a product of 0 with their NaN would be NaN."""
        if static.options.ignore_index is None:
            return chunk
        return jnp.where((labels == IGNORED)[:, None], 0, chunk)

    def body(sums: tuple[Any, Any], rows: Operands) -> tuple[Any, Any]:
        (chunk, labels, cotangents), (dkernel, dbias) = rows, sums
        chunk = counted(chunk, labels)
        loss, dlogits = _chunk(compute, gradients, static, *layer, chunk, labels, cotangents)
        dx = None
        if "dx" in wanted:
            dx = counted(jnp.dot(dlogits, layer[0], precision=precision), labels)
        if dkernel is not None:
            dkernel = dkernel + jnp.dot(
                dlogits.T, chunk, precision=precision, preferred_element_type=accum
            )
        if dbias is not None:
            dbias = dbias + jnp.sum(dlogits, 0, dtype=accum)
        return (dkernel, dbias), (loss, dx)

    rows = cut(x, 0, features), cut(labels, IGNORED), cut(cotangents, 0)

    def zeros(name: str, *shape: int) -> jax.Array | None:
        return match_vma(jnp.zeros(shape, accum), x, labels)[0] if name in wanted else None

    sums = zeros("dkernel", classes, features), zeros("dbias", classes)
    if chunks == 1:  # see `Kernel.program`
        (dkernel, dbias), (loss, dx) = body(sums, [r if r is None else r[0] for r in rows])
    else:
        (dkernel, dbias), (loss, dx) = lax.scan(jax.checkpoint(body), sums, rows)
    loss = loss.reshape(chunks * step)[:count].reshape(labels.shape)
    if dx is not None:
        dx = dx.reshape(chunks * step, features)[:count].reshape(x.shape)
    return loss, dx, dkernel, dbias


# The letter c stands for the classes. No array has rows of classes.
LINEAR = Kernel(
    name="linear_softmax_cross_entropy",
    operands={"x": "nd", "kernel": "cd", "bias": "c", "labels": "n", "cotangents": "n"},
    results={
        "loss": Result("n"),
        "dx": Result("nd", "x"),
        "dkernel": Result("cd"),
        "dbias": Result("c"),
    },
    reference=functools.partial(_program, formula),
    program=_program,
    whole="dc",
)


# --- Differentiation -----------------------------------------------------------------------------


def _invoke(static: Static, wanted: Sequence[str], *operands: Any) -> Any:
    return invoke(
        LINEAR,
        *operands,
        skip=[name for name in LINEAR.results if name not in wanted],
        implementation=static.options.implementation,
        wanted=tuple(wanted),
        static=static,
    )


@dataclasses.dataclass(frozen=True)
class _Loss(Operation):
    """The loss of each row. The operands are x, kernel, bias and labels."""

    static: Static

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        return _invoke(self.static, ["loss"], *operands, None)[:1]

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        varying = [t is not None for t in tangents[:3]]
        wanted = [name for name, v in zip(("dx", "dkernel", "dbias"), varying, strict=True) if v]
        loss, *gradients = _invoke(self.static, ["loss", *wanted], *operands, None)
        tangent = _Tangent(self.static)(*operands, *gradients, *tangents[:3])
        return (loss,), tangent


@dataclasses.dataclass(frozen=True)
class _Tangent(Operation):
    """The tangent of each row's loss. The transpose is the backward pass.

    The operands of `_Loss` come first, then the gradients of x, kernel and bias for
    cotangents of 1, and the tangents of x, kernel and bias.
    """

    static: Static
    linear = (7, 8, 9)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        *layer, labels = operands[:4]
        tangents = operands[7:]
        varying = [t is not None for t in tangents]

        def loss(*some: jax.Array) -> jax.Array:
            found = iter(some)
            given = [next(found) if v else a for a, v in zip(layer, varying, strict=True)]
            xla = self.static.options._replace(implementation="xla")
            return _invoke(self.static._replace(options=xla), ["loss"], *given, labels, None)[0]

        primals = [a for a, v in zip(layer, varying, strict=True) if v]
        return (jax.jvp(loss, primals, [t for t in tangents if t is not None])[1],)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        found = _Pullback(self.static)(*operands[:7], *cotangents)
        unknown = [isinstance(o, Unknown) for o in operands[7:]]
        return [*[None] * 7, *(f if u else None for f, u in zip(found, unknown, strict=True))]


@dataclasses.dataclass(frozen=True)
class _Pullback(Operation):
    """The gradients of x, kernel and bias.

    The operands of `_Loss` come first, then the gradients for cotangents of 1 (None
    if not wanted), and the cotangents.
    """

    static: Static
    linear = (7,)

    def _again(self, operands: Operands, wanted: Sequence[str], implementation: Any) -> Any:
        options = self.static.options._replace(implementation=implementation)
        static = self.static._replace(options=options)
        return _invoke(static, wanted, *operands[:4], operands[7])[1:]

    def _wanted(self, operands: Operands) -> list[str]:
        pairs = zip(("dx", "dkernel", "dbias"), operands[4:7], strict=True)
        return [name for name, gradient in pairs if gradient is not None]

    def _rounded(self, operands: Operands, gradients: Operands) -> tuple[Any, ...]:
        pairs = zip(gradients, operands[:3], strict=True)
        return tuple(None if g is None else g.astype(a.dtype) for g, a in pairs)

    def formula(self, *operands: Any) -> tuple[Any, ...]:
        return self._rounded(operands, self._again(operands, self._wanted(operands), "xla"))

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        labels, (dx, *sums) = operands[3], operands[4:7]
        # An ignored row's gradient is 0 for each cotangent, also for NaN.
        cotangents = jnp.where(labels == IGNORED, 0, operands[7])
        if dx is not None:
            dx = dx.astype(cotangents.dtype) * cotangents[..., None]
        wanted = [name for name in self._wanted(operands) if name != "dx"]
        if not wanted:
            return self._rounded(operands, (dx, *sums))
        # Ignored rows have no part in the comparison. One maximum is one all-reduce.
        # A maximum of several devices may lose a NaN. The bounds inf and inf are not equal.
        bounds = jnp.stack([-cotangents, cotangents])
        bounds = jnp.where(jnp.isnan(bounds), jnp.inf, bounds)
        counted = jnp.where((labels != IGNORED)[None], bounds, -jnp.inf)
        negative_least, most = jnp.max(counted, tuple(range(1, counted.ndim)), initial=-jnp.inf)

        def scaled(factor: jax.Array) -> Any:
            factor = jnp.where(factor == -jnp.inf, 0, factor)
            return [None if s is None else factor * s for s in sums]

        def again() -> Any:
            return list(self._again(operands, wanted, self.static.options.implementation)[1:])

        if self.static.reduction != "none":
            # All are equal, but for NaN in rows of a label that is no class.
            sums = scaled(most + nan_if(most == jnp.inf, most.dtype))
        else:  # On a GPU, the host waits for the condition. If no row counts, both are -inf.
            sums = lax.cond(-negative_least >= most, lambda: scaled(most), again)
        return self._rounded(operands, (dx, *sums))


# --- Public function -----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="static")
def _apply(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, labels: jax.Array, *, static: Static
) -> jax.Array:
    found = class_labels(labels, kernel.shape[-1], static.options.ignore_index)
    operands = prepare(LINEAR, x, kernel.T, bias, found, None)[:4]
    loss = _Loss(static)
    xla = static.options.implementation == "xla"
    # With XLA's operations, JAX itself differentiates.
    losses = poisoned((loss.compute if xla else loss)(*operands)[0], found)
    if static.reduction == "none":
        return losses
    total = jnp.sum(losses)
    if static.reduction == "sum":
        return total
    return total / jnp.maximum(jnp.sum(found != IGNORED), 1).astype(total.dtype)


@_checks.with_hints
def linear_softmax_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    rows_per_chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "none",
    implementation: Implementation = None,
) -> jax.Array:
    r"""Softmax cross-entropy of the logits ``x @ kernel + bias``, without an array of all logits.

    It gives the result of `jax_gradops.softmax_cross_entropy_with_integer_labels` with these
    logits. The logits are made for a chunk of the rows at a time. A call that is differentiated
    computes each chunk's gradients with its losses, so that no product is computed twice. It keeps
    the gradients of x, kernel and bias. The backward pass scales them by the losses' cotangents.

    .. math:: \text{loss} = \text{cross\_entropy}(x W + b, \text{labels}), \qquad
              dx = dz\,W^T, \quad dW = x^T dz, \quad db = \sum_\text{rows} dz

    Args:
      x: an array ``[..., features]`` in float16, bfloat16, float32 or float64.
      kernel: an array ``[features, classes]`` in any of these dtypes. It is cast to x's dtype. For
        an embedding ``[classes, features]`` with tied weights, pass ``embedding.T``.
      labels: integers ``[...]``. A label that is no class makes the loss of its row NaN. The
        gradients of kernel and bias are then NaN, unless the cotangent of this loss is 0.
      bias: an array ``[classes]``, cast to x's dtype, or None.
      rows_per_chunk: the number of rows whose logits exist at a time, on each device. None selects
        chunks of up to 4096 rows, and of up to 1 GiB of logits. A symbolic number of rows
        (`jax.export`) is one chunk.
      label_smoothing: as in `jax_gradops.softmax_cross_entropy_with_integer_labels`.
      z_loss: as there.
      ignore_index: as there.
      reduction: ``"none"`` gives the loss of each row, ``"sum"`` their sum, ``"mean"`` the sum
        divided by the number of rows that are not ignored. The mean of no rows is 0. Choose
        ``"sum"`` or ``"mean"`` in a training step on a GPU. The host then does not wait for losses.
      implementation: ``"ffi"`` selects the native kernels for losses and gradients of logits,
        ``"xla"`` selects `jax.numpy`. None selects the kernels if they are available. Products are
        always XLA's.

    Returns:
      The loss of each row, in the labels' shape, or one number after a reduction. The dtype is
      float32, or float64 for float64 x.

    Raises:
      TypeError: for an unsupported dtype.
      ValueError: for a wrong shape or option. Also for ``implementation="ffi"`` if no kernel is
        available.

    The logits of a chunk have x's dtype, as a linear layer's result. The gradients of kernel and
    bias are summed in float32 (float64 for float64) and rounded once to their dtypes. The gradient
    of x is rounded to x's dtype twice: before it is scaled, and after.

    With a reduction, the gradients are scaled by its cotangent. Without one, they are scaled if all
    losses that are not ignored have the same cotangent. This is known when the program runs, so
    that the host of a GPU waits for it. For other cotangents, the gradients of kernel and bias are
    computed again, which takes two products more. Leave rows out by `ignore_index`, not by weights.

    If the rows are sharded, the gradients of kernel and bias are summed by one all-reduce, and no
    row is sent. The kernel is gathered to each device. For classes that stay sharded, use
    `jax_gradops.softmax_cross_entropy_with_integer_labels`.

    References:
      Hsu et al., Liger Kernel, FusedLinearCrossEntropy: https://arxiv.org/abs/2410.10989

    >>> import jax.numpy as jnp
    >>> import jax_gradops
    >>> x, kernel = jnp.ones((2, 3)), jnp.zeros((3, 4))
    >>> print(jax_gradops.linear_softmax_cross_entropy(x, kernel, jnp.array([1, 2])))
    [1.3862944 1.3862944]
    """
    op = "linear_softmax_cross_entropy"
    checked = _checks.array(op, "x", x)
    if checked.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a scalar")
    features = checked.shape[-1]
    matrix = _checks.array(op, "kernel", kernel)
    if matrix.ndim != 2 or matrix.shape[0] != features:
        raise ValueError(
            f"{op}: kernel must have shape ({features}, classes) for x {checked.shape}, got "
            f"{matrix.shape}"
        )
    vector = None if bias is None else _checks.array(op, "bias", bias)
    if vector is not None and vector.shape != matrix.shape[1:]:
        raise ValueError(
            f"{op}: bias must have shape {matrix.shape[1:]} for kernel {matrix.shape}, got "
            f"{vector.shape}"
        )
    found = checked_labels(op, labels, checked, (checked.ndim - 1,), "x")
    if rows_per_chunk is not None:
        rows_per_chunk = _checks.count(op, "rows_per_chunk", rows_per_chunk)
    options = checked_options(op, found, label_smoothing, z_loss, ignore_index, implementation)
    # Read here: JAX traces the program later, where a user's setting may no longer hold.
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    reduction = _checks.choice(op, "reduction", reduction, "none", "sum", "mean")
    static = Static(options, rows_per_chunk, precision, reduction)
    return _apply(checked, matrix, vector, found, static=static)
