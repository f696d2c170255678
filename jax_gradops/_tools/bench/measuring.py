"""Measures the cases of the suite "ops"."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_gradops._cli import info
from jax_gradops._tools.bench import (
    gate,
    jax_functions,
    peers,
    timing,
    torch_functions,
    torch_peers,
)
from jax_gradops._tools.bench.cases import Case, Timed
from jax_gradops._tools.bench.peers import Figure, Inputs, Peer, PeerError, Plan

#: The possible competitors, in the order of the table.
COMPETITORS = ("xla", *jax_functions.MAKERS, *torch_functions.REQUIREMENTS)


@dataclasses.dataclass
class Result:
    """The measurements of one case.

    Attributes:
      timings: by figure, and then by peer: ``"ours"``, ``"copy"``, competitors.
      errors: by peer, the largest error that the gate found, as a fraction of a result's largest
        value.
      wrong: by peer, the mistake that the gate found. A wrong peer is not timed.
      failed: by peer, the reason why it did not run.
      steps: by peer, the time of the whole step. Then `timings` hold only the additional time of
        the op.
    """

    case: Timed
    plan: Plan
    timings: dict[Figure, dict[str, timing.Timing]] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: dict[str, timing.Timing] = dataclasses.field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why this library has no figures here; empty if it has figures."""
        for what, found in (("wrong", self.wrong), ("failed", self.failed)):
            if "ours" in found:
                return f"{self.case}: ours is {what}: {found['ours']}"
        return ""


def why_not_installed(competitor: str, platform: str) -> str:
    """Why a competitor cannot take part; empty if it can."""
    if competitor == "xla":
        return ""
    packages, on_cpu = torch_functions.REQUIREMENTS.get(competitor, ((competitor,), True))
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return "" if on_cpu or platform == "gpu" else "it runs on GPUs only"


def has_any(competitor: str, cases: Sequence[Case]) -> bool:
    """Whether a competitor supports any of the cases."""
    return any(_covers(competitor, case) for case in cases)


def _covers(competitor: str, case: Case) -> bool:
    if competitor in jax_functions.MAKERS:
        return case.op in jax_functions.MAKERS[competitor]
    return competitor == "xla" or torch_functions.covers(competitor, case)


def make_peers(case: Case, plan: Plan, competitors: Sequence[str]) -> dict[str, Peer]:
    """Makes all peers that are timed on a case."""
    made: dict[str, Peer] = {"ours": peers.ours(case, plan), "copy": peers.copy(case, plan)}
    for name in competitors:
        if not _covers(name, case):
            continue
        if name == "xla":
            made[name] = peers.xla(case, plan)
        elif name in jax_functions.MAKERS:
            function = jax_functions.MAKERS[name][case.op](case)
            made[name] = peers.differentiable(case, plan, function)
        else:
            made[name] = torch_peers.TorchPeer(name, case, plan)
    return made


def run_all(
    cases: Sequence[Case],
    device: Any,
    competitors: Sequence[str],
    rounds: int,
    expired: Callable[[], bool],
) -> Iterator[Result]:
    """Yields a result for each case, until `expired` returns True.

    Threads compile the programs of some cases in advance. No thread works during a measurement.
    """
    ahead = min(8, info.usable_cpus())
    with concurrent.futures.ThreadPoolExecutor(ahead) as pool:
        for first in range(0, len(cases), ahead):
            batch, tasks = [], []
            for case in cases[first : first + ahead]:
                plan = peers.plan_for(case, device)
                made = make_peers(case, plan, competitors)
                compiled = {name: pool.submit(peer.compile) for name, peer in made.items()}
                shared = (
                    pool.submit(Inputs.compile, case, plan),
                    pool.submit(gate.program, case, device),
                )
                batch.append((case, Result(case, plan), made, compiled))
                tasks += [*shared, *compiled.values()]
            try:
                concurrent.futures.wait(tasks)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
            while batch:
                if expired():
                    return
                case, result, made, compiled = batch.pop(0)
                for name, future in compiled.items():
                    if error := future.exception():
                        fail(result, name, error)
                        del made[name]
                run_case(case, result, made, rounds)
                del made
                yield result


def fail(result: Result, name: str, error: BaseException) -> None:
    """Records why a peer has no figures."""
    text = str(error).strip().splitlines() or [""]
    known = isinstance(error, PeerError)
    result.failed[name] = text[0] if known else f"{type(error).__name__}: {text[0]}"[:200]


def run_case(case: Case, result: Result, made: dict[str, Peer], rounds: int) -> None:
    """Starts the peers, checks their results, and times the correct ones."""
    inputs = Inputs.make(case, result.plan)
    runners: dict[str, dict[Figure, timing.Runner]] = {}
    for name, peer in made.items():
        try:
            started = peer.start(inputs)
            if name != "copy":
                results = started[result.plan.figures[0]].results()
                mistake, result.errors[name] = gate.mistakes(
                    case, result.plan.device, inputs, results, name == "ours"
                )
                if mistake:
                    result.wrong[name] = mistake
                    continue
            runners[name] = started
        except Exception as error:  # a competitor may raise any exception
            fail(result, name, error)
    if result.problem:
        return
    for figure in result.plan.figures:
        ready = {name: started[figure] for name, started in runners.items()}
        result.timings[figure] = timing.measure(ready, rounds, result.plan.platform)
