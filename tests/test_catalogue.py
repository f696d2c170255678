"""Every row of the catalogue has a test. Tests here are about more than one op."""

from __future__ import annotations

import ast
import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_batch_norm
import test_bias_gelu
import test_global_norm
import test_group_norm
import test_layer_norm
from comparing import assert_bitwise_equal, assert_matches, widen
from conformance import EMPTY
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import _registry, backward
from jax_gradops._kernel import primitive, trees
from jax_gradops._kernel.invoke import invoke
from jax_gradops._ops.clip import kernels as global_norm_kernels
from jax_gradops._ops.gelu import bias_gelu


def test_every_row_has_a_test():
    """A row without a test is a mistake. So is a row with a test and an entry in ELSEWHERE."""
    marked = set()
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names = {d.attr for d in node.decorator_list if isinstance(d, ast.Attribute)}
                marked |= names & catalogue.ROWS.keys()
    assert marked.isdisjoint(catalogue.ELSEWHERE)
    assert marked | catalogue.ELSEWHERE.keys() == catalogue.ROWS.keys()


# --- Every function, in one table ----------------------------------------------------------------

#: Each function takes arrays (`operands`) and an implementation; x is [..., rows, features].
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "layer_norm": lambda a, i: jax_gradops.layer_norm(a.x, a.scale, a.bias, implementation=i),
    "rms_norm": lambda a, i: jax_gradops.rms_norm(a.x, a.scale, implementation=i),
    "add_layer_norm": lambda a, i: jax_gradops.add_layer_norm(
        a.x, a.dy, a.scale, a.bias, implementation=i
    ),
    "add_rms_norm": lambda a, i: jax_gradops.add_rms_norm(a.x, a.dy, a.scale, implementation=i),
    "layer_norm of two axes": lambda a, i: jax_gradops.layer_norm(
        a.x, a.scale, a.bias, begin_norm_axis=max(-2, -a.x.ndim), implementation=i
    ),
    "gelu": lambda a, i: jax_gradops.gelu(a.x, False, implementation=i),
    "bias_gelu": lambda a, i: jax_gradops.bias_gelu(a.x, a.bias, implementation=i),
    "clip_tree_by_global_norm": lambda a, i: jax_gradops.clip_tree_by_global_norm(
        [a.x, a.scale], 1.0, implementation=i
    ),
    "layer_norm_forward": lambda a, i: backward.layer_norm_forward(
        a.x, a.scale, a.bias, implementation=i
    ),
    "layer_norm_backward": lambda a, i: backward.layer_norm_backward(
        a.dy, a.x, a.scale, a.mean, a.rstd, implementation=i
    ),
    "layer_norm_backward_from_output": lambda a, i: backward.layer_norm_backward_from_output(
        a.dy, a.x, a.scale, a.bias, a.rstd, implementation=i
    ),
    "rms_norm_forward": lambda a, i: backward.rms_norm_forward(a.x, a.scale, implementation=i),
    "rms_norm_backward": lambda a, i: backward.rms_norm_backward(
        a.dy, a.x, a.scale, a.rstd, implementation=i
    ),
    "rms_norm_backward_from_output": lambda a, i: backward.rms_norm_backward_from_output(
        a.dy, a.x, a.scale, a.rstd, implementation=i
    ),
    "layer_norm_forward, given statistics": lambda a, i: backward.layer_norm_forward(
        a.x, a.scale, a.bias, mean=a.mean, variance=a.rstd, implementation=i if i == "xla" else None
    ),
    "gelu_backward": lambda a, i: backward.gelu_backward(
        a.dy, a.x, approximate=False, implementation=i
    ),
    "bias_gelu_backward": lambda a, i: backward.bias_gelu_backward(
        a.dy, a.x, a.bias, approximate=True, implementation=i
    ),
    "inplace_clip_by_global_norm": lambda a, i: backward.inplace_clip_by_global_norm(
        [a.x, a.scale], 1.0, implementation=i
    ),
}


def first_classes(x: Any) -> Any:
    """Labels. `jax.device_put` is a transfer that `jax.transfer_guard` allows."""
    return jax.device_put(np.zeros(x.shape[:-1], np.int32))


