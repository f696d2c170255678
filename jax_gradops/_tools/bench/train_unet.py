"""A model like the UNets of diffusion models, in Flax NNX. It predicts the noise in latent images.

As in https://arxiv.org/abs/2112.10752, a residual block is group norm, SiLU, a 3 x 3 convolution,
the addition of the time's embedding, and once more group norm, SiLU and a convolution. There is no
attention: almost all time goes to convolutions, group norms and SiLU. Channels are last.

The norm and SiLU are an `nnx.Sequential`. `jax_gradops.nnx.fuse` makes one operation of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_gradops.nnx
from jax_gradops._tools.bench import train_optimizer
from jax_gradops._tools.bench.train import STOCK, Setup, TrainCase


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's sizes.

    Attributes:
      channels: of each stage. A stage has half the height and width of the stage before it.
      blocks: residual blocks of a stage, on the way down. On the way up, there are as many.
      groups: of a norm.
      times: the features of a time.
    """

    channels: tuple[int, ...] = (320, 640, 1280)
    blocks: int = 2
    groups: int = 32
    times: int = 1280


CONFIG = Config()
_EPSILON = 1e-5
_SLOWEST = 1e-4  # speed of the slowest wave of a time's features
_TIMES = 1000  # times of the diffusion process


class _Layers:
    """Makes layers of the case's dtype, with the variant's activation."""

    def __init__(self, case: TrainCase, silu: Callable[[jax.Array], jax.Array], rngs: Any) -> None:
        self._dtype, self._silu, self._rngs = jnp.dtype(case.dtype), silu, rngs

    def norm_silu(self, channels: int) -> nnx.Sequential:
        """Group norm, then SiLU."""
        norm = nnx.GroupNorm(
            channels, CONFIG.groups, epsilon=_EPSILON, dtype=self._dtype, rngs=self._rngs
        )
        return nnx.Sequential(norm, self._silu)

    def convolution(self, inputs: int, outputs: int, size: int = 3, strides: int = 1) -> nnx.Conv:
        """A convolution. The padding is PyTorch's."""
        return nnx.Conv(
            inputs, outputs, (size, size), strides,
            padding=size // 2, dtype=self._dtype, rngs=self._rngs,
        )  # fmt: skip

    def linear(self, inputs: int, outputs: int) -> nnx.Linear:
        """A linear layer."""
        return nnx.Linear(inputs, outputs, dtype=self._dtype, rngs=self._rngs)


class Block(nnx.Module):
    """A residual block."""

    def __init__(self, layers: _Layers, inputs: int, outputs: int) -> None:
        self.norm_1, self.norm_2 = layers.norm_silu(inputs), layers.norm_silu(outputs)
        self.convolution_1 = layers.convolution(inputs, outputs)
        self.convolution_2 = layers.convolution(outputs, outputs)
        self.time = layers.linear(CONFIG.times, outputs)
        self.shortcut = layers.convolution(inputs, outputs, 1) if inputs != outputs else None

    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        """Maps x [batch, height, width, channels] and times [batch, features] to x's successor."""
        y = self.convolution_1(self.norm_1(x)) + self.time(times)[:, None, None]
        y = self.convolution_2(self.norm_2(y))
        return y + (x if self.shortcut is None else self.shortcut(x))


class UNet(nnx.Module):
    """Predicts the noise in images at some time of the diffusion process."""

    def __init__(
        self, case: TrainCase, silu: Callable[[jax.Array], jax.Array], rngs: nnx.Rngs
    ) -> None:
        layers = _Layers(case, silu, rngs)
        self.dtype = jnp.dtype(case.dtype)
        first, *_, last = CONFIG.channels
        self.time_1 = layers.linear(first, CONFIG.times)
        self.time_2 = layers.linear(CONFIG.times, CONFIG.times)
        self.first = layers.convolution(case.shape[-1], first)
        down, kept, inputs = [], [first], first
        for stage, channels in enumerate(CONFIG.channels):
            if stage > 0:
                down.append(layers.convolution(inputs, inputs, strides=2))
                kept.append(inputs)
            for _ in range(CONFIG.blocks):
                down.append(Block(layers, inputs, channels))
                kept.append(channels)
                inputs = channels
        self.middle = Block(layers, last, last)
        up = []
        for stage, channels in reversed([*enumerate(CONFIG.channels)]):
            for _ in range(CONFIG.blocks + 1):
                up.append(Block(layers, inputs + kept.pop(), channels))
                inputs = channels
            if stage > 0:
                up.append(layers.convolution(inputs, inputs))
        self.down, self.up = nnx.List(down), nnx.List(up)
        self.norm = layers.norm_silu(first)
        self.last = layers.convolution(first, case.shape[-1])

    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        """Maps images [batch, height, width, channels] and times [batch] to the noise."""
        features = waves(times, CONFIG.channels[0]).astype(self.dtype)
        features = jax.nn.silu(self.time_2(jax.nn.silu(self.time_1(features))))
        x = self.first(images)
        kept = [x]
        for layer in self.down:
            x = layer(x, features) if isinstance(layer, Block) else layer(x)
            kept.append(x)
        x = self.middle(x, features)
        for layer in self.up:
            if isinstance(layer, Block):
                x = layer(jnp.concatenate((x, kept.pop()), axis=-1), features)
            else:
                x = layer(_twice(x))
        return self.last(self.norm(x))


def waves(times: jax.Array, features: int) -> jax.Array:
    """Sines and cosines of times [batch], at speeds from 1 down: [batch, features]."""
    half = features // 2
    speeds = _SLOWEST ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = times.astype(jnp.float32)[:, None] * speeds[None]
    return jnp.concatenate((jnp.cos(angles), jnp.sin(angles)), axis=-1)


def _twice(x: jax.Array) -> jax.Array:
    """Doubles height and width of x [batch, height, width, channels]: each pixel is repeated."""
    return x.repeat(2, axis=1).repeat(2, axis=2)


def _separate_silu(x: jax.Array) -> jax.Array:
    """SiLU. `fuse` looks for `jax.nn.silu` and does not find it."""
    return jax.nn.silu(x)


def setup(case: TrainCase) -> Setup:
    """Images, times and noise are random: the time of a step does not depend on their values."""

    def make(variant: str, rngs: nnx.Rngs) -> UNet:
        return UNet(case, _separate_silu if variant == "unfused" else jax.nn.silu, rngs)

    def init(key: jax.Array) -> tuple[Any, Any]:
        return nnx.state(make(STOCK, nnx.Rngs(key)), nnx.Param), ()

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        images, times, noise = jax.random.split(key, 3)
        return (
            jax.random.normal(images, case.shape, jnp.dtype(case.dtype)),
            jax.random.randint(times, case.shape[:1], 0, _TIMES),
            jax.random.normal(noise, case.shape, jnp.float32),
        )

    def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        model = nnx.eval_shape(lambda: make(variant, nnx.Rngs(0)))
        if variant != STOCK:
            jax_gradops.nnx.fuse(model)
        graph = nnx.graphdef(model)

        def apply(parameters: Any, carried: Any, batch: Any) -> tuple[Any, Any]:
            images, times, noise = batch
            found = nnx.merge(graph, parameters)(images, times)
            return jnp.mean((found.astype(jnp.float32) - noise) ** 2), carried

        return apply

    return Setup("images", case.shape[0], init, batch, loss, train_optimizer.adamw)
