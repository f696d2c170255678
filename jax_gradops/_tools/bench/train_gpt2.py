"""GPT-2 124M in Flax NNX, as Flax users write it, and with this library's modules.

The model is written once. `jax_gradops.nnx.fuse` replaces Flax's modules with this library's.
`jax_gradops.nnx.deferred_bias` leaves the bias of a layer to the addition after it.
`jax_gradops.nnx.add_norm` makes one pass of this bias, the addition and the norm. The layer for
queries, keys and values is `jax_gradops.nnx.Linear`, which sums the gradient of its bias.

The text comes with Python, so any machine has it: the language reference, and the standard
library's modules that are single files. Tokens are words, runs of punctuation and runs of white
space, each with the space before it. GPT-2's tokenizer begins in this way too, but splits these
tokens further. Tokens are numbered by frequency: token 0 is the most frequent. If there are more
tokens than GPT-2's vocabulary holds, all rarer ones become the last token. Losses cannot be
compared with losses of other tokens or texts. The time of a step depends on the size of the
vocabulary. This size is GPT-2's.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_gradops
import jax_gradops.nnx
from jax_gradops._tools.bench.train import STOCK, Setup, TrainCase, is_matrix
from jax_gradops._tools.demo import text

#: An array that is still to be added to another one. Its bias follows if not yet added.
Update: TypeAlias = tuple[Any, ...]


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
_EPSILON = 1e-5
_DEVIATION = 0.02  # standard deviation of the initial parameters
_MAX_NORM = 1.0
_WEIGHT_DECAY = 0.1
_LEARNING_RATE = 3e-4
_WARM_UP = 100  # steps of the learning rate's warm-up


# --- Model ---------------------------------------------------------------------------------------


class Residual(NamedTuple):
    """How a variant adds to the residual stream.

    Attributes:
      project: maps a layer and its input to an update.
      add_norm: maps a norm, x and an update to the norm of their sum, and the sum.
    """

    project: Callable[[Any, jax.Array], Update]
    add_norm: Callable[..., tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Causal self-attention: cuDNN's if `cudnn`, else JAX's default implementation."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        self.qkv = _linear(case, CONFIG.width, 3 * CONFIG.width, rngs)
        self.out = _linear(case, CONFIG.width, CONFIG.width, rngs, residual=True)
        half = jnp.dtype(case.dtype).itemsize == 2
        self.implementation: Any = "cudnn" if case.platform == "gpu" and half else None

    def __call__(self, x: jax.Array, residual: Residual) -> Update:
        """Maps [batch, time, width] to an update of this shape."""
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], CONFIG.heads, -1) for a in (q, k, v))
        y = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        return residual.project(self.out, y.reshape(x.shape))


class Block(nnx.Module):
    """A pre-norm transformer block. It takes and returns a sum and its update."""

    def __init__(self, case: TrainCase, gelu: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.ln_1 = _norm(case, rngs)
        self.attention = Attention(case, rngs)
        self.ln_2 = _norm(case, rngs)
        self.mlp = nnx.Sequential(
            _linear(case, CONFIG.width, 4 * CONFIG.width, rngs),
            gelu,
            _linear(case, 4 * CONFIG.width, CONFIG.width, rngs, residual=True),
        )

    def __call__(
        self, x: jax.Array, update: Update, residual: Residual
    ) -> tuple[jax.Array, Update]:
        """Maps `x` and `update` [batch, time, width] to a new pair.

        The first block has no update.
        """
        y, x = residual.add_norm(self.ln_1, x, *update) if update else (self.ln_1(x), x)
        y, x = residual.add_norm(self.ln_2, x, *self.attention(y, residual))
        return x, residual.project(self.mlp, y)


class GPT2(nnx.Module):
    """Predicts each token from the tokens before it; the head shares the token embedding."""

    def __init__(self, case: TrainCase, rngs: nnx.Rngs) -> None:
        embed = functools.partial(
            nnx.Embed,
            features=CONFIG.width,
            embedding_init=nnx.initializers.normal(_DEVIATION),
            rngs=rngs,
        )
        self.dtype = jnp.dtype(case.dtype)
        gelu = functools.partial(jax.nn.gelu, approximate=case.model != "gpt2-exact")
        self.tokens = embed(CONFIG.padded)
        self.positions = embed(case.shape[1])
        self.blocks = nnx.List([Block(case, gelu, rngs) for _ in range(CONFIG.layers)])
        self.ln_f = _norm(case, rngs)

    def __call__(self, tokens: jax.Array, residual: Residual) -> jax.Array:
        """Maps tokens [batch, time] to logits [batch, time, CONFIG.padded]."""
        # In float32: the gradient of a frequent token is a sum of hundreds of terms. 16-bit atomic
        # additions would lose most of these terms, and are many times slower.
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1])[None])
        x = x.astype(self.dtype)
        update: Update = ()
        for block in self.blocks:
            x, update = block(x, update, residual)
        y, _ = residual.add_norm(self.ln_f, x, *update)
        return y @ self.tokens.embedding[...].astype(self.dtype).T


def _linear(
    case: TrainCase, inputs: int, outputs: int, rngs: nnx.Rngs, *, residual: bool = False
) -> nnx.Linear:
    # The more layers add to the residual stream, the smaller their initial parameters are.
    deviation = _DEVIATION / ((2 * CONFIG.layers) ** 0.5 if residual else 1)
    return nnx.Linear(
        inputs,
        outputs,
        dtype=jnp.dtype(case.dtype),
        kernel_init=nnx.initializers.normal(deviation),
        rngs=rngs,
    )


def _norm(case: TrainCase, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(CONFIG.width, epsilon=_EPSILON, dtype=jnp.dtype(case.dtype), rngs=rngs)


# --- Variants ------------------------------------------------------------------------------------


def _whole(layer: Any, inputs: jax.Array) -> Update:
    return (layer(inputs),)


def _add_then_norm(
    norm: nnx.LayerNorm, x: jax.Array, update: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x = x + update
    return norm(x), x


def _fuse(variant: str, model: GPT2) -> Residual:
    """Gives the model the variant's modules; returns how the model adds to the residual stream.

    Parameters keep their names, so all variants have the parameters of stock.
    """
    plain = Residual(_whole, _add_then_norm)
    if variant == STOCK:
        return plain
    if variant == "unfused":
        jax_gradops.nnx.fuse(model)
        return plain
    residuals = "output" if variant == "save_output" else "input"
    jax_gradops.nnx.fuse(model, gelu=True, linear=True, residuals=residuals)
    return Residual(jax_gradops.nnx.deferred_bias, jax_gradops.nnx.add_norm)


def _optimizer(variant: str) -> optax.GradientTransformation:
    library = optax if variant == STOCK else jax_gradops
    rate = optax.linear_schedule(_LEARNING_RATE / _WARM_UP, _LEARNING_RATE, _WARM_UP - 1)
    return optax.chain(
        library.clip_by_global_norm(_MAX_NORM),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=_WEIGHT_DECAY, mask=is_matrix),
    )


def setup(case: TrainCase) -> Setup:
    """Makes the model.

    Each step reads its own windows of the text; the carried value is its number.
    """
    examples, context = case.shape

    def init(key: jax.Array) -> tuple[Any, Any]:
        return nnx.state(GPT2(case, nnx.Rngs(key)), nnx.Param), jnp.zeros((), jnp.int32)

    def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        model = nnx.eval_shape(lambda: GPT2(case, nnx.Rngs(0)))
        residual = _fuse(variant, model)
        graph = nnx.graphdef(model)

        def apply(parameters: Any, number: jax.Array, corpus: jax.Array) -> tuple[Any, Any]:
            key = jax.random.fold_in(jax.random.key(0), number)
            windows = text.sample_batch(corpus, key, examples, context)
            logits = nnx.merge(graph, parameters)(windows[:, :-1], residual)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), windows[:, 1:]
            )
            return jnp.mean(losses), number + 1

        return apply

    def corpus(key: jax.Array) -> jax.Array:
        del key
        return jnp.asarray(tokens(read_text(), CONFIG.vocabulary))

    return Setup("tokens", examples * context, init, corpus, loss, _optimizer)


# --- Text ----------------------------------------------------------------------------------------


def read_text() -> str:
    """The language reference, and the sources of the standard library if they are installed."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return "\n".join((text.python_reference(), *sources))


def tokens(of: str, vocabulary: int) -> np.ndarray:
    """Words by rank: 0 is the most frequent. Words beyond the vocabulary get the last rank."""
    words = re.findall(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+", of)
    # Of equally frequent words, the first one in the text comes first.
    ranked = collections.Counter(words).most_common()
    ranks = {word: min(rank, vocabulary - 1) for rank, (word, _) in enumerate(ranked)}
    return np.array([ranks[word] for word in words], np.int32)
