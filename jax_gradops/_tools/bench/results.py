"""The results of the suites "ops" and "clip" as JSON."""

from __future__ import annotations

from typing import Any

from jax_gradops._tools.bench import peers
from jax_gradops._tools.bench.measuring import Result
from jax_gradops._tools.bench.timing import Timing


def as_json(result: Result) -> dict[str, Any]:
    """One case as JSON."""
    case = result.case
    return {
        "case": str(case),
        **case.describe(),
        "bytes": case.bytes,
        "calls": {"cold": result.plan.calls, "warm": result.plan.warm_calls},
        **{
            figure: {
                "peers": {name: _timing(result, figure, name, t) for name, t in timings.items()},
                "best_peer": best_peer(result, figure),
                "speed_up_over_best": speed_up(result, figure, best_peer(result, figure)),
                "speed_up_over_xla": speed_up(result, figure, "xla"),
            }
            for figure, timings in result.timings.items()
        },
        **({"steps": {n: _spread(t) for n, t in result.steps.items()}} if result.steps else {}),
        "errors": result.errors,
        "wrong": result.wrong,
        "failed": result.failed,
        "problem": result.problem,
    }


def of_copy(result: Result, figure: peers.Figure, name: str) -> float | None:
    """A peer's rate divided by the copy's rate. Both rates count the case's minimum of bytes."""
    timings = result.timings.get(figure, {})
    if figure == "latency" or name not in timings or "copy" not in timings:
        return None
    if _is_noise(timings[name]):
        return None
    # The copy moves two whole float32 arrays: a few bytes less than the case (`peers.CopyPeer`).
    return timings["copy"].us / timings[name].us


def best_peer(result: Result, figure: peers.Figure) -> str | None:
    """The fastest competitor with correct results."""
    others = {
        name: timing
        for name, timing in result.timings.get(figure, {}).items()
        if name not in ("ours", "copy", *result.wrong) and not _is_noise(timing)
    }
    return min(others, key=lambda n: others[n].us) if others else None


def speed_up(result: Result, figure: peers.Figure, peer: str | None) -> float | None:
    """A competitor's time divided by this library's time."""
    timings = result.timings.get(figure, {})
    if peer is None or not {"ours", peer} <= timings.keys():
        return None
    if _is_noise(timings["ours"]) or _is_noise(timings[peer]):
        return None
    return timings[peer].us / timings["ours"].us


def _is_noise(timing: Timing) -> bool:
    """Whether a difference of two times is zero or negative, and so only noise."""
    return timing.us <= 0


def _spread(timing: Timing) -> dict[str, Any]:
    return {
        "us": timing.us,
        "p20": timing.p20,
        "p80": timing.p80,
        "host_bound": timing.host_bound,
    }


def _timing(result: Result, figure: peers.Figure, name: str, timing: Timing) -> dict[str, Any]:
    has_rate = figure != "latency" and not _is_noise(timing)
    return {
        **_spread(timing),
        "gb_per_s": result.case.bytes / timing.us / 1e3 if has_rate else None,
        "fraction_of_copy": of_copy(result, figure, name),
    }
