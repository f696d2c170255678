"""Calls of layer and RMS norm with options, compared with the oracle of the flattened problem."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from comparing import OPTIMIZED, accum, assert_matches, widen

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops._ops.all import SPECS


class Problem(NamedTuple):
    """One call of an op and of its gradient."""

    op: str
    dy: Any  # a pair, if the op returns a sum too
    parameters: dict[str, Any]
    options: dict[str, Any]


def problem(
    op: str,
    dy: Any,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    residual: Any = None,
    residual_bias: Any = None,
    **options: Any,
) -> Problem:
    given = {"x": x, "residual": residual, "residual_bias": residual_bias, "scale": scale}
    given |= {"bias": bias} if SPECS[op].forms[0].parameters == 2 else {}
    return Problem(op, dy, {k: v for k, v in given.items() if v is not None}, options)


def run(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """y and the gradients of all parameters of each problem, in one program."""

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def f(operands: Any) -> Any:
        results = []
        for p, (dy, parameters) in zip(problems, operands, strict=True):
            op = functools.partial(getattr(jax_gradops, p.op), **p.options)
            y, pull = jax.vjp(lambda given, op=op: op(**given), parameters)
            ys = dict(zip(("y", "sum"), y, strict=True)) if isinstance(y, tuple) else {"y": y}
            results.append(ys | pull(dy)[0])
        return results

    return f([(p.dy, p.parameters) for p in problems])


def check(*problems: Problem) -> None:
    """Compares y and all gradients with the oracle of the flattened problem."""
    for p, results in zip(problems, run(problems), strict=True):
        x = p.parameters["x"]
        for name, reference in references(p).items():
            like = p.parameters.get(name, x)
            # For a parameter of the last axis only.
            extra = tuple(range(reference.value.ndim - like.ndim))
            value, magnitude = reference.value.sum(extra), reference.magnitude.sum(extra)
            reference = oracles.Reference(value, magnitude)
            what = f"{p.op}, {x.dtype}{list(x.shape)}, {p.options}: {name}"
            assert_matches(results[name], reference, like.dtype, accum(x.dtype), what)


def references(p: Problem) -> dict[str, oracles.Reference]:
    x, options = p.parameters["x"], p.options
    begin = options.get("begin_norm_axis", -1) % x.ndim
    inner = x.shape[begin:]
    flat = (math.prod(x.shape[:begin]), math.prod(inner))
    scale, bias = (
        np.broadcast_to(widen(p.parameters[name]), inner).reshape(-1)
        if name in p.parameters
        else None
        for name in ("scale", "bias")
    )
    form = SPECS[p.op].forms[0]
    settings = {k: options[k] for k in ("epsilon", "scale_offset") if k in options}
    adds = form.arrays == 2
    cotangents = jax.tree.map(lambda a: widen(a).reshape(flat), p.dy)
    given = (p.parameters.get(name) for name in ("residual", "residual_bias"))
    total = exact_sum(x, *given) if adds else x
    arrays = [widen(total).reshape(flat), 0.0][: form.arrays]
    y, *sums = form.expected(*arrays, scale, bias, **settings)
    dx, *_, dscale, dbias = form.expected_gradients(cotangents, *arrays, scale, bias, **settings)
    shapes = {"y": (y, x.shape), "x": (dx, x.shape)}
    if adds:
        shapes |= {"sum": (sums[0], x.shape), "residual": (dx, x.shape)}
    columns = {"scale": dscale, "bias": dbias, "residual_bias": oracles.over_rows(dx)}
    shapes |= {name: (r, inner) for name, r in columns.items() if name in p.parameters}
    return {
        name: oracles.Reference(r.value.reshape(shape), r.magnitude.reshape(shape))
        for name, (r, shape) in shapes.items()
    }


def example(rng: Any, shape: Any, dtype: Any = np.float32, inner: Any = None) -> list[Any]:
    """dy, x, scale and bias."""
    inner = shape[-1:] if inner is None else inner
    dy, x = 0.3 + rng.standard_normal(shape), 0.5 + 1.5 * rng.standard_normal(shape)
    scale, bias = 1 + 0.5 * rng.standard_normal(inner), rng.standard_normal(inner)
    return [a.astype(dtype) for a in (dy, x, scale, bias)]


def normal(rng: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (0.5 + 1.5 * rng.standard_normal(shape)).astype(dtype)


def exact_sum(x: Any, residual: Any, bias: Any = None) -> np.ndarray:
    """The sum x + (residual + bias) in the order of the formula, rounded once."""
    wide = accum(x.dtype)
    update = residual.astype(wide) + np.asarray(0 if bias is None else bias).astype(wide)
    return (x.astype(wide) + update).astype(x.dtype)
