"""The base class of all tasks: a model and its optimizer, compiled."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_gradops
from jax_gradops._tools.demo import meshes
from jax_gradops._tools.demo.settings import Settings


class TrainState(NamedTuple):
    """All values that training changes. The seed and the step number determine a step's data."""

    params: Any
    averages: Any  # running averages of batch norm, if the model has any
    opt_state: Any
    step: jax.Array


class Metrics(NamedTuple):
    """The values that a step reports."""

    loss: jax.Array
    gradient_norm: jax.Array


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """The library's clip by global norm, then AdamW with a warm-up and a cosine decay."""
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


S = TypeVar("S", bound=Settings)


class Trainable(abc.ABC, Generic[S]):
    """A model, compiled for one implementation of this library's ops, with or without a mesh.

    Args:
      settings: the task's settings.
      data: arrays that every step reads.
      implementation: as in `jax_gradops.use_implementation`.
      mesh: made by `jax_gradops._tools.demo.meshes`, or None.
    """

    def __init__(
        self,
        settings: S,
        data: Any,
        implementation: Any,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        self.settings = settings
        self._mesh = mesh
        self._implementation = implementation
        self._optimizer = make_optimizer(settings)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: self._model(nnx.Rngs(0))))
        self._data = self._on_all_devices(data)

        state = jax.eval_shape(self._initial_state)
        spread = None if mesh is None else meshes.of_state(mesh, state)
        self._initialize = jax.jit(self._initial_state, out_shardings=spread)
        if spread is not None:
            state = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, spread
            )
        self._state_like = state
        # Compiled before the first step, so that compilation is not counted in the units per
        # second.
        self._train_step = self._compile(
            self._step,
            state,
            self._data,
            donate_argnums=0,
            out_shardings=None if mesh is None else (spread, meshes.replicated(mesh)),
        )

    def _compile(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with jax_gradops.use_implementation(self._implementation):
            return jax.jit(function, **options).lower(*args).compile()

    def _on_all_devices(self, arrays: Any) -> Any:
        return jax.device_put(arrays, None if self._mesh is None else meshes.replicated(self._mesh))

    # --- Traced ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the model with its initial parameters."""

    @abc.abstractmethod
    def _loss(self, params: Any, averages: Any, data: Any, key: jax.Array) -> Any:
        """The loss of the step with this key, and the running averages after the step."""

    def _initial_state(self) -> TrainState:
        model = self._model(nnx.Rngs(self.settings.seed))
        params, averages = nnx.state(model, nnx.Param, nnx.BatchStat)
        step = jnp.zeros((), jnp.int32)
        return TrainState(params, averages, self._optimizer.init(params), step)

    def _spread(self, params: Any, batch: Any) -> Any:
        """Replicates the parameters for their use.

        Else XLA would shard activations as parameters are.
        """
        if self._mesh is None:
            return params, batch
        return (
            jax.lax.with_sharding_constraint(params, meshes.replicated(self._mesh)),
            jax.lax.with_sharding_constraint(batch, meshes.of_batch(self._mesh)),
        )

    def _step(self, state: TrainState, data: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(self.settings.seed), state.step)
        loss_of = jax.value_and_grad(self._loss, has_aux=True)
        (loss, averages), gradients = loss_of(state.params, state.averages, data, key)
        if self._mesh is not None:  # sharded as the stored parameters are
            gradients = jax.lax.with_sharding_constraint(
                gradients, meshes.of_state(self._mesh, gradients)
            )
        opt_state: Any
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # The clip's state holds the norm before clipping: the clip has computed it already.
        metrics = Metrics(loss, opt_state[0].global_norm)
        return TrainState(params, averages, opt_state, state.step + 1), metrics

    # --- Called ---------------------------------------------------------------------------------

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        return self._initialize()

    def train_step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Runs one step. The step takes over the memory of `state`."""
        return self._train_step(state, self._data)

    def train_step_hlo(self) -> str:
        """The HLO text of the compiled training step."""
        return self._train_step.as_text()

    @abc.abstractmethod
    def evaluate(self, state: TrainState) -> float:
        """The settings' measure on held-out data."""
