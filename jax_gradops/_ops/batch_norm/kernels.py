"""The kernels of batch norm and group norm, and the differentiation of both norms.

The kernels of group norm normalise one sample. `jax.vmap` maps them over the samples.
"""

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
from jax.sharding import PartitionSpec

from jax_gradops._implementation import Implementation, is_strict
from jax_gradops._kernel.array_types import Arrays, accum_dtype, match_vma, reshard_like
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.layout import mesh_axes, padded
from jax_gradops._kernel.primitive import Operands, Operation, Unknown
from jax_gradops._kernel.shards import Shards
from jax_gradops._kernel.spec import Kernel, Named, Result, Stages, column_sum_workspace
from jax_gradops._ops.batch_norm import reference
from jax_gradops._ops.batch_norm.axes import Axes, at_least_one
from jax_gradops._ops.batch_norm.reference import Activation, as_rounded, split
from jax_gradops._ops.row_norm.reference import inverse_deviation, root_of_count

# --- The references, with the kernels' operands ---------------------------------------------------


def _activation(relu: bool, silu: bool = False) -> Activation:
    return "relu" if relu else "silu" if silu else None


def _batch_forward(*operands: Any, inner: int, epsilon: float, relu: bool, strict: bool) -> Arrays:
    options = {"epsilon": epsilon, "strict": strict, "activation": _activation(relu)}
    return reference.forward(Axes(inner), *operands, **options)


def _batch_backward(*operands: Any, inner: int, relu: bool) -> Arrays:
    return reference.backward(Axes(inner), *operands, activation=_activation(relu))[:4]


def _group_forward(
    x: Any, *others: Any, inner: int, epsilon: float, relu: bool, silu: bool, strict: bool
) -> Arrays:
    options = {"epsilon": epsilon, "strict": strict, "activation": _activation(relu, silu)}
    return reference.forward(Axes(inner, grouped=True), x, None, *others, **options)


def _group_backward(dy: Any, x: Any, *others: Any, inner: int, relu: bool, silu: bool) -> Arrays:
    axes, activation = Axes(inner, grouped=True), _activation(relu, silu)
    dx, _, *rest = reference.backward(axes, dy, x, None, *others, activation=activation)
    return dx, *rest


# --- Statistics of several shards ----------------------------------------------------------------


def _merge_statistics(
    dims: str, partial: Named, shards: Shards, *, epsilon: float, strict: bool, **_: Any
) -> tuple[Named, Named]:
    """Combines the statistics of shards that all have an equal number of rows.

    `dims` are the axes of a statistic.

    Source: Chan, Golub, LeVeque, Algorithms for computing the sample variance (1983). The formula
    uses the distance of each shard's mean from the mean of all shards.
    """
    number = shards.number(dims)
    own = [partial[f"batch_{name}"] for name in ("mean", "delta", "variance")]
    gathered = shards.gathered(dims, own)
    # The first axis has all shards, or only this one.
    mean, delta, variance = [part[None] for part in own] if gathered is None else gathered

    def means(*parts: jax.Array) -> list[jax.Array]:
        """The means over all shards."""
        sums = [jnp.sum(part, 0) for part in parts]
        if gathered is None:
            sums = shards.total(dims, sums)
        return [total / number for total in sums]

    first = as_rounded(means(mean)[0])
    offset = (mean - first[None]) + delta
    unit = root_of_count(number) ** 2  # the sum over shards may overflow; their mean does not
    spread, variance = means(offset, (variance + jnp.square(offset)) / unit)
    # spread is a rounding error, and almost 0
    variance = variance * unit - jnp.square(spread)
    mean, delta = split(first, spread)
    rstd = inverse_deviation(variance, epsilon, strict)
    given = {"mean": mean, "rstd": rstd, "delta": delta}
    return {"batch_variance": variance, **{f"batch_{k}": v for k, v in given.items()}}, given


def _means(
    dims: str, sum_dz: str, sum_dz_x_hat: str, totals: Named, shards: Shards, **_: Any
) -> tuple[Named, Named]:
    """The means over the rows of all shards, from the totals with these names."""
    n = at_least_one(shards.terms(dims), totals[sum_dz].dtype)
    return {}, {"mean_dz": totals[sum_dz] / n, "mean_dz_x_hat": totals[sum_dz_x_hat] / n}


# --- The kernels ---------------------------------------------------------------------------------


def _workspace(values: int, groups: int, sizes: Mapping[str, int], sums: int) -> tuple[int, ...]:
    """Scratch shape: partial results of `values` numbers per channel. Empty if `sums` is 0."""
    return column_sum_workspace(groups, sizes, values if sums else 0)


