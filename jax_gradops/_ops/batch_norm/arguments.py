"""Checks the arguments of batch norm and group norm."""

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


# --- Group norm -----------------------------------------------------------------------------------


def checked_samples(op: str, value: Any, axis: Any) -> tuple[jax.Array, int]:
    """Returns x and its channel axis. Axis 0 of x has the samples."""
    x = _checks.array(op, "x", value)
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x must have at least two axes, of which the first has the samples and another "
            f"one has the channels; got shape {x.shape}"
        )
    channels = _checks.axis(op, "axis", axis, x.ndim)
    if channels == 0:
        raise ValueError(
            f"{op}: axis must not be x's axis 0, which has the samples, got {axis}. For one sample "
            "without an axis of samples, pass x[None]"
        )
    return x, channels


def group_count(op: str, value: Any, x: jax.Array, axis: int) -> int:
    """The number of groups. It divides the number of channels."""
    groups = _checks.count(op, "num_groups", value)
    if x.shape[axis] % groups:
        raise ValueError(
            f"{op}: num_groups must divide the number of channels x.shape[{axis}] = "
            f"{x.shape[axis]}, got {groups}. The channels' axis is {axis}: is that the `axis` that "
            "was meant?"
        )
    return groups


def per_group(op: str, name: str, value: Any, x: jax.Array, groups: int) -> jax.Array:
    """An array of one number per sample and group, in the accumulation dtype."""
    statistic = _checks.array(op, name, value)
    if statistic.shape != (x.shape[0], groups):
        raise ValueError(
            f"{op}: {name} must have one number per sample and group, in shape (x.shape[0], "
            f"num_groups) = ({x.shape[0]}, {groups}), got {statistic.shape}"
        )
    return statistic.astype(accum_dtype(x.dtype))
