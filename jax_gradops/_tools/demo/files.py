"""The output folder. It is checked before any work, and files in it are always complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from jax_gradops._tools.demo.settings import DemoError


def check_folder(folder: Path) -> None:
    """Raises DemoError if files cannot be made in `folder`. Makes no folder."""
    existing = folder.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except (OSError, ValueError) as error:  # the name is too long, or has a null character
        raise _unwritable(folder, error) from None
    if not existing.is_dir():
        raise DemoError(f"cannot write to {folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DemoError(f"cannot write to {folder}: no permission in {existing}")


def make_folder(folder: Path) -> None:
    """Makes `folder`, and checks that a file can be made in it."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        for made in missing:
            if made.is_dir():
                made.rmdir()
        raise _unwritable(folder, error) from None


def write(path: Path, data: str | bytes) -> None:
    """Writes a complete file or none: the file gets its final name when it is complete."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:  # "x" follows no link that somebody has put there
            file.write(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _unwritable(path: Path, error: Exception) -> DemoError:
    return DemoError(f"cannot write to {path}: {getattr(error, 'strerror', None) or error}")
