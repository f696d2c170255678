"""``python -m jax_gradops bench``: times the ops against XLA, PyTorch, other libraries, a copy."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax_gradops
from jax_gradops._cli import INTERRUPTED, info
from jax_gradops._tools.bench import (
    cases,
    clip_measuring,
    clips,
    measuring,
    options,
    peers,
    plots,
    record,
    report,
    results,
    sheet,
    train,
    train_measuring,
    train_report,
    trees,
)
from jax_gradops._tools.bench.errors import BenchError

add_arguments = options.add_arguments
#: By suite: the function that runs it, the JSON of its results, the class that shows these.
SUITES: dict[str, Any] = {
    "ops": (measuring.run_all, results.as_json, report.Report),
    "clip": (clip_measuring.run_all, results.as_json, report.Report),
    "train": (train_measuring.run_all, train_report.as_json, train_report.Report),
}


def run(args: argparse.Namespace) -> int:
    """Runs the requested cases, or shows the results in a file.

    Returns 0 after success, 1 if a result is wrong, 2 if the work cannot be done. Returns
    `INTERRUPTED` if the run was stopped.
    """
    # PyTorch needs GPU memory beside JAX.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        options.check(args)
        return _show(args) if args.file else _run(args, _device(args.device))
    except BenchError as error:
        print(f"jax_gradops bench: error: {error}", file=sys.stderr)
        return 2


def _show(args: argparse.Namespace) -> int:
    """Shows the results of an earlier run."""
    content = options.narrow(args, record.read(args.file))
    print(record.describe(content))
    *_, Report = SUITES[content["suite"]]
    found = content["results"]
    timed = {peer for r in found for f in report.FIGURES if f in r for peer in r[f]["peers"]}
    with Report([c for c in content["competitors"] if c in timed], [], found):
        pass
    _write_others(args, content)
    return 0


def _write_others(args: argparse.Namespace, content: dict[str, Any]) -> None:
    if args.csv is not None:
        record.write(args.csv, sheet.text(content).encode())
    if args.plot is not None:
        plots.write(args.plot, content)


# --- What is timed -------------------------------------------------------------------------------


def _device(wanted: str | None) -> Any:
    found, error = info.find_devices()
    platform = wanted or ("gpu" if any(d.platform == "gpu" for d in found) else "cpu")
    devices = [d for d in found if d.platform == platform]
    if not devices:
        reason = error or f"JAX has {', '.join(sorted({d.platform for d in found}))} devices only"
        raise BenchError(f"there is no {platform.upper()} here: {reason}")
    in_use = jax_gradops.implementation_in_use("layer_norm", platform)
    if in_use.implementation != "ffi":
        raise BenchError(f"there are no kernels to time: {in_use.reason}")
    return devices[0]


def _competitors(args: argparse.Namespace, platform: str) -> list[str]:
    """The requested competitors, or all installed ones."""
    known = options.COMPETITORS[args.suite]
    wanted: Sequence[str] | None = args.against
    reasons = {c: measuring.why_not_installed(c, platform) for c in known}
    if wanted is None:
        return [c for c, reason in reasons.items() if not reason]
    for competitor in wanted:
        if reasons[competitor]:
            raise BenchError(f"cannot compare with {competitor}: {reasons[competitor]}")
    return [c for c in known if c in wanted]


def _chosen(args: argparse.Namespace, platform: str) -> Sequence[Any]:
    if args.suite == "train":
        return train.select(args, platform)
    dtypes = args.dtype or ["bfloat16", "float32"]
    forms = args.form or options.FORMS[args.suite]
    if args.suite == "clip":
        return clips.select(args.tree or trees.DEFAULT, forms, dtypes)
    ops, directions = args.op or cases.OPS, args.direction or cases.DIRECTIONS
    shapes, layouts = args.shape or ["default"], args.layout or cases.LAYOUTS
    chosen = cases.select(ops, forms, directions, dtypes, shapes, layouts, platform)
    if not chosen:
        asked = ", ".join(
            s if isinstance(s, str) else cases.shape_text(s) for s in args.shape or []
        )
        formed = f" in form {', '.join(args.form)}" if args.form else ""
        where = f" in shape {asked}" if asked else ""
        raise BenchError(f"{', '.join(ops)} has no {', '.join(directions)} to time{formed}{where}")
    if args.layout and not any(case.layout for case in chosen):
        raise BenchError(
            "--layout: for shapes of four axes only, which batch_norm and group_norm have"
        )
    return chosen


# --- Running -------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, device: Any) -> int:
    platform = "cpu" if device.platform == "cpu" else "gpu"
    chosen: Any = _chosen(args, platform)
    competitors = _competitors(args, platform)
    header = {"suite": args.suite, "rounds": args.rounds}
    header |= record.environment(device, platform, competitors)
    recorded = record.Record(args.json, header, _command(args))
    if args.resume:
        recorded.go_on()
    print(record.describe(header), flush=True)
    if header["copy"] != "device_copy":
        print("This build has no native copy: the copy is jax.numpy's, which may be slower")
    earlier = {case: found for case in chosen if (found := recorded.find(case))}
    if earlier:
        print(f"{len(earlier)} of {len(chosen)} cases are in {args.json} already")
    left = [case for case in chosen if case not in earlier]
    columns = competitors
    if args.suite == "ops" and args.against is None:
        columns = [c for c in competitors if measuring.has_any(c, chosen)]
    *_, Report = SUITES[args.suite]
    shown = Report(columns, [str(case) for case in left], list(earlier.values()))
    interrupted = _measure(args, device, recorded, left, shown)
    recorded.write(left)
    if recorded.results:
        _write_others(args, recorded.content)
    return _conclude(args, recorded, left, interrupted)


def _command(args: argparse.Namespace) -> str:
    """The typed command without the folders of this machine: other people read result files."""
    words = [word for word in args.command_line if word != "--resume"]
    for path in filter(None, (args.json, args.csv, args.plot, args.profile)):
        words = [word.replace(str(path), path.name) for word in words]
    return shlex.join(["python", "-m", "jax_gradops", *words])


def _measure(
    args: argparse.Namespace,
    device: Any,
    recorded: record.Record,
    left: list[Any],
    shown: Any,
) -> bool:
    """Runs the cases in `left`, removes each finished one; returns whether it was interrupted."""
    run_all, as_json, _ = SUITES[args.suite]
    competitors = recorded.content["competitors"]
    started = time.perf_counter()

    def expired() -> bool:
        return args.time_limit is not None and time.perf_counter() - started > args.time_limit

    with peers.scope(device), shown:
        try:
            for result in run_all(tuple(left), device, competitors, args.rounds, expired):
                left.pop(0)
                recorded.add(as_json(result), left)
                shown.add(recorded.results[-1])
        except KeyboardInterrupt:
            return True
    return False


def _conclude(
    args: argparse.Namespace, recorded: record.Record, left: Sequence[Any], interrupted: bool
) -> int:
    if left:
        count = f"{len(left)} case{'s were' if len(left) > 1 else ' was'}"
        why = "it was interrupted" if interrupted else f"{args.time_limit:g} s had passed"
        how = "the same command with --resume measures the rest"
        if args.json is None:
            how = "--json FILE keeps what is measured, for --resume to go on from"
        print(f"{count} left out, as {why}: {how}")
    problems = [r["problem"] for r in recorded.results if r["problem"]]
    for problem in problems:
        print(f"jax_gradops bench: error: {problem}", file=sys.stderr)
    return INTERRUPTED if interrupted else 1 if problems else 0
