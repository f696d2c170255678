"""Measures a training step in all variants.

All variants train from equal parameters on equal data. Each sample restarts from these parameters,
so all samples do equal work on equal numbers. The host waits for a step's loss while later steps
are queued. So the times contain the host's dispatch only if dispatch is slower than the device.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops._tools.bench import timing, train_curves, train_profile, train_program
from jax_gradops._tools.bench.train import STOCK, Setup, TrainCase

#: The possible competitors. "xla" always takes part.
COMPETITORS = ("xla",)
#: Steps of a sample. A sample has fewer if the loss curves have fewer.
SAMPLE_STEPS = 10
_AHEAD = 4  # steps that are queued after the step that the host waits for
_PROFILED_STEPS = 3
_WAYS_TO_ROUND = 4  # roundings of the first parameters; two if curves are long
_LONG = 50  # steps of a long curve


@dataclasses.dataclass
class Variant:
    """The measurements of one variant.

    Attributes:
      time: of a step.
      over_stock: the stock variant's time over this variant's time, from the same rounds. Median,
        20th and 80th percentile.
      losses: of the first steps, each before its update.
      off: the largest difference of the losses from stock's losses, as a fraction of stock's.
      kernel_calls: the number of calls of each of this library's kernels in the compiled program.
      memory: of the compiled step. None if XLA does not say.
      profile: the step's time by groups of kernels, if requested.
    """

    time: timing.Timing | None = None
    over_stock: tuple[float, float, float] | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    off: float | None = None
    kernel_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: train_program.Memory | None = None
    compile_seconds: float = 0.0
    profile: list[train_profile.Group] | None = None


@dataclasses.dataclass
class Result:
    """The measurements of one case.

    Attributes:
      noise: the largest change of stock's losses, step by step, if its first parameters are
        rounded.
      wrong: by variant, the mistake in its training. A wrong variant is timed too.
      failed: by variant, the reason why it did not run.
    """

    case: TrainCase
    setup: Setup
    variants: dict[str, Variant] = dataclasses.field(default_factory=dict)
    noise: list[float] = dataclasses.field(default_factory=list)
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def problem(self) -> str:
        """A text about all problems; empty if there are none."""
        problems = [f"{name} is wrong: {what}" for name, what in self.wrong.items()]
        problems += [f"{name} failed: {why}" for name, why in self.failed.items()]
        return f"{self.case}: {'; '.join(problems)}" if problems else ""


class Start(NamedTuple):
    """The values that all variants start from. `Setup.init` makes them."""

    parameters: Any
    carried: Any


class State(NamedTuple):
    """The values that a step changes. A step takes over their memory (donation)."""

    parameters: Any
    carried: Any
    optimizer: Any


def run_all(
    chosen: Sequence[TrainCase],
    device: Any,
    competitors: Sequence[str],
    rounds: int,
    expired: Callable[[], bool],
) -> Iterator[Result]:
    """Yields a result for each case, until `expired` returns True."""
    del competitors
    for case in chosen:
        if expired():
            return
        with _scope(case, device):
            result = _run_case(case, device, rounds)
        yield result


@contextlib.contextmanager
def _scope(case: TrainCase, device: Any) -> Iterator[None]:
    """Sets JAX's types as users have them: float64 is enabled only for float64 cases."""
    with jax.enable_x64(case.dtype == "float64"), jax.default_device(device):
        yield


def _run_case(case: TrainCase, device: Any, rounds: int) -> Result:
    setup = case.setup()
    result = Result(case, setup)
    start, batch = _begin(setup)
    trainers: dict[str, Trainer] = {}
    # One variant at a time: XLA tries algorithms on the device while it compiles.
    for name in case.variants:
        variant = result.variants[name] = Variant()
        try:
            trainers[name] = Trainer(setup, name, start, batch, variant)
            variant.losses = trainers[name].losses(case.steps)
        except Exception as error:  # XLA may raise any exception
            text = str(error).strip().splitlines() or [""]
            result.failed[name] = f"{type(error).__name__}: {text[0]}"[:200]
            trainers.pop(name, None)
    if STOCK in trainers:
        _compare(result, trainers[STOCK], start)
    _time(result, trainers, rounds, device)
    if case.profile is not None:
        for name, trainer in trainers.items():
            directory = case.profile / f"{case.model}-{case.dtype}-{name}"
            result.variants[name].profile = trainer.profile(directory)
    return result


# --- Training ------------------------------------------------------------------------------------


def _begin(setup: Setup) -> tuple[Start, Any]:
    """The start of all variants, and the batch that each step gets."""

    def begin(key: jax.Array) -> tuple[Start, Any]:
        first, second = jax.random.split(key)
        return Start(*setup.init(first)), setup.batch(second)

    return jax.jit(begin)(jax.random.key(0))


def step(setup: Setup, variant: str, state: State, batch: Any) -> tuple[State, Any]:
    """One training step; returns the new state and the loss before the step."""
    gradient = jax.value_and_grad(setup.loss(variant), has_aux=True)
    (loss, carried), gradients = gradient(state.parameters, state.carried, batch)
    update = setup.optimizer(variant).update
    updates, optimizer = update(gradients, state.optimizer, state.parameters)
    parameters = jax.tree.map(jnp.add, state.parameters, updates)
    return State(parameters, carried, optimizer), loss


