"""What the suite's transformers share: attention, the residual stream and losses.

A model is written once, in Flax NNX, as Flax users write it. `jax_gradops.nnx.fuse` replaces Flax's
modules with this library's. `jax_gradops.nnx.deferred_bias` leaves the bias of a layer to the
addition after it. `jax_gradops.nnx.add_norm` makes one pass of this bias, the addition and the
norm. All variants have the parameters of stock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_gradops
import jax_gradops.nnx
from jax_gradops._tools.bench import train_optimizer, train_text
from jax_gradops._tools.bench.train import STOCK, Setup, TrainCase
from jax_gradops._tools.demo import text

#: An array that is still to be added to another one. Its bias follows if not yet added.
Update: TypeAlias = tuple[Any, ...]

EPSILON = 1e-5
_DEVIATION = 0.02  # standard deviation of the initial parameters


# --- Parts of models -----------------------------------------------------------------------------


class Residual(NamedTuple):
    """How a variant adds to the residual stream.

    Attributes:
      project: maps a layer and its input to an update.
      add_norm: maps a norm, x and an update to the norm of their sum, and the sum.
    """

    project: Callable[[Any, jax.Array], Update]
    add_norm: Callable[..., tuple[jax.Array, jax.Array]]


class Head(NamedTuple):
    """The last product of a model. Its results are the logits.

    Attributes:
      y: [..., width].
      kernel: [width, classes].
    """

    y: jax.Array
    kernel: jax.Array


def linear(
    case: TrainCase,
    inputs: int,
    outputs: int,
    rngs: nnx.Rngs,
    *,
    use_bias: bool,
    updates: int | None = None,
) -> nnx.Linear:
    """A linear layer. If it adds to the residual stream, `updates` is the number of such layers.

    The more layers add to the residual stream, the smaller their initial parameters are.
    """
    deviation = _DEVIATION / (updates or 1) ** 0.5
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=jnp.dtype(case.dtype),
        kernel_init=nnx.initializers.normal(deviation),
        rngs=rngs,
    )


def embed(case: TrainCase, words: int, width: int, rngs: nnx.Rngs) -> nnx.Embed:
    """An embedding whose rows are in the dtype of the case, or in float32 if its model says so."""
    dtype = None if case.model.endswith("-float32-rows") else jnp.dtype(case.dtype)
    init = nnx.initializers.normal(_DEVIATION)
    return nnx.Embed(words, width, dtype=dtype, embedding_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Self-attention: cuDNN's if it has the dtype and the length, else JAX's default one.

    If `causal`, a token attends to itself and to the tokens before it, and to no other token.
    `turn` is applied to queries and keys [batch, time, heads, features]. None: no change.
    """

    def __init__(
        self,
        case: TrainCase,
        width: int,
        heads: int,
        rngs: nnx.Rngs,
        *,
        use_bias: bool,
        updates: int,
        causal: bool = True,
        turn: Callable[[jax.Array], jax.Array] | None = None,
    ) -> None:
        self.qkv = linear(case, width, 3 * width, rngs, use_bias=use_bias)
        self.out = linear(case, width, width, rngs, use_bias=use_bias, updates=updates)
        self.heads, self.causal, self.turn = heads, causal, turn
        self.cudnn = case.platform == "gpu" and jnp.dtype(case.dtype).itemsize == 2

    def __call__(self, x: jax.Array, residual: Residual) -> Update:
        """Maps [batch, time, width] to an update of this shape."""
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in (q, k, v))
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        cudnn = self.cudnn and x.shape[-2] % 2 == 0
        y = jax.nn.dot_product_attention(
            q, k, v, is_causal=self.causal, implementation="cudnn" if cudnn else None
        )
        return residual.project(self.out, y.reshape(x.shape))


class Block(nnx.Module):
    """A pre-norm transformer block. It takes and returns a sum and its update."""

    def __init__(self, norms: tuple[Any, Any], attention: Attention, mlp: Any) -> None:
        self.norm_1, self.norm_2 = norms
        self.attention, self.mlp = attention, mlp

    def __call__(
        self, x: jax.Array, update: Update, residual: Residual
    ) -> tuple[jax.Array, Update]:
        """Maps `x` and `update` [batch, time, width] to a new pair.

        The first block has no update.
        """
        y, x = residual.add_norm(self.norm_1, x, *update) if update else (self.norm_1(x), x)
        y, x = residual.add_norm(self.norm_2, x, *self.attention(y, residual))
        return x, residual.project(self.mlp, y)


def run_blocks(blocks: Any, norm: Any, x: jax.Array, residual: Residual) -> jax.Array:
    """Runs all blocks and the last norm on x [batch, time, width]."""
    update: Update = ()
    for block in blocks:
        x, update = block(x, update, residual)
    return residual.add_norm(norm, x, *update)[0]


# --- Variants ------------------------------------------------------------------------------------


def _whole(layer: Any, inputs: jax.Array) -> Update:
    return (layer(inputs),)


def _add_then_norm(norm: Any, x: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x + update
    return norm(x), x


def _fuse(variant: str, model: Any) -> Residual:
    """Gives the model the variant's modules; returns how the model adds to the residual stream.

    Parameters keep their names.
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


def losses(variant: str, head: Head, labels: jax.Array) -> jax.Array:
    """The loss of each label, or their mean, in float32."""
    if variant == "linear_loss":
        loss = jax_gradops.linear_softmax_cross_entropy
        return loss(head.y, head.kernel, labels, reduction="mean")
    logits = head.y @ head.kernel.astype(head.y.dtype)
    if variant in (STOCK, "stock_loss"):
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jax_gradops.softmax_cross_entropy_with_integer_labels(logits, labels)


def prepare(variant: str, make: Callable[[nnx.Rngs], Any]) -> Callable[..., Head]:
    """Maps parameters and the inputs of the model to its head."""
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    residual = _fuse(variant, model)
    graph = nnx.graphdef(model)
    return lambda parameters, inputs: nnx.merge(graph, parameters)(inputs, residual)


def setup(case: TrainCase, make: Callable[[nnx.Rngs], Any], vocabulary: int) -> Setup:
    """Makes a language model. The text has at most `vocabulary` different tokens.

    Each step reads its own windows of the text; the carried value is its number.
    """
    examples, context = case.shape

    def init(key: jax.Array) -> tuple[Any, Any]:
        return nnx.state(make(nnx.Rngs(key)), nnx.Param), jnp.zeros((), jnp.int32)

    def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        run = prepare(variant, make)

        def apply(parameters: Any, number: jax.Array, corpus: jax.Array) -> tuple[Any, Any]:
            key = jax.random.fold_in(jax.random.key(0), number)
            windows = text.sample_batch(corpus, key, examples, context)
            if case.model.endswith("-padded"):
                windows = windows.at[:, context // 2 :].set(0)
            head = run(parameters, windows[:, :-1])
            return jnp.mean(losses(variant, head, windows[:, 1:])), number + 1

        return apply

    def corpus(key: jax.Array) -> jax.Array:
        del key
        return jnp.asarray(train_text.tokens(train_text.read_text(), vocabulary))

    return Setup("tokens", examples * context, init, corpus, loss, train_optimizer.adamw)
