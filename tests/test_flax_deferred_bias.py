"""`nnx.deferred_bias` with `add_norm` must give the results of Flax's layers and norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import WIDTH, assert_close, x_of

import jax_gradops.nnx
from jax_gradops.nnx import add_norm, deferred_bias, fuse

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("flax_settings")]


def linear(inputs: int = WIDTH, outputs: int = WIDTH, kind: Any = nnx.Linear, **more: Any) -> Any:
    some = nnx.initializers.normal(1.0)
    return kind(inputs, outputs, bias_init=some, rngs=nnx.Rngs(0), **more)


class Doubled(nnx.Linear):
    """A subclass with its own call, as a user may write it."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        return 2 * super().__call__(inputs, out_sharding)


class Named(nnx.Linear):
    """A subclass without its own call, as a user may write it."""


def mlp(*last: Any) -> nnx.Sequential:
    return nnx.Sequential(linear(outputs=16), jax.nn.gelu, linear(16), *last)


def pair(x: jax.Array) -> Any:
    return x, None


def named(x: jax.Array) -> Any:
    return {"inputs": x}


BF16 = jnp.bfloat16
# Layers, and whether the bias is returned separately.
LAYERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (linear, True),
    "without a bias": (lambda: linear(use_bias=False), False),
    "narrow": (lambda: linear(dtype=BF16), True),
    "narrow parameters": (lambda: linear(param_dtype=BF16), True),
    "wide products": (lambda: linear(dtype=BF16, preferred_element_type=jnp.float32), True),
    "narrow products": (lambda: linear(preferred_element_type=BF16), False),
    "a subclass": (lambda: linear(kind=Named), True),
    "a subclass with a call": (lambda: linear(kind=Doubled), False),
    "LoRA": (lambda: linear(kind=nnx.LoRALinear, lora_rank=2), False),
    "this library's": (lambda: linear(kind=jax_gradops.nnx.Linear), True),
    "with GELU": (lambda: linear(kind=jax_gradops.nnx.DenseGelu), False),
    "a function": (lambda: jnp.sin, False),
    "Sequential": (mlp, True),
    "fused": (lambda: fuse(mlp(), gelu=True), True),
    "all fused": (lambda: fuse(mlp(), gelu=True, linear=True), True),
    "fused, GELU last": (lambda: fuse(mlp(jax.nn.gelu), gelu=True), False),
    "of one layer": (lambda: nnx.Sequential(linear()), True),
    "of none": (nnx.Sequential, False),
    "nested": (lambda: nnx.Sequential(jnp.sin, fuse(mlp(), gelu=True)), True),
    "a tuple before": (lambda: nnx.Sequential(pair, linear()), True),
    "names before": (lambda: nnx.Sequential(named, linear()), True),
}


OF_NARROW = ("plain", "narrow", "narrow parameters", "fused")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, "float32") for n in LAYERS), *((n, "bfloat16") for n in OF_NARROW)]
)
def test_deferred_bias(name: str, dtype: str, platform: str) -> None:
    make, deferred = LAYERS[name]
    x, residual = x_of().astype(dtype), jnp.cos(x_of()).astype(dtype)
    norms = nnx.LayerNorm, jax_gradops.nnx.LayerNorm
    flax, ours = (nnx.List([kind(WIDTH, rngs=nnx.Rngs(0)), make()]) for kind in norms)

    def stock(model: Any, x: Any, residual: Any) -> Any:
        norm, layer = model
        total = x + layer(residual)
        return norm(total), total

    def split(model: Any, x: Any, residual: Any) -> Any:
        norm, layer = model
        y, bias = deferred_bias(layer, residual)
        assert (bias is not None) == deferred
        return add_norm(norm, x, y, bias)

    def run(model: Any, f: Any) -> Any:
        def loss(model: Any, x: Any, residual: Any) -> Any:
            y, total = f(model, x, residual)
            wide = (a.astype(jnp.float32) for a in (y, total))
            return sum(jnp.sum(jnp.sin(a)) for a in wide), (y, total)

        run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        (_, values), (gradients, *others) = run(model, x, residual)
        return values, jax.tree.leaves(nnx.to_pure_dict(gradients)), others

    expected, actual = run(flax, stock), run(ours, split)
    types = [[a.dtype for a in jax.tree.leaves(r)] for r in (expected, actual)]
    assert types[0] == types[1]
    narrow = dtype == "bfloat16" or "narrow" in name or "wide" in name
    assert_close(expected, actual, BF16 if narrow else jnp.float32)


def test_the_bias_is_not_rounded() -> None:
    layer = linear(dtype=BF16)
    y, bias = deferred_bias(layer, x_of())
    assert y.dtype == BF16 and bias is not None and bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias, layer.bias[...])


def test_nothing_is_added_beside_the_kernel() -> None:
    """The program has no addition in any dtype. Without a kernel, it adds as a Linear does."""
    bias = jnp.asarray(x_of(WIDTH))
    for norm in (jax_gradops.nnx.LayerNorm, jax_gradops.nnx.RMSNorm):
        for x_dtype, bias_dtype in (("float32", "bfloat16"), ("float32", "float64")):
            f = functools.partial(add_norm, norm(WIDTH, rngs=nnx.Rngs(0)))
            x, b = x_of().astype(x_dtype), bias.astype(bias_dtype)
            assert "stablehlo.add" not in jax.jit(f).lower(x, x, b).as_text()
    for kind in (nnx.LayerNorm, jax_gradops.nnx.LayerNorm):
        norm = kind(WIDTH, rngs=nnx.Rngs(0))
        x = x_of().astype(BF16)
        for other in (x, x[..., :1]):
            b = bias[: other.shape[-1]]
            y, total = add_norm(norm, x_of(), other, b)
            np.testing.assert_array_equal(total, x_of() + (other + b.astype(BF16)))
            assert_close(norm(total), y)
        y, total = add_norm(norm, x_of(), x_of(), jnp.arange(WIDTH))
        np.testing.assert_array_equal(total, x_of() + (x_of() + jnp.arange(WIDTH, dtype="float32")))


def test_what_watches_calls_sees_the_layer() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.norm = jax_gradops.nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
            self.layer = fuse(mlp(), gelu=True)

        def __call__(self, x: jax.Array) -> Any:
            return add_norm(self.norm, x, *deferred_bias(self.layer, x))

    table = nnx.tabulate(Model(), x_of())
    assert "Sequential" in table and "Linear" in table
