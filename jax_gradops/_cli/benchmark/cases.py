"""What can be timed: ops, forms, directions, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax.numpy as jnp

import jax_gradops
from jax_gradops._cli.benchmark import formulas

Direction = Literal["fwd", "bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
Shape = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One op in one form.

    Attributes:
      public: the name of the public function.
      ours: that function, with its options.
      parameters: how many arrays [features] it takes beside x.
      traffic: by direction, how many tensors of x's size have to be read or written at least.
      xla: by direction, the formula that XLA is timed with; backward it takes dy, what forward
        takes, and `saved`.
      oracle: by direction, the same in float64.
      saved: what a backward pass has saved, from x.
      row_wise: whether the first result's rows depend on x's (and dy's) same rows only.
      in_place: whether dx may take over dy's memory, which JAX's programs are then given.
    """

    public: str
    ours: Callable[..., Any]
    parameters: int
    traffic: dict[Direction, int]
    xla: dict[Direction, Callable[..., formulas.Arrays]]
    oracle: dict[Direction, Callable[..., formulas.Arrays]]
    saved: Callable[..., formulas.Arrays] | None = None
    row_wise: bool = True
    in_place: bool = False


def _norms() -> dict[tuple[str, str], Operation]:
    partial = functools.partial
    oracle: dict[Direction, Callable[..., formulas.Arrays]] = {
        "fwd": formulas.norm_oracle,
        "bwd": formulas.norm_vjp_oracle,
    }
    return {
        ("layer_norm", ""): Operation(
            "layer_norm",
            partial(jax_gradops.layer_norm, epsilon=formulas.EPSILON),
            2,
            {"fwd": 2, "bwd": 3},
            {"fwd": formulas.layer_norm, "bwd": formulas.layer_norm_vjp},
            oracle,
            partial(formulas.statistics, centered=True),
        ),
        ("rms_norm", ""): Operation(
            "rms_norm",
            partial(jax_gradops.rms_norm, epsilon=formulas.EPSILON),
            1,
            {"fwd": 2, "bwd": 3},
            {"fwd": formulas.rms_norm, "bwd": formulas.rms_norm_vjp},
            oracle,
            partial(formulas.statistics, centered=False),
        ),
    }


def _gelus() -> dict[tuple[str, str], Operation]:
    operations = {}
    for name, parameters in (("gelu", 0), ("bias_gelu", 1)):
        for form, approximate in (("tanh", True), ("exact", False)):

            def formed(function: Callable[..., Any], approximate: bool = approximate) -> Any:
                return functools.partial(function, approximate=approximate)

            operations[name, form] = Operation(
                name,
                formed(getattr(jax_gradops, name)),
                parameters,
                {"fwd": 2, "bwd": 3},
                {"fwd": formed(formulas.gelu), "bwd": formed(formulas.gelu_vjp)},
                {"fwd": formed(formulas.gelu_oracle), "bwd": formed(formulas.gelu_vjp_oracle)},
                in_place=True,
            )
    return operations


#: By name and form. A tree of one leaf stands for all trees.
OPERATIONS: dict[tuple[str, str], Operation] = {
    **_norms(),
    **_gelus(),
    ("global_norm", ""): Operation(
        "global_norm",
        jax_gradops.global_norm,
        0,
        {"fwd": 1},
        {"fwd": formulas.global_norm},
        {"fwd": formulas.global_norm_oracle},
        row_wise=False,
    ),
    ("clip", ""): Operation(
        "clip_tree_by_global_norm",
        lambda x: jax_gradops.clip_tree_by_global_norm(x, formulas.MAX_NORM)[0],
        0,
        {"fwd": 3},
        {"fwd": formulas.clip},
        {"fwd": formulas.clip_oracle},
        row_wise=False,
    ),
}
OPS = tuple(dict.fromkeys(name for name, _ in OPERATIONS))


class Timed(Protocol):
    """Anything that one line of the table is about."""

    @property
    def bytes(self) -> int:
        """The least that has to be read and written."""
        ...

    def describe(self) -> dict[str, Any]:
        """What sets it apart, for JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    """An op in one form, one direction, one dtype and one shape."""

    op: str
    form: str
    direction: Direction
    dtype: str
    shape: Shape

    @property
    def operation(self) -> Operation:
        """What this is a case of."""
        return OPERATIONS[self.op, self.form]

    @property
    def title(self) -> str:
        """The op and the direction, for people."""
        return " ".join(filter(None, (self.op, self.form, self.direction)))

    @property
    def bytes(self) -> int:
        """The least that has to be read and written."""
        rows, features = self.shape
        size = rows * features * jnp.dtype(self.dtype).itemsize
        return size * self.operation.traffic[self.direction]

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        rows, features = self.shape
        return {
            "op": self.op,
            "form": self.form,
            "direction": self.direction,
            "dtype": self.dtype,
            "rows": rows,
            "features": features,
        }

    def __str__(self) -> str:
        rows, features = self.shape
        return f"{self.title} {SHORT_DTYPES[self.dtype]} {rows}x{features}"


# --- Shapes --------------------------------------------------------------------------------------

# Widths from a sub-warp's to a cluster's, two odd ones and one that is no power of two among them.
WIDTHS = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 4097, 5120, 8192, 12288, 16384, 32768, 65536)
FEW_ROWS = tuple(itertools.product((1, 37, 199), (4096, 65536)))
DEFAULT_SHAPES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "gpu": {"norms": ((131072, 1024), (32768, 4096), (8192, 16384)), "others": ((32768, 4096),)},
    "cpu": {"norms": ((8192, 2048),), "others": ((8192, 2048),)},
}


def shapes_of(op: str, dtype: str, device: str, wanted: Sequence[Shape | str]) -> Iterator[Shape]:
    """The shapes that `wanted` means: some given, ``"default"``, ``"all"``."""
    norm = op.endswith("_norm") and op != "global_norm"
    for shape in wanted:
        if not isinstance(shape, str):
            yield shape
        elif shape == "default":
            yield from DEFAULT_SHAPES[device]["norms" if norm else "others"]
        else:
            # float64 as float32 with half the elements, which has as many bytes.
            elements = {2: 2**27, 4: 2**26, 8: 2**25}[jnp.dtype(dtype).itemsize]
            if device == "cpu":
                elements //= 8
            yield from ((elements // width, width) for width in WIDTHS)
            yield from FEW_ROWS


def select(
    ops: Sequence[str],
    directions: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Shape | str],
    device: str,
) -> list[Case]:
    """All cases of these, each once."""
    found = {}
    for (op, form), operation in OPERATIONS.items():
        for direction, dtype in itertools.product(DIRECTIONS, dtypes):
            if op in ops and direction in directions and direction in operation.traffic:
                for shape in shapes_of(op, dtype, device, shapes):
                    found[Case(op, form, direction, dtype, shape)] = None
    return list(found)
