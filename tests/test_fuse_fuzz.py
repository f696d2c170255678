"""`jax_gradops.fuse` on random code: ways to write a formula, and small changes of a formula.

A way to write a formula is random algebra, which must be found. A change may be found or not. The
fused function must then have the changed function's results and derivatives, in float64.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fuzz import forget_now_and_then

import jax_gradops

pytestmark = pytest.mark.newest_jax
LONG = hypothesis.settings().max_examples > 100
SEEDS = st.integers(0, 2**32)
# Axes of one size show where two axes are confused.
SHAPES = [(4, 4, 4), (2, 3, 8)]


class Algebra:
    """Steps of a formula, each written in a random way.

    With `trap`, the value of one random step is changed. With `kept`, some values are results too.
    """

    def __init__(self, seed: int, trap: bool = False) -> None:
        self.rng = random.Random(seed)
        self.changed_step = self.rng.randrange(1, 14) if trap else 0
        self.step = 0
        self.kept: list[jax.Array] = []
        self.keeps = trap and self.rng.random() < 0.2
        self._start = self.rng.getstate()

    def again(self) -> None:
        """Before each trace: the same choices."""
        self.rng.setstate(self._start)
        self.step = 0
        self.kept = []

    def one(self, *choices: Callable[[], Any]) -> Any:
        return self.value(self.rng.choice(choices)())

    def value(self, x: Any) -> Any:
        """Each value of a formula passes here."""
        self.step += 1
        if self.keeps and self.rng.random() < 0.1:
            self.kept.append(x)
        if self.step != self.changed_step:
            return x
        return self.rng.choice(CHANGES)(self.rng, x)

    def number(self, c: float) -> float:
        self.step += 1
        if self.step != self.changed_step:
            return c
        return c * (1 + self.rng.choice([1e-2, 1e-3, -1e-3, -2.0]))

    def add(self, a: Any, b: Any) -> Any:
        return self.one(lambda: a + b, lambda: b + a, lambda: a - (-b), lambda: b - (-a))

    def sub(self, a: Any, b: Any) -> Any:
        return self.one(lambda: a - b, lambda: a + (-b), lambda: -(b - a), lambda: -b + a)

    def mul(self, *factors: Any) -> Any:
        order = list(factors)
        self.rng.shuffle(order)
        if len(order) == 3 and self.rng.random() < 0.5:
            return self.value(order[0] * self.value(order[1] * order[2]))
        return self.value(functools.reduce(lambda a, b: a * b, order))

    def div(self, a: Any, b: Any) -> Any:
        return self.one(lambda: a / b, lambda: a * (1 / b), lambda: jnp.reciprocal(b) * a)

    def square(self, x: Any) -> Any:
        return self.one(
            lambda: x * x, lambda: x**2, lambda: jax.lax.square(x), lambda: jnp.power(x, 2.0),
            lambda: jax.lax.integer_pow(x, 2),
        )  # fmt: skip

    def mean(self, x: Any, axis: Any = -1) -> Any:
        axes = (axis,) if isinstance(axis, int) else axis
        n = math.prod(x.shape[a] for a in axes)
        return self.one(
            lambda: jnp.mean(x, axis, keepdims=True),
            lambda: jnp.sum(x, axis, keepdims=True) / n,
            lambda: jnp.sum(x, axis, keepdims=True) * self.number(1 / n),
            lambda: jnp.expand_dims(jnp.mean(x, axis), axis),
            lambda: jnp.sum(x / n, axis, keepdims=True),
            lambda: jnp.broadcast_to(jnp.mean(x, axis, keepdims=True), x.shape),
        )

    def variance(self, x: Any, mean: Any, axis: Any = -1) -> Any:
        return self.one(
            lambda: self.mean(self.square(self.sub(x, mean)), axis),
            lambda: self.sub(self.mean(self.square(x), axis), self.square(mean)),
            lambda: jnp.maximum(self.mean(self.square(x), axis) - self.square(mean), 0.0),
            lambda: jnp.var(x, axis, keepdims=True),
            lambda: self.mean(self.mul(x, self.sub(x, mean)), axis),
        )

    def inverse_root(self, v: Any) -> Any:
        exponent = self.number(0.5)
        return self.one(
            lambda: jax.lax.rsqrt(v), lambda: v**-exponent, lambda: 1 / jnp.sqrt(v),
            lambda: jnp.reciprocal(jnp.sqrt(v)), lambda: 1 / v**exponent,
            lambda: jnp.sqrt(1 / v),
        )  # fmt: skip

    def vector(self, a: jax.Array, rank: int, axis: int = -1) -> Any:
        """A parameter, stored in some shape, as an array with `rank` axes."""
        shape = [1] * rank
        shape[axis] = a.size
        stored = a.reshape(self.rng.choice([(-1,), (1, -1), (1, 1, -1)]))
        return self.value(jnp.reshape(stored, shape))

    def scaled(self, centered: Any, root: Any, scale: Any, bias: Any) -> Any:
        """centered * root * scale + bias. Each of the last two may be None."""
        factors = [centered, root] if scale is None else [centered, root, scale]
        y = self.mul(*factors)
        return y if bias is None else self.add(y, bias)


# --- Changes of a value --------------------------------------------------------------------------


@jax.custom_jvp
def double_tangent(x: jax.Array) -> jax.Array:
    return x * 1.0


double_tangent.defjvp(lambda primals, tangents: (primals[0] * 1.0, 2 * tangents[0]))


@jax.custom_vjp
def double_cotangent(x: jax.Array) -> jax.Array:
    return x * 1.0


double_cotangent.defvjp(lambda x: (x * 1.0, None), lambda _, dy: (2 * dy,))


def own_jvp(x: jax.Array) -> jax.Array:
    """A custom_jvp function whose derivative is right."""
    function = jax.custom_jvp(lambda x: x * 1.0)
    function.defjvp(lambda primals, tangents: (primals[0] * 1.0, tangents[0]))
    return function(x)


def other_axes(rng: random.Random, x: jax.Array) -> jax.Array:
    """Two axes of one size change places."""
    pairs = [(i, j) for i in range(x.ndim) for j in range(i) if x.shape[i] == x.shape[j]]
    return jnp.swapaxes(x, *rng.choice(pairs)) if pairs else x[..., ::-1]


def noise(rng: random.Random, x: jax.Array) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rng.randrange(99)).uniform(0.9, 1.1, x.shape))


CHANGES: list[Callable[[random.Random, jax.Array], jax.Array]] = [
    lambda rng, x: jax.lax.stop_gradient(x),
    lambda rng, x: x * rng.choice([1.001, 0.99, -1.0, 2.0]),
    lambda rng, x: x + rng.choice([1e-5, 1e-3, 0.1, -1e-5]),
    lambda rng, x: x * noise(rng, x),
    lambda rng, x: x + noise(rng, x),
    lambda rng, x: double_tangent(x),
    lambda rng, x: own_jvp(x),
    lambda rng, x: x.astype(jnp.float32).astype(x.dtype),
    lambda rng, x: x.astype(jnp.bfloat16).astype(x.dtype),
    lambda rng, x: jax.lax.reduce_precision(x, 8, 7),
    lambda rng, x: jnp.where(jnp.arange(x.size).reshape(x.shape) % 3 == 0, x, 0.5),
    lambda rng, x: jnp.where(jnp.abs(x) < 1, x, x * 2),
    lambda rng, x: jnp.maximum(x, 0.01),
    lambda rng, x: jax.nn.relu(x),
    lambda rng, x: jnp.minimum(x, 1.5),
    lambda rng, x: x[..., ::-1],
    lambda rng, x: jnp.roll(x, 1, -1),
    other_axes,
    lambda rng, x: jnp.broadcast_to(jnp.mean(x, 0, keepdims=True), x.shape),
    lambda rng, x: jnp.broadcast_to(x[..., :1], x.shape),
    lambda rng, x: jnp.broadcast_to(jnp.max(x, -1, keepdims=True), x.shape),
    lambda rng, x: jnp.abs(x),
    lambda rng, x: jnp.sqrt(x * x),
    lambda rng, x: jnp.sin(x),
    lambda rng, x: jax.checkpoint(jnp.sin)(x),
    lambda rng, x: jax.jit(lambda x: x + 0.0)(x),
    lambda rng, x: jnp.abs(x) ** 1.02,
    lambda rng, x: jnp.nan_to_num(x),
    lambda rng, x: jnp.round(x, 3),
    lambda rng, x: jax.lax.optimization_barrier(x),
    lambda rng, x: jnp.clip(x, -1.0, 1.0),
]


# --- Formulas ------------------------------------------------------------------------------------


def layer_norm(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    epsilon = a.number(a.rng.choice([1e-5, 1e-3, 1e-6]))
    scale, bias = (p if p is None else a.vector(p, x.ndim) for p in (scale, bias))
    mean = a.mean(x)
    variance = a.variance(x, mean)
    how = a.rng.choice(["root", "divided", "shift", "sums"])
    if how == "sums":  # sqrt(n) / sqrt(n variance + n epsilon)
        n = x.shape[-1]
        root = math.sqrt(n) * a.inverse_root(variance * n + epsilon * n)
        return a.scaled(a.sub(x, mean), root, scale, bias)
    if how == "divided":
        y = a.div(a.sub(x, mean), a.value(jnp.sqrt(a.add(variance, epsilon))))
        y = y if scale is None else a.mul(y, scale)
        return y if bias is None else a.add(y, bias)
    root = a.inverse_root(a.add(variance, epsilon))
    if how == "root":
        return a.scaled(a.sub(x, mean), root, scale, bias)
    factor = root if scale is None else a.mul(root, scale)
    shift = a.mul(mean, factor)
    if bias is None:
        return a.sub(a.mul(x, factor), shift)
    return a.add(a.mul(x, factor), a.sub(bias, shift))


def rms_norm(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    del bias
    epsilon = a.number(a.rng.choice([1e-5, 1e-3, 1e-6]))
    scale = scale if scale is None else a.vector(scale, x.ndim)
    if scale is not None and a.rng.random() < 0.5:
        scale = a.add(scale, 1.0)
    square = a.add(a.mean(a.square(x)), epsilon)
    if a.rng.random() < 0.3:
        y = a.div(x, a.value(jnp.sqrt(square)))
        return y if scale is None else a.mul(y, scale)
    return a.scaled(x, a.inverse_root(square), scale, None)


def gelu(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    del scale, bias
    if a.rng.random() < 0.4:
        c = a.number(math.sqrt(0.5))
        u = a.one(lambda: x * c, lambda: x / (1 / c), lambda: c * x)
        half = a.number(0.5)
        return a.one(
            lambda: a.mul(half, x, a.add(jax.lax.erf(u), 1.0)),
            lambda: a.mul(half, x, jax.lax.erfc(-u)),
            lambda: a.add(half * x, a.mul(x, jax.lax.erf(u)) / 2),
            lambda: a.mul(x, a.sub(1.0, half * jax.lax.erfc(u))),
        )
    c, d = a.number(math.sqrt(2 / math.pi)), a.number(0.044715)
    cube = a.one(lambda: x**3, lambda: x * x * x, lambda: a.mul(a.square(x), x))
    u = a.one(
        lambda: c * a.add(x, d * cube),
        lambda: a.add(c * x, (c * d) * cube),
        lambda: a.mul(x, a.add(c, c * d * a.square(x))),
        lambda: a.mul(c, x, a.add(1.0, a.square(x) * d)),
    )
    return a.one(
        lambda: a.mul(0.5, x, a.add(1.0, jnp.tanh(u))),
        lambda: a.mul(x, a.add(0.5, 0.5 * jnp.tanh(u))),
        lambda: a.add(0.5 * x, a.mul(0.5 * x, jnp.tanh(u))),
        lambda: a.mul(x, jax.nn.sigmoid(2 * u)),
        lambda: a.mul(x, a.sub(1.0, jax.nn.sigmoid(-2 * u))),
    )


def labels_for(x: Any) -> jax.Array:
    rng = np.random.default_rng(x.size)
    return jnp.asarray(rng.integers(0, x.shape[-1], x.shape[:-1]))


def log_normalizer(a: Algebra, x: Any) -> Any:
    """logsumexp, with an axis of size 1 in place of the classes."""
    largest = jnp.max(x, -1, keepdims=True)
    shift = a.one(lambda: largest, lambda: jax.lax.stop_gradient(largest), lambda: 0.0 * largest)
    return a.one(
        lambda: jax.nn.logsumexp(x, -1, keepdims=True),
        lambda: jax.nn.logsumexp(x, -1)[..., None],
        lambda: a.add(
            shift, jnp.log(a.value(jnp.sum(jnp.exp(a.sub(x, shift)), -1, keepdims=True)))
        ),
    )


def cross_entropy(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    del scale, bias
    labels = labels_for(x)
    normalizer = log_normalizer(a, x)
    log_p = a.one(lambda: jax.nn.log_softmax(x), lambda: a.sub(x, normalizer))

    def pick(x: Any) -> Any:
        hot = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype)
        return a.one(
            lambda: jnp.take_along_axis(x, labels[..., None], -1)[..., 0],
            lambda: jnp.squeeze(jnp.take_along_axis(x, labels[..., None], axis=-1), -1),
            lambda: jnp.sum(a.mul(x, hot), -1),
        )

    return a.one(
        lambda: -pick(log_p), lambda: pick(log_p), lambda: pick(-log_p),
        lambda: a.sub(normalizer[..., 0], jnp.take_along_axis(x, labels[..., None], -1)[..., 0]),
    )  # fmt: skip


def smoothed_cross_entropy(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    """With label smoothing and z-loss."""
    del scale, bias
    labels = labels_for(x)
    normalizer = log_normalizer(a, x)
    log_p = a.one(lambda: jax.nn.log_softmax(x), lambda: a.sub(x, normalizer))
    of_label = jnp.take_along_axis(log_p, labels[..., None], -1)
    mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
    of_all = a.one(lambda: mean(log_p), lambda: a.sub(mean(x), normalizer))
    parts = [a.mul(of_label, a.number(-0.9)), a.mul(of_all, a.number(-0.1))]
    parts.append(a.mul(a.square(normalizer), a.number(0.01)))
    a.rng.shuffle(parts)
    return a.add(a.add(parts[0], parts[1]), parts[2])[..., 0]


def batch_norm(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    """Over all axes but the last. The statistics are results, as a layer's running averages are."""
    scale, bias = (p if p is None else a.vector(p, x.ndim) for p in (scale, bias))
    axes = tuple(range(x.ndim - 1))
    mean = a.mean(x, axes)
    variance = a.variance(x, mean, axes)
    root = a.inverse_root(a.add(variance, a.number(1e-5)))
    return a.scaled(a.sub(x, mean), root, scale, bias), mean, variance


