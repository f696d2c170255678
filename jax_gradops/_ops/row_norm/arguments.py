"""How norms see their arguments: rows of one normalised axis, and flat parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._kernel.array_types import accum_dtype, gathered, reshard_like


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `op`, by the shape of `x`, which is called `name` there."""

    op: str
    name: str
    x: jax.Array
    begin: int  # the first normalised axis

    @classmethod
    def of(cls, op: str, name: str, value: Any, begin_norm_axis: Any) -> Arguments:
        """Checks x and the axis."""
        x = _checks.array(op, name, value)
        if x.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one axis, got a scalar")
        return cls(op, name, x, _checks.axis(op, "begin_norm_axis", begin_norm_axis, x.ndim))

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.x.shape[self.begin :]

    @property
    def accum_dtype(self) -> jnp.dtype:
        return accum_dtype(self.x.dtype)

    def flat(self, x: jax.Array) -> jax.Array:
        """An array of x's shape as [..., all normalised axes]."""
        if self.begin == x.ndim - 1:
            return x
        shape = (*x.shape[: self.begin], math.prod(self.normalized_shape))
        return gathered(x, self.begin).reshape(shape)

    def whole(self, y: jax.Array) -> jax.Array:
        """A result of `flat`'s shape in x's."""
        return y if y.shape == self.x.shape else reshard_like(y.reshape(self.x.shape), self.x)

    def like_x(self, name: str, value: Any) -> jax.Array:
        """An array of x's shape and dtype, flat."""
        return self.flat(_checks.like(self.op, name, value, self.name, self.x))

    def with_cotangent(self, value: Any) -> tuple[Arguments, jax.Array]:
        """Arguments and a flat dy of one dtype that holds the values of x and dy."""
        dy = _checks.like(self.op, "dy", value, self.name, self.x, any_dtype=True)
        dtype = max(self.x.dtype, dy.dtype, key=lambda dtype: dtype.itemsize)
        if self.x.dtype.itemsize == dy.dtype.itemsize and self.x.dtype != dy.dtype:
            dtype = self.accum_dtype  # float16 and bfloat16
        wide = dataclasses.replace(self, x=self.x.astype(dtype))
        return wide, self.flat(dy.astype(dtype))

    def parameter(self, name: str, value: ArrayLike | None) -> jax.Array | None:
        """A parameter of the normalised axes, or of the last one alone, flat."""
        if value is None:
            return None
        parameter = gathered(_checks.array(self.op, name, value), 0)
        shape, per_channel = self.normalized_shape, self.x.shape[-1:]
        if parameter.shape not in (shape, per_channel):
            expected = f"{self.name}.shape[begin_norm_axis:] = {shape}"
            if per_channel != shape:
                expected += f" or ({self.name}.shape[-1],) = {per_channel}"
            raise ValueError(f"{self.op}: {name} must have shape {expected}, got {parameter.shape}")
        if parameter.shape != shape and parameter.dtype.itemsize < self.accum_dtype.itemsize:
            # Its gradient is a sum over the other normalised axes too, and is rounded after it.
            parameter = parameter.astype(self.accum_dtype)
        return jnp.broadcast_to(parameter, shape).reshape(-1)

    def gradient(self, flat: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The gradient of a parameter of this shape and dtype, from that of a flat one."""
        whole = flat.reshape(self.normalized_shape)
        return jnp.sum(whole, tuple(range(whole.ndim - len(shape)))).astype(dtype)

    def statistic(self, name: str, value: ArrayLike) -> jax.Array:
        """One number a row, also with trailing axes of size 1, in the accumulation dtype."""
        statistic = _checks.array(self.op, name, value)
        rows = self.x.shape[: self.begin]
        kept = (*rows, *[1] * len(self.normalized_shape))
        if statistic.shape not in (rows, kept):
            raise ValueError(
                f"{self.op}: {name} must have one number for each row, in shape "
                f"{self.name}.shape[:begin_norm_axis] = {rows} or {kept}, got {statistic.shape}"
            )
        return statistic.reshape(rows).astype(self.accum_dtype)
