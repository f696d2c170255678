"""`jax_gradops.fuse` on code as other projects write it: how they cast, mask, and share values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from test_fuse import names, summary_of, wide

import jax_gradops

pytestmark = pytest.mark.newest_jax

D = 32


@pytest.fixture(autouse=True)
def promotion() -> Any:
    """Outside code relies on JAX's promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def equal(function: Any, *arrays: Any, limit: float = 2e-5) -> None:
    """Result and gradients of the fused function are the function's own, up to rounding."""
    floats = tuple(i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating))

    def loss(f):
        def of(*arrays):
            y = f(*arrays)
            w = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return jnp.sum(wide(y) * w)

        return jax.jit(jax.value_and_grad(of, floats))

    expected, got = loss(function)(*arrays), loss(jax_gradops.fuse(function))(*arrays)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        np.testing.assert_allclose(b, a, rtol=limit, atol=limit * (np.abs(a).max() + 1e-3))


def arrays_of(dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 6, D)), rng.standard_normal((3, D, D)) / 6
    return [
        jnp.asarray(x, dtype),
        jnp.asarray(rng.uniform(0.5, 1.5, D), jnp.float32),
        *jnp.asarray(w),
    ]


def normalize(x: Any, scale: Any) -> Any:
    """A layer norm that is float32 because of its scale."""
    mean = jnp.mean(wide(x), -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(wide(x)), -1, keepdims=True) - mean**2)
    return (wide(x) - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale)


def test_each_layer_rounds_the_norm():
    """A float32 norm of a bfloat16 array, which query, key and value each cast to bfloat16."""

    def attention(x, scale, q, k, v):
        y = normalize(x, scale)
        q, k, v = (y.astype(x.dtype) @ w.astype(x.dtype) for w in (q, k, v))
        return q * jnp.tanh(k) + v

    arrays = arrays_of(jnp.bfloat16)
    assert names(attention, *arrays) == ["layer_norm"]
    equal(attention, *arrays, limit=0.05)


def test_float32_norm_of_a_bfloat16_array_is_left():
    def pooled(x, scale):
        return jnp.mean(normalize(x, scale), 1)

    arrays = arrays_of(jnp.bfloat16)[:2]
    summary = summary_of(pooled, *arrays)
    assert not summary.replaced
    assert "float32" in summary.left[0].why and "bfloat16" in summary.left[0].why


