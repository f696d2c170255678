"""How programs are timed: interleaved samples, from which the host's dispatch is kept out.

A program is a number of calls one after the other. Cold, each call has its own inputs and results,
several times the cache in all, as in a model each layer has; warm, each call has the results of the
one before as its inputs, and all stay in the cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from jax_gradops import _registry

Call: TypeAlias = Callable[..., list[Any]]
Sample: TypeAlias = tuple[float, bool]  # as `Runner.sample` returns it

# Seconds that a runner works before it is measured, and that one sample takes at least, unless
# that needs more than MAX_RUNS runs (JAX has at most 32 under way on a GPU).
WARM_UP = 0.03
SAMPLE = {"gpu": 0.005, "cpu": 0.02}
MAX_RUNS = 24


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median and the 20th and 80th percentile.

    Attributes:
      host_bound: whether the host's dispatch was slower than the device, and is in the time of
        most samples.
    """

    us: float
    p20: float
    p80: float
    host_bound: bool = False


class Runner(Protocol):
    """A program that is ready to run, of `calls` calls."""

    calls: int

    def results(self) -> list[jax.Array]:
        """The first call's; valid until the next run."""
        ...

    def sample(self, runs: int) -> tuple[float, bool]:
        """Seconds of one call in a series of runs, and whether the host's dispatch is in them."""
        ...


# --- Programs of JAX -----------------------------------------------------------------------------


