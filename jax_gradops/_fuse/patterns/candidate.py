"""What a pattern returns, and the parameters of an op as arrays."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse.forms import Dims, Form, Part, Unknown, resolve, resolved
from jax_gradops._fuse.polynomial import (
    ONE,
    Axes,
    Function,
    Leaf,
    Monomial,
    Polynomial,
    close,
)
from jax_gradops._fuse.search import Values


@dataclasses.dataclass(frozen=True)
class Before:
    """The form of an op that adds something to the root first.

    Attributes:
      kind: "arrays": two arrays are added, perhaps also a vector. "bias": an array and a
        vector.
      op: the name of the public function.
      call: computes the outputs from the two terms and the op's other operands.
    """

    kind: str
    op: str
    call: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An op that may compute a value.

    Attributes:
      op: the name of the public function.
      call: computes the outputs from the operands.
      operands: the root first, then leaves.
      output: the value that the op computes.
      options: what a report says about the call.
      statistics: other results of the op, as polynomials of the root. `call` returns them after
        the output.
      before: the form with an addition before the op.
      rounding: the relative error of the code's literals, or of the op's result, in a comparison
        in float32.
    """

    op: str
    call: Callable[..., Any]
    operands: tuple[Var, ...]
    output: Var
    options: str = ""
    statistics: tuple[Polynomial, ...] = ()
    before: Before | None = None
    rounding: float = 0.0


class Left(Exception):
    """A value is nearly an op. The message says, for a report, why it is left."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A polynomial of leaves, such as 1 + scale, as an array of some of the root's axes.

    Attributes:
      polynomial: has leaves only.
      leaves: their variables, in the order of the program.
      axes: the root's array axes that the array has.
      dims: the dims of the root.
    """

    polynomial: Polynomial
    leaves: tuple[Var, ...]
    axes: tuple[int, ...]
    dims: Dims

    def only_leaf(self) -> tuple[Leaf, float] | None:
        """The leaf and the number if the polynomial is leaf + number."""
        linear = [(m, c) for m, c in self.polynomial.terms.items() if m]
        if len(linear) != 1 or not close(linear[0][1], 1, 2e-6) or len(linear[0][0]) != 1:
            return None
        ((atom, exponent),) = linear[0][0]
        if exponent != 1 or not isinstance(atom, Leaf) or atom.axes != frozenset(self._labels):
            return None
        return atom, self.polynomial.terms.get(ONE, 0.0)

    def is_one(self) -> bool:
        return self.polynomial.number is not None and close(self.polynomial.number, 1, 2e-6)

    @property
    def _labels(self) -> list[Any]:
        return [p.label for i in self.axes for p in self.dims[i]]

    def array(self, arrays: Mapping[Var, jax.Array], x: jax.Array) -> jax.Array:
        """The value for a root x, in at least float32."""
        doubles = [a.dtype == jnp.float64 for a in (x, *(arrays[v] for v in self.leaves))]
        dtype = jnp.float64 if any(doubles) else jnp.float32
        total = jnp.zeros((), dtype)
        terms = [self._factors(m, c) for m, c in self.polynomial.terms.items()]
        for factors, c in sorted(terms, key=lambda term: [f[:2] for f in term[0]]):
            term = jnp.full((), c, dtype)
            for index, exponent, leaf in factors:
                array = self.of_leaf(leaf, arrays[self.leaves[index]], x).astype(dtype)
                term = term * (array if exponent == 1 else array**exponent)
            total = total + term
        return jnp.broadcast_to(total, [x.shape[i] for i in self.axes])

    def _factors(self, monomial: Monomial, c: float) -> Any:
        """The factors of a term, in an order that is the same in each process."""
        leaves = [(atom, e) for atom, e in monomial if isinstance(atom, Leaf)]
        factors = [(self.leaves.index(a.var), e, a) for a, e in leaves]
        return sorted(factors, key=lambda factor: factor[:2]), c

    def of_leaf(self, leaf: Leaf, array: jax.Array, x: jax.Array) -> jax.Array:
        """The leaf's array, with this parameter's axes."""
        sizes = label_sizes(self.dims, x.shape)
        labels = [label for axis in leaf.labels for label in axis]
        array = array.reshape([sizes[label] for label in labels])
        order = [label for label in self._labels if label in labels]
        array = array.transpose([labels.index(label) for label in order])
        array = array.reshape([sizes[n] if n in labels else 1 for n in self._labels])
        array = jnp.broadcast_to(array, [sizes[n] for n in self._labels])
        return array.reshape([x.shape[i] for i in self.axes])


