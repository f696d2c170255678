"""Softmax cross-entropy of a linear layer, without an array of all logits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from losses import LossTests, as_columns

from jax_gradops._ops.cross_entropy.oracle import CLASSES
from jax_gradops._ops.cross_entropy.spec import LINEAR
from jax_gradops._oracles import Reference


class TestLinearCrossEntropy(LossTests):
    """The kernel is made of a parameter of x's features."""

    variant = True
    # Of the gradient, of its other computation, and of the comparison of the cotangents.
    all_reduces = (0, 3, 4)
    largest_parameter = LossTests.mesh_shape[-1] * CLASSES
    form = as_columns(LINEAR)

    def expected(self, dy: Any, *operands: Any) -> list[Reference]:
        """The kernel, the logits and their gradients are rounded to x's dtype."""
        eps = float(jnp.finfo(operands[0].dtype).eps)
        found = super().expected(dy, *operands)
        return [r._replace(error=self.form.roundings * eps * r.magnitude) for r in found]
