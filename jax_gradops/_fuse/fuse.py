"""`jax_gradops.fuse`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jax_gradops._fuse.find import Finder
from jax_gradops._fuse.program import Program
from jax_gradops._fuse.report import FuseSummary, Report

F = TypeVar("F", bound=Callable[..., Any])
# Primitives whose inner jaxprs are searched. The derivative of a custom_vjp or custom_jvp function
# is its author's: these are left as they are.
_SEARCHED = {"jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "remat2"}
_SEARCHED |= {"checkpoint"}


def fuse(function: F, *, report: Callable[[FuseSummary], Any] | None = None) -> F:
    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
        results: list[Any] = []

        def flat(*given: Any) -> list[Any]:
            rest = iter(given)
            full = [next(rest) if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, full)
            out, out_structure = jax.tree.flatten(function(*args, **kwargs))
            is_array = [isinstance(v, (jax.Array, np.ndarray, np.generic)) for v in out]
            results[:] = [out_structure, is_array, out]
            return [v for v, a in zip(out, is_array, strict=True) if a]

        closed = jax.make_jaxpr(flat)(*arrays)
        found = Report()
        rewritten = _rewritten(closed.jaxpr, found, {})
        if report is not None:
            report(found.summary())
        computed = iter(jaxpr_as_fun(ClosedJaxpr(rewritten, closed.consts))(*arrays))
        out_structure, is_array, out = results
        return jax.tree.unflatten(
            out_structure, [next(computed) if a else v for v, a in zip(out, is_array, strict=True)]
        )

    return fused  # pyright: ignore[reportReturnType]


def _rewritten(jaxpr: Jaxpr, report: Report, done: dict[int, Jaxpr]) -> Jaxpr:
    """The jaxpr with ops. It is the same object if nothing was found."""
    if id(jaxpr) in done:
        return done[id(jaxpr)]
    program = Program(jaxpr)
    sites = Finder(program, report).run()
    replaced = {i for site in sites for i in site.region}
    changed: dict[int, JaxprEqn] = {}
    for i, item in enumerate(program.items):
        if item.equation.primitive.name in _SEARCHED and i not in replaced:
            inner = _inner(item.equation, report, done)
            if inner is not item.equation:
                changed[i] = inner
    done[id(jaxpr)] = program.rewritten(sites, changed) if sites or changed else jaxpr
    return done[id(jaxpr)]


def _inner(equation: JaxprEqn, report: Report, done: dict[int, Jaxpr]) -> JaxprEqn:
    """The equation with ops in its inner jaxprs."""

    def change(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            jaxpr = _rewritten(value.jaxpr, report, done)
            return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
        if isinstance(value, Jaxpr):
            return _rewritten(value, report, done)
        if isinstance(value, tuple) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
            new = tuple(map(change, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value

    params = {name: change(value) for name, value in equation.params.items()}
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)
