"""Group norm and instance norm: the suite of every op, options, meshes, gradient operators."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import EPSILON
from comparing import OPTIMIZED, assert_matches, widen
from conformance import OpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, largest_gather, mesh
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward
from jax_gradops._ops.batch_norm.spec import GROUP_NORM, INSTANCE_NORM


class GroupNormTests(OpTests):
    """With scale and bias. Here x is [samples, ..., channels]."""

    options = {"epsilon": EPSILON, "axis": -1}
    # Samples are spread: one for the gradients of parameters. Other axes are spread: one for the
    # statistics, one for all sums of the backward pass. Both: these three.
    all_reduces = (1, 2, 3)
    least = 2  # an x with fewer axes is one sample
    divides_features = True

    def op(self, x, *parameters, implementation=None):
        if x.ndim < self.least:
            return self.op(x[None], *parameters, implementation=implementation)[0]
        return self.norm(x, *parameters, implementation=implementation)

    def norm(self, *operands, implementation):
        return super().op(*operands, implementation=implementation)

    def oracle(self, x, *parameters):
        if x.ndim < self.least:
            y = self.oracle(x[None], *parameters)
            return oracles.Reference(y.value[0], y.magnitude[0])
        return super().oracle(x, *parameters)

    def oracle_vjp(self, dy, x, *parameters):
        if x.ndim < self.least:
            dx, *rest = self.oracle_vjp(dy[None], x[None], *parameters)
            return oracles.Reference(dx.value[0], dx.magnitude[0]), *rest
        return super().oracle_vjp(dy, x, *parameters)


@pytest.mark.newest_jax
class TestGroupNorm(GroupNormTests):
    """With silu."""

    form = GROUP_NORM.forms[1]


class TestInstanceNorm(GroupNormTests):
    """Channels first, without an activation. A matrix is one sample: its columns are channels."""

    variant = True
    form = INSTANCE_NORM.forms[0]
    least = 3

    def norm(self, x, *parameters, implementation):
        options = {**self.form.options, **self.options, "axis": 1}
        first = jnp.moveaxis(x, -1, 1)
        y = self.form.call(first, *parameters, **options, implementation=implementation)
        return jnp.moveaxis(y, 1, -1)


# --- Arguments and results -----------------------------------------------------------------------

NAMES = ("scale", "bias")


def problem(rng: np.random.Generator, shape: Any, axis: int, dtype: Any) -> list[Any]:
    """dy and x, then scale and bias in float32."""
    x, dy = rng.standard_normal((2, *shape)) * 1.5 + 0.5
    parameters = rng.uniform(0.5, 2, shape[axis]), rng.standard_normal(shape[axis])
    return [dy.astype(dtype), x.astype(dtype), *(p.astype(np.float32) for p in parameters)]


def check(results: Any, arrays: Any, **options: Any) -> None:
    """Compares y, dx, dscale and dbias with float64."""
    dy, x, *parameters = arrays
    wide = list(map(widen, arrays))
    unit = {"unit": 2.0**-50} if x.dtype == np.float64 else {}
    references = [
        oracles.group_norm(*wide[1:], **options),
        *oracles.group_norm_vjp(*wide, **options, **unit),
    ]
    accum = np.float64 if x.dtype == np.float64 else np.float32
    kinds = [x.dtype, dy.dtype, *(p.dtype for p in parameters)]
    for name, got, want, kind in zip(
        ("y", "dx", "dscale", "dbias"), results, references, kinds, strict=True
    ):
        assert_matches(got, want, kind, accum, f"{name} of {x.dtype}{list(x.shape)}, {options}")


#: Shapes, channel axes and numbers of groups. On an H100, a cluster of blocks takes a group of
#: (2, 10, 64, 100) or of the three shapes after it. A few lanes of a warp have a group of
#: (3, 10, 8, 8) and the next three shapes. With channels last, a block takes small images, or some
#: channels of one. The six shapes before the last three leave fewer channels or images for the last
#: block. The last three are too large.
LAYOUTS = [
    ((5, 6), 1, 2), ((3, 12), -1, 3), ((2, 3, 8), -1, 4), ((2, 8, 3), 1, 2), ((2, 4, 6, 5), 2, 3),
    ((2, 3, 4, 15), -1, 5), ((2, 15, 3, 4), 1, 3), ((2, 3, 2, 4, 6), -1, 6),
    ((2, 6, 3, 2, 4), 1, 1), ((2, 3, 10, 2, 4), -3, 5), ((4, 9, 9, 130), -1, 10),
    ((3, 66, 17, 17), 1, 33),
    ((2, 10, 64, 100), 1, 2), ((2, 10, 128, 100), 1, 2), ((2, 10, 300, 100), 1, 2),
    ((2, 16, 91, 91), 1, 2), ((2, 64, 7, 7), 1, 32),
    ((3, 10, 8, 8), 1, 5), ((2, 11, 12, 18), 1, 11), ((9, 24), -1, 3), ((70, 7), -1, 7),
    ((3, 2, 2, 48), -1, 3), ((3, 5, 48), -1, 2),
    ((2, 40, 8, 8), 1, 2),
    ((1, 5, 1, 320), -1, 32), ((3, 1, 1, 8), -1, 4), ((1, 1), 1, 1),
    ((2, 300, 21), -1, 7), ((2, 21, 300), 1, 7), ((1, 3000, 4), -1, 2), ((1, 4, 3000), 1, 2),
    ((2, 33, 3), -1, 3), ((2, 5000), 1, 4), ((67, 1000), 1, 2),
    ((3, 16, 64), -1, 64), ((80, 6, 56), -1, 7), ((120, 6, 40), -1, 20), ((120, 6, 35), -1, 7),
    ((601, 2, 16), -1, 2), ((601, 2, 24), -1, 8), ((601, 2, 5), -1, 5),
    ((2, 3000, 24), -1, 4), ((2, 3000, 24), -1, 8), ((2, 2001, 21), -1, 7),
]  # fmt: skip


@pytest.mark.B5
@pytest.mark.G4
@pytest.mark.parametrize(("shape", "axis", "groups"), LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_layouts(platform, implementation, shape, axis, groups, activation, rng):
    """Checks y, statistics and all gradients. Some groups have one element."""
    dtypes = [np.float32, jnp.bfloat16]
    if implementation == "xla":
        if shape not in ((2, 15, 3, 4), (2, 3, 4, 15)):
            return  # XLA uses one formula for all shapes
        dtypes = ["float16", "bfloat16", "float32", "float64"][:: 1 if axis == 1 else 3]
    options = {
        "num_groups": groups, "axis": axis, "epsilon": EPSILON, "activation": activation,
    }  # fmt: skip
    options["implementation"] = implementation

    def both(dy: Any, *operands: Any) -> Any:
        op = functools.partial(jax_gradops.group_norm, **options)
        return vjp_of(op)(dy, *operands), backward.group_norm_forward(*operands, **options)

    compiler_options = OPTIMIZED if implementation == "xla" else None
    run = jax.jit(both, compiler_options=compiler_options)
    for dtype in map(jnp.dtype, dtypes):
        arrays = problem(rng, shape, axis, dtype)
        results, (y, mean, rstd) = run(*arrays)
        check(results, arrays, **{k: v for k, v in options.items() if k != "implementation"})
        if implementation == "ffi":
            np.testing.assert_array_equal(y, results[0])
        parts = np.moveaxis(widen(arrays[1]), axis, 1).reshape(shape[0], groups, -1)
        assert mean.dtype == rstd.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(mean, parts.mean(-1), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(rstd, 1 / np.sqrt(parts.var(-1) + EPSILON), rtol=2e-6)


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "groups"), [((45, 12, 80, 84), 6), ((99, 1, 256, 256), 1)])
def test_many_bundles(platform, shape, groups, dtype, rng):
    """A multiprocessor of an H100 has 3 or 6 blocks at a time, not 1 or 2 as in other tests."""
    options = {"num_groups": groups, "axis": 1, "epsilon": EPSILON, "activation": "silu"}
    op = functools.partial(jax_gradops.group_norm, **options, implementation="ffi")
    arrays = problem(rng, shape, 1, jnp.dtype(dtype))
    check(jax.jit(vjp_of(op))(*arrays), arrays, **options)


def assert_statistics(x: Any, axis: int, groups: int) -> None:
    """Compares the kernel's mean, rstd and y of x with float64."""
    y, mean, rstd = backward.group_norm_forward(
        x, num_groups=groups, axis=axis, epsilon=0.0, implementation="ffi"
    )
    parts = np.moveaxis(widen(x), axis, 1).reshape(x.shape[0], groups, -1)
    np.testing.assert_allclose(mean, parts.mean(-1), rtol=1e-6, atol=1e-6 * np.abs(parts).max())
    np.testing.assert_allclose(rstd, 1 / parts.std(-1), rtol=1e-6)
    want = oracles.group_norm(widen(x), num_groups=groups, axis=axis, epsilon=0.0).value
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("values", ["far from 0", "squares overflow", "few are far off"])
@pytest.mark.parametrize(
    ("shape", "axis", "groups"),
    [((2, 300, 120), -1, 3), ((3, 1400, 24), -1, 2), ((1, 200, 3000), -1, 1), ((2, 12, 5000), 1, 3),
     ((2, 12, 20000), 1, 2), ((2, 12, 200), 1, 12), ((3, 40, 24), -1, 2), ((3, 41, 20), -1, 4)],
    ids=str,
)  # fmt: skip
def test_hard_statistics(platform, shape, axis, groups, values, rng):
    """Groups of several parts, with channels last also of parts of rows.

    On a GPU, other kernels take the small groups of the last three. Clusters of eight blocks take
    the groups of 20000 positions. The kernels add up distances from few elements of a group, or of
    a block's part.
    """
    x = rng.standard_normal(shape).astype(np.float32)
    if values == "far from 0":
        x += 1e3
    elif values == "squares overflow":
        x *= np.float32(1.3e19)
    else:
        x[:] = 0.1  # equal elements are rounded alike, so that errors add up
        parts = np.moveaxis(x, axis, 1).reshape(shape[0], groups, -1)
        parts[..., 0] = 1e3
        parts[..., parts.shape[-1] * 5 // 8] = 1e3  # the first of a block
        channels = parts.reshape(np.moveaxis(x, axis, 1).shape)
        x = np.ascontiguousarray(np.moveaxis(channels, 1, axis))
    assert_statistics(jax.device_put(x, jax.devices(platform)[0]), axis, groups)


def test_guess_of_the_mean_that_is_far_off(rng):
    """The CPU's kernel guesses means from 16 elements of 64 rows. Here these are unlike others."""
    x = rng.standard_normal((1, 16, 64, 8, 32)).astype(np.float32)
    for sample in range(16):
        x[:, :, 4 * sample, :, 2 * sample] = 1e3
    assert_statistics(jax.device_put(x.reshape(1, 1024, 256), jax.devices("cpu")[0]), -1, 8)


@pytest.mark.parametrize("groups", [1, 3, 12])
def test_is_another_norm(platform, implementation, groups, rng):
    """One group: layer norm of each sample. A group per channel: instance norm."""
    _, x, scale, bias = problem(rng, (3, 4, 5, 12), -1, np.float32)
    options = {"epsilon": EPSILON, "implementation": implementation}
    y = jax_gradops.group_norm(x, scale, bias, num_groups=groups, **options)
    if groups == 12:
        other = jax_gradops.instance_norm(x, scale, bias, **options)
        np.testing.assert_array_equal(y, other)
        one = [jax_gradops.batch_norm(sample, scale, bias, **options)[0] for sample in x]
        np.testing.assert_allclose(y, np.stack(one), rtol=1e-5, atol=1e-6)
        return
    parts = np.moveaxis(x.reshape(3, 20, groups, -1), 2, 1).reshape(3, groups, -1)
    x_hat = jax_gradops.layer_norm(parts, **options).reshape(3, groups, 20, -1)
    want = np.moveaxis(np.asarray(x_hat), 1, 2).reshape(x.shape) * scale + bias
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.newest_jax
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_x_is_not_copied(platform, groups, axis, dtype, rng):
    """XLA has been seen to copy x for a kernel that took one more axis of size 1."""
    shape = (2, 12, 1, 5) if axis == 1 else (2, 1, 5, 12)
    arrays = jax.device_put(problem(rng, shape, axis, dtype), jax.devices(platform)[0])
    options = {"num_groups": groups, "axis": axis, "implementation": "ffi"}
    op = functools.partial(jax_gradops.group_norm, **options)
    for function, operands in ((op, arrays[1:]), (vjp_of(op), arrays)):
        text = jax.jit(function).lower(*operands).compile().as_text()
        copies = re.findall(r"\w+\[([\d,]+)\]\S* copy\(", text)
        assert arrays[0].size not in [math.prod(map(int, dims.split(","))) for dims in copies]


@pytest.mark.parametrize("absent", ["scale", "bias", "both"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_absent_parameters(platform, implementation, absent, activation, rng):
    dy, x, scale, bias = problem(rng, (3, 5, 6), -1, np.float32)
    options = {
        "num_groups": 2, "epsilon": EPSILON, "activation": activation,
    }  # fmt: skip
    there = {"both": {}, "scale": {"bias": bias}, "bias": {"scale": scale}}[absent]

    def op(x: Any, there: Any) -> Any:
        return jax_gradops.group_norm(x, **there, **options, implementation=implementation)

    y, pull = jax.vjp(op, x, there)
    dx, gradients = pull(dy)
    wide = [widen(dy), widen(x), *(widen(there[n]) if n in there else None for n in NAMES)]
    options["axis"] = -1
    expected = oracles.group_norm_vjp(*wide, **options)
    assert_matches(y, oracles.group_norm(*wide[1:], **options), np.float32, np.float32, "y")
    assert_matches(dx, expected[0], np.float32, np.float32, "dx")
    for name, got in gradients.items():
        want = expected[1 + NAMES.index(name)]
        assert_matches(got, want, np.float32, np.float32, f"the gradient of {name}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_narrow_parameters(platform, implementation, dtype, rng):
    """They are added up in float32 over many samples, and rounded once."""
    dy, x, *parameters = problem(rng, (300, 2, 12), -1, np.float32)
    parameters = [p.astype(dtype) for p in parameters]
    options = {"num_groups": 3, "epsilon": EPSILON, "activation": "silu"}
    op = functools.partial(jax_gradops.group_norm, **options, implementation=implementation)
    results = jax.jit(vjp_of(op))(dy, x, *parameters)
    check(results, [dy, x, *parameters], **options, axis=-1)


# --- Meshes --------------------------------------------------------------------------------------

#: Shapes, channel axes, shardings, and the number of all-reduces with an Auto mesh.
SPREAD = {
    "samples": ((8, 4, 6, 16), -1, P("data"), 1),
    "samples over all": ((8, 4, 6, 16), -1, P(("data", "model")), 1),
    "space": ((2, 8, 6, 16), -1, P(None, "data", "model"), 2),
    "space, channels first": ((2, 16, 8, 6), 1, P(None, None, "data", "model"), 2),
    "samples and space": ((8, 16, 6, 4), 1, P("data", None, "model"), 3),
    "samples and groups": ((8, 16, 6, 4), 1, P("data", "model"), 1),
    "groups": ((2, 4, 6, 16), -1, P(None, None, None, "data"), 0),
    "channels of a group": ((8, 6, 16), -1, P("data", None, "model"), None),
    "parts of groups": ((8, 6, 12), -1, P("data", None, "model"), None),
}


@pytest.mark.R5
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", SPREAD)
def test_spread(platform, kind, case, rng):
    """Devices send numbers per sample and group, and the gradients of parameters. Means are large.

    Arrays of x's size are gathered only if a device does not have whole groups.
    """
    shape, axis, spec, reductions = SPREAD[case]
    devices = mesh(platform, kind)
    dy, x, *parameters = problem(rng, shape, axis, np.float32)
    x += 1e3
    options = {
        "num_groups": {"channels of a group": 1, "parts of groups": 3}.get(case, 4),
        "axis": axis, "epsilon": EPSILON, "activation": "silu",
    }  # fmt: skip
    op = functools.partial(jax_gradops.group_norm, **options, implementation="ffi")
    with jax.set_mesh(devices):
        arrays = [jax.device_put(a, NamedSharding(devices, spec)) for a in (dy, x)]
        arrays += [jax.device_put(p, NamedSharding(devices, P())) for p in parameters]
        compiled = jax.jit(vjp_of(op)).lower(*arrays).compile()
        results = compiled(*arrays)
    check(results, [dy, x, *parameters], **options)
    if case != "parts of groups" or kind != AxisType.Auto:  # there, XLA chooses
        assert all(r.sharding.is_equivalent_to(arrays[0].sharding, x.ndim) for r in results[:2])
    if reductions is None or devices.size < 8:
        return
    text = str(compiled.as_text())
    found = collectives(text)
    assert found.pop("all-reduce", 0) == reductions
    # Parameters are sharded as groups are. Their gradients are gathered.
    assert largest_gather(text) <= shape[axis] and found.keys() <= {"all-gather"}
    assert not found or "groups" in case


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["grad outside", "grad inside"])
def test_shard_map(platform, implementation, check_vma, inside, rng):
    """Each device has its own samples. With check_vma, gradients of parameters are summed."""
    devices = mesh(platform, AxisType.Auto)
    arrays = problem(rng, (16, 6, 8), -1, np.float32)
    options = {"num_groups": 4, "epsilon": EPSILON, "activation": "silu"}
    op = functools.partial(jax_gradops.group_norm, **options, implementation=implementation)
    rows, axes = P(("data", "model")), ("data", "model")
    shard_map = functools.partial(jax.shard_map, mesh=devices, check_vma=check_vma)

    def local(*arrays: Any) -> Any:
        y, dx, *gradients = vjp_of(op)(*arrays)
        return y, dx, *(gradients if check_vma else jax.lax.psum(gradients, axes))

    if inside:
        specs = rows, rows, P(), P()
        mapped = shard_map(local, in_specs=specs, out_specs=specs)
    else:
        mapped = vjp_of(shard_map(op, in_specs=(rows, P(), P()), out_specs=rows))
    check(jax.jit(mapped)(*arrays), arrays, **options, axis=-1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_partial_manual(platform, implementation, kind, rng):
    """shard_map over one axis of the mesh. The other axis shards the samples, too."""
    devices = mesh(platform, kind)
    arrays = problem(rng, (8, 6, 8), -1, np.float32)
    options = {"num_groups": 4, "epsilon": EPSILON, "activation": "silu"}
    op = functools.partial(jax_gradops.group_norm, **options, implementation=implementation)
    mapped = jax.shard_map(
        op, mesh=devices, axis_names={"data"}, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )
    specs = P(("data", "model")), P(("data", "model")), P(), P()
    with jax.set_mesh(devices):
        placed = [
            jax.device_put(a, NamedSharding(devices, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        check(jax.jit(vjp_of(mapped))(*placed), arrays, **options, axis=-1)


def test_saved_statistics_have_names(rng):
    """`jax.checkpoint` policies find them by these names."""
    dy, *operands = problem(rng, (3, 5, 6), -1, np.float32)
    op = functools.partial(jax_gradops.group_norm, num_groups=3, implementation="ffi")
    text = str(jax.make_jaxpr(vjp_of(op))(dy, *operands))
    for name in ("mean", "rstd", "delta"):
        assert f"name=group_norm_{name}" in text


# --- Gradient operators --------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), [((4, 6), 1), ((3, 5, 6), -1), ((3, 6, 4, 2), 1)])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize(
    ("x_dtype", "scale_dtype"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float32"),
     ("bfloat16", "bfloat16")],
)  # fmt: skip
def test_gradient_operator(
    platform, implementation, shape, axis, activation, x_dtype, scale_dtype, rng
):
    """Equals the gradient of the op. dbias has the dtype of the bias, or of the scale."""
    dy, x, *parameters = problem(rng, shape, axis, jnp.dtype(x_dtype))
    scale, bias = (p.astype(scale_dtype) for p in parameters)
    options = {"num_groups": 3, "axis": axis, "activation": activation}
    _, mean, rstd = backward.group_norm_forward(
        x, scale, bias, **options, epsilon=EPSILON, implementation=implementation
    )
    run = jax.jit(
        functools.partial(backward.group_norm_backward, **options, implementation=implementation)
    )
    gradients = run(dy, x, scale, bias, mean, rstd)
    y = jax_gradops.group_norm(
        x, scale, bias, **options, epsilon=EPSILON, implementation=implementation
    )
    check((y, *gradients), [dy, x, scale, bias], **options, epsilon=EPSILON)
    assert run(dy, x, scale, None, mean, rstd)[2].dtype == jnp.dtype(scale_dtype)
    _, dscale, dbias = run(dy, x, scale, bias.astype(np.float64), mean, rstd)
    assert (dscale.dtype, dbias.dtype) == (jnp.dtype(scale_dtype), np.float64)
    _, none, dbias = run(dy, x, None, None, mean, rstd)
    assert none is None and dbias.dtype == mean.dtype


# --- Flax and PyTorch ----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_flax(platform, groups, rng, flax_settings):
    linen = pytest.importorskip("flax.linen", reason="Flax is not installed")
    arrays = problem(rng, (3, 5, 4, 8), -1, np.float32)
    layer = linen.GroupNorm(num_groups=groups, epsilon=EPSILON)

    def theirs(x: Any, scale: Any, bias: Any) -> Any:
        y = layer.apply({"params": {"scale": scale, "bias": bias}}, x)
        return jax.nn.silu(y)

    op = functools.partial(
        jax_gradops.group_norm, num_groups=groups, epsilon=EPSILON, activation="silu"
    )
    for got, want in zip(vjp_of(op)(*arrays), vjp_of(theirs)(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(4, 6), (3, 6, 5, 4)], ids=str)
def test_pytorch(shape, rng):
    """group_norm, silu and their gradients, on the CPU."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dy, x, scale, bias = problem(rng, shape, 1, np.float32)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale, bias)]
    functional = torch.nn.functional
    want = functional.silu(functional.group_norm(tensors[0], 3, *tensors[1:], EPSILON))
    want.backward(torch.tensor(dy))
    op = functools.partial(
        jax_gradops.group_norm, num_groups=3, axis=1, epsilon=EPSILON, activation="silu"
    )
    expected = [want, *(t.grad for t in tensors)]
    for got, theirs in zip(vjp_of(op)(dy, x, scale, bias), expected, strict=True):
        np.testing.assert_allclose(got, theirs.detach().numpy(), rtol=2e-5, atol=2e-5)
