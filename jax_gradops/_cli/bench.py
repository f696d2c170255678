"""``python -m jax_gradops bench``: times the ops against XLA, PyTorch and others, and a copy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax_gradops
from jax_gradops._cli import info
from jax_gradops._cli.benchmark import (
    cases,
    clip_measuring,
    clips,
    measuring,
    peers,
    report,
    timing,
    train,
    train_measuring,
    train_report,
    trees,
)

#: What competitors are called on PyPI.
PACKAGES = {
    "torch": "torch",
    "cudnn": "torch",
    "liger": "liger_kernel",
    "quack": "quack_kernels",
    "triton": "triton",
}
#: By suite, the options that no other has.
OPTIONS = {
    "ops": ("op", "direction", "shape", "layout"),
    "clip": ("form", "tree"),
    "train": train.OPTIONS,
}
#: By suite, who can be named as a competitor.
COMPETITORS = {
    "ops": measuring.COMPETITORS,
    "clip": clip_measuring.COMPETITORS,
    "train": train_measuring.COMPETITORS,
}
#: What runs a suite, and what shows and writes its results.
RUNNERS = {
    "ops": (measuring.run_all, report),
    "clip": (clip_measuring.run_all, report),
    "train": (train_measuring.run_all, train_report),
}
FORMATS = (
    "ROWSxFEATURES, as in 32768x4096, or of images, which batch_norm has too, "
    "BATCHxHEIGHTxWIDTHxCHANNELS, as in 256x56x56x256, or default, or all"
)
NOTE = """
A figure is the median over interleaved rounds of the device's time per call, in microseconds, with
the 20th and the 80th percentile. "cold" goes through three times the cache or more, "warm" stays in
it, "latency" is one call from Python to its results. "Of copy" is the rate of the least number of
bytes that the op has to move, over that of a plain copy of as many in the same rounds. * marks
figures that the host's dispatch is in. Every result is compared with float64 before it is timed.

Batch norm is that of training: alone, with relu, and with a residual's addition and relu
("add_relu"). Images are asked for with channels last, and lie in memory as --layout says. XLA has
Flax's formula; "torch" is PyTorch's own kernels, "cudnn" those of cuDNN, called from PyTorch, which
has further kernels for relu and the addition.

The suite "ops" has each op on one array, the suite "clip" clipping whole trees of gradients: alone
("transform"), with the gradients donated, and in the program of an AdamW step ("step"), where the
figure is what the step takes longer than without a clip; and both again with
backward.inplace_clip_by_global_norm, in whose step all keep the clipped gradients ("inplace",
"inplace_step"). Each with something to clip and nothing. Here competitors whose results are wrong
are timed, too, and marked.

