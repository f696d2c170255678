"""From which arrays ops may start, and the forms of the values after such an array."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jax_gradops._fuse import forms, parts, polynomial, rules
from jax_gradops._fuse.forms import Divided, Form, NoForm, Part
from jax_gradops._fuse.polynomial import Axes, Function, Leaf, OneHot, Root
from jax_gradops._fuse.program import Program, is_float

# The largest numbers of equations in a formula, before and after the equation that shows the op.
_BEFORE = 60
_AFTER = 120


def _shows_square_root(equation: JaxprEqn) -> bool:
    if equation.primitive.name in ("rsqrt", "sqrt"):
        return True
    exponent = equation.invars[1] if equation.primitive.name == "pow" else None
    return isinstance(exponent, Literal) and bool(np.all(np.abs(exponent.val) == 0.5))


def kind(equation: JaxprEqn) -> str:
    """The kind of op that may be around an equation: "norm", "gelu", "loss", or none."""
    if _shows_square_root(equation):
        return "norm"
    if equation.primitive.name in ("tanh", "erf", "erfc", "logistic"):
        return "gelu"
    return "loss" if equation.primitive.name == "log" else ""


def roots(program: Program, anchor: int) -> list[Var]:
    """The arrays from which the op around an equation may start.

    They have the size of an array that is summed. The largest are first, because the statistics of
    a batch norm may be sums of sums. An array that was pooled before a norm is smaller than what
    was pooled. Of arrays of one size, the earliest is first.
    """
    equation = program.items[anchor].equation
    seen: set[Var] = set()
    stack: list[Any] = [v for v in equation.invars if isinstance(v, Var)]
    reduced: set[int] = set()  # the sizes of arrays that are summed
    while stack and len(seen) < _BEFORE:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        before = program.equation_of(v)
        if before is None:
            continue
        if before.primitive.name == "reduce_sum":
            reduced.add(math.prod(before.invars[0].aval.shape))
        if not _starts(program, before):
            stack.extend(u for u in before.invars if isinstance(u, Var))
    if kind(equation) == "gelu":
        reduced = {math.prod(equation.outvars[0].aval.shape)}
    size_of = {v: math.prod(v.aval.shape) for v in seen if is_float(v.aval.dtype)}
    found = [v for v, size in size_of.items() if size in reduced and size > 1]
    # A policy for `jax.checkpoint` saves the array that has a name: it is tried before its copy.
    producers = [program.equation_of(v) for v in seen]
    copies = {e.invars[0] for e in producers if e is not None and e.primitive.name == "name"}
    order = {v: (-size_of[v], v in copies, program.producer.get(v, -1)) for v in found}
    return sorted(found, key=order.__getitem__)


def is_named(program: Program, v: Var) -> bool:
    """Whether a variable is the result of `jax.ad_checkpoint.checkpoint_name`."""
    equation = program.equation_of(v)
    return equation is not None and equation.primitive.name == "name"


def is_over_devices(program: Program, anchor: int) -> bool:
    """Whether a sum over a mapped axis of an array's sums leads to an equation."""
    waiting, seen, summed = [-anchor], set[int](), False
    while waiting and len(seen) <= _BEFORE:
        i = -heapq.heappop(waiting)  # the latest equation
        if i in seen:
            continue
        seen.add(i)
        equation = program.items[i].equation
        name = equation.primitive.name
        summed = summed or name in ("psum", "psum_invariant", "psum2", "all_reduce")
        if summed and name == "reduce_sum":
            return True
        if name in _OF_STATISTICS or rules.is_known(equation):
            for v in equation.invars:
                if isinstance(v, Var) and v in program.producer:
                    heapq.heappush(waiting, -program.producer[v])
    return False


# How statistics are put together for one sum over devices.
_OF_STATISTICS = {"psum", "psum_invariant", "psum2", "concatenate", "stack", "unstack", "slice"}
_OF_STATISTICS |= {"split"}


def _starts(program: Program, equation: JaxprEqn) -> bool:
    """Whether no op goes on before this equation, such as a matrix product or a sum of arrays."""
    if not rules.is_known(equation):
        return True
    if equation.primitive.name not in ("add", "mul"):
        return False
    arrays = {v for v in equation.invars if isinstance(v, Var)}
    full = [v for v in arrays if v.aval.shape == equation.outvars[0].aval.shape]
    return len(full) == 2 and not (_near(program, full[0]) & _near(program, full[1]))


