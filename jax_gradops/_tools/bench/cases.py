"""The cases of the suite "ops": ops, forms, directions, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import jax.numpy as jnp

import jax_gradops
from jax_gradops._tools.bench import batch_norm_formulas, formulas

Direction = Literal["fwd", "bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
DTYPES = tuple(SHORT_DTYPES)
#: Layouts of four-dimensional shapes. Two-dimensional shapes are rows of features.
LAYOUTS = ("nhwc", "nchw")
Shape = tuple[int, ...]
#: The name of an op, its form, and its layout: one of `LAYOUTS`, or "".
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One op in one form.

    Attributes:
      public: the name of the public function.
      ours: this function, with its options.
      parameters: the number of parameter arrays [features] or [channels].
      traffic: by direction, the least number of tensors of x's size to read or write.
      xla: by direction, the formula that XLA is timed with. Backward it takes dy, the forward
        arguments, and `saved`.
      oracle: by direction, the formula in float64. It returns NaN where rounding decides the
        result.
      saved: computes the values that a backward pass has saved, from x.
      arrays: the number of arrays of x's shape and dtype, including x.
      axis: x's axis of features or channels.
      apart: x's axis (rows, channels) whose slices are independent in the first result. None if
        there is no such axis.
      in_place: whether dx may take over dy's memory. JAX's programs then donate dy.
    """

    public: str
    ours: Callable[..., Any]
    parameters: int
    traffic: dict[Direction, int]
    xla: dict[Direction, Callable[..., formulas.Arrays]]
    oracle: dict[Direction, Callable[..., formulas.Arrays]]
    saved: Callable[..., formulas.Arrays] | None = None
    arrays: int = 1
    axis: int = 1
    apart: int | None = 0
    in_place: bool = False


def _norms() -> dict[Key, Operation]:
    partial = functools.partial
    oracle: dict[Direction, Callable[..., formulas.Arrays]] = {
        "fwd": formulas.norm_oracle,
        "bwd": formulas.norm_vjp_oracle,
    }
    return {
        ("layer_norm", "", ""): Operation(
            "layer_norm",
            partial(jax_gradops.layer_norm, epsilon=formulas.EPSILON),
            2,
            {"fwd": 2, "bwd": 3},
            {"fwd": formulas.layer_norm, "bwd": formulas.layer_norm_vjp},
            oracle,
            partial(formulas.statistics, centered=True),
        ),
        ("rms_norm", "", ""): Operation(
            "rms_norm",
            partial(jax_gradops.rms_norm, epsilon=formulas.EPSILON),
            1,
            {"fwd": 2, "bwd": 3},
            {"fwd": formulas.rms_norm, "bwd": formulas.rms_norm_vjp},
            oracle,
            partial(formulas.statistics, centered=False),
        ),
    }


def _gelus() -> dict[Key, Operation]:
    operations = {}
    for name, parameters in (("gelu", 0), ("bias_gelu", 1)):
        for form, approximate in (("tanh", True), ("exact", False)):

            def formed(function: Callable[..., Any], approximate: bool = approximate) -> Any:
                return functools.partial(function, approximate=approximate)

            operations[name, form, ""] = Operation(
                name,
                formed(getattr(jax_gradops, name)),
                parameters,
                {"fwd": 2, "bwd": 3},
                {"fwd": formed(formulas.gelu), "bwd": formed(formulas.gelu_vjp)},
                {"fwd": formed(formulas.gelu_oracle), "bwd": formed(formulas.gelu_vjp_oracle)},
                in_place=True,
            )
    return operations


def _batch_norms() -> dict[Key, Operation]:
    # Forward, the first pass reads x for statistics. The second one reads x and writes y. Backward,
    # the first pass reads x and dy for sums. The second one reads both again and writes dx. With
    # "add", the first pass may write dz, the residual's gradient. The second pass then reads dz
    # instead of dy and y.
    plain: dict[Direction, int] = {"fwd": 3, "bwd": 5}
    forms: dict[str, tuple[int, dict[Direction, int]]] = {
        "": (1, plain),
        "relu": (1, plain),
        "add_relu": (2, {"fwd": 4, "bwd": 7}),
    }
    operations = {}
    for (form, (arrays, traffic)), layout in itertools.product(forms.items(), ("", *LAYOUTS)):
        axis = layout.index("c") if layout else 1

        def formed(function: Callable[..., Any], axis: int = axis, relu: bool = bool(form)) -> Any:
            return functools.partial(function, axis=axis, relu=relu)

        operations["batch_norm", form, layout] = Operation(
            "batch_norm",
            formed(_batch_norm),
            2,
            traffic,
            {
                "fwd": formed(batch_norm_formulas.batch_norm),
                "bwd": formed(batch_norm_formulas.batch_norm_vjp),
            },
            {
                "fwd": formed(batch_norm_formulas.oracle),
                "bwd": formed(batch_norm_formulas.vjp_oracle),
            },
            functools.partial(batch_norm_formulas.statistics, axis=axis),
            arrays=arrays,
            axis=axis,
            apart=axis,
        )
    return operations


def _batch_norm(x: Any, *others: Any, axis: int, relu: bool) -> Any:
    *residual, scale, bias = others
    return jax_gradops.batch_norm(
        x, scale, bias, axis=axis, epsilon=formulas.EPSILON,
        activation="relu" if relu else None, residual=residual[0] if residual else None,
    )[0]  # fmt: skip


