"""The test suite of every op. Test files subclass `OpTests` and describe the op.

Marks such as G3 are rows of `catalogue.py`. It lists bugs of other projects.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import OPTIMIZED, assert_bitwise_equal, assert_matches, widen
from jax import lax
from meshes import MeshTests, RowMeshTests
from transformations import TransformationTests, vjp_of

from jax_gradops import _oracles as oracles
from jax_gradops._ops.op_spec import Form
from jax_gradops._oracles import Reference

# Near the vector widths (2 to 16 elements), a warp, and the sizes of the kernels' blocks.
FEATURES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 4097)
ROWS = (1, 2, 3, 5, 37)
RANKS = ((7,), (3, 7), (2, 3, 7), (2, 1, 3, 7), (1, 2, 1, 3, 7))
WIDE = (3, 70_000)
MODELS = ((2, 1536), (2, 1600), (2, 3584), (2, 5120))  # G1, G12, M6
DTYPES = ("float16", "bfloat16", "float32", "float64")
# The kernels in each dtype. XLA's operations in one dtype: their formula is the same for all.
IMPLEMENTATIONS_AND_DTYPES = [
    *(pytest.param("ffi", jnp.dtype(d), id=f"ffi-{d}") for d in DTYPES),
    pytest.param("xla", jnp.dtype("float32"), id="xla-float32"),
]
EMPTY = ((0,), (0, 7), (3, 0), (0, 0), (0, 3, 7), (2, 0, 7), (2, 3, 0))

Arrays = Sequence[Any]


class OpTests(TransformationTests, MeshTests):
    """The tests of every op. The operands are x and parameters of x's last axis, all arrays."""

    form: Form
    options: Mapping[str, Any] = {}  # in place of the form's own
    forward_kernels: int = 1  # the number of forward handlers
    backward_attribute: str = ""  # an attribute that calls of backward handlers have
    # Whether the op is another op with an option. On the CPU, conftest.py drops some of its tests.
    variant: bool = False

    # --- What an op says of itself. The form says it, unless the op has other operands ---

    @property
    def kernels(self) -> list[str]:
        """The names of the handlers, the forward ones first."""
        return [kernel.name for kernel in self.form.kernels]

    @property
    def parameters(self) -> int:
        """The number of operands after x."""
        return self.form.parameters

    def op(self, *operands: Any, implementation: str | None = None) -> Any:
        options = {**self.form.options, **self.options}
        return self.form.call(*operands, **options, implementation=implementation)

    def oracle(self, *operands: np.ndarray) -> Reference:
        return self.form.expected(*operands, **self.options)[0]

    def oracle_vjp(self, dy: np.ndarray, *operands: np.ndarray) -> Sequence[Reference]:
        return self.form.expected_gradients(dy, *operands, **self.options)

    def sizes(self, implementation: str, dtype: Any) -> list[tuple[int, ...]]:
        """Shapes of x. A number of features meets another number of rows in each dtype.

        The formulas of XLA's operations do not depend on the shape: each dtype has one more shape.
        """
        first = DTYPES.index(dtype.name)
        if implementation == "xla":
            return [(5, 33), [(5, 1), (2, 1, 3, 1025), WIDE, (37, 129)][first]]
        pairs = [(ROWS[(first + i) % 5], n) for i, n in enumerate(FEATURES)]
        return [*pairs, *RANKS, *MODELS, WIDE]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def output_dtype(self, *operands: Any) -> Any:
        return operands[0].dtype

    def accum_dtype(self, *operands: Any) -> Any:
        return jnp.float64 if operands[0].dtype == jnp.float64 else jnp.float32

    def gradient_accum_dtype(self, *operands: Any) -> Any:
        """The dtype in which the terms of gradients are added."""
        return self.accum_dtype(*operands)

    # --- Tools ---

    def example(
        self, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, *parameter_dtypes: Any
    ) -> list[np.ndarray]:
        """dy, x and the parameters. None has mean 0 or equal columns (G3, G7)."""
        dtypes = parameter_dtypes or (dtype,) * self.parameters
        parameters = [1 + 0.5 * rng.standard_normal(shape[-1:]) for _ in range(self.parameters)]
        x = 0.5 + 1.5 * rng.standard_normal(shape)
        dy = 0.3 + rng.standard_normal(self.output_shape(shape))
        operands = [
            x.astype(dtype),
            *(p.astype(d) for p, d in zip(parameters, dtypes, strict=True)),
        ]
        return [np.asarray(dy).astype(self.output_dtype(*operands)), *operands]

    def value_and_vjp(self, implementation: str | None) -> Callable[..., tuple[Any, ...]]:
        """Maps (dy, *operands) to (y, *gradients)."""
        return vjp_of(functools.partial(self.op, implementation=implementation))

    def expected(self, dy: Any, *operands: Any) -> list[Reference]:
        wide = [widen(a) for a in operands]
        with np.errstate(invalid="ignore", over="ignore"):
            return [self.oracle(*wide), *self.oracle_vjp(widen(dy), *wide)]

    def check(self, results: Arrays, example: Arrays, what: str = "") -> None:
        """Compares y and the gradients with the oracle."""
        _, *operands = example
        dtypes = [self.output_dtype(*operands), *(a.dtype for a in operands)]
        names = ["y", "dx", *(f"dparameter {i}" for i in range(self.parameters))]
        what = what or f"x {operands[0].dtype}{list(operands[0].shape)}"
        for name, actual, reference, dtype in zip(
            names, results, self.expected(*example), dtypes, strict=True
        ):
            accum = (self.accum_dtype if name == "y" else self.gradient_accum_dtype)(*operands)
            assert_matches(actual, reference, dtype, accum, f"{what}, {name}")

    def check_all(self, examples: Sequence[Arrays], implementation: str | None) -> None:
        """Runs all examples in one program. This compiles faster than one program per example."""
        f = self.value_and_vjp(implementation)
        options = OPTIMIZED if implementation == "xla" else None
        run = jax.jit(lambda examples: [f(*e) for e in examples], compiler_options=options)
        results = run(examples)
        for result, example in zip(results, examples, strict=True):
            self.check(result, example)

    # --- Values ---

    @pytest.mark.values
    @pytest.mark.N12
    @pytest.mark.N16
    @pytest.mark.G1
    @pytest.mark.G3
    @pytest.mark.G7
    @pytest.mark.G9
    @pytest.mark.G12
    @pytest.mark.M6
    def test_sizes(self, platform, implementation, dtype, rng):
        shapes = self.sizes(implementation, dtype)
        # On the CPU, float16 kernels work as bfloat16 kernels, and float64 kernels as float32
        # kernels. So each shape meets one dtype of 16 bits, and one of the other two.
        half = {"float16": 0, "float32": 0, "bfloat16": 1, "float64": 1}[dtype.name]
        if platform == "cpu" and implementation == "ffi":
            shapes = shapes[half::2]
        self.check_all([self.example(rng, s, dtype) for s in shapes], implementation)

    @pytest.mark.M8
    def test_empty(self, platform, implementation, rng):
        """Results have the right shape, and parameters' gradients are exact zeros."""
        examples = [self.example(rng, s, jnp.float32) for s in EMPTY]
        self.check_all(examples, implementation)

    def test_parameter_dtypes(self, platform, implementation, rng):
        dtypes = list(map(jnp.dtype, DTYPES))
        shape = (5, 33)
        examples = [
            self.example(rng, shape, d, *(dtypes[(i + k + 1) % 4] for k in range(self.parameters)))
            for d, i in itertools.product(dtypes, range(4 if implementation == "ffi" else 1))
        ]
        self.check_all(examples, implementation)

    @pytest.mark.values
    @pytest.mark.R2
    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_runs_are_bitwise_equal(self, platform, dtype, rng):
        """Runs one program twice, with another call between. `a_thousand_runs` tests more runs."""
        dtype = jnp.dtype(dtype)
        f = jax.jit(self.value_and_vjp("ffi"))
        examples = [self.example(rng, (300, 129), dtype) for _ in range(2)]
        first = [f(*e) for e in examples]
        for result, example in zip(first, examples, strict=True):
            self.check(result, example)
        for _ in range(5):
            for result, example in zip(first, examples, strict=True):
                for a, b in zip(f(*example), result, strict=True):
                    assert_bitwise_equal(a, b)

    # --- Transformations ---

    def test_vmap(self, platform, implementation, rng):
        """vmap of the op and of its gradient equals a loop, for all mixtures of mapped operands."""
        p = self.parameters
        n, none = 2 + p, (None,) * p
        last = 0 if self.output_shape((4, 9)) == () else -1
        levels: list[tuple[Any, ...]] = [
            ((0,) * n,),
            ((0, 0, *none),),
            ((None, 0, *none),),
            ((0, None, *none),),
            ((last, 1, *(1,) * p),),
            ((last, -1, *(0,) * p),),
            # nested: the outer vmap first
            ((0,) * n, (0,) * n),
            ((0, 0, *none), (0,) * n),
            ((0,) * n, (0, 0, *none)),
            ((0, 0, *none), (0, 0, *none)),
        ]
        if p:
            levels += [
                ((None, None, *(0,) * p),),
                ((0, 0, 0, *none[1:]),),
                ((0, 0, *none), (None, None, *(0,) * p)),
                ((None, None, *(0,) * p), (0, 1, *none)),
                ((0, 0, *none), (0, 0, *none), (None, 0, *(0,) * p)),
            ]
        if implementation == "xla":  # these are mostly JAX's own rules
            levels = levels[4::5]
        examples = [self._mapped_example(rng, level) for level in levels]

        def f(examples: Any) -> Any:
            results = []
            for level, example in zip(levels, examples, strict=True):
                g = self.value_and_vjp(implementation)
                for axes in reversed(level):
                    g = jax.vmap(g, in_axes=axes)
                results.append(g(*example))
            return results

        # NumPy slices them: JAX would compile the slicing
        outcomes = jax.tree.map(np.asarray, jax.jit(f)(examples))
        for level, example, results in zip(levels, examples, outcomes, strict=True):
            for index in itertools.product(range(3), repeat=len(level)):
                slices = list(example)
                for axes, i in zip(level, index, strict=True):
                    slices = [
                        a if axis is None else np.take(a, i, axis)
                        for a, axis in zip(slices, axes, strict=True)
                    ]
                self.check([r[index] for r in results], slices, f"in_axes {level}, slice {index}")

    @pytest.mark.G12
    @pytest.mark.parametrize(("groups", "shape"), [(3, (300, 129)), (600, (40, 33))], ids=str)
    def test_vmap_of_many_rows(self, platform, groups, shape, rng):
        """Each group has its own partial sums. All are in one workspace."""
        examples = [self.example(rng, shape, jnp.float32) for _ in range(groups)]
        mapped = list(map(np.stack, zip(*examples, strict=True)))
        shared = mapped[:2] + examples[0][2:]
        f = self.value_and_vjp("ffi")
        in_axes = (0, 0, *[None] * self.parameters)
        both = jax.jit(lambda a, b: (jax.vmap(f)(*a), jax.vmap(f, in_axes=in_axes)(*b)))
        results, results_shared = jax.tree.map(np.asarray, both(mapped, shared))
        for i, example in enumerate(examples):
            self.check([r[i] for r in results], example, f"group {i}")
            example = example[:2] + examples[0][2:]
            self.check([r[i] for r in results_shared], example, f"group {i}, shared parameters")

    def _mapped_example(self, rng: np.random.Generator, levels: Sequence[Sequence[Any]]) -> Arrays:
        def build(operand: int, levels: Sequence[Sequence[Any]]) -> np.ndarray:
            if not levels:
                return self.example(rng, (4, 9), jnp.float32)[operand]
            axis = levels[0][operand]
            if axis is None:
                return build(operand, levels[1:])
            return np.stack([build(operand, levels[1:]) for _ in range(3)], axis)

        return [build(i, levels) for i in range(2 + self.parameters)]

    @pytest.mark.G12
    def test_scan_with_shared_parameters(self, platform, implementation, rng):
        """The parameters' gradients are summed over the steps."""
        steps = [self.example(rng, (5, 33), jnp.float32) for _ in range(3)]
        parameters = steps[0][2:]
        dys, xs = (np.stack([s[i] for s in steps]) for i in range(2))

        def loss(xs: Any, *parameters: Any) -> Any:
            def step(total: Any, operands: Any) -> Any:
                dy, x = operands
                y = self.op(x, *parameters, implementation=implementation)
                return total + jnp.sum(dy * y), y

            total, ys = lax.scan(step, jnp.float32(0), (dys, xs))
            return total, ys

        f = jax.jit(jax.grad(loss, argnums=tuple(range(1 + self.parameters)), has_aux=True))
        (dxs, *grads), ys = jax.tree.map(np.asarray, f(xs, *parameters))
        terms = []
        for dy, x, y, dx in zip(dys, xs, ys, dxs, strict=True):
            ref_y, ref_dx, *refs = self.expected(dy, x, *parameters)
            assert_matches(y, ref_y, jnp.float32, jnp.float32, "y in a scan")
            assert_matches(dx, ref_dx, jnp.float32, jnp.float32, "dx in a scan")
            terms.append(refs)
        for grad, refs in zip(grads, zip(*terms, strict=True), strict=True):
            what = "a gradient summed in a scan"
            assert_matches(grad, oracles.total(refs), jnp.float32, jnp.float32, what)

    @pytest.mark.P4
    @pytest.mark.parametrize("requested", [None, "ffi", "xla"])
    def test_custom_call(self, platform, requested, rng):
        """Checks whether the compiled forward and backward programs contain the kernels."""
        example = self.example(rng, (5, 33), jnp.float32)
        op = functools.partial(self.op, implementation=requested)
        forward = jax.jit(op).lower(*example[1:]).compile().as_text()
        both = jax.jit(self.value_and_vjp(requested)).lower(*example).compile().as_text()
        target = 'custom_call_target="jax_gradops.'
        if requested == "xla":
            assert target not in both
            return
        calls = [line for line in both.splitlines() if target in line]
        assert all("api_version=API_VERSION_TYPED_FFI" in line for line in calls)
        n = self.forward_kernels
        assert all(f'{target}{k}"' in forward for k in self.kernels[:n])
        assert all(f'{target}{k}"' not in forward for k in self.kernels[n:])
        for kernel in self.kernels[n:]:
            lines = [line for line in calls if f'{target}{kernel}"' in line]
            assert lines and all(self.backward_attribute in line for line in lines)