def group_norm(a: Algebra, x: Any, scale: Any, bias: Any) -> Any:
    scale, bias = (p if p is None else a.vector(p, x.ndim) for p in (scale, bias))
    groups = x.reshape(*x.shape[:-1], 2, -1)
    axes = (*range(1, x.ndim - 1), -1)
    mean = a.mean(groups, axes)
    root = a.inverse_root(a.add(a.variance(groups, mean, axes), a.number(1e-5)))
    y = a.mul(a.sub(groups, mean), root).reshape(x.shape)
    y = y if scale is None else a.mul(y, scale)
    return y if bias is None else a.add(y, bias)


OPS = {
    layer_norm: "layer_norm", rms_norm: "rms_norm", gelu: "gelu", batch_norm: "batch_norm",
    group_norm: "group_norm", cross_entropy: "softmax_cross_entropy_with_integer_labels",
    smoothed_cross_entropy: "softmax_cross_entropy_with_integer_labels",
}  # fmt: skip


# --- Around a formula ----------------------------------------------------------------------------


def placed(a: Algebra, formula: Any, x: Any, *parameters: Any) -> Any:
    """The formula of x: with other leading axes, vmapped, or inside of another function."""
    run = functools.partial(formula, a)
    whole = formula in (batch_norm, group_norm)
    if a.keeps:
        return run(x, *parameters)
    how = a.rng.choice(["", "", "jit", "remat", *([] if whole else ["swap", "flat", "vmap"])])
    if how == "jit":
        return jax.jit(run)(x, *parameters)
    if how == "remat":
        return jax.checkpoint(run)(x, *parameters)
    if how == "swap":
        y = run(jnp.swapaxes(x, 0, 1), *parameters)
        return jnp.swapaxes(y, 0, 1)
    if how == "flat":
        y = run(x.reshape(-1, x.shape[-1]), *parameters)
        return y.reshape(*x.shape[:-1], *y.shape[1:])
    if how == "vmap" and formula not in (cross_entropy, smoothed_cross_entropy):
        axis = a.rng.choice([0, 1])
        each = jax.vmap(jax.vmap(lambda x: run(x, *parameters)), axis, axis)
        return each(x)
    return run(x, *parameters)


