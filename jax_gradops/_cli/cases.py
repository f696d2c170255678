"""The cases that `doctor` runs: each public op on small inputs, with an oracle in float64 NumPy.

Ops that the benchmark times too share the benchmark's oracles.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

import jax_gradops
from jax_gradops import backward
from jax_gradops._tools.bench import batch_norm_formulas, formulas

Tree: TypeAlias = Any
DTYPES = ("float32", "bfloat16")
# 37 rows take several blocks. Rows of 33 are unaligned, with less than one vector per thread.
SHAPES = ((37, 1000), (5, 33))
MAX_NORM = 1.5


@dataclasses.dataclass(frozen=True)
class Case:
    """One op.

    Attributes:
      title: the op's name and its form.
      op: the name of the public function.
      inputs: makes a list of float64 arguments from a random generator. One program runs the op on
        all items of the list: several shapes.
      wide: positions of the arguments that stay float32 in every dtype.
      function: computes the results and the gradients from the arguments.
      oracle: computes them in float64 NumPy.
      rounds: how often a value is rounded to the dtype on its way to a result.
      skips: kernels of the op that this form does not call.
    """

    title: str
    op: str
    inputs: Callable[[np.random.Generator], list[tuple[Tree, ...]]]
    wide: tuple[int, ...]
    function: Callable[..., Tree]
    oracle: Callable[..., Tree]
    rounds: int = 1
    skips: tuple[str, ...] = ()


def with_gradients(op: Callable[..., Tree]) -> Callable[..., Tree]:
    """A function that returns `op`'s result and gradients. Its last argument is the cotangent."""

    def function(*args: Tree) -> Tree:
        y, vjp = jax.vjp(op, *args[:-1])
        return (y, *vjp(args[-1]))

    return function


def float64_oracle(
    forward: Callable[..., formulas.Arrays],
    vjp: Callable[..., formulas.Arrays],
    **options: Any,
) -> Callable[..., Tree]:
    """One oracle for a result and its gradients, as `with_gradients` returns them."""

    def oracle(*args: np.ndarray) -> Tree:
        *operands, dy = args
        return (*forward(np, *operands, **options), *vjp(np, dy, *operands, **options))

    return oracle


# --- Norms ----------------------------------------------------------------------------------------


def _norm_inputs(rng: np.random.Generator, parameters: int) -> list[tuple[Tree, ...]]:
    """x, parameters and dy, for each shape."""
    return [
        (
            3 * rng.standard_normal(shape) + 2,
            *(rng.uniform(0.5, 2, shape[-1]) for _ in range(parameters)),
            rng.standard_normal(shape),
        )
        for shape in SHAPES
    ]


_norm_oracle = float64_oracle(formulas.norm_oracle, formulas.norm_vjp_oracle)


def _add_norm_inputs(rng: np.random.Generator, parameters: int) -> list[tuple[Tree, ...]]:
    """x, a residual, parameters, dy and dsum. The residual is -x/2: the sum is then exact."""
    return [
        (x, -0.5 * x, *rest, (dy, rng.standard_normal(x.shape)))
        for x, *rest, dy in _norm_inputs(rng, parameters)
    ]


def _add_norm_oracle(x: Tree, residual: Tree, *rest: Tree) -> Tree:
    """Both outputs and all gradients."""
    *parameters, (dy, dsum) = rest
    y, dx, *gradients = _norm_oracle(x + residual, *parameters, dy)
    return (y, x + residual), dx + dsum, dx + dsum, *gradients


# --- Batch norm -----------------------------------------------------------------------------------


def _batch_norm_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    """x, scale, bias, a residual and dy: once with the last axis as channels, once with axis 1."""
    cases = []
    for shape, axis in (((37, 5, 33), -1), ((6, 21, 7, 5), 1)):
        arrays = [rng.standard_normal(shape) for _ in range(3)]
        x = 3 * arrays[0] + 2
        parameters = [rng.uniform(0.5, 2, shape[axis]) for _ in range(2)]
        cases.append((x, *parameters, *arrays[1:]))
    return cases


def _channel_axis(x: Any) -> int:
    return 1 if x.ndim == 4 else -1


def _batch_norm(x: Tree, scale: Tree, bias: Tree, residual: Tree) -> Tree:
    return jax_gradops.batch_norm(
        x, scale, bias, axis=_channel_axis(x), epsilon=formulas.EPSILON, residual=residual
    )[0]


def _batch_norm_oracle(x: Tree, scale: Tree, bias: Tree, residual: Tree, dy: Tree) -> Tree:
    oracle = float64_oracle(
        batch_norm_formulas.oracle,
        batch_norm_formulas.vjp_oracle,
        axis=_channel_axis(x) % x.ndim,
        relu=False,
    )
    y, dx, dresidual, *gradients = oracle(x, residual, scale, bias, dy)
    return y, dx, *gradients, dresidual


def _batch_norm_inference(x: Tree, mean: Tree, var: Tree) -> Tree:
    return jax_gradops.batch_norm_inference(
        x, mean, var, epsilon=formulas.EPSILON, axis=_channel_axis(x), implementation=None
    )


def _inference_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    """x, mean and variance."""
    return [(x, m, v) for x, m, v, *_ in _batch_norm_inputs(rng)]


def _inference_oracle(x: Tree, mean: Tree, var: Tree) -> Tree:
    axis = _channel_axis(x)
    y = (np.moveaxis(x, axis, -1) - mean) / np.sqrt(var + formulas.EPSILON)
    return np.moveaxis(y, -1, axis)


# --- GELU -----------------------------------------------------------------------------------------


