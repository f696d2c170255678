"""A small GPT in Flax NNX, with this library's layer norm and bias + GELU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jax_gradops


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes and activation dtype of a `GPT`; parameters are float32."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    dtype: DTypeLike = jnp.float32


class LayerNorm(nnx.Module):
    """`jax_gradops.layer_norm` with its parameters."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis."""
        return jax_gradops.layer_norm(x, self.scale[...], self.bias[...])


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = _linear(config, config.width, 3 * config.width, rngs)
        self.out = _linear(config, config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(x.shape))


class MLP(nnx.Module):
    """Two linear layers; the first one's bias and the GELU are one operation."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.up = _linear(config, config.width, 4 * config.width, rngs)
        self.bias = nnx.Param(jnp.zeros(4 * config.width))
        self.down = _linear(config, 4 * config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        return self.down(jax_gradops.bias_gelu(self.up(x), self.bias[...]))


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """Predicts each token from those before it; the head shares the token embedding."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        embed = functools.partial(
            nnx.Embed,
            features=config.width,
            dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.tokens = embed(config.vocabulary)
        self.positions = embed(config.context)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = LayerNorm(config.width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Integer tokens [batch, time] to float32 logits [batch, time, vocabulary]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def _linear(
    config: GPTConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, residual: bool = False
) -> nnx.Linear:
    # GPT-2: layers that add to the residual stream start smaller, by the number of such additions.
    deviation = inputs**-0.5 / ((2 * config.layers) ** 0.5 if residual else 1)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(deviation),
        rngs=rngs,
    )
