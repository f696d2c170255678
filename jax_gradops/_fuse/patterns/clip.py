"""Clipping by the global norm, as Optax writes it. It has many arrays, so polynomials do not help.

The norm is sqrt(sum over arrays of sum(array²)). Each array becomes
where(norm < max_norm, array, array / norm * max_norm).
"""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jax_gradops._fuse import check, search
from jax_gradops._fuse.patterns.candidate import Left
from jax_gradops._fuse.program import Program, Site
from jax_gradops._ops.clip.global_norm import clip_tree_by_global_norm

_PASSED_ON = ("convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True)
class _Clip:
    """What was found: arrays, in order of the sum, their clipped values, and the bound."""

    arrays: tuple[Var, ...]
    clipped: tuple[Var, ...]
    max_norm: Any

    @property
    def number(self) -> float | None:
        """The bound if it is a number."""
        bound = self.max_norm
        return None if isinstance(bound, Var) else float(np.asarray(bound.val))


def clip(program: Program, anchor: int) -> Site | None:
    """The clipping by a norm, which is the square root that an equation computes."""
    norm = program.items[anchor].equation.outvars[0]
    if norm.aval.shape or program.items[anchor].equation.primitive.name != "sqrt":
        return None
    arrays = _squares(program, program.items[anchor].equation.invars[0])
    if not arrays or len(set(arrays)) != len(arrays):
        return None
    clipped = [_clipped(program, array, norm) for array in arrays]
    if not any(clipped):
        return None
    if not all(clipped) or len({str(c[1]) for c in clipped if c}) != 1:
        raise Left("not all arrays of the global norm are clipped by it, with one bound")
    found = _Clip(arrays, tuple(c[0] for c in clipped if c), clipped[0] and clipped[0][1])
    return _site(program, anchor, found)


def _site(program: Program, anchor: int, found: _Clip) -> Site:
    norm = program.items[anchor].equation.outvars[0]
    operands = (*found.arrays, found.max_norm) if found.number is None else found.arrays
    equations = search.slice_between(program, found.clipped, set(operands))
    outputs = found.clipped
    others = [i for i in program.users.get(norm, ()) if i not in equations]
    if others or norm in program.results:
        outputs = (*outputs, norm)
    region = search.unshared(program, equations, outputs)
    if anchor not in region:
        raise Left("the global norm's arrays are used in another way, too")
    at = program.operand_position(operands)
    outside = [u for v in outputs for u in program.users.get(v, ()) if u not in region]
    if any(u < at for u in outside):
        raise Left("a gradient is computed from the global norm")

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return _clip(arrays, found.number, norm.aval.dtype)[: len(outputs)]

    _compare(program, found, norm, sorted(equations))
    return Site("clip_tree_by_global_norm", call, operands, outputs, region, at)


def _compare(program: Program, found: _Clip, norm: Var, equations: Sequence[int]) -> None:
    """Runs the equations and the op on small arrays: one array of each kind.

    Arrays of one kind have equal ranks, dtypes and equations. The others count as zeros.
    """
    lines = [program.items[i].equation for i in equations]
    own = _own_equations(lines, found.arrays)
    kinds: dict[str, tuple[Var, Var]] = {}
    for array, clipped in zip(found.arrays, found.clipped, strict=True):
        kind = str((_small(array), array.aval.dtype, *own[array]))
        kinds.setdefault(kind, (array, clipped))
    bound = [found.max_norm] if found.number is None else []
    operands = [*(array for array, _ in kinds.values()), *bound]
    outputs = [*(clipped for _, clipped in kinds.values()), norm]

    def reference(wide: bool, *arrays: jax.Array) -> list[jax.Array]:
        env: dict[Any, jax.Array] = dict(zip(operands, arrays, strict=True))
        for equation in lines:
            known = [v for v in equation.invars if not isinstance(v, Var) or v in env]
            if len(known) == len(equation.invars):
                check.run_broadcast([equation], env, wide)
            elif equation.primitive.name == "add" and len(known) == 1 and known[0] in env:
                env[equation.outvars[0]] = env[known[0]]  # the other one is a sum of zeros
        return [jnp.broadcast_to(env[v], _small(v)) for v in outputs]

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return _clip(arrays, found.number, norm.aval.dtype)

    types = [(_small(v), v.aval.dtype) for v in operands]
    key = "clip", *kinds, *own[None], found.number, str([v.aval for v in bound])
    check.compare("clip_tree_by_global_norm", reference, call, types, key)


def _own_equations(
    equations: Iterable[JaxprEqn], arrays: Iterable[Var]
) -> dict[Var | None, dict[Any, None]]:
    """For each array, the equations of its square and its clipped value. None: of the norm."""
    found: dict[Var | None, dict[Any, None]] = {array: {} for array in (*arrays, None)}
    # The array from which a value is computed. None: from several.
    source: dict[Any, Var | None] = {array: array for array in found if array is not None}
    for equation in equations:
        given = {source[v] for v in equation.invars if isinstance(v, Var) and v in source}
        own = given - {None}
        if len(own) != 1 or (None in given and equation.primitive.name == "add"):
            own = {None}
        (array,) = own
        numbers = [str(v) for v in equation.invars if not isinstance(v, Var)]
        dtypes = [str(v.aval.dtype) for v in equation.outvars]
        found[array][equation.primitive.name, str(numbers), str(dtypes)] = None
        if given:
            source |= dict.fromkeys(equation.outvars, array)
    return found


def _clip(arrays: Sequence[jax.Array], number: float | None, dtype: Any) -> list[jax.Array]:
    """The clipped arrays and the norm. The bound is a number, or the last array."""
    *leaves, bound = arrays if number is None else (*arrays, number)
    tree, before = clip_tree_by_global_norm(leaves, bound)
    return [*tree, before.astype(dtype)]


def _small(v: Var) -> tuple[int, ...]:
    return tuple(min(n, 2) for n in v.aval.shape)


def _squares(program: Program, total: Any) -> tuple[Var, ...]:
    """The arrays whose squares are summed, or none."""
    found: list[Var] = []
    stack = [total]
    while stack:
        v = stack.pop()
        equation = program.equation_of(v)
        if equation is None:
            return ()
        name, operands = equation.primitive.name, equation.invars
        if name in _PASSED_ON:
            stack.append(operands[0])
            continue
        if name == "reduce_sum" and len(operands[0].aval.shape) == len(equation.params["axes"]):
            array = _square_of(program, operands[0])
        else:
            array = _square_of(program, v)  # the square of a scalar
        if array is None and name == "add":
            stack += [u for u in operands[::-1] if not _is_zero(u)]
        elif array is None or (name != "reduce_sum" and array.aval.shape):
            return ()
        else:
            found.append(array)
    return tuple(found)


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and not np.any(np.asarray(v.val))


def _square_of(program: Program, v: Any) -> Var | None:
    """The array that v is the square of. Optax adds the square of an imaginary part of zeros."""
    equation = program.equation_of(v)
    if equation is None:
        return None
    name, operands = equation.primitive.name, equation.invars
    if name == "convert_element_type":
        return _square_of(program, operands[0])
    square = name == "square" or (name == "integer_pow" and equation.params["y"] == 2)
    if square or (name == "mul" and operands[0] is operands[1]):
        return _uncast(program, operands[0])
    if name == "add" and _is_square_of_zero(program, operands[1]):
        return _square_of(program, operands[0])
    return None


def _uncast(program: Program, v: Any) -> Var | None:
    """The array before casts to a larger dtype."""
    equation = program.equation_of(v)
    if equation is not None and equation.primitive.name == "convert_element_type":
        old, new = equation.invars[0].aval.dtype, v.aval.dtype
        if jnp.promote_types(old, new) == new and jnp.issubdtype(old, jnp.floating):
            return _uncast(program, equation.invars[0])
    return v if isinstance(v, Var) else None


def _is_square_of_zero(program: Program, v: Any) -> bool:
    equation = program.equation_of(v)
    if equation is None:
        return _is_zero(v)
    same = equation.primitive.name in ("square", *_PASSED_ON)
    return same and _is_square_of_zero(program, equation.invars[0])


def _clipped(program: Program, array: Var, norm: Var) -> tuple[Var, Any] | None:
    """The clipped array, and the bound."""
    for i in program.users.get(array, ()):
        equation = program.items[i].equation
        if equation.primitive.name != "select_n" or len(equation.invars) != 3:
            continue
        condition, scaled, kept = equation.invars
        bound = _bound(program, condition, norm)
        if kept is array and bound is not None and _is_scaled(program, scaled, array, norm, bound):
            return equation.outvars[0], bound
    return None


def _bound(program: Program, condition: Any, norm: Var) -> Any:
    """The bound in norm < bound."""
    equation = program.equation_of(condition)
    if equation is None:
        return None
    if equation.primitive.name in _PASSED_ON:
        return _bound(program, equation.invars[0], norm)
    if equation.primitive.name != "lt" or not _is_norm(program, equation.invars[0], norm):
        return None
    return _original(program, equation.invars[1])


def _is_scaled(program: Program, v: Any, array: Var, norm: Var, bound: Any) -> bool:
    """Whether v is array / norm * bound."""
    product = program.equation_of(v)
    if product is None or product.primitive.name != "mul":
        return False
    for quotient, factor in (product.invars, product.invars[::-1]):
        division = program.equation_of(quotient)
        if division is None or division.primitive.name != "div":
            continue
        same = division.invars[0] is array and _is_norm(program, division.invars[1], norm)
        if same and _same_number(_original(program, factor), bound):
            return True
    return False


def _same_number(a: Any, b: Any) -> bool:
    """Whether two scalars are equal. One may be rounded to an array's dtype."""
    if not (isinstance(a, Literal) and isinstance(b, Literal)):
        return a is b
    small = min((np.asarray(v.val).dtype for v in (a, b)), key=lambda dtype: dtype.itemsize)
    return bool(np.asarray(a.val).astype(small) == np.asarray(b.val).astype(small))


def _is_norm(program: Program, v: Any, norm: Var) -> bool:
    return _original(program, v) is norm


def _original(program: Program, v: Any) -> Any:
    """The scalar before casts and broadcasts."""
    equation = program.equation_of(v)
    if equation is not None and equation.primitive.name in _PASSED_ON:
        return _original(program, equation.invars[0])
    return v
