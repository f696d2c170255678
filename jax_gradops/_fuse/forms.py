"""Values of a jaxpr as polynomials of a root array. See the package's docstring.

`Form.dims` says for each axis of an array which axes of the root it lies along. A reshape to
groups, a transposition and a broadcast change `dims` only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.polynomial import Axes, Leaf, OneHot, Polynomial


class Unknown(NamedTuple):
    """The label of an axis of a leaf: it is not known which axis of the root it lies along."""

    var: Any
    axis: int
    part: int


class Part(NamedTuple):
    """A part of an array's axis.

    Attributes:
      label: an axis of the root; None where the array is the same along this part; or Unknown.
      size: the number of elements.
    """

    label: int | Unknown | None
    size: int


Dims: TypeAlias = tuple[tuple[Part, ...], ...]


class NoForm(Exception):
    """A value has no form. The message says why, in words for a report, or is empty."""


class Divided(Exception):
    """A reshape divides an axis of the root, or of a leaf. The search starts again with its parts.

    Attributes:
      label: the axis.
      sizes: the sizes of the parts.
    """

    def __init__(self, label: int, sizes: tuple[int, ...]) -> None:
        super().__init__(label, sizes)
        self.label, self.sizes = label, sizes


@dataclasses.dataclass(frozen=True)
class Form:
    """A value: its polynomial, and what its axes are."""

    polynomial: Polynomial
    dims: Dims

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(p.size for p in parts) for parts in self.dims)

    @property
    def labels(self) -> Axes:
        """The root's axes that the array has."""
        return frozenset(p.label for parts in self.dims for p in parts if isinstance(p.label, int))


def of_number(number: float, shape: Sequence[int]) -> Form:
    return Form(polynomial.constant(number), tuple(free(size) for size in shape))


def free(size: int) -> tuple[Part, ...]:
    return (Part(None, size),) if size != 1 else ()


def of_leaf(var: Any) -> Form:
    """An array whose axes are still unknown."""
    shape = var.aval.shape
    labels = tuple((Unknown(var, i, 0),) if n != 1 else () for i, n in enumerate(shape))
    dims = tuple(tuple(Part(label, n) for label in of) for of, n in zip(labels, shape, strict=True))
    return Form(polynomial.of_atom(Leaf(frozenset(), var, labels)), dims)


# --- Two arrays in one operation -----------------------------------------------------------------


def together(forms: Sequence[Form]) -> tuple[list[Polynomial], Dims]:
    """The polynomials of the operands of an elementwise operation, and the dims of its result.

    Unknown axes become known where another operand has a known axis.
    """
    rank = max(len(f.dims) for f in forms)
    forms = [f if f.dims or not rank else Form(f.polynomial, ((),) * rank) for f in forms]
    known: dict[Unknown, tuple[Part, ...]] = {}
    dims = forms[0].dims
    for form in forms[1:]:
        dims = tuple(merged(a, b, known) for a, b in zip(dims, form.dims, strict=True))
    if not known:
        return [f.polynomial for f in forms], dims
    dims = tuple(resolved(parts, known) for parts in dims)
    return [resolve(f.polynomial, known) for f in forms], dims


def merged(
    a: tuple[Part, ...], b: tuple[Part, ...], known: dict[Unknown, tuple[Part, ...]]
) -> tuple[Part, ...]:
    """The parts of an axis that two arrays share."""
    if not a or not b:  # size 1 beside a scalar
        return a or b
    a, b = _aligned(resolved(a, known), resolved(b, known), known)
    found = []
    for p, q in zip(a, b, strict=True):
        if p.label == q.label or q.label is None:
            found.append(p)
        elif p.label is None:
            found.append(q)
        elif isinstance(p.label, Unknown):
            known[p.label] = (q,)
            found.append(q)
        elif isinstance(q.label, Unknown):
            known[q.label] = (p,)
            found.append(p)
        else:
            raise NoForm("two axes of one array meet in one operation")
    return tuple(found)


