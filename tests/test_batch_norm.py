"""Batch norm: the suite of every op in both layouts, its options, its gradient operator."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import EPSILON, assert_last, channels_last, ordinary
from comparing import OPTIMIZED, assert_matches, widen
from conformance import OpTests
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward
from jax_gradops._ops.batch_norm.spec import BATCH_NORM


class BatchNormTests(OpTests):
    """With scale and bias. Here x is [..., channels]; the op may get another layout."""

    form = BATCH_NORM.forms[0]
    options = {"epsilon": EPSILON}
    # Forward: one for the statistics. Backward: one for both sums.
    all_reduces = (2,)

    def op(self, x, *parameters, implementation=None):
        if x.ndim == 1:  # x is one row
            return self.op(x[None], *parameters, implementation=implementation)[0]
        return self.batch_norm(*self.arrays(jnp, x), *parameters, implementation=implementation)

    def batch_norm(self, *operands, implementation):
        return super().op(*operands, implementation=implementation)

    def arrays(self, numpy: Any, x: Any) -> list[Any]:
        """x and, if the form adds one, a residual that depends on x. Its derivative is 0."""
        return [x, numpy.where(x > 0.5, 0.75, -1.25).astype(x.dtype)][: self.form.arrays]

    def oracle(self, x, *parameters):
        if x.ndim == 1:
            y = self.oracle(x[None], *parameters)
            return oracles.Reference(y.value[0], y.magnitude[0])
        return super().oracle(*self.arrays(np, x), *parameters)

    def oracle_vjp(self, dy, x, *parameters):
        if x.ndim == 1:
            dx, *rest = self.oracle_vjp(dy[None], x[None], *parameters)
            return oracles.Reference(dx.value[0], dx.magnitude[0]), *rest
        dx, *others = super().oracle_vjp(dy, *self.arrays(np, x), *parameters)
        return dx, *others[-self.parameters :]


@pytest.mark.newest_jax
class TestChannelsFirst(BatchNormTests):
    variant = True

    def batch_norm(self, x, *parameters, implementation):
        options = {**self.form.options, **self.options, "axis": 1}
        first = jnp.moveaxis(x, -1, 1)
        y = self.form.call(first, *parameters, **options, implementation=implementation)
        return jnp.moveaxis(y, 1, -1)


class TestWithResidual(BatchNormTests):
    """relu(bn(x) + residual) with channels last. `test_layouts` has all combinations."""

    form = BATCH_NORM.forms[2]

    def example(self, rng, shape, dtype, *parameter_dtypes):
        """Redraws small examples until no value is near a point without a derivative."""
        while True:
            dy, x, scale, bias = super().example(rng, shape, dtype, *parameter_dtypes)
            arrays = self.arrays(np, np.atleast_2d(widen(x)))
            (z,) = self.form.expected(
                *arrays, widen(scale), widen(bias), epsilon=EPSILON, relu=False
            )
            kinks = [widen(x) - 0.5, z.value]
            if x.size > 40 or all((np.abs(k) > 0.01).all() for k in kinks):
                return [dy, x, scale, bias]


# --- Arguments and results -----------------------------------------------------------------------


@pytest.mark.B5
@pytest.mark.G4
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5, 3), 1), ((5, 3), 0), ((6, 4, 5), 1), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), -1),
        ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 0), ((2, 3, 2, 4, 5), 1), ((2, 3, 2, 4, 5), -2),
        ((64, 5, 7, 7), 1), ((3, 70, 33, 33), 1), ((40, 9, 9, 130), -1), ((1, 8, 1, 1), 1),
        ((1, 1, 2000), 1), ((700, 1), 1), ((2, 3000), 1), ((150, 2100), 1), ((3, 3, 1356), 1),
        ((7, 5, 3799), 1), ((1000, 256), 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_layouts(platform, implementation, shape, axis, activation, adds, rng):
    """Checks y, statistics and all gradients, including the residual's."""
    dtypes = (np.float16, np.float32) if adds else (jnp.bfloat16, np.float32)
    if implementation == "xla":
        if shape not in ((2, 3, 4, 5), (3, 70, 33, 33)):
            return  # XLA uses one formula for all shapes
        dtypes = dtypes[:1] if axis == 1 else dtypes[1:]
    for dtype in dtypes:
        dy, x, residual, scale, bias = ordinary(shape, axis, dtype, rng)
        operands = (x, scale, bias, *((residual,) if adds else ()))

        def f(*operands: Any) -> Any:
            x, scale, bias, *rest = operands
            return jax_gradops.batch_norm(
                x, scale, bias, axis=axis, epsilon=EPSILON, activation=activation,
                residual=rest[0] if rest else None, implementation=implementation,
            )  # fmt: skip

        options = OPTIMIZED if implementation == "xla" else None

        def both(dy: Any, *operands: Any) -> Any:
            (y, mean, var), pull = jax.vjp(f, *operands)
            return y, mean, var, pull((dy, jnp.ones_like(mean), jnp.ones_like(var)))

        y, mean, var, gradients = jax.jit(both, compiler_options=options)(dy, *operands)
        wide = [channels_last(a, axis) for a in (dy, x)]
        rest = {
            "epsilon": EPSILON, "relu": activation == "relu",
            "residual": channels_last(residual, axis) if adds else None,
        }  # fmt: skip
        parameters = (widen(scale), widen(bias))
        expected_y = oracles.batch_norm(wide[1], *parameters, **rest)
        assert_last(y, expected_y, axis, dtype, "y")
        rows = tuple(range(x.ndim - 1))
        np.testing.assert_allclose(mean, wide[1].mean(rows), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(var, wide[1].var(rows), rtol=3e-6, atol=1e-9)
        assert mean.dtype == var.dtype == np.float32
        expected = oracles.batch_norm_vjp(*wide, *parameters, **rest)
        assert_last(gradients[0], expected[0], axis, dtype, "dx")
        for name, got, want in zip(("dscale", "dbias"), gradients[1:3], expected[1:3], strict=True):
            assert_matches(got, want, np.float32, np.float32, name)
        if adds:
            assert_last(gradients[3], expected[3], axis, dtype, "dresidual")


def test_statistics_are_constants(platform, implementation, rng):
    """Gradients flow only through y."""
    _, x, _, scale, bias = ordinary((4, 5, 6), -1, np.float32, rng)

    def loss(x: Any) -> Any:
        _, mean, var = jax_gradops.batch_norm(x, scale, bias, implementation=implementation)
        return jnp.sum(mean) + jnp.sum(var)

    assert not np.asarray(jax.grad(loss)(x)).any()


@pytest.mark.parametrize("axis", [-1, 1])
def test_inference(platform, implementation, axis, dtype, rng):
    """Compares with float64. The op is differentiable in all arrays, in forward mode too."""
    dy, x, _, scale, bias = ordinary((4, 6, 5, 3), axis, dtype, rng)
    mean = rng.standard_normal(scale.shape).astype(np.float32)
    var = rng.uniform(0.5, 2, scale.shape).astype(np.float32)

    def f(x: Any, mean: Any, var: Any, scale: Any, bias: Any, implementation: Any) -> Any:
        return jax_gradops.batch_norm_inference(
            x, scale, bias, mean=mean, var=var, axis=axis, epsilon=EPSILON,
            implementation=implementation,
        )  # fmt: skip

    def formula(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        along = [1] * x.ndim
        along[axis] = -1
        m, v, s, b = (jnp.reshape(a, along) for a in (mean, var, scale, bias))
        return (x - m) / jnp.sqrt(v + EPSILON) * s + b

    operands = (x, mean, var, scale, bias)
    wide = [widen(a) for a in operands]
    results = vjp_of(functools.partial(f, implementation=implementation))(dy, *operands)
    expected = vjp_of(formula)(widen(dy), *wide)
    for got, want in zip(results, expected, strict=True):
        eps = float(jnp.finfo(got.dtype).eps)
        np.testing.assert_allclose(
            widen(got), want, rtol=4 * eps, atol=40 * float(jnp.finfo(np.float32).eps)
        )
    assert results[0].dtype == dtype
    op = functools.partial(f, implementation=implementation)
    tangent = jax.jvp(op, operands, operands)[1]
    assert tangent.dtype == dtype and np.isfinite(widen(tangent)).all()


def test_inference_is_xlas_unless_asked_for(platform):
    x, one = jnp.ones((2, 3)), jnp.ones(3)
    op = functools.partial(jax_gradops.batch_norm_inference, mean=one, var=one)
    assert "jax_gradops." not in jax.jit(op).lower(x).as_text()
    insisting = functools.partial(op, implementation="ffi")
    assert "jax_gradops.batch_norm_fwd" in jax.jit(insisting).lower(x).as_text()
    in_use = jax_gradops.implementation_in_use("batch_norm_inference", "cpu")
    assert in_use.implementation == "xla" and "fuses" in in_use.reason
    with jax_gradops.use_implementation("ffi"):
        assert "jax_gradops." in jax.jit(lambda x: op(x)).lower(x).as_text()


# --- BatchNormalizationGrad ----------------------------------------------------------------------


def transcription(dy: Any, x: Any, scale: Any, mean: Any, rstd: Any) -> tuple[Any, Any, Any]:
    """The operator's published definition in float64. Channels are the second axis."""
    dy, x, scale, mean, rstd = map(widen, (dy, x, scale, mean, rstd))
    axes = (0, *range(2, x.ndim))
    along = (-1, *[1] * (x.ndim - 2))
    n = x.size / x.shape[1]
    x_hat = (x - mean.reshape(along)) * rstd.reshape(along)
    dbias, dscale = dy.sum(axes), (dy * x_hat).sum(axes)
    inner = n * dy - dbias.reshape(along) - x_hat * dscale.reshape(along)
    return (scale * rstd).reshape(along) / n * inner, dscale, dbias


@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 7), (3, 5, 4, 6), (2, 5, 3, 2, 4)], ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "scale_dtype"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float16"),
     ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)  # fmt: skip