The suite "train" has whole training steps, jitted, their state donated: as users of Flax and Optax
write them ("stock"), and with this library's ops. All train from the same parameters on the same
data: resnet50 on one random batch, gpt2 (GELU by tanh, as GPT-2 has it; gpt2-exact: by erf) each
step on other windows of Python's language reference and standard library, whose words are its
tokens. Figures are milliseconds; "over stock" is stock's time over the variant's, in the same
rounds. It is an error if a variant's losses differ from stock's by more than roundings explain.
"""


class BenchError(Exception):
    """What the user asked for cannot be done; the message says why."""


# --- Arguments -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = NOTE.strip()
    short = {s: name for name, s in cases.SHORT_DTYPES.items()}

    def add(name: str, values: Sequence[str], default: str, what: str, **aliases: str) -> None:
        parser.add_argument(
            f"--{name}",
            type=_names(name, values, aliases),
            metavar="NAME,…",
            help=f"{what}: {', '.join(values)} (default: {default})",
        )

    parser.add_argument(
        "--suite", choices=tuple(OPTIONS), default="ops", help="what is timed (default: ops)"
    )
    add("op", cases.OPS, "all", "ops")
    add("direction", cases.DIRECTIONS, "all", "directions")
    add("form", tuple(clips.FORMS), "all", "suite clip: ways to clip")
    add("dtype", cases.DTYPES, "bfloat16,float32", "dtypes", **short)
    add("against", measuring.COMPETITORS, "those that are installed", "competitors")
    parser.add_argument(
        "--shape",
        type=_shapes,
        metavar="SHAPE,…",
        help=f"{FORMATS}: rows of 64 to 65536 features, many and few",
    )
    add("layout", cases.LAYOUTS, "all", "of shapes of four axes")
    parser.add_argument(
        "--tree",
        type=_trees,
        metavar="TREE,…",
        help=f"suite clip: {trees.FORMATS} (default: {','.join(trees.DEFAULT)})",
    )
    train.add_arguments(add, parser, _positive(int))
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: the GPU if there is one")
    parser.add_argument("--rounds", type=_positive(int), default=15, help="default: %(default)s")
    parser.add_argument(
        "--time-limit",
        type=_positive(float),
        metavar="SECONDS",
        help="begin no case after this time; what was left out is said",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")


def _names(what: str, values: Sequence[str], aliases: dict[str, str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [aliases.get(n, n) for n in text.split(",") if n]
        unknown = [n for n in names if n not in values]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {', '.join(map(repr, unknown)) or repr(text)}; "
                f"known are {', '.join(values)}"
            )
        return list(dict.fromkeys(names))

    return parse


def _shapes(text: str) -> list[cases.Shape | str]:
    shapes: list[cases.Shape | str] = []
    for part in text.split(","):
        if part in ("default", "all"):
            shapes.append(part)
            continue
        sizes = part.split("x")
        numbers = all(s.isascii() and s.isdigit() and int(s) for s in sizes)
        if len(sizes) not in (2, 4) or not numbers:
            raise argparse.ArgumentTypeError(f"unknown shape {part!r}; expected {FORMATS}")
        shapes.append(tuple(map(int, sizes)))
    return shapes


def _trees(text: str) -> list[str]:
    names = [n for n in text.split(",") if n]
    unknown = [n for n in names if not trees.is_known(n)]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown tree {', '.join(map(repr, unknown)) or repr(text)}; expected {trees.FORMATS}"
        )
    return list(dict.fromkeys(names))


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return value

    return parse


# --- Running -------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Times what was asked for; returns 0, 1 if a result is wrong, or 2 if it cannot be done."""
    # PyTorch needs memory beside JAX.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        _check_suite(args)
        return _run(args, _device(args.device))
    except BenchError as error:
        print(f"jax_gradops bench: error: {error}", file=sys.stderr)
        return 2


def _check_suite(args: argparse.Namespace) -> None:
    """Refuses options of other suites, what a suite cannot do without, or cannot compare with."""
    for suite, options in OPTIONS.items():
        given = [f"--{o.replace('_', '-')}" for o in options if getattr(args, o) is not None]
        if suite != args.suite and given:
            raise BenchError(f"{', '.join(given)}: for --suite {suite} only")
    needed = {"ops": (), "clip": ("Optax",), "train": ("Optax", "Flax")}[args.suite]
    for package in needed:
        if importlib.util.find_spec(package.lower()) is None:
            raise BenchError(f"--suite {args.suite} needs {package}: pip install {package.lower()}")
    others = [c for c in args.against or () if c not in COMPETITORS[args.suite]]
    if others:
        what = {"clip": "clip", "train": "training step"}[args.suite]
        raise BenchError(f"cannot compare with {', '.join(others)}: there is no {what}")
    if args.suite == "train" and train.why_not(args):
        raise BenchError(train.why_not(args))
    if args.profile is not None:
        try:
            args.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(args.profile, error) from None


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


def _competitors(args: argparse.Namespace, platform: str, chosen: Any) -> list[str]:
    """Those asked for, or those that are installed and have something of what is timed."""
    known = COMPETITORS[args.suite]
    wanted: Sequence[str] | None = args.against
    reasons = {c: measuring.why_not_installed(c, platform) for c in known}
    if wanted is None:
        installed = (c for c, reason in reasons.items() if not reason)
        return [c for c in installed if args.suite != "ops" or measuring.has_any(c, chosen)]
    for competitor in wanted:
        if reasons[competitor]:
            raise BenchError(f"cannot compare with {competitor}: {reasons[competitor]}")
    return [c for c in known if c in wanted]


