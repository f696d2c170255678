"""A jaxpr as a list of equations, and the jaxpr that has ops in their place."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, gensym

from jax_gradops._fuse.parts import parts_of
from jax_gradops._fuse.report import is_own
from jax_gradops._kernel.array_types import like_type

# Inner `jit` functions up to this number of equations are opened, so that a variance by `jnp.var`
# is seen together with the code around it. Longer ones are searched on their own.
_OPENED = 80
# An inner function with one of these primitives is not opened.
_CLOSED = {"scan", "while", "cond", "shard_map", "remat2", "checkpoint", "remat"}
_CLOSED |= {"jax_gradops", "jax_gradops_widening"}
_SHAPES = {"broadcast_in_dim", "reshape", "expand_dims", "copy", "pvary", "pcast"}


def is_float(dtype: Any) -> bool:
    """Whether the ops take arrays of this dtype."""
    return getattr(dtype, "name", "") in ("float16", "bfloat16", "float32", "float64")


def has_symbolic_shape(equation: JaxprEqn) -> bool:
    """Whether sizes are variables, as `jax.export.symbolic_shape` makes them."""
    arrays = (*equation.invars, *equation.outvars)
    sizes = [n for v in arrays for n in getattr(v.aval, "shape", ())]
    return not all(isinstance(n, int) for n in sizes)


@dataclasses.dataclass(frozen=True)
class Item:
    """An equation, and the number of the jaxpr's own equation that it is or is inside of.

    Attributes:
      source: the equation that has the line of the code.
      whole: the equation that is listed in parts (`parts.py`), if this is a part.
    """

    equation: JaxprEqn
    origin: int
    source: JaxprEqn
    whole: JaxprEqn | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    """A set of equations that equals an op.

    Attributes:
      op: the name of the public function.
      call: computes `outputs` from `operands`.
      operands: arrays of the jaxpr.
      outputs: the variables that the op computes, instead of their equations.
      region: the numbers of the equations that the op replaces.
      at: the op is put before the equation of this number.
      key: equal for sites of the same op, if not None.
      equations: the equations of the op.
    """

    op: str
    call: Callable[..., Any]
    operands: tuple[Any, ...]
    outputs: tuple[Var, ...]
    region: frozenset[int]
    at: int
    key: Any = None
    equations: tuple[JaxprEqn, ...] = ()


class Program:
    """The equations of a jaxpr, and who computes and uses each variable.

    `consts` are the values of its constants, if they are known.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any] | None = None) -> None:
        self.jaxpr = jaxpr
        self.items: list[Item] = []
        self.producer: dict[Any, int] = {}
        self._same: dict[Var, Any] = {}
        self._new = gensym()
        self._traced: dict[Any, ClosedJaxpr] = {}
        numbers = _numbers(jaxpr, consts)
        for origin, equation in enumerate(jaxpr.eqns):
            self._list(equation, numbers, origin)
        self.outvars = [self._outer(v) for v in jaxpr.outvars]
        self.results = {v for v in self.outvars if isinstance(v, Var)}
        self.users = self._users()
        # Results of ops that are put later than the equations that computed the results.
        self.moved: dict[Var, int] = {}
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        self._inputs = {v: i - len(inputs) for i, v in enumerate(inputs)}

    def _outer(self, v: Any) -> Any:
        return self._same.get(v, v) if isinstance(v, Var) else v

    def _list(
        self, equation: JaxprEqn, inner: dict[Var, Any], origin: int, call: JaxprEqn | None = None
    ) -> None:
        """Appends an equation. A call is replaced by the equations of the function.

        JAX traces a function such as `jnp.var` once. The lines in its equations are those of its
        first call. So the equations get the line of the `call`.
        """

        def read(v: Any) -> Any:
            return self._outer(inner.get(v, v) if isinstance(v, Var) else v)

        invars = [read(v) for v in equation.invars]
        outvars = [inner.get(v, v) for v in equation.outvars]
        closed = _opened(equation)
        if closed is None:
            if invars != equation.invars or outvars != equation.outvars:
                equation = equation.replace(invars=invars, outvars=outvars)
            self._append(equation, origin, call or equation)
            return
        body = closed.jaxpr
        debug_info = getattr(body, "debug_info", None)
        call = None if is_own(getattr(debug_info, "func_filename", None)) else call or equation
        names: dict[Var, Any] = dict(zip(body.invars, invars, strict=True))
        names |= _numbers(body, closed.consts)
        for outer, v in zip(outvars, body.outvars, strict=True):
            if isinstance(outer, DropVar):
                continue
            if isinstance(v, Var) and v not in names:
                names[v] = outer
            else:  # an operand of the call, a number, or a result that is returned twice
                self._same[outer] = names.get(v, v) if isinstance(v, Var) else v
        for each in body.eqns:
            for v in each.outvars:
                if v not in names and type(v) is Var:
                    names[v] = self._new(v.aval)
            self._list(each, names, origin, call)

    def _append(self, equation: JaxprEqn, origin: int, source: JaxprEqn) -> None:
        """Appends an equation, perhaps as several simpler ones."""
        parts = parts_of(equation, self.equation_of)
        items = [Item(equation, origin, source)]
        if parts is not None:
            function, operands = parts
            traced = jax.make_jaxpr(function)(*(v.aval for v in operands))
            equations = self._named(traced, operands, equation.outvars, equation.source_info)
            items = [Item(each, origin, source, equation) for each in equations]
        for item in items:
            self.producer |= dict.fromkeys(item.equation.outvars, len(self.items))
            self.items.append(item)

    def _users(self) -> dict[Var, list[int]]:
        """The equations that use each variable, without those whose results nothing uses."""
        used: dict[Var, list[int]] = {v: [] for v in self.results}
        for i in reversed(range(len(self.items))):
            equation = self.items[i].equation
            if equation.effects or any(v in used for v in equation.outvars):
                for v in {v: None for v in equation.invars if isinstance(v, Var)}:
                    used.setdefault(v, []).append(i)
        return {v: users[::-1] for v, users in used.items() if users}

    def source(self, i: int) -> JaxprEqn:
        """The equation that has the line of the code of an equation of the list."""
        return self.items[i].source

    def as_written(self, v: Any, site: Site) -> Any:
        """The array of the code that is an op's operand `v`, before axes of size 1 are added.

        The op may have the array before a reshape to the rows of the op's output. JAX changes the
        dtype of indices and adds to negative ones. This is undone, too.
        """
        rows, last = _without_ones(site.outputs[0]), v
        while len(inside := [i for i in self.users.get(last, ()) if i in site.region]) == 1:
            equation = self.items[inside[0]].equation
            (last,) = equation.outvars
            name, shape = equation.primitive.name, _without_ones(last)
            if name not in {*_SHAPES, "squeeze", "convert_element_type"}:
                break
            is_new = shape != _without_ones(v) and shape in (rows, [*rows, *shape[-1:]])
            v = last if is_new or name == "squeeze" else v
        while (equation := self.equation_of(v)) is not None and equation.invars:
            name, before = equation.primitive.name, equation.invars[0]
            if name == "select_n":  # where(i < 0, i + n, i)
                before = equation.invars[1]
                other = self.equation_of(equation.invars[2])
                if other is None or other.primitive.name != "add" or other.invars[0] is not before:
                    break
            elif name not in _SHAPES and (name != "convert_element_type" or is_float(v.aval.dtype)):
                break
            if _without_ones(before) != _without_ones(v) or before.aval.ndim > v.aval.ndim:
                break
            if isinstance(before, Literal) or is_float(before.aval.dtype) != is_float(v.aval.dtype):
                break
            v = before
        return v

    def equation_of(self, v: Any) -> JaxprEqn | None:
        """The equation that computes a variable. None for an input or a number."""
        i = self.producer.get(v) if isinstance(v, Var) else None
        return None if i is None else self.items[i].equation

    def number(self, v: Var) -> int:
        """Puts variables in the order of the program."""
        return self.producer[v] if v in self.producer else self._inputs[v]

    def operand_position(self, operands: Iterable[Any]) -> int:
        """The number of the first equation that comes after all operands are computed."""
        known = [v for v in operands if v in self.producer]
        return max((max(self.producer[v] + 1, self.moved.get(v, 0)) for v in known), default=0)

    def rewritten(self, sites: Sequence[Site], changed: dict[int, JaxprEqn]) -> Jaxpr:
        """The jaxpr with ops in place of the sites' equations.

        Args:
          sites: what to replace.
          changed: equations by number. They have the variables of the equations that they replace.
        """
        removed = frozenset(i for site in sites for i in site.region)
        touched = {self.items[i].origin for i in removed | changed.keys()}
        gone = {v for i in removed for v in self.items[i].equation.outvars}
        gone -= {v for site in sites for v in site.outputs}
        # Nothing needs what is computed from a removed value, but a call may have it as an operand.
        for i, item in enumerate(self.items):
            operands = {v for v in item.equation.invars if isinstance(v, Var)}
            if i not in removed and operands & gone:
                gone.update(item.equation.outvars)
        # A call whose unused results would need a removed value. Its other equations are kept.
        touched |= {
            i
            for i, equation in enumerate(self.jaxpr.eqns)
            if any(v in gone for v in map(self._outer, equation.invars) if isinstance(v, Var))
        }
        # Equations are written in parts if a site replaces a part or uses the result of one.
        operands = {v for site in sites for v in site.operands}
        divided = {
            id(item.whole)
            for i, item in enumerate(self.items)
            if item.whole is not None
            and (i in removed or operands & {*item.equation.outvars} - {*item.whole.outvars})
        }
        by_position: dict[int, list[Site]] = {}
        for site in sites:
            by_position.setdefault(site.at, []).append(site)
        equations: list[JaxprEqn] = []
        written: set[int] = set()
        for i, item in enumerate(self.items):
            for site in by_position.get(i, ()):
                equations += site.equations
            if item.origin not in touched:
                if item.origin not in written:
                    written.add(item.origin)
                    equations.append(self._original(item.origin))
            elif item.whole is not None and id(item.whole) not in divided:
                if item.equation.outvars == item.whole.outvars:
                    equations.append(item.whole)
            elif i not in removed:
                equations.append(changed.get(i, item.equation))
        for site in by_position.get(len(self.items), ()):
            equations += site.equations
        return self.jaxpr.replace(eqns=_needed(equations, self.outvars), outvars=self.outvars)

    def _original(self, origin: int) -> JaxprEqn:
        equation = self.jaxpr.eqns[origin]
        invars = [self._outer(v) for v in equation.invars]
        return equation if invars == equation.invars else equation.replace(invars=invars)

    def with_equations(self, site: Site) -> Site:
        """The site with the equations of its op, which have the site's variables."""
        types = tuple(v.aval for v in site.operands)
        key = site.key and (site.key, types, tuple(v.aval for v in site.outputs))
        traced = self._traced.get(key)
        if traced is None:
            # Inside `jax.sharding.auto_axes`, the types have another mesh than the caller.
            with jax.sharding.use_abstract_mesh(site.outputs[0].aval.sharding.mesh):
                traced = jax.make_jaxpr(functools.partial(_shaped, site))(*types)
            if traced.consts:
                raise ValueError(f"jax_gradops.fuse: {site.op} has constants")
            if key:
                self._traced[key] = traced
        source = self.source(self.producer[site.outputs[0]]).source_info
        found = self._named(traced, site.operands, site.outputs, source)
        return dataclasses.replace(site, equations=tuple(found))

    def _named(
        self, traced: ClosedJaxpr, operands: Sequence[Any], results: Sequence[Any], source: Any
    ) -> list[JaxprEqn]:
        """The equations of a function, with this program's variables."""
        names: dict[Any, Any] = dict(zip(traced.jaxpr.invars, operands, strict=True))
        names |= dict(zip(traced.jaxpr.outvars, results, strict=True))
        found = []
        for equation in traced.jaxpr.eqns:
            for v in equation.outvars:
                if not isinstance(v, DropVar) and v not in names:
                    names[v] = self._new(v.aval)  # not the variable of another site
            invars = [names[v] if isinstance(v, Var) else v for v in equation.invars]
            outvars = [names.get(v, v) for v in equation.outvars]
            found.append(equation.replace(invars=invars, outvars=outvars, source_info=source))
        return found