def problem(seed: int, formula: Any, trap: bool) -> tuple[Any, list[jax.Array]]:
    """A random function that has the formula, and its arguments."""
    a = Algebra(seed, trap)
    shape = a.rng.choice(SHAPES)
    has_scale, has_bias = a.rng.random() < 0.7, a.rng.random() < 0.7
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(shape) + 0.25)
    scale, bias = (jnp.asarray(v) for v in rng.uniform(0.5, 1.5, (2, shape[-1])))
    a._start = a.rng.getstate()

    def function(x: Any, scale: Any, bias: Any) -> Any:
        a.again()
        y = placed(a, formula, x, scale if has_scale else None, bias if has_bias else None)
        return y, list(a.kept)

    return function, [x, scale, bias]


def derivatives(function: Any, arrays: list[jax.Array]) -> Any:
    """The results, the derivative along some direction, and the gradient."""

    def loss(*arrays: Any) -> Any:
        leaves = jax.tree.leaves(function(*arrays))
        weights = [jnp.cos(jnp.arange(float(y.size))).reshape(y.shape) for y in leaves]
        waves = [jnp.sin(y.astype(weights[0].dtype)) for y in leaves]
        return sum(map(jnp.vdot, weights, waves))

    tangents = [jnp.cos(7 * a) for a in arrays]
    along = jax.jvp(function, arrays, tangents)
    return along, jax.grad(loss, tuple(range(len(arrays))))(*arrays)


