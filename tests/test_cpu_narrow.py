"""Rows of few columns, and groups of few elements. The CPU's kernels put several in a register."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, widen

import jax_gradops
from jax_gradops import _registry

# Below, at and above a register's width. The last one is the largest that shares registers.
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 63, 64)
DTYPES = ("float16", "bfloat16", "float32", "float64")
LEVELS = _registry.MODULES["cpu"].cpu_levels


@functools.partial(jax.jit, static_argnames=("op", "implementation"))
def value_and_gradients(op: str, implementation: str, x: Any, dy: Any, *parameters: Any) -> Any:
    function = functools.partial(getattr(jax_gradops, op), implementation=implementation)
    y, vjp = jax.vjp(function, x, *parameters)
    return y, *vjp(dy.astype(y.dtype))


def arrays(rng: Any, shape: tuple[int, ...], dtype: Any, parameters: tuple[int, ...]) -> Any:
    # Neighbouring elements are far apart, because small differences would have few correct digits.
    apart = 3 * (-1.0) ** np.arange(shape[-1])
    x, dy = (jnp.asarray(rng.uniform(-1, 1, shape) + 2 + apart, dtype) for _ in range(2))
    return x, dy, *(jnp.asarray(rng.standard_normal(parameters), jnp.float32) for _ in range(2))


def assert_near_float64(op: str, given: Any, results: Any, what: str, in_axes: Any = None) -> None:
    """Checks that errors are below 16 roundings of each result's largest value."""
    wide = [jnp.asarray(widen(a)) for a in given]
    reference: Any = functools.partial(value_and_gradients, op, "xla")
    expected = (reference if in_axes is None else jax.vmap(reference, in_axes))(*wide)
    for name, got, want in zip(("y", "dx", "dscale", "dbias"), results, expected, strict=False):
        want = np.asarray(want)
        unit = float(jnp.finfo(given[0].dtype if name in ("y", "dx") else got.dtype).eps)
        limit = 16 * max(unit, 1e-7 if got.dtype != jnp.float64 else 0) * (np.abs(want).max() + 1)
        np.testing.assert_allclose(widen(got), want, rtol=0, atol=limit, err_msg=f"{what}: {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms(op: str, dtype: str, rng: Any) -> None:
    for n in WIDTHS:
        given = arrays(rng, (37, n), dtype, (n,))[: 4 if op == "layer_norm" else 3]
        results = value_and_gradients(op, "ffi", *given)
        if n == 1:  # with one column, dx holds only rounding errors
            results = results[:1]
        assert_near_float64(op, given, results, f"{op} of {n} columns")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15, 16, 17])
def test_norms_of_groups_with_their_own_parameters(rows: int, rng: Any) -> None:
    """Neighbouring rows belong to several groups, or some lanes have no row."""
    for n in (2, 5, 64):
        given = arrays(rng, (21, rows, n), jnp.float32, (21, n))
        f = functools.partial(value_and_gradients, "layer_norm", "ffi")
        results = jax.vmap(f)(*given)
        assert_near_float64("layer_norm", given, results, f"{rows} rows of {n}", in_axes=0)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_row_does_not_depend_on_others(op: str, rng: Any) -> None:
    for n in WIDTHS:
        x, dy, scale, bias = arrays(rng, (50, n), jnp.float32, (n,))
        parameters = (scale, bias)[: 2 if op == "layer_norm" else 1]
        y, dx, *_ = value_and_gradients(op, "ffi", x, dy, *parameters)
        poisoned = x.at[::2].set(jnp.nan)
        for rows, some in ((slice(3, 4), x), (slice(7, 29), x), (slice(1, None, 2), poisoned)):
            other = value_and_gradients(
                op,
                "ffi",
                *((poisoned, dy) if some is poisoned else (x[rows], dy[rows])),
                *parameters,
            )
            mine = slice(1, None, 2) if some is poisoned else slice(None)
            for all_rows, few in ((y, other[0]), (dx, other[1])):
                assert_bitwise_equal(np.asarray(all_rows)[rows], np.asarray(few)[mine], f"{op} {n}")


