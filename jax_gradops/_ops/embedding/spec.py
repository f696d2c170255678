"""What the lookup of embeddings is, as data: see `op_spec`.

The form here is an op on rows: y = x + table[indices]. Each row of the table is a multiple of one
vector, the parameter. The index of a row follows from the row's largest element.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops import _oracles
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.embedding import embedding as module
from jax_gradops._ops.op_spec import Form, OpSpec
from jax_gradops._oracles import Reference

# What the rows of the table are multiples of.
_FACTORS = 2.0 ** (np.arange(12) % 3)


def _indices(x: Any) -> Any:
    """Some indices occur often, and some are after the table's last row.

    There are few: the difference quotients of tests should not meet a step.
    """
    xp = x.__array_namespace__()
    largest = xp.floor(x.max(-1, initial=0.0) * 2) * 4
    return xp.where(largest < 16, largest, 16).astype(np.int32)


def _call(x: jax.Array, vector: jax.Array, **options: Any) -> jax.Array:
    wide = vector.astype(accum_dtype(x.dtype, vector.dtype))
    table = jnp.asarray(_FACTORS, wide.dtype)[:, None] * wide[None]
    rows = module.embedding_lookup(table, _indices(x), mode="clip", **options)
    return (x.astype(wide.dtype) + rows).astype(x.dtype)


def _factors(x: Any) -> Any:
    return _FACTORS[np.minimum(_indices(x), len(_FACTORS) - 1)][..., None]


def _oracle(x: Any, vector: Any) -> Reference:
    looked_up = _factors(x) * _oracles.along(vector, x)
    return Reference(x + looked_up, abs(x) + abs(looked_up))


def _oracle_vjp(dy: Any, x: Any, vector: Any) -> tuple[Reference, Reference]:
    del vector
    return _oracles.exact(dy), _oracles.over_rows(_oracles.exact(dy * _factors(x)))


PLAIN = Form(_call, _oracle, (module.BWD,), _oracle_vjp, parameters=1)
SPECS = (OpSpec("embedding_lookup", "rows", (PLAIN,)),)
