"""Runs every kernel in one dtype on small awkward shapes, for compute-sanitizer (see run.sh)."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from limits import limited

import jax_gradops
from jax_gradops._ops.all import SPECS
from jax_gradops._ops.op_spec import Form, OpSpec
from jax_gradops._ops.row_norm import spec as row_norm

jax.config.update("jax_enable_x64", True)

# Near the widths at which a kernel changes its configuration. Odd widths make rows unaligned.
WIDTHS = (1, 7, 64, 257, 1000, 2049, 4096, 8200, 16385, 40000)
ROWS = (1, 5, 67)


def run(spec: OpSpec, form: Form, dy: Any, x: Any, scale: Any, bias: Any) -> Any:
    """The results and gradients of one form of an op."""
    operands = [*(x, dy)[: form.arrays], *(scale, bias)[: form.parameters]]
    if spec.kind == "leaves":
        operands = [x, scale[1:], bias[:0], dy]
    results = jax.eval_shape(functools.partial(form.call, **form.options), *operands)
    cotangents = jax.tree.map(lambda y: jnp.full(y.shape, 0.5, y.dtype), results)
    return form.value_and_vjp(cotangents, *operands)


def runs(specs: Iterable[OpSpec]) -> dict[str, Callable[..., Any]]:
    """Maps the name of each form to a function of (dy, x, scale, bias). XLA's ops are left out."""
    return {
        f"{spec.name} {form.name}".strip(): functools.partial(run, spec, form)
        for spec in specs
        if not spec.requires and not spec.by_xla
        for form in spec.forms
    }


# Beside the forms: other options, dtypes and transformations.
NORMS: dict[str, Callable[..., Any]] = runs(row_norm.SPECS) | {
    "layer_norm of bfloat16 parameters": lambda dy, x, s, b: jax.vjp(
        jax_gradops.layer_norm, x, s.astype("bfloat16"), b.astype("float16")
    )[1](dy),
    "add_layer_norm from the output": lambda dy, x, s, b: jax.vjp(
        functools.partial(jax_gradops.add_layer_norm, residuals="output", scale_offset=1.0),
        x,
        dy,
        s.astype("bfloat16"),
        b,
    )[1]((dy, x)),
    "layer_norm of x alone": lambda dy, x, s, b: jax.vjp(jax_gradops.layer_norm, x)[1](dy),
    "layer_norm of groups": lambda dy, x, s, b: jax.vmap(
        lambda x, s: jax.vjp(jax_gradops.layer_norm, x, s)[1](x)
    )(x[:, None], jnp.broadcast_to(s, x.shape)),
}
OPS = (
    NORMS
    | runs(spec for spec in SPECS.values() if spec not in row_norm.SPECS)
    | {
        "batch_norm, channels first": lambda dy, x, s, b: jax.vjp(
            lambda x, r: jax_gradops.batch_norm(x, axis=0, activation="relu", residual=r)[0], x, dy
        )[1](dy),
        "group_norm, channels first": lambda dy, x, s, b: jax.vjp(
            functools.partial(
                jax_gradops.group_norm, num_groups=x.shape[0], axis=1, activation="silu"
            ),
            x[None],
        )[1](dy[None]),
        "group_norm of spread rows": lambda dy, x, s, b: jax.vmap(
            lambda x: jax_gradops.instance_norm(x[None], s, b)
        )(jnp.stack([x, dy])),
    }
)


# Configurations that this GPU does not choose (ffi/cuda/row_norm/plan.h), on fewer shapes.
PLANS: dict[str, dict[str, Any]] = {
    "sm_80": {"architecture": 80},
    "streamed": {"stream": True},
    "clusters": {"max_threads": 32},
    "two stages": {"max_stages": 2},
}
FORCED_WIDTHS = (7, 64, 1000, 4097)


def run_all(dtype: str, plan: str, forced: bool) -> None:
    """Runs the norms with a forced plan, or all ops."""
    for width, rows in itertools.product(FORCED_WIDTHS if forced else WIDTHS, ROWS):
        if rows == 5 and (dtype != "float32" or forced):
            continue
        keys = jax.random.split(jax.random.key(width * rows), 4)
        dy, x = (jax.random.normal(k, (rows, width)).astype(dtype) for k in keys[:2])
        scale, bias = (jax.random.normal(k, (width,), jnp.float32) for k in keys[2:])
        for name, op in (NORMS if forced else OPS).items():
            # Printed before the run, because the tools may crash.
            print(dtype, [rows, width], plan, name, flush=True)
            jax.block_until_ready(op(dy, x, scale, bias))


def main(dtype: str) -> None:
    """Runs every op forward and backward with the kernels."""
    with jax_gradops.use_implementation("ffi"):
        run_all(dtype, "as chosen", forced=False)
        for plan, limits in PLANS.items():
            with limited(**limits):
                run_all(dtype, plan, forced=True)
    print("ran every kernel on", jax.devices()[0].device_kind)


if __name__ == "__main__":
    main(sys.argv[1])
