"""Which implementation an op uses, and what `jax.export` needs to know about the kernels."""

from __future__ import annotations

from jax import export

from jax_gradops import _checks, _implementation, _registry
from jax_gradops._kernel.spec import Kernel
from jax_gradops._kernel.trees import TreeKernel
from jax_gradops._ops.batch_norm import kernels as batch_norm_kernels
from jax_gradops._ops.clip import kernels as global_norm_kernels
from jax_gradops._ops.gelu import bias_gelu
from jax_gradops._ops.row_norm import kernels as norm_kernels

_NORM = (norm_kernels.FWD, norm_kernels.BWD)

#: The kernels of each public op.
OPS: dict[str, tuple[Kernel | TreeKernel, ...]] = {
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "add_layer_norm": _NORM,
    "add_rms_norm": _NORM,
    "batch_norm": (batch_norm_kernels.FWD, batch_norm_kernels.BWD),
    "batch_norm_inference": (batch_norm_kernels.FWD,),
    "gelu": (bias_gelu.FWD, bias_gelu.BWD),
    "bias_gelu": (bias_gelu.FWD, bias_gelu.BWD),
    "global_norm": (global_norm_kernels.SUM_OF_SQUARES,),
    "clip_tree_by_global_norm": (global_norm_kernels.SUM_OF_SQUARES,),
    "clip_by_global_norm": (global_norm_kernels.SUM_OF_SQUARES,),
    "inplace_clip_by_global_norm": (global_norm_kernels.SUM_OF_SQUARES, global_norm_kernels.SCALE),
}

#: Ops that run XLA's operations by default although there is a kernel, and why.
_BY_XLA = {
    "batch_norm_inference": "XLA fuses it with what comes before and after; pass "
    "implementation='ffi' for the kernel"
}

#: Pass to ``jax.export.export(..., disabled_checks=jax_gradops.EXPORT_DISABLED_CHECKS)``. JAX
#: promises that later versions load its own operations, but not that they load custom calls.
EXPORT_DISABLED_CHECKS: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(target)
    for target in sorted(
        {_registry.TARGET_PREFIX + k.name for kernels in OPS.values() for k in kernels}
    )
)


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
    _checks.choice(op, "op_name", op_name, *OPS)
    platform = _implementation.default_platform() if platform is None else platform
    if not isinstance(platform, str):
        expected = "None or a name such as 'cpu', 'cuda' or 'tpu'"
        raise _checks.wrong(op, "platform", expected, platform, TypeError)
    default = _implementation.resolve_implementation(None, op_name)
    if default == "xla":
        return _implementation.ImplementationInUse("xla", "use_implementation('xla') is in force")
    reason = _registry.why_unavailable(platform)
    if reason is None and default is None:
        reason = _BY_XLA.get(op_name)
    if reason is not None:
        return _implementation.ImplementationInUse("xla", reason)
    return _implementation.ImplementationInUse(
        "ffi", f"native {_registry.canonical_platform(platform)} kernels are loaded"
    )