def _aligned(
    a: tuple[Part, ...], b: tuple[Part, ...], known: dict[Unknown, tuple[Part, ...]]
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Divides the parts of one axis of two arrays until they have the same sizes."""
    left, right = list(a), list(b)
    i = 0
    while i < len(left) and i < len(right):
        p, q = left[i], right[i]
        if p.size != q.size:
            longer, shorter = (left, q) if p.size > q.size else (right, p)
            longer[i : i + 1] = divide(longer[i], shorter.size, known)
        i += 1
    if len(left) != len(right):
        raise NoForm("")
    return tuple(left), tuple(right)


def divide(part: Part, first: int, known: dict[Unknown, tuple[Part, ...]]) -> tuple[Part, Part]:
    """Two parts. The first one has a given size."""
    if part.size % first:
        raise NoForm("a reshape mixes axes")
    sizes = first, part.size // first
    if isinstance(part.label, int):
        raise Divided(part.label, sizes)
    if part.label is None:
        return Part(None, sizes[0]), Part(None, sizes[1])
    label = part.label
    halves = (
        Part(label._replace(part=2 * label.part + 1), sizes[0]),
        Part(label._replace(part=2 * label.part + 2), sizes[1]),
    )
    known[label] = halves
    return halves


def resolved(parts: Iterable[Part], known: Mapping[Unknown, tuple[Part, ...]]) -> tuple[Part, ...]:
    """The parts with what is known by now."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part.label, Unknown) and part.label in known:
            found.extend(resolved(known[part.label], known))
        else:
            found.append(part)
    return tuple(found)


def resolve(p: Polynomial, known: Mapping[Unknown, tuple[Part, ...]]) -> Polynomial:
    """The polynomial, after more axes of its leaves are known."""

    def labels_of(label: Any) -> tuple[Any, ...]:
        return tuple(part.label for part in resolved([Part(label, 0)], known))

    def change(atom: Any) -> Any:
        if isinstance(atom, OneHot):
            index, over = change(atom.index), labels_of(atom.over)
            if len(over) != 1:
                raise NoForm("")
            own = {n for n in over if isinstance(n, int)}
            return OneHot(index.axes | own, index, over[0])
        if not isinstance(atom, Leaf):
            return atom
        labels = tuple(tuple(n for label in axis for n in labels_of(label)) for axis in atom.labels)
        axes = frozenset(n for axis in labels for n in axis if isinstance(n, int))
        return Leaf(axes, atom.var, labels)

    return p.mapped(change)


# --- Changes of shape ----------------------------------------------------------------------------


def broadcast(form: Form, shape: Sequence[int], axes: Sequence[int]) -> Form:
    dims: list[tuple[Part, ...]] = [free(size) for size in shape]
    sizes = form.sizes
    for i, axis in enumerate(axes):
        if sizes[i] == shape[axis]:
            dims[axis] = form.dims[i]
    return Form(form.polynomial, tuple(dims))


def transpose(form: Form, permutation: Sequence[int]) -> Form:
    return Form(form.polynomial, tuple(form.dims[i] for i in permutation))


def reshape(form: Form, shape: Sequence[int]) -> Form:
    parts = [p for axis in form.dims for p in axis]
    known: dict[Unknown, tuple[Part, ...]] = {}
    dims: list[tuple[Part, ...]] = []
    for size in shape:
        axis: list[Part] = []
        left = size
        while left > 1:
            if not parts:
                raise NoForm("")
            part = parts.pop(0)
            if part.size > left:
                part, rest = divide(part, left, known)
                parts.insert(0, rest)
            if left % part.size:
                raise NoForm("a reshape mixes axes")
            axis.append(part)
            left //= part.size
        dims.append(tuple(axis))
    if parts:
        raise NoForm("")
    return Form(resolve(form.polynomial, known), tuple(dims))


def reduce(form: Form, axes: Sequence[int]) -> tuple[Axes, int, Dims]:
    """What a reduction over axes of an array means: the root's axes, copies, and the new dims."""
    parts = [p for i in axes for p in form.dims[i]]
    if any(isinstance(p.label, Unknown) for p in parts):
        raise NoForm("")
    over = frozenset(p.label for p in parts if isinstance(p.label, int))
    copies = math.prod(p.size for p in parts if p.label is None)
    dims = tuple(d for i, d in enumerate(form.dims) if i not in axes)
    return over, copies, dims
