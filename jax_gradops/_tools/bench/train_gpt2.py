"""GPT-2 124M in Flax NNX. The time of a step depends on the size of the vocabulary: it is GPT-2's.

GPT-2's GELU has the tanh form; gpt2-exact has the exact form. In gpt2-padded, the second half of
each window is padding. In gpt2-float32-rows, the embedding is looked up in float32 and then cast.
Code that avoids the slow gradient of an embedding in 16 bits does so.

The layer for queries, keys and values is `jax_gradops.nnx.Linear` in fused variants. This class
sums the gradient of its bias.
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
    """The model's sizes.

    GPT-2 has 50,257 tokens; `padded` is a multiple of 128 for matrix units.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50257
    padded: int = 50304


CONFIG = Config()


class GPT2(nnx.Module):
    """Predicts each token from the tokens before it; the head shares the token embedding."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(case.dtype)
        self.tokens = transformer.embed(case, CONFIG.padded, CONFIG.width, rngs)
        self.positions = transformer.embed(case, case.shape[1], CONFIG.width, rngs)
        self.blocks = nnx.List([_block(case, rngs) for _ in range(CONFIG.layers)])
        self.norm = _norm(case, rngs)

    def __call__(self, tokens: jax.Array, residual: transformer.Residual) -> transformer.Head:
        """Maps tokens [batch, time] to the head that predicts each next token."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1])[None])
        y = transformer.run_blocks(self.blocks, self.norm, x.astype(self.dtype), residual)
        return transformer.Head(y, self.tokens.embedding[...].T)


def _block(case: TrainCase, rngs: nnx.Rngs) -> transformer.Block:
    width, updates = CONFIG.width, 2 * CONFIG.layers
    linear = functools.partial(transformer.linear, case, rngs=rngs, use_bias=True)
    gelu = functools.partial(jax.nn.gelu, approximate=case.model != "gpt2-exact")
    return transformer.Block(
        (_norm(case, rngs), _norm(case, rngs)),
        transformer.Attention(case, width, CONFIG.heads, rngs, use_bias=True, updates=updates),
        nnx.Sequential(linear(width, 4 * width), gelu, linear(4 * width, width, updates=updates)),
    )


def _norm(case: TrainCase, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        CONFIG.width, epsilon=transformer.EPSILON, dtype=jnp.dtype(case.dtype), rngs=rngs
    )


def setup(case: TrainCase) -> Setup:
    """Makes the model."""
    return transformer.setup(case, functools.partial(GPT2, case), CONFIG.vocabulary)
