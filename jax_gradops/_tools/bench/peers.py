"""The peers that are timed: this library, XLA, a copy, and the peers of `torch_peers`.

A peer is made for a case, compiled from shapes alone (in any thread), and started on inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops import _registry
from jax_gradops._tools import testing
from jax_gradops._tools.bench import formulas, timing
from jax_gradops._tools.bench.cases import Case

Figure = Literal["cold", "warm", "latency"]
# The fewest calls of a program. On a GPU, XLA makes a graph of five or more calls, as in a model.
# With fewer calls, each starts a microsecond after the one before. On the CPU one call is enough:
# dispatch takes almost no time.
MIN_CALLS = {"gpu": 8, "cpu": 1}
MAX_CALLS = 64
# One on the CPU: XLA removes barriers early there, and would merge calls on equal inputs.
WARM_CALLS = {"gpu": 64, "cpu": 1}
_SHARED_SEED = 2**31
CACHES = 3  # a cold program's data are at least this number of times the cache's size


class PeerError(Exception):
    """A peer cannot run a case. The message says why."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of the programs that time a case.

    Attributes:
      platform: ``"gpu"`` or ``"cpu"``.
      calls: of a cold program. 0 if even the largest program is less than `CACHES` times the cache.
      warm_calls: of a warm program. 0 if one call's data do not fit in the cache.
    """

    platform: Literal["gpu", "cpu"]
    device: Any
    calls: int
    warm_calls: int

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures to measure.

        Latency is measured on a GPU if the case is small enough for "warm".
        """
        cold: tuple[Figure, ...] = ("cold",) if self.calls else ()
        if not self.warm_calls:
            return cold
        return (*cold, "warm", "latency") if self.platform == "gpu" else (*cold, "warm")


def plan_for(case: Case, device: Any) -> Plan:
    """The plan for the device's cache and memory."""
    platform = "cpu" if device.platform == "cpu" else "gpu"
    cache, memory = timing.cache_bytes(device), timing.memory_bytes(device)
    size = max(1, case.bytes)
    calls = max(MIN_CALLS[platform], math.ceil(CACHES * cache / size))
    # Every peer has its own results, and some peers have copies of the inputs.
    calls = min(calls, MAX_CALLS, max(1, memory // 16 // size))
    warm_calls = WARM_CALLS[platform] if size <= cache // 2 else 0
    if calls * size < CACHES * cache and warm_calls:
        calls = 0
    return Plan(platform, device, calls, warm_calls)


@contextlib.contextmanager
def scope(device: Any) -> Iterator[None]:
    """Enables float64 and puts arrays on `device`. Each thread must enter this scope itself."""
    with jax.enable_x64(True), jax.default_device(device):
        yield


# --- Inputs --------------------------------------------------------------------------------------


@functools.cache
def random(shape: tuple[int, ...], dtype: str, result: str, device: Any) -> Callable[[int], Any]:
    """Makes normal numbers around 1/2 from a seed: numbers of `dtype`, in an array of `result`.

    Numbers of two seeds are correlated, because the gradients of norms need the mean of dy * x.
    Without correlation, this mean almost vanishes in long sums. Then a gradient that lacks the mean
    would look right.
    """

    def numbers(seed: jax.Array) -> jax.Array:
        keys = [jax.random.key(s, impl="rbg") for s in (seed, _SHARED_SEED)]
        own, shared = (jax.random.normal(k, shape, formulas.wide_dtype(dtype)) for k in keys)
        return (math.sqrt(2) * (own + shared) + 0.5).astype(dtype).astype(result)

    with scope(device):
        compiled = jax.jit(numbers).lower(jax.ShapeDtypeStruct((), jnp.uint32)).compile()
    return lambda seed: compiled(np.uint32(seed))


def input_types(case: Case) -> tuple[list[Any], list[Any]]:
    """The types of one call's arrays (backward: dy, then x and similar ones) and parameters."""
    wide = formulas.wide_dtype(case.dtype)
    operation = case.operation
    arrays = [jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))] * operation.form.arrays
    parameter = jax.ShapeDtypeStruct((case.shape[operation.axis],), wide)
    parameters = [parameter] * operation.form.parameters
    if case.direction == "fwd":
        return arrays, parameters
    with jax.enable_x64(True):
        y, *_ = jax.tree.leaves(jax.eval_shape(operation.ours, *arrays, *parameters))
    return [jax.ShapeDtypeStruct(y.shape, y.dtype), *arrays], parameters


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a case: the arrays of each call, in the order of `input_types`, and parameters.

    All calls share the parameters. Parameters are float32, or float64 for float64 cases. Their
    values are exact in x's dtype too, because some peers convert them to x's dtype.
    """

    case: Case
    calls: Sequence[tuple[jax.Array, ...]]
    parameters: tuple[jax.Array, ...]

    @classmethod
    def make(cls, case: Case, plan: Plan) -> Inputs:
        """Makes the inputs of all calls of the plan's cold program."""
        arrays, parameters = _generators(case, plan)
        calls = [
            tuple(array(len(arrays) * k + i) for i, array in enumerate(arrays))
            for k in range(max(1, plan.calls))
        ]
        return cls(case, calls, tuple(p(1000 + i) for i, p in enumerate(parameters)))

    @staticmethod
    def compile(case: Case, plan: Plan) -> None:
        """Compiles the programs of `make`. This needs no device, and may run in any thread."""
        _generators(case, plan)


