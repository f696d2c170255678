"""All public ops. Each folder beside this file is a family, with the `SPECS` of its `spec.py`."""

from __future__ import annotations

import importlib
import pkgutil

from jax_gradops import _ops
from jax_gradops._ops.op_spec import OpSpec

_FAMILIES = sorted(module.name for module in pkgutil.iter_modules(_ops.__path__) if module.ispkg)

#: The public ops by name.
SPECS: dict[str, OpSpec] = {
    spec.name: spec
    for family in _FAMILIES
    for spec in importlib.import_module(f"jax_gradops._ops.{family}.spec").SPECS
}
