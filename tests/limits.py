"""Runs the CUDA norms with limits of their plan (`RowPlanLimits` in ffi/cuda/row_norm/plan.h)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from jax_gradops import _registry
from jax_gradops._tools import testing

HAS_LIMITS = "cuda" in testing.MODULES
NONE = {
    **dict.fromkeys(
        ("architecture", "max_cluster", "max_threads", "max_stages", "vectors"), np.int64(0)
    ),
    "stream": False,
}
NORMS = {f"{_registry.TARGET_PREFIX}row_norm_{direction}" for direction in ("fwd", "bwd")}


@contextlib.contextmanager
def limited(**limits: Any) -> Iterator[None]:
    """Programs that are traced here call the handlers of the testing module, with these limits."""
    plain = jax.ffi.ffi_call
    attributes = NONE | {k: v if k == "stream" else np.int64(v) for k, v in limits.items()}

    def ffi_call(target: str, *args: Any, **kwargs: Any) -> Any:
        if target not in NORMS:
            return plain(target, *args, **kwargs)
        call = plain(f"{target}_limited", *args, **kwargs)
        return lambda *operands, **own: call(*operands, **own, **attributes)

    with mock.patch.object(jax.ffi, "ffi_call", ffi_call):
        jax.clear_caches()  # forgets what was traced without limits
        yield
    jax.clear_caches()
