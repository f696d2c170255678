"""What layer norm and RMS norm are, as data: see `op_spec`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_gradops import _oracles
from jax_gradops._kernel.spec import Kernel
from jax_gradops._ops.op_spec import EPSILON, Form, OpSpec
from jax_gradops._ops.row_norm import kernels
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


def _form(
    call: Callable[..., Any], centered: bool, *used: Kernel, adds: bool = False, **settings: Any
) -> Form:
    oracle = _oracles.add_norm if adds else _oracles.norm
    oracle_vjp = _oracles.add_norm_vjp if adds else _oracles.norm_vjp
    return Form(
        call,
        functools.partial(oracle, centered=centered),
        used,
        functools.partial(oracle_vjp, centered=centered),
        options={"epsilon": EPSILON},
        arrays=2 if adds else 1,
        parameters=2 if centered else 1,
        **settings,
    )


def _norm(
    name: str, call: Callable[..., Any], centered: bool, fwd: Kernel, bwd: Kernel, inverse: Kernel
) -> OpSpec:
    from_output = functools.partial(call, residuals="output")
    forms = (
        _form(call, centered, fwd, bwd, traffic={"fwd": 2, "bwd": 3}),
        _form(from_output, centered, fwd, inverse, name="from output", roundings=7),
    )
    return OpSpec(name, "rows", forms)


_LAYER = (kernels.LAYER_NORM_FWD, kernels.LAYER_NORM_BWD)
_RMS = (kernels.RMS_NORM_FWD, kernels.RMS_NORM_BWD)

LAYER_NORM = _norm("layer_norm", layer_norm, True, *_LAYER, kernels.LAYER_NORM_BWD_FROM_OUTPUT)
RMS_NORM = _norm("rms_norm", rms_norm, False, *_RMS, kernels.RMS_NORM_BWD_FROM_OUTPUT)
ADD_LAYER_NORM = OpSpec(
    "add_layer_norm", "rows", (_form(add_layer_norm, True, *_LAYER, adds=True),)
)
ADD_RMS_NORM = OpSpec("add_rms_norm", "rows", (_form(add_rms_norm, False, *_RMS, adds=True),))
SPECS = (LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM)
