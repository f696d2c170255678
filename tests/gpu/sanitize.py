"""Runs every kernel in one dtype on small awkward shapes, for compute-sanitizer (see run.sh)."""

import itertools
import sys

import jax
import jax.numpy as jnp

import jax_gradops

jax.config.update("jax_enable_x64", True)

# Around the widths at which a kernel changes its configuration; odd ones start rows unaligned.
WIDTHS = (1, 7, 64, 257, 1000, 2049, 4096, 8200, 16385, 40000)
ROWS = (1, 5, 67)


def main(dtype: str) -> None:
    """Every op, forward and backward, kernel only."""
    with jax_gradops.use_implementation("ffi"):
        for width, rows in itertools.product(WIDTHS, ROWS):
            if dtype != "float32" and rows == 5:
                continue
            keys = jax.random.split(jax.random.key(width * rows), 4)
            x, dy = (jax.random.normal(k, (rows, width)).astype(dtype) for k in keys[:2])
            scale, bias = (jax.random.normal(k, (width,), jnp.float32) for k in keys[2:])
            calls = {
                "layer_norm": lambda: jax.vjp(jax_gradops.layer_norm, x, scale, bias)[1](dy),
                "rms_norm": lambda: jax.vjp(jax_gradops.rms_norm, x, scale)[1](dy),
                "without parameters": lambda: jax.vjp(jax_gradops.layer_norm, x)[1](dy),
                "bias_gelu": lambda: jax.vjp(jax_gradops.bias_gelu, x, bias)[1](dy),
                "gelu": lambda: jax.vjp(lambda v: jax_gradops.gelu(v, False), x)[1](dy),
                "clip": lambda: jax_gradops.clip_tree_by_global_norm([x, scale, bias[:0], dy], 0.5),
                "groups": lambda: jax.vmap(
                    lambda v, s: jax.vjp(jax_gradops.layer_norm, v, s)[1](v)
                )(x[:, None], jnp.broadcast_to(scale, (rows, width))),
            }
            for name, call in calls.items():
                print(dtype, width, rows, name, flush=True)  # before: the tools crash at times
                jax.block_until_ready(call())
    print("ran every kernel on", jax.devices()[0].device_kind)


if __name__ == "__main__":
    main(sys.argv[1])
