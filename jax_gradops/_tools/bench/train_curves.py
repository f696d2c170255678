"""Loss curves: their differences, and how large these may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A curve may differ by _TIMES_NOISE times the change from rounding the first parameters, plus
# _SLACK.
_TIMES_NOISE = 4.0
_SLACK = 2.0**-8


def difference(expected: Sequence[float], got: Sequence[float]) -> np.ndarray:
    """The relative difference of each step's loss; infinite if a loss is not finite."""
    wanted = np.asarray(expected, np.float64)
    found = np.abs(np.asarray(got, np.float64) - wanted) / np.abs(wanted)
    return np.where(np.isfinite(found), found, np.inf)


def mistakes(expected: Sequence[float], noise: np.ndarray, got: Sequence[float]) -> str:
    """The mistake in a loss curve; empty if there is none.

    Differences grow from step to step. The limit of a step is therefore made from the largest
    `noise` up to this step.
    """
    if not np.all(np.isfinite(expected)):
        return "losses are not finite"
    allowed = _TIMES_NOISE * np.maximum.accumulate(noise) + _SLACK
    found = difference(expected, got)
    over = np.flatnonzero(~(found <= allowed))
    if not over.size:
        return ""
    i = int(over[0])
    return (
        f"the loss of step {i + 1} is {got[i]:.6g}, stock's {expected[i]:.6g}: off by "
        f"{found[i]:.2g}, and roundings explain {allowed[i]:.2g}"
    )
