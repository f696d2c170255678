"""ViT-B/16 in Flax NNX: images are cut into patches of 16 x 16 pixels, and patches are tokens.

As in the paper, https://arxiv.org/abs/2010.11929, there are a class token and learned positions,
and GELU is exact. The head is one linear layer, without a bias. There is no dropout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_gradops._tools.bench import train_images, train_optimizer
from jax_gradops._tools.bench import train_transformer as transformer
from jax_gradops._tools.bench.train import Setup, TrainCase


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's sizes. `patch` is the number of pixels of a patch's side."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    patch: int = 16


CONFIG = Config()


class ViT(nnx.Module):
    """Finds the class of an image. The last class token is the input of the head."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(case.dtype)
        _, height, width, channels = case.shape
        linear = functools.partial(transformer.linear, case, rngs=rngs)
        tokens = (height // CONFIG.patch) * (width // CONFIG.patch)
        # A convolution with strides as large as its window is a linear layer of patches.
        self.patches = linear(CONFIG.patch**2 * channels, CONFIG.width, use_bias=True)
        self.class_token = transformer.embed(case, 1, CONFIG.width, rngs)
        self.positions = transformer.embed(case, 1 + tokens, CONFIG.width, rngs)
        self.blocks = nnx.List([_block(case, rngs) for _ in range(CONFIG.layers)])
        self.norm = _norm(case, rngs)
        self.head = linear(CONFIG.width, train_images.CLASSES, use_bias=False)

    def __call__(self, images: jax.Array, residual: transformer.Residual) -> transformer.Head:
        """Maps images [batch, height, width, channels] to the head that finds their classes."""
        x = self.patches(_cut(images))
        first = jnp.broadcast_to(self.class_token.embedding[...], (len(x), 1, CONFIG.width))
        x = jnp.concatenate((first.astype(self.dtype), x), axis=1)
        x = x + self.positions.embedding[...].astype(self.dtype)[None]
        y = transformer.run_blocks(self.blocks, self.norm, x, residual)
        return transformer.Head(y[:, 0], self.head.kernel[...])


def _cut(images: jax.Array) -> jax.Array:
    """Maps images [batch, height, width, channels] to patches [batch, patches, numbers]."""
    batch, height, width, channels = images.shape
    rows, columns = height // CONFIG.patch, width // CONFIG.patch
    x = images.reshape(batch, rows, CONFIG.patch, columns, CONFIG.patch, channels)
    return x.swapaxes(2, 3).reshape(batch, rows * columns, -1)


def _block(case: TrainCase, rngs: nnx.Rngs) -> transformer.Block:
    width, updates = CONFIG.width, 2 * CONFIG.layers
    linear = functools.partial(transformer.linear, case, rngs=rngs, use_bias=True)
    attention = transformer.Attention(
        case, width, CONFIG.heads, rngs, use_bias=True, updates=updates, causal=False
    )
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    mlp = nnx.Sequential(linear(width, 4 * width), gelu, linear(4 * width, width, updates=updates))
    return transformer.Block((_norm(case, rngs), _norm(case, rngs)), attention, mlp)


def _norm(case: TrainCase, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        CONFIG.width, epsilon=transformer.EPSILON, dtype=jnp.dtype(case.dtype), rngs=rngs
    )


def setup(case: TrainCase) -> Setup:
    """Images and labels are random: the time of a step does not depend on their values."""
    make = functools.partial(ViT, case)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return nnx.state(make(nnx.Rngs(key)), nnx.Param), ()

    def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        run = transformer.prepare(variant, make)

        def apply(parameters: Any, carried: Any, batch: Any) -> tuple[Any, Any]:
            images, labels = batch
            head = run(parameters, images)
            return jnp.mean(transformer.losses(variant, head, labels)), carried

        return apply

    batch = functools.partial(train_images.batch, case)
    return Setup("images", case.shape[0], init, batch, loss, train_optimizer.adamw)
