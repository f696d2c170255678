"""Puts ops into a jaxpr and into the jaxprs of its inner functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from jax_gradops._fuse.find import Finder
from jax_gradops._fuse.program import Program
from jax_gradops._fuse.report import Report
from jax_gradops._implementation import default_implementation

# Primitives whose inner jaxprs are searched. The derivative of a custom_vjp or custom_jvp function
# is its author's: these are left as they are.
_SEARCHED = {"jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "remat2"}
_SEARCHED |= {"checkpoint", "shard_map"}


class _Inner(NamedTuple):
    """What the search made of an inner function.

    Attributes:
      after: the function with ops. None if nothing was found.
      report: what was found.
    """

    after: Jaxpr | ClosedJaxpr | None
    report: Report


# What earlier traces made of inner functions, as long as JAX keeps these, by implementation. JAX
# compiles a loop again if its function is another object, even if an equal one.
_kept: WeakKeyDictionary[Jaxpr | ClosedJaxpr, dict[Any, _Inner]] = WeakKeyDictionary()


class Rewriter:
    """Puts ops into a jaxpr and its inner jaxprs, in one pass of the search."""

    def __init__(self) -> None:
        self.report = Report()
        self._inner: dict[Jaxpr | ClosedJaxpr, _Inner] = {}

    def keep(self) -> None:
        """Later traces take the inner functions as they are now. Call it if no search failed."""
        for function, inner in self._inner.items():
            if not inner.report.failed:
                _kept.setdefault(function, {})[default_implementation()] = inner

    def rewritten(self, jaxpr: Jaxpr, consts: Sequence[Any] | None = None) -> Jaxpr:
        """The jaxpr with ops. It is the same object if nothing was found.

        Args:
          jaxpr: a function.
          consts: the values of the function's constants, if they are known.
        """
        if jaxpr.eqns:
            with self.report.guard("function", jaxpr.eqns[0]):
                return self._with_ops(jaxpr, consts)
        return jaxpr

    def _with_ops(self, jaxpr: Jaxpr, consts: Sequence[Any] | None) -> Jaxpr:
        program = Program(jaxpr, consts)
        sites = Finder(program, self.report).run()
        replaced = {i for site in sites for i in site.region}
        changed: dict[int, JaxprEqn] = {}
        for i, item in enumerate(program.items):
            if item.equation.primitive.name in _SEARCHED and i not in replaced:
                inner = item.equation
                if item.equation.primitive.name == "shard_map":
                    with self.report.guard("shard_map", program.source(i)):
                        inner = self._shard_map(item.equation)
                else:
                    inner = self._call(item.equation)
                if inner is not item.equation:
                    changed[i] = inner
        if not sites and not changed:
            return jaxpr
        new = program.rewritten(sites, changed)
        _check_order(new)
        return new

    def _call(self, equation: JaxprEqn) -> JaxprEqn:
        """The equation with ops in its inner jaxprs."""
        params = {name: self._changed(value) for name, value in equation.params.items()}
        if all(params[name] is value for name, value in equation.params.items()):
            return equation
        return equation.replace(params=params)

    def _changed(self, value: Any) -> Any:
        """A parameter of an equation, with ops in its jaxprs."""
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self._function(value)
        if isinstance(value, tuple) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
            new = tuple(map(self._changed, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value

    def _function(self, before: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
        """An inner function with ops, searched once for all its calls and traces."""
        inner = self._inner.get(before) or _kept.get(before, {}).get(default_implementation())
        if inner is None:
            outer, self.report = self.report, Report()
            if isinstance(before, Jaxpr):
                after = jaxpr = self.rewritten(before)
            else:
                jaxpr = self.rewritten(before.jaxpr, before.consts)
                after = ClosedJaxpr(jaxpr, before.consts)
            found = jaxpr is not (before if isinstance(before, Jaxpr) else before.jaxpr)
            inner = _Inner(after if found else None, self.report)
            self.report = outer
        self._inner[before] = inner
        self.report.add(inner.report)
        return inner.after or before

    def _shard_map(self, equation: JaxprEqn) -> JaxprEqn:
        """The equation of a shard_map. Its function is traced with the mesh's axes."""
        params = equation.params
        jaxpr = params["jaxpr"]
        changed = False

        def body(*arrays: jax.Array) -> Any:
            nonlocal changed
            new = self.rewritten(jaxpr)
            changed = new is not jaxpr
            return tuple(jaxpr_as_fun(ClosedJaxpr(new, ()))(*arrays))

        function = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        traced = jax.make_jaxpr(function)(*(v.aval for v in equation.invars))
        if not changed or traced.consts or len(traced.eqns) != 1:
            return equation
        return equation.replace(params=traced.eqns[0].params)


def _check_order(jaxpr: Jaxpr) -> None:
    """Raises an error if an equation uses a value before it is computed."""
    known = {*jaxpr.constvars, *jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(v not in known for v in equation.invars if isinstance(v, Var)):
            raise RuntimeError(f"{equation.primitive} uses a value before it is computed")
        known.update(equation.outvars)
    if any(v not in known for v in jaxpr.outvars if isinstance(v, Var)):
        raise RuntimeError("a result is not computed")