class Trainer:
    """A compiled step and its current state."""

    def __init__(self, setup: Setup, name: str, start: Start, batch: Any, variant: Variant) -> None:
        def first(start: Start) -> State:
            parameters, carried = jax.tree.map(jnp.copy, start)
            return State(parameters, carried, setup.optimizer(name).init(parameters))

        self._start, self._batch, self._first = start, batch, jax.jit(first)
        run = functools.partial(step, setup, name)
        state = self._first(start)
        began = time.perf_counter()
        lowered = jax.jit(run, donate_argnums=0).lower(state, batch)
        del state  # frees memory: XLA needs memory to try algorithms
        self._compiled = lowered.compile()
        variant.compile_seconds = time.perf_counter() - began
        variant.kernel_calls = train_program.kernel_calls(self._compiled)
        variant.memory = train_program.memory(self._compiled)
        if bool(variant.kernel_calls) != (name != STOCK):
            found = variant.kernel_calls or "no kernel of this library"
            raise RuntimeError(f"the compiled step has {found}")

    def _restart(self, start: Start | None = None) -> None:
        self._state = None  # frees the old state before the new one is made
        self._state = jax.block_until_ready(self._first(self._start if start is None else start))

    def _step(self) -> jax.Array:
        self._state, loss = self._compiled(self._state, self._batch)
        return loss

    def losses(self, steps: int, start: Start | None = None) -> list[float]:
        """The losses of the first steps from the start."""
        self._restart(start)
        losses = [self._step() for _ in range(steps)]
        self._state = None
        return [float(loss) for loss in losses]

    def sample(self, steps: int) -> timing.Sample:
        """Seconds of one step, from `steps` steps; and whether the device waited for the host."""
        self._restart()
        jax.block_until_ready(self._step())
        # Not later: if the program makes the host wait, as conditionals do, several steps have
        # ended before the host looks.
        start = time.perf_counter()
        waiting: collections.deque[Any] = collections.deque()
        waited = False
        for _ in range(steps):
            waited |= bool(waiting) and waiting[-1].is_ready()
            waiting.append(self._step())
            if len(waiting) > _AHEAD:
                jax.block_until_ready(waiting.popleft())
        jax.block_until_ready(list(waiting))
        end = time.perf_counter()
        self._state = None
        return (end - start) / steps, waited

    def profile(self, directory: Path) -> list[train_profile.Group]:
        """The time of a few steps by groups of kernels. Traces are written to the directory."""
        self._restart()
        jax.block_until_ready(self._step())
        with jax.profiler.trace(str(directory)):
            jax.block_until_ready([self._step() for _ in range(_PROFILED_STEPS)])
        self._state = None
        return train_profile.read(directory, _PROFILED_STEPS)


# --- Figures -------------------------------------------------------------------------------------


def _time(result: Result, trainers: dict[str, Trainer], rounds: int, device: Any) -> None:
    samples: dict[str, list[timing.Sample]] = {name: [] for name in trainers}
    steps = min(result.case.steps, SAMPLE_STEPS)
    for _ in range(rounds):
        for name, trainer in trainers.items():
            seconds, waited = trainer.sample(steps)
            samples[name].append((seconds, waited and device.platform != "cpu"))
    for name, taken in samples.items():
        result.variants[name].time = timing.summary(taken)
        if STOCK in samples:
            pairs = zip(samples[STOCK], taken, strict=True)
            ratios = [stock / own for (stock, _), (own, _) in pairs]
            low, middle, high = map(float, np.quantile(ratios, (0.2, 0.5, 0.8)))
            result.variants[name].over_stock = middle, low, high


def _compare(result: Result, stock: Trainer, start: Start) -> None:
    """Finds the variants whose losses differ from stock's losses."""
    expected = result.variants[STOCK].losses
    change = jax.jit(functools.partial(_rounded, result.case.dtype))
    changed = [
        stock.losses(len(expected), change(start, jax.random.key(1 + way)))
        for way in range(2 if len(expected) > _LONG else _WAYS_TO_ROUND)
    ]
    noise = np.max([train_curves.difference(expected, losses) for losses in changed], axis=0)
    result.noise = noise.tolist()
    for name, variant in result.variants.items():
        if variant.losses:
            variant.off = float(np.max(train_curves.difference(expected, variant.losses)))
            mistake = train_curves.mistakes(expected, noise, variant.losses)
            if mistake:
                result.wrong[name] = mistake


def _rounded(dtype: str, start: Start, key: jax.Array) -> Start:
    """The parameters with small random changes, as if each had been rounded to `dtype`."""
    size = float(jnp.finfo(dtype).eps) / 4  # about the root mean square of rounding errors
    leaves, tree = jax.tree.flatten(start.parameters)
    pairs = zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    changed = [x * (1 + size * jax.random.normal(k, x.shape, x.dtype)) for x, k in pairs]
    return start._replace(parameters=jax.tree.unflatten(tree, changed))
