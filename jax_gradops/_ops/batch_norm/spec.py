"""What batch norm and group norm are, as data: see `op_spec`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

from jax_gradops import _oracles
from jax_gradops._kernel.spec import Kernel
from jax_gradops._ops.batch_norm import kernels
from jax_gradops._ops.batch_norm.batch_norm import batch_norm, batch_norm_inference
from jax_gradops._ops.batch_norm.group_norm import group_norm, instance_norm
from jax_gradops._ops.op_spec import EPSILON, Direction, Form, OpSpec, PlanTask


def _call(x: Any, *others: Any, relu: bool, **options: Any) -> Any:
    *residual, scale, bias = others
    activation = "relu" if relu else None
    named = {"residual": residual[0] if residual else None, "activation": activation}
    return batch_norm(x, scale, bias, **named, **options)[0]


def _oracle(x: Any, *others: Any, **options: Any) -> _oracles.Reference:
    *residual, scale, bias = others
    return _oracles.batch_norm(x, scale, bias, residual=sum(residual), **options)


def _oracle_vjp(dy: Any, x: Any, *others: Any, **options: Any) -> tuple[_oracles.Reference, ...]:
    *residual, scale, bias = others
    options["residual"] = sum(residual)
    dx, dscale, dbias, dresidual = _oracles.batch_norm_vjp(dy, x, scale, bias, **options)
    return dx, *([dresidual] if residual else []), dscale, dbias


def _form(name: str, relu: bool, **settings: Any) -> Form:
    return Form(
        _call,
        _oracle,
        (kernels.BATCH_FWD, kernels.BATCH_BWD),
        _oracle_vjp,
        name,
        {"epsilon": EPSILON, "relu": relu},
        parameters=2,
        **settings,
    )


def _inference(x: Any, mean: Any, var: Any, **options: Any) -> Any:
    return batch_norm_inference(x, mean=mean, var=var, **options)


# Forward, the first pass reads x for statistics. The second one reads x and writes y. Backward,
# the first pass reads x and dy for sums. The second one reads both again and writes dx. With a
# residual, the first pass may write dz, the residual's gradient. The second pass then reads dz
# instead of dy and y.
_TRAFFIC: dict[Direction, int] = {"fwd": 3, "bwd": 5}
_TRAFFIC_OF_ADD: dict[Direction, int] = {"fwd": 4, "bwd": 7}


def _channel_plan(task: PlanTask, kernel: Kernel, samples: int, groups: int) -> dict[str, Any]:
    """The plan with channels last, for a number of samples with statistics of their own.

    The channels of a sample are in `groups` groups.
    """
    from jax_gradops import _plans

    rows, channels = math.prod(task.shape[:-1]) // samples, task.shape[-1]
    assert kernel.workspace is not None
    shape = kernel.workspace(samples, {"n": rows, "d": channels, "m": 1}, 2)
    given = {
        "backward": task.direction == "bwd",
        "groups": samples,
        "rows": rows,
        "channels": channels,
        "inner": 1,
        "bundle": channels // groups,
        "element_bytes": task.element_bytes,
        "accum_bytes": max(4, task.element_bytes),
        "aligned": True,
        "statistics": True,
        "apply": True,
        "transient_arrays": 0,
        "partial_rows": shape[1] if len(shape) > 1 else 0,
        "multiprocessors": task.gpu.multiprocessors,
        "shared_bytes": task.gpu.shared_bytes,
        "l2_bytes": task.gpu.l2_bytes,
        "clusters": task.gpu.architecture >= 90,
    }
    bundles = _plans.bundle_plan(**given)
    return bundles if bundles["kernel"] else _plans.batch_norm_plan(**given)


def _plan(task: PlanTask) -> dict[str, Any]:
    kernel = kernels.BATCH_BWD if task.direction == "bwd" else kernels.BATCH_FWD
    return _channel_plan(task, kernel, 1, task.shape[-1])


BATCH_NORM = OpSpec(
    "batch_norm",
    "channels",
    (
        _form("", relu=False, traffic=_TRAFFIC),
        _form("relu", relu=True, traffic=_TRAFFIC),
        _form("add_relu", relu=True, arrays=2, traffic=_TRAFFIC_OF_ADD),
    ),
    plan=_plan,
)
BATCH_NORM_INFERENCE = OpSpec(
    "batch_norm_inference",
    "channels",
    (
        Form(
            _inference,
            _oracles.batch_norm_inference,
            (kernels.BATCH_FWD,),
            options={"epsilon": EPSILON},
            parameters=2,
        ),
    ),
    by_xla="XLA fuses it with what comes before and after; pass implementation='ffi' for the "
    "kernel",
)


# --- Group norm -----------------------------------------------------------------------------------


def groups_of(channels: int) -> int:
    """The number of groups: 32, as models have. If 64 does not divide the channels, 1 to 6."""
    return 32 if channels % 64 == 0 else math.gcd(channels, 6)


def _with_groups(
    function: Callable[..., Any], groups: Callable[[int], int], position: int = 0
) -> Callable[..., Any]:
    """`function` with a number of groups for its operand x at `position`."""

    def of_groups(*operands: Any, axis: int = -1, **options: Any) -> Any:
        number = groups(operands[position].shape[axis])
        return function(*operands, num_groups=number, axis=axis, **options)

    return of_groups


def _group_forms(
    call: Callable[..., Any], groups: Callable[[int], int], timed: Collection[str]
) -> tuple[Form, ...]:
    """A form for each activation. The benchmark times some."""
    return tuple(
        Form(
            call,
            _with_groups(_oracles.group_norm, groups),
            (kernels.GROUP_FWD, kernels.GROUP_BWD),
            _with_groups(_oracles.group_norm_vjp, groups, position=1),
            activation,
            {"epsilon": EPSILON, "activation": activation or None},
            parameters=2,
            traffic=_TRAFFIC if activation in timed else {},
        )
        for activation in ("", "silu", "relu")
    )


def _channel_groups(channels: int) -> int:
    return channels


def _group_plan(task: PlanTask, groups_of: Callable[[int], int]) -> dict[str, Any]:
    backward = task.direction == "bwd"
    kernel = kernels.GROUP_BWD if backward else kernels.GROUP_FWD
    groups = groups_of(task.shape[-1])
    notes = (
        f"Channels are last: {groups} groups x {task.shape[-1] // groups} channels.",
        "The plan is that of batch norm, with a mean and a variance for each sample and group. In "
        'its words, a sample is a "group", and a group of channels is a "bundle".',
        "With channels first, more shapes are taken in one pass.",
    )
    return {**_channel_plan(task, kernel, task.shape[0], groups), "notes": notes}


GROUP_NORM = OpSpec(
    "group_norm",
    "samples",
    _group_forms(_with_groups(group_norm, groups_of), groups_of, timed=("", "silu")),
    plan=functools.partial(_group_plan, groups_of=groups_of),
)
INSTANCE_NORM = OpSpec(
    "instance_norm",
    "samples",
    _group_forms(instance_norm, _channel_groups, timed=("",)),
    plan=functools.partial(_group_plan, groups_of=_channel_groups),
)
SPECS = (BATCH_NORM, BATCH_NORM_INFERENCE, GROUP_NORM, INSTANCE_NORM)
