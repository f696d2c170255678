"""What a pattern returns, and the parameters of an op as arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse.polynomial import ONE, Axes, Leaf, Monomial, Polynomial, close
from jax_gradops._fuse.search import Values


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An op that may compute a value.

    Attributes:
      op: the name of the public function.
      call: computes the outputs from the operands.
      operands: the root first, then leaves.
      output: the value that the op computes.
      options: what a report says about the call.
    """

    op: str
    call: Callable[..., Any]
    operands: tuple[Var, ...]
    output: Var
    options: str = ""


class Left(Exception):
    """A value is nearly an op. The message says, for a report, why it is left."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A polynomial of leaves, such as 1 + scale, as an array of some of the root's axes.

    Attributes:
      polynomial: has leaves only.
      leaves: their variables, in the order of the program.
      shape: for each axis of the array, the root's axes in it, and their sizes.
    """

    polynomial: Polynomial
    leaves: tuple[Var, ...]
    shape: tuple[tuple[tuple[int, int], ...], ...]

    def only_leaf(self) -> tuple[Leaf, float] | None:
        """The leaf and the number if the polynomial is leaf + number."""
        linear = [(m, c) for m, c in self.polynomial.terms.items() if m]
        if len(linear) != 1 or not close(linear[0][1], 1, 2e-6) or len(linear[0][0]) != 1:
            return None
        ((atom, exponent),) = linear[0][0]
        axes = frozenset(label for axis in self.shape for label, _ in axis)
        if exponent != 1 or not isinstance(atom, Leaf) or atom.axes != axes:
            return None
        return atom, self.polynomial.terms.get(ONE, 0.0)

    def is_one(self) -> bool:
        return self.polynomial.number is not None and close(self.polynomial.number, 1, 2e-6)

    def array(self, arrays: Mapping[Var, jax.Array]) -> jax.Array:
        """The value, in at least float32."""
        dtype = jnp.result_type(jnp.float32, *(arrays[v].dtype for v in self.leaves))
        total = jnp.zeros((), dtype)
        terms = [self._factors(m, c) for m, c in self.polynomial.terms.items()]
        for factors, c in sorted(terms, key=lambda term: [f[:2] for f in term[0]]):
            term = jnp.full((), c, dtype)
            for index, exponent, leaf in factors:
                array = self.of_leaf(leaf, arrays[self.leaves[index]]).astype(dtype)
                term = term * (array if exponent == 1 else array**exponent)
            total = total + term
        return jnp.broadcast_to(total, self.sizes)

    def _factors(self, monomial: Monomial, c: float) -> Any:
        """The factors of a term, in an order that is the same in each process."""
        leaves = [(atom, e) for atom, e in monomial if isinstance(atom, Leaf)]
        factors = [(self.leaves.index(a.var), e, a) for a, e in leaves]
        return sorted(factors, key=lambda factor: factor[:2]), c

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(n for _, n in axis) for axis in self.shape)

    def of_leaf(self, leaf: Leaf, array: jax.Array) -> jax.Array:
        """The leaf's array, with this parameter's axes."""
        labels = [label for axis in leaf.labels for label in axis]
        sizes = {label: n for axis in self.shape for label, n in axis}
        array = array.reshape([sizes[label] for label in labels])
        order = [label for axis in self.shape for label, _ in axis if label in labels]
        array = array.transpose([labels.index(label) for label in order])
        array = array.reshape(
            [n if label in labels else 1 for axis in self.shape for label, n in axis]
        )
        parts = [n for axis in self.shape for _, n in axis]
        return jnp.broadcast_to(array, parts).reshape(self.sizes)


def parameter(values: Values, p: Polynomial, first: int) -> Parameter:
    """A polynomial of leaves as an array of the root's array axes from `first` on."""
    found = {a.var for m in p.terms for a, _ in m if isinstance(a, Leaf)}
    dims = values.forms[values.root].dims
    shape = tuple(
        tuple((p.label, p.size) for p in axis if isinstance(p.label, int)) for axis in dims[first:]
    )
    return Parameter(p, tuple(sorted(found, key=values.program.number)), shape)


def only_leaves(p: Polynomial, axes: Axes) -> bool:
    """Whether a polynomial has only leaves, which vary over some axes at most."""
    return all(
        isinstance(atom, Leaf) and atom.axes <= axes and all(isinstance(n, int) for a in atom.labels for n in a)
        for monomial in p.terms
        for atom, _ in monomial
    )


def same_layout(values: Values, v: Var) -> bool:
    """Whether a value has the root's axes in the root's order, and the root's dtype."""
    form, root = values.forms[v], values.forms[values.root]
    return form.dims == root.dims and v.aval.dtype == values.root.aval.dtype


def unique(*groups: Sequence[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(v for group in groups for v in group))
