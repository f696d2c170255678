"""Weak scaling of training steps over one host's GPUs: python -P tests/gpu/scaling.py.

The work per device is fixed:

- gpt: the demo's GPT in the size of GPT-2 small, with data parallelism.
- gpt-fsdp: the same model. Parameters and optimizer state are spread over the devices, as in FSDP.
- resnet50: data parallelism. Each batch norm normalises over the examples of all devices.
- vocabulary: the last matrix product and the loss of a language model. Two devices share the
  classes, and the pairs share the rows.

Before that, each model trains a few steps on one global batch on 1, 2, 4, … devices. The losses
must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops._tools.bench.train import TrainCase
from jax_gradops._tools.bench.train_measuring import State, step
from jax_gradops._tools.demo import meshes, settings, text
from jax_gradops._tools.demo.program import Program

PLATFORM = jax.default_backend()
WINDOWS = 16  # per device, of 1,024 characters each
GPT: dict[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "context": 1024, "precision": "mixed",
}  # fmt: skip
# A small model, so that losses can be compared in float32.
SMALL_GPT: dict[str, Any] = {"width": 128, "layers": 2, "heads": 4, "context": 128}
IMAGES = 128  # per device, of 224 x 224 pixels
ROWS, WIDTH, CLASSES = 16384, 1024, 65536  # of "vocabulary"; the rows are per device
# The number of steps whose losses must agree, and the largest difference, if not 10 and 1e-4. The
# first steps of ResNet-50 are chaotic. Other orders of XLA's sums change the second loss by 2e-3.
AGREEMENT = {"resnet50": (2, 1e-2)}
# Held while a program runs, while others are compiled.
RUNNING = threading.Lock()
COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"


class Training(NamedTuple):
    """A compiled step.

    Attributes:
      first: makes the state before the first step.
      step: maps a state to the next state and the loss. It takes over the state's memory.
      hlo: the text of the compiled step.
      unit: what a step's examples are, in the plural.
      examples: the number of examples of a step.
    """

    first: Callable[[], Any]
    step: Callable[[Any], tuple[Any, Any]]
    hlo: str
    unit: str
    examples: int


# --- Models --------------------------------------------------------------------------------------
# Each takes the implementation, the number of devices, and the size of the global batch in devices'
# shares. Small models compute in float32.


def gpt(implementation: str, n: int, shares: int, small: bool, axis: str = "data") -> Training:
    """The demo's GPT. `axis`: what the mesh's devices share besides examples."""
    given = SMALL_GPT | {"batch": 4 * shares} if small else GPT | {"batch": WINDOWS * shares}
    chosen = settings.new_run({"steps": 1000} | given, PLATFORM)
    corpus = text.load_corpus(None, chosen.context)
    # The validation text is not used, but compiled for.
    corpus = dataclasses.replace(corpus, validation=corpus.validation[: 2 * chosen.context])
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1} | {axis: n}, chosen.batch, PLATFORM)
    program = Program(chosen, corpus, implementation, mesh=mesh)

    def train(state: Any) -> tuple[Any, Any]:
        state, metrics = program.train_step(state)
        return state, metrics.loss

    tokens = chosen.batch * chosen.context
    return Training(program.initial_state, train, program.train_step_hlo(), "tokens", tokens)


def resnet50(implementation: str, n: int, shares: int, small: bool) -> Training:
    """ResNet-50 of the benchmark's suite "train"."""
    dtype, per_device, side = ("float32", 8, 64) if small else ("bfloat16", IMAGES, 224)
    shape = (per_device * shares, side, side, 3)
    setup = TrainCase("resnet50", dtype, PLATFORM, shape, ("jax_gradops",)).setup()
    mesh = meshes.make_mesh({"data": n, "fsdp": 1}, shape[0], PLATFORM)
    everywhere, spread = meshes.replicated(mesh), meshes.of_batch(mesh)

    def first(key: jax.Array) -> State:
        parameters, averages = setup.init(key)
        return State(parameters, averages, setup.optimizer("jax_gradops").init(parameters))

    start = jax.jit(first, out_shardings=everywhere)
    with RUNNING:
        batch = jax.jit(setup.batch, out_shardings=spread)(jax.random.key(1))
    run = jax.jit(
        functools.partial(step, setup, "jax_gradops"), donate_argnums=0, out_shardings=everywhere
    )
    with RUNNING:
        state = start(jax.random.key(0))
    with jax_gradops.use_implementation(implementation):
        compiled = run.lower(state, batch).compile()
    return Training(
        lambda: start(jax.random.key(0)),
        lambda state: compiled(state, batch),
        compiled.as_text(),
        "images",
        shape[0],
    )


