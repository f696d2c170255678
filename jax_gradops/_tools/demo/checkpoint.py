"""Checkpoints by Orbax: the state of the training, and the facts needed to continue it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_gradops._tools.demo.settings import DemoError

# Orbax logs its progress through absl.
logging.getLogger("absl").setLevel(logging.ERROR)


def exists(folder: Path) -> bool:
    """Whether `folder` has a checkpoint."""
    return (folder / "checkpoint").exists()


def previous(folder: Path) -> Path:
    """Where `save` keeps the checkpoint of an earlier run."""
    return folder / "checkpoint.previous"


def save(folder: Path, state: Any, about: dict[str, Any], *, keep: bool) -> Path:
    """Replaces the checkpoint in `folder`. The old one stays until the new one is complete.

    Args:
      folder: the output folder.
      state: the state of the training.
      about: the facts that are saved beside the state.
      keep: keeps the old checkpoint as `previous`.

    Returns:
      The path of the checkpoint.
    """
    state = jax.device_get(state)  # a checkpoint must not depend on the devices that it was made on
    path, new, old = (folder / f"checkpoint{suffix}" for suffix in ("", ".new", ".old"))
    try:
        for left_over in folder.glob("checkpoint.new*"):  # of a `save` that was killed
            shutil.rmtree(left_over)
        with _checkpointer() as checkpointer:
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
                about=ocp.args.JsonSave(about),  # pyright: ignore[reportCallIssue]
            )
            checkpointer.save(new.absolute(), args=arguments)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        new.rename(path)
        if keep and old.exists():
            shutil.rmtree(previous(folder), ignore_errors=True)
            old.rename(previous(folder))
    except OSError as error:
        raise DemoError(f"cannot write to {path}: {error.strerror or error}") from None
    shutil.rmtree(old, ignore_errors=True)
    return path


def load_about(folder: Path) -> dict[str, Any]:
    """The facts that were saved beside the state."""
    return _restore(folder, about=ocp.args.JsonRestore())["about"]


def load_state(folder: Path, like: Any) -> Any:
    """The state, with the structure, types and devices of `like`."""
    target = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)
    restore = ocp.args.StandardRestore(target)  # pyright: ignore[reportCallIssue]
    state = _restore(folder, state=restore)["state"]
    # Only leaves are copied: Orbax may restore an empty node, such as None, as another empty node.
    leaves, structure = jax.tree.flatten(like)
    pairs = zip(jax.tree.leaves(state), leaves, strict=True)
    return jax.tree.unflatten(structure, [jax.device_put(a, b.sharding) for a, b in pairs])


def _restore(folder: Path, **arguments: Any) -> Any:
    path = folder / "checkpoint"
    if not path.is_dir():
        path = folder / "checkpoint.old"  # `save` was killed between its two renames
    if not path.is_dir():
        raise DemoError(f"nothing to resume: there is no checkpoint in {folder}")
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(path.absolute(), args=ocp.args.Composite(**arguments))
    except Exception as error:  # Orbax raises many kinds of errors for a damaged checkpoint
        raise DemoError(f"the checkpoint {path} cannot be read: {error}") from error


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())
