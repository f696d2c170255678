"""Models like Llama and Gemma in Flax NNX: RMS norm, rotary positions, no biases, untied heads.

Llama's MLP is a SwiGLU, Gemma's a GeGLU. Otherwise the two models are equal.

`--vocabulary` sets the size of the vocabulary. The text may have fewer different tokens.

The gate is XLA's in all variants: XLA computes the activation and the product in one pass. A kernel
for the activation alone would make two passes of it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jax_gradops._tools.bench import train_transformer as transformer
from jax_gradops._tools.bench.train import Setup, TrainCase


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's sizes. `hidden` is the width of a gate."""

    layers: int = 8
    heads: int = 16
    width: int = 2048
    hidden: int = 5632


CONFIG = Config()
_BASE = 1e4  # of the speeds of rotation


def rotary(x: jax.Array) -> jax.Array:
    """Turns pairs of features of x [batch, time, heads, features] by their position.

    Feature i is paired with feature i + features / 2, as in Llama's code in Transformers.
    """
    half = x.shape[-1] // 2
    speeds = _BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), speeds)[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


class GatedMLP(nnx.Module):
    """Two linear layers, one of them with an activation; the third layer gets their product."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        self.activation = jax.nn.gelu if case.model == "gemma" else jax.nn.silu
        linear = functools.partial(transformer.linear, case, rngs=rngs, use_bias=False)
        self.gate = linear(CONFIG.width, CONFIG.hidden)
        self.up = linear(CONFIG.width, CONFIG.hidden)
        self.down = linear(CONFIG.hidden, CONFIG.width, updates=2 * CONFIG.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to [batch, time, width]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Llama(nnx.Module):
    """Predicts each token from the tokens before it."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(case.dtype)
        self.tokens = transformer.embed(case, case.vocabulary, CONFIG.width, rngs)
        self.blocks = nnx.List([_block(case, rngs) for _ in range(CONFIG.layers)])
        self.norm = _norm(case, rngs)
        self.head = transformer.linear(case, CONFIG.width, case.vocabulary, rngs, use_bias=False)

    def __call__(self, tokens: jax.Array, residual: transformer.Residual) -> transformer.Head:
        """Maps tokens [batch, time] to the head that predicts each next token."""
        x = self.tokens(tokens).astype(self.dtype)
        y = transformer.run_blocks(self.blocks, self.norm, x, residual)
        return transformer.Head(y, self.head.kernel[...])


def _block(case: TrainCase, rngs: nnx.Rngs) -> transformer.Block:
    attention = transformer.Attention(
        case,
        CONFIG.width,
        CONFIG.heads,
        rngs,
        use_bias=False,
        updates=2 * CONFIG.layers,
        turn=rotary,
    )
    norms = _norm(case, rngs), _norm(case, rngs)
    return transformer.Block(norms, attention, GatedMLP(case, rngs))


def _norm(case: TrainCase, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        CONFIG.width, epsilon=transformer.EPSILON, dtype=jnp.dtype(case.dtype), rngs=rngs
    )


def setup(case: TrainCase) -> Setup:
    """Makes the model."""
    return transformer.setup(case, functools.partial(Llama, case), case.vocabulary)
