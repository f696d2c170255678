"""The command line of ``bench``."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_gradops._tools.bench import (
    cases,
    clip_measuring,
    clips,
    measuring,
    plots,
    record,
    train,
    train_measuring,
    trees,
)
from jax_gradops._tools.bench.errors import BenchError, unwritable
from jax_gradops._tools.bench.report import FIGURES

#: The options that only some suites have, by suite.
OPTIONS = {
    "ops": ("op", "direction", "shape", "layout", "form"),
    "clip": ("form", "tree"),
    "train": train.OPTIONS,
}
#: Options that only matter for a run. They are refused with a file of results.
_OF_RUNS = (
    "suite", "device", "rounds", "time_limit", "json", "resume", "layout", "batch", "image_size",
    "context", "vocabulary", "steps", "stages", "profile",
)  # fmt: skip
#: The forms of ops, or of the clip, by suite.
FORMS = {"ops": cases.FORMS, "clip": tuple(clips.FORMS)}
#: The possible competitors, by suite.
COMPETITORS = {
    "ops": measuring.COMPETITORS,
    "clip": clip_measuring.COMPETITORS,
    "train": train_measuring.COMPETITORS,
}
ROUNDS = 15
FORMATS = (
    "ROWSxFEATURES, as in 32768x4096, or of images, which batch_norm and group_norm have too, "
    "BATCHxHEIGHTxWIDTHxCHANNELS, as in 256x56x56x256, or default, widths, or all"
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
data. resnet50, vit (ViT-B/16) and unet have one random batch. resnet50 has Optax's loss in all
variants. unet has residual blocks of group norm, SiLU and 3 x 3 convolutions, and the time's
embedding, as diffusion models have; its loss is the mean square error. gpt2 has GELU by tanh, and
gpt2-exact by erf. llama has RMS norm, rotary positions and SwiGLU; gemma is llama with GeGLU. Each
step of these has other windows of Python's language reference and standard library, and words are
its tokens. "linear_loss" has no array of all logits. "stock_loss" has Optax's loss. Figures are
milliseconds; "over stock" is stock's time over the variant's, in the same rounds. "temporary" is
the memory of a step beside its arguments and results. It is an error if a variant's losses differ
from stock's by more than roundings explain.
"""


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

    parser.add_argument("--suite", choices=tuple(OPTIONS), help="what is timed (default: ops)")
    add("op", cases.OPS, "all", "ops")
    add("direction", cases.DIRECTIONS, "all", "directions")
    add("form", (*FORMS["ops"], *FORMS["clip"]), "all", "forms of ops; suite clip: ways to clip")
    add("dtype", cases.DTYPES, "bfloat16,float32", "dtypes", **short)
    add("against", measuring.COMPETITORS, "those that are installed", "competitors")
    parser.add_argument(
        "--shape",
        type=_shapes,
        metavar="SHAPE,…",
        help=f"{FORMATS}: rows of 64 to 65536 features, many and few, and small images; widths: "
        "rows of 256, 512, … 16384 features, as many bytes in all of each",
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
    parser.add_argument("--rounds", type=_positive(int), help=f"default: {ROUNDS}")
    parser.add_argument(
        "--time-limit",
        type=_positive(float),
        metavar="SECONDS",
        help="begin no case after this time; what was left out is said",
    )
    _add_files(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    def add(name: str, what: str, metavar: str = "FILE", **options: Any) -> None:
        parser.add_argument(f"--{name}", type=Path, metavar=metavar, help=what, **options)

    add("json", "write all figures to FILE, after each case")
    parser.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="measure only what is not in the --json file yet; all else has to be as it was then",
    )
    add("from", "measure nothing: show, write and plot what a run's --json has", dest="file")
    add("csv", "write a line per figure to FILE")
    add("plot", "plot the figures, needs Matplotlib: a .svg, .png or .pdf", "IMAGE")


def _names(what: str, values: Sequence[str], aliases: dict[str, str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [aliases.get(n, n) for n in text.split(",") if n]
        unknown = [n for n in names if n not in values]
        if unknown or not names:
            near = difflib.get_close_matches(unknown[0], (*values, *aliases), 1) if unknown else ()
            raise argparse.ArgumentTypeError(
                f"unknown {what} {', '.join(map(repr, unknown)) or repr(text)}; "
                + "".join(f"did you mean {n}? " for n in near)
                + f"known are {', '.join(values)}"
            )
        return list(dict.fromkeys(names))

    return parse


def _shapes(text: str) -> list[cases.Shape | str]:
    shapes: list[cases.Shape | str] = []
    for part in text.split(","):
        if part in cases.SHAPE_SETS:
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


# --- What cannot be done -------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    """Refuses options that contradict each other, and files that cannot be written."""
    for path in (args.json, args.csv, args.plot):
        if path is not None:
            record.check_writable(path)
    if args.plot is not None:
        plots.check(args.plot)
    if args.file is not None:
        _refuse(args, _OF_RUNS, "for measuring, which --from does not do")
        if any(isinstance(shape, str) for shape in args.shape or ()):
            raise BenchError("--from: name shapes by their numbers")
        return
    args.suite, args.rounds = args.suite or "ops", args.rounds or ROUNDS
    _check_suite(args)
    if args.resume and args.json is None:
        raise BenchError("--resume: --json FILE says what to go on with")


def _given(args: argparse.Namespace, options: Sequence[str]) -> list[str]:
    return [f"--{o.replace('_', '-')}" for o in options if getattr(args, o) is not None]


def _refuse(args: argparse.Namespace, options: Sequence[str], what: str) -> None:
    if given := _given(args, options):
        raise BenchError(f"{', '.join(given)}: {what}")


def _check_suite(args: argparse.Namespace) -> None:
    """Refuses options of other suites, missing modules, and competitors that cannot be compared."""
    for suite, options in OPTIONS.items():
        others = [o for o in options if o not in OPTIONS[args.suite]]
        _refuse(args, others, f"for --suite {suite} only")
    forms = FORMS.get(args.suite, ())
    others = [form for form in args.form or () if form not in forms]
    if others:
        raise BenchError(f"--form {','.join(others)}: --suite {args.suite} has {', '.join(forms)}")
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
            raise unwritable(args.profile, error) from None


# --- What is in a file ---------------------------------------------------------------------------


def narrow(args: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """The wanted part of a file's content; raises BenchError if this part is empty."""
    names = ("op", "direction", "dtype", "tree", "model")
    wanted = {name: found for name in names if (found := getattr(args, name)) is not None}
    if args.form:
        wanted["form"] = [*args.form, *([""] if cases.PLAIN in args.form else [])]
    if args.shape:
        wanted["shape"] = [list(shape) for shape in args.shape]
    results = [
        result
        for result in content["results"]
        if all(result.get(name) in values for name, values in wanted.items())
    ]
    if not results:
        asked = [f"{name} {', '.join(map(str, values))}" for name, values in wanted.items()]
        what = f"no results of {'; '.join(asked)}" if asked else "no results"
        raise BenchError(f"{args.file} has {what}")
    return content | {"results": [_against(args, result) for result in results]}


def _against(args: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    """The result with only the named variants and competitors, if any were named."""
    changed = dict(result)
    if args.variant is not None:
        variants = result.get("variants", {}).items()
        changed["variants"] = {n: v for n, v in variants if n in (train.STOCK, *args.variant)}
    for figure in FIGURES if args.against else ():
        if figure in result:
            named = result[figure]["peers"].items()
            left = {n: t for n, t in named if n in {"ours", "copy", *(args.against or ())}}
            changed[figure] = result[figure] | {"peers": left}
    return changed
