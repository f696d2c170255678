"""Times programs. Samples are interleaved, and do not contain the host's dispatch.

A program is a number of calls, one after another. In a cold program, each call has its own inputs
and results, as each layer of a model has. All together are several times the cache's size. In a
warm program, each call's inputs are the results of the call before, and all stay in the cache.
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
from jax_gradops._tools import testing
from jax_gradops._tools.bench.errors import BenchError

Call: TypeAlias = Callable[..., list[Any]]
Sample: TypeAlias = tuple[float, bool]  # the result of `Runner.sample`

# The seconds that a runner works before the measurement, and the shortest time of a sample. A
# sample is shorter if this time needs more than MAX_RUNS runs. JAX queues at most 32 runs on a GPU.
WARM_UP = 0.03
SAMPLE = {"gpu": 0.005, "cpu": 0.02}
MAX_RUNS = 24


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median and the 20th and 80th percentile.

    Attributes:
      host_bound: whether the host's dispatch was slower than the device in most samples. Then the
        times contain dispatch.
    """

    us: float
    p20: float
    p80: float
    host_bound: bool = False


class Runner(Protocol):
    """A program of `calls` calls that is ready to run."""

    calls: int

    def results(self) -> list[jax.Array]:
        """The results of the first call. They are valid until the next run."""
        ...

    def sample(self, runs: int) -> tuple[float, bool]:
        """Seconds of one call in a series of runs, and whether they contain the host's dispatch."""
        ...


# --- Programs of JAX -----------------------------------------------------------------------------


def cold_program(call: Call) -> Callable[[Sequence[Any]], list[Any]]:
    """A program that runs the call on each of its arguments in turn; returns all results.

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
    """A program of calls whose data stay in the cache; returns the first and the last results.

    Each call depends on the call before. Otherwise XLA would merge calls on equal arguments, even
    with barriers. If the types agree, a call's first result is the next call's first argument. Else
    a cheap sum connects the calls. The barriers keep XLA from fusing two calls.
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
    """A program whose calls write their first results into the memory of one of their arguments.

    These results are this argument of the next run, so that a run needs no copies. `restart` begins
    again with copies of the given arguments. `position` is the place of the argument.
    """

    def __init__(self, compiled: Any, arguments: Sequence[Any], position: int) -> None:
        self._compiled = compiled
        self._given = [each[position] for each in arguments]
        self._others = [(*a[:position], *a[position + 1 :]) for a in arguments]
        self.restart()

    @staticmethod
    def compile(program: Callable[..., Any], types: Sequence[Any], position: int) -> Any:
        """Compiles any of the programs above for the constructor."""

        def joined(taken: Sequence[Any], others: Sequence[Any]) -> Any:
            pairs = zip(taken, others, strict=True)
            return program([(*o[:position], t, *o[position:]) for t, o in pairs])

        taken = [each[position] for each in types]
        others = [(*each[:position], *each[position + 1 :]) for each in types]
        return jax.jit(joined, donate_argnums=0).lower(taken, others).compile()

    def restart(self) -> None:
        """Restores the arguments. After hundreds of runs, most numbers would be 0 or infinite."""
        self._taken = []
        for array in self._given:
            with jax.default_device(array.device):
                self._taken.append(jax.numpy.copy(array))

    def __call__(self, *_: Any) -> Any:
        """Runs on the results of the last run."""
        results = self._compiled(self._taken, self._others)
        self._taken = [result[0] for result in results[-len(self._taken) :]]
        return results