#: Functions for arrays with two or more axes.
OF_CHANNELS: dict[str, Callable[[Any, Any], Any]] = {
    "batch_norm": lambda a, i: jax_gradops.batch_norm(
        a.x, a.scale, a.bias, residual=a.dy, activation="relu", implementation=i
    ),
    "batch_norm, first axis": lambda a, i: jax_gradops.batch_norm(a.x, axis=0, implementation=i),
    "softmax_cross_entropy_with_integer_labels": lambda a, i: (
        jax_gradops.softmax_cross_entropy_with_integer_labels(
            a.x, first_classes(a.x), label_smoothing=0.2, implementation=i
        )
    ),
    "softmax_cross_entropy_backward": lambda a, i: backward.softmax_cross_entropy_backward(
        a.mean, a.x, first_classes(a.x), a.rstd, z_loss=0.1, implementation=i
    ),
    "group_norm": lambda a, i: jax_gradops.group_norm(
        a.x, a.scale, a.bias, num_groups=1, activation="silu", implementation=i
    ),
    "instance_norm, relu": lambda a, i: jax_gradops.instance_norm(
        jnp.expand_dims(a.x, 0), a.scale, a.bias, activation="relu", implementation=i
    ),
    "group_norm_forward": lambda a, i: backward.group_norm_forward(
        jnp.expand_dims(a.x, 0), a.scale, a.bias, num_groups=1, implementation=i
    ),
    "group_norm_backward": lambda a, i: backward.group_norm_backward(
        *(array.reshape(a.mean.size, array.shape[-1]) for array in (a.dy, a.x)),
        a.scale,
        a.bias,
        a.mean.reshape(-1, 1),
        a.rstd.reshape(-1, 1),
        num_groups=1,
        activation="silu",
        implementation=i,
    ),
    "embedding_lookup": lambda a, i: jax_gradops.embedding_lookup(
        a.x.reshape(math.prod(a.x.shape[:-1]), a.x.shape[-1]), first_classes(a.x), implementation=i
    ),
    "embedding_backward": lambda a, i: backward.embedding_backward(
        a.x, first_classes(a.x), 3, implementation=i
    ),
    "batch_norm_inference": lambda a, i: jax_gradops.batch_norm_inference(
        a.x, a.scale, a.bias, mean=a.bias, var=a.scale**2, implementation=i
    ),
    "batch_norm_forward": lambda a, i: backward.batch_norm_forward(
        a.x, a.scale, a.bias, implementation=i
    ),
    "batch_norm_backward": lambda a, i: backward.batch_norm_backward(
        a.dy, a.x, a.scale, a.bias, a.scale, implementation=i
    ),
    "batch_norm_backward of a residual": lambda a, i: backward.batch_norm_backward(
        a.dy, a.x, a.scale, a.bias, a.scale, activation="relu", y=a.x - a.dy, implementation=i
    ),
}


def operands(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    shapes = dict.fromkeys(("x", "dy"), shape) | dict.fromkeys(("scale", "bias"), shape[-1:])
    shapes |= dict.fromkeys(("mean", "rstd"), shape[:-1])
    return {k: rng.uniform(0.5, 2, s).astype(dtype) for k, s in shapes.items()}


def values_of(functions: Any, arrays: dict[str, Any], implementation: str) -> dict[str, list[Any]]:
    given = SimpleNamespace(**arrays)
    return {name: jax.tree.leaves(f(given, implementation)) for name, f in functions.items()}


@pytest.mark.G11
def test_every_function_has_its_gradient(platform, rng):
    """Each gradient equals the formula's, for every array. The gradient of x is never 0."""
    functions = FUNCTIONS | OF_CHANNELS
    assert {n for n in vars(backward) if n[0].islower()} <= functions.keys()
    arrays = operands(rng, (3, 2, 5), np.float64)

    @functools.partial(jax.jit, static_argnames="i")
    def gradients(arrays: Any, i: str) -> Any:
        results = {}
        for name, f in functions.items():
            values, pull = jax.vjp(lambda a, f=f: values_of({"f": f}, a, i)["f"], arrays)
            results[name] = pull([jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape)
                                  for v in values])[0]  # fmt: skip
        return results

    expected = gradients(arrays, i="xla")
    for name, ours in gradients(arrays, i="ffi").items():
        assert np.abs(ours["x"]).max() > 1e-3, name
        for a, e in zip(*map(jax.tree.leaves, (ours, expected[name])), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9, err_msg=name)


