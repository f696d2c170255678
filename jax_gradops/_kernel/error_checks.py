"""Turns off JAX's error checks while JAX traces this library.

With `jax_error_checking_behavior_nan` and the like, functions of `jax.numpy` write errors to a
reference. JAX can neither vmap such a function nor lower it as a part of a primitive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_SETTINGS = tuple(f"jax_error_checking_behavior_{kind}" for kind in ("nan", "divide", "oob"))

_lock = threading.Lock()
_before: dict[str, str] = {}  # the settings that are turned off
_inside = 0  # how many calls of all threads are in the context


@contextlib.contextmanager
def without_error_checks() -> Iterator[None]:
    """A context without the checks. JAX has only one value of a setting for all threads."""
    global _inside
    with _lock:
        _inside += 1
        for name in _SETTINGS:
            value = getattr(jax.config, name, "ignore")
            if value != "ignore":
                _before[name] = value
                jax.config.update(name, "ignore")
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            while _before and not _inside:
                jax.config.update(*_before.popitem())
