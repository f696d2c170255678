"""What layer norm and RMS norm are, as data: see `op_spec`."""

from __future__ import annotations

import functools
import math
from typing import Any

from jax_gradops import _oracles
from jax_gradops._ops.op_spec import EPSILON, Form, OpSpec, PlanTask
from jax_gradops._ops.row_norm import kernels
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_LAYER_NORM = functools.partial(
    Form,
    oracle=functools.partial(_oracles.norm, centered=True),
    oracle_vjp=functools.partial(_oracles.norm_vjp, centered=True),
    kernels=(kernels.FWD, kernels.BWD),
    options={"epsilon": EPSILON},
    parameters=2,
)
_RMS_NORM = functools.partial(
    Form,
    oracle=functools.partial(_oracles.norm, centered=False),
    oracle_vjp=functools.partial(_oracles.norm_vjp, centered=False),
    kernels=(kernels.FWD, kernels.BWD),
    options={"epsilon": EPSILON},
    parameters=1,
)
_TRAFFIC = {"fwd": 2, "bwd": 3}


def _plan(task: PlanTask, *, centered: bool, arrays: int) -> dict[str, Any]:
    from jax_gradops import _plans

    backward = task.direction == "bwd"
    return _plans.row_norm_plan(
        backward=backward,
        rows=math.prod(task.shape[:-1]),
        features=task.shape[-1],
        element_bytes=task.element_bytes,
        arrays=arrays + backward,
        aligned=True,
        aligned_params=True,
        architecture=task.gpu.architecture,
        multiprocessors=task.gpu.multiprocessors,
        shared_bytes=task.gpu.shared_bytes,
        centered=centered,
        reads_mean=centered,
        knows_epsilon=centered,
    )


LAYER_NORM = OpSpec(
    "layer_norm",
    "rows",
    (
        _LAYER_NORM(layer_norm, traffic=_TRAFFIC),
        _LAYER_NORM(
            functools.partial(layer_norm, residuals="output"),
            name="from output",
            roundings=7,
        ),
    ),
    plan=functools.partial(_plan, centered=True, arrays=1),
)
RMS_NORM = OpSpec(
    "rms_norm",
    "rows",
    (
        _RMS_NORM(rms_norm, traffic=_TRAFFIC),
        _RMS_NORM(
            functools.partial(rms_norm, residuals="output"),
            name="from output",
            roundings=7,
        ),
    ),
    plan=functools.partial(_plan, centered=False, arrays=1),
)
ADD_LAYER_NORM = OpSpec(
    "add_layer_norm",
    "rows",
    (
        _LAYER_NORM(
            add_layer_norm,
            oracle=functools.partial(_oracles.add_norm, centered=True),
            oracle_vjp=functools.partial(_oracles.add_norm_vjp, centered=True),
            arrays=2,
        ),
    ),
    plan=functools.partial(_plan, centered=True, arrays=2),
)
ADD_RMS_NORM = OpSpec(
    "add_rms_norm",
    "rows",
    (
        _RMS_NORM(
            add_rms_norm,
            oracle=functools.partial(_oracles.add_norm, centered=False),
            oracle_vjp=functools.partial(_oracles.add_norm_vjp, centered=False),
            arrays=2,
        ),
    ),
    plan=functools.partial(_plan, centered=False, arrays=2),
)
SPECS = (LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM)
