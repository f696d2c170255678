"""Checks and reshapes the arguments of norms: one normalised axis, and flat parameters."""

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
    """Checks the arguments of one call of `op` against its main array x. `op` calls x `name`."""

    op: str
    name: str
    x: jax.Array
    begin: int  # the first normalised axis

    @classmethod
    def of(cls, op: str, name: str, value: Any, begin_norm_axis: Any) -> Arguments:
        """Checks x and the first normalised axis."""
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
        """Merges the normalised axes of an array of x's shape into one axis."""
        if self.begin == x.ndim - 1:
            return x
        shape = (*x.shape[: self.begin], math.prod(self.normalized_shape))
        return gathered(x, self.begin).reshape(shape)

    def whole(self, y: jax.Array) -> jax.Array:
        """The inverse of `flat`: gives a result x's shape."""
        return y if y.shape == self.x.shape else reshard_like(y.reshape(self.x.shape), self.x)

    def like_x(self, name: str, value: Any) -> jax.Array:
        """Checks an array of x's shape and dtype, and makes it flat."""
        return self.flat(_checks.like(self.op, name, value, self.name, self.x))

    def with_cotangent(self, value: Any) -> tuple[Arguments, jax.Array]:
        """Arguments and a flat dy, both in one dtype that can hold the values of x and dy."""
        dy = _checks.like(self.op, "dy", value, self.name, self.x, any_dtype=True)
        dtype = max(self.x.dtype, dy.dtype, key=lambda dtype: dtype.itemsize)
        if self.x.dtype.itemsize == dy.dtype.itemsize and self.x.dtype != dy.dtype:
            dtype = self.accum_dtype  # float16 and bfloat16
        wide = dataclasses.replace(self, x=self.x.astype(dtype))
        return wide, self.flat(dy.astype(dtype))

    def parameter(self, name: str, value: ArrayLike | None) -> jax.Array | None:
        """A flat parameter. It is given for all normalised axes, or for the last axis alone."""
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
            # The gradient is also summed over the other normalised axes, and then rounded once.
            parameter = parameter.astype(self.accum_dtype)
        return jnp.broadcast_to(parameter, shape).reshape(-1)

    def gradient(self, flat: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The gradient of a parameter of this shape and dtype, from the flat gradient."""
        whole = flat.reshape(self.normalized_shape)
        return jnp.sum(whole, tuple(range(whole.ndim - len(shape)))).astype(dtype)

    def statistic(self, name: str, value: ArrayLike) -> jax.Array:
        """One number per row, in the accumulation dtype. Trailing axes of size 1 are dropped."""
        statistic = _checks.array(self.op, name, value)
        rows = self.x.shape[: self.begin]
        kept = (*rows, *[1] * len(self.normalized_shape))
        if statistic.shape not in (rows, kept):
            raise ValueError(
                f"{self.op}: {name} must have one number for each row, in shape "
                f"{self.name}.shape[:begin_norm_axis] = {rows} or {kept}, got {statistic.shape}"
            )
        return statistic.reshape(rows).astype(self.accum_dtype)