@functools.cache
def clock(device: Any, wait_ms: float = 0.0) -> Callable[[], Any]:
    """A program that reads the device's clock: nanoseconds, as two 32-bit halves.

    The device first waits for `wait_ms` milliseconds. The host would not do as a clock: it hears of
    a program's end late, and the delay varies. 140 us were measured as 133 to 147.
    """
    if not testing.has_handlers(device.platform):
        raise BenchError(
            "the benchmark needs a build with its own handlers to read the GPU's clock: install "
            "jax_gradops from its source folder, or set JAX_GRADOPS_TESTING=ON for the build"
        )
    name = f"{_registry.TARGET_PREFIX}device_clock"
    read = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2,), np.uint32), has_side_effect=True)
    with jax.default_device(device):
        return jax.jit(lambda: read(wait_ms=np.float64(wait_ms))).lower().compile()


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two results of `clock`."""
    first, last = (int(low) | int(high) << 32 for low, high in (np.asarray(begin), np.asarray(end)))
    return (last - first) / 1e9


class QueuedProgram:
    """Times queued runs on a GPU. No run waits for the host.

    If the host queues runs too slowly, the device waits before them.
    """

    _LEAD = 4  # runs before the clock starts: the timed ones are queued meanwhile
    _WAITS = (0.0, 2.0, 8.0, 32.0)  # milliseconds; the shortest that is long enough

    def __init__(self, compiled: Any, arguments: Sequence[Any], calls: int, device: Any) -> None:
        self.calls = calls
        self._compiled, self._arguments = compiled, arguments
        self._device, self._wait = device, 0

    def _run(self, runs: int) -> Any:
        last = None
        for _ in range(runs):
            last = self._compiled(self._arguments)
        return last

    def results(self) -> list[jax.Array]:
        return jax.block_until_ready(self._run(1))[0]

    def sample(self, runs: int) -> tuple[float, bool]:
        read = clock(self._device)
        while True:
            if isinstance(self._compiled, InPlace):
                self._compiled.restart()
            if wait_ms := self._WAITS[self._wait]:
                clock(self._device, wait_ms)()
            self._run(self._LEAD)
            begin = read()
            self._run(runs)
            queued = not begin.is_ready()  # else the device may have waited for the host
            seconds = seconds_between(begin, read())
            if queued:
                return seconds / (runs * self.calls), False
            if self._wait + 1 == len(self._WAITS):
                break
            self._wait += 1
        start = time.perf_counter()
        jax.block_until_ready(self._run(runs))
        return (time.perf_counter() - start) / (runs * self.calls), True


class BlockingProgram:
    """Times runs one by one on the CPU. Each run writes into the last run's results.

    With fresh memory, a large part of the time would be the operating system's work on this memory.
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
    """One call from Python to its results. The time is of host and device together."""

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
    """The samples of all runners. In each round, each runner takes one sample."""
    runs = {name: _warm_up(runner, SAMPLE[device]) for name, runner in runners.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            samples[name].append(runner.sample(runs[name]))
    return samples


def _warm_up(runner: Runner, target: float) -> int:
    """Runs for a while; returns the number of runs of a sample."""
    runner.sample(1)  # loads kernels
    start = time.perf_counter()
    runs = 1
    while True:
        seconds = runner.sample(runs)[0] * runner.calls
        runs = max(1, min(MAX_RUNS, round(target / max(seconds, 1e-9))))
        if time.perf_counter() - start > WARM_UP:
            return runs


def summary(samples: Sequence[Sample], without: Sequence[Sample] | None = None) -> Timing:
    """Summarises samples; subtracts the samples `without` something, round by round, if given."""
    seconds = np.array([seconds for seconds, _ in samples])
    if without is not None:
        seconds -= [seconds for seconds, _ in without]
    low, middle, high = np.quantile(1e6 * seconds, (0.2, 0.5, 0.8))
    host_bound = sum(bound for _, bound in samples)
    return Timing(float(middle), float(low), float(high), host_bound > len(samples) / 2)


# --- The device's memory -------------------------------------------------------------------------

_L2_CACHE_SIZE = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
# Bytes; few machines of 2025 have a larger cache.
_UNKNOWN_CACHE = {"gpu": 128 << 20, "cpu": 64 << 20}


def cache_bytes(device: Any) -> int:
    """The size of the last-level cache; a large guess if it is unknown."""
    try:
        if device.platform == "cpu":
            return _largest_cpu_cache()
        driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        status = driver.cuDeviceGetAttribute(
            ctypes.byref(size), _L2_CACHE_SIZE, device.local_hardware_id or 0
        )
        if status == 0 and size.value > 0:
            return size.value
    except (OSError, ValueError):  # there is no such library or file
        pass
    return _UNKNOWN_CACHE["cpu" if device.platform == "cpu" else "gpu"]


def _largest_cpu_cache() -> int:
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    return max(int(t[:-1]) * units[t[-1]] for t in (p.read_text().strip() for p in sizes))


def memory_bytes(device: Any) -> int:
    """The memory in bytes that programs may take; a small guess if it is unknown."""
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) if device.platform != "cpu" else 0
    return limit or 8 << 30
