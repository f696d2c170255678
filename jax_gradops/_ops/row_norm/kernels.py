"""The kernels of layer norm and RMS norm, and their differentiation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_gradops._implementation import Implementation, is_strict
from jax_gradops._kernel.array_types import match_vma, reshard_like
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.primitive import Operands, Operation, Unknown
from jax_gradops._kernel.spec import Kernel, Result, column_sum_workspace
from jax_gradops._ops.row_norm import reference as reference

#: What is saved for the backward pass: the op's input and statistics, or its output and rstd.
Residuals: TypeAlias = Literal["input", "output"]


def _workspace(groups: int, sizes: Mapping[str, int], sums: int) -> tuple[int, ...]:
    """Scratch of column sums. CUDA's kernels for wide rows need one value per row at least.

    ffi/cuda/row_norm/stream.cuh has these kernels.
    """
    shape = column_sum_workspace(groups, sizes, sums)
    rows, features = sizes["n"], sizes["d"]
    if shape == (0,) or not all(isinstance(size, int) for size in (*shape, rows)):
        return shape
    least = math.ceil(rows / (features * sums)) if features >= 2048 else 1
    return groups, max(shape[1], least), sums, features


FWD = Kernel(
    name="row_norm_fwd",
    operands={"x": "nd", "residual": "nd", "residual_bias": "d", "scale": "d", "bias": "d"},
    results={
        "y": Result("nd", "x"),
        "sum": Result("nd", "x"),
        "mean": Result("n"),
        "rstd": Result("n"),
    },
    reference=reference.forward,
    whole="d",
)
#: With the attribute ``from_output``, the operand x is the op's output y.
BWD = Kernel(
    name="row_norm_bwd",
    operands={
        "dy": "nd", "x": "nd", "dsum": "nd", "scale": "d", "bias": "d", "mean": "n", "rstd": "n",
    },
    results={
        "dx": Result("nd", "x"),
        "dscale": Result("d"),
        "dbias": Result("d"),
        "dresidual_bias": Result("d"),
    },
    reference=reference.backward,
    whole="d",
    workspace=_workspace,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which norm to compute, and its static parameters."""

    centered: bool  # layer norm, else RMS norm
    epsilon: float = -1.0  # negative: not known (a gradient from saved statistics)
    scale_offset: float = 0.0
    residuals: Residuals = "input"
    implementation: Implementation = None
    strict: bool = dataclasses.field(default_factory=is_strict)

    def prepare(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        residual_bias: jax.Array | None,
        scale: jax.Array | None,
        bias: jax.Array | None,
    ) -> tuple[Any, ...]:
        """The operands of `forward`, with matching shardings and `shard_map` types."""
        return prepare(FWD, x, residual, residual_bias, scale, bias)

    def forward(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        residual_bias: jax.Array | None,
        scale: jax.Array | None,
        bias: jax.Array | None,
        statistics: bool = True,
    ) -> tuple[Any, ...]:
        """Returns y, the sum (None without a residual), mean (None for RMS norm) and rstd.

        Without `statistics`, mean and rstd are None.
        """
        skip = ["sum"] if residual is None else []
        if not statistics:
            skip += ["mean", "rstd"]
        elif not self.centered:
            skip += ["mean"]
        return invoke(
            FWD,
            x,
            residual,
            residual_bias,
            scale,
            bias,
            skip=skip,
            implementation=self.implementation,
            centered=self.centered,
            epsilon=np.float64(self.epsilon),
            scale_offset=np.float64(self.scale_offset),
            strict=self.strict,
        )

    def backward(
        self,
        dy: jax.Array,
        dsum: jax.Array | None,
        saved: jax.Array,
        scale: jax.Array | None,
        bias: jax.Array | None,
        mean: jax.Array | None,
        rstd: jax.Array,
        dtypes: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """Returns dx, dscale, dbias and dresidual_bias.

        The gradient of a parameter is None if `dtypes` has no entry for it. `saved` is the array
        that was normalised, or y.
        """
        from_output = self.residuals == "output"
        return invoke(
            BWD,
            dy,
            saved,
            dsum,
            scale,
            bias if from_output else None,
            mean,
            rstd,
            skip=[n for n in ("dscale", "dbias", "dresidual_bias") if n not in dtypes],
            dtypes=dtypes,
            implementation=self.implementation,
            centered=self.centered,
            from_output=from_output,
            scale_offset=np.float64(self.scale_offset),
            epsilon=np.float64(self.epsilon),
        )


# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Normalize(Operation):
    """`Norm.forward` with a derivative: from its operands to y, the sum, mean and rstd.

    Without `statistics`, mean and rstd are None. Only the derivative needs them. Writing them costs
    time: for short rows, they are as large as y.
    """

    norm: Norm
    statistics: bool = False

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        return self.norm.forward(*operands, statistics=self.statistics)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        if not self.statistics:
            results, derivatives = dataclasses.replace(self, statistics=True).jvp(
                operands, tangents
            )
            return [*results[:2], None, None], [*derivatives[:2], None, None]
        x, residual, residual_bias, scale, bias = operands
        y, total, mean, rstd = results = self(*operands)
        name = "layer_norm" if self.norm.centered else "rms_norm"
        rstd = checkpoint_name(rstd, f"{name}_rstd")
        if self.norm.residuals == "output":
            saved, mean = y, None
        else:
            saved = x if residual is None else total
            mean = None if mean is None else checkpoint_name(mean, f"{name}_mean")
        parameters = {"dscale": scale, "dbias": bias, "dresidual_bias": residual_bias}
        dtypes = tuple((n, p.dtype.name) for n, p in parameters.items() if p is not None)
        linear = _Tangents(self.norm, dtypes)
        derivatives = linear(saved, scale, bias, mean, rstd, *tangents)
        return results, [
            d if r is not None else None for d, r in zip(derivatives, results, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Tangents(Operation):
    """The tangents of `_Normalize`'s results. The transpose is the backward pass.

    The operands are the saved arrays (as in `Norm.backward`), then the tangents of `_Normalize`'s
    operands.
    """

    norm: Norm
    dtypes: tuple[tuple[str, str], ...]
    linear = (5, 6, 7, 8, 9)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        return reference.tangents(
            *operands,
            scale_offset=self.norm.scale_offset,
            centered=self.norm.centered,
            from_output=self.norm.residuals == "output",
        )

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        dy, dsum, dmean, drstd = cotangents
        if dy is None or dmean is not None or drstd is not None:
            return super().transpose(operands, cotangents)
        known, tangents = operands[:5], operands[5:]
        unknown = [isinstance(t, Unknown) for t in tangents]
        names = (None, None, "dresidual_bias", "dscale", "dbias")
        wanted = [name for name, u in zip(names, unknown, strict=True) if u]
        dtypes = {name: dtype for name, dtype in self.dtypes if name in wanted}
        saved, scale, bias, mean, rstd = known
        dx, dscale, dbias, dresidual_bias = self.norm.backward(
            dy, dsum, saved, scale, bias, mean, rstd, dtypes
        )
        found = (dx, dx, dresidual_bias, dscale, dbias)
        return [*[None] * 5, *(f if u else None for f, u in zip(found, unknown, strict=True))]


# --- What is traced: x is [..., *normalized_shape flattened], parameters are flat -----------------


@functools.partial(jax.jit, static_argnames="norm")
def normalize(
    x: jax.Array,
    residual: jax.Array | None,
    residual_bias: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    norm: Norm,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns y and the sum (None without a residual). Both are differentiable."""
    operands = norm.prepare(x, residual, residual_bias, scale, bias)
    results: Any
    if norm.implementation == "xla":  # differentiated by JAX itself
        results = norm.forward(*operands)[:2]
    else:
        results = _Normalize(norm)(*operands)[:2]
    y, total = results
    return reshard_like(y, x), None if total is None else reshard_like(total, x)


@functools.partial(jax.jit, static_argnames="norm")
def forward(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, norm: Norm
) -> tuple[Any, ...]:
    """Returns y, mean (None for RMS norm) and rstd."""
    operands = norm.prepare(x, None, None, scale, bias)
    by = norm.forward if norm.implementation == "xla" else _Normalize(norm, statistics=True)
    y, _, mean, rstd = by(*operands)
    return reshard_like(y, x), mean, rstd


@functools.partial(jax.jit, static_argnames="norm")
def forward_by_statistics(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    *,
    norm: Norm,
) -> jax.Array:
    """Layer norm with given statistics."""
    spread, _, _, scale, bias = norm.prepare(x, None, None, scale, bias)
    y = reference.layer_norm_by_statistics(
        spread, scale, bias, mean, rstd, scale_offset=norm.scale_offset
    )
    return reshard_like(y, x)


@functools.partial(jax.jit, static_argnames=("norm", "dtypes"))
def differentiate(
    dy: jax.Array,
    saved: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    *,
    norm: Norm,
    dtypes: tuple[tuple[str, Any], ...],
) -> tuple[Any, ...]:
    """Returns dx, dscale and dbias of `Norm.backward`."""
    operands: list[Any] = list(match_vma(dy, saved, scale, bias, mean, rstd))
    dx, dscale, dbias, _ = norm.backward(operands[0], None, *operands[1:], dtypes=dict(dtypes))
    return reshard_like(dx, saved), dscale, dbias