def _chosen(args: argparse.Namespace, platform: str) -> Sequence[Any]:
    if args.suite == "train":
        return train.select(args, platform)
    dtypes = args.dtype or ["bfloat16", "float32"]
    if args.suite == "clip":
        return clips.select(args.tree or trees.DEFAULT, args.form or list(clips.FORMS), dtypes)
    ops, directions = args.op or cases.OPS, args.direction or cases.DIRECTIONS
    shapes, layouts = args.shape or ["default"], args.layout or cases.LAYOUTS
    chosen = cases.select(ops, directions, dtypes, shapes, layouts, platform)
    if not chosen:
        asked = ", ".join(
            s if isinstance(s, str) else cases.shape_text(s) for s in args.shape or []
        )
        where = f" in shape {asked}" if asked else ""
        raise BenchError(f"{', '.join(ops)} has no {', '.join(directions)} to time{where}")
    if args.layout and not any(case.layout for case in chosen):
        raise BenchError("--layout: for shapes of four axes only, which batch_norm has")
    return chosen


def _run(args: argparse.Namespace, device: Any) -> int:
    platform = "cpu" if device.platform == "cpu" else "gpu"
    chosen: Any = _chosen(args, platform)
    competitors = _competitors(args, platform, chosen)
    run_all, shows = RUNNERS[args.suite]
    environment = _environment(device, platform, competitors)
    print(_describe(environment), flush=True)
    started, results = time.perf_counter(), []

    def expired() -> bool:
        return args.time_limit is not None and time.perf_counter() - started > args.time_limit

    with peers.scope(device), shows.Report(competitors, chosen) as shown:
        for result in run_all(chosen, device, competitors, args.rounds, expired):
            results.append(result)
            shown.add(result)
            _write(args.json, environment, args, results, chosen)  # as far as it got
    _write(args.json, environment, args, results, chosen)
    left_out = chosen[len(results) :]
    if left_out:
        count = f"{len(left_out)} case{'s were' if len(left_out) > 1 else ' was'}"
        print(f"{count} left out, as {args.time_limit:g} s had passed")
    problems = [r.problem for r in results if r.problem]
    for problem in problems:
        print(f"jax_gradops bench: error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _environment(device: Any, platform: str, competitors: Sequence[str]) -> dict[str, Any]:
    """Machine and versions; made of what JSON can hold."""
    found = info.collect()
    versions = {p: info.version(p) for c, p in PACKAGES.items() if c in competitors}
    return {
        "device": device.device_kind,
        "processor": info.processor(),
        "platform": platform,
        "cache_bytes": timing.cache_bytes(device),
        "copy": "device_copy" if peers.has_device_copy(platform) else "jax.numpy.copy",
        "competitors": list(competitors),
        "versions": found["versions"] | versions,
        "kernels": found["kernels"],
        "threads": found["threads"],
    }


def _describe(environment: dict[str, Any]) -> str:
    versions = (f"{name} {v}" for name, v in environment["versions"].items() if v)
    processor = f"{environment['processor']}, {environment['threads']} threads"
    device = processor if environment["platform"] == "cpu" else environment["device"]
    text = f"{device}, {', '.join(versions)}"
    if environment["copy"] != "device_copy":
        text += "\nThis build has no native copy: the copy is jax.numpy's, which may be slower"
    return text


def _write(
    path: Path | None,
    environment: dict[str, Any],
    args: argparse.Namespace,
    results: Sequence[Any],
    chosen: Sequence[Any],
) -> None:
    if path is None:
        return
    content = {
        "command": shlex.join(["python", "-m", "jax_gradops", *args.command_line]),
        "suite": args.suite,
        "rounds": args.rounds,
        **environment,
        "results": [RUNNERS[args.suite][1].as_json(r) for r in results],
        "left_out": [str(case) for case in chosen[len(results) :]],
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> BenchError:
    return BenchError(f"cannot write to {path}: {error.strerror or error}")
