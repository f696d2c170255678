"""What `doctor` runs: each public op on small inputs, and float64 NumPy that says what is right."""

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

Tree: TypeAlias = Any
DTYPES = ("float32", "bfloat16")
# Odd widths, so that rows start at odd addresses; several blocks and less than one vector.
SHAPES = ((37, 1000), (5, 33))
EPSILON = 1e-6
MAX_NORM = 1.5


@dataclasses.dataclass(frozen=True)
class Case:
    """One op.

    Attributes:
      title: the op's name, and which form of it.
      op: the name of the public function.
      inputs: makes float64 arguments from a generator of random numbers; a list of them, as one
        program runs the op on several shapes.
      wide: which arguments stay float32 whatever the dtype of the others.
      function: the results from the arguments, gradients included.
      oracle: the same in float64 NumPy.
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
    """`op`, followed by its gradients; takes the cotangent as its last argument."""

    def function(*args: Tree) -> Tree:
        y, vjp = jax.vjp(op, *args[:-1])
        return (y, *vjp(args[-1]))

    return function


# --- Norms ----------------------------------------------------------------------------------------


def _norm_inputs(rng: np.random.Generator, parameters: int) -> list[tuple[Tree, ...]]:
    """x, parameters, dy."""
    return [
        (
            3 * rng.standard_normal(shape) + 2,
            *(rng.uniform(0.5, 2, shape[-1]) for _ in range(parameters)),
            rng.standard_normal(shape),
        )
        for shape in SHAPES
    ]


def _norm_oracle(x: np.ndarray, scale: np.ndarray, dy: np.ndarray, centered: bool) -> Tree:
    """The output without a bias, dx, dscale and dbias."""
    if centered:
        x = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    x_hat = x * rstd
    wdy = scale * dy
    dx = wdy - x_hat * (wdy * x_hat).mean(-1, keepdims=True)
    if centered:
        dx = dx - wdy.mean(-1, keepdims=True)
    return x_hat * scale, dx * rstd, (dy * x_hat).sum(0), dy.sum(0)


def _layer_norm_oracle(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, dy: np.ndarray) -> Tree:
    y, *gradients = _norm_oracle(x, scale, dy, centered=True)
    return (y + bias, *gradients)


def _rms_norm_oracle(x: np.ndarray, scale: np.ndarray, dy: np.ndarray) -> Tree:
    return _norm_oracle(x, scale, dy, centered=False)[:3]


def _add_norm_inputs(rng: np.random.Generator, parameters: int) -> list[tuple[Tree, ...]]:
    """x, a residual (a multiple of it, so that the sum is exact), parameters, dy and dsum."""
    return [
        (x, -0.5 * x, *rest, (dy, rng.standard_normal(x.shape)))
        for x, *rest, dy in _norm_inputs(rng, parameters)
    ]


def _add_norm_oracle(x: Tree, residual: Tree, scale: Tree, *rest: Tree, centered: bool) -> Tree:
    """Both outputs and all gradients."""
    *bias, (dy, dsum) = rest
    y, dx, dscale, dbias = _norm_oracle(x + residual, scale, dy, centered)
    if not centered:
        return (y, x + residual), dx + dsum, dx + dsum, dscale
    return (y + bias[0], x + residual), dx + dsum, dx + dsum, dscale, dbias


# --- Batch norm -----------------------------------------------------------------------------------


def _batch_norm_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    """Of channels last and first: x, scale, bias, a residual, dy."""
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
        x, scale, bias, axis=_channel_axis(x), epsilon=EPSILON, residual=residual
    )[0]


def _batch_norm_oracle(x: Tree, scale: Tree, bias: Tree, residual: Tree, dy: Tree) -> Tree:
    axis = _channel_axis(x)
    x, residual, dy = (np.moveaxis(a, axis, -1) for a in (x, residual, dy))
    rows = tuple(range(x.ndim - 1))
    rstd = 1 / np.sqrt(x.var(rows) + EPSILON)
    x_hat = (x - x.mean(rows)) * rstd
    dx = scale * rstd * (dy - dy.mean(rows) - x_hat * (dy * x_hat).mean(rows))
    y = x_hat * scale + bias + residual
    y, dx, dresidual = (np.moveaxis(a, -1, axis) for a in (y, dx, dy))
    axes = tuple(i for i in range(dresidual.ndim) if i != axis % dresidual.ndim)
    x_hat = np.moveaxis(x_hat, -1, axis)
    return y, dx, (dresidual * x_hat).sum(axes), dresidual.sum(axes), dresidual


def _batch_norm_inference(x: Tree, mean: Tree, var: Tree) -> Tree:
    return jax_gradops.batch_norm_inference(
        x, mean, var, epsilon=EPSILON, axis=_channel_axis(x), implementation=None
    )


def _inference_inputs(rng: np.random.Generator) -> list[tuple[Tree, ...]]:
    """x, mean and variance."""
    return [(x, m, v) for x, m, v, *_ in _batch_norm_inputs(rng)]


def _inference_oracle(x: Tree, mean: Tree, var: Tree) -> Tree:
    axis = _channel_axis(x)
    y = (np.moveaxis(x, axis, -1) - mean) / np.sqrt(var + EPSILON)
    return np.moveaxis(y, -1, axis)


# --- GELU -----------------------------------------------------------------------------------------


def _gelu_inputs(rng: np.random.Generator, bias: bool) -> list[tuple[Tree, ...]]:
    """x, the bias if wanted, dy."""
    return [
        (
            3 * rng.standard_normal(shape),
            *([rng.standard_normal(shape[-1])] if bias else []),
            rng.standard_normal(shape),
        )
        for shape in SHAPES
    ]


def _gelu_oracle(x: np.ndarray, dy: np.ndarray, approximate: bool) -> Tree:
    if approximate:
        c = 2 * math.sqrt(2 / math.pi)
        weight = 1 / (1 + np.exp(-c * (x + 0.044715 * x**3)))
        slope = weight * (1 - weight) * c * (1 + 3 * 0.044715 * x**2)
    else:
        weight = 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
        slope = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * weight, dy * (weight + x * slope)


def _bias_gelu_oracle(x: np.ndarray, bias: np.ndarray, dy: np.ndarray, approximate: bool) -> Tree:
    y, dx = _gelu_oracle(x + bias, dy, approximate)
    return y, dx, dx.sum(0)


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
    """The cases of every public op; Optax's transformation only where Optax is installed."""
    partial = functools.partial
    cases: list[Case] = []
    for name, parameters, oracle in (
        ("layer_norm", 2, _layer_norm_oracle),
        ("rms_norm", 1, _rms_norm_oracle),
    ):
        op = partial(getattr(jax_gradops, name), epsilon=EPSILON)
        add = partial(getattr(jax_gradops, f"add_{name}"), epsilon=EPSILON)
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
                oracle,
                skips=(from_output,),
            ),
            Case(
                f"{name} (from output)",
                name,
                inputs,
                (),
                with_gradients(partial(op, residuals="output")),
                oracle,
                rounds=8,
                skips=(f"{name}_bwd",),
            ),
            Case(
                f"add_{name}",
                f"add_{name}",
                partial(_add_norm_inputs, parameters=parameters),
                tuple(1 + i for i in parameters_of),
                with_gradients(add),
                partial(_add_norm_oracle, centered=name == "layer_norm"),
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
        cases += [
            Case(
                f"gelu ({form})",
                "gelu",
                partial(_gelu_inputs, bias=False),
                (),
                with_gradients(partial(jax_gradops.gelu, approximate=approximate)),
                partial(_gelu_oracle, approximate=approximate),
            ),
            Case(
                f"bias_gelu ({form})",
                "bias_gelu",
                partial(_gelu_inputs, bias=True),
                (1,),
                with_gradients(partial(jax_gradops.bias_gelu, approximate=approximate)),
                partial(_bias_gelu_oracle, approximate=approximate),
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