def clipped(a: Any, i: Any) -> Any:
    transformation = jax_gradops.clip_by_global_norm(1.0, implementation=i)
    return transformation.update([a.x], transformation.init([a.x]))


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "clip_by_global_norm": clipped,
    "clip of nothing": lambda a, i: jax_gradops.clip_tree_by_global_norm([], 1, implementation=i),
    "global_norm": lambda a, i: jax_gradops.global_norm({"x": a.x, "i": first_classes(a.x)}),
    "linear_softmax_cross_entropy": lambda a, i: jax_gradops.linear_softmax_cross_entropy(
        a.x, jnp.outer(a.scale, a.bias), first_classes(a.x), implementation=i
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS | OF_CHANNELS | OTHERS)
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_transfer_guard(platform, implementation, name, rng):
    """Without `jax.jit`, an op transfers none of its numbers, and neither does its derivative."""
    f = (FUNCTIONS | OF_CHANNELS | OTHERS)[name]
    arrays = jax.device_put(operands(rng, (3, 2, 5), np.float32))

    def of(x: Any) -> Any:
        return jax.tree.leaves(f(SimpleNamespace(**(arrays | {"x": x})), implementation))

    expected = of(arrays["x"])
    ones = jax.device_put([np.ones(y.shape, y.dtype) for y in expected])
    with jax.transfer_guard("disallow"):
        values = of(arrays["x"])
        if "clip" not in name:  # Python's max_norm is a number of the traced program
            jax.vjp(of, arrays["x"])[1](ones)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.M8
def test_every_function_of_nothing(platform, rng):
    """Sums over nothing are 0, as in the formula. OpTests.test_empty tests gradients of ops."""
    cases = []
    for shape in (*EMPTY, (0, 0, 0), (1, 0), (0, 1)):
        functions = FUNCTIONS | (OF_CHANNELS if len(shape) > 1 else {})
        cases.append((functions, operands(rng, shape, jnp.bfloat16)))

    @functools.partial(jax.jit, static_argnames="i")
    def f(all_arrays: Any, i: str) -> Any:
        pairs = zip(cases, all_arrays, strict=True)
        return [values_of(functions, arrays, i) for (functions, _), arrays in pairs]

    ours, expected = (f([arrays for _, arrays in cases], i=i) for i in ("ffi", "xla"))
    for results, references, (_, arrays) in zip(ours, expected, cases, strict=True):
        for name, result in results.items():
            what = f"{name} of {arrays['x'].shape}"
            for a, e in zip(result, references[name], strict=True):
                assert (a.shape, a.dtype) == (e.shape, e.dtype), what
                np.testing.assert_allclose(widen(a), widen(e), rtol=2**-7, err_msg=what)


# --- The tests themselves ------------------------------------------------------------------------


@pytest.mark.G2
@pytest.mark.parametrize(
    "op",
    [
        test_layer_norm.TestLayerNorm,
        test_layer_norm.TestRmsNorm,
        test_bias_gelu.TestBiasGelu,
        test_batch_norm.TestWithResidual,
        test_group_norm.TestGroupNorm,
        test_global_norm.TestClip,
    ],
)
def test_wrong_results_are_found(op, rng):
    """The suite finds wrong results: its reference is independent, and its tolerance is narrow."""
    suite = op()
    example = suite.example(rng, (5, 33), jnp.float32)
    results = list(map(np.asarray, jax.jit(suite.value_and_vjp("ffi"))(*example)))
    suite.check(results, example)
    for i, right in enumerate(results):
        size = np.abs(right).max()
        one = np.eye(1, right.size, dtype=np.float32).reshape(right.shape)
        wrong = {
            "nothing": 0 * right,
            "another column's": np.roll(right, 1, -1),
            "a mean too much": right + np.abs(right).mean() * np.float32(1e-3),
            "a factor": right * np.float32(1 + 1e-4),
            "one element": right + one * size * np.float32(1e-4),
            "of float16": right.astype(np.float16).astype(np.float32),
            "NaN": np.where(one, np.nan, right).astype(np.float32),
            "another dtype": right.astype(np.float64),
            "another shape": right[None],
        }
        for what, result in wrong.items():
            with pytest.raises(AssertionError):
                suite.check([*results[:i], result, *results[i + 1 :]], example)
                pytest.fail(f"result {i}, {what}, was not found")


# --- Every level of the processor ----------------------------------------------------------------


