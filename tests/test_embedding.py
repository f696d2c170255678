"""The lookup of embeddings and the gradient of their table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import accum, assert_bitwise_equal, assert_matches, widen
from conformance import RowOpTests
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, largest_gather, mesh

from jax_gradops import EXPORT_DISABLED_CHECKS, embedding_lookup
from jax_gradops._kernel.invoke import invoke
from jax_gradops._ops.embedding.embedding import BWD
from jax_gradops._ops.embedding.spec import PLAIN
from jax_gradops._oracles import Reference
from jax_gradops.backward import embedding_backward


class TestEmbeddingLookup(RowOpTests):
    """x + table[indices]: the gradient of the table's vector is a sum over all rows."""

    form = PLAIN
    forward_kernels = 0
    largest_parameter = 12 * RowOpTests.mesh_shape[-1]  # the table


# --- Values ---------------------------------------------------------------------------------------

MODES = ("fill", "clip", "wrap")
INDEX_DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# The shape of the indices, and of a row of the table.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), (3,)), ((0,), (5,)), ((7,), ()), ((2, 150), (2, 3)), ((33,), (1,)), ((5,), (0,)),
    ((300,), (257,)), ((9, 1, 2), (770,)),
]  # fmt: skip
COUNT = 50


def rows_of(indices: np.ndarray, mode: str, count: int = COUNT) -> np.ndarray:
    """The row of each index, by Python's integers. -1 is no row."""

    def row_of(index: int) -> int:
        if mode == "clip":
            return min(max(index, 0), count - 1)
        if mode == "wrap":
            return index % count
        index += count * (index < 0)
        return index if 0 <= index < count else -1

    return np.array([row_of(int(i)) for i in indices.flat], int).reshape(indices.shape)


def gradient_of(dy: Any, rows: np.ndarray, count: int = COUNT) -> Reference:
    """The table's gradient in float64, and the sum of the absolute terms."""
    terms = widen(dy)[rows >= 0]
    sums = np.zeros((2, count, *dy.shape[rows.ndim :]))
    for total, some in zip(sums, (terms, np.abs(terms)), strict=True):
        np.add.at(total, rows[rows >= 0], some)
    return Reference(*sums)


def repeats(implementation: str, platform: str) -> bool:
    """Whether equal calls give equal bits. XLA's additions on a GPU have no order."""
    return implementation == "ffi" or platform == "cpu"


