"""A small GPT in Flax NNX, with this library's embedding, layer norm and bias + GELU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_gradops import embedding_lookup
from jax_gradops.nnx import DenseGelu, LayerNorm, add_norm


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes and activation dtype of a `GPT`; parameters are float32."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    dtype: DTypeLike = jnp.float32


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = _linear(config, config.width, 3 * config.width, rngs)
        self.out = _linear(config, config.width, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to [batch, time, width]."""
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(x.shape))


class MLP(nnx.Module):
    """Two linear layers. The first layer's bias and the GELU are one operation."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        hidden = 4 * config.width
        self.up = DenseGelu(config.width, hidden, rngs=rngs, **_options(config, config.width))
        self.down = _linear(config, hidden, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to [batch, time, width]."""
        return self.down(self.up(x))


class Block(nnx.Module):
    """A pre-norm transformer block. Each addition and the norm after it are one operation."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `x + update` to a new pair with this meaning.

        All arrays are [batch, time, width].
        """
        y, x = add_norm(self.attention_norm, x, update)
        y, x = add_norm(self.mlp_norm, x, self.attention(y))
        return x, self.mlp(y)


class GPT(nnx.Module):
    """Predicts each token from the tokens before it; the head shares the token embedding."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        # The embeddings are float32. A frequent token's gradient is a sum of hundreds of terms.
        embed = functools.partial(
            nnx.Embed,
            features=config.width,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.dtype = config.dtype
        self.tokens = embed(config.vocabulary)
        self.positions = embed(config.context)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integer tokens [batch, time] to logits [batch, time, vocabulary] in `dtype`."""
        x = embedding_lookup(self.tokens.embedding[...], tokens, dtype=self.dtype)
        positions = self.positions(jnp.arange(tokens.shape[-1])).astype(self.dtype)
        update = jnp.broadcast_to(positions, x.shape)
        for block in self.blocks:
            x, update = block(x, update)
        y, _ = add_norm(self.norm, x, update)
        return y @ self.tokens.embedding[...].T.astype(self.dtype)


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> LayerNorm:
    return LayerNorm(config.width, dtype=config.dtype, rngs=rngs)


def _linear(
    config: GPTConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, residual: bool = False
) -> nnx.Linear:
    options = _options(config, inputs, residual)
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, **options)


def _options(config: GPTConfig, inputs: int, residual: bool = False) -> dict[str, Any]:
    # As in GPT-2: the more layers add to the residual stream, the smaller their first weights are.
    deviation = inputs**-0.5 / ((2 * config.layers) ** 0.5 if residual else 1)
    return {"dtype": config.dtype, "kernel_init": nnx.initializers.normal(deviation)}