def test_gradient_operator(platform, implementation, shape, x_dtype, scale_dtype, rng):
    """Statistics are float32, or float64 for float64."""
    if implementation == "xla" and len(shape) != 4:
        return  # XLA uses one formula for all shapes
    dtype, parameter = jnp.dtype(x_dtype), jnp.dtype(scale_dtype)
    dy, x = ((2 * rng.standard_normal(shape) + 0.5).astype(dtype) for _ in range(2))
    scale = rng.uniform(0.5, 2, 5).astype(parameter)
    run = functools.partial(
        backward.batch_norm_forward, axis=1, epsilon=EPSILON, implementation=implementation
    )
    y, mean, rstd = jax.jit(run)(x, scale)
    accum = np.float64 if x_dtype == "float64" else np.float32
    assert y.dtype == dtype and mean.dtype == rstd.dtype == accum
    axes = (0, *range(2, x.ndim))
    np.testing.assert_allclose(mean, widen(x).mean(axes), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(widen(x).var(axes) + EPSILON), rtol=1e-6)
    run = functools.partial(backward.batch_norm_backward, axis=1, implementation=implementation)
    results = jax.jit(run)(dy, x, scale, mean, rstd)
    for got, want, kind in zip(
        results, transcription(dy, x, scale, mean, rstd), (dtype, parameter, parameter), strict=True
    ):
        assert got.dtype == kind
        final = float(jnp.finfo(kind).eps)
        size = np.abs(want).max() + np.abs(widen(dy)).sum() / 5
        np.testing.assert_allclose(
            widen(got), want, rtol=0.6 * final, atol=8 * float(jnp.finfo(accum).eps) * size
        )
    alone = jax.jit(run)(dy, x, None, mean, rstd)
    assert alone[1] is None and alone[2].dtype == accum


# --- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 5), (4, 6, 9, 9)], ids=str)
def test_pytorch(shape, rng):
    """native_batch_norm and its gradient, on the CPU."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dy, x, _, scale, bias = ordinary(shape, 1, np.float32, rng)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale, bias)]
    want, mean, rstd = torch.ops.aten.native_batch_norm(*tensors, None, None, True, 0.1, EPSILON)
    want.backward(torch.tensor(dy))

    def op(*operands: Any) -> Any:
        return jax_gradops.batch_norm(*operands, axis=1, epsilon=EPSILON, implementation="ffi")[0]

    results = vjp_of(op)(dy, x, scale, bias)
    expected = [want.detach(), *(t.grad for t in tensors)]
    _, our_mean, our_rstd = backward.batch_norm_forward(x, axis=1, epsilon=EPSILON)
    pairs = [*zip(results, expected, strict=True), (our_mean, mean), (our_rstd, rstd)]
    for got, theirs in pairs:
        np.testing.assert_allclose(got, theirs.detach().numpy(), rtol=2e-5, atol=2e-5)
