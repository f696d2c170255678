"""Which implementation an op uses, and what `jax.export` needs to know about the kernels."""

from __future__ import annotations

from jax import export

from jax_gradops import _checks, _implementation, _registry
from jax_gradops._ops.all import SPECS

#: Pass to ``jax.export.export(..., disabled_checks=jax_gradops.EXPORT_DISABLED_CHECKS)``. JAX
#: promises that later versions load its own operations, but not that they load custom calls.
EXPORT_DISABLED_CHECKS: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(target)
    for target in sorted(
        {_registry.TARGET_PREFIX + k.name for spec in SPECS.values() for k in spec.kernels}
    )
)


@_checks.with_hints
def implementation_in_use(
    op_name: str, platform: str | None = None
) -> _implementation.ImplementationInUse:
    """Which implementation an op runs with ``implementation=None``, and why.

    Args:
      op_name: the name of an op, such as ``"layer_norm"``.
      platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"tpu"``, …; None for JAX's default.

    Returns:
      ``(implementation, reason)`` with ``"ffi"`` (the native kernel) or ``"xla"``.

    Raises:
      ValueError: for an unknown op; the message lists the known ones.
      TypeError: for a platform that is not a string.

    >>> import jax_gradops
    >>> jax_gradops.implementation_in_use("layer_norm", "tpu").implementation
    'xla'
    """
    op = "implementation_in_use"
    _checks.choice(op, "op_name", op_name, *SPECS)
    platform = _implementation.default_platform() if platform is None else platform
    if not isinstance(platform, str):
        expected = "None or a name such as 'cpu', 'cuda' or 'tpu'"
        raise _checks.wrong(op, "platform", expected, platform, TypeError)
    default = _implementation.resolve_implementation(None, op_name)
    if default == "xla":
        return _implementation.ImplementationInUse("xla", "use_implementation('xla') is in force")
    reason = _registry.why_unavailable(platform)
    if reason is None and default is None:
        reason = SPECS[op_name].by_xla or None
    if reason is not None:
        return _implementation.ImplementationInUse("xla", reason)
    return _implementation.ImplementationInUse(
        "ffi", f"native {_registry.canonical_platform(platform)} kernels are loaded"
    )
