"""The kernels of batch norm, what they mean in `jax.numpy`, and their differentiation."""

from __future__ import annotations

import dataclasses
import functools
import math
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
from jax_gradops._kernel.spec import (
    Kernel,
    Named,
    Result,
    Total,
    along_channels,
    column_sum_workspace,
)
from jax_gradops._ops.row_norm.reference import inverse_deviation, root_of_count

Array = jax.Array


# --- What the kernels mean -----------------------------------------------------------------------


def _count(x: Array, inner: int) -> Any:
    """How many elements a channel has; 1 instead of 0."""
    sizes = [n for i, n in enumerate(x.shape) if i != x.ndim - 1 - inner]
    count = math.prod(sizes)
    if not isinstance(count, int):  # symbolic dimensions of jax.export
        return jnp.asarray(count).astype(x.dtype)
    return max(1, count)


def _channel_sum(x: Array, inner: int) -> Array:
    return jnp.sum(x, [i for i in range(x.ndim) if i != x.ndim - 1 - inner])


def _normalized(x: Array, mean: Array, delta: Array | None, rstd: Array, inner: int) -> Array:
    """x_hat; x is wide."""
    centered = x - along_channels(mean, x, inner)
    if delta is not None:
        centered = centered - along_channels(delta, x, inner)
    return centered * along_channels(rstd, x, inner)


def _argument(
    x_hat: Array, scale: Array | None, bias: Array | None, residual: Array | None, inner: int
) -> Array:
    """What the activation is applied to."""
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
        # Rounded, the mean is off by delta. y does not depend on what is taken off first, so
        # neither does its gradient.
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
    """x, and the same number to all that use it.

    XLA computes it again for some of them, as a part of what they do, and then with fewer roundings
    (x * y + z has one). Not through integers; barriers do not last that long on the CPU.
    """
    return Function(_through_integers, unchanged)(x)[0]


def _split(first: Array, offset: Array) -> tuple[Array, Array]:
    """First + offset, rounded, and what that is off by; the derivative is that of the former."""
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
    total: Total,
    shards: int,
) -> Arrays:
    """The tangents of y, mean and variance: linear in dx to dbias, of which None is zero."""
    x_hat = _normalized(x.astype(mean.dtype), mean, delta, rstd, inner)
    wide = jnp.zeros_like(x_hat) if dx is None else dx.astype(x_hat.dtype)
    n = shards * _count(wide, inner)
    sums = total([_channel_sum(wide, inner), _channel_sum(wide * x_hat, inner)])
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


def merge_statistics(
    partial: Named, total: Total, shards: int, rows: Any, *, epsilon: float, relu: bool
) -> tuple[Named, Named]:
    """Statistics of all shards, which have as many rows each.

    Chan, Golub, LeVeque, Algorithms for computing the sample variance (1983), with the distances of
    the shards' means from their mean.
    """
    del rows, relu

    def means(*parts: Array) -> list[Array]:
        return [part / shards for part in total(parts)]

    first = _as_rounded(means(partial["batch_mean"])[0])
    offset = (partial["batch_mean"] - first) + partial["batch_delta"]
    unit = root_of_count(shards) ** 2  # the sum over shards may overflow, their mean does not
    spread, variance = means(offset, (partial["batch_variance"] + jnp.square(offset)) / unit)
    # spread is what rounding has left: next to nothing
    variance = variance * unit - jnp.square(spread)
    mean, delta = _split(first, spread)
    rstd = inverse_deviation(variance, epsilon)
    given = {"mean": mean, "rstd": rstd, "delta": delta}
    return {"batch_variance": variance, **{f"batch_{k}": v for k, v in given.items()}}, given


def merge_sums(
    partial: Named, total: Total, shards: int, rows: Any, *, relu: bool
) -> tuple[Named, Named]:
    """Sums of all shards, and the means over their rows."""
    del relu
    if not isinstance(rows, int):
        rows = jnp.asarray(rows).astype(partial["dbias"].dtype)
    dscale, dbias = total([partial[name] for name in _SUMS])
    n = shards * (max(1, rows) if isinstance(rows, int) else rows)
    return {"dscale": dscale, "dbias": dbias}, {"mean_dz": dbias / n, "mean_dz_x_hat": dscale / n}


# --- The kernels ---------------------------------------------------------------------------------


def _workspace(values: int, groups: int, rows: int, features: int, sums: int) -> tuple[int, ...]:
    """Partial results of `values` numbers a channel, where the kernel computes any itself."""
    return column_sum_workspace(groups, rows, features, values if sums else 0)


_STATISTICS = ("batch_mean", "batch_variance", "batch_rstd", "batch_delta")
_SUMS = ("dscale", "dbias")
_PARAMETERS = {"scale": "d", "bias": "d"}
_GIVEN = {"mean": "d", "rstd": "d", "delta": "d"}

FWD = Kernel(
    name="batch_norm_fwd",
    operands={"x": "ndm", "residual": "ndm", **_PARAMETERS, **_GIVEN},
    results={"y": Result("ndm", "x"), **{name: Result("d") for name in _STATISTICS}},
    reference=_forward,
    # Of each part: its mean, squared deviations from it, and how many elements it has.
    workspace=functools.partial(_workspace, 4),
    stages=merge_statistics,
)
BWD = Kernel(
    name="batch_norm_bwd",
    operands={
        "dy": "ndm", "x": "ndm", "y": "ndm", **_PARAMETERS, **_GIVEN,
        "mean_dz": "d", "mean_dz_x_hat": "d",
    },
    results={
        "dx": Result("ndm", "x"), "dresidual": Result("ndm", "x"),
        **{name: Result("d") for name in _SUMS},
    },
    reference=_backward,
    workspace=functools.partial(_workspace, 2),
    stages=merge_sums,
)  # fmt: skip


# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """A batch norm with all that is static."""

    inner: int  # axes after that of the channels
    epsilon: float = 0.0
    axis_name: Any = None
    shards: int = 1  # how many there are along axis_name
    relu: bool = False
    implementation: Implementation = None

    def _options(self) -> dict[str, Any]:
        return {"inner": self.inner, "relu": self.relu, "implementation": self.implementation}

    def forward(self, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
        """y, mean, variance, rstd, delta."""
        options = {**self._options(), "epsilon": np.float64(self.epsilon)}
        if self.axis_name is None:
            return invoke(FWD, x, residual, scale, bias, None, None, None, **options)
        nothing = (None, None, None)
        statistics = invoke(FWD, x, None, None, None, *nothing, skip=["y"], **options)[1:]
        results, given = merge_statistics(
            dict(zip(_STATISTICS, statistics, strict=True)),
            self.total,
            self.shards,
            None,
            epsilon=self.epsilon,
            relu=self.relu,
        )
        y = self.apply(x, residual, scale, bias, *given.values())
        return y, *(results[name] for name in _STATISTICS)

    def apply(
        self, x: Any, residual: Any, scale: Any, bias: Any, mean: Any, rstd: Any, delta: Any
    ) -> Array:
        """Y with these statistics."""
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
        """dx, dresidual, dscale, dbias; of the last two those that have an entry in `dtypes`."""
        rest = [] if residual and self.relu else ["dresidual"]
        operands = (dy, x, y, scale, bias, *statistics)
        if self.axis_name is None:
            dx, dresidual, *sums = invoke(
                BWD, *operands, None, None, skip=rest, dtypes=dtypes, **self._options()
            )
        else:
            # What the parameters' gradients are is up to the caller's transformation: the sums over
            # the device's own rows. What x's needs are those of all.
            sums = invoke(BWD, *operands, None, None, skip=["dx", "dresidual"], **self._options())[
                2:
            ]
            count = x.size // max(1, x.shape[x.ndim - 1 - self.inner])
            named: Named = dict(zip(_SUMS, sums, strict=True))
            _, given = merge_sums(named, self.total, self.shards, count, relu=self.relu)
            both = match_vma(*operands, *given.values())
            dx, dresidual, *_ = invoke(BWD, *both, skip=[*rest, *_SUMS], **self._options())
        dscale, dbias = (
            value.astype(dtypes[name]) if name in dtypes else None
            for name, value in zip(_SUMS, sums, strict=True)
        )
        return dx, dy if residual and not self.relu else dresidual, dscale, dbias

    def total(self, parts: Any) -> Any:
        """The sums over all shards along `axis_name`."""
        return lax.psum(list(parts), self.axis_name)


@dataclasses.dataclass(frozen=True)
class _Normalize(Operation):
    """y, mean, variance, rstd and delta of x, residual, scale and bias."""

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
        # Where relu's argument was positive, x tells, or, with a residual, y.
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
    """Tangents of `_Normalize`'s results but delta, whose transpose is the backward pass.

    Operands are x, y, scale, bias, mean, rstd and delta, as `BatchNorm.backward` takes them, and
    the tangents of `_Normalize`'s operands.
    """

    norm: BatchNorm
    dtypes: tuple[tuple[str, str], ...]
    linear = (7, 8, 9, 10)
    # Statistics of all devices are the same on each, and so are their tangents.
    unmatched = (4, 5, 6)

    @property
    def axis_names(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.norm.axis_name or ()

    def common(self, mapped: Any) -> tuple[int, ...]:
        # The tangents of variance and rstd are multiples of rstd's powers. A saved rstd is mapped
        # where, say, it went through `lax.cond` with a mapped predicate.
        return (1,) if mapped[5] else (1, 2, 3)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        norm = self.norm
        total = norm.total if norm.axis_name else list
        return tangents(
            *operands, inner=norm.inner, relu=norm.relu, total=total, shards=norm.shards
        )

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
    """y, mean and variance of the batch; y is differentiable."""
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
    """y, mean, rstd."""
    operands = prepare(FWD, x, None, scale, bias, None, None, None, inner=norm.inner)[:4]
    by = norm.forward if norm.implementation == "xla" else _Normalize(norm)
    y, mean, _, rstd, _ = by(*operands)
    return reshard_like(y, x), mean, rstd


@functools.partial(jax.jit, static_argnames="norm")
def apply(x: Any, mean: Any, variance: Any, scale: Any, bias: Any, *, norm: BatchNorm) -> Any:
    """Y with these statistics."""
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
    """dx, dscale, dbias and, where there is y, dresidual."""
    residual = y is not None
    # Relu's derivative alone takes them: y, or, where there is none, the bias.
    y, bias = (y, None if residual else bias) if norm.relu else (None, None)
    dy, x, y, scale, bias, mean, rstd = match_vma(dy, x, y, scale, bias, mean, rstd)
    dx, dresidual, dscale, dbias = norm.backward(
        dy, x, y, scale, bias, (mean, rstd, None), dict(dtypes), residual=residual
    )
    gradients = reshard_like(dx, x), dscale, dbias
    return (*gradients, reshard_like(dresidual, x)) if residual else gradients
