"""A `GPT` in training: the loss of a step, validation, and generation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_gradops
from jax_gradops._tools.demo import text
from jax_gradops._tools.demo.gpt import GPT, GPTConfig
from jax_gradops._tools.demo.settings import TextSettings
from jax_gradops._tools.demo.trainable import Trainable, TrainState


class Program(Trainable[TextSettings]):
    """A GPT and the text that it learns."""

    def __init__(
        self,
        settings: TextSettings,
        corpus: text.Corpus,
        implementation: Any,
        *,
        mesh: jax.sharding.Mesh | None = None,
        generated: int = 600,
    ) -> None:
        self._vocabulary = len(corpus.charset)
        self._generated = generated
        super().__init__(settings, corpus.train, implementation, mesh)
        self._windows = self._on_all_devices(
            _in_batches(text.windows(corpus.validation, settings.context), settings.batch)
        )
        self._validate = self._compile(
            self._validation_loss, self._state_like.params, self._windows
        )

    # --- Traced ---------------------------------------------------------------------------------

    def _model(self, rngs: nnx.Rngs) -> GPT:
        s = self.settings
        config = GPTConfig(
            vocabulary=self._vocabulary,
            width=s.width,
            layers=s.layers,
            heads=s.heads,
            context=s.context,
            dtype=jnp.bfloat16 if s.precision == "mixed" else jnp.float32,
        )
        return GPT(config, rngs=rngs)

    def _logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(self._graph, params)(tokens)

    def _loss_of(self, params: Any, windows: jax.Array) -> jax.Array:
        """The loss of each window. The last token is only predicted; it is not an input."""
        params, windows = self._spread(params, windows)
        logits = self._logits(params, windows[:, :-1])
        losses = jax_gradops.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return jnp.mean(losses, axis=-1)

    def _loss(self, params: Any, averages: Any, data: jax.Array, key: jax.Array) -> Any:
        batch = text.sample_batch(data, key, self.settings.batch, self.settings.context)
        return jnp.mean(self._loss_of(params, batch)), averages

    def _validation_loss(self, params: Any, windows: tuple[jax.Array, jax.Array]) -> jax.Array:
        def weighted(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.sum(self._loss_of(params, batch[0]) * batch[1])

        return jnp.sum(jax.lax.map(weighted, windows)) / jnp.sum(windows[1])

    def _generate(
        self, params: Any, key: jax.Array, first: jax.Array, temperature: float
    ) -> jax.Array:
        """Generates characters one by one, each from the window of characters before it."""
        context = self.settings.context

        def next_token(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
            window, length = carry
            logits = self._logits(params, window[None])[0, length - 1].astype(jnp.float32)
            token = jax.random.categorical(key, logits / temperature).astype(window.dtype)
            # Attention is causal: the last token does not see the positions after it.
            full = jnp.concatenate([window[1:], token[None]])
            window = jnp.where(length < context, window.at[length].set(token, mode="drop"), full)
            return (window, jnp.minimum(length + 1, context)), token

        start = jnp.zeros(context, jnp.int32).at[0].set(first), jnp.ones((), jnp.int32)
        return jax.lax.scan(next_token, start, jax.random.split(key, self._generated))[1]

    # --- Called ---------------------------------------------------------------------------------

    def evaluate(self, state: TrainState) -> float:
        """Mean loss over all characters of the validation text, in nats."""
        return float(self._validate(state.params, self._windows))

    def generate(self, state: TrainState, first: int, temperature: float = 0.8) -> np.ndarray:
        """Generates text that follows the token `first`."""
        key = jax.random.key(self.settings.seed)
        arguments = (
            state.params,
            *self._on_all_devices((key, jnp.int32(first), jnp.float32(temperature))),
        )
        return np.asarray(self._compile(self._generate, *arguments)(*arguments))


def _in_batches(windows: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows as [batches, batch, tokens], and weights. Windows of padding have weight 0."""
    count = len(windows)
    filling = -count % batch
    weights = np.pad(np.ones(count, np.float32), (0, filling))
    padded = np.pad(windows, ((0, filling), (0, 0)))
    return padded.reshape(-1, batch, padded.shape[-1]), weights.reshape(-1, batch)