def vocabulary(implementation: str, n: int, shares: int, small: bool) -> Training:
    """The last layer of a language model: rows over the axis "data", classes over "model"."""
    sizes = (n // 2, 2) if n > 1 else (1, 1)
    rows, width, classes = (256, 64, 2000) if small else (ROWS, WIDTH, CLASSES)
    rows *= shares
    dtype = jnp.float32 if small else jnp.bfloat16
    mesh = jax.make_mesh(
        sizes,
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices(PLATFORM)[:n],
    )
    of_kernel, of_x, of_logits, of_rows, everywhere = (
        NamedSharding(mesh, spec)
        for spec in (P(None, "model"), P("data"), P("data", "model"), P("data"), P())
    )
    labels = jax.device_put(jax.random.randint(jax.random.key(0), (rows,), 0, classes), of_rows)

    def first() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(1))
        kernel = jax.random.normal(keys[0], (width, classes)) * width**-0.5
        x = jax.random.normal(keys[1], (rows, width), dtype)
        return jax.device_put(kernel, of_kernel), jax.device_put(x, of_x)

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        logits = jnp.matmul(x, kernel.astype(dtype))
        logits = jax.lax.with_sharding_constraint(logits, of_logits)
        losses = jax_gradops.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    def update(state: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*state)
        kernel, x = (a - (0.1 * g).astype(a.dtype) for a, g in zip(state, gradients, strict=True))
        return (kernel, x), value

    run = jax.jit(update, donate_argnums=0, out_shardings=((of_kernel, of_x), everywhere))
    with RUNNING:
        state = first()
    with jax_gradops.use_implementation(implementation):
        compiled = run.lower(state).compile()
    return Training(first, compiled, compiled.as_text(), "logits", rows * classes)


MODELS: dict[str, Callable[[str, int, int, bool], Training]] = {
    "gpt": gpt,
    "gpt-fsdp": functools.partial(gpt, axis="fsdp"),
    "resnet50": resnet50,
    "vocabulary": vocabulary,
}


# --- Measurements --------------------------------------------------------------------------------


def losses(training: Training, steps: int) -> list[float]:
    """The losses of the first steps."""
    state, found = training.first(), []
    for _ in range(steps):
        state, loss = training.step(state)
        found.append(float(loss))
    return found


def measure(
    trainings: dict[str, Training], steps: int = 10, repeats: int = 5
) -> dict[str, list[float]]:
    """Milliseconds per step of each repeat. The trainings take turns: a GPU's clock changes."""
    states = {name: training.first() for name, training in trainings.items()}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for repeat in range(repeats + 1):
        for name, training in trainings.items():
            state = states.pop(name)
            begin = time.perf_counter()
            for _ in range(steps):
                state, loss = training.step(state)
            jax.block_until_ready((state, loss))
            if repeat:  # the first one loads kernels
                times[name].append((time.perf_counter() - begin) / steps * 1e3)
            states[name] = state
    return times


def collectives(hlo: str) -> dict[str, int]:
    """The number of each collective operation."""
    counts = {name: hlo.count(f" {name}(") + hlo.count(f" {name}-start(") for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def compile_all(
    cases: Iterable[tuple[Any, ...]], make: Callable[..., Training]
) -> dict[tuple[Any, ...], Training]:
    """Compiles programs side by side: one takes a minute, and uses few processors.

    The first is compiled before the others. XLA measures algorithms for its products and
    convolutions, and remembers the best ones.
    """
    first, *others = cases
    found = {first: make(*first)}
    with futures.ThreadPoolExecutor(8) as pool:
        return found | dict(zip(others, pool.map(lambda case: make(*case), others), strict=True))


def rows(models: Sequence[str], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The figures of each model, number of devices and implementation."""
    for model in models:
        base: dict[str, float] = {}  # a device's rate with the fewest devices
        cases = itertools.product(("ffi", "xla"), counts)
        found = compile_all(cases, lambda name, n: MODELS[model](name, n, n, False))  # noqa: B023
        for n in counts:
            trainings = {name: found.pop((name, n)) for name in ("ffi", "xla")}
            for name, times in measure(trainings).items():
                rate = trainings[name].examples / statistics.median(times) * 1e3
                base.setdefault(name, rate / n)
                yield {
                    "model": model,
                    "devices": n,
                    "implementation": name,
                    "ms": times,
                    "unit": trainings[name].unit,
                    "per second": rate,
                    "of linear": rate / n / base[name],
                    "collectives": collectives(trainings[name].hlo),
                }
            del trainings


def main() -> None:
    def names(given: str) -> list[str]:
        return given.split(",")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=names, default=[*MODELS], help="default: all")
    parser.add_argument("--devices", type=names, help="default: 1, 2, 4, … as far as there are")
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args()
    available = len(jax.devices(PLATFORM))
    counts = [int(n) for n in args.devices or (1, 2, 4, 8) if int(n) <= available]
    if not counts:
        parser.error(f"there are {available} devices")
    print(f"jax {jax.__version__}, {available} x {jax.devices()[0].device_kind}")

    def small(name: str, n: int) -> Training:
        with jax.default_matmul_precision("highest"):
            return MODELS[name]("ffi", n, counts[-1], True)

    small_trainings = compile_all(itertools.product(args.model, counts), small)
    for name in args.model:
        steps, limit = AGREEMENT.get(name, (10, 1e-4))
        found = {n: losses(small_trainings.pop((name, n)), steps) for n in counts}
        for n in counts[1:]:
            pairs = zip(found[n], found[counts[0]], strict=True)
            worst = max(abs(a / b - 1) for a, b in pairs)
            print(f"{name}: losses of {steps} steps on {n} devices: within {worst:.1e}", flush=True)
            assert worst < limit, found

    figures: list[dict[str, Any]] = []
    for row in rows(args.model, counts):
        figures.append(row)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(figures, file, indent=1)
        print(
            f"{row['model']:10} {row['devices']} devices  {row['implementation']}  "
            f"{statistics.median(row['ms']):7.2f} ms a step ({min(row['ms']):.2f} to "
            f"{max(row['ms']):.2f})  {row['per second']:12,.0f} {row['unit']}/s  "
            f"{row['of linear']:6.1%} of linear  {row['collectives']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
