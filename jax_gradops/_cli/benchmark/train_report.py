"""What `bench --suite train` shows and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_gradops._cli.benchmark.timing import Timing
from jax_gradops._cli.benchmark.train_measuring import Result, Variant

_COLUMNS = {
    "case": 32, "variant": 12, "ms a step": 24, "rate": 15, "memory GB": 10,
    "over stock": 22, "losses off by": 14, "kernel calls": 0,
}  # fmt: skip


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
    }


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
            _print_curve("stock off by, with its first parameters rounded", result.noise)
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
        ", ".join(calls) or "none",
    ]


def _print(row: Sequence[str]) -> None:
    first, second, *others, last = zip(row, _COLUMNS.values(), strict=True)
    left = "  ".join(f"{text:<{width}}" for text, width in (first, second))
    right = "  ".join(f"{text:>{width}}" for text, width in others)
    print(f"{left}  {right}  {last[0]}", flush=True)


def _print_curve(what: str, values: Sequence[float]) -> None:
    print(f"  {what}: {' '.join(f'{value:.4g}' for value in values)}", flush=True)