def _gelu_inputs(rng: np.random.Generator, bias: bool) -> list[tuple[Tree, ...]]:
    """x, the bias if wanted, and dy."""
    return [
        (
            3 * rng.standard_normal(shape),
            *([rng.standard_normal(shape[-1])] if bias else []),
            rng.standard_normal(shape),
        )
        for shape in SHAPES
    ]


# --- Clipping -------------------------------------------------------------------------------------


def _tree(rng: np.random.Generator) -> Tree:
    return {"scalar": rng.standard_normal(()), **{str(s): rng.standard_normal(s) for s in SHAPES}}


def _tree_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    return [(_tree(rng), np.float64(1.25))]


def _clip_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    return [(_tree(rng), _tree(rng))]


def _sum_of_products(a: Tree, b: Tree) -> float:
    return sum(
        float(np.sum(x * y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _global_norm_oracle(tree: Tree, dnorm: float) -> Tree:
    norm = math.sqrt(_sum_of_products(tree, tree))
    return np.float64(norm), jax.tree.map(lambda x: dnorm * x / norm, tree)


def _clip_oracle(tree: Tree, dy: Tree) -> Tree:
    norm = math.sqrt(_sum_of_products(tree, tree))
    factor = MAX_NORM / norm
    along = _sum_of_products(tree, dy) / norm**2
    gradient = jax.tree.map(lambda d, x: factor * (d - x * along), dy, tree)
    return (jax.tree.map(lambda x: factor * x, tree), gradient)


def _clip(tree: Tree) -> Tree:
    return jax_gradops.clip_tree_by_global_norm(tree, MAX_NORM)[0]


def _inplace_clip(tree: Tree) -> Tree:
    return backward.inplace_clip_by_global_norm(tree, MAX_NORM)[0]


def _optax_clip(tree: Tree, dnorm: jax.Array) -> Tree:
    del dnorm
    transform = jax_gradops.clip_by_global_norm(MAX_NORM)
    updates, state = transform.update(tree, transform.init(tree))
    return state.global_norm, updates  # pyright: ignore[reportAttributeAccessIssue]


def _optax_clip_oracle(tree: Tree, dnorm: float) -> Tree:
    del dnorm
    norm = math.sqrt(_sum_of_products(tree, tree))
    return np.float64(norm), jax.tree.map(lambda x: MAX_NORM / norm * x, tree)


# --- All ------------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """The cases of every public op. The case for Optax exists only if Optax is installed."""
    partial = functools.partial
    cases: list[Case] = []
    for name, parameters in (("layer_norm", 2), ("rms_norm", 1)):
        op = partial(getattr(jax_gradops, name), epsilon=formulas.EPSILON)
        add = partial(getattr(jax_gradops, f"add_{name}"), epsilon=formulas.EPSILON)
        inputs = partial(_norm_inputs, parameters=parameters)
        parameters_of = tuple(range(1, 1 + parameters))
        from_output = f"{name}_bwd_from_output"
        cases += [
            Case(
                name,
                name,
                inputs,
                parameters_of,
                with_gradients(op),
                _norm_oracle,
                skips=(from_output,),
            ),
            Case(
                f"{name} (from output)",
                name,
                inputs,
                (),
                with_gradients(partial(op, residuals="output")),
                _norm_oracle,
                rounds=8,
                skips=(f"{name}_bwd",),
            ),
            Case(
                f"add_{name}",
                f"add_{name}",
                partial(_add_norm_inputs, parameters=parameters),
                tuple(1 + i for i in parameters_of),
                with_gradients(add),
                _add_norm_oracle,
                skips=(from_output,),
            ),
        ]
    cases += [
        Case(
            "batch_norm",
            "batch_norm",
            _batch_norm_inputs,
            (1, 2),
            with_gradients(_batch_norm),
            _batch_norm_oracle,
        ),
        Case(
            "batch_norm_inference",
            "batch_norm_inference",
            _inference_inputs,
            (1, 2),
            _batch_norm_inference,
            _inference_oracle,
        ),
    ]
    for approximate, form in ((True, "tanh"), (False, "exact")):
        oracle = float64_oracle(
            formulas.gelu_oracle, formulas.gelu_vjp_oracle, approximate=approximate
        )
        cases += [
            Case(
                f"gelu ({form})",
                "gelu",
                partial(_gelu_inputs, bias=False),
                (),
                with_gradients(partial(jax_gradops.gelu, approximate=approximate)),
                oracle,
            ),
            Case(
                f"bias_gelu ({form})",
                "bias_gelu",
                partial(_gelu_inputs, bias=True),
                (1,),
                with_gradients(partial(jax_gradops.bias_gelu, approximate=approximate)),
                oracle,
            ),
        ]
    cases += [
        Case(
            "global_norm",
            "global_norm",
            _tree_inputs,
            (1,),
            with_gradients(jax_gradops.global_norm),
            _global_norm_oracle,
        ),
        Case(
            "clip_tree_by_global_norm",
            "clip_tree_by_global_norm",
            _clip_inputs,
            (),
            with_gradients(_clip),
            _clip_oracle,
            rounds=3,
        ),
        Case(
            "inplace_clip_by_global_norm",
            "inplace_clip_by_global_norm",
            _clip_inputs,
            (),
            with_gradients(_inplace_clip),
            _clip_oracle,
            rounds=3,
        ),
    ]
    if importlib.util.find_spec("optax") is not None:
        cases.append(
            Case(
                "clip_by_global_norm",
                "clip_by_global_norm",
                _tree_inputs,
                (1,),
                _optax_clip,
                _optax_clip_oracle,
            )
        )
    return cases
