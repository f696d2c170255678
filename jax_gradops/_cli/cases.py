"""The cases that `doctor` runs: each form of each public op, on small inputs."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_gradops._ops.all import SPECS
from jax_gradops._ops.op_spec import Form, OpSpec

DTYPES = ("float32", "bfloat16")
# 37 rows take several blocks. Rows of 33 are unaligned, with less than one vector per thread.
ROWS = ((37, 1000), (5, 33))
#: Images, and the axis of their channels.
IMAGES = (((37, 5, 33), -1), ((6, 21, 7, 5), 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """One form of an op."""

    spec: OpSpec
    form: Form

    @property
    def title(self) -> str:
        """The op's name and its form."""
        return self.spec.name + (f" ({self.form.name})" if self.form.name else "")

    def problems(self, dtype: str) -> list[tuple[list[np.ndarray], dict[str, Any]]]:
        """The operands and options of several calls: different shapes.

        Parameters stay float32 in every dtype.
        """
        rng = np.random.default_rng(0)

        def array(shape: tuple[int, ...]) -> np.ndarray:
            return np.asarray(3 * rng.standard_normal(shape) + 2).astype(jnp.dtype(dtype))

        if self.spec.kind == "leaves":
            return [([array(shape) for shape in ((), *ROWS)], {})]
        channels = [(shape, {"axis": axis}) for shape, axis in IMAGES]
        found = []
        for shape, options in channels if self.spec.has_channels else [(s, {}) for s in ROWS]:
            x = array(shape)
            # The further arrays are -x/2: the sum with x is exact in each dtype.
            arrays = [x, *[(-0.5 * x).astype(x.dtype)] * (self.form.arrays - 1)]
            columns = shape[options.get("axis", -1)]
            parameters = rng.uniform(0.5, 2, (self.form.parameters, columns)).astype(np.float32)
            found.append(([*arrays, *parameters], options))
        return found


def all_cases() -> list[Case]:
    """The cases of every public op, without those whose package is not installed."""
    return [
        Case(spec, form)
        for spec in SPECS.values()
        if not spec.requires or importlib.util.find_spec(spec.requires) is not None
        for form in spec.forms
    ]
