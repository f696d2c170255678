"""Times results in memory that is new to the process, on the CPU: the table in README.md.

    taskset -c 0,1 python benchmarks/new_memory.py

It prints milliseconds and page faults per call. In the first case, the result is in memory that is
used again: an argument that the jitted function may overwrite. In the second case, the operating
system gives new memory, as for any jitted function without donation. The last lines are for a chain
of six layer norms and six bias + GELUs, value and gradient, all in new memory. "xla" is
`implementation="xla"`.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_gradops

SHAPE = (8192, 2048)
CALLS = 15
OPS: dict[str, Callable[..., jax.Array]] = {
    "layer norm": lambda x, scale, **how: jax_gradops.layer_norm(x, scale, scale, **how),
    "tanh GELU": lambda x, scale, **how: jax_gradops.gelu(x, **how),
    "batch norm": lambda x, scale, **how: jax_gradops.batch_norm(x, scale, scale, **how)[0],
}


def measure(call: Callable[[], Any]) -> str:
    """Median of the milliseconds, and of the page faults."""
    taken, faults = [], []
    for _ in range(CALLS):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    skipped = CALLS // 3
    return f"{statistics.median(taken[skipped:]):.1f}, {statistics.median(faults[skipped:]):,.0f}"


def columns(op: Callable[..., jax.Array], x: jax.Array, scale: jax.Array, **how: str) -> list[str]:
    """Forward, and y and dx, in memory that is used again and in new memory."""

    def forward(x: jax.Array) -> jax.Array:
        return op(x, scale, **how)

    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(lambda x: op(x, scale, **how), x)
        return y, *vjp(x)

    found = []
    for f in (forward, both):
        keeping = jax.jit(lambda kept, x, f=f: f(x), donate_argnums=0, keep_unused=True)
        kept = jax.block_until_ready(jax.tree.map(jnp.copy, jax.jit(f)(x)))

        def again(keeping: Any = keeping) -> None:
            nonlocal kept
            kept = jax.block_until_ready(keeping(kept, x))

        found.append(measure(again))
        del kept
        new = jax.jit(f)
        found.append(measure(lambda new=new: jax.block_until_ready(new(x))))
    return found


def chain(rows: int, how: str) -> str:
    """Of layer norms and bias + GELUs."""
    x, scale = jax.random.normal(jax.random.key(0), (rows, SHAPE[1])), jnp.ones(SHAPE[1])

    def loss(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jax_gradops.layer_norm(x, scale, scale, implementation=how)
            x = jax_gradops.bias_gelu(x, scale, implementation=how)
        return jnp.sum(x * x)

    step = jax.jit(jax.value_and_grad(loss))
    return measure(lambda: jax.block_until_ready(step(x)))


def main() -> None:
    """Prints the tables."""
    scale = jnp.ones(SHAPE[1])
    print("| | forward, used again | forward, new | both ways, used again | both ways, new |")
    print("|---|---|---|---|---|")
    for name, op in OPS.items():
        for dtype in ("float32", "bfloat16"):
            x = jax.random.normal(jax.random.key(0), SHAPE, dtype)
            for how in ("ffi", "xla"):
                cells = columns(op, x, scale, implementation=how)
                print(f"| {name}, {dtype}, {how} |", " | ".join(cells), "|", flush=True)
    print("\n| chain | ffi | xla |\n|---|---|---|")
    for rows in (512, 1024, 4096):
        print(f"| [{rows}, {SHAPE[1]}] | {chain(rows, 'ffi')} | {chain(rows, 'xla')} |", flush=True)


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):
        main()
