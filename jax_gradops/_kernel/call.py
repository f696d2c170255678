"""What the core asks of a call: `rows.py` and `trees.py` have the two kinds of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from jax_gradops._kernel.array_types import Arrays, result_type
from jax_gradops._kernel.layout import Layout
from jax_gradops._kernel.shards import Collectives

#: Runs a call on one device's arrays: (call, *arrays) -> results.
Compute: TypeAlias = Callable[..., Arrays]


class HandlerCall(NamedTuple):
    """The arguments of one `jax.ffi.ffi_call`."""

    operands: Sequence[jax.Array]
    types: Sequence[Any]
    aliases: dict[int, int]
    attributes: Mapping[str, Any]
    # The position of each wanted result, and the shape that the caller gets. `types` has the
    # handler's shapes.
    wanted: Sequence[tuple[int, Sequence[int]]]


class Call(Protocol):
    """A kernel with all static values. The classes are hashable: frozen dataclasses.

    The arrays are the operands that are present. The results are the wanted ones.
    """

    @property
    def name(self) -> str:
        """The handler's name."""
        ...

    @property
    def groups(self) -> int:
        """How many leading group axes the arrays have. `jax.vmap` adds them."""
        ...

    @property
    def text(self) -> str:
        """All static values as text. The text is equal in every process."""
        ...

    @property
    def has_sums(self) -> bool:
        """Whether a result is reduced over axes that may be sharded."""
        ...

    def reference(self, *arrays: jax.Array) -> Arrays:
        """Computes the results in `jax.numpy`, without group axes."""
        ...

    def handler_call(self, arrays: Sequence[jax.Array]) -> HandlerCall:
        """The call of the native handler on one device's arrays."""
        ...

    def shared(self, arrays: Sequence[jax.Array]) -> list[bool]:
        """Which arrays lack the group axes: all groups share them."""
        ...

    def vmapped(
        self, size: int, arrays: Sequence[jax.Array], mapped: Sequence[bool]
    ) -> tuple[Call, list[jax.Array]]:
        """The call and arrays for one more mapped axis, the first axis of `mapped` arrays."""
        ...

    def layout(
        self, specs: Sequence[Any], ndims: Sequence[int], *, everywhere: bool = False
    ) -> Layout:
        """The shardings that the kernel can work with and that are nearest to the arrays' `specs`.

        With `everywhere`, each sum over shards is a sum over all devices.
        """
        ...

    def local(
        self, compute: Compute, layout: Layout, collectives: Collectives
    ) -> Callable[..., Arrays]:
        """The computation of one device, with sums over all devices."""
        ...

    def sharding_rule(self, ndims: Sequence[int], result_ndims: Sequence[int]) -> tuple[str, dict]:
        """The rule in Shardy's notation, and options of `custom_partitioning`.

        An example is ``n0 n1 d0, d0, d0 -> n0 n1 d0, n0 n1, n0 n1``.
        """
        ...


def scratch_type(like: jax.Array, shape: Sequence[int], dtype: jnp.dtype) -> Any:
    """The type of a workspace with elements as wide as `dtype`.

    Its elements are integers: jax_debug_nans would look for NaN in memory that was never written.
    """
    return result_type(like, shape, jnp.uint64 if dtype == jnp.float64 else jnp.uint32)
