"""Batch norm: the suite of every op in both layouts, statistics across devices, and accuracy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from comparing import OPTIMIZED, assert_bitwise_equal, assert_matches, widen
from conformance import OpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from transformations import vjp_of

import jax_gradops
from jax_gradops import backward

EPSILON = 1e-5


class BatchNormTests(OpTests):
    """With scale and bias; x is [..., channels], whatever the layout that the op is given."""

    kernels = ("batch_norm_fwd", "batch_norm_bwd")
    parameters = 2
    # Forward the mean, then squared distances from it; backward both sums.
    all_reduces = (3,)
    relu = False

    def op(self, x, scale, bias, *, implementation=None):
        if x.ndim == 1:  # as one row
            return self.op(x[None], scale, bias, implementation=implementation)[0]
        options = {"activation": "relu", "residual": self.residual(jnp, x)} if self.relu else {}
        return self.batch_norm(x, scale, bias, implementation=implementation, **options)

    def batch_norm(self, x, *parameters, **options):
        return jax_gradops.batch_norm(x, *parameters, epsilon=EPSILON, **options)[0]

    def residual(self, numpy: Any, x: Any) -> Any:
        """Of x, with a derivative of 0."""
        return numpy.where(x > 0.5, 0.75, -1.25).astype(x.dtype) if self.relu else None

    def options(self, x: np.ndarray) -> dict[str, Any]:
        return {"epsilon": EPSILON, "relu": self.relu, "residual": self.residual(np, x)}

    def oracle(self, x, scale, bias):
        if x.ndim == 1:
            y = self.oracle(x[None], scale, bias)
            return oracles.Reference(y.value[0], y.magnitude[0])
        return oracles.batch_norm(x, scale, bias, **self.options(x))

    def oracle_vjp(self, dy, x, scale, bias):
        if x.ndim == 1:
            dx, *rest = self.oracle_vjp(dy[None], x[None], scale, bias)
            return oracles.Reference(dx.value[0], dx.magnitude[0]), *rest
        return oracles.batch_norm_vjp(dy, x, scale, bias, **self.options(x))[:3]


class TestChannelsLast(BatchNormTests):
    pass


class TestChannelsFirst(BatchNormTests):
    def batch_norm(self, x, *parameters, residual=None, **options):
        first = jnp.moveaxis(x, -1, 1)
        if residual is not None:
            residual = jnp.moveaxis(residual, -1, 1)
        y = jax_gradops.batch_norm(
            first, *parameters, axis=1, epsilon=EPSILON, residual=residual, **options
        )[0]
        return jnp.moveaxis(y, 1, -1)


class TestWithResidual(BatchNormTests):
    """relu(bn(x) + residual), channels last."""

    relu = True


class TestChannelsFirstWithResidual(TestChannelsFirst):
    relu = True
