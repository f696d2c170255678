"""Measures the cases of the suite "clip"."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_gradops._cli import info
from jax_gradops._tools.bench import cases, clip_gate, clip_loops, gate, peers, timing, torch_clip
from jax_gradops._tools.bench.clips import ClipCase, Group
from jax_gradops._tools.bench.measuring import Result, fail
from jax_gradops._tools.bench.peers import Plan

#: The possible competitors.
COMPETITORS = ("xla", "torch")
WITHOUT = "without"  # the peer that is the step without a clip
_TORCH_CALLS = 16  # a graph of more calls would be too large, with thousands of leaves


def plan_for(group: Group, device: Any) -> Plan:
    """Cold if one turn moves several times the cache's size; else warm is the only possibility."""
    platform = "cpu" if device.platform == "cpu" else "gpu"
    count = clip_loops.turns(group, platform)
    cold = group.footprint >= peers.CACHES * timing.cache_bytes(device)
    return Plan(platform, device, *((count, 0) if cold else (0, count)))


class Copy:
    """A copy of the case's minimum of bytes, cold or warm as the clip is."""

    def __init__(self, case: ClipCase, plan: Plan) -> None:
        # Only the number of bytes of this case matters to the copy.
        self._case = cases.Case("global_norm", "", "fwd", "float32", (1, max(1, case.bytes // 4)))
        calls = max(1, peers.plan_for(self._case, plan.device).calls)
        warm = peers.WARM_CALLS[plan.platform]
        self._plan = Plan(plan.platform, plan.device, *((calls, 0) if plan.calls else (0, warm)))
        self._peer = peers.copy(self._case, self._plan)

    def compile(self) -> None:
        """Compiles. This needs no device, and may run in any thread."""
        self._peer.compile()

    def start(self) -> timing.Runner:
        """Makes the runner."""
        inputs = peers.Inputs(self._case, [()] * max(1, self._plan.calls), ())
        return self._peer.start(inputs)[self._plan.figures[0]]


def run_all(
    chosen: Sequence[ClipCase],
    device: Any,
    competitors: Sequence[str],
    rounds: int,
    expired: Callable[[], bool],
) -> Iterator[Result]:
    """Yields a result for each case, until `expired` returns True."""
    for group, group_cases in itertools.groupby(chosen, lambda case: case.group):
        if expired():
            return
        with clip_loops.scope(group, device):
            measured = _Measured(group, device, competitors)
            for case in group_cases:
                if expired():
                    return
                yield measured.run(case, rounds)
            del measured  # frees its arrays before the next group's arrays are made


class _Measured:
    """The programs of a group, which are compiled once, and the group's memory."""

    def __init__(self, group: Group, device: Any, competitors: Sequence[str]) -> None:
        self._group, self._competitors = group, competitors
        self._plan = plan_for(group, device)
        made = {"ours": clip_loops.ours(group, self._plan)}
        if group.form.in_step:
            made[WITHOUT] = clip_loops.without(group, self._plan)
        if "xla" in competitors:
            made["xla"] = clip_loops.xla(group, self._plan)
        types = clip_loops.state_types(group)
        with concurrent.futures.ThreadPoolExecutor(min(8, info.usable_cpus())) as pool:
            compiled = {name: pool.submit(peer.compile, types) for name, peer in made.items()}
        self._made = made
        self._errors = {name: error for name, f in compiled.items() if (error := f.exception())}
        self._memory = clip_loops.Memory(group, self._plan)

    def run(self, case: ClipCase, rounds: int) -> Result:
        """Checks the state that each program leaves, and times the programs."""
        result = Result(case, self._plan)
        runners: dict[str, timing.Runner] = {}
        for name, peer in self._made.items():
            try:
                if error := self._errors.get(name):
                    raise error
                runners[name] = self._checked(case, result, name, peer)
            except Exception as error:  # XLA may raise any exception
                fail(result, name, error)
        if "torch" in self._competitors and not self._group.form.in_step:
            try:
                runners["torch"] = self._checked_torch(case, result)
            except Exception as error:  # PyTorch may, too
                fail(result, "torch", error)
        if not result.problem:
            self._time(case, result, runners, rounds)
        self._memory.state = None
        return result

    def _checked(
        self, case: ClipCase, result: Result, name: str, peer: clip_loops.LoopPeer
    ) -> timing.Runner:
        memory = self._memory
        memory.begin(case)
        runner = peer.start(memory)
        runner.results()
        got, factor = memory.what_is_left(case, runner.calls, clips=name != WITHOUT)
        self._check(result, name, got, factor, runner.calls)
        return runner

    def _checked_torch(self, case: ClipCase, result: Result) -> timing.Runner:
        max_norm, _ = self._memory.limit(case)
        pristine = self._memory.pristine
        clip = torch_clip.TorchClip(pristine, max_norm, self._plan)
        factor = min(1.0, max_norm / self._memory.norm)
        self._check(result, "torch", clip.clipped(), factor, 1)
        return clip.runner(min(_TORCH_CALLS, self._plan.calls or self._plan.warm_calls))

    def _check(self, result: Result, name: str, got: Any, factor: float, turns: int) -> None:
        """Records a mistake. Wrong competitors are timed too: speed does not depend on the numbers.

        Example: Optax adds the squares of 16-bit leaves in 16 bits. With many leaves the sum is
        wrong.
        """
        slack = 1.0 if name == "ours" else gate.SLACK_OF_OTHERS
        mistake, result.errors[name] = clip_gate.mistakes(
            got, self._memory.pristine, factor, turns, slack
        )
        if mistake:
            result.wrong[name] = mistake

    def _time(
        self, case: ClipCase, result: Result, runners: dict[str, timing.Runner], rounds: int
    ) -> None:
        copy = Copy(case, self._plan)
        copy.compile()
        self._memory.begin(case)
        runners["copy"] = copy.start()
        samples = timing.sample_all(runners, rounds, self._plan.platform)
        timings = {name: timing.summary(taken) for name, taken in samples.items()}
        without = samples.get(WITHOUT)
        if without is not None:
            result.steps = {n: t for n, t in timings.items() if n != "copy"}
            timings = {
                name: timings[name] if name == "copy" else timing.summary(taken, without)
                for name, taken in samples.items()
                if name != WITHOUT
            }
        result.timings[self._plan.figures[0]] = timings