def _without_ones(v: Any) -> list[int]:
    return [n for n in v.aval.shape if n != 1]


def _shaped(site: Site, *operands: jax.Array) -> list[jax.Array]:
    """The outputs of an op in their variables' types.

    A loss may have one more axis of size 1. A float32 norm whose users round it may be bfloat16.
    On an Explicit mesh, a loss is sharded as its labels are.
    """
    found = zip(jax.tree.leaves(site.call(*operands)), site.outputs, strict=True)
    return [like_type(y.reshape(v.aval.shape).astype(v.aval.dtype), v.aval) for y, v in found]


def _numbers(jaxpr: Jaxpr, consts: Sequence[Any] | None) -> dict[Var, Literal]:
    """The constants that are numbers, such as an epsilon that the traced function closes over."""
    return {
        v: Literal(np.asarray(value)[()], v.aval)
        for v, value in zip(jaxpr.constvars, consts or (), strict=consts is not None)
        if _is_number(value)
    }


def _is_number(value: Any) -> bool:
    """Whether an array can be replaced by a number: no result's device or dtype depends on it."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array) or np.ndim(value):
        return False
    if isinstance(value, jax.core.Tracer) or not is_float(value.dtype):
        return False
    return not isinstance(value, jax.Array) or not (value.committed or value.weak_type)


def _opened(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The body of an inner function whose equations may be listed in place of the call."""
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
        return None
    closed = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    if not isinstance(closed, ClosedJaxpr) or equation.effects:
        return None
    if not all(map(_is_number, closed.consts)):
        return None
    params = equation.params
    specified = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(type(s).__name__ != "UnspecifiedValue" for s in specified):
        return None
    if any(params.get("donated_invars", ())) or params.get("compiler_options_kvs"):
        return None
    return closed if 0 < _size(closed.jaxpr) <= _OPENED else None


def _size(jaxpr: Jaxpr) -> int:
    """The number of equations, with those of inner functions. Too large if one is not opened."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in _CLOSED:
            return _OPENED + 1
        inner = equation.params.get("jaxpr")
        total += _size(inner.jaxpr) if isinstance(inner, ClosedJaxpr) else 1
        if total > _OPENED:
            break
    return total


def _needed(equations: list[JaxprEqn], outvars: Sequence[Any]) -> list[JaxprEqn]:
    """Without equations whose results nothing uses."""
    used = {v for v in outvars if isinstance(v, Var)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or any(v in used for v in equation.outvars):
            kept.append(equation)
            used.update(v for v in equation.invars if isinstance(v, Var))
    return kept[::-1]
