"""A `ResNet` in training: the loss of a step, and the classification of the test images."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_gradops
from jax_gradops._tools.demo.digits.data import CLASSES, Digits, sample_batch
from jax_gradops._tools.demo.digits.resnet import ResNet, ResNetConfig
from jax_gradops._tools.demo.settings import DigitsSettings
from jax_gradops._tools.demo.trainable import Trainable, TrainState


class Program(Trainable[DigitsSettings]):
    """A ResNet and the images of digits that it learns to classify."""

    def __init__(
        self,
        settings: DigitsSettings,
        digits: Digits,
        implementation: Any,
        *,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        super().__init__(settings, (digits.train_images, digits.train_labels), implementation, mesh)
        self._test_labels = digits.test_labels
        self._test_images = self._on_all_devices(digits.test_images)
        like = self._state_like
        self._classify = self._compile(self._classes, like.params, like.averages, self._test_images)

    # --- Traced ---------------------------------------------------------------------------------

    def _model(self, rngs: nnx.Rngs) -> ResNet:
        dtype = jnp.bfloat16 if self.settings.precision == "mixed" else jnp.float32
        return ResNet(ResNetConfig(CLASSES, self.settings.width, dtype), rngs=rngs)

    def _loss(self, params: Any, averages: Any, data: Any, key: jax.Array) -> Any:
        batch = sample_batch(data[0], data[1], key, self.settings.batch)
        params, (images, labels) = self._spread(params, batch)
        # `copy=True`: the model changes its running averages in place.
        model = nnx.merge(self._graph, params, averages, copy=True)
        logits = model(images, training=True)
        loss = jnp.mean(jax_gradops.softmax_cross_entropy_with_integer_labels(logits, labels))
        return loss, nnx.state(model, nnx.BatchStat)

    def _classes(self, params: Any, averages: Any, images: jax.Array) -> jax.Array:
        model = nnx.merge(self._graph, params, averages)
        return jnp.argmax(model(images, training=False), axis=-1)

    # --- Called ---------------------------------------------------------------------------------

    def evaluate(self, state: TrainState) -> float:
        """The fraction of test images that are classified correctly."""
        confusion = self.confusion(state)
        return float(np.trace(confusion) / np.sum(confusion))

    def confusion(self, state: TrainState) -> np.ndarray:
        """The confusion matrix: rows are the true digits, columns are the model's answers."""
        found = np.asarray(self._classify(state.params, state.averages, self._test_images))
        counts = np.zeros((CLASSES, CLASSES), int)
        np.add.at(counts, (self._test_labels, found), 1)
        return counts
