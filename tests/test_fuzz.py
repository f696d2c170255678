"""Properties of any arrays: relations between results, and comparison with the oracle.

Every run has a few examples of each test. `make fuzz` (or pytest --hypothesis-profile=fuzz) tries
others until its limit. Each example is compiled. Its relations therefore share a program, and short
runs take shapes from small pools.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import accum, assert_all_match, assert_bitwise_equal, assert_matches, close, widen
from norm_problems import exact_sum
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """On the CPU, a row's bits do not depend on its place."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


LONG = hypothesis.settings().max_examples > 100
DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "float64"]).map(jnp.dtype)
ROWS, FEATURES = (1, 2, 5, 37), (1, 2, 7, 33, 64, 129, 1000)
_examples = itertools.count(1)


def forget_now_and_then() -> None:
    """Clears JAX's caches from time to time. Else JAX keeps the programs of all examples."""
    if next(_examples) % 100 == 0:
        jax.clear_caches()


@st.composite
def shapes(draw: Any) -> tuple[int, int]:
    if LONG:
        forget_now_and_then()
        features = draw(st.one_of(st.integers(1, 70), st.integers(1, 9000)))
        return draw(st.integers(1, max(2, min(600, 60_000 // features)))), features
    return draw(st.sampled_from(ROWS)), draw(st.sampled_from(FEATURES))


@st.composite
def arrays(draw: Any, count: int, spread: float = 3.0) -> tuple[list[np.ndarray], Any]:
    """`count` arrays of ordinary numbers with one shape, and a generator for further arrays."""
    shape, dtype = draw(shapes()), draw(DTYPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mean = draw(st.sampled_from([0.0, 0.5, -3.0, 20.0]))
    size = 10.0 ** draw(st.floats(-spread, 2))
    return [(size * (mean + rng.standard_normal(shape))).astype(dtype) for _ in range(count)], rng


# --- Norms ---------------------------------------------------------------------------------------

_NORMS = st.sampled_from(["layer_norm", "rms_norm"])


def norm_of(op: str, **options: Any) -> Any:
    return functools.partial(getattr(jax_gradops, op), **options)


@hypothesis.given(op=_NORMS, given=arrays(2), residuals=st.sampled_from(["input", "output"]))
def test_norm_of_rows(op, given, residuals):
    """Bitwise equal: a row alone, rows in another order, the opposite sign, twice dy."""
    (dy, x), rng = given
    rows, features = x.shape
    scale = rng.uniform(0.5, 2, features).astype(np.float32)
    order, one = rng.permutation(rows), rng.integers(rows)
    f = vjp_of(norm_of(op, residuals=residuals))

    @jax.jit
    def run(dy: Any, x: Any) -> Any:
        return (
            f(dy, x, scale),
            f(dy[order], x[order], scale),
            f(dy[one : one + 1], x[one : one + 1], scale),
            f(-dy, -x, scale),
            f(dy * 2, x, scale),
            f(dy * 0, x, scale),
        )

    results = jax.tree.map(np.asarray, run(dy, x))
    (y, dx, dscale), permuted, alone, negative, double, zero = results
    for whole, other, by_itself in zip((y, dx), permuted, alone, strict=False):
        assert_bitwise_equal(other, whole[order], "permuted")
        assert_bitwise_equal(by_itself[0], whole[one], "alone")
    size = (np.abs(widen(dy)) * (np.abs(widen(y) / scale) + 1)).sum(0)
    close(permuted[2], dscale, size, "dscale of permuted rows")
    np.testing.assert_array_equal(-negative[0], y)
    np.testing.assert_array_equal(-negative[1], dx)
    np.testing.assert_array_equal(negative[2], dscale)
    if np.isfinite(2 * widen(dy).astype(dy.dtype)).all() and dy.dtype != np.float16:
        np.testing.assert_array_equal(double[1], 2 * dx)
        np.testing.assert_array_equal(double[2], 2 * dscale)
    assert not np.any(zero[1]) and not np.any(zero[2])


@hypothesis.given(op=_NORMS, given=arrays(2), power=st.integers(-6, 6))
def test_norm_of_scaled_rows(op, given, power):
    """Without epsilon, x times a power of two has a bitwise equal y, and a scaled dx."""
    (dy, x), _ = given
    dtype = accum(x.dtype)
    dy, x = dy.astype(dtype), x.astype(dtype)
    f = vjp_of(norm_of(op, epsilon=0.0))
    (y, dx), (scaled_y, scaled_dx) = jax.jit(
        lambda dy, x: (f(dy, x), f(dy, x * dtype(2.0**power)))
    )(dy, x)
    np.testing.assert_array_equal(scaled_y, y)
    np.testing.assert_array_equal(scaled_dx, dx * dtype(2.0**-power))


@hypothesis.given(given=arrays(2), shift=st.integers(-(2**15), 2**15))
def test_shifted_rows(given, shift):
    """Integers shifted by an integer lose nothing. The result is as exact as without a shift."""
    (dy, x), rng = given
    dtype = accum(x.dtype)
    x = rng.integers(-(2**8), 2**8, x.shape).astype(dtype)
    f = vjp_of(norm_of("layer_norm", epsilon=1e-3))
    (y, dx), (shifted_y, shifted_dx) = jax.jit(lambda dy, x: (f(dy, x), f(dy, x + dtype(shift))))(
        dy.astype(dtype), x
    )
    close(shifted_y, y, np.abs(widen(y)) + 1, "y of shifted rows", 4)
    bound = oracles.norm_vjp(widen(dy), widen(x), epsilon=1e-3, centered=True)[0].magnitude
    close(shifted_dx, dx, bound, "dx of shifted rows")


@hypothesis.given(
    op=_NORMS,
    given=arrays(3),
    parameters=DTYPES,
    offset=st.sampled_from([0.0, 1.0]),
    biased=st.booleans(),
)
def test_norm_and_its_variants(op, given, parameters, offset, biased):
    """Compares with float64. A residual gives the norm of the sum. More axes are flattened."""
    (dy, x, residual), rng = given
    features = x.shape[1]
    inner = max(n for n in (1, 2, 3, 5, 7) if features % n == 0)
    affine = [rng.uniform(0.5, 2, features).astype(parameters) for _ in range(2)]
    affine = affine[: 2 if op == "layer_norm" else 1]
    bias = rng.standard_normal(features).astype(parameters) if biased else None
    options = {"scale_offset": offset, "epsilon": 1e-3}
    plain, fused = norm_of(op, **options), norm_of(f"add_{op}", **options)
    spread = (x.shape[0], features // inner, inner)
    folded = norm_of(op, begin_norm_axis=1, **options)

    @jax.jit
    def run(dy: Any, x: Any, residual: Any, bias: Any) -> Any:
        def of_sum(bias: Any, *operands: Any) -> Any:
            return fused(*operands, residual_bias=bias)

        (y, total), pull = jax.vjp(of_sum, bias, x, residual, *affine)
        dbias, _, *gradients = pull((dy, jnp.zeros_like(total)))
        return (
            (y, *gradients),
            vjp_of(plain)(dy, total, *affine),
            vjp_of(folded)(
                dy.reshape(spread), total.reshape(spread), *(a.reshape(spread[1:]) for a in affine)
            ),
            total,
            dbias,
        )

    fused_results, results, folded_results, total, dbias = run(dy, x, residual, bias)
    with np.errstate(over="ignore"):
        assert_bitwise_equal(total, exact_sum(x, residual, bias))
    for a, b, c in zip(fused_results, results, folded_results, strict=True):
        assert_bitwise_equal(a, b, "with a residual")
        assert_bitwise_equal(np.asarray(c).reshape(b.shape), b, "folded")
    settings = {"epsilon": 1e-3, "centered": op == "layer_norm", "scale_offset": offset}
    wide = [widen(a) for a in (total, *affine)]
    references = [oracles.norm(*wide, **settings)]
    references += oracles.norm_vjp(widen(dy), *wide[:2], **settings)[: len(affine) + 1]
    assert [r.dtype for r in results] == [x.dtype] * 2 + [parameters] * len(affine)
    assert_all_match(results, references, x, op)
    if biased:
        assert dbias.dtype == parameters
        assert_all_match([dbias], [oracles.over_rows(references[1])], x, "dresidual_bias")


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 1e30, 1e-30]


@hypothesis.given(
    op=st.sampled_from(["layer_norm", "rms_norm", "gelu", "batch_norm", "group_norm"]),
    given=arrays(2, spread=1.0),
    specials=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4),
    into=st.sampled_from(["x", "dy"]),
)
def test_special_values(op, given, specials, into):
    """The result is NaN where XLA's formula gives NaN or infinity, and finite elsewhere."""
    (dy, x), rng = given
    target = x if into == "x" else dy
    with np.errstate(over="ignore"):
        for special in specials:
            target[tuple(rng.integers(target.shape))] = np.float64(special).astype(target.dtype)

    @jax.jit
    def run(dy: Any, x: Any) -> Any:
        results = []
        for implementation in ("ffi", "xla"):
            options = {"num_groups": 1} if op == "group_norm" else {}
            f = norm_of(op, implementation=implementation, **options)
            g = (lambda x, f=f: f(x)[0]) if op == "batch_norm" else f
            results.append(vjp_of(g)(dy, x))
        return results

    ours, xlas = jax.tree.map(np.asarray, run(dy, x))
    for a, b in zip(ours, xlas, strict=True):
        if op == "gelu" or not np.isin(specials, [3e38, -3e38, 1e30]).any():
            wrong = np.isfinite(a) != np.isfinite(b)
            assert not wrong.any(), (a[wrong], b[wrong])
    # Rows without special values do not depend on other rows.
    if op.endswith("norm") and op != "batch_norm":
        clean = np.isfinite(widen(x)).all(1) & np.isfinite(widen(dy)).all(1)
        small = (np.abs(widen(x)) < 1e15).all(1) & (np.abs(widen(dy)) < 1e15).all(1)
        assert np.isfinite(ours[0][clean & small]).all()


# --- Batch norm ----------------------------------------------------------------------------------


@hypothesis.given(
    given=arrays(3),
    axis=st.sampled_from([-1, 1]),
    relu=st.booleans(),
    adds=st.booleans(),
    power=st.integers(-6, 6),
)
def test_batch_norm(given, axis, relu, adds, power):
    """Compares with float64 in both layouts, with permuted, scaled and negative batches."""
    (dy, x, residual), rng = given
    rows, channels = x.shape
    scale, bias = (rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(2))
    order = rng.permutation(rows)
    factor = np.float64(2.0**power).astype(x.dtype)
    wide_x = accum(x.dtype)

    def op(x: Any, *parameters: Any, **options: Any) -> Any:
        def laid_out(a: Any) -> Any:  # if channels are first: [rows, channels, 1]
            return a if axis == -1 else a[:, :, None]

        if "residual" in options:
            options["residual"] = laid_out(options["residual"])
        y, mean, var = jax_gradops.batch_norm(laid_out(x), *parameters, axis=axis, **options)
        return y.reshape(x.shape), mean, var

    options: dict[str, Any] = {"epsilon": 0.25, "activation": "relu" if relu else None}

    @jax.jit
    def run(dy: Any, x: Any, residual: Any) -> Any:
        def whole(x: Any, scale: Any, bias: Any, residual: Any) -> Any:
            given = {"residual": residual} if adds else {}
            return op(x, scale, bias, **options, **given)[0]

        wide = x.astype(wide_x)
        return (
            vjp_of(whole)(dy, x, scale, bias, residual),
            whole(x[order], scale, bias, residual[order]),
            op(x, scale, bias),
            op(wide, epsilon=0.0),
            op(wide * factor.astype(wide_x), epsilon=0.0),
            op(-wide, epsilon=0.0),
        )

    results, permuted, (_, mean, var), plain, scaled, negative = run(dy, x, residual)
    wide = [widen(a) for a in (x, scale, bias)]
    rest = {"epsilon": 0.25, "relu": relu, "residual": widen(residual) if adds else None}
    reference = oracles.batch_norm(*wide, **rest)
    gradients = oracles.batch_norm_vjp(widen(dy), *wide, **rest)
    count = 5 if adds else 4
    assert_all_match(results[:count], (reference, *gradients)[:count], x, "batch_norm")
    close(permuted, widen(results[0])[order], reference.magnitude[order], "permuted")
    spread = np.abs(wide[0] - wide[0].mean(0)).max(0) + np.abs(wide[0]).max(0)
    eps = float(jnp.finfo(wide_x).eps)
    assert (np.abs(widen(mean) - wide[0].mean(0)) <= 8 * eps * spread).all()
    assert (widen(var) >= 0).all()
    exact = wide[0].var(0)
    assert (np.abs(widen(var) - exact) <= 64 * eps * exact + (8 * eps * spread) ** 2).all()
    for a, b in zip(scaled[:2], (plain[0], widen(plain[1]) * 2.0**power), strict=True):
        np.testing.assert_array_equal(widen(a), widen(b))
    np.testing.assert_array_equal(-widen(negative[0]), plain[0])
    np.testing.assert_array_equal(negative[2], plain[2])


# --- Group norm ----------------------------------------------------------------------------------


@hypothesis.given(
    given=arrays(2),
    layout=st.sampled_from(["channels only", "channels last", "channels first"]),
    groups=st.integers(0, 7),
    activation=st.sampled_from([None, "relu", "silu"]),
    power=st.integers(-6, 6),
)
def test_group_norm(given, layout, groups, activation, power):
    """Compares with float64, and a sample with itself elsewhere: in other batches, in two layouts.

    Columns of the given arrays are channels, or points with one or more channels.
    """
    (dy, x), rng = given
    rows, features = x.shape
    sizes = (1,) if layout == "channels only" else (1, 2, 3, 5, 8)
    points = max(n for n in sizes if features % n == 0)
    channels = features // points
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    scale, bias = (rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(2))
    order, one = rng.permutation(rows), rng.integers(rows)
    wide_x, shape = accum(x.dtype), (rows, points, channels)
    factor = np.float64(2.0**power).astype(wide_x)
    options: dict[str, Any] = {"num_groups": divisors[groups % len(divisors)]}
    axis = 1 if layout == "channels first" else -1

    def op(x: Any, *parameters: Any, **settings: Any) -> Any:
        """Of [rows, points, channels]. The operation has the layout."""
        if layout == "channels only":
            x = x[:, 0]
        operand = jnp.moveaxis(x, -1, axis)
        norm, own = jax_gradops.group_norm, options
        if options["num_groups"] == channels and power % 2:
            norm, own = jax_gradops.instance_norm, {}
        y = norm(operand, *parameters, axis=axis, **own, **settings)
        return jnp.moveaxis(y, axis, -1).reshape(-1, points, channels)

    whole = functools.partial(op, epsilon=0.25, activation=activation)

    @jax.jit
    def run(dy: Any, x: Any) -> Any:
        f = vjp_of(whole)
        wide = x.astype(wide_x)
        return (
            f(dy, x, scale, bias),
            f(dy[order], x[order], scale, bias)[:2],
            f(dy[one : one + 1], x[one : one + 1], scale, bias)[:2],
            op(wide, epsilon=0.0),
            op(wide * factor, epsilon=0.0),
            op(-wide, epsilon=0.0),
        )

    dy, x = dy.reshape(shape), x.reshape(shape)
    found = jax.tree.map(np.asarray, run(dy, x))
    results, permuted, alone, plain, scaled, negative = found
    wide = [widen(a) for a in (x, scale, bias)]
    rest = {"epsilon": 0.25, "activation": activation, **options}
    reference = oracles.group_norm(*wide, **rest)
    gradients = oracles.group_norm_vjp(widen(dy), *wide, **rest)
    assert_all_match(results, (reference, *gradients), x, "group_norm")
    for whole_array, other, by_itself in zip(results, permuted, alone, strict=False):
        assert_bitwise_equal(other, whole_array[order], "permuted")
        close(by_itself[0], widen(whole_array[one]), np.abs(widen(whole_array[one])) + 1, "alone")
    np.testing.assert_array_equal(scaled, plain)
    np.testing.assert_array_equal(-negative, plain)


# --- GELU ----------------------------------------------------------------------------------------


@hypothesis.given(given=arrays(2, spread=4.0), approximate=st.booleans())
def test_gelu(given, approximate):
    """gelu(x) - gelu(-x) = x, and gelu(x) is between 0 and x, up to rounding.

    An element does not depend on other elements.
    """
    (dy, x), rng = given
    bias = rng.standard_normal(x.shape[1]).astype(x.dtype)
    order = rng.permutation(x.shape[0])
    gelu = functools.partial(jax_gradops.gelu, approximate=approximate)
    biased = functools.partial(jax_gradops.bias_gelu, approximate=approximate)

    @jax.jit
    def run(dy: Any, x: Any, bias: Any) -> Any:
        f = vjp_of(gelu)
        return (
            (*f(dy, x), gelu(-x)),
            f(dy[order], x[order]),
            vjp_of(biased)(dy, x, jnp.zeros_like(bias)),
            vjp_of(biased)(dy, x, bias),
            f(-dy, x)[1],
        )

    (y, dx, opposite), permuted, unbiased, with_bias, negative = run(dy, x, bias)
    close(y, widen(x) + widen(opposite), np.abs(widen(x)), "gelu(x) - gelu(-x) = x", 24)
    lower, upper = np.minimum(widen(x), 0), np.maximum(widen(x), 0)
    assert ((widen(y) >= np.maximum(lower, -0.1701)) & (widen(y) <= upper)).all()
    assert (np.abs(widen(dx)) <= (1.13 + float(jnp.finfo(x.dtype).eps)) * np.abs(widen(dy))).all()
    for a, b in zip(permuted, (y, dx), strict=True):
        assert_bitwise_equal(a, np.asarray(b)[order], "permuted")
    for a, b in zip(unbiased, (y, dx), strict=False):
        assert_bitwise_equal(a, b, "a bias of 0")
    np.testing.assert_array_equal(-negative, dx)
    wide = [widen(a) for a in (x, bias)]
    # In the far tail, a factor of x may be flushed to 0.
    flushed = 64 * float(jnp.finfo(x.dtype).tiny)
    references = [oracles.bias_gelu(*wide, approximate=approximate)._replace(error=flushed)]
    references += oracles.bias_gelu_vjp(widen(dy), *wide, approximate=approximate)
    assert_all_match(with_bias, references, x, "bias_gelu")


# --- Clipping ------------------------------------------------------------------------------------


@hypothesis.given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    dtypes=st.lists(DTYPES, min_size=6, max_size=6),
    logs=st.lists(st.floats(-4, 4), min_size=6, max_size=6),
    share=st.sampled_from([0.0, 1e-3, 0.5, 0.999, 1.001, 10.0, math.inf]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_clip(sizes, dtypes, logs, share, in_place, seed):
    """Direction, bound and unchanged leaves. The norm is independent of the elements' leaves."""
    rng = np.random.default_rng(seed)
    if LONG:
        forget_now_and_then()
        sizes = [size * int(rng.integers(1, 900)) for size in sizes]
    leaves = [
        (10.0**log * rng.standard_normal(size)).astype(dtype)
        for size, dtype, log in zip(sizes, dtypes, logs, strict=False)
    ]
    exact = float(oracles.global_norm(*map(widen, leaves)).value)
    limit = share * exact if exact else share
    op = jax_gradops.backward.inplace_clip_by_global_norm
    clip = op if in_place else jax_gradops.clip_tree_by_global_norm

    @jax.jit
    def run(leaves: Any, limit: Any) -> Any:
        scaled = [x.astype(jnp.float64) * 2.0**-9 for x in leaves]
        return (
            clip(leaves, limit),
            jax_gradops.global_norm(leaves[::-1]),
            jax_gradops.global_norm([x[::-1] for x in leaves] + [-x for x in leaves]),
            jax_gradops.global_norm([x.astype(jnp.float64) for x in leaves]),
            jax_gradops.global_norm(scaled),
        )

    (clipped, norm), reverse, twice, wide, scaled = run(leaves, limit)
    eps = float(jnp.finfo(norm.dtype).eps)
    assert abs(float(norm) - exact) <= 4 * eps * exact
    np.testing.assert_allclose(reverse, norm, rtol=4 * eps)
    np.testing.assert_allclose(twice, np.sqrt(2) * exact, rtol=4 * eps)
    assert scaled == wide * 2.0**-9
    assert [(c.dtype, c.shape) for c in clipped] == [(x.dtype, x.shape) for x in leaves]
    if exact < limit * (1 - 4 * eps) or exact == 0:
        for c, x in zip(clipped, leaves, strict=True):
            assert_bitwise_equal(c, x, "not clipped")
    elif exact > limit * (1 + 4 * eps):
        for c, reference in zip(
            clipped, oracles.clip(*map(widen, leaves), max_norm=limit), strict=True
        ):
            assert_matches(c, reference, c.dtype, norm.dtype, "clipped")
    coarse = max(float(jnp.finfo(x.dtype).eps) for x in leaves)
    after = float(oracles.global_norm(*map(widen, clipped)).value)
    assert after <= limit * (1 + coarse) + 1e-30 or after <= exact <= limit * (1 + 4 * eps)
