"""ResNet-50 v1.5 as Flax users train it, and with this library's batch norm.

The stock variant has Flax's `linen.BatchNorm`, `nn.relu` and an addition of the residual. XLA may
fuse them with any operation. A second variant has one `jax_gradops.batch_norm` in their place. A
third variant has `jax_gradops.batch_norm` without fused activation and residual. All variants have
equal parameters under equal names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jax_gradops
from jax_gradops._tools.bench import train_images
from jax_gradops._tools.bench.train import STOCK, Setup, TrainCase, is_matrix

BLOCKS = (3, 4, 6, 3)
_MOMENTUM = 0.9
_EPSILON = 1e-5
_WEIGHT_DECAY = 1e-4
# The rate for a batch of 256. arXiv:1706.02677 has 0.1, after a warm-up with smaller rates. Here
# all steps are early ones.
_LEARNING_RATE = 0.02


class BatchNorm(nn.Module):
    """`jax_gradops.batch_norm` with the variables of `linen.BatchNorm`."""

    @nn.compact
    def __call__(
        self, x: jax.Array, *, relu: bool = False, residual: jax.Array | None = None
    ) -> jax.Array:
        """Normalises each channel (the last axis), adds `residual`, and applies ReLU."""
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        y, mean, var = jax_gradops.batch_norm(
            x,
            scale,
            bias,
            epsilon=_EPSILON,
            activation="relu" if relu else None,
            residual=residual,
        )
        for name, value in (("mean", mean), ("var", var)):
            average = self.variable("batch_stats", name, jnp.zeros, channels)
            average.value = _MOMENTUM * average.value + (1 - _MOMENTUM) * value
        return y


class ResNet50(nn.Module):
    """He, Zhang, Ren, Sun, https://arxiv.org/abs/1512.03385; v1.5: strides in the 3 x 3.

    Attributes:
      variant: of batch norm, activation and residual in `stages`. Other stages are stock.
    """

    variant: str
    stages: tuple[str, ...]
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images [batch, height, width, 3] to float32 logits [batch, classes]."""
        x = self._convolution("stem", images, 64, 7, 2)
        x = self._norm("stem_norm", 0, x, relu=True)
        padding: Any = ((1, 1), (1, 1))
        x = nn.max_pool(x, (3, 3), (2, 2), padding)
        for stage, blocks in enumerate(BLOCKS, 1):
            for block in range(blocks):
                stride = 2 if stage > 1 and block == 0 else 1
                x = self._block(f"stage{stage}_block{block}", stage, x, stride)
        return nn.Dense(train_images.CLASSES, name="head")(
            jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        )

    def _block(self, name: str, stage: int, x: jax.Array, stride: int) -> jax.Array:
        width = 64 << (stage - 1)
        y = self._convolution(f"{name}_first", x, width, 1)
        y = self._norm(f"{name}_first_norm", stage, y, relu=True)
        y = self._convolution(f"{name}_second", y, width, 3, stride)
        y = self._norm(f"{name}_second_norm", stage, y, relu=True)
        y = self._convolution(f"{name}_third", y, 4 * width, 1)
        if x.shape != y.shape:
            x = self._convolution(f"{name}_shortcut", x, 4 * width, 1, stride)
            x = self._norm(f"{name}_shortcut_norm", stage, x)
        return self._norm(f"{name}_third_norm", stage, y, relu=True, residual=x)

    def _convolution(
        self, name: str, x: jax.Array, channels: int, size: int, stride: int = 1
    ) -> jax.Array:
        # The padding is PyTorch's. With strides, "SAME" pads one side, and XLA needs one more pass.
        return nn.Conv(
            channels,
            (size, size),
            stride,
            padding=size // 2,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.he_normal(),
            name=name,
        )(x)

    def _norm(
        self,
        name: str,
        stage: int,
        x: jax.Array,
        *,
        relu: bool = False,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        variant = self.variant if str(stage) in self.stages else STOCK
        if variant == "jax_gradops":
            return BatchNorm(name=name)(x, relu=relu, residual=residual)
        if variant == "unfused":
            y = BatchNorm(name=name)(x)
        else:
            y = nn.BatchNorm(
                use_running_average=False,
                momentum=_MOMENTUM,
                epsilon=_EPSILON,
                dtype=self.dtype,
                name=name,
            )(x)
        y = y if residual is None else y + residual
        return nn.relu(y) if relu else y


def setup(case: TrainCase) -> Setup:
    """Images and labels are random: the time of a step does not depend on their values."""
    dtype = jnp.dtype(case.dtype)
    make = functools.partial(ResNet50, stages=case.stages, dtype=dtype)
    shape = case.shape

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = make(STOCK).init(key, jnp.zeros((1, *shape[1:]), dtype))
        return variables["params"], variables["batch_stats"]

    def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        model = make(variant)

        def apply(parameters: Any, averages: Any, batch: Any) -> tuple[Any, Any]:
            images, labels = batch
            variables = {"params": parameters, "batch_stats": averages}
            logits, changed = model.apply(variables, images, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(losses), changed["batch_stats"]

        return apply

    optimizer = optax.chain(
        optax.add_decayed_weights(_WEIGHT_DECAY, mask=is_matrix),
        optax.sgd(_LEARNING_RATE * shape[0] / 256, _MOMENTUM),
    )
    batch = functools.partial(train_images.batch, case)
    return Setup("images", shape[0], init, batch, loss, lambda variant: optimizer)
