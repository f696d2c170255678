"""The cases of the suite "ops": ops, forms, directions, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from jax_gradops._ops.all import SPECS
from jax_gradops._ops.op_spec import Direction, Form, OpSpec
from jax_gradops._tools.bench import formulas

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
    """One op in one form and one layout.

    Attributes:
      options: the form's options, and the axis of channels.
      ours: the form's call, with these options.
      xla: the formulas that XLA is timed with: those of `formulas_of` with these options.
      axis: x's axis of features or channels.
    """

    spec: OpSpec
    form: Form
    options: dict[str, Any]
    ours: Callable[..., Any]
    xla: dict[str, Callable[..., formulas.Arrays]]
    axis: int

    @property
    def apart(self) -> int | None:
        """X's axis whose slices are independent in the first result, if there is one."""
        return {"rows": 0, "samples": 0, "channels": self.axis, "leaves": None}[self.spec.kind]


def _operations() -> Iterator[tuple[Key, Operation]]:
    """Every form of an op that is timed, in all layouts. A tree has one leaf."""
    forms = ((spec, form) for spec in SPECS.values() for form in spec.forms if form.traffic)
    for spec, form in forms:
        for layout in _LAYOUTS_OF_KIND.get(spec.kind, ("",)):
            axis = layout.index("c") if layout else 1
            options = dict(form.options) | ({"axis": axis} if spec.has_channels else {})
            ours = functools.partial(form.call, **options)
            found = formulas.formulas_of(spec.name, form)
            xla = {k: functools.partial(f, **options) for k, f in found.items()}
            name = _SHORT_NAMES.get(spec.name, spec.name)
            yield (name, form.name, layout), Operation(spec, form, options, ours, xla, axis)


# Instance norm of rows would normalise single elements.
_LAYOUTS_OF_KIND = {"channels": ("", *LAYOUTS), "samples": LAYOUTS}
_SHORT_NAMES = {
    "clip_tree_by_global_norm": "clip",
    "softmax_cross_entropy_with_integer_labels": "softmax_cross_entropy",
}
OPERATIONS: dict[Key, Operation] = dict(_operations())
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
        return size * self.operation.form.traffic[self.direction]

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
# Sizes of vocabularies. GPT-2's is odd, and often padded.
CLASSES = (32000, 50257, 50304, 128256, 151936, 256000)
_NORM_ROWS = ((131072, 1024), (32768, 4096), (8192, 16384))
# Images in the UNet and in the autoencoder of a latent diffusion model.
_GROUP_NORM_IMAGES = (
    (16, 64, 64, 320),
    (16, 32, 32, 640),
    (16, 16, 16, 1280),
    (4, 256, 256, 128),
    (4, 512, 512, 128),
)
# Small images, and no image at all: thousands of small groups.
_SMALL_IMAGES = (256, 8, 8, 512), (256, 7, 7, 512), (1024, 4, 4, 512), (4096, 1, 1, 1024)
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
        "group_norm": _GROUP_NORM_IMAGES,
        "instance_norm": _GROUP_NORM_IMAGES,
        "softmax_cross_entropy": tuple((2**28 // n, n) for n in CLASSES),
        "": ((32768, 4096),),
    },
    "cpu": {
        "batch_norm": ((16, 56, 56, 256), (16, 14, 14, 1024)),
        "group_norm": ((4, 64, 64, 320), (4, 16, 16, 1280)),
        "instance_norm": ((4, 64, 64, 320),),
        "softmax_cross_entropy": ((1024, 32000),),
        "": ((8192, 2048),),
    },
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
        elif shape == "all" and not OPERATIONS[key].spec.has_channels:
            shapes = (*_rows(dtype, device), *FEW_ROWS)
        elif shape == "all" and op in ("group_norm", "instance_norm"):
            shapes = (*defaults, *_SMALL_IMAGES)
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
            if direction in directions and direction in operation.form.traffic:
                for shape in shapes_of(key, dtype, device, shapes):
                    found[Case(op, form, direction, dtype, shape, layout)] = None
    return list(found)
