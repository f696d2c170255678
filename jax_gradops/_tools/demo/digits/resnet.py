"""A small residual network in Flax NNX, with this library's batch norm."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jax_gradops

_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes and activation dtype of a `ResNet`; parameters and statistics are float32."""

    classes: int
    width: int
    dtype: DTypeLike = jnp.float32


class BatchNorm(nnx.Module):
    """`jax_gradops.batch_norm` with its parameters and running averages."""

    def __init__(self, channels: int) -> None:
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.mean = nnx.BatchStat(jnp.zeros(channels))
        self.var = nnx.BatchStat(jnp.ones(channels))

    def __call__(
        self, x: jax.Array, *, training: bool, relu: bool = True, residual: jax.Array | None = None
    ) -> jax.Array:
        """Normalises each channel (the last axis), adds `residual`, and applies ReLU."""
        parameters = self.scale[...], self.bias[...]
        if training:
            activation = "relu" if relu else None
            y, mean, var = jax_gradops.batch_norm(
                x, *parameters, activation=activation, residual=residual
            )
            for average, value in ((self.mean, mean), (self.var, var)):
                average[...] = _MOMENTUM * average[...] + (1 - _MOMENTUM) * value
            return y
        mean, var = self.mean[...], self.var[...]
        y = jax_gradops.batch_norm_inference(x, *parameters, mean=mean, var=var)
        y = y if residual is None else y + residual
        return jax.nn.relu(y) if relu else y


class Block(nnx.Module):
    """Two 3 x 3 convolutions.

    The norm after the second one, the addition of the residual and the ReLU are one operation. A
    block with a stride applies a 1 x 1 convolution and a norm to the residual.
    """

    def __init__(
        self, config: ResNetConfig, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs
    ) -> None:
        convolution = functools.partial(_convolution, config, rngs=rngs)
        self.first = convolution(inputs, outputs, 3, stride)
        self.first_norm = BatchNorm(outputs)
        self.second = convolution(outputs, outputs, 3)
        self.second_norm = BatchNorm(outputs)
        self.shortcut = convolution(inputs, outputs, 1, stride) if stride > 1 else None
        self.shortcut_norm = BatchNorm(outputs) if stride > 1 else None

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        """[batch, height, width, inputs] to [batch, height / stride, width / stride, outputs]."""
        y = self.first_norm(self.first(x), training=training)
        if self.shortcut and self.shortcut_norm:
            x = self.shortcut_norm(self.shortcut(x), training=training, relu=False)
        return self.second_norm(self.second(y), training=training, residual=x)


class ResNet(nnx.Module):
    """Has one stage at full resolution. Two more stages halve it and double the channels.

    The source is "Deep residual learning for image recognition", https://arxiv.org/abs/1512.03385.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        self.stem = _convolution(config, 1, width, 3, rngs=rngs)
        self.stem_norm = BatchNorm(width)
        sizes = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))
        self.blocks = nnx.List([Block(config, *size, rngs=rngs) for size in sizes])
        self.head = nnx.Linear(4 * width, config.classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, training: bool) -> jax.Array:
        """Maps images [batch, height, width] to float32 logits [batch, classes]."""
        x = self.stem_norm(self.stem(images[..., None]), training=training)
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


def _convolution(
    config: ResNetConfig, inputs: int, outputs: int, size: int, stride: int = 1, *, rngs: nnx.Rngs
) -> nnx.Conv:
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=stride,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.he_normal(),
        rngs=rngs,
    )