def assert_same(actual: Any, expected: Any, limit: float = 1e-9) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        size = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit * size)


def fused(function: Any, arrays: list[jax.Array]) -> tuple[Any, list[str]]:
    """The fused function, and the ops in it."""
    found: list[Any] = []
    jax.eval_shape(jax_gradops.fuse(function, report=found.append), *arrays)
    return jax_gradops.fuse(function), [each.op for each in found[0].replaced]


@hypothesis.given(seed=SEEDS, formula=st.sampled_from(list(OPS)))
@hypothesis.settings(max_examples=500 if LONG else 20)
def test_ways_to_write_a_formula(seed, formula):
    forget_now_and_then()
    function, arrays = problem(seed, formula, trap=False)
    f, ops = fused(function, arrays)
    assert ops == [OPS[formula]], jax.make_jaxpr(function)(*arrays)
    assert_same(derivatives(f, arrays), derivatives(function, arrays))


@hypothesis.given(seed=SEEDS, formula=st.sampled_from(list(OPS)))
@hypothesis.settings(max_examples=2000 if LONG else 60)
def test_changes_of_a_formula(seed, formula):
    forget_now_and_then()
    function, arrays = problem(seed, formula, trap=True)
    f, ops = fused(function, arrays)
    if ops:  # else nothing has changed
        assert_same(derivatives(f, arrays), derivatives(function, arrays))


