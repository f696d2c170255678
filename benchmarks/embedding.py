"""Times the gradient of an embedding's table on a GPU, for several distributions of tokens.

python -P benchmarks/embedding.py [--json FILE]. Prints one row for each shape, distribution of
tokens and way to compute it: this library, XLA in the dtype of dy, and XLA in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
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
    zeros = jnp.zeros((rows, dy.shape[-1]), dtype)
    return zeros.at[tokens].add(dy.astype(dtype), mode="drop").astype(jnp.float32)


def by_library(dtype: Any, dy: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    return embedding_backward(dy, tokens, rows, dtype=dtype)


def microseconds(function: Callable[..., Any], *arrays: jax.Array) -> float:
    """The median of several runs. Each run waits for the last of its calls."""
    jax.block_until_ready(function(*arrays))
    found: list[float] = []
    calls = 1
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arrays) for _ in range(calls)][-1])
        found.append((time.perf_counter() - start) / calls)
        calls = max(1, int(SECONDS / found[0]))
    return 1e6 * float(np.median(found))


def rows_of_table() -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        dy = jax.random.normal(jax.random.key(0), (shape.tokens, shape.features), jnp.bfloat16)
        for kind in ("uniform", "text", "zipf 1.2", "half padding", "one token"):
            tokens = jnp.asarray(tokens_of(kind, shape))
            ways = {
                "jax_gradops, float32 table": (by_library, jnp.float32),
                "jax_gradops, bfloat16 table": (by_library, jnp.bfloat16),
                "XLA, float32": (by_xla, jnp.float32),
                "XLA, bfloat16": (by_xla, jnp.bfloat16),
            }
            for name, (way, dtype) in ways.items():
                run = jax.jit(lambda dy, t, w=way, d=dtype, n=shape.rows: w(d, dy, t, n))
                out = 2 if "bfloat16 table" in name else 4
                moved = shape.features * (2 * shape.tokens + out * shape.rows)
                time_us = microseconds(run, dy, tokens)
                yield {**shape._asdict(), "distribution": kind, "way": name,
                       "microseconds": round(time_us, 1), "GB/s": round(moved / time_us / 1e3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="the file to write")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    found = []
    for row in rows_of_table():
        found.append(row)
        print(*(f"{value!s:>12}" for value in row.values()), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, "jax": jax.__version__, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
