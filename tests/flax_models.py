"""Models of Flax's modules, or of ours, that tests compare; and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_gradops.nnx import add_norm

WIDTH = 8


def x_of(*shape: int) -> jax.Array:
    x = np.random.default_rng(0).standard_normal(shape or (4, 6, WIDTH))
    return jnp.asarray(x, jnp.float32)


def assert_close(expected: Any, actual: Any, dtype: Any = jnp.float32) -> None:
    """Equal but for roundings; each model has several layers, which multiply them: what Flax makes
    of a bias before its batch norm, whose gradient is 0, was 2.6e-4 where others were 14."""
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        roundings = 8000 if jnp.dtype(dtype).itemsize > 2 else 4
        allowed = roundings * float(jnp.finfo(dtype).eps) * np.max(np.abs(a), initial=1)
        np.testing.assert_allclose(b, a, rtol=0, atol=allowed)


def kernels(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """Those that the lowered program calls."""
    text = jax.jit(function).lower(*arguments).as_text()
    return set(re.findall(r"custom_call @jax_gradops[.\w]*?\.(\w+)", text))


# --- linen ---------------------------------------------------------------------------------------


class Block(linen.Module):
    """One of everything; `modules` are Flax's or ours."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        y = self.modules.LayerNorm(name="layer")(x)
        y = self.modules.RMSNorm(name="rms")(linen.Dense(WIDTH, name="dense")(y))
        y = self.modules.BatchNorm(use_running_average=False, name="batch")(y)
        return x + y, None


class Plain(linen.Module):
    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(self.modules)(x)[0]


class Scanned(linen.Module):
    """Layers under `linen.scan`, each rematerialised."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = linen.remat(Block, prevent_cse=False)
        axes: Any = {"params": 0, "batch_stats": 0}
        layers = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return layers(self.modules)(x, None)[0]


class Vmapped(linen.Module):
    """A module for each of the batch; the last one's variables are shared."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        own: Any = {"params": 0, "batch_stats": 0}
        each = linen.vmap(Plain, variable_axes=own, split_rngs={"params": True})
        shared = linen.vmap(
            self.modules.LayerNorm, variable_axes={"params": None}, split_rngs={"params": False}
        )
        return shared()(each(self.modules)(x))


class Synchronised(linen.Module):
    """Statistics over the axis that `x` is mapped over."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"params": None, "batch_stats": None}
        norm = linen.vmap(
            self.modules.BatchNorm,
            variable_axes=axes,
            split_rngs={"params": False},
            axis_name="devices",
        )
        return norm(use_running_average=False, axis_name="devices")(x)


class Partitioned(linen.Module):
    """Parameters with names of mesh axes."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.ones, ("model",))
        return self.modules.LayerNorm(scale_init=init, bias_init=init)(x)


# --- NNX -----------------------------------------------------------------------------------------


class Model(nnx.Module):
    """One of everything that `fuse` knows, with norms of a module given."""

    def __init__(self, rngs: nnx.Rngs, modules: Any = nnx) -> None:
        self.layer = modules.LayerNorm(WIDTH, rngs=rngs)
        self.blocks = nnx.List([modules.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.batch = modules.BatchNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 16, rngs=rngs), jax.nn.gelu, nnx.Linear(16, WIDTH, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y, x = add_norm(self.layer, x, jnp.sin(x))
        for norm in self.blocks:
            y = norm(y + 1)
        return x + self.batch(self.mlp(y))


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(model(x)))


def result_of(model: Any, x: jax.Array) -> Any:
    result = nnx.jit(nnx.value_and_grad(loss_of))(model, x)
    return nnx.to_pure_dict(result[1]), result[0], nnx.to_pure_dict(nnx.state(model))
