"""Checks the arguments of batch norm: the channel axis, and arrays of one number per channel."""

from __future__ import annotations

from typing import Any

import jax

from jax_gradops import _checks
from jax_gradops._kernel.array_types import accum_dtype


def checked_x(op: str, value: Any, axis: Any, *, least: int = 2) -> tuple[jax.Array, int]:
    """Returns x and its channel axis. x must have at least `least` axes."""
    x = _checks.array(op, "x", value)
    if x.ndim < least:
        raise ValueError(
            f"{op}: x must have at least {'two axes' if least == 2 else 'one axis'}, of which one "
            f"has the channels; got shape {x.shape}"
        )
    return x, _checks.axis(op, "axis", axis, x.ndim)


def per_channel(op: str, name: str, value: Any, x: jax.Array, axis: int) -> Any:
    """An array of one number per channel, or None."""
    if value is None:
        return None
    parameter = _checks.array(op, name, value)
    if parameter.shape != (x.shape[axis],):
        raise ValueError(
            f"{op}: {name} must have one number a channel, in shape (x.shape[{axis}],) = "
            f"({x.shape[axis]},), got {parameter.shape}. The channels' axis is {axis}: is that the "
            "`axis` that was meant?"
        )
    return parameter


def statistic(op: str, name: str, value: Any, x: jax.Array, axis: int) -> jax.Array:
    """An array of one number per channel, in the accumulation dtype."""
    value = _checks.array(op, name, value)
    return per_channel(op, name, value, x, axis).astype(accum_dtype(x.dtype))