def label_sizes(dims: Dims, shape: Sequence[int]) -> dict[Any, int]:
    """The sizes of the root's axes for a root with fewer rows. Only first parts are smaller."""
    sizes: dict[Any, int] = {}
    for axis, size in zip(dims, shape, strict=True):
        inner = math.prod(p.size for p in axis[1:])
        sizes |= {p.label: p.size for p in axis} | {p.label: size // inner for p in axis[:1]}
    return sizes


def parameter(
    values: Values, p: Polynomial, axes: Sequence[int], dims: Dims | None = None
) -> Parameter:
    """A polynomial of leaves as an array of some of the root's array axes.

    `dims`: those of another shape of the root.
    """
    found = {a.var for m in p.terms for a, _ in m if isinstance(a, Leaf)}
    leaves = tuple(sorted(found, key=values.program.number))
    return Parameter(p, leaves, tuple(axes), dims or values.forms[values.root].dims)


@dataclasses.dataclass(frozen=True)
class Affine:
    """The scale and the bias of a norm, as arguments of its function."""

    scale: Parameter
    bias: Parameter
    with_offset: bool  # whether the function has `scale_offset`

    @property
    def leaves(self) -> tuple[Var, ...]:
        return unique(self.scale.leaves, self.bias.leaves)

    def arguments(self, x: jax.Array, arrays: Sequence[jax.Array]) -> dict[str, Any]:
        """From the leaves' arrays. A parameter that is a leaf is passed on as it is."""
        by_leaf = dict(zip(self.leaves, arrays, strict=True))
        found: dict[str, Any] = {}
        leaf = self.scale.only_leaf()
        if leaf is not None and (self.with_offset or leaf[1] == 0):
            found["scale"] = self.scale.of_leaf(leaf[0], by_leaf[leaf[0].var], x)
            if leaf[1]:
                found["scale_offset"] = leaf[1]
        elif not self.scale.is_one():
            found["scale"] = self.scale.array(by_leaf, x)
        leaf = self.bias.only_leaf()
        if leaf is not None and leaf[1] == 0:
            found["bias"] = self.bias.of_leaf(leaf[0], by_leaf[leaf[0].var], x)
        elif self.bias.polynomial.terms:
            found["bias"] = self.bias.array(by_leaf, x)
        return found


def only_leaves(p: Polynomial, axes: Axes) -> bool:
    """Whether a polynomial has only leaves, which vary over some axes at most."""
    return all(
        isinstance(atom, Leaf)
        and atom.axes <= axes
        and all(isinstance(n, int) for a in atom.labels for n in a)
        for monomial in p.terms
        for atom, _ in monomial
    )


def number_new_axes(values: Values, v: Var) -> tuple[int, ...] | None:
    """Gives labels to the axes that a value has because of its leaves, and the root has not.

    `jax.vmap` over the parameters of one norm makes such axes. Returns the positions of these
    axes. None if the other axes are not the root's.
    """
    form = values.forms[v]
    own = values.root_atom.axes
    new = [
        i for i, axis in enumerate(form.dims)
        if axis and not any(p.label is None or p.label in own for p in axis)
    ]  # fmt: skip
    if tuple(a for i, a in enumerate(form.dims) if i not in new) != values.forms[values.root].dims:
        return None
    known: dict[Unknown, tuple[Part, ...]] = {}
    for part in (p for i in new for p in form.dims[i] if isinstance(p.label, Unknown)):
        known[part.label] = (Part(len(values.sizes), part.size),)  # pyright: ignore
        values.sizes.append(part.size)
    dims = tuple(resolved(axis, known) for axis in form.dims)
    values.forms[v] = Form(resolve(form.polynomial, known), dims)
    return tuple(new)


def dtype_of(values: Values, function: Function) -> Any:
    """The dtype in which a function is computed: that of the first value that has the function."""
    for v, form in values.forms.items():
        if any(atom == function for monomial in form.polynomial.terms for atom, _ in monomial):
            return v.aval.dtype
    raise AssertionError(function)


def same_layout(values: Values, v: Var) -> bool:
    """Whether a value has the root's axes in the root's order, and the root's dtype.

    A value of another dtype that is only ever cast to the root's dtype counts too.
    """
    form, root = values.forms[v], values.forms[values.root]
    if form.dims != root.dims:
        return False
    dtype = values.root.aval.dtype
    return v.aval.dtype == dtype or _only_cast(values, v, dtype)


def _only_cast(values: Values, v: Var, dtype: Any) -> bool:
    """Whether all users of a value cast it to a dtype: three matrix products, say."""
    program = values.program
    users = [program.items[i].equation for i in program.users.get(v, ())]
    return (
        bool(users)
        and v not in program.results
        and bool(jnp.finfo(v.aval.dtype).eps <= jnp.finfo(dtype).eps)
        and all(
            e.primitive.name == "convert_element_type" and e.params["new_dtype"] == dtype
            for e in users
        )
    )


def unique(*groups: Sequence[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(v for group in groups for v in group))