_PARAMETERS = ("scale", "bias")
_GIVEN = ("mean", "rstd", "delta")
_STATISTICS = ("batch_mean", "batch_variance", "batch_rstd", "batch_delta")
_SUMS = ("dscale", "dbias")
_MEANS = ("mean_dz", "mean_dz_x_hat")
_SUMS_OF_GROUP = ("sum_dz", "sum_dz_x_hat")
# For each part: its origin (an element), its mean, squared deviations, number of elements.
_FORWARD_WORKSPACE = functools.partial(_workspace, 4)

BATCH_FWD = Kernel(
    name="batch_norm_fwd",
    operands={"x": "ndm", "residual": "ndm", **dict.fromkeys((*_PARAMETERS, *_GIVEN), "d")},
    results={"y": Result("ndm", "x"), **dict.fromkeys(_STATISTICS, Result("d", sum=False))},
    reference=_batch_forward,
    ranks={"m": "inner"},
    workspace=_FORWARD_WORKSPACE,
    stages=Stages("nm", _GIVEN, functools.partial(_merge_statistics, "d")),
)
BATCH_BWD = Kernel(
    name="batch_norm_bwd",
    operands={
        "dy": "ndm", "x": "ndm", "y": "ndm",
        **dict.fromkeys((*_PARAMETERS, *_GIVEN, *_MEANS), "d"),
    },
    results={
        "dx": Result("ndm", "x"), "dresidual": Result("ndm", "x"),
        **dict.fromkeys(_SUMS, Result("d")),
    },
    reference=_batch_backward,
    ranks={"m": "inner"},
    workspace=functools.partial(_workspace, 2),
    stages=Stages("nm", _MEANS, functools.partial(_means, "d", "dbias", "dscale")),
)  # fmt: skip
GROUP_FWD = Kernel(
    name="group_norm_fwd",
    operands={
        "x": "ngcm", **dict.fromkeys(_PARAMETERS, "gc"), **dict.fromkeys(_GIVEN, "g"),
    },
    results={"y": Result("ngcm", "x"), **dict.fromkeys(_STATISTICS, Result("g", sum=False))},
    reference=_group_forward,
    features="gc",
    whole="c",
    ranks={"m": "inner"},
    workspace=_FORWARD_WORKSPACE,
    stages=Stages("nm", _GIVEN, functools.partial(_merge_statistics, "g")),
)  # fmt: skip
GROUP_BWD = Kernel(
    name="group_norm_bwd",
    operands={
        "dy": "ngcm", "x": "ngcm", **dict.fromkeys(_PARAMETERS, "gc"),
        **dict.fromkeys((*_GIVEN, *_MEANS), "g"),
    },
    results={
        "dx": Result("ngcm", "x"), **dict.fromkeys(_SUMS, Result("gc")),
        **dict.fromkeys(_SUMS_OF_GROUP, Result("g")),
    },
    reference=_group_backward,
    features="gc",
    whole="c",
    ranks={"m": "inner"},
    workspace=column_sum_workspace,
    stages=Stages("nm", _MEANS, functools.partial(_means, "g", *_SUMS_OF_GROUP)),
)  # fmt: skip


# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChannelNorm:
    """The static parameters of a batch norm, or of the group norm of one sample.

    Group norm has no residual, no `y` in the backward pass, and no `axis_name`.
    """

    axes: Axes
    epsilon: float = 0.0
    axis_name: Any = None
    activation: Activation = None
    implementation: Implementation = None
    strict: bool = dataclasses.field(default_factory=is_strict)

    @property
    def name(self) -> str:
        """The start of the names of saved statistics."""
        return "group_norm" if self.axes.grouped else "batch_norm"

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """The kernels of the forward and the backward pass."""
        return (GROUP_FWD, GROUP_BWD) if self.axes.grouped else (BATCH_FWD, BATCH_BWD)

    def _options(self) -> dict[str, Any]:
        options = {"inner": self.axes.inner, "relu": self.activation == "relu"}
        if self.axes.grouped:
            options["silu"] = self.activation == "silu"
        return {**options, "implementation": self.implementation}

    @property
    def _axis_names(self) -> dict[str, Any]:
        return {"n": self.axis_name} if self.axis_name else {}

    def _forward_operands(self, x: Any, residual: Any, *others: Any) -> tuple[Any, ...]:
        """The operands of the forward kernel: only batch norm's has a residual."""
        return (x, *others) if self.axes.grouped else (x, residual, *others)

    def prepared(self, *operands: Any) -> tuple[Any, ...]:
        """Gives x, residual, scale, bias, mean, rstd and delta types that fit together."""
        present = self._forward_operands(*operands)
        x, *others = prepare(self.kernels[0], *present, inner=self.axes.inner)
        return (x, None, *others) if self.axes.grouped else (x, *others)

    def forward(self, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
        """Returns y, mean, variance, rstd and delta."""
        operands = self._forward_operands(x, residual, scale, bias, None, None, None)
        options = {**self._options(), "epsilon": np.float64(self.epsilon), "strict": self.strict}
        return invoke(self.kernels[0], *operands, axis_names=self._axis_names, **options)

    def apply(
        self, x: Any, residual: Any, scale: Any, bias: Any, mean: Any, rstd: Any, delta: Any
    ) -> jax.Array:
        """Returns y, computed with given statistics."""
        operands = match_vma(x, residual, scale, bias, mean, rstd, delta)
        options = {**self._options(), "epsilon": np.float64(self.epsilon), "strict": self.strict}
        present = self._forward_operands(*operands)
        return invoke(self.kernels[0], *present, skip=_STATISTICS, **options)[0]

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
        plain = self.activation is None
        given, skip = (dy, x, y), [] if residual and not plain else ["dresidual"]
        if self.axes.grouped:
            given, skip = (dy, x), list(_SUMS_OF_GROUP)
        found = invoke(
            self.kernels[1], *given, scale, bias, *statistics, None, None,
            skip=skip, dtypes=dtypes, axis_names=self._axis_names, **self._options(),
        )  # fmt: skip
        named = dict(zip(self.kernels[1].results, found, strict=True))
        dscale, dbias = (
            named[name].astype(dtypes[name]) if name in dtypes else None for name in _SUMS
        )
        return named["dx"], dy if residual and plain else named.get("dresidual"), dscale, dbias


@dataclasses.dataclass(frozen=True)
class _Normalize(Operation):
    """`ChannelNorm.forward` with a derivative, for the operands x, residual, scale and bias."""

    norm: ChannelNorm

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
        names = [f"{self.norm.name}_{name}" for name in _GIVEN]
        statistics = tuple(map(checkpoint_name, (mean, *rest), names))
        # An activation's derivative needs the activation's argument, computed from x. With a
        # residual, relu's derivative needs the sign of y instead.
        saved_y, saved_bias = (y, None) if residual is not None else (None, bias)
        if self.norm.activation is None:
            saved_y = saved_bias = None
        parameters = {"dscale": scale, "dbias": bias}
        dtypes = tuple((n, p.dtype.name) for n, p in parameters.items() if p is not None)
        linear = _Tangents(self.norm, dtypes)
        derivatives = linear(x, saved_y, scale, saved_bias, *statistics, *tangents)
        return results, [*derivatives, None]


@dataclasses.dataclass(frozen=True)
class _Tangents(Operation):
    """The tangents of all results of `_Normalize` but delta. The transpose is the backward pass.

    First come the operands of `ChannelNorm.backward`: x, y, scale, bias, mean, rstd and delta. Then
    come the tangents of `_Normalize`'s operands.
    """

    norm: ChannelNorm
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
        options = {"activation": norm.activation, "axis_name": norm.axis_name}
        return reference.tangents(norm.axes, *operands, **options)

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


def _normalized(norm: ChannelNorm, x: Any, residual: Any, scale: Any, bias: Any) -> Any:
    """Returns y, mean, variance and rstd."""
    operands = norm.prepared(x, residual, scale, bias, None, None, None)[:4]
    # JAX itself differentiates the reference.
    by = norm.forward if norm.implementation == "xla" else _Normalize(norm)
    y, *statistics, _ = by(*operands)
    return reshard_like(y, x), *statistics


@functools.partial(jax.jit, static_argnames="norm")
def normalize(x: Any, residual: Any, scale: Any, bias: Any, *, norm: ChannelNorm) -> Any:
    """Returns y, and the mean and variance of the batch. Only y is differentiable."""
    y, mean, variance, _ = _normalized(norm, x, residual, scale, bias)
    return y, lax.stop_gradient(mean), lax.stop_gradient(variance)


@functools.partial(jax.jit, static_argnames="norm")
def forward(x: Any, scale: Any, bias: Any, *, norm: ChannelNorm) -> Any:
    """Returns y, mean and rstd."""
    y, mean, _, rstd = _normalized(norm, x, None, scale, bias)
    return y, mean, rstd


@functools.partial(jax.jit, static_argnames="norm")
def apply(x: Any, mean: Any, variance: Any, scale: Any, bias: Any, *, norm: ChannelNorm) -> Any:
    """Returns y, computed with given statistics."""
    rstd = inverse_deviation(variance, norm.epsilon, norm.strict)
    operands = norm.prepared(x, None, scale, bias, mean, rstd, None)
    return reshard_like(norm.apply(*operands), x)


def _gradients(
    norm: ChannelNorm,
    dtypes: dict[str, Any],
    dy: Any,
    x: Any,
    y: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
) -> tuple[Any, ...]:
    """Returns dx, dresidual, dscale and dbias. If y is given, the norm added a residual."""
    residual = y is not None
    # Only an activation's derivative uses y or the bias. It uses the bias if y is not given.
    y, bias = (y, None if residual else bias) if norm.activation else (None, None)
    dy, x, y, scale, bias, mean, rstd = match_vma(dy, x, y, scale, bias, mean, rstd)
    dx, dresidual, *sums = norm.backward(
        dy, x, y, scale, bias, (mean, rstd, None), dtypes, residual=residual
    )
    return reshard_like(dx, x), reshard_like(dresidual, x) if residual else None, *sums


@functools.partial(jax.jit, static_argnames=("norm", "dtypes"))
def differentiate(*operands: Any, norm: ChannelNorm, dtypes: tuple[tuple[str, Any], ...]) -> Any:
    """Returns dx, dscale and dbias, and also dresidual if y is given.

    The operands are dy, x, y, scale, bias, mean and rstd.
    """
    dx, dresidual, *sums = _gradients(norm, dict(dtypes), *operands)
    return dx, *sums, *([] if operands[2] is None else [dresidual])


# --- Group norm: the samples are mapped ----------------------------------------------------------


def _split(x: Any, axis: int, groups: int) -> Any:
    """Splits the channels, x's axis `axis`, into the axes of groups and of a group's channels.

    On an Explicit mesh, the channels are gathered if a device does not have whole groups.
    """
    if x is None:
        return None
    sharding, channels = jax.typeof(x).sharding, x.shape[axis]
    spec = list(padded(sharding.spec, x.ndim))
    if groups % math.prod(sharding.mesh.shape[name] for name in mesh_axes([spec[axis]])):
        spec[axis] = None
        x = jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec)))
    sizes = groups, channels // max(1, groups)
    return jnp.reshape(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def _wide(parameter: Any, x: Any, groups: int) -> Any:
    """A parameter by group, in the accumulation dtype: gradients of samples are added in it."""
    wide = None if parameter is None else parameter.astype(accum_dtype(x.dtype))
    return _split(wide, 0, groups)


@functools.partial(jax.jit, static_argnames=("norm", "groups"))
def normalize_samples(x: Any, scale: Any, bias: Any, *, norm: ChannelNorm, groups: int) -> Any:
    """Returns y, and the mean and rstd of each sample and group."""
    parts = _split(x, x.ndim - 1 - norm.axes.inner, groups)
    of_sample = jax.vmap(functools.partial(_normalized, norm), (0, None, None, None))
    y, mean, _, rstd = of_sample(parts, None, _wide(scale, x, groups), _wide(bias, x, groups))
    return reshard_like(jnp.reshape(y, x.shape), x), mean, rstd


@functools.partial(jax.jit, static_argnames=("norm", "groups", "dtypes"))
def differentiate_samples(
    dy: Any,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    *,
    norm: ChannelNorm,
    groups: int,
    dtypes: tuple[tuple[str, Any], ...],
) -> Any:
    """Returns dx, dscale and dbias."""
    axis, wide = x.ndim - 1 - norm.axes.inner, accum_dtype(x.dtype).name
    of_sample = jax.vmap(
        functools.partial(_gradients, norm, {name: wide for name, _ in dtypes}),
        (0, 0, None, None, None, 0, 0),
    )
    dx, _, *sums = of_sample(
        _split(dy, axis, groups), _split(x, axis, groups), None,
        _wide(scale, x, groups), _wide(bias, x, groups), mean, rstd,
    )  # fmt: skip
    dscale, dbias = (
        None if s is None else jnp.sum(s, 0).reshape(-1).astype(dict(dtypes)[name])
        for name, s in zip(_SUMS, sums, strict=True)
    )
    return reshard_like(jnp.reshape(dx, x.shape), x), dscale, dbias
