"""Clips in JAX programs. Each program loops over many turns, so that host time is negligible.

With thousands of arrays, the host takes longer to launch a program than the device takes to run one
turn. The turns of a loop run one after another. Each turn must do all of its work:

- A loop carries its state in one buffer, as donated arguments do. If a program only clips, each
  turn clips the gradients that the turn before has clipped. XLA does not fuse operations of two
  turns. XLA knows the number of turns, so the host takes no part in the loop.
- A step keeps only the original gradients, because a training step need not write the clipped ones.
  The form "inplace_step" is the exception. All turns read these gradients. A barrier makes them
  depend on the turn's number. Else XLA would move the computation of the norm out of the loop. The
  step without a clip has the barrier too.
- `max_norm` is an argument. If turns clip clipped gradients, `max_norm` falls a little in each
  turn. So each turn has something to clip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_gradops import _registry
from jax_gradops._tools.bench import clip_gate, peers, timing
from jax_gradops._tools.bench.clips import Clip, ClipCase, Group

LEARNING_RATE = 1e-3
DECAY_OF_MOMENT = 0.9  # b1 of AdamW
DECAY = 0.99  # max_norm of a turn over max_norm of the turn before; float16 bears hundreds of turns
CLIPPED, UNCLIPPED = 0.5, 10.0  # the first max_norm, as a fraction of the norm
_BYTES = 1 << 38  # bytes that a program should move: about 60 ms on a large GPU
_TURNS = (4, 64)
_TURNS_OF_MANY = 128  # for trees of many leaves, which take the host long to launch
_MANY = 1000


def turns(group: Group, platform: str) -> int:
    """The number of turns of a program.

    On the CPU the number is 1: dispatch takes almost no time, and XLA removes barriers early.
    """
    if platform == "cpu":
        return 1
    if len(group.leaves) >= _MANY:
        return _TURNS_OF_MANY
    passes = 2 if group.form.in_step else 3
    return min(max(_BYTES // (passes * group.footprint + 1), _TURNS[0]), _TURNS[1])


class State(NamedTuple):
    """The input of a turn, and its output. The program's argument is donated.

    Attributes:
      max_norm: the turn's limit.
      decay: the next turn's limit over this turn's limit.
      optimizer: the optimizer's state, if the form is a step.
    """

    gradients: list[Any]
    max_norm: Any
    decay: Any
    parameters: list[Any]
    optimizer: Any


def adamw() -> Any:
    """The optimizer of a step."""
    import optax

    return optax.adamw(LEARNING_RATE, b1=DECAY_OF_MOMENT)


def xla_clip(tree: Any, max_norm: Any) -> Any:
    """Clips with Optax."""
    import optax

    return optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())[0]


def no_clip(tree: Any, max_norm: Any) -> Any:
    """Does not clip. Steps with a clip are compared with a step that has this function."""
    del max_norm
    return tree


def program(group: Group, clip: Clip, count: int) -> Callable[[State], Any]:
    """A program of `count` turns; returns the state, and an array to wait for."""
    form = group.form

    def turn(number: Any, state: State) -> State:
        gradients = state.gradients
        if form.in_step:
            gradients, _ = jax.lax.optimization_barrier((gradients, number))
        clipped = clip(gradients, state.max_norm)
        parameters, optimizer = state.parameters, state.optimizer
        if form.in_step:  # as in `optax.chain(clip, adamw)` and `optax.apply_updates`
            updates, optimizer = adamw().update(clipped, optimizer, parameters)
            parameters = [p + u for p, u in zip(parameters, updates, strict=True)]
        kept = clipped if form.in_place else state.gradients
        return State(kept, state.max_norm * state.decay, state.decay, parameters, optimizer)

    def run(state: State) -> Any:
        state = jax.lax.fori_loop(0, count, turn, state)
        return state, state.max_norm + 0

    return run


class Memory:
    """The only state of a group. All its programs run on this state: large ones fit only once."""

    def __init__(self, group: Group, plan: peers.Plan) -> None:
        self.group = group
        self.pristine = [
            peers.random(t.shape, t.dtype.name, t.dtype.name, plan.device)(seed)
            for seed, t in enumerate(group.leaves)
        ]
        self.norm = clip_gate.norm(self.pristine)
        self.state: State | None = None
        self._first = (0.0, 1.0)

    def limit(self, case: ClipCase) -> tuple[float, float]:
        """The limit of the first turn, and the ratio of each turn's limit to the limit before."""
        decays = case.clipping and case.group.form.in_place
        factor = CLIPPED if case.clipping else UNCLIPPED
        return factor * self.norm, DECAY if decays else 1.0

    def begin(self, case: ClipCase) -> None:
        """Makes a new state for a case: copies of the pristine gradients, and a fresh optimizer."""
        self.state = None  # frees the old state before the new one is made
        self._first = self.limit(case)
        self.state = _new_state(self.group, self.pristine, *self._first)

    def what_is_left(self, case: ClipCase, count: int, *, clips: bool) -> tuple[list[Any], float]:
        """The leaves after `count` turns of a new state, and their expected factor."""
        assert self.state is not None
        limit, decay = self.limit(case)
        factors = [
            limit * decay**i / self.norm if clips and case.clipping else 1.0 for i in range(count)
        ]
        if not case.group.form.in_step:
            return self.state.gradients, factors[-1]
        moment = 0.0
        for factor in factors:
            moment = DECAY_OF_MOMENT * moment + (1 - DECAY_OF_MOMENT) * factor
        return self.state.optimizer[0].mu, moment

    def restart(self) -> None:
        """Resets the gradients, if turns change them, and the limit.

        Keeps the rest of the state.
        """
        assert self.state is not None
        max_norm, decay = map(jnp.asarray, self._first)
        self.state = self.state._replace(max_norm=max_norm, decay=decay)
        if self.group.form.in_place:
            # Frees the gradients' memory for the copies.
            self.state = self.state._replace(gradients=[])
            self.state = self.state._replace(gradients=list(map(jnp.copy, self.pristine)))


