"""What GELU is, as data: see `op_spec`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jax_gradops import _oracles
from jax_gradops._kernel.spec import column_sum_workspace
from jax_gradops._ops.gelu import bias_gelu as module
from jax_gradops._ops.op_spec import Form, OpSpec, PlanTask


def _plan(task: PlanTask, *, parameters: int) -> dict[str, Any]:
    from jax_gradops import _plans

    rows, features = math.prod(task.shape[:-1]), task.shape[-1]
    backward = task.direction == "bwd"
    partial_rows = 0
    if backward and parameters:
        _, partial_rows, *_ = column_sum_workspace(1, {"n": rows, "d": features}, 1)
    return _plans.gelu_plan(
        backward=backward,
        groups=1,
        rows=rows,
        features=features,
        element_bytes=task.element_bytes,
        aligned=True,
        has_columns=bool(parameters),
        partial_rows=partial_rows,
        multiprocessors=task.gpu.multiprocessors,
    )


def _spec(name: str, function: Callable[..., Any], parameters: int) -> OpSpec:
    forms = (
        Form(
            function,
            _oracles.bias_gelu,
            (module.FWD, module.BWD),
            _oracles.bias_gelu_vjp,
            form,
            {"approximate": approximate},
            parameters=parameters,
            traffic={"fwd": 2, "bwd": 3},
            in_place="dy",
        )
        for form, approximate in (("tanh", True), ("exact", False))
    )
    return OpSpec(name, "rows", tuple(forms), plan=functools.partial(_plan, parameters=parameters))


GELU = _spec("gelu", module.gelu, 0)
BIAS_GELU = _spec("bias_gelu", module.bias_gelu, 1)
SPECS = (GELU, BIAS_GELU)
