"""Clips as JAX's programs: many turns in one program, so that little host time is in the figures.

A program of one turn would take the host longer to launch, with thousands of arrays, than the
device to run. A loop's turns are one after the other, and each has to do all of its work:

- What is carried from turn to turn has one buffer, as donated arguments have: alone, the gradients
  that a turn has clipped are those that the next one clips. XLA fuses nothing over the end of a
  turn and, as it knows the number of turns, the host takes no part in them.
- In a step the clipped gradients are not kept (but in "inplace_step"), as they would have to be
  written, which a training step need not. The same gradients serve all turns. A barrier ties them
  to the number of the turn: else their norm would be taken out of the loop. It is there without a
  clip too.
- `max_norm` is an argument, and falls a little in each turn where the turn before has clipped
  already, so that each turn clips.
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
DECAY_OF_MOMENT = 0.9  # AdamW's b1
DECAY = 0.99  # a turn's limit over that of the one before; hundreds stay in float16's range
CLIPPED, UNCLIPPED = 0.5, 10.0  # the first limit, of the norm
_BYTES = 1 << 38  # that a program is to go through: some 60 ms on a large GPU
_TURNS = (4, 64)
_TURNS_OF_MANY = 128  # where launching takes the host long
_MANY = 1000


def turns(group: Group, platform: str) -> int:
    """How many turns a program has; one on the CPU, where dispatch takes next to no time.

    (There XLA removes barriers early, too.)
    """
    if platform == "cpu":
        return 1
    if len(group.leaves) >= _MANY:
        return _TURNS_OF_MANY
    passes = 2 if group.form.in_step else 3
    return min(max(_BYTES // (passes * group.footprint + 1), _TURNS[0]), _TURNS[1])


class State(NamedTuple):
    """What a turn starts from, and leaves; donated.

    Attributes:
      max_norm: the turn's limit.
      decay: the next turn's limit over this one's.
      optimizer: of a step.
    """

    gradients: list[Any]
    max_norm: Any
    decay: Any
    parameters: list[Any]
    optimizer: Any


def adamw() -> Any:
    """What a step does with the gradients."""
    import optax

    return optax.adamw(LEARNING_RATE, b1=DECAY_OF_MOMENT)


def xla_clip(tree: Any, max_norm: Any) -> Any:
    """Optax's."""
    import optax

    return optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())[0]


def no_clip(tree: Any, max_norm: Any) -> Any:
    """What steps are compared with."""
    del max_norm
    return tree


def program(group: Group, clip: Clip, count: int) -> Callable[[State], Any]:
    """`count` turns; returns the state, and an array that the next run does not take over."""
    form = group.form

    def turn(number: Any, state: State) -> State:
        gradients = state.gradients
        if form.in_step:
            gradients, _ = jax.lax.optimization_barrier((gradients, number))
        clipped = clip(gradients, state.max_norm)
        parameters, optimizer = state.parameters, state.optimizer
        if form.in_step:  # as `optax.chain(clip, adamw)` and `optax.apply_updates` have it
            updates, optimizer = adamw().update(clipped, optimizer, parameters)
            parameters = [p + u for p, u in zip(parameters, updates, strict=True)]
        kept = clipped if form.in_place else state.gradients
        return State(kept, state.max_norm * state.decay, state.decay, parameters, optimizer)

    def run(state: State) -> Any:
        state = jax.lax.fori_loop(0, count, turn, state)
        return state, state.max_norm + 0

    return run


class Memory:
    """The one state that all programs of a group are run on in turn: a large one fits only once."""

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
        """The first turn's limit, and each turn's over the one before's."""
        decays = case.clipping and case.group.form.in_place
        factor = CLIPPED if case.clipping else UNCLIPPED
        return factor * self.norm, DECAY if decays else 1.0

    def begin(self, case: ClipCase) -> None:
        """Makes a new state for a case: of pristine gradients, parameters and an optimizer's."""
        self.state = None  # before there is another
        self._first = self.limit(case)
        self.state = _new_state(self.group, self.pristine, *self._first)

    def what_is_left(self, case: ClipCase, count: int, *, clips: bool) -> tuple[list[Any], float]:
        """After `count` turns of a new state, leaves, and what they are of the pristine ones."""
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
        """Gives the state pristine gradients and the first limit; the rest stays as it is."""
        assert self.state is not None
        max_norm, decay = map(jnp.asarray, self._first)
        self.state = self.state._replace(max_norm=max_norm, decay=decay)
        if self.group.form.in_place:
            self.state = self.state._replace(gradients=[])  # their memory is free for the copies
            self.state = self.state._replace(gradients=list(map(jnp.copy, self.pristine)))


def state_types(group: Group) -> State:
    """What programs are compiled for."""
    return jax.eval_shape(functools.partial(_new_state, group), group.leaves, 1.0, 1.0)


def _new_state(group: Group, pristine: list[Any], max_norm: float, decay: float) -> State:
    # Limits are weakly typed, as Python's numbers are: Optax's clip takes no others with 16 bits.
    gradients = list(map(jnp.copy, pristine))
    parameters = list(map(jnp.copy, pristine)) if group.form.in_step else []
    optimizer = adamw().init(parameters) if group.form.in_step else ()
    return State(gradients, jnp.asarray(max_norm), jnp.asarray(decay), parameters, optimizer)


class Carried(timing.InPlace):
    """A program that is run on the memory's state, and leaves it there."""

    def __init__(self, compiled: Any, memory: Memory) -> None:
        self._compiled, self._memory = compiled, memory

    def restart(self) -> None:
        """Else the gradients would be ever smaller."""
        self._memory.restart()

    def __call__(self, *_: Any) -> Any:
        """Runs on what the last run left; returns something to wait for, not the results."""
        self._memory.state, mark = self._compiled(self._memory.state)
        return [[mark]]


@dataclasses.dataclass
class LoopPeer:
    """A clip of JAX's on a group.

    Attributes:
      target: what the compiled program must hold.
    """

    group: Group
    plan: peers.Plan
    clip: Clip
    target: str = ""

    def compile(self, types: State) -> None:
        """Does what needs no device, in any thread."""
        with scope(self.group, self.plan.device):
            self._count = turns(self.group, self.plan.platform)
            run = program(self.group, self.clip, self._count)
            self._compiled = jax.jit(run, donate_argnums=0).lower(types).compile()
        if self.target not in (self._compiled.as_text() or ""):
            raise peers.PeerError(f"the compiled program does not call {self.target}…")

    def start(self, memory: Memory) -> timing.Runner:
        """What is ready to be timed, on a state that all of the group share."""
        carried = Carried(self._compiled, memory)
        if self.plan.platform == "cpu":
            return BlockingLoop(carried, self._count)
        return timing.QueuedProgram(carried, (), self._count, self.plan.device)


class BlockingLoop:
    """On the CPU: run by run, from a new start in each sample."""

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
    """As `peers.scope`, but without float64 where no leaf has it, as it is by default."""
    with jax.enable_x64(group.dtype == "float64"), jax.default_device(device):
        yield


def ours(group: Group, plan: peers.Plan) -> LoopPeer:
    """The clip of this library."""
    return LoopPeer(group, plan, group.form.clip, _registry.TARGET_PREFIX)


def xla(group: Group, plan: peers.Plan) -> LoopPeer:
    """Optax's clip."""
    return LoopPeer(group, plan, xla_clip)


def without(group: Group, plan: peers.Plan) -> LoopPeer:
    """The step without a clip."""
    return LoopPeer(group, plan, no_clip)