def cold_program(call: Call) -> Callable[[Sequence[Any]], list[Any]]:
    """Calls one after the other, each on its own arguments; returns all results.

    The barriers keep XLA from fusing or reordering calls.
    """

    def program(arguments: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for args in arguments:
            if results:
                args, _ = jax.lax.optimization_barrier((args, results[-1]))
            results.append(call(*args))
        return results

    return program


def warm_program(call: Call, calls: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Calls one after the other in the same cache; returns the first and the last results.

    A call's first result is the next one's first argument, where their types agree: XLA would merge
    calls on the same arguments, barriers or not. Elsewhere a sum that costs little ties them. The
    barriers keep it from fusing a call with the next one.
    """

    def program(arguments: Sequence[Any]) -> list[Any]:
        ((first, *others),) = arguments
        results = [call(first, *others)]
        for _ in range(calls - 1):
            chained = jax.tree.leaves(results[-1])[0]
            if (chained.shape, chained.dtype) != (first.shape, first.dtype):
                chained = first + (0 * jax.numpy.sum(chained)).astype(first.dtype)
            chained = jax.lax.optimization_barrier(chained)
            results = [results[0], call(chained, *others)]
        return results

    return program


class InPlace:
    """A program whose calls' first results take over the memory of their first arguments.

    They are the first arguments of the next run, so that a run needs no copies of these; `restart`
    begins again with copies of those given.
    """

    def __init__(self, compiled: Any, arguments: Sequence[Any]) -> None:
        self._compiled = compiled
        self._arguments = arguments
        self._others = [others for _, *others in arguments]
        self.restart()

    @staticmethod
    def compile(program: Callable[..., Any], types: Sequence[Any]) -> Any:
        """What the constructor takes, from a program of any of the kinds above."""

        def split(firsts: Sequence[Any], others: Sequence[Any]) -> Any:
            return program([(first, *rest) for first, rest in zip(firsts, others, strict=True)])

        firsts, others = [first for first, *_ in types], [rest for _, *rest in types]
        return jax.jit(split, donate_argnums=0).lower(firsts, others).compile()

    def restart(self) -> None:
        """Else, after hundreds of runs, most numbers would be 0 or infinite."""
        self._firsts = []
        for first, *_ in self._arguments:
            with jax.default_device(first.device):
                self._firsts.append(jax.numpy.copy(first))

    def __call__(self, *_: Any) -> Any:
        """Runs on what the last run left."""
        results = self._compiled(self._firsts, self._others)
        self._firsts = [result[0] for result in results[-len(self._firsts) :]]
        return results


@functools.cache
def clock(device: Any) -> Callable[[], Any]:
    """What reads the device's clock when it gets there: nanoseconds, in two halves.

    The host hears of a program's end late, and unequally so: 140 us were measured as 133 to 147.
    """
    name = f"{_registry.TARGET_PREFIX}device_clock"
    read = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2,), np.uint32), has_side_effect=True)
    with jax.default_device(device):
        return jax.jit(read).lower().compile()


def seconds_between(begin: Any, end: Any) -> float:
    """Of what a `clock` has read."""
    first, last = (int(low) | int(high) << 32 for low, high in (np.asarray(begin), np.asarray(end)))
    return (last - first) / 1e9


class QueuedProgram:
    """On a device with a queue: the time of runs of which none waits for the host."""

    _LEAD = 4  # runs at the head of a sample, while which the others are queued
    _TRIES = 3  # as the host may be interrupted; and so many samples without success are enough

    def __init__(self, compiled: Any, arguments: Sequence[Any], calls: int, device: Any) -> None:
        self.calls = calls
        self._compiled, self._arguments = compiled, arguments
        self._clock = clock(device)
        self._failed_samples = 0

    def _run(self, runs: int) -> Any:
        last = None
        for _ in range(runs):
            last = self._compiled(self._arguments)
        return last

    def results(self) -> list[jax.Array]:
        return jax.block_until_ready(self._run(1))[0]

    def sample(self, runs: int) -> tuple[float, bool]:
        for _ in range(self._TRIES if self._failed_samples < self._TRIES else 0):
            if isinstance(self._compiled, InPlace):
                self._compiled.restart()
            self._run(self._LEAD)
            begin = self._clock()
            self._run(runs)
            queued = not begin.is_ready()  # else the device may have waited for some of them
            seconds = seconds_between(begin, self._clock())
            if queued:
                self._failed_samples = 0
                return seconds / (runs * self.calls), False
        self._failed_samples += 1
        start = time.perf_counter()
        jax.block_until_ready(self._run(runs))
        return (time.perf_counter() - start) / (runs * self.calls), True


class BlockingProgram:
    """On the CPU: run by run, each into the memory of the last one's results.

    Else the operating system's work on fresh memory would be a good part of the time.
    """

    def __init__(self, compiled: Any, arguments: Sequence[Any], calls: int, spare: Any) -> None:
        self.calls = calls
        self._compiled, self._arguments, self._spare = compiled, arguments, spare

    def _run(self) -> None:
        self._spare = jax.block_until_ready(self._compiled(self._spare, self._arguments))

    def results(self) -> list[jax.Array]:
        self._run()
        return self._spare[0]

    def sample(self, runs: int) -> tuple[float, bool]:
        start = time.perf_counter()
        for _ in range(runs):
            self._run()
        return (time.perf_counter() - start) / (runs * self.calls), False


class LatencyProgram:
    """One call from Python to its results, host and device together."""

    calls = 1

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def results(self) -> list[jax.Array]:
        return self._function()

    def sample(self, runs: int) -> tuple[float, bool]:
        start = time.perf_counter()
        for _ in range(runs):
            self._function()
        return (time.perf_counter() - start) / runs, False


# --- Samples -------------------------------------------------------------------------------------


def measure(runners: Mapping[str, Runner], rounds: int, device: str) -> dict[str, Timing]:
    """Times all runners."""
    return {n: summary(taken) for n, taken in sample_all(runners, rounds, device).items()}


def sample_all(runners: Mapping[str, Runner], rounds: int, device: str) -> dict[str, list[Sample]]:
    """All runners' samples, in rounds that each of them has one sample of."""
    runs = {name: _warm_up(runner, SAMPLE[device]) for name, runner in runners.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            samples[name].append(runner.sample(runs[name]))
    return samples


def _warm_up(runner: Runner, target: float) -> int:
    """Runs for a while; returns how many runs a sample should have."""
    runner.sample(1)  # the first run loads kernels
    start = time.perf_counter()
    runs = 1
    while True:
        seconds = runner.sample(runs)[0] * runner.calls
        runs = max(1, min(MAX_RUNS, round(target / max(seconds, 1e-9))))
        if time.perf_counter() - start > WARM_UP:
            return runs


def summary(samples: Sequence[Sample], without: Sequence[Sample] | None = None) -> Timing:
    """What the samples say; less those of the same rounds `without` something, if given."""
    seconds = np.array([seconds for seconds, _ in samples])
    if without is not None:
        seconds -= [seconds for seconds, _ in without]
    low, middle, high = np.quantile(1e6 * seconds, (0.2, 0.5, 0.8))
    host_bound = sum(bound for _, bound in samples)
    return Timing(float(middle), float(low), float(high), host_bound > len(samples) / 2)


# --- The device's memory -------------------------------------------------------------------------

_L2_CACHE_SIZE = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
_UNKNOWN_CACHE = {"gpu": 128 << 20, "cpu": 64 << 20}  # as large as any of 2025 or most


def cache_bytes(device: Any) -> int:
    """The size of the last cache before memory; a large guess where it cannot be told."""
    try:
        if device.platform == "cpu":
            return _largest_cpu_cache()
        driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        status = driver.cuDeviceGetAttribute(
            ctypes.byref(size), _L2_CACHE_SIZE, device.local_hardware_id or 0
        )
        if status == 0 and size.value > 0:
            return size.value
    except (OSError, ValueError):  # no such library or file
        pass
    return _UNKNOWN_CACHE["cpu" if device.platform == "cpu" else "gpu"]


def _largest_cpu_cache() -> int:
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    return max(int(t[:-1]) * units[t[-1]] for t in (p.read_text().strip() for p in sizes))


def memory_bytes(device: Any) -> int:
    """How much memory programs may take; a small guess where it cannot be told."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) if device.platform != "cpu" else 0
    return limit or 8 << 30
