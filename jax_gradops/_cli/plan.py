"""``python -m jax_gradops info --plan``: which CUDA kernel runs, and how it splits its work."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_gradops._ops.all import SPECS
from jax_gradops._ops.op_spec import Direction, Gpu, PlanTask

#: The GPUs that can be named.
GPUS = {
    "a100": Gpu(80, 108, 167_936, 40 << 20),
    "rtx 3090": Gpu(86, 82, 102_400, 6 << 20),
    "l40s": Gpu(89, 142, 102_400, 96 << 20),
    "rtx 4090": Gpu(89, 128, 102_400, 72 << 20),
    "h100": Gpu(90, 132, 233_472, 50 << 20),
    "h200": Gpu(90, 132, 233_472, 50 << 20),
    "b200": Gpu(100, 148, 233_472, 126 << 20),
    "rtx 5090": Gpu(120, 170, 102_400, 96 << 20),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


class PlanError(ValueError):
    """A mistake in the arguments. The message says what is expected."""


def find(words: Sequence[str], gpu: str | None) -> dict[str, Any]:
    """The plan for an op and its direction, the shape of x, and a dtype.

    Args:
      words: for example ``("layer_norm_bwd", "32768x5120", "bfloat16")``.
      gpu: a name in `GPUS`. None stands for this machine's GPU, or an H100 if there is none.
    """
    kernel, shape, dtype = words
    name, _, direction = kernel.rpartition("_")
    ops = [f"{op}_{d}" for op, spec in SPECS.items() if spec.plan for d in ("fwd", "bwd")]
    if kernel not in ops:
        raise PlanError(f"no plan is known for {kernel!r}: expected one of {', '.join(ops)}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
        raise PlanError(f"the shape must have two or more sizes, as in 32768x5120, got {shape!r}")
    if dtype not in DTYPES:
        raise PlanError(f"the dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    named = _this_gpu() if gpu is None else gpu.lower()
    if named not in GPUS:
        raise PlanError(f"--gpu must be one of {', '.join(GPUS)}, got {named!r}")
    sizes = tuple(map(int, shape.split("x")))
    if math.prod(sizes) > 2**48:
        raise PlanError(f"the shape must have at most 2^48 elements, got {shape}")
    plan = SPECS[name].plan
    assert plan is not None
    way: Direction = "fwd" if direction == "fwd" else "bwd"
    task = PlanTask(way, sizes, jnp.dtype(dtype).itemsize, GPUS[named])
    return {"op": kernel, "shape": sizes, "dtype": dtype, "gpu": named, **plan(task)}


def _this_gpu() -> str:
    try:
        kind = jax.devices("gpu")[0].device_kind.lower()
    except (RuntimeError, AssertionError):
        return "h100"
    return next((name for name in GPUS if name in kind), kind)


def describe(found: dict[str, Any]) -> str:
    """The result of `find`, in words."""
    gpu = GPUS[found["gpu"]]
    size = "x".join(map(str, found["shape"]))
    lines = [
        f"{found['op']} of {found['dtype']}[{size}], {math.prod(found['shape']):,} elements",
        f"GPU:    {found['gpu']}, compute capability {gpu.architecture / 10}, "
        f"{gpu.multiprocessors} multiprocessors",
        f"kernel: {found['kernel']}, in {found['file']}",
        *found.get("notes", ()),
        f"The words are explained, with pictures, in {str(Path(found['file']).parent)}/README.md.",
    ]
    rows = [(name, str(value), meaning) for name, (value, meaning) in found["numbers"].items()]
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines += [f"  {name:<{left}}  {value:>{middle}}  {meaning}" for name, value, meaning in rows]
    return "\n".join(lines)


def text(words: Sequence[str], gpu: str | None, *, as_json: bool) -> str:
    """What the command prints."""
    found = find(words, gpu)
    return json.dumps(found, indent=2) if as_json else describe(found)