def _near(program: Program, v: Var) -> set[Var]:
    """The arrays from which a few equations lead to `v`."""
    found, last = {v}, [v]
    for _ in range(6):
        producers = [program.equation_of(u) for u in last]
        last = [
            u
            for equation in producers
            if equation is not None and rules.is_known(equation)
            for u in equation.invars
            if isinstance(u, Var) and u not in found
        ]
        found.update(last)
    return found


@dataclasses.dataclass
class Values:
    """The forms of the values that are computed from a root.

    Attributes:
      program: the jaxpr.
      root: the array.
      sizes: the sizes of the root's axes, with axes that a reshape divides in parts. After these,
        the sizes of axes that values have and the root has not: see `number_new_axes`.
      forms: by variable, in order of computation.
      leaves: the forms of arrays that are not computed from the root.
      stopped: why the values end, by variable.
    """

    program: Program
    root: Var
    sizes: list[int]
    forms: dict[Var, Form]
    leaves: dict[Var, Form]
    stopped: dict[Var, str]

    @property
    def root_atom(self) -> Root:
        return Root(self.forms[self.root].labels)

    @property
    def axes(self) -> Axes:
        return frozenset(i for i, n in enumerate(self.sizes) if n > 1)

    def form_of(self, v: Any) -> Form:
        """The form of any operand of an equation."""
        if isinstance(v, Literal):
            return rules.of_literal(v)
        if v in self.forms:
            return self.forms[v]
        if v not in self.leaves:
            self.leaves[v] = self._of_other(v, 8)
        return self.leaves[v]

    def _of_other(self, v: Any, depth: int) -> Form:
        """The form of an array that is not computed from the root.

        Changes of shape and dtype, and arithmetic with numbers, are followed back.
        """
        if isinstance(v, Literal):
            return rules.of_literal(v)
        equation = self.program.equation_of(v)
        if equation is not None and depth and not _rounds(equation, self.root):
            arrays = [u for u in equation.invars if isinstance(u, Var)]
            number = math.prod(v.aval.shape) == 1 or equation.primitive.name in ("select_n", "mul")
            if (len(arrays) <= 1 or number) and equation.primitive.name not in _NOT_FOLLOWED:
                try:
                    before = [self._of_other(u, depth - 1) for u in equation.invars]
                    numbers = all(f.polynomial.number is not None for f in before)
                    if equation.primitive.name == "select_n":  # as of a one-hot array
                        numbers = all(f.polynomial.number is not None for f in before[1:])
                    # The derivative of pvary, inside shard_map, is a sum over devices.
                    varies = equation.primitive.name in ("pvary", "pcast")
                    if self._is_array(equation, before):
                        return forms.of_leaf(v)
                    masked = equation.primitive.name == "mul" and _has_one_hot(before)
                    if numbers or masked or (len(arrays) <= 1 and not varies):
                        return rules.apply(equation, before)
                except (NoForm, Divided):
                    pass
            if equation.primitive.name == "eq":
                return self._one_hot(equation, depth)
        if not is_float(v.aval.dtype) and v.aval.dtype.name not in _INTEGERS:
            raise NoForm("a mask leaves some elements out" if v.aval.dtype == bool else "")
        return forms.of_leaf(v)

    def _is_array(self, equation: JaxprEqn, before: list[Form]) -> bool:
        """Whether this computes an array of the root's shape from another one.

        An op may add the result to the root. It has no other use for it.
        """
        shape, name = self.root.aval.shape, equation.primitive.name
        if equation.outvars[0].aval.shape != shape:
            return False
        if name == "convert_element_type" and not _rounds(equation, equation.invars[0]):
            return False
        atoms = [a for f in before for monomial in f.polynomial.terms for a, _ in monomial]
        arrays = [a.var.aval for a in atoms if isinstance(a, Leaf)]
        return any(a.shape == shape and is_float(a.dtype) for a in arrays)

    def _one_hot(self, equation: JaxprEqn, depth: int) -> Form:
        """The form of a comparison with numbers that count from 0."""
        producer = self.program.equation_of
        for index, counted in (equation.invars, equation.invars[::-1]):
            axes = range(len(counted.aval.shape))
            axis = next((i for i in axes if parts.counts(counted, i, producer)), None)
            if axis is not None and isinstance(index, Var):
                return rules.one_hot(equation, axis, self._of_other(index, depth - 1))
        raise NoForm("")


def _has_one_hot(found: Iterable[Form]) -> bool:
    atoms = [atom for f in found for monomial in f.polynomial.terms for atom, _ in monomial]
    return any(isinstance(atom, OneHot) for atom in atoms)


