"""Softmax cross-entropy with integer labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from conformance import IMPLEMENTATIONS_AND_DTYPES, RowOpTests
from meshes import collectives, mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops import backward
from jax_gradops._ops.cross_entropy.spec import PLAIN, SMOOTHED
from jax_gradops._ops.op_spec import Form
from jax_gradops._oracles import Reference

cross_entropy = jax_gradops.softmax_cross_entropy_with_integer_labels


def labels_by_content(x: Any, ignore_index: int | None = None) -> Any:
    """Labels that follow from each row's logits, so that rows may be moved and sharded."""
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1], np.int32)
    xp = x.__array_namespace__()
    labels = xp.argmin(x, -1).astype(np.int32)
    return labels if ignore_index is None else xp.where(x[..., 0] > 1.5, ignore_index, labels)


def as_columns(form: Form) -> Form:
    """The form with the loss as an array of x's rank: tests place dy on a mesh as x."""

    def oracle(x: Any, **options: Any) -> Reference:
        value, magnitude, _ = form.oracle(x, **options)
        return Reference(value[..., None], magnitude[..., None])

    return dataclasses.replace(
        form,
        call=lambda x, **options: form.call(x, **options)[..., None],
        oracle=oracle,
        oracle_vjp=lambda dy, x, **options: form.oracle_vjp(dy[..., 0], x, **options),
    )


@pytest.mark.newest_jax
class TestCrossEntropy(RowOpTests):
    """Without options."""

    form = as_columns(PLAIN)
    options: Mapping[str, Any] = {"labels_of": labels_by_content}
    all_reduces = (0,)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1)

    def output_dtype(self, *operands: Any) -> Any:
        return self.accum_dtype(*operands)

    def test_eager_is_jitted(self, platform, rng):
        """Equal up to rounding: XLA's operations make the loss of the kernel's sums."""
        example = list(map(jnp.asarray, self.example(rng, (300, 129), jnp.float32)))
        f = self.value_and_vjp("ffi")
        for results in (f(*example), jax.jit(f)(*example)):
            self.check(results, example)

    @pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
    def test_nonfinite(self, platform, implementation, dtype, rng):
        """NaN or infinity in a row changes only this row. -inf is a class that cannot be."""
        dy, clean = self.example(rng, (37, 129), dtype)
        f = jax.jit(self.value_and_vjp(implementation))
        expected, others = f(dy, clean), np.arange(37) != 11
        for value in (np.nan, np.inf, -np.inf):
            x = clean.copy()
            x[11, 128] = value
            results = f(dy, x)
            for actual, unspoilt in zip(results, expected, strict=True):
                assert_bitwise_equal(np.asarray(actual)[others], np.asarray(unspoilt)[others])
            if np.isnan(value) or value > 0:
                assert all(np.isnan(np.asarray(r, np.float32)[11]).all() for r in results)
            else:  # the class of -inf is the smallest logit: the label
                assert np.isinf(results[0][11])
                assert np.isfinite(np.asarray(results[1], np.float32)[11]).all()

    def test_features_spread(self, platform, rng):
        """Classes are sharded: the results are right, and the gradient is sharded as x."""
        devices = mesh(platform, AxisType.Auto)
        dy, x = self.example(rng, self.mesh_shape, jnp.float32)
        for spec in (P(None, None, "model"), P("data", None, "model")):
            placed = jax.device_put(x, NamedSharding(devices, spec))
            results = jax.jit(self.value_and_vjp("ffi"))(dy, placed)
            self.check(results, (dy, x), str(spec))
            assert results[1].sharding.is_equivalent_to(placed.sharding, 3)


class TestSmoothed(TestCrossEntropy):
    """With label smoothing, z-loss and ignored rows."""

    variant = True
    form = as_columns(SMOOTHED)

    def test_nonfinite(self):
        """Smoothing makes the loss of a row with -inf infinite. `TestCrossEntropy` has the rest."""
