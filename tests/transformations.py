"""Every op under every transformation, in every dtype: a part of conformance.py.

A transformation takes an op and examples (dy, x, parameters). It computes y and the gradients of
each example in its own way. The results must match the oracle. Every transformation must work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from jax import export, lax
from jax.test_util import check_grads

import jax_gradops

Op: TypeAlias = Callable[..., Any]
Example: TypeAlias = Sequence[Any]
#: y and the gradients for each example, in order.
Outcomes: TypeAlias = list[tuple[Any, ...]]


def vjp_of(op: Op) -> Op:
    """Maps an op to (dy, *operands) -> (y, *gradients)."""

    def f(dy: Any, *operands: Any) -> tuple[Any, ...]:
        y, pull = jax.vjp(op, *operands)
        return (y, *pull(dy))

    return f


def directional_derivative(
    function: Callable[..., Sequence[np.ndarray]],
    at: Sequence[np.ndarray],
    direction: Sequence[np.ndarray],
    step: float = 1e-3,
) -> list[np.ndarray]:
    """Derivatives of all results of `function`, by central differences of fourth order."""

    def moved(h: float) -> Sequence[np.ndarray]:
        return function(*(a + h * d for a, d in zip(at, direction, strict=True)))

    far, near = (
        [(p - m) / (2 * h) for p, m in zip(moved(h), moved(-h), strict=True)]
        for h in (2 * step, step)
    )
    return [(4 * n - f) / 3 for n, f in zip(near, far, strict=True)]


def _value_and_grad(op: Op, dy: Any, *operands: Any) -> tuple[Any, ...]:
    def loss(*operands: Any) -> Any:
        y = op(*operands)
        return jnp.sum(dy * y), y

    gradients, y = jax.grad(loss, argnums=tuple(range(len(operands))), has_aux=True)(*operands)
    return (y, *gradients)


def _stacked(examples: Sequence[Example]) -> list[Any]:
    return list(map(np.stack, zip(*examples, strict=True)))


def _unstacked(results: Sequence[Any]) -> Outcomes:
    # NumPy slices them: JAX would compile the slicing
    return list(zip(*map(np.asarray, results), strict=True))


# --- The transformations -------------------------------------------------------------------------


def eager(op: Op, examples: Sequence[Example]) -> Outcomes:
    return [vjp_of(op)(*e) for e in examples]


def jit(op: Op, examples: Sequence[Example]) -> Outcomes:
    f = jax.jit(vjp_of(op))
    return [f(*e) for e in examples]


def jitted_op(op: Op, examples: Sequence[Example]) -> Outcomes:
    return eager(jax.jit(op), examples)


def grad(op: Op, examples: Sequence[Example]) -> Outcomes:
    f = jax.jit(functools.partial(_value_and_grad, op))
    return [f(*e) for e in examples]


def vmap_of_grad(op: Op, examples: Sequence[Example]) -> Outcomes:
    return _unstacked(
        jax.jit(jax.vmap(functools.partial(_value_and_grad, op)))(*_stacked(examples))
    )


def grad_of_vmap(op: Op, examples: Sequence[Example]) -> Outcomes:
    return _unstacked(jax.jit(vjp_of(jax.vmap(op)))(*_stacked(examples)))


def grad_of_scan(op: Op, examples: Sequence[Example]) -> Outcomes:
    def scan(*operands: Any) -> Any:
        return lax.scan(lambda carry, slices: (carry, op(*slices)), None, operands)[1]

    return _unstacked(jax.jit(vjp_of(scan))(*_stacked(examples)))


def scan_of_grad(op: Op, examples: Sequence[Example]) -> Outcomes:
    def scan(*arrays: Any) -> Any:
        return lax.scan(lambda carry, slices: (carry, vjp_of(op)(*slices)), None, arrays)[1]

    return _unstacked(jax.jit(scan)(*_stacked(examples)))


def grad_of_fori_loop(op: Op, examples: Sequence[Example]) -> Outcomes:
    def loop(*operands: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, y: op(*operands), jnp.zeros_like(dy))

    dy, *operands = examples[0]
    return [jax.jit(vjp_of(loop))(dy, *operands)]


def while_loop_of_grad(op: Op, examples: Sequence[Example]) -> Outcomes:
    def loop(*example: Any) -> Any:
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), vjp_types(*example))
        return lax.while_loop(
            lambda carry: carry[0] < 2, lambda c: (c[0] + 1, vjp_of(op)(*example)), (0, start)
        )[1]

    vjp_types = functools.partial(jax.eval_shape, vjp_of(op))
    return [jax.jit(loop)(*examples[0])]


def cond(op: Op, examples: Sequence[Example]) -> Outcomes:
    def choose(*operands: Any) -> Any:
        x = operands[0]
        return lax.cond(x.ravel()[0] == x.ravel()[0], op, lambda *a: 0 * op(*a), *operands)

    return jit(choose, examples)


def switch_under_vmap(op: Op, examples: Sequence[Example]) -> Outcomes:
    """vmap turns the branch into a selection: both results are computed."""

    def choose(dy: Any, *operands: Any) -> Any:
        x = operands[0]
        return lax.cond(x.ravel()[0] == x.ravel()[0], vjp_of(op), vjp_of(op), dy, *operands)

    return _unstacked(jax.jit(jax.vmap(choose))(*_stacked(examples)))


def _remat(policy: Any, op: Op, examples: Sequence[Example]) -> Outcomes:
    return jit(jax.checkpoint(op, policy=policy), examples)


def remat_of_a_block(op: Op, examples: Sequence[Example]) -> Outcomes:
    """The op between other operations. Their results are not kept either."""

    def block(x: Any, *parameters: Any) -> Any:
        y = op(jnp.swapaxes(jnp.swapaxes(x, 0, 1), 0, 1) * jnp.ones_like(x), *parameters)
        return y * jnp.ones_like(y)

    return jit(jax.checkpoint(block), examples)


def remat_of_scan(op: Op, examples: Sequence[Example]) -> Outcomes:
    return grad_of_scan(jax.checkpoint(op, prevent_cse=False), examples)


def donation(op: Op, examples: Sequence[Example]) -> Outcomes:
    f = jax.jit(vjp_of(op), donate_argnums=(0, 1))
    outcomes = []
    for example in examples:
        arrays = list(map(jnp.array, example))
        outcomes.append(f(*arrays))
        assert arrays[1].is_deleted()
    return outcomes


def disable_jit(op: Op, examples: Sequence[Example]) -> Outcomes:
    with jax.disable_jit():
        return eager(op, [list(map(jnp.asarray, e)) for e in examples])


def debug_nans(op: Op, examples: Sequence[Example]) -> Outcomes:
    """No result is NaN. No scratch or unused memory is mistaken for a NaN result."""
    with jax.debug_nans(True):
        return jit(op, examples) + disable_jit(op, examples)


@contextlib.contextmanager
def all_errors_checked() -> Iterator[None]:
    names = [f"jax_error_checking_behavior_{kind}" for kind in ("nan", "divide", "oob")]
    for name in names:
        jax.config.update(name, "raise")
    try:
        yield
        assert {getattr(jax.config, name) for name in names} == {"raise"}
    finally:
        for name in names:
            jax.config.update(name, "ignore")


def error_checks(op: Op, examples: Sequence[Example]) -> Outcomes:
    with all_errors_checked():
        return jit(op, examples) + eager(op, examples)


def transfer_guard(op: Op, examples: Sequence[Example]) -> Outcomes:
    placed = jax.device_put(list(map(list, examples)))
    with jax.transfer_guard("disallow"):
        return jit(op, placed)


def ahead_of_time(op: Op, examples: Sequence[Example]) -> Outcomes:
    compiled = jax.jit(vjp_of(op)).lower(*examples[0]).compile()
    return [compiled(*e) for e in examples]


def make_jaxpr(op: Op, examples: Sequence[Example]) -> Outcomes:
    f = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(vjp_of(op))(*examples[0]))
    return [tuple(f(*e)) for e in examples]


def eval_shape(op: Op, examples: Sequence[Example]) -> Outcomes:
    outcomes = jit(op, examples)
    types = jax.eval_shape(vjp_of(op), *examples[0])
    assert [(t.shape, t.dtype) for t in types] == [(a.shape, a.dtype) for a in outcomes[0]]
    return outcomes


def _export(symbols: str, op: Op, examples: Sequence[Example]) -> Outcomes:
    """The exported program is serialised and read again, also with a symbolic number of rows."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    rows = np.shape(examples[0][1])

    def type_of(a: Any) -> jax.ShapeDtypeStruct:
        shape = export.symbolic_shape(symbols, scope=scope) if np.shape(a) == rows else np.shape(a)
        return jax.ShapeDtypeStruct(shape, a.dtype)

    scope = export.SymbolicScope()
    exported = export.export(
        jax.jit(op),
        platforms=[_platform()],
        disabled_checks=jax_gradops.EXPORT_DISABLED_CHECKS,
    )(*map(type_of, examples[0][1:]))
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    return jit(loaded.call, examples)