def _generators(case: Case, plan: Plan) -> list[list[Callable[[int], Any]]]:
    """The generators of the arrays, and of the parameters."""
    return [
        [random(t.shape, case.dtype, t.dtype.name, plan.device) for t in types]
        for types in input_types(case)
    ]


# --- Peers of JAX --------------------------------------------------------------------------------


class Peer(Protocol):
    """One competitor on one case."""

    def compile(self) -> None:
        """Compiles. This needs no device, and may run in any thread."""
        ...

    def start(self, inputs: Inputs) -> dict[Figure, timing.Runner]:
        """Makes the runners of the figures; raises PeerError."""
        ...


@dataclasses.dataclass
class JaxPeer:
    """A function that JAX compiles.

    Attributes:
      call: takes one call's arguments, and returns a list of results.
      case: determines the arguments. Forward: arrays and parameters. Backward: dy, and the results
        of `save` for the other arrays and the parameters.
      target: a text that the compiled program must contain.
    """

    plan: Plan
    case: Case
    call: timing.Call
    save: Callable[..., list[Any]] | None = None
    target: str = ""

    def types(self) -> list[Any]:
        """The types of one call's arguments."""
        arrays, parameters = input_types(self.case)
        if self.save is None:
            return [*arrays, *parameters]
        self._save = jax.jit(self.save).lower(*arrays[1:], *parameters).compile()
        return [arrays[0], *jax.tree.leaves(self._save.out_info)]

    def arguments(self, inputs: Inputs) -> list[tuple[Any, ...]]:
        """The arguments of each call."""
        if self.save is None:
            return [(*a, *inputs.parameters) for a in inputs.calls]
        return [(dy, *self._save(*a, *inputs.parameters)) for dy, *a in inputs.calls]

    def compile(self) -> None:
        """Compiles. This needs no device, and may run in any thread."""
        plan = self.plan
        self._compiled: dict[Figure, Any] = {}
        with scope(plan.device):
            types = tuple(self.types())
            for figure in plan.figures:
                program = timing.cold_program(self.call)
                if figure == "warm":
                    program = timing.warm_program(self.call, plan.warm_calls)
                count = plan.calls if figure == "cold" else 1
                self._compiled[figure] = self._compile(program, [types] * count)

    def _in_place(self, arguments: Sequence[Any]) -> int | None:
        """The position of the argument of a call whose memory the first result may take over."""
        what = self.case.operation.form.in_place
        if self.case.direction == "fwd" or not what or self.save is None:
            return None
        if what == "dy":
            return 0
        return next(i for i, a in enumerate(arguments) if i and a.shape == self.case.shape)

    def _compile(self, program: Callable[..., Any], types: Sequence[Any]) -> Any:
        position = self._in_place(types[0])
        if position is not None:
            compiled = timing.InPlace.compile(program, types, position)
        elif self.plan.platform == "cpu":
            spare = jax.eval_shape(program, types)
            donating = jax.jit(lambda spare, a: program(a), donate_argnums=0, keep_unused=True)
            compiled = donating.lower(spare, types).compile()
        else:
            compiled = jax.jit(program).lower(types).compile()
        if self.target not in (compiled.as_text() or ""):
            raise PeerError(f"the compiled program does not call {self.target}…")
        return compiled

    def start(self, inputs: Inputs) -> dict[Figure, timing.Runner]:
        """Makes the runners of the figures."""
        all_arguments = self.arguments(inputs)
        return {figure: self._runner(figure, all_arguments) for figure in self.plan.figures}

    def _runner(self, figure: Figure, all_arguments: Sequence[Any]) -> timing.Runner:
        compiled: Any = self._compiled[figure]
        calls = 1
        arguments = all_arguments if figure == "cold" else all_arguments[:1]
        position = self._in_place(arguments[0])
        if position is not None:
            compiled = timing.InPlace(compiled, arguments, position)
        if figure != "latency":
            calls = self.plan.calls if figure == "cold" else self.plan.warm_calls
        if self.plan.platform == "cpu":
            if position is not None:
                return timing.BlockingProgram(compiled, arguments, calls, None)
            zeros = jax.tree.map(lambda r: np.zeros(r.shape, r.dtype), compiled.out_info)
            spare = jax.device_put(zeros, self.plan.device)
            return timing.BlockingProgram(compiled, arguments, calls, spare)
        if figure == "latency":
            return timing.LatencyProgram(lambda: jax.block_until_ready(compiled(arguments))[0])
        return timing.QueuedProgram(compiled, arguments, calls, self.plan.device)


