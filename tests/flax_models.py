"""Models made of Flax's modules or of this library's, and their comparison in tests."""

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
    """Equal except for rounding errors.

    Each model has several layers, and they multiply rounding errors. The gradient of a bias before
    batch norm is 0 in theory. Flax's result was 2.6e-4, while other gradients were 14.
    """
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        roundings = 8000 if jnp.dtype(dtype).itemsize > 2 else 4
        allowed = roundings * float(jnp.finfo(dtype).eps) * np.max(np.abs(a), initial=1)
        np.testing.assert_allclose(b, a, rtol=0, atol=allowed)


def kernels(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """The kernels that the lowered program calls."""
    text = jax.jit(function).lower(*arguments).as_text()
    return set(re.findall(r"custom_call @jax_gradops[.\w]*?\.(\w+)", text))


# --- linen ---------------------------------------------------------------------------------------


class Block(linen.Module):
    """One module of each kind; `modules` is Flax's API or ours."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        y = self.modules.LayerNorm(name="layer")(x)
        y = self.modules.RMSNorm(name="rms")(linen.Dense(WIDTH, name="dense")(y))
        y = self.modules.BatchNorm(use_running_average=False, name="batch")(y)
        y = self.modules.GroupNorm(num_groups=2, name="group")(jnp.sin(y))
        y = y + self.modules.InstanceNorm(name="instance")(y)
        return x + y, None


class Plain(linen.Module):
    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(self.modules)(x)[0]


class Scanned(linen.Module):
    """Layers under `linen.scan`. Each one is rematerialised."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = linen.remat(Block, prevent_cse=False)
        axes: Any = {"params": 0, "batch_stats": 0}
        layers = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return layers(self.modules)(x, None)[0]


class Vmapped(linen.Module):
    """A vmapped module. The instances share the variables of the last layer."""

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
    """Parameters that are annotated with names of mesh axes."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.ones, ("model",))
        return self.modules.LayerNorm(scale_init=init, bias_init=init)(x)


# --- NNX -----------------------------------------------------------------------------------------


class Model(nnx.Module):
    """One module of each kind that `fuse` replaces. `modules` provides the norms."""

    def __init__(self, rngs: nnx.Rngs, modules: Any = nnx) -> None:
        self.layer = modules.LayerNorm(WIDTH, rngs=rngs)
        self.blocks = nnx.List([modules.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.batch = modules.BatchNorm(WIDTH, rngs=rngs)
        self.group = modules.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.instance = modules.InstanceNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 16, rngs=rngs), jax.nn.gelu, nnx.Linear(16, WIDTH, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y, x = add_norm(self.layer, x, jnp.sin(x))
        for norm in self.blocks:
            y = norm(y + 1)
        y = self.group(jnp.sin(self.batch(self.mlp(y))))
        return x + y + self.instance(y)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(model(x)))


def result_of(model: Any, x: jax.Array) -> Any:
    result = nnx.jit(nnx.value_and_grad(loss_of))(model, x)
    return nnx.to_pure_dict(result[1]), result[0], nnx.to_pure_dict(nnx.state(model))