def _platform() -> str:
    device = jax.config.jax_default_device
    return "cuda" if device is not None and device.platform == "gpu" else "cpu"


POLICIES = jax.checkpoint_policies
# The names under which ops save their statistics.
SAVED = (
    "layer_norm_mean", "layer_norm_rstd", "rms_norm_rstd",
    "batch_norm_mean", "batch_norm_rstd", "batch_norm_delta",
    "group_norm_mean", "group_norm_rstd", "group_norm_delta",
)  # fmt: skip

TRANSFORMATIONS: dict[str, Callable[[Op, Sequence[Example]], Outcomes]] = {
    f.__name__: f
    for f in (
        eager, jit, jitted_op, grad, vmap_of_grad, grad_of_vmap, grad_of_scan, scan_of_grad,
        grad_of_fori_loop, while_loop_of_grad, cond, switch_under_vmap, remat_of_a_block,
        remat_of_scan, donation, disable_jit, debug_nans, error_checks, transfer_guard,
        ahead_of_time, make_jaxpr, eval_shape,
    )
} | {
    "remat": functools.partial(_remat, None),
    "remat, everything saved": functools.partial(_remat, POLICIES.everything_saveable),
    "remat, nothing saved": functools.partial(_remat, POLICIES.nothing_saveable),
    "remat, products saved": functools.partial(_remat, POLICIES.dots_with_no_batch_dims_saveable),
    "remat, statistics saved": functools.partial(
        _remat, POLICIES.save_only_these_names(*SAVED)
    ),
    "export": functools.partial(_export, "4, 9"),
    "export, symbolic rows": functools.partial(_export, "rows, 9"),
}  # fmt: skip


