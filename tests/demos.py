"""Helpers of the tests of all demo tasks."""

import argparse
import contextlib
import csv
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jax_gradops._tools.demo import command


@contextlib.contextmanager
def as_users_have_it() -> Iterator[None]:
    """Sets JAX's defaults. Flax and Optax do not work with the strict settings of conftest.py."""
    ours = {
        "jax_enable_x64": False,
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
        # Results are compared bitwise, but XLA's scatter on GPUs adds in any order.
        "jax_default_device": jax.devices("cpu")[0],
        "jax_disable_most_optimizations": True,  # else most of the time would be compilation
    }
    before = {name: jax.config.values[name] for name in ours}
    for name, value in ours.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def run(*options: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(o) for o in options]))


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def one_error(capsys: pytest.CaptureFixture) -> str:
    err = capsys.readouterr().err
    assert err.startswith("jax_gradops demo: error: ") and err.endswith("\n")
    assert err.count("\n") == 1
    return err


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, program: type, steps: int, times: int = 1
) -> None:
    """Sends a Ctrl-C in the middle of a step."""
    train_step, done = program.train_step, []

    def interrupted(self: object, state: object) -> object:
        done.append(None)
        if len(done) == steps:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return train_step(self, state)

    monkeypatch.setattr(program, "train_step", interrupted)