class RowOpTests(RowMeshTests, OpTests):
    """Tests of ops whose rows are independent."""

    def test_eager_is_jitted(self, platform, rng):
        """Bitwise equal, because the kernels do all the work."""
        example = list(map(jnp.asarray, self.example(rng, (300, 129), jnp.float32)))
        f = self.value_and_vjp("ffi")
        for eager, jitted in zip(f(*example), jax.jit(f)(*example), strict=True):
            assert_bitwise_equal(eager, jitted)

    @pytest.mark.values
    @pytest.mark.N13
    @pytest.mark.M6
    @pytest.mark.parametrize("features", [128, 129])
    def test_rows_are_independent(self, platform, features, dtype, rng):
        """A row's y and dx do not depend on the number or order of rows, bitwise.

        There is an exception on GPUs. If not all rows start at 16-byte boundaries, a row's result
        may depend on its offset from such a boundary.
        """
        dy, x, *parameters = self.example(rng, (300, features), dtype)
        order = rng.permutation(300)
        if features % 2 and platform == "cuda":
            order = np.empty(300, int)
            for place in range(8):
                order[place::8] = rng.permutation(np.arange(place, 300, 8))
        picks = [slice(0, n) for n in (1, 2, 3, 5, 37)] + [slice(8, 10), order]
        f = jax.jit(lambda rows: [self.value_and_vjp("ffi")(*r, *parameters)[:2] for r in rows])
        whole, *parts = f([(dy, x), *((dy[p], x[p]) for p in picks)])
        for part, pick in zip(parts, picks, strict=True):
            for actual, all_rows in zip(part, whole, strict=True):
                assert_bitwise_equal(actual, np.asarray(all_rows)[pick], str(pick))

    @pytest.mark.N9
    @pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
    def test_nonfinite(self, platform, implementation, dtype, rng):
        """NaN or infinity changes only its row and, through sums, columns."""
        clean = self.example(rng, (37, 129), dtype)
        examples = []
        for value, where in itertools.product((np.nan, np.inf, -np.inf), (0, 1)):
            spoilt = [a.copy() for a in clean]
            spoilt[where][11, 128] = value
            examples.append(spoilt)
        f = jax.jit(self.value_and_vjp(implementation))
        expected = f(*clean)
        others = np.arange(37) != 11
        for spoilt in examples:
            results = f(*spoilt)
            for actual, unspoilt in zip(results[:2], expected[:2], strict=True):
                assert_bitwise_equal(np.asarray(actual)[others], np.asarray(unspoilt)[others])
            for actual, reference in zip(results, self.expected(*spoilt), strict=True):
                np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(reference.value))
