"""Checks results: all against float64 on the device.

Slices of this library's first result are also checked against NumPy. NumPy shows that the device's
float64 is right. It takes seconds for a large slice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops._tools.bench import formulas, peers
from jax_gradops._tools.bench.cases import Case
from jax_gradops._tools.bench.peers import Inputs

# The most slices and elements that NumPy checks.
NUMPY_SLICES = 8
NUMPY_ELEMENTS = 2**21
# The sums of other peers may have errors this number of times larger than ours. A user would still
# call them right.
SLACK_OF_OTHERS = 16.0
# The argument of relu is undecided if its absolute value is below this fraction of its terms.
# Rounding may change its sign, because PyTorch adds a residual in 16 bits.
_UNDECIDED = 2**-7


@functools.cache
def program(case: Case, device: Any) -> Any:
    """A program that maps results and arguments to the largest error and value of each result.

    The program computes in float64. It also returns some slices of the first result and of the
    arguments.
    """

    def errors(results: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> Any:
        found = []
        wide = [a.astype(jnp.float64) for a in arguments]
        for got, want in zip(results, _expected(case, *wide), strict=True):
            found.append(_error(jnp, got.astype(jnp.float64), want))
        parameters = case.operation.form.parameters
        return found, _slices(case, results[:1]), _slices(case, arguments, parameters)

    arrays, parameters = peers.input_types(case)
    with peers.scope(device):
        results = [*arrays[1:], *parameters]
        if case.direction == "fwd":
            results = jax.tree.leaves(jax.eval_shape(case.operation.ours, *arrays, *parameters))
        return jax.jit(errors).lower(results, [*arrays, *parameters]).compile()


def _expected(case: Case, *arguments: Any) -> list[Any]:
    """The results in float64, from the operands; backward dy is before them.

    A gradient is NaN where rounding decides whether relu's argument is positive.
    """
    form, options = case.operation.form, case.operation.options
    if case.direction == "fwd":
        return [r.value for r in form.expected(*arguments, **options)]
    dy, *operands = arguments
    found = [r.value for r in form.expected_gradients(dy, *operands, **options)]
    plain = {"relu": False} if options.get("relu") else {"activation": None}
    if options.get("relu") or options.get("activation") == "relu":
        (z,) = form.expected(*operands, **options | plain)
        decided = abs(z.value) > _UNDECIDED * z.magnitude
        where = decided.__array_namespace__().where
        found[: form.arrays] = [where(decided, a, np.nan) for a in found[: form.arrays]]
    return found


def _error(xp: Any, got: Any, want: Any) -> tuple[Any, Any]:
    """The largest error, and the largest value. Where `want` is NaN, any finite number is right."""
    difference = xp.where(xp.isnan(want), xp.where(xp.isfinite(got), 0, xp.nan), got - want)
    return xp.max(abs(difference)), xp.nanmax(abs(want))


def _slices(case: Case, arrays: Sequence[jax.Array], parameters: int = 0) -> list[jax.Array]:
    """A few slices along the axis whose slices are independent.

    Empty if there is no such axis, or if its slices are too large. The last `parameters` arrays
    have a number per feature or channel.
    """
    operation = case.operation
    if operation.apart is None:
        return []
    slices = case.shape[operation.apart]
    count = min(NUMPY_SLICES, NUMPY_ELEMENTS * slices // math.prod(case.shape))
    if count == 0:
        return []
    chosen = np.unique(np.linspace(0, slices - 1, count).astype(int))

    arrays, numbers = arrays[: len(arrays) - parameters], arrays[len(arrays) - parameters :]
    cut = [jnp.take(array, chosen, operation.apart) for array in arrays]
    return [*cut, *(a[chosen] if operation.apart == operation.axis else a for a in numbers)]


def _tolerance(case: Case, result: jax.Array, is_ours: bool) -> float:
    """The allowed error: roundings to the result's dtype, and a sum in the accumulation dtype.

    Other peers may round any result to x's dtype on the way.
    """
    accum = formulas.wide_dtype(case.dtype)
    sums = (64 if result.ndim > 1 else 1024) * float(jnp.finfo(accum).eps)
    roundings = 2 * float(jnp.finfo(result.dtype if is_ours else case.dtype).eps)
    return roundings + (1 if is_ours else SLACK_OF_OTHERS) * sums


def mistakes(
    case: Case, device: Any, inputs: Inputs, results: Sequence[jax.Array], is_ours: bool
) -> tuple[str, float]:
    """The mistake in the first call's results, if there is any, and the largest error.

    An error is a fraction of the result's largest value.
    """
    names = ["y"]
    if case.direction == "bwd":
        names = [*["dx", "dresidual"][: case.operation.form.arrays], "dscale", "dbias"]
    checked = program(case, device)
    types = checked.in_avals[0][0]
    if [r.shape for r in results] != [t.shape for t in types]:
        return f"results have shapes {', '.join(str(r.shape) for r in results)}", float("nan")
    if results[0].dtype != types[0].dtype:
        return f"{names[0]} has dtype {results[0].dtype}", float("nan")
    # Other peers may return gradients of parameters in x's dtype. Results are copied, because XLA's
    # command buffers cannot copy memory that PyTorch has allocated (jax 0.11:
    # CUDA_ERROR_INVALID_VALUE).
    cast = [jnp.copy(r).astype(t.dtype) for r, t in zip(results, types, strict=True)]
    found, got, arguments = checked(cast, [*inputs.calls[0], *inputs.parameters])
    errors = [(n, r, f) for n, r, f in zip(names, results, jax.device_get(found), strict=False)]
    if got and is_ours:
        got, arguments = jax.device_get((got, arguments))
        got, *wide = (a.astype(np.float64) for a in (*got, *arguments))
        want = _expected(case, *wide)[0]
        errors.append((f"{names[0]} (NumPy)", results[0], _error(np, got, want)))
    worst = 0.0
    for name, result, (error, largest) in errors:
        relative = float(error) / max(float(largest), 1e-30)
        if not relative <= _tolerance(case, result, is_ours):  # NaN fails too
            return f"{name} is off by {relative:.1e} of its largest value", relative
        worst = max(worst, relative)
    return "", worst
