"""What layer norm and RMS norm are, as data: see `op_spec`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jax_gradops import _oracles
from jax_gradops._ops.op_spec import EPSILON, Form, OpSpec, PlanTask
from jax_gradops._ops.row_norm.kernels import BWD, FWD
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


def _form(call: Callable[..., Any], centered: bool, adds: bool = False, **settings: Any) -> Form:
    oracle = _oracles.add_norm if adds else _oracles.norm
    oracle_vjp = _oracles.add_norm_vjp if adds else _oracles.norm_vjp
    return Form(
        call,
        functools.partial(oracle, centered=centered),
        (FWD, BWD),
        functools.partial(oracle_vjp, centered=centered),
        options={"epsilon": EPSILON},
        arrays=2 if adds else 1,
        parameters=2 if centered else 1,
        **settings,
    )


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


def _norm(name: str, call: Callable[..., Any], centered: bool) -> OpSpec:
    from_output = functools.partial(call, residuals="output")
    forms = (
        _form(call, centered, traffic={"fwd": 2, "bwd": 3}),
        _form(from_output, centered, name="from output", roundings=7),
    )
    plan = functools.partial(_plan, centered=centered, arrays=1)
    return OpSpec(name, "rows", forms, plan=plan)


def _add_norm(name: str, call: Callable[..., Any], centered: bool) -> OpSpec:
    plan = functools.partial(_plan, centered=centered, arrays=2)
    return OpSpec(name, "rows", (_form(call, centered, adds=True),), plan=plan)


LAYER_NORM = _norm("layer_norm", layer_norm, centered=True)
RMS_NORM = _norm("rms_norm", rms_norm, centered=False)
ADD_LAYER_NORM = _add_norm("add_layer_norm", add_layer_norm, centered=True)
ADD_RMS_NORM = _add_norm("add_rms_norm", add_rms_norm, centered=False)
SPECS = (LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM)