@pytest.mark.parametrize("to", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_values(platform, implementation, dtype, mode, to, rng):
    """Indices of each dtype, negative and after the table's last row, and rows of each shape."""
    kinds = np.roll(INDEX_DTYPES, MODES.index(mode))
    cases = []
    for kind, (shape, features) in zip(kinds, SHAPES, strict=True):
        limits = np.iinfo(kind)
        low, high = max(limits.min, -COUNT - 5), min(limits.max, COUNT + 5)
        indices = np.asarray(rng.integers(low, high, shape)).astype(kind)
        indices.flat[3:5] = limits.min, limits.max
        table = rng.standard_normal((COUNT, *features)).astype(dtype)
        cases.append((table, indices, rng.standard_normal((*shape, *features)).astype(to or dtype)))
    options = {"mode": mode, "implementation": implementation}

    @jax.jit
    def run(cases: Any) -> Any:
        results = []
        for table, indices, dy in cases:
            y, pull = jax.vjp(
                lambda t, i=indices: embedding_lookup(t, i, dtype=to, **options), table
            )
            operator = embedding_backward(dy, indices, COUNT, dtype=dtype, **options)
            results.append((y, *pull(dy), operator))
        return results

    for (table, indices, dy), (y, found, operator) in zip(cases, run(cases), strict=True):
        what, rows = f"{indices.dtype}{list(indices.shape)}, {table.shape}", rows_of(indices, mode)
        expected = widen(table)[rows]
        expected[rows < 0] = np.nan
        assert_matches(y, Reference(expected, abs(expected)), dy.dtype, accum(dy.dtype), what)
        assert_matches(found, gradient_of(dy, rows), dtype, accum(dy.dtype), what)
        assert not np.asarray(found)[~np.isin(np.arange(COUNT), rows)].any(), what
        if repeats(implementation, platform):
            assert_bitwise_equal(operator, found)


@pytest.mark.parametrize("often", [1.0, 0.5], ids=["one token", "half padding"])
def test_tokens_that_occur_often(platform, implementation, dtype, often, rng):
    """The sum of 12,000 terms is rounded once. Each run gives equal bits."""
    tokens = rng.integers(0, COUNT, 12_000)
    tokens[rng.random(tokens.size) < often] = 3
    dy = (0.3 + rng.standard_normal((tokens.size, 260))).astype(dtype)
    f = jax.jit(lambda dy: embedding_backward(dy, tokens, COUNT, implementation=implementation))
    found, expected = f(dy), gradient_of(dy, tokens)
    if implementation == "xla" or dtype == np.float64:  # they add up one term after another
        expected = expected._replace(magnitude=200 * expected.magnitude)
    assert_matches(found, expected, dtype, accum(dtype), str(often))
    if repeats(implementation, platform):
        assert_bitwise_equal(f(dy), found)


def test_rows_that_the_handler_gets(platform, rng):
    """The handler checks the rows' numbers itself. It may have some of a table's rows only."""
    limits = np.iinfo(np.int32)
    rows = rng.integers(0, 20, 300).astype(np.int32)
    rows[:6] = limits.min, -1, 6, 12, 20, limits.max
    dy = rng.standard_normal((300, 5)).astype(np.float32)
    numbers = jnp.arange(7, 12, dtype=jnp.int32)
    (found,) = jax.jit(lambda *a: invoke(BWD, *a, implementation="ffi"))(dy, rows, numbers)
    kept = np.where((rows >= 7) & (rows < 12), rows - 7, -1)
    assert_matches(found, gradient_of(dy, kept, 5), np.float32, np.float32, "rows 7 to 11")


# --- Transformations ------------------------------------------------------------------------------


def by_jax(table: Any, indices: Any) -> Any:
    return jnp.take(table, indices, axis=0, mode="fill")


def assert_equal_by_jax(f: Any, *arrays: Any) -> None:
    """Compares f(look, *arrays), for our lookup and JAX's."""
    ours, expected = (
        jax.jit(lambda *a, g=g: f(g, *a))(*arrays) for g in (embedding_lookup, by_jax)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, expected)


@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [((None, 0), 0), ((0, None), 0), ((0, 0), 1), ((2, 1), 0), ((None, 1), -1), ((1, None), 1)],
    ids=str,
)
def test_vmap_of_each_operand(platform, in_axes, out_axes, rng):
    """vmap over indices, over tables and over both. Nested, the outer vmap maps the indices."""

    def stacked(a: Any, axis: int | None) -> Any:
        return a[0] if axis is None else np.moveaxis(a, 0, axis)

    table = stacked(rng.standard_normal((3, 6, 4)), in_axes[0])
    indices = [stacked(rng.integers(-8, 8, (3, 5)), in_axes[1]) for _ in range(2)]

    def f(look: Any, table: Any, indices: Any) -> Any:
        def one(table: Any, indices: Any) -> Any:
            y, pull = jax.vjp(lambda t: look(t, indices), table)
            return y, *pull(jnp.sin(jnp.arange(20.0).reshape(5, 4)))

        mapped = jax.vmap(one, in_axes, out_axes)
        return mapped(table, indices[0]), jax.vmap(mapped, (None, 0))(table, jnp.stack(indices))

    assert_equal_by_jax(f, table, indices)


def _cubes(look: Any, table: Any, indices: Any) -> Any:
    return jnp.sum(look(table, indices) ** 3)


def _scan(look: Any, table: Any, indices: Any) -> Any:
    def step(total: Any, some: Any) -> Any:
        return total + _cubes(look, table, some), None

    return lax.scan(step, 0.0, indices)[0]


