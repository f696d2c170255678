"""Errors for mistakes of the user."""

from __future__ import annotations

from pathlib import Path


class BenchError(Exception):
    """The requested work cannot be done. The message says why."""


def unwritable(path: Path, error: OSError) -> BenchError:
    """Makes the error for a file that cannot be written."""
    return BenchError(f"cannot write to {path}: {error.strerror or error}")