def rms_by_einsum(x, scale):
    x32 = wide(x)
    y = (x32 * jax.lax.rsqrt(jnp.mean(jax.lax.square(x32), -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    )
    return jnp.einsum("...k,k->...k", y, scale.astype(x.dtype) + 1.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scale_by_einsum(dtype):
    """A product without a sum is a `dot_general` with a batch axis only."""
    x, scale, *_ = arrays_of(dtype)
    (found,) = summary_of(rms_by_einsum, x, scale).replaced
    assert found.op == "rms_norm" and "float32[32]" in found.shapes
    equal(rms_by_einsum, x, scale, limit=2e-5 if dtype == jnp.float32 else 0.05)


def test_outer_products_and_matrix_products_stay():
    def outer(x, scale):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return jnp.einsum("abc,d->abcd", y, scale)

    x, scale, w, *_ = arrays_of(jnp.float32)
    assert names(outer, x, scale) == ["rms_norm"]
    equal(outer, x, scale)
    by_matrix = lambda x, scale, w: rms_by_einsum(x, scale) @ w  # noqa: E731
    assert names(by_matrix, x, scale, w) == ["rms_norm"]


def one_hot_by_select(labels, classes, on, off):
    hot = labels[..., None] == jnp.arange(classes).reshape((1,) * labels.ndim + (-1,))
    return jax.lax.select(hot, jnp.full(hot.shape, on), jnp.full(hot.shape, off)).astype(
        jnp.float32
    )


def soft_cross_entropy(logits, labels, on=1.0, off=0.0):
    soft = one_hot_by_select(labels, logits.shape[-1], on, off)
    return -jnp.sum(soft * jax.nn.log_softmax(logits), -1)


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (0.9, 0.1 / 31)])
def test_one_hot_by_select(numbers):
    """One-hot labels by a selection between two numbers, as for smoothed labels."""

    def loss(logits, labels):
        return soft_cross_entropy(logits, labels, *numbers)

    logits = arrays_of(jnp.float32)[0]
    labels = jnp.asarray([[0, 3, 31, 5, 5, 1], [7, -1, 32, 2, 9, 8]], jnp.int32)
    assert names(loss, logits, labels) == ["softmax_cross_entropy_with_integer_labels"]
    equal(loss, logits, labels)


@pytest.mark.parametrize("numbers", [(0.9, 0.0), (0.0, 1.0), (2.0, 0.0)])
def test_other_soft_labels(numbers):
    def loss(logits, labels):
        return soft_cross_entropy(logits, labels, *numbers)

    logits = arrays_of(jnp.float32)[0]
    labels = jnp.asarray([[0, 3, 31, 5, 5, 1], [7, -1, 32, 2, 9, 8]], jnp.int32)
    assert not names(loss, logits, labels)
    equal(loss, logits, labels)


def test_an_entropy_beside_a_divergence_of_one_softmax():
    def loss(x, other):
        log_p, log_q = jax.nn.log_softmax(x), jax.nn.log_softmax(other)
        p = jnp.exp(log_p)
        return jnp.sum(p * (log_p - log_q)) - 0.01 * jnp.sum(p * log_p)

    left = summary_of(loss, jnp.ones((4, 7)), jnp.ones((4, 7))).left
    assert [each.kind for each in left for _ in range(each.times)] == ["loss", "loss"]


def test_a_loss_minus_the_logarithm_of_a_number():
    """Flax's example for WMT subtracts the least loss of smoothed labels."""

    def loss(logits, labels):
        low = 0.1 / (logits.shape[-1] - 1)
        least = -(0.9 * jnp.log(0.9) + 0.1 * jnp.log(low + 1e-20))
        soft = jax.nn.one_hot(labels, logits.shape[-1]) * (0.9 - low) + low
        return -jnp.sum(soft * jax.nn.log_softmax(logits), -1) - least

    found = summary_of(loss, jnp.ones((4, 7)), jnp.arange(4))
    assert [each.op for each in found.replaced] == ["softmax_cross_entropy_with_integer_labels"]
    assert not found.left


def test_statistics_over_devices_are_named():
    """Batch norm whose statistics are means over a mapped axis is left, and the report says so."""

    def batch_norm(x, scale):
        mean, square = jax.lax.pmean(jnp.stack([jnp.mean(x, 0), jnp.mean(x * x, 0)]), "batch")
        return (x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * scale

    def loss(x, scale):
        return jax.vmap(batch_norm, in_axes=(0, None), axis_name="batch")(x, scale)

    def of_shards(x, scale):
        found = []
        fused = jax_gradops.fuse(batch_norm, report=found.append)
        jax.eval_shape(jax.vmap(fused, in_axes=(0, None), axis_name="batch"), x, scale)
        return found[0]

    x, scale, *_ = arrays_of(jnp.float32)
    summary = of_shards(x, scale)
    assert not summary.replaced and "axis_name" in summary.left[0].why
    equal(loss, x, scale)


def test_random_streams_that_stay_as_they_are():
    """NNX lets a differentiated function read a random stream of the code around it."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.LayerNorm(D, rngs=nnx.Rngs(0)), nnx.Dropout(0.0))
    graph, params = nnx.split(model)
    x = arrays_of(jnp.float32)[0]

    def loss(params, rngs):
        assert isinstance(rngs, nnx.Rngs)
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    def step(params):
        rngs = nnx.Rngs(1)
        return jax.grad(jax_gradops.fuse(loss))(params, rngs.fork())

    expected = jax.grad(loss)(params, nnx.Rngs(1))
    got = jax.jit(step)(params)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_changed_random_streams_go_on():
    nnx = pytest.importorskip("flax.nnx")
    x = arrays_of(jnp.float32)[0]

    def drawn(function):
        rngs = nnx.Rngs(1)
        return function(rngs), int(rngs.default.count[...])

    def loss(rngs):
        return jnp.sum(jax.random.normal(rngs(), x.shape) * x)

    assert drawn(loss) == drawn(jax_gradops.fuse(loss)) and drawn(loss)[1] == 1


# --- Embeddings ----------------------------------------------------------------------------------

LOOKUPS = {
    "index": lambda t, i: t[i],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "fill": lambda t, i: t.at[i].get(mode="fill", fill_value=0),
    "not from the end": lambda t, i: t.at[i].get(mode="fill", wrap_negative_indices=False),
    "promise": lambda t, i: t.at[i].get(mode="promise_in_bounds"),
    "vmap": lambda t, i: jax.vmap(jax.vmap(lambda j: t[j]))(i),
}
CASTS = {
    "none": lambda of, t, i: of(t, i),
    "before": lambda of, t, i: of(t.astype(jnp.bfloat16), i),
    "after": lambda of, t, i: of(t, i).astype(jnp.bfloat16),
    "before and after": lambda of, t, i: of(t.astype(jnp.bfloat16), i).astype(jnp.float32),
    "wider": lambda of, t, i: of(t.astype(jnp.float32), i),
    "twice": lambda of, t, i: of(t.astype(jnp.float32).astype(jnp.float16), i),
}
TOKENS = np.array([[0, 3, 3, 6], [-2, 7, 3, 1], [-7, -8, 3, 120]])


def table_of(dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (7, 4)).astype(dtype)


@pytest.mark.parametrize("of", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("integers", ["int32", "int8", "uint32"])
def test_lookups(of, cast, dtype, integers):
    """Results have the code's bits. Gradients are float64 sums, also of indices in no row."""
    table = table_of(dtype)
    tokens = jnp.asarray(TOKENS.astype(integers))
    function = lambda t: cast(of, t, tokens)  # noqa: E731
    found = []
    fused = jax.jit(jax_gradops.fuse(function, report=found.append))
    y, expected = fused(table), jax.jit(function)(table)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y.astype(jnp.float32), expected.astype(jnp.float32))
    (site,) = found[0].replaced
    assert site.op == "embedding_lookup" and not found[0].left
    assert site.shapes == f"{table.dtype.name}[7,4], {integers}[3,4]"
    # JAX's derivative, in which each number is exact, says how often each row occurs.
    counts = jax.vjp(lambda t: of(t, tokens), table_of())[1](jnp.ones((3, 4, 4), jnp.float32))[0]
    (gradient,) = jax.vjp(fused, table)[1](jnp.full_like(y, 1 + 2**-7))
    total = np.asarray(counts, np.float64) * (1 + 2**-7)  # sums of three are no bfloat16 numbers
    np.testing.assert_array_equal(gradient, jnp.asarray(total).astype(dtype))


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_value_for_no_row_that_casts_round(cast, dtype):
    of = lambda t, i: t.at[i].get(mode="fill", fill_value=0.1)  # noqa: E731
    function = lambda t: cast(of, t, jnp.asarray(TOKENS)).astype(jnp.float32)  # noqa: E731
    assert names(function, table_of(dtype)) == ["embedding_lookup"]
    fused = jax_gradops.fuse(function)
    np.testing.assert_array_equal(fused(table_of(dtype)), function(table_of(dtype)))


def test_a_table_that_is_the_last_layer_too():
    """The lookup is that of the float32 table. The last layer keeps the cast."""

    def logits(table, tokens):
        half = table.astype(jnp.bfloat16)
        return jnp.tanh(half[tokens]) @ half.T

    tokens = jnp.asarray(np.abs(TOKENS) % 7)
    assert summary_of(logits, table_of(), tokens).replaced[0].shapes.startswith("float32[7,4]")
    equal(logits, table_of(), tokens, limit=0.02)


@pytest.mark.parametrize("sharded", [(None, None), (None, "d")])
def test_a_table_on_an_explicit_mesh(sharded):
    """The gradient has the table's sharding."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    function = lambda t, i: t.astype(jnp.bfloat16)[i]  # noqa: E731
    with jax.set_mesh(mesh):
        table = jax.device_put(table_of(), jax.P(*sharded))
        tokens = jnp.asarray(np.abs(TOKENS) % 7)
        assert names(function, table, tokens) == ["embedding_lookup"]
        loss = lambda t: jnp.sum(wide(jax_gradops.fuse(function)(t, tokens)))  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(table)
        assert jax.typeof(gradient) == jax.typeof(table)
    counts = np.bincount(np.ravel(tokens), minlength=7)[:, None]
    np.testing.assert_array_equal(gradient, np.broadcast_to(counts, (7, 4)))


INSIDE = {
    "scan": lambda t, i: jax.lax.scan(lambda c, j: (c, t[j]), 0.0, i)[1],
    "checkpoint": lambda t, i: jax.checkpoint(lambda t: t.astype(jnp.bfloat16)[i])(t),
    "vmap": lambda t, i: jax.vmap(lambda j: jnp.take(t, j, axis=0))(i),
    "jit": lambda t, i: jax.jit(lambda t, i: jnp.sin(t[i]))(t, i),
    "scaled": lambda t, i: (2 * t)[i] * 3,
    "joined": lambda t, i: jnp.concatenate([t, 2 * t])[i + 7],
    "matrices": lambda t, i: t.reshape(7, 2, 2)[i],
}


@pytest.mark.parametrize("function", INSIDE.values(), ids=INSIDE)
def test_lookups_inside(function):
    tokens = jnp.asarray(np.abs(TOKENS) % 7)
    assert names(function, table_of(), tokens) == ["embedding_lookup"]
    equal(function, table_of(), tokens, limit=0.01 if function is INSIDE["checkpoint"] else 2e-5)


@jax.custom_vjp
def own_lookup(table, tokens):
    return table[tokens]


own_lookup.defvjp(
    lambda t, i: (t[i], (t, i)), lambda r, dy: (jnp.zeros_like(r[0]).at[r[1]].add(dy), None)
)
NO_LOOKUPS = {
    "one_hot": (lambda t, i: jax.nn.one_hot(i, 7) @ t, "one-hot"),
    "one-hot by hand": (lambda t, i: wide(i[..., None] == jnp.arange(7)) @ t, "one-hot"),
    "custom_vjp": (own_lookup, "custom_vjp"),
    "vmapped tables": (lambda t, i: jax.vmap(lambda t: t[i])(jnp.stack([t, t])), "another axis"),
    "vmapped tables and tokens": (
        lambda t, i: jax.vmap(lambda t, j: t[j])(jnp.stack([t, t, t]), i), "another axis"
    ),
    "other axis": (lambda t, i: jnp.take(t, i % 4, axis=1), "another axis"),
    "activations": (lambda t, i: (t @ t.T)[i], None),
    "rows of rows": (lambda t, i: t[i.reshape(-1)].at[i].get(), None),
    "one row": (lambda t, i: t[i[0, 0]], None),
    "one row at a time": (lambda t, i: jax.lax.map(lambda j: t[j], i.reshape(-1)), None),
    "elements": (lambda t, i: t[i, i % 4], None),
    "vector": (lambda t, i: t[:, 0][i], None),
    "take_along_axis": (lambda t, i: jnp.take_along_axis(t, i.reshape(-1, 4)[:1], 0), None),
    "integers": (lambda t, i: wide(t.astype(int)[i]), None),
    "each index once": (lambda t, i: t.at[i[0]].get(unique_indices=True), None),
    "slices of rows": (lambda t, i: jax.lax.gather(
        t, i[..., None], jax.lax.GatherDimensionNumbers((2,), (0,), (0,)), (1, 3)), None),
}  # fmt: skip


@pytest.mark.parametrize(("function", "why"), NO_LOOKUPS.values(), ids=NO_LOOKUPS)
def test_what_is_no_lookup_of_rows(function, why):
    tokens = jnp.asarray(np.array([[0, 3, 5, 6], [2, 1, 3, 1], [1, 1, 3, 4]]))
    summary = summary_of(function, table_of(), tokens)
    twice = function is NO_LOOKUPS["rows of rows"][0]
    assert len(summary.replaced) == twice
    assert [each.kind for each in summary.left] == (["embedding"] if why else [])
    assert not why or why in summary.left[0].why
    equal(function, table_of(), tokens)


def _flax_linen(table, tokens):
    layer = pytest.importorskip("flax.linen").Embed(7, 4, dtype=jnp.bfloat16)
    return layer.apply({"params": {"embedding": table}}, tokens)


def _flax_nnx(table, tokens):
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Embed(7, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.embedding[...] = table
    return layer(tokens)


def _equinox(table, tokens):
    layer = pytest.importorskip("equinox").nn.Embedding(weight=table)
    return jax.vmap(jax.vmap(layer))(tokens)


def _haiku(table, tokens):
    haiku = pytest.importorskip("haiku")
    layer = haiku.without_apply_rng(haiku.transform(lambda i: haiku.Embed(7, 4)(i)))
    return layer.apply({"embed": {"embeddings": table}}, tokens)


def _keras(table, tokens):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras has another backend")
    layer = keras.layers.Embedding(7, 4, dtype="mixed_bfloat16")
    layer.build()
    return layer.stateless_call([table], [], tokens)[0]


@pytest.mark.parametrize("function", [_flax_linen, _flax_nnx, _equinox, _haiku, _keras])
def test_embeddings_of_frameworks(function):
    tokens = jnp.asarray(np.abs(TOKENS) % 7, jnp.int32)
    (site,) = summary_of(function, table_of(), tokens).replaced
    assert site.op == "embedding_lookup" and site.shapes == "float32[7,4], int32[3,4]"
    assert site.where.startswith(__file__)
    equal(function, table_of(), tokens, limit=0.01)
