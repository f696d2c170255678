"""Times the gradient of an embedding's table, for several distributions of tokens.

python -P benchmarks/embedding.py [--shape TOKENSxROWSxFEATURES] [--dtype float32] [--json FILE].
Prints one row for each shape, distribution of tokens and way to compute it: this library, XLA in
the dtype of dy, XLA in float32, and sorted tokens with `jax.ops.segment_sum`. The error is the
largest one, relative to the largest gradient.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops.backward import embedding_backward


class Shape(NamedTuple):
    """Sizes: tokens, rows of the table, features."""

    tokens: int
    rows: int
    features: int


SHAPES = Shape(32768, 50304, 768), Shape(8192, 128256, 2048), Shape(131072, 32000, 1024)
SECONDS, REPEATS = 0.01, 7


def tokens_of(kind: str, shape: Shape) -> np.ndarray:
    """Tokens of a distribution. The frequent ones are anywhere in the table."""
    rng = np.random.default_rng(0)
    rank = np.arange(shape.rows)
    weights = {"text": 1 / (rank + 2.7), "zipf 1.2": (rank + 1.0) ** -1.2}.get(kind, 1.0 + 0 * rank)
    tokens = rng.choice(shape.rows, shape.tokens, p=weights / weights.sum())
    if kind == "one token":
        tokens[:] = 17
    tokens = rng.permutation(shape.rows)[tokens]
    if kind == "half padding":
        tokens[rng.random(shape.tokens) < 0.5] = 0
    return tokens.astype(np.int32)


def by_xla(dtype: Any, dy: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    """XLA's addition of rows at indices, in a dtype."""
    zeros = jnp.zeros((rows, dy.shape[-1]), dtype)
    return zeros.at[tokens].add(dy.astype(dtype), mode="drop").astype(jnp.float32)


def by_sorting(dtype: Any, dy: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    """Sorted tokens. XLA then adds up neighbours."""
    order = jnp.argsort(tokens)
    parts = dy[order].astype(dtype)
    return jax.ops.segment_sum(parts, tokens[order], rows, indices_are_sorted=True)


def by_library(dtype: Any, dy: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    """The kernel of the library."""
    return embedding_backward(dy, tokens, rows, dtype=dtype)


def microseconds(functions: Sequence[Callable[[], jax.Array]]) -> list[float]:
    """The median time of each function. They take turns, after one round for warming up."""
    found: list[list[float]] = [[] for _ in functions]
    for repeat in range(1 + REPEATS):
        for function, times in zip(functions, found, strict=True):
            result = jax.block_until_ready(function())
            start = time.perf_counter()
            calls = max(1, int(SECONDS / times[-1])) if times else 1
            for _ in range(calls):
                result = function()  # the result of the call before is free again
            jax.block_until_ready(result)
            taken = (time.perf_counter() - start) / calls
            if repeat:
                times.append(taken)
    return [1e6 * float(np.median(times)) for times in found]


def rows_of_table(shapes: Sequence[Shape], dtype: Any) -> Iterator[dict[str, Any]]:
    """The rows that are printed."""
    ways = {
        "jax_gradops, float32 table": (by_library, jnp.float32),
        f"jax_gradops, {dtype} table": (by_library, dtype),
        "XLA, float32": (by_xla, jnp.float32),
        f"XLA, {dtype}": (by_xla, dtype),
        "sorted, float32": (by_sorting, jnp.float32),
    }
    for shape in shapes:
        dy = jax.random.normal(jax.random.key(0), (shape.tokens, shape.features), dtype)
        for kind in ("uniform", "text", "zipf 1.2", "half padding", "one token"):
            tokens = tokens_of(kind, shape)
            exact = np.zeros((shape.rows, shape.features))
            np.add.at(exact, tokens, np.asarray(dy, np.float64))
            runs = [
                functools.partial(jax.jit(way, static_argnums=(0, 3)), to, dy, jnp.asarray(tokens))
                for way, to in ways.values()
            ]
            runs = [functools.partial(run, shape.rows) for run in runs]
            for name, run, time_us in zip(ways, runs, microseconds(runs), strict=True):
                found = run()
                error = np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()
                yield {
                    **shape._asdict(),
                    "distribution": kind,
                    "way": name,
                    "microseconds": round(time_us, 1),
                    "GB/s": round((dy.nbytes + found.nbytes) / time_us / 1e3),
                    "error": f"{error:.1e}",
                }


def main() -> None:
    """Prints the table. Writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", help="for example 8192x50304x768 (default: three shapes)")
    parser.add_argument("--dtype", default="bfloat16", help="of dy (default: bfloat16)")
    parser.add_argument("--json", help="the file to write")
    args = parser.parse_args()
    shapes = [Shape(*map(int, args.shape.split("x")))] if args.shape else SHAPES
    device = jax.devices()[0].device_kind
    found = []
    for row in rows_of_table(shapes, args.dtype):
        found.append(row)
        print(*(f"{value!s:>12}" for value in row.values()), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, "jax": jax.__version__, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