def state_types(group: Group) -> State:
    """The types that programs are compiled for."""
    return jax.eval_shape(functools.partial(_new_state, group), group.leaves, 1.0, 1.0)


def _new_state(group: Group, pristine: list[Any], max_norm: float, decay: float) -> State:
    # Limits are weakly typed, like Python numbers. For 16-bit leaves, Optax's clip needs this.
    gradients = list(map(jnp.copy, pristine))
    parameters = list(map(jnp.copy, pristine)) if group.form.in_step else []
    optimizer = adamw().init(parameters) if group.form.in_step else ()
    return State(gradients, jnp.asarray(max_norm), jnp.asarray(decay), parameters, optimizer)


class Carried(timing.InPlace):
    """A program that runs on the memory's state and stores the new state there."""

    def __init__(self, compiled: Any, memory: Memory) -> None:
        self._compiled, self._memory = compiled, memory

    def restart(self) -> None:
        """Resets the gradients. Otherwise they would become smaller and smaller."""
        self._memory.restart()

    def __call__(self, *_: Any) -> Any:
        """Runs on the state of the last run. Returns an array to wait for, not the results."""
        self._memory.state, mark = self._compiled(self._memory.state)
        return [[mark]]


@dataclasses.dataclass
class LoopPeer:
    """One JAX clip on one group.

    Attributes:
      target: a text that the compiled program must contain.
    """

    group: Group
    plan: peers.Plan
    clip: Clip
    target: str = ""

    def compile(self, types: State) -> None:
        """Compiles. This needs no device, and may run in any thread."""
        with scope(self.group, self.plan.device):
            self._count = turns(self.group, self.plan.platform)
            run = program(self.group, self.clip, self._count)
            self._compiled = jax.jit(run, donate_argnums=0).lower(types).compile()
        if self.target not in (self._compiled.as_text() or ""):
            raise peers.PeerError(f"the compiled program does not call {self.target}…")

    def start(self, memory: Memory) -> timing.Runner:
        """Makes a runner on the state that all programs of the group share."""
        carried = Carried(self._compiled, memory)
        if self.plan.platform == "cpu":
            return BlockingLoop(carried, self._count)
        return timing.QueuedProgram(carried, (), self._count, self.plan.device)


class BlockingLoop:
    """On the CPU: waits for each run. Each sample starts from a reset state."""

    def __init__(self, carried: Carried, calls: int) -> None:
        self.calls = calls
        self._carried = carried
        self._program = timing.BlockingProgram(carried, (), calls, None)

    def results(self) -> list[jax.Array]:
        return self._program.results()

    def sample(self, runs: int) -> tuple[float, bool]:
        self._carried.restart()
        return self._program.sample(runs)


@contextlib.contextmanager
def scope(group: Group, device: Any) -> Iterator[None]:
    """As `peers.scope`, but float64 is enabled only if a leaf has it: the default of JAX."""
    with jax.enable_x64(group.dtype == "float64"), jax.default_device(device):
        yield


def ours(group: Group, plan: peers.Plan) -> LoopPeer:
    """The library's clip as a peer."""
    return LoopPeer(group, plan, group.form.clip, _registry.TARGET_PREFIX)


def xla(group: Group, plan: peers.Plan) -> LoopPeer:
    """Optax's clip as a peer."""
    return LoopPeer(group, plan, xla_clip)


def without(group: Group, plan: peers.Plan) -> LoopPeer:
    """The step without a clip as a peer."""
    return LoopPeer(group, plan, no_clip)
