"""What a user's mistake raises."""

from __future__ import annotations

from pathlib import Path


class BenchError(Exception):
    """What the user asked for cannot be done; the message says why."""


def unwritable(path: Path, error: OSError) -> BenchError:
    """Says that a file cannot be written."""
    return BenchError(f"cannot write to {path}: {error.strerror or error}")
