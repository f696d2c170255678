"""Chooses an op's implementation: the native kernel, or the reference in jax.numpy."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import jax

from jax_gradops import _checks, _registry

Implementation: TypeAlias = Literal["ffi", "xla"] | None

_default_implementation: contextvars.ContextVar[Implementation] = contextvars.ContextVar(
    "jax_gradops_implementation", default=None
)


_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("jax_gradops_strict", default=False)


def _checked(op: str, implementation: object) -> Implementation:
    return _checks.choice(op, "implementation", implementation, "ffi", "xla", None)


@_checks.with_hints
@contextlib.contextmanager
def use_implementation(implementation: Implementation) -> Iterator[None]:
    """Sets what ``implementation=None`` means inside the ``with`` block, for every op.

    An op reads it when it is traced. A jitted function that was called before keeps its choice.

    Args:
      implementation: ``"ffi"`` (the native kernels), ``"xla"`` (the reference in `jax.numpy`), or
        None (the kernel if the platform has one).

    Returns:
      A context manager.

    Raises:
      ValueError: if `implementation` is another value.

    >>> import jax, jax.numpy as jnp, jax_gradops
    >>> with jax_gradops.use_implementation("xla"):
    ...     text = jax.jit(jax_gradops.layer_norm).lower(jnp.ones((2, 8))).as_text()
    >>> "jax_gradops.row_norm_fwd" in text
    False
    """
    token = _default_implementation.set(_checked("use_implementation", implementation))
    try:
        yield
    finally:
        _default_implementation.reset(token)


def default_implementation() -> Implementation:
    """What `use_implementation` has set. For functions that need no native kernel."""
    return _default_implementation.get()


@contextlib.contextmanager
def strict_infinities(strict: bool = True) -> Iterator[None]:
    """Inside, ops are infinite or NaN where their formulas, computed step by step, are.

    Elsewhere, a variance that overflows makes its row NaN, and GELU and its derivative are numbers.
    """
    token = _strict.set(strict)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Whether `strict_infinities` holds. An op reads it when it is traced."""
    return _strict.get()


def default_platform() -> str:
    """The platform that JAX computes on unless told otherwise."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def resolve_implementation(implementation: Implementation, op: str) -> Implementation:
    """Applies the default of `use_implementation`. ``"ffi"`` without a kernel raises."""
    implementation = _checked(op, implementation)
    if implementation is None:
        implementation = _default_implementation.get()
    if implementation == "ffi" and (reason := _registry.why_unavailable(default_platform())):
        raise ValueError(
            f"{op}: implementation='ffi' is not available: {reason}. Use implementation=None, "
            "which takes XLA's operations where there is no kernel"
        )
    return implementation


class ImplementationInUse(NamedTuple):
    """What an op runs on a platform, and why.

    Attributes:
      implementation: ``"ffi"``, the native kernel, or ``"xla"``.
      reason: why, in words.
    """

    implementation: Literal["ffi", "xla"]
    reason: str
