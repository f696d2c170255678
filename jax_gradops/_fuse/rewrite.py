"""Puts ops into a jaxpr and into the jaxprs of its inner functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from jax_gradops._fuse.find import Finder
from jax_gradops._fuse.program import Program
from jax_gradops._fuse.report import Report

# Primitives whose inner jaxprs are searched. The derivative of a custom_vjp or custom_jvp function
# is its author's: these are left as they are.
_SEARCHED = {"jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "remat2"}
_SEARCHED |= {"checkpoint", "shard_map"}


def rewritten(
    jaxpr: Jaxpr, report: Report, done: dict[Any, Jaxpr], consts: Sequence[Any] | None = None
) -> Jaxpr:
    """The jaxpr with ops. It is the same object if nothing was found.

    Args:
      jaxpr: a function.
      report: collects what is found.
      done: the results so far, by the identities of jaxprs and constants.
      consts: the values of the function's constants, if they are known.
    """
    key = (id(jaxpr), *map(id, consts or ()))
    if key in done:
        return done[key]
    done[key] = jaxpr
    if not jaxpr.eqns:
        return jaxpr
    with report.guard("function", jaxpr.eqns[0]):
        done[key] = _with_ops(jaxpr, report, done, consts)
    return done[key]


def _with_ops(
    jaxpr: Jaxpr, report: Report, done: dict[Any, Jaxpr], consts: Sequence[Any] | None
) -> Jaxpr:
    program = Program(jaxpr, consts)
    sites = Finder(program, report).run()
    replaced = {i for site in sites for i in site.region}
    changed: dict[int, JaxprEqn] = {}
    for i, item in enumerate(program.items):
        if item.equation.primitive.name in _SEARCHED and i not in replaced:
            inner = item.equation
            if item.equation.primitive.name == "shard_map":
                with report.guard("shard_map", program.source(i)):
                    inner = _shard_map(item.equation, report, done)
            else:
                inner = _inner(item.equation, report, done)
            if inner is not item.equation:
                changed[i] = inner
    if not sites and not changed:
        return jaxpr
    new = program.rewritten(sites, changed)
    _check_order(new)
    return new


def _check_order(jaxpr: Jaxpr) -> None:
    """Raises an error if an equation uses a value before it is computed."""
    known = {*jaxpr.constvars, *jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(v not in known for v in equation.invars if isinstance(v, Var)):
            raise RuntimeError(f"{equation.primitive} uses a value before it is computed")
        known.update(equation.outvars)
    if any(v not in known for v in jaxpr.outvars if isinstance(v, Var)):
        raise RuntimeError("a result is not computed")


def _inner(equation: JaxprEqn, report: Report, done: dict[Any, Jaxpr]) -> JaxprEqn:
    """The equation with ops in its inner jaxprs."""

    def change(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            jaxpr = rewritten(value.jaxpr, report, done, value.consts)
            return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
        if isinstance(value, Jaxpr):
            return rewritten(value, report, done)
        if isinstance(value, tuple) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
            new = tuple(map(change, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value

    params = {name: change(value) for name, value in equation.params.items()}
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)


def _shard_map(equation: JaxprEqn, report: Report, done: dict[Any, Jaxpr]) -> JaxprEqn:
    """The equation of a shard_map with ops in its function. It is traced with the mesh's axes."""
    params = equation.params
    jaxpr = params["jaxpr"]
    changed = False

    def body(*arrays: jax.Array) -> Any:
        nonlocal changed
        new = rewritten(jaxpr, report, done)
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
