"""The native modules that only the benchmark and the tests need. A release has none.

An editable installation builds them, and any build with ``JAX_GRADOPS_TESTING=ON``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from jax_gradops import _registry


def _load() -> dict[str, ModuleType]:
    modules = {}
    for platform in _registry.MODULES:
        try:
            module = importlib.import_module(f"jax_gradops._testing_{platform}")
        except ModuleNotFoundError:
            continue
        _registry.register(module, platform)
        modules[platform] = module
    return modules


#: The loaded modules by platform.
MODULES: dict[str, ModuleType] = _load()


def has_handlers(platform: str) -> bool:
    """Whether the handlers ``device_clock`` and ``device_copy`` are there for the platform."""
    return _registry.canonical_platform(platform) in MODULES
