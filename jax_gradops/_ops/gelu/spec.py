"""What GELU is, as data: see `op_spec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_gradops import _oracles
from jax_gradops._ops.gelu import bias_gelu as module
from jax_gradops._ops.op_spec import Form, OpSpec


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
            in_place=True,
        )
        for form, approximate in (("tanh", True), ("exact", False))
    )
    return OpSpec(name, "rows", tuple(forms))


GELU = _spec("gelu", module.gelu, 0)
BIAS_GELU = _spec("bias_gelu", module.bias_gelu, 1)
SPECS = (GELU, BIAS_GELU)