@pytest.fixture
def levels(monkeypatch):
    """Runs a function with the handlers of each CPU module that can run here."""
    cpu_levels = _registry.MODULES["cpu"].cpu_levels
    usable = ["_cpu", *(f"_cpu_{level}" for level in list(cpu_levels)[1:] if cpu_levels[level])]

    def run(f: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        results = {}
        for name in usable:
            prefix = f"catalogue{name}."
            _register(name, prefix)
            monkeypatch.setattr(_registry, "TARGET_PREFIX", prefix)
            _forget_traces()
            compiled = jax.jit(lambda *a: f(*a)).lower(*arguments).compile()
            assert f'custom_call_target="{prefix}' in compiled.as_text()
            assert 'custom_call_target="jax_gradops.' not in compiled.as_text()
            results[name] = compiled(*arguments)
        return results

    with jax.default_device(jax.devices("cpu")[0]):
        yield run
    _forget_traces()


@functools.cache
def _register(name: str, prefix: str) -> None:
    for handler, target in importlib.import_module(f"jax_gradops.{name}").registrations().items():
        jax.ffi.register_ffi_target(prefix + handler, target, platform="cpu")


def _forget_traces() -> None:
    primitive._traced.cache_clear()
    jax.clear_caches()  # jax 0.11 caches the lowered form of inner jitted functions


@pytest.mark.N6
def test_every_level_of_the_cpu(levels, rng):
    """All levels give equal bits. GELU is an exception: it may fuse products and sums."""
    shapes = [(5, 3), (7, 129), (9, 1000), (3, 5000)]
    examples = []
    for dtype, mean in (("float32", 0), ("float32", 1e4), ("bfloat16", 0), ("float16", 0)):
        for shape in shapes:
            dy, x = rng.standard_normal((2, *shape))
            scale = rng.uniform(0.5, 2, shape[1])
            arrays = (dy, mean + x, scale)
            examples.append([a.astype(jnp.dtype(dtype)) for a in arrays])

    def norms(examples: Any) -> Any:
        results = []
        for dy, x, scale in examples:
            for op in (jax_gradops.layer_norm, jax_gradops.rms_norm, _batch_norm):
                results.append(vjp_of(functools.partial(op, implementation="ffi"))(dy, x, scale))
            kernel = global_norm_kernels.SUM_OF_SQUARES
            results.append(trees.invoke(kernel, x, dy, implementation="ffi"))
        return results

    def gelus(examples: Any) -> Any:
        options = {"approximate": True, "strict": False, "implementation": "ffi"}
        return [
            (*invoke(bias_gelu.FWD, x, b, **options), *invoke(bias_gelu.BWD, dy, x, b, **options))
            for dy, x, b in examples
        ]

    baseline, *others = levels(norms, examples).values()
    for other in others:
        jax.tree.map(assert_bitwise_equal, other, baseline)
    suite, few = test_bias_gelu.TestBiasGelu(), examples[:4]
    for results in levels(gelus, few).values():
        for result, example in zip(results, few, strict=True):
            suite.check(result, example)
    assert len(others) == sum(_registry.MODULES["cpu"].cpu_levels.values()) - 1


def _batch_norm(x: Any, scale: Any, implementation: str) -> Any:
    return jax_gradops.batch_norm(x, scale, implementation=implementation)[0]


# --- Many rows -----------------------------------------------------------------------------------


@pytest.mark.M5
def test_many_rows(platform, rng):
    """GELU and batch norm. Norms: test_absent_parameters_and_many_rows."""
    examples = []
    for shape in ((65_535, 2), (65_536, 3), (131_072, 3), (1_000_000, 2)):
        dy, x = rng.standard_normal((2, *shape)).astype(np.float32)
        examples.append((dy, x, rng.uniform(0.5, 2, shape[1]).astype(np.float32)))

    def channels_first(x: Any, scale: Any) -> Any:
        return jax_gradops.batch_norm(x[..., None], scale, axis=1)[0][..., 0]

    ops = (jax_gradops.bias_gelu, lambda x, s: jax_gradops.batch_norm(x, s)[0], channels_first)
    results = jax.jit(lambda examples: [[vjp_of(op)(*e) for op in ops] for e in examples])(examples)
    for (gelu, *batch_norms), example in zip(results, examples, strict=True):
        dy, x, parameter = map(widen, example)
        expected = (
            oracles.bias_gelu(x, parameter, approximate=True),
            *oracles.bias_gelu_vjp(dy, x, parameter, approximate=True),
        )
        of_norm = (
            oracles.batch_norm(x, parameter, epsilon=1e-5),
            *oracles.batch_norm_vjp(dy, x, parameter, epsilon=1e-5)[:2],
        )
        pairs = [(gelu, expected), *((b, of_norm) for b in batch_norms)]
        for actual, references in pairs:
            for a, reference in zip(actual, references, strict=True):
                assert_matches(a, reference, np.float32, np.float32, str(x.shape))
