"""The lookup of embeddings and the gradient of their table."""

from __future__ import annotations

from conformance import RowOpTests

from jax_gradops._ops.embedding.spec import PLAIN


class TestEmbeddingLookup(RowOpTests):
    """x + table[indices]: the gradient of the table's vector is a sum over all rows."""

    form = PLAIN
    forward_kernels = 0
    largest_parameter = 12 * RowOpTests.mesh_shape[-1]  # the table
