"""All public ops."""

from __future__ import annotations

from jax_gradops._ops.batch_norm import spec as batch_norm
from jax_gradops._ops.clip import spec as clip
from jax_gradops._ops.gelu import spec as gelu
from jax_gradops._ops.op_spec import OpSpec
from jax_gradops._ops.row_norm import spec as row_norm

_FAMILIES = (row_norm, batch_norm, gelu, clip)

#: The public ops by name.
SPECS: dict[str, OpSpec] = {spec.name: spec for family in _FAMILIES for spec in family.SPECS}
