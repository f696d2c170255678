"""A `GPT` and its optimizer, compiled: the training step, validation, and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_gradops
from jax_gradops._cli import meshes, text
from jax_gradops._cli.gpt import GPT, GPTConfig
from jax_gradops._cli.settings import Settings


class TrainState(NamedTuple):
    """All that changes in training. The data of a step follow from the seed and its number."""

    params: Any
    opt_state: Any
    step: jax.Array


class Metrics(NamedTuple):
    """What a step reports."""

    loss: jax.Array
    gradient_norm: jax.Array


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Clip by global norm, from this library, then AdamW with a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=max(1, min(100, settings.steps // 10)),
        decay_steps=max(2, settings.steps),
        end_value=settings.learning_rate / 20,
    )

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        jax_gradops.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=matrices),
    )


class Program:
    """A model, compiled for one implementation of this library's ops, and for a mesh or not."""

    def __init__(
        self,
        settings: Settings,
        corpus: text.Corpus,
        implementation: Any,
        *,
        mesh: jax.sharding.Mesh | None = None,
        generated: int = 600,
    ) -> None:
        self.settings = settings
        self._mesh = mesh
        self._implementation = implementation
        self._optimizer = make_optimizer(settings)
        self._model = GPTConfig(
            vocabulary=len(corpus.charset),
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            context=settings.context,
            dtype=jnp.bfloat16 if settings.precision == "mixed" else jnp.float32,
        )
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(self._model, rngs=nnx.Rngs(0))))
        self._train_tokens = self._on_all_devices(corpus.train)
        self._windows = self._on_all_devices(
            _in_batches(text.windows(corpus.validation, settings.context), settings.batch)
        )
        self._generated = generated

        state = jax.eval_shape(self._initial_state)
        spread = None if mesh is None else meshes.of_state(mesh, state)
        self._initialize = jax.jit(self._initial_state, out_shardings=spread)
        if spread is not None:
            state = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, spread
            )
        # Compiled ahead, so that no time of compilation is in the tokens per second.
        self._train_step = self._compile(
            self._step,
            state,
            self._train_tokens,
            donate_argnums=0,
            out_shardings=None if mesh is None else (spread, meshes.replicated(mesh)),
        )
        self._loss = self._compile(self._validation_loss, state.params, self._windows)

    def _compile(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with jax_gradops.use_implementation(self._implementation):
            return jax.jit(function, **options).lower(*args).compile()

    def _on_all_devices(self, arrays: Any) -> Any:
        return jax.device_put(arrays, None if self._mesh is None else meshes.replicated(self._mesh))

    # --- Traced ---------------------------------------------------------------------------------

    def _initial_state(self) -> TrainState:
        model = GPT(self._model, rngs=nnx.Rngs(self.settings.seed))
        params = nnx.state(model, nnx.Param)
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def _logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(self._graph, params)(tokens)

    def _loss_of(self, params: Any, windows: jax.Array) -> jax.Array:
        """The loss of each window, of which the last token is predicted only."""
        if self._mesh is not None:
            # Parameters are whole where they are used; else XLA spreads activations as they are.
            params = jax.lax.with_sharding_constraint(params, meshes.replicated(self._mesh))
            windows = jax.lax.with_sharding_constraint(windows, meshes.of_windows(self._mesh))
        logits = self._logits(params, windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return jnp.mean(losses, axis=-1)

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(self.settings.seed), state.step)
        batch = text.sample_batch(tokens, key, self.settings.batch, self.settings.context)
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(self._loss_of(p, batch)))(
            state.params
        )
        if self._mesh is not None:  # spread as the parameters are, not as where they are used
            gradients = jax.lax.with_sharding_constraint(
                gradients, meshes.of_state(self._mesh, gradients)
            )
        opt_state: Any
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # The clip's state holds the norm before clipping, which has been computed anyway.
        norm = opt_state[0].global_norm
        return TrainState(params, opt_state, state.step + 1), Metrics(loss, norm)

    def _validation_loss(self, params: Any, windows: tuple[jax.Array, jax.Array]) -> jax.Array:
        def weighted(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jnp.sum(self._loss_of(params, batch[0]) * batch[1])

        return jnp.sum(jax.lax.map(weighted, windows)) / jnp.sum(windows[1])

    def _generate(
        self, params: Any, key: jax.Array, first: jax.Array, temperature: float
    ) -> jax.Array:
        """Characters one by one, each from the window of those before it."""
        context = self.settings.context

        def next_token(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
            window, length = carry
            logits = self._logits(params, window[None])[0, length - 1]
            token = jax.random.categorical(key, logits / temperature).astype(window.dtype)
            # What stands behind the last token is not seen by it, as attention is causal.
            full = jnp.concatenate([window[1:], token[None]])
            window = jnp.where(length < context, window.at[length].set(token, mode="drop"), full)
            return (window, jnp.minimum(length + 1, context)), token

        start = jnp.zeros(context, jnp.int32).at[0].set(first), jnp.ones((), jnp.int32)
        return jax.lax.scan(next_token, start, jax.random.split(key, self._generated))[1]

    # --- Called ---------------------------------------------------------------------------------

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        return self._initialize()

    def train_step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One step; takes over the memory of `state`."""
        return self._train_step(state, self._train_tokens)

    def validation_loss(self, state: TrainState) -> float:
        """Mean over all characters of the validation text, in nats."""
        return float(self._loss(state.params, self._windows))

    def generate(self, state: TrainState, first: int, temperature: float = 0.8) -> np.ndarray:
        """Text from the model, behind a first token."""
        key = jax.random.key(self.settings.seed)
        arguments = (
            state.params,
            *self._on_all_devices((key, jnp.int32(first), jnp.float32(temperature))),
        )
        return np.asarray(self._compile(self._generate, *arguments)(*arguments))

    def train_step_hlo(self) -> str:
        """The compiled training step."""
        return self._train_step.as_text()


def _in_batches(windows: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows as [batches, batch, tokens], and weights that are 0 for those that fill up."""
    count = len(windows)
    filling = -count % batch
    weights = np.pad(np.ones(count, np.float32), (0, filling))
    padded = np.pad(windows, ((0, filling), (0, 0)))
    return padded.reshape(-1, batch, padded.shape[-1]), weights.reshape(-1, batch)