# Of arrays that are not computed from the root, these would only make long polynomials.
_NOT_FOLLOWED = {"reduce_sum", "reduce_max", "stop_gradient", "tanh", "erf", "erfc", "logistic"}
_NOT_FOLLOWED |= {"exp", "log", "is_finite", "gather", "name"}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def values_from(program: Program, root: Var) -> Values:
    """Follows the equations after a root, as far as values have forms that an op may have."""
    dims: list[list[int]] = [[n] if n != 1 else [] for n in root.aval.shape]
    while True:
        try:
            return _follow(program, root, dims)
        except Divided as divided:
            labels = [(i, j) for i, axis in enumerate(dims) for j in range(len(axis))]
            i, j = labels[divided.label]
            dims[i][j : j + 1] = divided.sizes


def _follow(program: Program, root: Var, dims: list[list[int]]) -> Values:
    sizes = [n for axis in dims for n in axis]
    labels = iter(range(len(sizes)))
    parts = tuple(tuple(Part(next(labels), n) for n in axis) for axis in dims)
    values = Values(program, root, sizes, {}, {}, {})
    root_atom = Root(frozenset(range(len(sizes))))
    values.forms[root] = Form(polynomial.of_atom(root_atom), parts)
    waiting = list(program.users.get(root, ()))
    heapq.heapify(waiting)
    seen: set[int] = set()
    while waiting and len(seen) < _AFTER:
        i = heapq.heappop(waiting)
        if i in seen:
            continue
        seen.add(i)
        equation = program.items[i].equation
        try:
            found = rules.apply(equation, [values.form_of(v) for v in equation.invars])
            _check(found, values, equation)
        except NoForm as why:
            for v in equation.outvars:
                values.stopped[v] = str(why)
            continue
        values.forms[equation.outvars[0]] = found
        for each in program.users.get(equation.outvars[0], ()):
            heapq.heappush(waiting, each)
    return values


def why_stopped(values: Values, v: Var) -> str:
    """Why a value that is computed from the root has no form. Empty if there is no reason."""
    seen: set[Var] = set()
    last = [v]
    while last and len(seen) < _BEFORE:
        u = last.pop()
        if u in seen or u in values.forms:
            continue
        seen.add(u)
        if values.stopped.get(u):
            return values.stopped[u]
        equation = values.program.equation_of(u)
        if equation is not None:
            last += [w for w in equation.invars if isinstance(w, Var)]
    return ""


def _check(form: Form, values: Values, equation: JaxprEqn) -> None:
    """Stops where no op goes on.

    No op rounds a value to a smaller dtype than the root's. Another array of the root's size is
    part of an op only after a norm.
    """
    if form.polynomial.number is None and _rounds(equation, values.root):
        raise NoForm("a value is rounded to a smaller dtype than the array's")
    atoms = [atom for monomial in form.polynomial.terms for atom, _ in monomial]
    if any(isinstance(a, Function) and a.name in ("power", "log") for a in atoms):
        return
    if any(isinstance(a, Leaf) and a.axes >= values.axes for a in atoms):
        raise NoForm("another array of the same size is added or multiplied")


def _rounds(equation: JaxprEqn, array: Any) -> bool:
    """Whether this is a change to a dtype with fewer digits or a smaller range than the array."""
    if not is_float(array.aval.dtype):
        return False
    own, params = jnp.finfo(array.aval.dtype), equation.params
    if equation.primitive.name == "reduce_precision":
        return params["mantissa_bits"] < own.nmant or params["exponent_bits"] < own.nexp
    dtype = params.get("new_dtype")
    if equation.primitive.name != "convert_element_type" or not is_float(dtype):
        return False
    new = jnp.finfo(dtype)
    return new.nmant < own.nmant or new.nexp < own.nexp


def slice_between(program: Program, outputs: Iterable[Var], operands: set[Var]) -> set[int]:
    """The equations that compute outputs from operands."""
    found: set[int] = set()
    stack: list[Any] = list(outputs)
    while stack:
        v = stack.pop()
        if not isinstance(v, Var) or v in operands or v not in program.producer:
            continue
        i = program.producer[v]
        if i not in found:
            found.add(i)
            stack.extend(program.items[i].equation.invars)
    return found


def unshared(program: Program, equations: set[int], outputs: tuple[Var, ...]) -> frozenset[int]:
    """Those of the equations whose results nothing else uses, apart from the outputs."""
    kept: set[int] = set()
    for i in sorted(equations, reverse=True):
        results = program.items[i].equation.outvars
        inside = all(
            v in outputs
            or (v not in program.results and all(u in kept for u in program.users.get(v, ())))
            for v in results
        )
        if inside:
            kept.add(i)
    return frozenset(kept)
