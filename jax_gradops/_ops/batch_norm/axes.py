"""The axes of batch norm and group norm: which axes of x a statistic or a parameter has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of x: rows, then channels, then `inner` axes.

    In batch norm, the channels are one axis. Each channel has a statistic. In group norm
    (`grouped`), x is one sample. Its channels are two axes: the groups, and the channels of a
    group. Each group has a statistic. A parameter has both axes.
    """

    inner: int
    grouped: bool = False

    @property
    def statistic(self) -> str:
        """The axes of a statistic, in the kernels' letters."""
        return "g" if self.grouped else "d"

    @property
    def parameter(self) -> str:
        """The axes of a parameter, in the kernels' letters."""
        return "gc" if self.grouped else "d"

    def _others(self, x: jax.Array, letters: str) -> list[int]:
        """The axes of x that an array with these letters lacks."""
        first = x.ndim - self.inner - len(self.parameter)
        own = range(first, first + len(letters))
        return [i for i in range(x.ndim) if i not in own]

    def along_parameter(self, parameter: jax.Array, x: jax.Array) -> jax.Array:
        """`parameter` with x's rank. JAX can be set to refuse rank promotion."""
        return jnp.expand_dims(parameter, self._others(x, self.parameter))

    def along_statistic(self, statistic: jax.Array, x: jax.Array) -> jax.Array:
        """`statistic` with x's rank."""
        return jnp.expand_dims(statistic, self._others(x, self.statistic))

    def sum_of_parameter(self, x: jax.Array) -> jax.Array:
        """The sum over the axes that a parameter lacks."""
        return jnp.sum(x, self._others(x, self.parameter))

    def sum_of_statistic(self, x: jax.Array) -> jax.Array:
        """The sum over the axes that a statistic lacks."""
        return jnp.sum(x, self._others(x, self.statistic))

    def terms(self, x: jax.Array) -> Any:
        """The number of elements that have one statistic, at least 1."""
        sizes = [x.shape[i] for i in self._others(x, self.statistic)]
        return at_least_one(math.prod(sizes), x.dtype)


def at_least_one(count: Any, dtype: Any) -> Any:
    """A number of elements, as a divisor."""
    if not isinstance(count, int):  # symbolic dimensions of jax.export
        return jnp.asarray(count).astype(dtype)
    return max(1, count)
