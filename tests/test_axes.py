"""Axes that no op has: statistics with row axes, and classes that are sharded.

Their handlers are their references: these tests are about the layers around a handler.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives

from jax_gradops._kernel.array_types import match_vma
from jax_gradops._kernel.invoke import formula, invoke, prepare
from jax_gradops._kernel.rows import RowCall
from jax_gradops._kernel.shards import Shards
from jax_gradops._kernel.spec import Kernel, Named, Result, Stages

pytestmark = pytest.mark.newest_jax

AXES = ("a", "b", "c")
CALLS: list[RowCall] = []


def _handler(call: Any, *arrays: jax.Array) -> Any:
    """The reference, with a check of the types that XLA would allocate for a handler."""
    CALLS.append(call)
    results, native = formula(call, *arrays), call.handler_call(arrays)
    types = [native.types[i] for i, _ in native.wanted]
    assert [(r.size, r.dtype) for r in results] == [(math.prod(t.shape), t.dtype) for t in types]
    assert [r.shape for r in results] == [shape for _, shape in native.wanted]
    return results


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    monkeypatch.setattr(importlib.import_module(invoke.__module__), "_ffi_call", _handler)
    CALLS.clear()
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def cube(kind: AxisType = AxisType.Auto) -> Any:
    devices = jax.devices("cpu")[:8]
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(kind,) * 3, devices=devices)


# --- Group norm: x has samples, spatial axes, groups and channels ---------------------------------


def _along(statistic: jax.Array, x: jax.Array, inner: int) -> jax.Array:
    """A statistic with axes "ng" beside x, with axes "nmgc"."""
    rows = x.ndim - 2 - inner
    return jnp.expand_dims(statistic, (*range(rows, rows + inner), x.ndim - 1))


def _sum(x: jax.Array, inner: int) -> jax.Array:
    return jnp.sum(x, (*range(x.ndim - 2 - inner, x.ndim - 2), x.ndim - 1))


def _forward(x: Any, scale: Any, mean: Any, variance: Any, *, inner: int) -> Any:
    if mean is None:
        total = _sum(x, inner)
        mean = total / (x.size // total.size)
        variance = _sum(jnp.square(x - _along(mean, x, inner)), inner) / (x.size // total.size)
    x_hat = (x - _along(mean, x, inner)) / jnp.sqrt(_along(variance, x, inner))
    return x_hat * jnp.expand_dims(scale, tuple(range(x.ndim - 2))), mean, variance


def _merge(partial: Named, shards: Shards, **_: Any) -> tuple[Named, Named]:
    def mean(part: jax.Array) -> jax.Array:
        return shards.total("ng", [part])[0] / shards.number("ng")

    whole = mean(partial["batch_mean"])
    variance = mean(partial["batch_variance"] + jnp.square(partial["batch_mean"] - whole))
    given = {"mean": whole, "variance": variance}
    return {f"batch_{name}": value for name, value in given.items()}, given


def _backward(
    dy: Any, x: Any, scale: Any, mean: Any, variance: Any, level: Any, slope: Any, *, inner: int
) -> Any:
    deviation = jnp.sqrt(_along(variance, x, inner))
    x_hat = (x - _along(mean, x, inner)) / deviation
    dz = dy * jnp.expand_dims(scale, tuple(range(x.ndim - 2)))
    sums = _sum(dz, inner), _sum(dz * x_hat, inner)
    if level is None:
        level, slope = (s / (x.size // s.size) for s in sums)
    dx = (dz - _along(level, x, inner) - x_hat * _along(slope, x, inner)) / deviation
    return dx, jnp.sum(dy * x_hat, tuple(range(x.ndim - 2))), *sums


def _means(totals: Named, shards: Shards, **_: Any) -> tuple[Named, Named]:
    n = shards.terms("ng")
    return {}, {"level": totals["sum_dz"] / n, "slope": totals["sum_dz_x_hat"] / n}


_STATISTICS = {"mean": "ng", "variance": "ng"}
FORWARD = Kernel(
    name="toy_group_norm_fwd",
    operands={"x": "nmgc", "scale": "gc", **_STATISTICS},
    results={
        "y": Result("nmgc", "x"),
        **{f"batch_{name}": Result(dims, sum=False) for name, dims in _STATISTICS.items()},
    },
    reference=_forward,
    features="gc",
    whole="c",
    ranks={"m": "inner"},
    stages=Stages("m", tuple(_STATISTICS), _merge),
)
BACKWARD = Kernel(
    name="toy_group_norm_bwd",
    operands={
        "dy": "nmgc", "x": "nmgc", "scale": "gc", **_STATISTICS, "level": "ng", "slope": "ng",
    },
    results={
        "dx": Result("nmgc", "x"),
        "dscale": Result("gc"),
        "sum_dz": Result("ng"),
        "sum_dz_x_hat": Result("ng"),
    },
    reference=_backward,
    features="gc",
    whole="c",
    ranks={"m": "inner"},
    stages=Stages("m", ("level", "slope"), _means),
)  # fmt: skip


def group_norm(dy: Any, x: Any, scale: Any, **options: Any) -> Any:
    """y, the statistics, and the gradients of x and scale."""
    options["inner"] = 2
    x, scale, *_ = prepare(FORWARD, x, scale, None, None, inner=2)
    dy, scale = match_vma(dy, scale)
    y, mean, variance = invoke(FORWARD, x, scale, None, None, **options)
    operands = (dy, x, scale, mean, variance, None, None)
    dx, dscale, *_ = invoke(BACKWARD, *operands, skip=["sum_dz", "sum_dz_x_hat"], **options)
    return y, mean, variance, dx, dscale


# --- Cross-entropy: each device has some of the classes -------------------------------------------


def _cross_entropy(logits: Any, labels: Any, classes: Any, log_sum: Any) -> Any:
    largest = logits.max(-1)
    total = jnp.sum(jnp.exp(logits - largest[..., None]), -1)
    is_label = labels[..., None] == jnp.expand_dims(classes, tuple(range(labels.ndim)))
    is_label = is_label.astype(logits.dtype)
    if log_sum is None:
        log_sum = largest + jnp.log(total)
    softmax = jnp.exp(logits - log_sum[..., None])
    return largest, total, jnp.sum(logits * is_label, -1), softmax - is_label


def _log_sum(partial: Named, shards: Shards) -> tuple[Named, Named]:
    (largest,) = shards.largest("n", [partial["largest"]])
    (total,) = shards.total("n", [partial["total"] * jnp.exp(partial["largest"] - largest)])
    return {"largest": largest, "total": total}, {"log_sum": largest + jnp.log(total)}


CROSS_ENTROPY = Kernel(
    name="toy_cross_entropy",
    operands={"logits": "nd", "labels": "n", "classes": "d", "log_sum": "n"},
    results={
        "largest": Result("n", sum=False),
        "total": Result("n", sum=False),
        "logit_of_label": Result("n"),
        "dlogits": Result("nd", "x"),
    },
    reference=_cross_entropy,
    stages=Stages("d", ("log_sum",), _log_sum),
)


def cross_entropy(logits: Any, labels: Any, classes: Any, **options: Any) -> Any:
    """Sums for the loss, and the gradient of the logits."""
    operands = prepare(CROSS_ENTROPY, logits, labels, classes, None)
    return invoke(CROSS_ENTROPY, *operands, **options)


# --- Problems -------------------------------------------------------------------------------------


def arrays_of(op: Callable[..., Any], rng: Any) -> list[Any]:
    if op is group_norm:
        shape = (4, 4, 6, 2, 4)
        return [*rng.standard_normal((2, *shape)), rng.uniform(0.5, 2, shape[-2:])]
    logits, labels = rng.standard_normal((4, 6, 8)), rng.integers(0, 8, (4, 6)).astype(np.int32)
    return [logits, labels, np.arange(8, dtype=np.int32)]


def check(found: Any, op: Callable[..., Any], arrays: Any) -> None:
    for a, b in zip(found, op(*arrays, implementation="xla"), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


#: For each case: the op, its operands' shardings, and the number of all-reduces. Group norm reduces
#: the mean, the variance, and the gradients' sums. Cross-entropy reduces maxima and then sums.
SPREAD: dict[str, tuple[Callable[..., Any], tuple[P, ...], int]] = {
    "samples and groups": (group_norm, (P("a", None, None, "b"), P("b")), 1),
    "space": (group_norm, (P(None, "a", "b"), P()), 3),
    "samples, space and groups": (group_norm, (P("a", None, "b", "c"), P()), 4),
    "channels": (group_norm, (P(None, None, None, None, "a"), P()), 0),
    "rows": (cross_entropy, (P("a", "b"), P("a", "b"), P()), 0),
    "classes": (cross_entropy, (P(None, None, ("a", "b")), P(), P()), 2),
    "rows and classes": (cross_entropy, (P("a", None, "c"), P("a"), P("c")), 2),
}


def placed(mesh: Any, op: Callable[..., Any], arrays: Any, specs: tuple[P, ...]) -> list[Any]:
    if op is group_norm:
        specs = (specs[0], *specs)
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", SPREAD)
def test_jit(case, kind, rng):
    """Each device runs the kernel on its shard, and sends only reduced results."""
    op, specs, reductions = SPREAD[case]
    arrays, mesh = arrays_of(op, rng), cube(kind)
    with jax.set_mesh(mesh):
        compiled = jax.jit(op).lower(*(spread := placed(mesh, op, arrays, specs))).compile()
        found = compiled(*spread)
    check(found, op, arrays)
    if case != "channels":
        sent = collectives(str(compiled.as_text()))
        assert sent == ({"all-reduce": reductions} if reductions else {})


# The op, the axes with names, the other axes, and the letter of the named axes.
NAMED = {
    "space": (group_norm, P(None, "a"), P(None, "a"), "m"),
    "space, samples elsewhere": (group_norm, P(None, "a"), P("b", "a", None, "c"), "m"),
    "space here and elsewhere": (group_norm, P(None, "a"), P("b", "a", "c"), "m"),
    "classes": (cross_entropy, P(None, None, "a"), P(None, None, "a"), "d"),
    "classes, rows elsewhere": (cross_entropy, P(None, None, "a"), P("b", None, "a"), "d"),
    "classes here and elsewhere": (
        cross_entropy,
        P(None, None, "a"),
        P("b", None, ("a", "c")),
        "d",
    ),
}


def of_names(op: Callable[..., Any], letter: str, implementation: Any) -> Callable[..., Any]:
    """The op on shards along the axis "a". Its plain sums are added up here."""

    def local(*arrays: Any) -> Any:
        options = {"axis_names": {letter: ("a",)}, "implementation": implementation}
        *results, total, last = op(*arrays, **options)
        if op is group_norm:
            return (*results, total, jax.lax.psum(last, "a"))
        return (*results, jax.lax.psum(total, "a"), last)

    return local


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", NAMED)
def test_shard_map(case, check_vma, implementation, rng):
    """The named axis is Manual, and all other axes are Auto."""
    op, inside, outside, letter = NAMED[case]
    arrays, mesh = arrays_of(op, rng), cube()
    if op is group_norm:
        in_specs, out_specs = (inside, inside, P()), (inside, P(), P(), inside, P())
    else:
        in_specs, out_specs = (inside, P(), P("a")), (P(), P(), P(), inside)
    mapped = jax.shard_map(
        of_names(op, letter, implementation),
        mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"a"}, check_vma=check_vma,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        spread = placed(mesh, op, arrays, (outside, *in_specs[1 + (op is group_norm) :]))
        check(jax.jit(mapped)(*spread), op, arrays)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("case", ["space", "classes"])
def test_axis_name_of_vmap(case, implementation, rng):
    op, spec, _, letter = NAMED[case]
    axis, arrays = spec.index("a"), arrays_of(op, rng)

    def split(a: Any, axis: int) -> Any:
        return jnp.stack(jnp.split(a, 2, axis))

    def joined(a: Any) -> Any:
        return a[0] if a.ndim < arrays[0].ndim + 1 else jnp.concatenate(list(a), axis)

    if op is group_norm:
        axes, parts = (0, 0, None), [*(split(a, axis) for a in arrays[:2]), arrays[2]]
    else:
        axes, parts = (0, None, 0), [split(arrays[0], axis), arrays[1], split(arrays[2], 0)]
    local = of_names(op, letter, implementation)
    check(map(joined, jax.vmap(local, axes, axis_name="a")(*parts)), op, arrays)


@pytest.mark.parametrize("case", ["samples, space and groups", "rows and classes"])
def test_vmap(case, rng):
    """A mapped axis is one more axis of rows, or an axis of groups if a result has no rows."""
    op, specs, _ = SPREAD[case]
    first, second = arrays_of(op, rng), arrays_of(op, rng)
    mapped = 2 if op is group_norm else 1
    mesh = cube()
    stacked = [np.stack(pair) for pair in zip(first[:mapped], second[:mapped], strict=True)]
    axes = (*[0] * mapped, *[None] * (len(first) - mapped))
    over = (P(None, *specs[0]), *specs[1:])
    with jax.set_mesh(mesh):
        spread = placed(mesh, op, [*stacked, *first[mapped:]], over)
        found = jax.jit(jax.vmap(op, axes))(*spread)
    assert {call.groups for call in CALLS} == ({0, 1} if op is group_norm else {0})
    for i, arrays in enumerate((first, second)):
        check([r[i] for r in found], op, [*arrays[:mapped], *first[mapped:]])


def test_named_shards_run_the_handler_twice():
    """The first call computes the results that `combine` takes. The second computes the others."""
    local = of_names(cross_entropy, "d", "ffi")
    logits = np.arange(20, dtype=np.float32).reshape(2, 2, 5)  # a shape that is not traced yet
    labels, classes = np.array([0, 3], np.int32), np.arange(10, dtype=np.int32).reshape(2, 5)
    jax.vmap(local, (1, None, 0), axis_name="a")(logits, labels, classes)
    calls = {(*call.wanted, "log_sum" in call.present) for call in CALLS}
    assert calls == {("largest", "total", "logit_of_label", False), ("dlogits", True)}
