"""``python -m jax_gradops demo``: trains a character-level GPT or a ResNet with these ops."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from jax_gradops._cli import INTERRUPTED
from jax_gradops._tools.demo.settings import (
    DEFAULTS,
    OUTPUTS,
    DemoError,
    given,
    new_run,
    resumed_run,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options."""

    def number(name: str, what: str) -> None:
        texts = []
        for task, platforms in DEFAULTS.items():
            cpu, gpu = (platforms[p].get(name) for p in ("cpu", "gpu"))
            if cpu is not None:
                texts.append(f"{task} {cpu}" + (f", on a GPU {gpu}" if gpu != cpu else ""))
        default = "; ".join(texts)
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: {default})")

    parser.add_argument(
        "--task",
        choices=tuple(DEFAULTS),
        default="text",
        help="text: a GPT that writes; digits: a ResNet that reads scikit-learn's handwritten "
        "digits (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="train on this UTF-8 text (default: the Python language reference, of pydoc)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="folder for the checkpoint, plots, metrics and sample (default: "
        + "; ".join(f"{task} {folder}" for task, folder in OUTPUTS.items())
        + ")",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in the output folder; a larger --steps extends it",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train with the native kernels, then with XLA's operations, from the same seed",
    )
    parser.add_argument(
        "--implementation",
        choices=("ffi", "xla"),
        help="the native kernels, or XLA's operations (default: kernels where there are)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "mixed"),
        help="mixed: bfloat16 activations, float32 parameters (default: float32)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        help="train on several devices: data=N spreads the batch of a step, fsdp=N also "
        "parameters and optimizer state, such as data=2,fsdp=4 (a CPU becomes as many devices)",
    )
    number("steps", "training steps")
    number("seed", "seed of the initial parameters and the order of the data")
    number("width", "features of a token, or channels of the first stage")
    number("layers", "transformer blocks")
    number("heads", "attention heads")
    number("context", "characters in a window")
    number("batch", "windows or images in a step")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
    try:
        return _run(args)
    except DemoError as error:
        message = " ".join(str(error).split())
        print(f"jax_gradops demo: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jax_gradops demo: aborted", file=sys.stderr)
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    """Checks all options first, then makes the output folder, then runs."""
    chosen = given(args)
    if args.compare and (args.resume or args.implementation):
        other = "--resume" if args.resume else "--implementation"
        raise DemoError(f"--compare runs both implementations from the start: leave out {other}")
    _import_extras(args.task)
    from jax_gradops._tools.demo import checkpoint, files, meshes

    sizes = None if args.mesh is None else meshes.parse(args.mesh)
    if sizes:
        meshes.prepare_devices(sizes)
    platform = _platform()
    for implementation in ("ffi", "xla") if args.compare else (args.implementation,):
        _check_implementation(implementation)
    folder = OUTPUTS[args.task] if args.output is None else args.output
    saved = checkpoint.load_about(folder) if args.resume else None
    if saved:
        settings = resumed_run(chosen, saved, folder, args.task)
    else:
        settings = new_run(chosen, platform, args.task)
    mesh = meshes.make_mesh(sizes, settings.batch, platform) if sizes else None
    make_run = {"text": _text_run, "digits": _digits_run}[args.task]
    run = make_run(folder, settings, platform, mesh, saved)
    files.check_folder(folder)
    files.make_folder(folder)
    return run.compare() if args.compare else run.train(args.implementation, saved)


def _text_run(
    folder: Path, settings: Any, platform: str, mesh: Any, saved: dict[str, Any] | None
) -> Any:
    from jax_gradops._tools.demo import text
    from jax_gradops._tools.demo.text_run import TextRun

    corpus = text.load_corpus(settings.text, settings.context)
    if saved and saved["digest"] != corpus.digest:
        raise DemoError(f"{corpus.name} has changed since the run in {folder} began")
    return TextRun(folder, settings, corpus, platform, mesh)


def _digits_run(folder: Path, settings: Any, platform: str, mesh: Any, saved: object) -> Any:
    from jax_gradops._tools.demo.digits import data
    from jax_gradops._tools.demo.digits.run import DigitsRun

    return DigitsRun(folder, settings, data.load(settings.seed, settings.batch), platform, mesh)


def _import_extras(task: str) -> None:
    try:
        import flax  # noqa: F401
        import matplotlib  # noqa: F401
        import optax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
        import rich  # noqa: F401

        if task == "digits":
            import sklearn  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise DemoError(f"{error.name} is missing: pip install 'jax_gradops[demo]'") from None


def _platform() -> str:
    import jax

    from jax_gradops._implementation import default_platform

    try:
        return default_platform()
    except (RuntimeError, AssertionError) as error:  # AssertionError: jax 0.10, JAX_PLATFORMS=cuda
        asked = jax.config.values["jax_platforms"]
        reason = str(error) or f"JAX_PLATFORMS={asked} is not there"
        raise DemoError(f"JAX finds no device: {reason}") from None


def _check_implementation(implementation: Literal["ffi", "xla"] | None) -> None:
    import jax_gradops

    with jax_gradops.use_implementation(implementation):
        try:
            jax_gradops.implementation_in_use("layer_norm")
        except ValueError as error:
            raise DemoError(f"--implementation ffi is not available{_reason(error)}") from None


def _reason(error: ValueError) -> str:
    """The reason in "op: … is not available: reason. Use …". The end suggests Python code."""
    return error.args[0].partition("is not available")[2].partition(". Use ")[0]
