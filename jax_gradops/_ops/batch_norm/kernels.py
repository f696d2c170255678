"""The kernels of batch norm, their references in `jax.numpy`, and their differentiation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import Arrays, accum_dtype, match_vma, reshard_like
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.primitive import Function, Operands, Operation, Unknown, unchanged
from jax_gradops._kernel.shards import Shards
from jax_gradops._kernel.spec import (
    Kernel,
    Named,
    Result,
    Stages,
    along_channels,
    column_sum_workspace,
)
from jax_gradops._ops.row_norm.reference import inverse_deviation, root_of_count

Array = jax.Array


# --- What the kernels mean -----------------------------------------------------------------------


def _count(x: Array, inner: int) -> Any:
    """The number of elements of a channel, at least 1."""
    sizes = [n for i, n in enumerate(x.shape) if i != x.ndim - 1 - inner]
    return _at_least_one(math.prod(sizes), x.dtype)


def _at_least_one(count: Any, dtype: Any) -> Any:
    if not isinstance(count, int):  # symbolic dimensions of jax.export
        return jnp.asarray(count).astype(dtype)
    return max(1, count)


def _channel_sum(x: Array, inner: int) -> Array:
    return jnp.sum(x, [i for i in range(x.ndim) if i != x.ndim - 1 - inner])


def _normalized(x: Array, mean: Array, delta: Array | None, rstd: Array, inner: int) -> Array:
    """Returns x_hat. x has the accumulation dtype."""
    centered = x - along_channels(mean, x, inner)
    if delta is not None:
        centered = centered - along_channels(delta, x, inner)
    return centered * along_channels(rstd, x, inner)


def _argument(
    x_hat: Array, scale: Array | None, bias: Array | None, residual: Array | None, inner: int
) -> Array:
    """The argument of the activation."""
    z = x_hat
    if scale is not None:
        z = z * along_channels(scale.astype(z.dtype), z, inner)
    if bias is not None:
        z = z + along_channels(bias.astype(z.dtype), z, inner)
    return z if residual is None else z + residual.astype(z.dtype)


def _forward(
    x: Array,
    residual: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array | None,
    delta: Array | None,
    *,
    inner: int,
    epsilon: float,
    relu: bool,
) -> Arrays:
    wide = x.astype(accum_dtype(x.dtype))
    if mean is None or rstd is None:
        n = _count(wide, inner)
        # The mean's rounding error is delta. The number that is subtracted first does not change y
        # or y's gradient, so it comes from stop_gradient.
        first = _as_rounded(_channel_sum(lax.stop_gradient(wide), inner) / n)
        shifted = wide - along_channels(first, wide, inner)
        offset = _channel_sum(shifted, inner) / n
        centered = shifted - along_channels(offset, wide, inner)
        unit = root_of_count(n)
        variance = _channel_sum(jnp.square(centered * (1 / unit)), inner) / n * unit**2
        mean, delta = _split(first, offset)
        rstd = inverse_deviation(variance, epsilon)
        x_hat = centered * along_channels(rstd, wide, inner)
    else:
        x_hat = _normalized(wide, mean, delta, rstd, inner)
        variance = delta = jnp.zeros_like(mean)  # not asked for
    z = _argument(x_hat, scale, bias, residual, inner)
    y = jax.nn.relu(z) if relu else z
    return y.astype(x.dtype), mean, variance, rstd, delta


def _through_integers(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(bits | (x != x).astype(bits.dtype), x.dtype)


def _as_rounded(x: Array) -> Array:
    """Returns x, and makes all users of x see one rounded number.

    XLA may compute x again inside a fused user, with fewer roundings (x * y + z has one rounding).
    A bitcast to integers and back prevents this. A barrier does not: XLA's CPU compiler drops it.
    """
    return Function(_through_integers, unchanged)(x)[0]


def _split(first: Array, offset: Array) -> tuple[Array, Array]:
    """Returns the rounded first + offset, and the rounding error, which has no derivative."""
    first, offset = _as_rounded(first), _as_rounded(offset)
    mean = _as_rounded(first + offset)
    return mean, lax.stop_gradient((first - mean) + offset)


def tangents(
    x: Array,
    y: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    rstd: Array,
    delta: Array | None,
    dx: Array | None,
    dresidual: Array | None,
    dscale: Array | None,
    dbias: Array | None,
    *,
    inner: int,
    relu: bool,
    axis_name: Any,
) -> Arrays:
    """Returns the tangents of y, mean, variance and rstd.

    They are linear in dx to dbias. None stands for zero.
    """
    x_hat = _normalized(x.astype(mean.dtype), mean, delta, rstd, inner)
    wide = jnp.zeros_like(x_hat) if dx is None else dx.astype(x_hat.dtype)
    n, sums = _count(wide, inner), [_channel_sum(wide, inner), _channel_sum(wide * x_hat, inner)]
    if axis_name is not None:
        n, sums = lax.psum(1, axis_name) * n, lax.psum(sums, axis_name)
    level, slope = (along_channels(part / n, wide, inner) for part in sums)
    dx_hat = (wide - level - x_hat * slope) * along_channels(rstd, wide, inner)
    dz = _argument(dx_hat, scale, dbias, dresidual, inner)
    if dscale is not None:
        dz = dz + x_hat * along_channels(dscale.astype(dz.dtype), dz, inner)
    if relu:
        dz = jnp.where((_argument(x_hat, scale, bias, None, inner) if y is None else y) > 0, dz, 0)
    dmean, dslope = (part / n for part in sums)
    drstd = -jnp.square(rstd) * dslope
    return dz.astype(x.dtype), dmean, 2 * dslope / rstd, drstd


def _backward(
    dy: Array,
    x: Array,
    y: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    rstd: Array,
    delta: Array | None,
    mean_dz: Array | None,
    mean_dz_x_hat: Array | None,
    *,
    inner: int,
    relu: bool,
) -> Arrays:
    x_hat = _normalized(x.astype(mean.dtype), mean, delta, rstd, inner)
    dz = dy.astype(x_hat.dtype)
    if relu:
        z = _argument(x_hat, scale, bias, None, inner) if y is None else y
        dz = jnp.where(z > 0, dz, 0)
    dscale, dbias = _channel_sum(dz * x_hat, inner), _channel_sum(dz, inner)
    n = _count(dz, inner)
    level = along_channels(dbias / n if mean_dz is None else mean_dz, dz, inner)
    slope = along_channels(dscale / n if mean_dz_x_hat is None else mean_dz_x_hat, dz, inner)
    factor = rstd if scale is None else rstd * scale.astype(rstd.dtype)
    dx = (dz - level - x_hat * slope) * along_channels(factor, dz, inner)
    return dx.astype(dy.dtype), dz.astype(dy.dtype), dscale, dbias


# --- Statistics of several shards ----------------------------------------------------------------


def _merge_statistics(
    partial: Named, shards: Shards, *, epsilon: float, **_: Any
) -> tuple[Named, Named]:
    """Combines the statistics of shards that all have an equal number of rows.

    Source: Chan, Golub, LeVeque, Algorithms for computing the sample variance (1983). The formula
    uses the distance of each shard's mean from the mean of all shards.
    """
    number = shards.number("d")

    def means(*parts: Array) -> list[Array]:
        return [part / number for part in shards.total("d", list(parts))]

    first = _as_rounded(means(partial["batch_mean"])[0])
    offset = (partial["batch_mean"] - first) + partial["batch_delta"]
    unit = root_of_count(number) ** 2  # the sum over shards may overflow; their mean does not
    spread, variance = means(offset, (partial["batch_variance"] + jnp.square(offset)) / unit)
    # spread is a rounding error, and almost 0
    variance = variance * unit - jnp.square(spread)
    mean, delta = _split(first, spread)
    rstd = inverse_deviation(variance, epsilon)
    given = {"mean": mean, "rstd": rstd, "delta": delta}
    return {"batch_variance": variance, **{f"batch_{k}": v for k, v in given.items()}}, given


def _means(totals: Named, shards: Shards, **_: Any) -> tuple[Named, Named]:
    """The means over the rows of all shards."""
    n = _at_least_one(shards.terms("d"), totals["dbias"].dtype)
    return {}, {"mean_dz": totals["dbias"] / n, "mean_dz_x_hat": totals["dscale"] / n}


# --- The kernels ---------------------------------------------------------------------------------


def _workspace(values: int, groups: int, sizes: Mapping[str, int], sums: int) -> tuple[int, ...]:
    """Scratch shape: partial results of `values` numbers per channel. Empty if `sums` is 0."""
    return column_sum_workspace(groups, sizes, values if sums else 0)


_STATISTICS = ("batch_mean", "batch_variance", "batch_rstd", "batch_delta")
_SUMS = ("dscale", "dbias")
_PARAMETERS = {"scale": "d", "bias": "d"}
_GIVEN = {"mean": "d", "rstd": "d", "delta": "d"}
_MEANS = ("mean_dz", "mean_dz_x_hat")

FWD = Kernel(
    name="batch_norm_fwd",
    operands={"x": "ndm", "residual": "ndm", **_PARAMETERS, **_GIVEN},
    results={"y": Result("ndm", "x"), **{name: Result("d", sum=False) for name in _STATISTICS}},
    reference=_forward,
    ranks={"m": "inner"},
    # For each part: its origin (an element), its mean, squared deviations, number of elements.
    workspace=functools.partial(_workspace, 4),
    stages=Stages("nm", tuple(_GIVEN), _merge_statistics),
)
BWD = Kernel(
    name="batch_norm_bwd",
    operands={
        "dy": "ndm", "x": "ndm", "y": "ndm", **_PARAMETERS, **_GIVEN,
        **dict.fromkeys(_MEANS, "d"),
    },
    results={
        "dx": Result("ndm", "x"), "dresidual": Result("ndm", "x"),
        **{name: Result("d") for name in _SUMS},
    },
    reference=_backward,
    ranks={"m": "inner"},
    workspace=functools.partial(_workspace, 2),
    stages=Stages("nm", _MEANS, _means),
)  # fmt: skip


# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """The static parameters of a batch norm."""

    inner: int  # number of axes after the channel axis
    epsilon: float = 0.0
    axis_name: Any = None
    relu: bool = False
    implementation: Implementation = None

    def _options(self) -> dict[str, Any]:
        return {"inner": self.inner, "relu": self.relu, "implementation": self.implementation}

    @property
    def _axis_names(self) -> dict[str, Any]:
        return {"n": self.axis_name} if self.axis_name else {}

    def forward(self, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
        """Returns y, mean, variance, rstd and delta."""
        operands = (x, residual, scale, bias, None, None, None)
        options = {**self._options(), "epsilon": np.float64(self.epsilon)}
        return invoke(FWD, *operands, axis_names=self._axis_names, **options)

    def apply(
        self, x: Any, residual: Any, scale: Any, bias: Any, mean: Any, rstd: Any, delta: Any
    ) -> Array:
        """Returns y, computed with given statistics."""
        operands = match_vma(x, residual, scale, bias, mean, rstd, delta)
        epsilon = np.float64(self.epsilon)
        return invoke(FWD, *operands, skip=_STATISTICS, epsilon=epsilon, **self._options())[0]

    def backward(
        self,
        dy: Any,
        x: Any,
        y: Any,
        scale: Any,
        bias: Any,
        statistics: tuple[Any, ...],
        dtypes: dict[str, Any],
        *,
        residual: bool = False,
    ) -> tuple[Any, ...]:
        """Returns dx, dresidual, dscale and dbias.

        dscale and dbias are None without an entry in `dtypes`.
        """
        dx, dresidual, *sums = invoke(
            BWD, dy, x, y, scale, bias, *statistics, None, None,
            skip=[] if residual and self.relu else ["dresidual"], dtypes=dtypes,
            axis_names=self._axis_names, **self._options(),
        )  # fmt: skip
        dscale, dbias = (
            value.astype(dtypes[name]) if name in dtypes else None
            for name, value in zip(_SUMS, sums, strict=True)
        )
        return dx, dy if residual and not self.relu else dresidual, dscale, dbias


@dataclasses.dataclass(frozen=True)
class _Normalize(Operation):
    """`BatchNorm.forward` with a derivative, for the operands x, residual, scale and bias."""

    norm: BatchNorm

    @property
    def axis_names(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.norm.axis_name or ()

    def common(self, mapped: Any) -> tuple[int, ...]:
        del mapped
        return (1, 2, 3, 4)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        return self.norm.forward(*operands)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        x, residual, scale, bias = operands
        y, mean, variance, *rest = results = self(*operands)
        names = [f"batch_norm_{name}" for name in ("mean", "rstd", "delta")]
        statistics = tuple(map(checkpoint_name, (mean, *rest), names))
        # relu's derivative needs the sign of relu's argument: from x or, with a residual, from y.
        saved_y, saved_bias = (y, None) if residual is not None else (None, bias)
        if not self.norm.relu:
            saved_y = saved_bias = None
        parameters = {"dscale": scale, "dbias": bias}
        dtypes = tuple((n, p.dtype.name) for n, p in parameters.items() if p is not None)
        linear = _Tangents(self.norm, dtypes)
        derivatives = linear(x, saved_y, scale, saved_bias, *statistics, *tangents)
        return results, [*derivatives, None]


@dataclasses.dataclass(frozen=True)
class _Tangents(Operation):
    """The tangents of all results of `_Normalize` but delta. The transpose is the backward pass.

    First come the operands of `BatchNorm.backward`: x, y, scale, bias, mean, rstd and delta. Then
    come the tangents of `_Normalize`'s operands.
    """

    norm: BatchNorm
    dtypes: tuple[tuple[str, str], ...]
    linear = (7, 8, 9, 10)
    # Statistics over all devices are equal on each device, and so are their tangents.
    unmatched = (4, 5, 6)

    @property
    def axis_names(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.norm.axis_name or ()

    def common(self, mapped: Any) -> tuple[int, ...]:
        # The tangents of variance and rstd are multiples of powers of rstd. A saved rstd can be
        # mapped, for example after a `lax.cond` with a mapped predicate.
        return (1,) if mapped[5] else (1, 2, 3)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        norm = self.norm
        return tangents(*operands, inner=norm.inner, relu=norm.relu, axis_name=norm.axis_name)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        dy, *others = cotangents
        if dy is None or any(ct is not None for ct in others):
            return super().transpose(operands, cotangents)
        x, y, scale, bias, *statistics = operands[:7]
        has_dx, has_dresidual, *has_sums = (isinstance(t, Unknown) for t in operands[7:])
        wanted = [name for name, has_it in zip(_SUMS, has_sums, strict=True) if has_it]
        dtypes = {name: dtype for name, dtype in self.dtypes if name in wanted}
        dx, dresidual, dscale, dbias = self.norm.backward(
            dy, x, y, scale, bias, tuple(statistics), dtypes, residual=has_dresidual
        )
        return *[None] * 7, dx if has_dx else None, dresidual, dscale, dbias


# --- What is traced ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="norm")
def normalize(x: Any, residual: Any, scale: Any, bias: Any, *, norm: BatchNorm) -> Any:
    """Returns y, and the mean and variance of the batch. Only y is differentiable."""
    nothing = (None, None, None)
    operands = prepare(FWD, x, residual, scale, bias, *nothing, inner=norm.inner)[:4]
    if norm.implementation == "xla":  # differentiated by JAX itself
        y, *statistics = norm.forward(*operands)[:3]
    else:
        y, *statistics = _Normalize(norm)(*operands)[:3]
    mean, variance = map(lax.stop_gradient, statistics)
    return reshard_like(y, x), mean, variance


@functools.partial(jax.jit, static_argnames="norm")
def forward(x: Any, scale: Any, bias: Any, *, norm: BatchNorm) -> Any:
    """Returns y, mean and rstd."""
    operands = prepare(FWD, x, None, scale, bias, None, None, None, inner=norm.inner)[:4]
    by = norm.forward if norm.implementation == "xla" else _Normalize(norm)
    y, mean, _, rstd, _ = by(*operands)
    return reshard_like(y, x), mean, rstd


@functools.partial(jax.jit, static_argnames="norm")
def apply(x: Any, mean: Any, variance: Any, scale: Any, bias: Any, *, norm: BatchNorm) -> Any:
    """Returns y, computed with given statistics."""
    rstd = inverse_deviation(variance, norm.epsilon)
    operands = prepare(FWD, x, None, scale, bias, mean, rstd, None, inner=norm.inner)
    return reshard_like(norm.apply(*operands), x)


@functools.partial(jax.jit, static_argnames=("norm", "dtypes"))
def differentiate(
    dy: Any,
    x: Any,
    y: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    *,
    norm: BatchNorm,
    dtypes: tuple[tuple[str, Any], ...],
) -> Any:
    """Returns dx, dscale and dbias, and also dresidual if y is given."""
    residual = y is not None
    # Only relu's derivative uses y or the bias. It uses the bias if y is not given.
    y, bias = (y, None if residual else bias) if norm.relu else (None, None)
    dy, x, y, scale, bias, mean, rstd = match_vma(dy, x, y, scale, bias, mean, rstd)
    dx, dresidual, dscale, dbias = norm.backward(
        dy, x, y, scale, bias, (mean, rstd, None), dict(dtypes), residual=residual
    )
    gradients = reshard_like(dx, x), dscale, dbias
    return (*gradients, reshard_like(dresidual, x)) if residual else gradients