TRANSFORMED = {
    "scan": lambda look, t, i: jax.grad(lambda t: _scan(look, t, i))(t),
    "remat": lambda look, t, i: jax.grad(jax.checkpoint(lambda t: _cubes(look, t, i)))(t),
    "jvp": lambda look, t, i: jax.jvp(lambda t: look(t, i), [t], [jnp.cos(t)]),
    "jvp of a gradient through scan": lambda look, t, i: jax.jvp(
        jax.grad(lambda t: _scan(look, t, i)), [t], [jnp.cos(t)]
    ),
    "hessian": lambda look, t, i: jax.hessian(lambda t: _cubes(look, t, i))(t),
    "grad of grad": lambda look, t, i: jax.grad(
        lambda t: jnp.sum(jax.grad(lambda t: _cubes(look, t, i))(t) ** 2)
    )(t),
    "vmap of grad": lambda look, t, i: jax.vmap(
        jax.grad(lambda t, i: _cubes(look, t, i)), (None, 0)
    )(t, i),
    "linear transpose": lambda look, t, i: jax.linear_transpose(lambda t: look(t, i), t)(
        jnp.ones((*i.shape, 4))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(platform, name, rng):
    indices = rng.integers(-8, 8, (3, 5))
    indices[0, :2] = 6, -7
    assert_equal_by_jax(TRANSFORMED[name], rng.standard_normal((6, 4)), indices)


def test_export_with_symbolic_sizes(platform, rng):
    """One program for each number of rows, features and indices."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    v, d, n, m = export.symbolic_shape("v, d, n, m")
    types = jax.ShapeDtypeStruct((v, d), "float32"), jax.ShapeDtypeStruct((n, m), "int32")
    exported = export.export(
        jax.jit(embedding_lookup), platforms=[platform], disabled_checks=EXPORT_DISABLED_CHECKS
    )(*types)
    loaded = export.deserialize(exported.serialize(vjp_order=1)).call
    for shape, sizes in (((6, 4), (2, 3)), ((2000, 33), (5, 700))):
        table, indices = (
            rng.standard_normal(shape, np.float32),
            rng.integers(0, shape[0], sizes, np.int32),
        )
        dy = rng.standard_normal((*sizes, shape[1]), np.float32)
        y, pull = jax.vjp(lambda t, i=indices: loaded(t, i), table)
        assert_bitwise_equal(y, table[indices])
        (found,) = pull(dy)
        expected = gradient_of(dy, indices, shape[0])
        assert_matches(found, expected, np.float32, np.float32, str(shape))


# --- Several devices ------------------------------------------------------------------------------

# The shardings of the table and of the indices. All-reduces in the forward and backward pass.
SPREAD = {
    "tokens": (P(), P("data", "model"), 0, 1),
    "rows": (P("model"), P(), 1, 0),
    "rows over all devices": (P(("data", "model")), P(), 1, 0),
    "rows and tokens": (P("model"), P("data"), 1, 1),
    "features": (P(None, "model"), P(), 0, 0),
    "features and tokens": (P(None, "model"), P("data"), 0, 1),
    "rows and features": (P("data", "model"), P(), 1, 0),
}


def placed(devices: Any, spec: P, a: Any) -> Any:
    return jax.device_put(a, NamedSharding(devices, spec))


@pytest.mark.newest_jax
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", [*SPREAD, "rows and tokens over one axis"])
def test_collectives(platform, kind, case, rng):
    """Neither the table nor dy is gathered. Only results that are sums are sent.

    If rows and tokens are sharded over one axis, a device needs the tokens of the others. XLA then
    sends these and sums, or a small table.
    """
    of_table, of_tokens, *reductions = SPREAD.get(case, (P("data"), P("data"), None, 1))
    devices = mesh(platform, kind)
    table, tokens = rng.standard_normal((320, 16), np.float32), rng.integers(-330, 330, (8, 4))
    dy = rng.standard_normal((8, 4, 16), np.float32)
    of_dy = P(*of_tokens, *[None] * (2 - len(of_tokens)), *of_table[1:])

    def backward(dy: Any, table: Any, tokens: Any) -> Any:
        return jax.vjp(lambda t: embedding_lookup(t, tokens), table)[1](dy)[0]

    with jax.set_mesh(devices):
        arrays = [placed(devices, *a) for a in ((of_table, table), (of_tokens, tokens))]
        programs = [
            jax.jit(f, out_shardings=NamedSharding(devices, spec)).lower(*some).compile()
            for f, spec, some in (
                (embedding_lookup, of_dy, arrays),
                (backward, of_table, [placed(devices, of_dy, dy), *arrays]),
            )
        ]
        y, dtable = programs[0](*arrays), programs[1](placed(devices, of_dy, dy), *arrays)
    rows = rows_of(tokens, "fill", 320)
    np.testing.assert_array_equal(y, np.where(rows[..., None] < 0, np.nan, table[rows]))
    assert_matches(dtable, gradient_of(dy, rows, 320), np.float32, np.float32, case)
    sent = [collectives(str(p.as_text())) for p in programs]
    assert "jax_gradops.embedding_bwd" in str(programs[1].as_text())
    if devices.shape["model"] > 1:
        for found, count in zip(sent, reductions, strict=True):
            assert count is None or found.pop("all-reduce", 0) == count
        assert case not in SPREAD or not any(sent)
    assert largest_gather(str(programs[1].as_text())) <= 320  # the numbers of the rows


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_shard_map(platform, implementation, check_vma, rng):
    """Each device has some of the tokens. The gradient is the sum over all devices."""
    devices = mesh(platform, AxisType.Auto)
    table, tokens = rng.standard_normal((50, 6), np.float32), rng.integers(-60, 60, (8, 4))
    dy = rng.standard_normal((8, 4, 6), np.float32)
    spec = P("data", "model")
    mapped = jax.shard_map(
        lambda t, i: embedding_lookup(t, i, implementation=implementation),
        mesh=devices, in_specs=(P(), spec), out_specs=spec, check_vma=check_vma,
    )  # fmt: skip
    y, pull = jax.vjp(lambda t: jax.jit(mapped)(t, tokens), table)
    rows = rows_of(tokens, "fill")
    np.testing.assert_array_equal(y, np.where(rows[..., None] < 0, np.nan, table[rows]))
    (found,) = pull(dy)
    assert_matches(found, gradient_of(dy, rows), np.float32, np.float32, "shard_map")
