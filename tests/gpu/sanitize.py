"""Runs every kernel in one dtype on small awkward shapes, for compute-sanitizer (see run.sh)."""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_gradops
from jax_gradops import _registry, backward

jax.config.update("jax_enable_x64", True)

# Near the widths at which a kernel changes its configuration. Odd widths make rows unaligned.
WIDTHS = (1, 7, 64, 257, 1000, 2049, 4096, 8200, 16385, 40000)
ROWS = (1, 5, 67)


def from_output(op: Callable[..., Any], dy: Any, *operands: Any) -> Any:
    """The gradients from a saved output y."""
    return jax.vjp(functools.partial(op, residuals="output"), *operands)[1](dy)


# Each entry: (dy, x, scale, bias) -> results.
OPS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda dy, x, s, b: jax.vjp(jax_gradops.layer_norm, x, s, b)[1](dy),
    "rms_norm": lambda dy, x, s, b: jax.vjp(jax_gradops.rms_norm, x, s)[1](dy),
    "add_layer_norm": lambda dy, x, s, b: jax.vjp(jax_gradops.add_layer_norm, x, dy, s, b)[1](
        (dy, x)
    ),
    "add_rms_norm": lambda dy, x, s, b: jax.vjp(jax_gradops.add_rms_norm, x, dy, s)[1]((dy, x)),
    "layer_norm from the output": lambda dy, x, s, b: from_output(
        jax_gradops.layer_norm, dy, x, s, b
    ),
    "rms_norm from the output": lambda dy, x, s, b: from_output(jax_gradops.rms_norm, dy, x, s),
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
    "bias_gelu": lambda dy, x, s, b: jax.vjp(jax_gradops.bias_gelu, x, b)[1](dy),
    "gelu": lambda dy, x, s, b: jax.vjp(lambda v: jax_gradops.gelu(v, False), x)[1](dy),
    "clip": lambda dy, x, s, b: jax_gradops.clip_tree_by_global_norm([x, s, b[:0], dy], 0.5),
    "clip in place": lambda dy, x, s, b: backward.inplace_clip_by_global_norm([x, s[1:], dy], 0.5),
    "batch_norm": lambda dy, x, s, b: jax.vjp(
        lambda x, s, b: jax_gradops.batch_norm(x, s, b, activation="relu")[0], x, s, b
    )[1](dy),
    "batch_norm, channels first": lambda dy, x, s, b: jax.vjp(
        lambda x, r: jax_gradops.batch_norm(x, axis=0, activation="relu", residual=r)[0], x, dy
    )[1](dy),
    "layer_norm of groups": lambda dy, x, s, b: jax.vmap(
        lambda x, s: jax.vjp(jax_gradops.layer_norm, x, s)[1](x)
    )(x[:, None], jnp.broadcast_to(s, x.shape)),
}


# Configurations that this GPU does not choose (ffi/cuda/row_norm/plan.h), on fewer shapes.
PLANS: dict[str, dict[str, Any]] = {
    "as chosen": {},
    "sm_80": {"architecture": 80},
    "streamed": {"stream": True},
    "clusters": {"max_threads": 32},
    "two stages": {"max_stages": 2},
}
FORCED_WIDTHS = (7, 64, 1000, 4097)


def main(dtype: str) -> None:
    """Runs every op forward and backward with the kernels."""
    cuda = _registry.MODULES["cuda"]
    with jax_gradops.use_implementation("ffi"):
        for plan, forced in PLANS.items():
            cuda.force_row_plan(**forced)
            for width, rows in itertools.product(FORCED_WIDTHS if forced else WIDTHS, ROWS):
                if rows == 5 and (dtype != "float32" or forced):
                    continue
                keys = jax.random.split(jax.random.key(width * rows), 4)
                dy, x = (jax.random.normal(k, (rows, width)).astype(dtype) for k in keys[:2])
                scale, bias = (jax.random.normal(k, (width,), jnp.float32) for k in keys[2:])
                for name, op in OPS.items():
                    if forced and "norm" not in name:
                        continue
                    # Printed before the run, because the tools may crash.
                    print(dtype, [rows, width], plan, name, flush=True)
                    jax.block_until_ready(op(dy, x, scale, bias))
    print("ran every kernel on", jax.devices()[0].device_kind)


if __name__ == "__main__":
    main(sys.argv[1])
