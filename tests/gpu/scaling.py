"""Weak scaling of the demo's training step over one host's GPUs: python -P tests/gpu/scaling.py.

The model is a character model of the size of GPT-2 small, with data parallelism. The number of
windows per device is fixed. The script also compares the first losses of one global batch on 1, 2,
4, … devices. They must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax

from jax_gradops._tools.demo import meshes, settings, text
from jax_gradops._tools.demo.program import Program

WINDOWS = 16  # per device, of 1,024 characters each
MODEL: dict[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "context": 1024, "precision": "mixed",
}  # fmt: skip
# A small model, so that losses can be compared in float32.
SMALL: dict[str, Any] = {"width": 128, "layers": 2, "heads": 4, "context": 128, "batch": 16}


def program(given: dict[str, Any], corpus: text.Corpus, implementation: str, n: int) -> Program:
    chosen = settings.new_run({"steps": 1000} | given, "gpu")
    mesh = meshes.make_mesh({"data": n, "fsdp": 1}, chosen.batch, "gpu")
    return Program(chosen, corpus, implementation, mesh=mesh)


def measure(program: Program, steps: int, repeats: int) -> list[float]:
    """Milliseconds per step of each repeat."""
    state = program.initial_state()
    times = []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(steps):
            state, metrics = program.train_step(state)
        jax.block_until_ready((state, metrics))
        if repeat:  # the first one loads kernels
            times.append((time.perf_counter() - begin) / steps * 1e3)
    return times


def first_losses(program: Program, steps: int = 10) -> list[float]:
    state = program.initial_state()
    losses = []
    for _ in range(steps):
        state, metrics = program.train_step(state)
        losses.append(float(metrics.loss))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the numbers")
    args = parser.parse_args()
    counts = [n for n in (1, 2, 4, 8) if n <= len(jax.devices("gpu"))]
    print(f"jax {jax.__version__}, {len(jax.devices('gpu'))} x {jax.devices('gpu')[0].device_kind}")

    corpus = text.load_corpus(None, SMALL["context"])
    losses = {n: first_losses(program(SMALL, corpus, "ffi", n)) for n in counts}
    for n in counts[1:]:
        worst = max(abs(a / b - 1) for a, b in zip(losses[n], losses[1], strict=True))
        print(f"losses of 10 steps on {n} devices: within {worst:.1e} of those on 1")
        assert worst < 1e-4

    corpus = text.load_corpus(None, MODEL["context"])
    corpus = dataclasses.replace(corpus, validation=corpus.validation[: 2 * MODEL["context"]])
    rows = []
    for implementation in ("ffi", "xla"):
        for n in counts:
            given = MODEL | {"batch": WINDOWS * n}
            run = program(given, corpus, implementation, n)
            hlo = run.train_step_hlo()
            assert " all-gather" not in hlo and " all-to-all" not in hlo
            times = measure(run, steps=10, repeats=5)
            ms = statistics.median(times)
            tokens = WINDOWS * n * MODEL["context"] / ms * 1e3
            rows.append(
                {"implementation": implementation, "devices": n, "ms": times, "tokens/s": tokens}
            )
            base = next(r["tokens/s"] for r in rows if r["implementation"] == implementation)
            print(
                f"{implementation}  {n} devices  {ms:7.2f} ms a step ({min(times):.2f} to "
                f"{max(times):.2f})  {tokens:12,.0f} tokens/s  {tokens / base / n:6.1%} of {n} x 1",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