# --- Random programs -----------------------------------------------------------------------------


class Programs:
    """Random functions of arrays of one shape. Values are used by several steps, in any way."""

    def __init__(self, seed: int) -> None:
        self.rng, self.algebra = random.Random(seed), Algebra(seed)
        self.weight = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 4)) / 2)

    def norm(self, x: Any, other: Any) -> Any:
        formula = self.rng.choice([layer_norm, layer_norm, rms_norm, group_norm, gelu])
        scale = self.rng.choice([None, self.weight[0], other[0, 0]])
        return formula(self.algebra, x, scale, self.rng.choice([None, self.weight[1]]))

    def batch(self, x: Any, other: Any) -> Any:
        y, mean, variance = batch_norm(self.algebra, x, self.weight[0], None)
        return self.rng.choice([y, jax.nn.relu(y), jax.nn.relu(y + other), y + mean * variance])

    def loss(self, x: Any, other: Any) -> Any:
        return other - cross_entropy(self.algebra, x, None, None)[..., None]

    def step(self, x: Any, other: Any) -> Any:
        """One step that makes a value of two. Numbers stay near 1."""
        choices = [
            self.norm, self.norm, self.norm, self.batch, self.loss, lambda x, y: (x + y) / 2,
            lambda x, y: x @ self.weight, lambda x, y: x * jnp.tanh(y), lambda x, y: x - y,
            lambda x, y: jax.nn.gelu(x + self.weight[0][None, None]), lambda x, y: jnp.sin(x + y),
            lambda x, y: jax.nn.softmax(x) + jax.lax.stop_gradient(y),
        ]  # fmt: skip
        return self.rng.choice(choices)(x, other)

    def steps(self, x: Any, other: Any, count: int) -> Any:
        values = [x, other]
        for _ in range(count):
            values.append(self.step(self.rng.choice(values[-3:]), self.rng.choice(values)))
        return values[-1], self.rng.choice(values)

    def nested(self, x: Any, other: Any) -> Any:
        """Some steps inside of a loop, a branch, or another function."""
        how = self.rng.choice(["scan", "cond", "jit", "remat", "vmap", "while", "twice"])
        state = self.rng.getstate()

        def body(x: Any, other: Any) -> Any:
            self.rng.setstate(state)
            self.algebra.rng.seed(7)
            return self.steps(x, other, 2)

        if how == "scan":
            carry, ys = jax.lax.scan(lambda c, _: body(c, other), x, None, length=2)
            return carry, ys.sum(0)
        if how == "cond":
            return jax.lax.cond(x[0, 0, 0] > 0, body, lambda x, y: (y, jnp.sin(x)), x, other)
        if how == "while":
            y = jax.lax.fori_loop(0, 2, lambda i, c: body(c, other)[0], x)
            return y, other
        if how == "vmap":
            wide = jax.vmap(lambda x: body(x, other), 1, 1)
            return tuple(y.mean(1) for y in wide(jnp.stack([x, other], 1)))
        if how == "twice":
            inner = jax.jit(body)
            return inner(*inner(x, other))
        return {"jit": jax.jit, "remat": jax.checkpoint}[how](body)(x, other)

    def function(self, x: Any, other: Any) -> Any:
        start = self.rng.getstate()
        self.algebra.again()
        a, b = self.steps(x, other, 3)
        a, b = self.nested(a, b)
        results = [*self.steps(a, b, 3), b]
        self.rng.setstate(start)
        return results


@hypothesis.given(seed=SEEDS)
@hypothesis.settings(max_examples=500 if LONG else 5)
def test_random_programs(seed):
    """Results and derivatives of random programs."""
    forget_now_and_then()
    programs, rng = Programs(seed), np.random.default_rng(seed)
    arrays = [jnp.asarray(a) for a in rng.standard_normal((2, 4, 4, 4))]
    f, ops = fused(programs.function, arrays)
    if ops:
        functions = (f, programs.function)
        actual, expected = jax.jit(lambda a: [derivatives(f, a) for f in functions])(arrays)
        assert_same(actual, expected, 1e-7)
