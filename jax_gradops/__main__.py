"""``python -m jax_gradops``: information, a self-test, a benchmark, and a demo."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax_gradops
from jax_gradops._cli import INTERRUPTED, NO_READER


class Command(NamedTuple):
    """A command: its module, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "info": Command("_cli.info", "print versions, platforms, devices, and what each op runs"),
    "doctor": Command("_cli.doctor", "run every op on every device and check the results"),
    "bench": Command(
        "_tools.bench.command", "time the ops beside XLA, other libraries, and a plain copy"
    ),
    "demo": Command("_tools.demo.command", "train a small language model, or a reader of digits"),
}


def carrier(command: str) -> ModuleType:
    """The module of a command. It has the functions `add_arguments` and `run`."""
    return importlib.import_module(f"jax_gradops.{COMMANDS[command].module}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments. None stands for `sys.argv[1:]`.

    Returns:
      The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m jax_gradops",
        description="Fused kernels for JAX, and what tests them.",
        epilog="COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=jax_gradops.__version__)
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    # Only the wanted command is imported: another may need a package that is not installed.
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    parsers = {}
    for name, (_, summary) in COMMANDS.items():
        parsers[name] = subparser = subparsers.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        if name == wanted:
            module = carrier(name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, command_line=arguments)
    if not arguments:
        parser.print_help()
        return 0
    try:
        # `parse_args` would show the usage of the whole program, not of the command.
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            parsers[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def console() -> int | str | None:
    """Runs `main`. Returns `NO_READER` if the reader of the output (``| head``, say) has ended."""
    try:
        try:
            status = main()
        except SystemExit as end:  # --help, or a mistake
            status = end.code
        sys.stdout.flush()  # else Python does so at exit, and reports an error
        return status
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe is broken
        # At exit, Python once more writes what is in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER


if __name__ == "__main__":
    raise SystemExit(console())