#: For the norm and the clip, a tree of one leaf stands for all trees.
OPERATIONS: dict[Key, Operation] = {
    **_norms(),
    **_batch_norms(),
    **_gelus(),
    ("global_norm", "", ""): Operation(
        "global_norm",
        jax_gradops.global_norm,
        0,
        {"fwd": 1},
        {"fwd": formulas.global_norm},
        {"fwd": formulas.global_norm_oracle},
        apart=None,
    ),
    ("clip", "", ""): Operation(
        "clip_tree_by_global_norm",
        lambda x: jax_gradops.clip_tree_by_global_norm(x, formulas.MAX_NORM)[0],
        0,
        {"fwd": 3},
        {"fwd": formulas.clip},
        {"fwd": formulas.clip_oracle},
        apart=None,
    ),
}
OPS = tuple(dict.fromkeys(name for name, *_ in OPERATIONS))
PLAIN = "plain"  # the name of the form "" on the command line
FORMS = tuple(dict.fromkeys(form or PLAIN for _, form, _ in OPERATIONS))
#: Names of sets of shapes.
SHAPE_SETS = ("default", "widths", "all")


class Timed(Protocol):
    """A case of any suite: one line of the table."""

    @property
    def bytes(self) -> int:
        """The least number of bytes to read and write."""
        ...

    def describe(self) -> dict[str, Any]:
        """The values that identify the case, for JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    """An op in one form, one direction, one dtype, one shape and one layout."""

    op: str
    form: str
    direction: Direction
    dtype: str
    shape: Shape
    layout: str = ""

    @property
    def operation(self) -> Operation:
        """The case's entry in `OPERATIONS`."""
        return OPERATIONS[self.op, self.form, self.layout]

    @property
    def bytes(self) -> int:
        """The least number of bytes to read and write."""
        size = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return size * self.operation.traffic[self.direction]

    def describe(self) -> dict[str, Any]:
        """The values that identify the case, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        dtype, shape = SHORT_DTYPES[self.dtype], shape_text(self.shape)
        words = (self.op, self.form, self.direction, self.layout, dtype, shape)
        return " ".join(filter(None, words))


# --- Shapes --------------------------------------------------------------------------------------

# Widths from a part of a warp to a cluster. Two are odd, and some are not powers of two.
WIDTHS = (64, 128, 256, 512, 1000, 1024, 2048, 4096, 4097, 5120, 8192, 12288, 16384, 32768, 65536)
# The widths in a plot of rates over widths.
POWERS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_ROWS = tuple(itertools.product((1, 37, 199), (4096, 65536)))
_NORM_ROWS = ((131072, 1024), (32768, 4096), (8192, 16384))
#: Shapes by device and op. The entry "" is for all other ops.
DEFAULT_SHAPES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "gpu": {
        "layer_norm": _NORM_ROWS,
        "rms_norm": _NORM_ROWS,
        "batch_norm": (
            (256, 112, 112, 64),
            (256, 56, 56, 256),
            (256, 14, 14, 1024),
            (256, 7, 7, 2048),
        ),
        "": ((32768, 4096),),
    },
    "cpu": {"batch_norm": ((16, 56, 56, 256), (16, 14, 14, 1024)), "": ((8192, 2048),)},
}


def shape_text(shape: Shape) -> str:
    """A shape as text."""
    return "x".join(map(str, shape))


def _rows(dtype: str, device: str, widths: Sequence[int] = WIDTHS) -> Iterator[Shape]:
    """For each width, the shape of rows with a fixed total number of bytes."""
    # float64 has half the elements of float32, and so an equal number of bytes.
    elements = {2: 2**27, 4: 2**26, 8: 2**25}[jnp.dtype(dtype).itemsize]
    if device == "cpu":
        elements //= 8
    yield from ((elements // width, width) for width in widths)


def shapes_of(key: Key, dtype: str, device: str, wanted: Sequence[Shape | str]) -> Iterator[Shape]:
    """The shapes in `wanted`: given ones, and the sets ``"default"``, ``"widths"``, ``"all"``.

    Four-dimensional shapes are given with channels last. They are returned in the key's layout.
    """
    op, _, layout = key
    defaults = DEFAULT_SHAPES[device].get(op, DEFAULT_SHAPES[device][""])
    for shape in wanted:
        if not isinstance(shape, str):
            shapes: Iterable[Shape] = [shape]
        elif shape == "widths":
            shapes = _rows(dtype, device, POWERS)
        elif shape == "all" and op != "batch_norm":
            shapes = (*_rows(dtype, device), *FEW_ROWS)
        else:
            shapes = defaults
        for n, *between, c in shapes:
            if len(between) == max(0, len(layout) - 2):
                yield (n, c, *between) if layout == "nchw" else (n, *between, c)


def select(
    ops: Sequence[str],
    forms: Sequence[str],
    directions: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Shape | str],
    layouts: Sequence[str],
    device: str,
) -> list[Case]:
    """All cases with these ops, forms, directions, dtypes and shapes, without duplicates."""
    found = {}
    for key, operation in OPERATIONS.items():
        op, form, layout = key
        if op not in ops or (form or PLAIN) not in forms or layout not in ("", *layouts):
            continue
        for direction, dtype in itertools.product(DIRECTIONS, dtypes):
            if direction in directions and direction in operation.traffic:
                for shape in shapes_of(key, dtype, device, shapes):
                    found[Case(op, form, direction, dtype, shape, layout)] = None
    return list(found)