def test_hard_rows_side_by_side() -> None:
    """Constant rows are exact, large means keep digits, squares may leave float32's range."""
    for n in WIDTHS:
        x = np.tile(np.linspace(-1, 1, n), (20, 1)).astype(np.float32)
        x[3] = 1e30
        x[4] = 12345.678
        x[5] += 3000 + np.linspace(0, 1, n) ** 3  # the mean is not a float32 number
        x[6] = np.nan
        bias = jnp.arange(n, dtype=jnp.float32)
        y = np.asarray(jax_gradops.layer_norm(jnp.asarray(x), None, bias))
        for row in (3, 4):
            np.testing.assert_array_equal(y[row], bias)
        assert np.isnan(y[6]).all() and np.isfinite(np.delete(y, 6, 0)).all()
        wide = x[5].astype(np.float64)
        expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-6)
        y = np.asarray(jax_gradops.layer_norm(jnp.asarray(x)))
        np.testing.assert_allclose(y[5], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    "shape",
    [(2, 2), (1, 3), (5, 1), (3, 5), (16, 16), (8, 40), (300, 1), (33, 64), (7, 500), (1300, 3)],
)
def test_batch_norm_of_groups(shape: Any, axis: int, dtype: str, rng: Any) -> None:
    if axis == 1:
        shape = (2, shape[1], shape[0])
    groups = 19
    given = arrays(rng, (groups, *shape), dtype, (groups, shape[axis]))
    function = functools.partial(jax_gradops.batch_norm, axis=axis, activation="relu")

    def run(implementation: str, x: Any, dy: Any, scale: Any, bias: Any, residual: Any) -> Any:
        def of(*operands: Any) -> Any:
            *most, residual = operands
            return function(*most, residual=residual, implementation=implementation)

        (y, *statistics), vjp = jax.vjp(of, x, scale, bias, residual)
        zeros = tuple(map(jnp.zeros_like, statistics))
        return y, *statistics, *vjp((dy.astype(y.dtype), *zeros))

    given = (*given, given[0] - 2)
    results = jax.vmap(functools.partial(run, "ffi"))(*given)
    expected = jax.vmap(functools.partial(run, "xla"))(*(jnp.asarray(widen(a)) for a in given))
    terms = np.prod(shape) // shape[axis]
    # Relu's argument may round to either side of 0.
    flipped = np.asarray(expected[0] > 0) != np.asarray(results[0] > 0)
    assert flipped.mean() < 1e-3
    if flipped.any():
        return
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        if terms <= 2 and i == 3:
            continue  # dx holds only rounding errors
        unit = max(float(jnp.finfo(got.dtype).eps), 1e-7 if dtype != "float64" else 0)
        limit = 64 * unit * (np.abs(np.asarray(want)).max() + 1)
        np.testing.assert_allclose(widen(got), np.asarray(want), rtol=0, atol=limit, err_msg=str(i))


def test_a_group_does_not_depend_on_others(rng: Any) -> None:
    for shape in ((2, 2), (9, 7), (8, 40), (1300, 3)):
        given = arrays(rng, (40, *shape), jnp.float32, (40, shape[1]))
        op: Any = jax.vmap(lambda *a: jax_gradops.batch_norm(*a)[0])
        x, _, *parameters = given
        some = slice(5, 22)
        assert_bitwise_equal(
            np.asarray(op(x, *parameters))[some],
            np.asarray(op(x[some], *(p[some] for p in parameters))),
            str(shape),
        )


def test_a_group_does_not_depend_on_its_neighbours(rng: Any) -> None:
    """A NaN in a neighbour, or the number of neighbours, changes nothing, even if epsilon is 0."""
    x = rng.standard_normal((17, 9, 5)).astype(np.float32)
    poisoned = x.copy()
    poisoned[3] = np.nan
    others = np.arange(17) != 3
    for epsilon in (0.0, 1e-5):
        op: Any = jax.vmap(functools.partial(jax_gradops.batch_norm, epsilon=epsilon))
        results = jax.tree.map(np.asarray, op(x))
        for groups in (poisoned, x[:1], x[:9]):
            same = others[: len(groups)]
            for got, want in zip(op(groups), results, strict=True):
                assert_bitwise_equal(np.asarray(got)[same], want[: len(groups)][same])


