"""The test suite of losses: one number per row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance import RowOpTests
from jax.sharding import PartitionSpec as P

from jax_gradops._ops.op_spec import Form
from jax_gradops._oracles import Reference


def labels_by_content(x: Any, ignore_index: int | None = None) -> Any:
    """Labels that follow from each row's logits, so that rows may be moved and sharded."""
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1], np.int32)
    xp = x.__array_namespace__()
    labels = xp.argmin(x, -1).astype(np.int32)
    return labels if ignore_index is None else xp.where(labels % 3 == 1, ignore_index, labels)


def as_columns(form: Form) -> Form:
    """The form with the loss as an array of x's rank: tests place dy on a mesh as x."""

    def oracle(*operands: Any, **options: Any) -> Reference:
        value, magnitude, _ = form.oracle(*operands, **options)
        return Reference(value[..., None], magnitude[..., None])

    vjp = form.oracle_vjp
    assert vjp is not None
    return dataclasses.replace(
        form,
        call=lambda *operands, **options: form.call(*operands, **options)[..., None],
        oracle=oracle,
        oracle_vjp=lambda dy, *operands, **options: vjp(dy[..., 0], *operands, **options),
    )


class LossTests(RowOpTests):
    """The form is one of `as_columns`."""

    options: Mapping[str, Any] = {"labels_of": labels_by_content}

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1)

    def output_dtype(self, *operands: Any) -> Any:
        return self.accum_dtype(*operands)

    def placed(self, mesh: Any, spec: Any, example: Any) -> list[Any]:
        """The loss has no axis of features that could be sharded."""
        found = []
        for a in example:
            of_rows = P(*spec[: np.ndim(a) - 1])
            found += super().placed(mesh, of_rows if np.shape(a)[-1:] == (1,) else spec, [a])
        return found

    def test_eager_is_jitted(self, platform, rng):
        """Equal up to rounding: XLA's operations make the loss of the kernel's sums."""
        example = list(map(jnp.asarray, self.example(rng, (300, 129), jnp.float32)))
        f = self.value_and_vjp("ffi")
        for results in (f(*example), jax.jit(f)(*example)):
            self.check(results, example)
