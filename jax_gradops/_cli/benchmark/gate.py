"""Whether results are right: all of them against float64 on the device, some rows against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops._cli.benchmark import formulas, peers
from jax_gradops._cli.benchmark.cases import Case
from jax_gradops._cli.benchmark.peers import Inputs

NUMPY_ROWS = 8
# How much less exact than ours the sums of others may be; still right, as far as a user can tell.
SLACK_OF_OTHERS = 16.0


@functools.cache
def program(case: Case, device: Any) -> Any:
    """From results and arguments, for each result the largest error and the largest value.

    In float64; followed by some rows of the first result, and of the arguments.
    """
    oracle = case.operation.oracle[case.direction]
    rows = np.unique(np.linspace(0, case.shape[0] - 1, NUMPY_ROWS).astype(int))

    def errors(results: Sequence[jax.Array], arguments: Sequence[jax.Array]) -> Any:
        found = []
        wide = [a.astype(jnp.float64) for a in arguments]
        for got, want in zip(results, oracle(jnp, *wide), strict=True):
            difference = jnp.abs(got.astype(jnp.float64) - want)
            found.append((jnp.max(difference), jnp.max(jnp.abs(want))))
        return (
            found,
            results[0][rows] if results[0].ndim == 2 else results[0],
            [a[rows] if a.ndim == 2 else a for a in arguments],
        )

    arrays, parameters = peers.input_types(case)
    results = [arrays[0], *parameters] if case.direction == "bwd" else [arrays[0]]
    if case.op == "global_norm":
        results = [jax.ShapeDtypeStruct((), formulas.wide_dtype(case.dtype))]
    with peers.scope(device):
        return jax.jit(errors).lower(results, [*arrays, *parameters]).compile()


def _tolerance(case: Case, dtype: Any, rank: int, slack: float) -> float:
    """Roundings to the result's dtype, in it or on the way, and a sum in the accumulation dtype."""
    accum = formulas.wide_dtype(case.dtype)
    sums = (64 if rank == 2 else 1024) * float(jnp.finfo(accum).eps)
    return 2 * float(jnp.finfo(dtype).eps) + slack * sums


def mistakes(
    case: Case, device: Any, inputs: Inputs, results: Sequence[jax.Array], slack: float = 1.0
) -> tuple[str, float]:
    """What is wrong with the first call's results, if anything, and the largest error.

    An error is a fraction of the result's largest value. `slack` multiplies what sums may be off.
    """
    x, *dy = inputs.calls[0]
    names = ["dx", "dscale", "dbias"] if dy else ["y"]
    checked = program(case, device)
    types = checked.in_avals[0][0]
    if [r.shape for r in results] != [t.shape for t in types]:
        return f"results have shapes {', '.join(str(r.shape) for r in results)}", float("nan")
    if results[0].dtype != types[0].dtype:
        return f"{names[0]} has dtype {results[0].dtype}", float("nan")
    # Others may give parameters' gradients in x's dtype. Copied, as XLA's command buffers copy no
    # memory that PyTorch has allocated (jax 0.11: CUDA_ERROR_INVALID_VALUE).
    cast = [jnp.copy(r).astype(t.dtype) for r, t in zip(results, types, strict=True)]
    found, got, arguments = jax.device_get(checked(cast, [*dy, x, *inputs.parameters]))
    errors = [(n, r, f) for n, r, f in zip(names, results, found, strict=False)]
    if case.operation.row_wise:
        wide = [a.astype(np.float64) for a in arguments]
        want = case.operation.oracle[case.direction](np, *wide)[0]
        difference = np.max(np.abs(got.astype(np.float64) - want))
        errors.append((f"{names[0]} (NumPy)", results[0], (difference, np.max(np.abs(want)))))
    worst = 0.0
    for name, result, (error, largest) in errors:
        relative = float(error) / max(float(largest), 1e-30)
        if not relative <= _tolerance(case, result.dtype, result.ndim, slack):  # NaN as well
            return f"{name} is off by {relative:.1e} of its largest value", relative
        worst = max(worst, relative)
    return "", worst
