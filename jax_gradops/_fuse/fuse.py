"""`jax_gradops.fuse`."""

from __future__ import annotations

import functools
import sys
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
_SEARCHED |= {"checkpoint", "shard_map"}


def fuse(function: F, *, report: Callable[[FuseSummary], Any] | None = None) -> F:
    if not callable(function):
        raise TypeError(f"fuse: function must be callable, got {type(function).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"fuse: report must be callable or None, got {type(report).__name__}")

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if "flax.nnx" in sys.modules:
            from jax_gradops._flax import nnx_state

            modules = nnx_state.modules_in((args, kwargs))
            if modules:
                run = functools.partial(_run, report=report)
                return nnx_state.call(run, function, modules, args, kwargs)
        return _run(function, args, kwargs, report)

    return fused  # pyright: ignore[reportReturnType]


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    report: Callable[[FuseSummary], Any] | None,
) -> Any:
    """Traces a function, puts ops in, and runs it."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    traced = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    results: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        rest = iter(given)
        full = [next(rest) if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, full)
        found, out_structure = jax.tree.flatten(function(*args, **kwargs))
        results[:] = [(None if _is_array(v) else v, _is_array(v)) for v in found], out_structure
        return [v for v in found if _is_array(v)]

    closed = jax.make_jaxpr(flat)(*arrays)
    found = Report()
    rewritten = _rewritten(closed.jaxpr, found, {})
    if report is not None:
        report(found.summary())
    computed = iter(jaxpr_as_fun(ClosedJaxpr(rewritten, closed.consts))(*arrays))
    others, out_structure = results
    return jax.tree.unflatten(
        out_structure, [next(computed) if is_array else v for v, is_array in others]
    )


def _is_array(leaf: Any) -> bool:
    """Whether a value is traced. Python's numbers stay what they are."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


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
            change = _shard_map if item.equation.primitive.name == "shard_map" else _inner
            inner = change(item.equation, report, done)
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


def _shard_map(equation: JaxprEqn, report: Report, done: dict[int, Jaxpr]) -> JaxprEqn:
    """The equation of a shard_map with ops in its function. It is traced with the mesh's axes."""
    params = equation.params
    jaxpr = params["jaxpr"]
    changed = False

    def body(*arrays: jax.Array) -> Any:
        nonlocal changed
        rewritten = _rewritten(jaxpr, report, done)
        changed = rewritten is not jaxpr
        return tuple(jaxpr_as_fun(ClosedJaxpr(rewritten, ()))(*arrays))

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
