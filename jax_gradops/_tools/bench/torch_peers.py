"""Peers that run under PyTorch.

On a GPU, the calls are captured in a CUDA graph and replayed. So the times hold as little host time
as the times of JAX programs. Calls that cannot be captured are launched one by one.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_gradops._tools.bench import timing, torch_functions
from jax_gradops._tools.bench.cases import Case
from jax_gradops._tools.bench.peers import Figure, Inputs, PeerError, Plan

_LEAD = 2  # replays before the first event: the timed ones are queued before the device reaches it


class TorchPeer:
    """A PyTorch function on one case."""

    def __init__(self, name: str, case: Case, plan: Plan) -> None:
        self._name, self._case, self._plan = name, case, plan

    def compile(self) -> None:
        """Does nothing: kernels are compiled at their first call."""

    def start(self, inputs: Inputs) -> dict[Figure, timing.Runner]:
        torch = torch_functions.torch_module()
        if self._plan.platform == "gpu" and not torch.cuda.is_available():
            raise PeerError("this PyTorch finds no GPU")
        if self._plan.platform == "cpu":
            _keep_freed_memory()
        try:
            function = torch_functions.MAKERS[self._name][self._case.op](self._case)
        except torch_functions.Unsupported as error:
            raise PeerError(str(error)) from None
        # All calls use one stream. Autograd launches on the stream of the forward pass. A capture
        # records only the launches on the captured stream.
        stream = torch.cuda.Stream() if self._plan.platform == "gpu" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            arguments = [self._arguments(function, a, inputs.parameters) for a in inputs.calls]
        return {
            figure: self._runner(figure, function, arguments, stream)
            for figure in self._plan.figures
        }

    def _arguments(
        self, function: torch_functions.TorchFunction, arrays: Any, parameters: Any
    ) -> list[Any]:
        tensors = [_tensor(a) for a in arrays]
        given = [_tensor(p) for p in parameters]
        if not function.wide_parameters:
            given = [p.to(tensors[0].dtype) for p in given]
        dy = tensors[:1] if self._case.direction == "bwd" else []
        return [*dy, *function.save(*tensors[len(dy) :], *given)]

    def _runner(
        self,
        figure: Figure,
        function: torch_functions.TorchFunction,
        arguments: list[Any],
        stream: Any,
    ) -> timing.Runner:
        calls = {"cold": self._plan.calls, "warm": self._plan.warm_calls, "latency": 1}[figure]
        once = [functools.partial(function.call, *a) for a in arguments]
        sequence = once if figure == "cold" else once[:1] * calls
        keep = figure == "cold"
        if stream is None:
            return LaunchedCalls(sequence, keep)
        if figure == "latency":
            return timing.LatencyProgram(LaunchedCalls(sequence, keep, stream).wait_for_all)
        try:
            return CapturedCalls(sequence, keep, stream)
        except RuntimeError:  # a CUDA error: the capture does not permit an operation
            return LaunchedCalls(sequence, keep, stream)


# PyTorch's OpenMP threads spin for milliseconds after their work, waiting for more. Meanwhile they
# take cores from the next peer: layer norm took up to 50 % longer.
OPENMP_SPIN_SECONDS = 0.02


def _tensor(array: jax.Array) -> Any:
    """A tensor in the array's memory. Nothing writes to this memory."""
    return torch_functions.torch_module().from_dlpack(array)


def _array(tensor: Any) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def _run_all(sequence: Sequence[Callable[[], Any]], keep: bool) -> list[Any]:
    """Runs all calls. Returns all results, or only the last call's results if not `keep`.

    If not `keep`, the results of earlier calls are freed, and the next calls use their memory.
    """
    results: list[Any] = []
    with torch_functions.torch_module().no_grad():
        for call in sequence:
            if not keep:
                results.clear()
            results.append(call())
    return results


class LaunchedCalls:
    """Launches the calls one by one, as users of PyTorch do without graphs."""

    def __init__(self, sequence: Sequence[Any], keep: bool, stream: Any = None) -> None:
        self.calls = len(sequence)
        self._sequence, self._keep, self._stream = sequence, keep, stream

    def _run(self) -> list[Any]:
        with torch_functions.torch_module().cuda.stream(self._stream):
            return _run_all(self._sequence, self._keep)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def wait_for_all(self) -> list[Any]:
        """Runs all calls once and waits for them."""
        results = self._run()
        self._wait()
        return results

    def results(self) -> list[jax.Array]:
        return [_array(r) for r in self.wait_for_all()[0]]

    def sample(self, runs: int) -> tuple[float, bool]:
        start = time.perf_counter()
        for _ in range(runs):
            self._run()
        self._wait()
        seconds = time.perf_counter() - start
        if self._stream is None:
            time.sleep(OPENMP_SPIN_SECONDS)
        return seconds / (runs * self.calls), self._stream is not None


class CapturedCalls:
    """All calls in one CUDA graph, which is replayed."""

    def __init__(self, sequence: Sequence[Any], keep: bool, stream: Any) -> None:
        torch = torch_functions.torch_module()
        self.calls, self._stream = len(sequence), stream
        self._sequence = sequence  # keeps the arguments alive: the graph reads their memory
        with torch.cuda.stream(stream):  # the first calls compile and allocate
            for _ in range(2):
                _run_all(sequence[:1], keep)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may compile JAX programs. A stricter mode does not permit this.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._results = _run_all(sequence, keep)

    def results(self) -> list[jax.Array]:
        with torch_functions.torch_module().cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()
        return [_array(r) for r in self._results[0]]

    def sample(self, runs: int) -> tuple[float, bool]:
        torch = torch_functions.torch_module()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            for _ in range(_LEAD):
                self._graph.replay()
            begin.record()
            for _ in range(runs):
                self._graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (runs * self.calls), False


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@functools.cache
def _keep_freed_memory() -> None:
    """Tells the C library to keep freed memory.

    PyTorch allocates results anew in each call. Otherwise a large part of the time would be the
    operating system's work on fresh memory.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):  # the C library is not glibc
        pass
