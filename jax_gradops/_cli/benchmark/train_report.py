"""What `bench --suite train` shows and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_gradops._cli.benchmark.timing import Timing
from jax_gradops._cli.benchmark.train_measuring import Result, Variant
from jax_gradops._cli.benchmark.train_profile import Group

_COLUMNS = {
    "case": 32, "variant": 12, "ms a step": 24, "rate": 17, "memory GB": 10,
    "over stock": 22, "losses off by": 14, "compile s": 10, "kernel calls": 0,
}  # fmt: skip
_SHOWN_LOSSES = 11  # of a curve: the first, the last and some between; --json has all
_SHOWN_KERNELS = 20  # of a profile


def as_json(result: Result) -> dict[str, Any]:
    """One case."""
    return {
        **result.case.describe(),
        "unit": result.setup.unit,
        "variants": {name: _variant(result, v) for name, v in result.variants.items()},
        "noise": result.noise,
        "wrong": result.wrong,
        "failed": result.failed,
    }


def _variant(result: Result, variant: Variant) -> dict[str, Any]:
    time, over = variant.time, variant.over_stock
    return {
        "ms": time and dict(zip(("median", "p20", "p80"), _ms(time), strict=True)),
        "host_bound": time and time.host_bound,
        "examples_per_s": _rate(result, variant),
        "over_stock": over and dict(zip(("median", "p20", "p80"), over, strict=True)),
        "memory_bytes": variant.memory,
        "kernel_calls": variant.kernel_calls,
        "compile_seconds": variant.compile_seconds,
        "losses": variant.losses,
        "losses_off_by": variant.off,
        "profile": variant.profile and [_group(group) for group in variant.profile],
    }


def _group(group: Group) -> dict[str, Any]:
    kernels = [dataclasses.asdict(kernel) for kernel in group.kernels]
    return {"group": group.name, "calls": group.calls, "ms": group.ms, "kernels": kernels}


def _ms(time: Timing) -> tuple[float, float, float]:
    return time.us / 1e3, time.p20 / 1e3, time.p80 / 1e3


def _rate(result: Result, variant: Variant) -> float | None:
    return result.setup.examples / variant.time.us * 1e6 if variant.time else None


class Report:
    """Lines as they come."""

    def __init__(self, competitors: Sequence[str], cases: Sequence[object]) -> None:
        del competitors, cases

    def __enter__(self) -> Report:
        _print(list(_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, result: Result) -> None:
        """Shows a case that is done."""
        for name, variant in result.variants.items():
            _print(_row(result, name, variant))
        for name, variant in result.variants.items():
            if variant.losses:
                _print_curve(f"losses, {name}", variant.losses)
        if result.noise:
            what = f"stock off by up to {max(result.noise):.2g}, with its first parameters rounded"
            _print_curve(what, result.noise)
        for name, variant in result.variants.items():
            if variant.profile is not None:
                _print_profile(f"{result.case} {name}", variant.profile)
        if result.problem:
            print(f"  {result.problem}", flush=True)


def _row(result: Result, name: str, variant: Variant) -> list[str]:
    time, over, rate = variant.time, variant.over_stock, _rate(result, variant)
    calls = (f"{count} {kernel}" for kernel, count in variant.kernel_calls.items())
    return [
        str(result.case),
        name,
        "{:.2f}{mark} ({:.2f}–{:.2f})".format(*_ms(time), mark="*" * time.host_bound)
        if time
        else "-",
        f"{rate:.0f} {result.setup.unit}/s" if rate else "-",
        "-" if variant.memory is None else f"{variant.memory / 1e9:.2f}",
        "{:.3f}× ({:.3f}–{:.3f})".format(*over) if over else "-",
        "-" if variant.off is None else f"{variant.off:.1e}",
        f"{variant.compile_seconds:.1f}",
        ", ".join(calls) or "none",
    ]


def _print(row: Sequence[str]) -> None:
    first, second, *others, last = zip(row, _COLUMNS.values(), strict=True)
    left = "  ".join(f"{text:<{width}}" for text, width in (first, second))
    right = "  ".join(f"{text:>{width}}" for text, width in others)
    print(f"{left}  {right}  {last[0]}", flush=True)


def _print_curve(what: str, values: Sequence[float]) -> None:
    last = len(values) - 1
    count = min(_SHOWN_LOSSES, len(values))
    shown = [round(i * last / max(count - 1, 1)) for i in range(count)]
    where = f" (steps {', '.join(str(i + 1) for i in shown)})" if count <= last else ""
    print(f"  {what}{where}: {' '.join(f'{values[i]:.4g}' for i in shown)}", flush=True)


def _print_profile(what: str, groups: Sequence[Group]) -> None:
    """Groups of kernels, then the kernels that take longest."""
    total = sum(group.ms for group in groups)
    print(f"\n  {what}: kernels of a step{'' if groups else ': the trace has none'}")
    print(f"  {'calls':>9} {'ms':>9} {'%':>6}  group, or kernel [group]")
    kernels = [
        (f"{kernel.name} [{group.name}]", kernel) for group in groups for kernel in group.kernels
    ]
    kernels.sort(key=lambda line: -line[1].ms)
    for name, found in [*((group.name, group) for group in groups), *kernels[:_SHOWN_KERNELS]]:
        share = 100 * found.ms / max(total, 1e-9)
        print(f"  {found.calls:>9.1f} {found.ms:>9.3f} {share:>6.1f}  {name}", flush=True)
