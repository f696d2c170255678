"""`jax_gradops.fuse`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_gradops import _checks
from jax_gradops._fuse.report import FuseSummary, Kept

F = TypeVar("F", bound=Callable[..., Any])

# JAX's settings that make jax.numpy check the values between operations.
_ERROR_CHECKS = [f"jax_error_checking_behavior_{kind}" for kind in ("nan", "divide", "oob")]


@_checks.with_hints
def fuse(function: F, *, report: Callable[[FuseSummary], Any] | None = None) -> F:
    r"""Puts the ops of this library into any function, in place of the code that equals them.

    The fused function is traced and searched at each call; under `jax.jit`, once. In the traced
    code, the formulas of these ops are found, however their algebra is written:

    ===========================  ==================================================================
    code                         what runs instead
    ===========================  ==================================================================
    layer norm, RMS norm         `layer_norm`, `rms_norm`; `add_layer_norm`, `add_rms_norm` with the
                                 addition of two arrays, and of a bias, before the norm
    batch norm in training       `batch_norm`, with a residual and ReLU after it
    group norm, instance norm    `group_norm`, with SiLU or ReLU after it
    GELU, exact and by tanh      `bias_gelu` with a bias before it, else `gelu`
    cross-entropy of integers    `softmax_cross_entropy_with_integer_labels`, with label smoothing
                                 and z-loss
    lookups of rows of a table   `embedding_lookup`, with the cast of the table or of the rows
    bias of a 16-bit product     a sum whose gradient is computed as by `jax_gradops.nnx.Linear`
    Optax's clip_by_global_norm  `clip_tree_by_global_norm`
    ===========================  ==================================================================

    Code inside `jit`, `scan`, `while_loop`, `cond`, `checkpoint` and `shard_map` is searched too.
    Functions with a `custom_vjp` or `custom_jvp` are left as they are. All other code stays as it
    is.

    Code is replaced only if the op's results and derivatives are equal up to rounding. The formulas
    are compared as polynomials. Then the code and the op run once on a few rows of random numbers,
    in the code's dtypes, forward and backward. Code stays if a value inside is used elsewhere, such
    as a mean that is returned too. A GELU stays if its result is multiplied by another array, as in
    gated layers, because XLA computes both in one pass. A lookup has no arithmetic: its axes, mode
    and casts are compared.

    Args:
      function: any function of arrays, in any framework: a loss, a model's `apply`, a method. It
        may take and return any pytrees, Flax NNX modules, and values that are not arrays. Python's
        numbers and bools stay what they are, and NumPy arrays do.
      report: is called with a `FuseSummary` at each trace. It says what was replaced, and what was
        left and why, with file and line. `print` shows it.

    Returns:
      A function with `function`'s arguments and results. Differentiate it as usual:
      ``jax.grad(jax_gradops.fuse(loss))``. Inside, there is nothing to find in a gradient that is
      already taken: in ``jax_gradops.fuse(jax.grad(loss))``, the backward pass uses the values
      inside of the forward pass.

    Raises:
      TypeError: if `function` or `report` is not callable, or if `function` is a Flax module.
      ValueError: if the function adds variables to an NNX module, or removes some.

    Results equal the function's own up to rounding. Where the code computes in bfloat16, or a
    variance as E[x²] - E[x]², the op is more accurate. NaN is where the code has it. The exceptions
    are arrays with infinities, sums that overflow, and a variance that rounding makes negative: the
    user guide has a table. So a norm without an epsilon stays as it is.

    >>> import jax, jax.numpy as jnp, jax_gradops
    >>> def rms_norm(x, scale):
    ...     x32 = x.astype(jnp.float32)
    ...     mean = jnp.mean(x32**2, axis=-1, keepdims=True)
    ...     return (x32 * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)
    >>> found = []
    >>> loss = lambda x, scale: jnp.sum(rms_norm(x, scale) ** 2)
    >>> loss = jax_gradops.fuse(loss, report=found.append)
    >>> gradients = jax.jit(jax.grad(loss))(jnp.ones((4, 8)), jnp.ones(8))
    >>> print(found[0].replaced[0].op)
    rms_norm
    """
    _check_function(function)
    if report is not None and not callable(report):
        raise TypeError(f"fuse: report must be callable or None, got {type(report).__name__}")

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if "flax.nnx" in sys.modules:
            from jax_gradops._flax import nnx_state

            modules = nnx_state.modules_in((args, kwargs))
            if modules:
                run = functools.partial(_run, report=report)
                return nnx_state.call(run, function, modules, args, kwargs)
        return _run(function, args, kwargs, report)

    return fused  # pyright: ignore[reportReturnType]


def _check_function(function: Any) -> None:
    name = type(function).__name__
    bases = [base.__module__.split(".")[:2] for base in type(function).__mro__]
    if ["flax", "nnx"] in bases:
        raise TypeError(
            f"fuse: function is an NNX module, {name}. Use jax_gradops.nnx.fuse(model) to change "
            "its norms, or fuse the function that calls the model: jax_gradops.fuse(loss)"
        )
    if ["flax", "linen"] in bases:
        raise TypeError(
            f"fuse: function is a linen module, {name}. Fuse the function that calls its apply, "
            "such as the loss: jax_gradops.fuse(loss)"
        )
    if not callable(function):
        raise TypeError(f"fuse: function must be callable, got {name}")


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    report: Callable[[FuseSummary], Any] | None,
) -> Any:
    """Traces a function, puts ops in, and runs it."""
    checks = [name for name in _ERROR_CHECKS if getattr(jax.config, name, "ignore") != "ignore"]
    if checks:
        if report is not None:
            report(_left_whole(function, f"{checks[0]} checks values that an op does not compute"))
        return function(*args, **kwargs)
    # This import is not at the top. There, it would slow down the import of the library by 3 %.
    from jax_gradops._fuse import check
    from jax_gradops._fuse.rewrite import Rewriter

    leaves, structure = jax.tree.flatten((args, kwargs))
    traced = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    results: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        rest = iter(given)
        full = [next(rest) if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, full)
        found, out_structure = jax.tree.flatten(function(*args, **kwargs))
        results[:] = [(None if _is_array(v) else v, _is_array(v)) for v in found], out_structure
        return [v for v in found if _is_array(v)]

    closed = jax.make_jaxpr(flat)(*arrays)
    while True:
        rewriter = Rewriter()
        with check.in_threads() as comparisons:
            jaxpr = rewriter.rewritten(closed.jaxpr, closed.consts)
        if all(map(check.passed, comparisons)):
            break  # else the search starts again, and leaves what differs
    rewriter.keep()
    check.forget_errors()
    if report is not None:
        report(rewriter.report.summary())
    results_of = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arrays)
    # A result that is a number of the jaxpr is no `jax.Array`.
    computed = (v if _is_array(v) else jnp.asarray(v) for v in results_of)
    others, out_structure = results
    return jax.tree.unflatten(
        out_structure, [next(computed) if is_array else v for v, is_array in others]
    )


def _left_whole(function: Callable[..., Any], why: str) -> FuseSummary:
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else "unknown:0"
    return FuseSummary((), (Kept("function", why, where),))


def _is_array(leaf: Any) -> bool:
    """Whether a value is traced. Numbers and arrays of Python and NumPy stay what they are.

    The function may need their values, as for a shape or for an index.
    """
    return isinstance(leaf, jax.Array)