def ours(case: Case, plan: Plan) -> JaxPeer:
    """The library's op as a peer."""
    return differentiable(case, plan, case.operation.ours, _registry.TARGET_PREFIX)


def differentiable(case: Case, plan: Plan, public: Callable[..., Any], target: str = "") -> JaxPeer:
    """A public function as a peer.

    Backward is the pullback of `jax.vjp`, without the forward pass.
    """
    if case.direction == "fwd":
        return JaxPeer(plan, case, lambda *a: jax.tree.leaves(public(*a)), target=target)
    structure: list[Any] = []

    def save(*arguments: jax.Array) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten(jax.vjp(public, *arguments)[1])
        structure[:] = [tree]
        return leaves

    def call(dy: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        return list(jax.tree.unflatten(structure[0], leaves)(dy))

    return JaxPeer(plan, case, call, save, target)


def xla(case: Case, plan: Plan) -> JaxPeer:
    """The textbook formula as a peer. Backward starts from saved statistics."""
    formula, saved = case.operation.xla[case.direction], case.operation.xla.get("saved")
    if case.direction == "fwd":
        return JaxPeer(plan, case, formula)

    def save(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        return [x, *others, *(saved(x) if saved else [])]

    return JaxPeer(plan, case, formula, save)


class CopyPeer(JaxPeer):
    """A copy that reads and writes the case's number of bytes, or up to 7 fewer."""

    def types(self) -> list[Any]:
        size = max(1, self.case.bytes // 8)
        self._kind = jax.ShapeDtypeStruct((size,), jnp.dtype("float32"))
        self._random = random(self._kind.shape, "float32", "float32", self.plan.device)
        return [self._kind]

    def arguments(self, inputs: Inputs) -> list[tuple[Any, ...]]:
        return [(self._random(2000 + k),) for k in range(len(inputs.calls))]


def copy(case: Case, plan: Plan) -> JaxPeer:
    """The copy that all peers are compared with."""

    def call(x: jax.Array) -> list[jax.Array]:
        if not testing.has_handlers(plan.platform):
            return [jnp.copy(x)]
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return [jax.ffi.ffi_call(f"{_registry.TARGET_PREFIX}device_copy", kind)(x)]

    return CopyPeer(plan, case, call)