@pytest.mark.parametrize("groups", [1, 8, 9])
def test_small_deviations_without_epsilon(groups: int, rng: Any) -> None:
    """Variances keep their digits beside a large mean. Equal elements have variance 0."""
    steps = np.round(2 * rng.standard_normal((groups, 9, 5)))
    for dtype, unit in ((np.float32, 2.0**-56), (np.float32, 1.0), (np.float64, 2.0**-23)):
        mean = 0 if unit < 1e-9 else 1e9 if dtype == np.float64 else 1e4
        op: Any = jax.vmap(functools.partial(jax_gradops.batch_norm, epsilon=0.0))
        variance = np.asarray(op((mean + steps * unit).astype(dtype))[2])
        np.testing.assert_allclose(variance, (steps * unit).var(1), rtol=1e-6)
        equal = op(np.full((groups, 9, 5), 7.7 + mean, dtype))[2]
        np.testing.assert_array_equal(equal, 0)


@pytest.mark.parametrize("rows", [1, 15, 17])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_lanes_without_a_row_add_nothing(op: str, rows: int) -> None:
    """A lane without a row computes bias / scale, which is not finite. It must add nothing."""
    x = np.linspace(-1, 2, rows * 8, dtype=np.float32).reshape(rows, 8)
    parameters = [np.full(8, 1e-30, np.float32), np.full(8, 1e9, np.float32)]
    parameters = parameters[: 2 if op == "layer_norm" else 1]
    f = functools.partial(getattr(jax_gradops, op), residuals="output")
    gradients = jax.grad(lambda *p: f(x, *p).sum(), range(len(parameters)))(*parameters)
    assert all(np.isfinite(g).all() for g in gradients)


def test_squares_whose_sum_leaves_the_range() -> None:
    """The variance is a finite float32, but the sum of squares overflows."""
    x = np.where(np.arange(250) % 2, 3e18, -3e18).astype(np.float32)[:, None]
    y, _, variance = jax_gradops.batch_norm(jnp.asarray(x))
    np.testing.assert_allclose(variance, 9e36, rtol=1e-6)
    np.testing.assert_allclose(y, np.sign(x), rtol=1e-6)


_MANY_GROUPS = """
import json, resource, jax, jax.numpy as jnp, jax_gradops
x = jax.random.normal(jax.random.key(0), (300_000, 2, 2))
def grow(implementation):
    f = jax.grad(lambda x: jax_gradops.batch_norm(x, implementation=implementation)[0].sum())
    run = jax.jit(jax.vmap(f)).lower(x).compile()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.block_until_ready(run(x))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps([x.nbytes, grow("ffi")]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux: maxrss in KB")
def test_memory_of_many_small_groups() -> None:
    """The kernel has no scratch per group: such scratch took 320 times x's memory."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MANY_GROUPS],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    of_x, grown = json.loads(done.stdout)
    assert grown < 20 * of_x, f"{grown / 1e6:.0f} MB for {of_x / 1e6:.0f}"


_DIGESTS = """
import hashlib, json, numpy as np, jax, jax.numpy as jnp, jax_gradops
rng, found = np.random.default_rng(0), {}
def digest(name, *results):
    found[name] = hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest()
for dtype in ("float16", "bfloat16", "float32"):
    for n in (1, 3, 8, 17, 64):
        x, dy = (jnp.asarray(rng.standard_normal((53, n)), dtype) for _ in range(2))
        s = jnp.asarray(rng.standard_normal(n), jnp.float32)
        for op in (jax_gradops.layer_norm, jax_gradops.rms_norm):
            y, vjp = jax.vjp(lambda x, s: op(x, s, implementation="ffi"), x, s)
            digest(f"{op.__name__} {dtype} {n}", y, *vjp(dy))
    for shape in ((2, 2), (9, 7), (8, 40)):
        x = jnp.asarray(rng.standard_normal((21, *shape)), dtype)
        f = jax.vmap(lambda x: jax_gradops.batch_norm(x, implementation="ffi")[0])
        y, vjp = jax.vjp(f, x)
        digest(f"batch_norm {dtype} {shape}", y, *vjp(y))
print(json.dumps(found))
"""


@pytest.mark.skipif(sum(map(bool, LEVELS.values())) < 2, reason="one level of x86-64 alone")
def test_levels_agree() -> None:
    """Registers of 16, 32 and 64 bytes give equal bits."""
    found = []
    for level in (level for level, usable in LEVELS.items() if usable):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _DIGESTS],
            env=os.environ | {"JAX_PLATFORMS": "cpu", _registry.CPU_LEVEL: level},
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        found.append(json.loads(done.stdout))
    assert all(one == found[0] for one in found), [
        name for name in found[0] if len({one[name] for one in found}) > 1
    ]