# XLA's operations are transformed by JAX itself. They once went wrong under these.
OF_REFERENCE = (
    "vmap_of_grad", "grad_of_scan", "remat", "disable_jit", "error_checks", "export, symbolic rows",
)  # fmt: skip


class TransformationTests:
    """Mixed into `OpTests`."""

    @pytest.mark.parametrize("transformation", TRANSFORMATIONS)
    def test_transformation(self, platform, transformation, dtype, rng):
        examples = [self.example(rng, (4, 9), dtype) for _ in range(3)]
        op = functools.partial(self.op, implementation="ffi")
        outcomes = TRANSFORMATIONS[transformation](op, examples)
        for i, results in enumerate(outcomes):
            self.check(results, examples[i % 3], f"{transformation}, example {i % 3}")

    @pytest.mark.parametrize("transformation", OF_REFERENCE)
    def test_transformation_of_reference(self, platform, transformation, rng):
        examples = [self.example(rng, (4, 9), jnp.float32) for _ in range(3)]
        op = functools.partial(self.op, implementation="xla")
        outcomes = TRANSFORMATIONS[transformation](op, examples)
        for i, results in enumerate(outcomes):
            self.check(results, examples[i % 3], f"{transformation}, example {i % 3}")

    def test_jacrev(self, platform, dtype, rng):
        """Each row of the Jacobian is a gradient."""
        dy, *operands = self.example(rng, (2, 5), dtype)
        op = functools.partial(self.op, implementation="ffi")
        jacobians = jax.jit(jax.jacrev(op, argnums=tuple(range(len(operands)))))(*operands)
        y, jacobians = op(*operands), list(map(np.asarray, jacobians))
        for index in np.ndindex(np.shape(dy)):
            one_hot = np.zeros_like(dy)
            one_hot[index] = 1
            self.check((y, *(j[index] for j in jacobians)), [one_hot, *operands], f"row {index}")

    @pytest.mark.G9
    @pytest.mark.parametrize("order", ["reverse over reverse", "forward over reverse"])
    @pytest.mark.parametrize(
        ("implementation", "dtype"), [("ffi", "float32"), ("ffi", "float64"), ("xla", "float64")]
    )
    def test_hessian_vector_product(self, platform, implementation, dtype, order, rng):
        """Compares with finite differences of the oracle's gradient."""
        dtype = jnp.dtype(dtype)
        dy, *operands = self.example(rng, (3, 9), dtype)
        _, *direction = self.example(rng, (3, 9), dtype)
        f = vjp_of(functools.partial(self.op, implementation=implementation))

        def gradient(dy: Any, *operands: Any) -> Any:
            return f(dy, *operands)[1:]

        def reverse(dy: Any, *operands: Any) -> Any:
            def along(dy: Any, *operands: Any) -> Any:
                pairs = zip(gradient(dy, *operands), direction, strict=True)
                return sum(jnp.sum(g * v) for g, v in pairs)

            return jax.grad(along, argnums=tuple(range(len(operands) + 1)))(dy, *operands)

        def forward(dy: Any, *operands: Any) -> Any:
            zero = jnp.zeros_like(dy)
            tangent = jax.jvp(f, (dy, *operands), (zero, *direction))[1]
            return tangent

        through_dy, *actual = jax.jit(reverse if order.startswith("reverse") else forward)(
            dy, *operands
        )
        wide, wide_direction = ([np.float64(a) for a in e] for e in (operands, direction))

        def oracle_gradient(*operands: np.ndarray) -> list[np.ndarray]:
            return [r.value for r in self.oracle_vjp(np.float64(dy), *operands)]

        def value(*operands: np.ndarray) -> list[np.ndarray]:
            return [self.oracle(*operands).value]

        expected = directional_derivative(oracle_gradient, wide, wide_direction)
        expected += directional_derivative(value, wide, wide_direction)
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-8
        for a, e in zip([*actual, through_dy], expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * (1 + np.abs(e).max()))

    def test_hessian(self, platform, rng):
        """`jax.hessian` (forward over reverse) equals reverse over reverse."""
        dy, *operands = self.example(rng, (2, 5), jnp.float64)
        everything = tuple(range(len(operands)))

        def loss(*operands: Any) -> Any:
            return jnp.sum(dy * self.op(*operands, implementation="ffi"))

        f = jax.hessian(loss, everything), jax.jacrev(jax.jacrev(loss, everything), everything)
        ours, expected = jax.jit(lambda *a: [g(*a) for g in f])(*operands)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), ours, expected
        )

    @pytest.mark.G9
    @pytest.mark.G11
    def test_check_grads(self, platform, implementation, rng):
        _, *operands = self.example(rng, (2, 5), jnp.float64)
        op = jax.jit(functools.partial(self.op, implementation=implementation))
        check_grads(
            op, tuple(map(jnp.asarray, operands)), order=2, modes=["rev"], atol=1e-5, rtol=1e-5
        )

    def test_forward_mode(self, platform, rng):
        """With "xla": <dy, J v> = <J^T dy, v>. With the kernels, the tangent is equal."""
        dy, *operands = self.example(rng, (3, 9), jnp.float64)
        _, *direction = self.example(rng, (3, 9), jnp.float64)
        op = functools.partial(self.op, implementation="xla")
        _, tangent = jax.jvp(op, tuple(operands), tuple(direction))
        expected = self.oracle_vjp(dy, *operands)
        np.testing.assert_allclose(
            np.sum(dy * tangent),
            sum(np.sum(r.value * v) for r, v in zip(expected, direction, strict=True)),
            rtol=1e-11,
        )
        op = functools.partial(self.op, implementation="ffi")
        same = jax.jvp(op, tuple(operands), tuple(direction))[1]
        np.testing.assert_allclose(same, tangent, rtol=1e-11, atol=1e-13)

    def test_debug_nans_finds_nan(self, platform, rng):
        dy, x, *parameters = self.example(rng, (4, 9), jnp.float32)
        x[1, 2] = np.nan
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            jax.jit(vjp_of(functools.partial(self.op, implementation="ffi")))(dy, x, *parameters)

    def test_weak_types_and_scalars(self, platform, implementation, rng):
        """A weakly typed array counts as an array of its dtype. The result is not weakly typed."""
        op = functools.partial(self.op, implementation=implementation)
        parameters = self.example(rng, (3, 4), jnp.float64)[2:]
        weak = jnp.broadcast_to(jnp.asarray(0.75), (3, 4))
        assert weak.weak_type
        strong = np.full((3, 4), 0.75)
        y = op(weak, *parameters)
        assert not y.weak_type
        assert_bitwise_equal(y, op(strong, *parameters))
