"""Global norm and clip-by-global-norm over a whole tree of arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype, match_vma, varying
from jax_gradops._kernel.error_checks import without_error_checks
from jax_gradops._ops.clip.kernels import (
    Nonfinite,
    Norm,
    scale,
    scale_in_place,
    traced_norm,
)

if TYPE_CHECKING:
    import optax


_DTYPES = (*_checks.FLOAT_DTYPES, "complex64", "complex128")


def _leaves(
    op: str, tree: Any, name: str = "tree", dtypes: Sequence[str] = _DTYPES
) -> list[jax.Array]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        _checks.array(op, name + jax.tree_util.keystr(path), leaf, dtypes) for path, leaf in paths
    ]


def _as_float(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf
    return leaf.astype(jnp.float64 if leaf.dtype.itemsize == 8 else jnp.float32)


def _is_complex(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def _parts(leaves: Iterable[jax.Array]) -> list[jax.Array]:
    """The leaves. The real and the imaginary part replace each complex leaf."""
    return [
        part
        for leaf in leaves
        for part in ((lax.real(leaf), lax.imag(leaf)) if _is_complex(leaf) else (leaf,))
    ]


def _rejoined(leaves: Iterable[jax.Array], parts: Iterable[jax.Array]) -> list[jax.Array]:
    """The inverse of `_parts`. `leaves` tells where complex leaves are, not their values."""
    rest = iter(parts)
    return [lax.complex(next(rest), next(rest)) if _is_complex(x) else next(rest) for x in leaves]


@functools.partial(jax.jit, static_argnums=0)
def _zero(dtype: Any) -> jax.Array:
    return jnp.zeros((), dtype)


def _beside(norm: Norm, limit: ArrayLike) -> ArrayLike:
    """A number on the norm's devices. `jax.transfer_guard` allows this explicit transfer."""
    other = norm.plain
    if isinstance(limit, jax.Array) or isinstance(other, Tracer) or not other.is_fully_addressable:
        return limit
    return jax.device_put(limit, other.sharding if other.committed else None)


def _norm_of_all(leaves: Sequence[jax.Array], implementation: Implementation) -> Norm:
    """The norm of real leaves."""
    with_elements = tuple(leaf for leaf in leaves if leaf.size)
    if not with_elements:
        zero = _zero(accum_dtype(*(leaf.dtype for leaf in leaves)))
        return Norm(zero, zero)
    return traced_norm(with_elements, implementation=implementation)


@_checks.with_hints
def global_norm(tree: Any) -> jax.Array:
    r"""L2 norm over all elements of all leaves, in one multi-tensor operation.

    .. math:: \sqrt{\textstyle\sum_i \sum_j x_{ij}^2}

    Args:
      tree: a pytree of arrays in float16, bfloat16, float32, float64, complex64, complex128 or an
        integer dtype. Their dtypes may differ. None and empty leaves are skipped. A complex element
        counts by its modulus. An integer leaf counts as float32, or as float64 if it has 64 bits.

    Returns:
      A float32 scalar (float64 if any leaf with elements is float64 or complex128). For a tree
      without elements, it is 0.

    Raises:
      TypeError: for a leaf of another dtype. The message names the leaf's place in the tree.

    The whole dynamic range of float32 is supported: leaves of 1e20 or of 1e-25 give the right norm.
    A norm above 3.4e38 is infinite. The kernel accumulates in float64 in a fixed order: results are
    bitwise reproducible from run to run. The gradient at norm 0 is 0.

    References:
      Blue, A Portable Fortran Program to Find the Euclidean Norm of a Vector, ACM Transactions on
      Mathematical Software 4 (1978), https://doi.org/10.1145/355769.355771

    >>> import jax.numpy as jnp, jax_gradops
    >>> float(jax_gradops.global_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0])}))
    5.0
    """
    op = "global_norm"
    leaves = map(_as_float, _leaves(op, tree, dtypes=(*_DTYPES, *_checks.INTEGER_DTYPES)))
    return _norm_of_all(_parts(leaves), resolve_implementation(None, op)).plain


def _check_max_norm(op: str, max_norm: Any) -> ArrayLike:
    """Checks a number. For a JAX array, type and shape are checked, not the value."""
    if isinstance(max_norm, jax.Array | np.ndarray) and max_norm.size == 1:
        max_norm = max_norm.reshape(())  # Optax takes the shape (1,), too
    if isinstance(max_norm, jax.Array) and max_norm.shape == () and _checks.is_real(max_norm):
        return max_norm  # reading the value would wait for the device
    if isinstance(max_norm, jax.Array):
        got = _checks.described(max_norm)
        raise TypeError(f"{op}: max_norm must be a number, got {got}")
    if callable(max_norm) and op == "clip_by_global_norm":
        raise TypeError(
            f"{op}: max_norm must be a number, got a function. For a schedule there is "
            "optax.inject_hyperparams(jax_gradops.clip_by_global_norm)(max_norm=schedule)"
        )
    return _checks.number(op, "max_norm", max_norm, minimum=0, finite=False)


def _check_nonfinite(op: str, nonfinite: Any) -> Nonfinite:
    return _checks.choice(op, "nonfinite", nonfinite, "propagate", "zero")


@_checks.with_hints
def clip_tree_by_global_norm(
    tree: Any,
    max_norm: ArrayLike,
    *,
    nonfinite: Nonfinite = "propagate",
    implementation: Implementation = None,
) -> tuple[Any, jax.Array]:
    r"""Scales all leaves so that their global norm is at most `max_norm`.

    .. math:: g \cdot \frac{\text{max\_norm}}{\text{norm}} \quad\text{where norm}
              \ge \text{max\_norm}, \text{ else } g

    The norm is one native operation over the whole tree. The scaling is left to XLA. XLA fuses it
    with the operations that follow, such as an optimizer's update.

    Args:
      tree: a pytree of arrays in float16, bfloat16, float32, float64, complex64 or complex128.
        Their dtypes may differ. None, `optax.MaskedNode` and empty leaves pass through.
      max_norm: a number that is at least 0, or an array of one element, which may be traced. The
        value of a JAX array is not checked. If it is negative or NaN, clipped leaves are NaN.
      nonfinite: what happens if a leaf has an infinite or NaN element. ``"propagate"`` is Optax's
        behaviour: a NaN makes all leaves NaN. Infinity makes them ``g * 0`` (NaN if `max_norm` is
        infinite, too). ``"zero"`` makes all leaves 0.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      The clipped tree, each leaf in its dtype, and the norm before clipping. The norm is a float32
      scalar (float64 if any leaf with elements is float64 or complex128).

    Raises:
      TypeError: for a leaf of another dtype, or a `max_norm` that is not a number.
      ValueError: for a `max_norm` that is negative or NaN, or an unknown `nonfinite`. Also for
        ``implementation="ffi"`` if no kernel is available.

    If nothing is clipped (norm < max_norm, or norm == 0), leaves come back bitwise unchanged.
    Otherwise each element is multiplied in the accumulation dtype and rounded once. If
    ``max_norm / norm`` is below 2^-100 in float32, the multiplication takes two steps: so no
    gradient is lost. A float32 norm above 3.4e38 is returned as infinity, but finite leaves are
    clipped by the true norm. The derivative at leaves that are not finite is NaN, also with
    ``nonfinite="zero"``.

    References:
      Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks,
      https://arxiv.org/abs/1211.5063

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> clipped, norm = jax_gradops.clip_tree_by_global_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
    >>> print(np.asarray(clipped["w"]).round(3), norm)
    [0.6 0.8] 5.0
    """
    op = "clip_tree_by_global_norm"
    return _clip(op, "tree", tree, max_norm, nonfinite, implementation)


def _clip(
    op: str,
    name: str,
    tree: Any,
    max_norm: ArrayLike,
    nonfinite: Nonfinite,
    implementation: Implementation,
) -> tuple[Any, jax.Array]:
    limit = _check_max_norm(op, max_norm)
    nonfinite = _check_nonfinite(op, nonfinite)
    implementation = resolve_implementation(implementation, op)
    leaves = _leaves(op, tree, name)
    parts = _parts(leaves)
    norm = _norm_of_all(parts, implementation)
    clipped = _rejoined(
        leaves, scale(tuple(parts), norm, _beside(norm, limit), nonfinite=nonfinite)
    )
    return jax.tree.unflatten(jax.tree.structure(tree), clipped), norm.plain


@_checks.with_hints
def inplace_clip_by_global_norm(
    tree: Any, max_norm: ArrayLike, *, implementation: Implementation = None
) -> tuple[Any, jax.Array]:
    r"""Clips a tree by its global norm, in place.

    .. math:: g \cdot \frac{\text{max\_norm}}{\text{norm}} \quad\text{where norm}
              \ge \text{max\_norm}, \text{ else } g

    This is ONNX Runtime's InplaceClipGradNorm. It takes a sequence of gradients, and returns the
    clipped sequence in the same memory. The norm and the scaling are native operations over the
    whole tree. If nothing is clipped, the kernels write no leaf.
    `jax_gradops.clip_tree_by_global_norm` leaves the scaling to XLA. That is faster if an
    optimizer's update follows.

    Args:
      tree: a pytree (a list, for example) of arrays in float16, bfloat16, float32, float64,
        complex64 or complex128. Their dtypes may differ. None and empty leaves pass through. Inside
        `jax.jit`, results take over the memory of leaves that are not needed later. If the tree is
        an argument of the jitted function, it must be donated. Otherwise XLA copies the leaves.
        Complex leaves are always copied.
      max_norm: a number that is at least 0, or an array of one element, which may be traced.
      implementation: as in `jax_gradops.clip_tree_by_global_norm`.

    Returns:
      The clipped tree, each leaf in its dtype, and the norm before clipping. The norm is a float32
      scalar (float64 if any leaf with elements is float64 or complex128).

    Raises:
      TypeError: for a leaf of another dtype, or a `max_norm` that is not a number.
      ValueError: for a `max_norm` that is negative or NaN. Also for ``implementation="ffi"`` if no
        kernel is available.

    Numerics are as in `jax_gradops.clip_tree_by_global_norm` with ``nonfinite="propagate"``. Leaves
    are bitwise unchanged, or each element is multiplied in the accumulation dtype and rounded once.
    ONNX Runtime divides by ``max(norm, 1e-6)``. This function always divides by the norm.

    References:
      ONNX Runtime, InplaceClipGradNorm: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jax_gradops import backward
    >>> clip = jax.jit(backward.inplace_clip_by_global_norm, donate_argnums=0)
    >>> gradients, norm = clip([jnp.array([3.0]), jnp.array([4.0])], 1.0)
    >>> print([float(g[0].round(3)) for g in gradients], norm)
    [0.6000000238418579, 0.800000011920929] 5.0
    """
    op = "inplace_clip_by_global_norm"
    limit = _check_max_norm(op, max_norm)
    implementation = resolve_implementation(implementation, op)
    leaves = _leaves(op, tree)
    parts = _parts(leaves)
    norm = _norm_of_all(parts, implementation)
    with_elements = tuple(part for part in parts if part.size)
    scaled = iter(
        scale_in_place(with_elements, norm, _beside(norm, limit), implementation=implementation)
        if with_elements
        else ()
    )
    clipped = _rejoined(leaves, (next(scaled) if part.size else part for part in parts))
    return jax.tree.unflatten(jax.tree.structure(tree), clipped), norm.plain


class ClipByGlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`.

    Attributes:
      global_norm: the norm of the last updates before clipping. It is a float32 scalar (float64 if
        any leaf with elements is float64 or complex128). Before the first update, it is 0.
    """

    global_norm: jax.Array


def _float_dtype(leaf: Any) -> Any:
    """The dtype of a real or complex leaf (also abstract). None for a key, a counter, a name."""
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
        return None
    dtype = jnp.result_type(leaf) if isinstance(leaf, int | float | complex) else leaf.dtype
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return jax.dtypes.canonicalize_dtype(dtype) if is_float else None


def _initial_norm(leaves: Sequence[Any]) -> jax.Array:
    """0 in the type of the leaves' norm. In `shard_map`, it varies as the leaves do."""
    found = [(leaf, dtype) for leaf in leaves if (dtype := _float_dtype(leaf)) is not None]
    wide = any(dtype in (jnp.float64, jnp.complex128) for _, dtype in found)
    zero = _zero(jnp.float64 if wide else jnp.float32)
    arrays = [leaf for leaf, _ in found if isinstance(leaf, jax.Array)]
    matched = match_vma(*arrays, zero)[-1]
    return zero if matched is None else matched


def _of_type(norm: jax.Array, before: Any) -> jax.Array:
    """Converts the norm to the type of the previous norm. Loops and conditions require this type.

    The previous norm may be a Python number from a checkpoint. Then any type is fine.
    """
    if not hasattr(before, "dtype") or _float_dtype(before) is None:
        return norm
    norm = norm.astype(jax.dtypes.canonicalize_dtype(before.dtype))
    if not isinstance(before, jax.Array):
        return norm
    if more := varying(norm) - varying(before):
        norm = lax.pmean(norm, tuple(sorted(more)))
    matched = match_vma(norm, before)[0]
    return norm if matched is None else matched


@_checks.with_hints
def clip_by_global_norm(
    max_norm: ArrayLike,
    *,
    nonfinite: Nonfinite = "propagate",
    keep_norm: bool = True,
    implementation: Implementation = None,
) -> optax.GradientTransformation:
    r"""Clip-by-global-norm as an Optax `GradientTransformation`, for `optax.chain`.

    .. math:: g \cdot \frac{\text{max\_norm}}{\text{norm}} \quad\text{where norm}
              \ge \text{max\_norm}, \text{ else } g

    Args:
      max_norm: a number that is at least 0, or an array of one element. It may be traced
        (`optax.inject_hyperparams`).
      nonfinite: as in `clip_tree_by_global_norm`.
      keep_norm: whether the state holds the norm of the last updates. If False, the state is
        `optax.EmptyState`, as for Optax's clip: checkpoints fit in both directions.
      implementation: as in `clip_tree_by_global_norm`.

    Returns:
      An `optax.GradientTransformation`. Its state is a `ClipByGlobalNormState`. The state holds the
      norm of the last updates: a training loop can show it at no cost. In a chain, read it by
      ``optax.tree.get(state, "global_norm")``. For the ``opt_state`` of an `nnx.Optimizer`, this
      call returns a variable. The next step changes the variable: take its value by ``[...]``.

    Raises:
      ImportError: if Optax is not installed (``pip install optax``).
      TypeError, ValueError: as `clip_tree_by_global_norm`.

    The rules for updates and the numerics are as in `clip_tree_by_global_norm`.

    ``init`` reads only dtypes. So parameters may be abstract, and may have leaves without a
    gradient: keys, counters, names. As a state, ``update`` also takes None, `optax.EmptyState`, or
    a norm that a checkpoint restored as a number. The new norm has the type of the old norm. Inside
    `jax.shard_map`, updates may vary over more mesh axes than the parameters did. Then the state
    holds the mean of the devices' norms. With ``keep_norm=False``, ``update`` takes the same
    states, and returns `optax.EmptyState`.

    References:
      Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks,
      https://arxiv.org/abs/1211.5063

    >>> import jax.numpy as jnp, jax_gradops, optax
    >>> optimizer = optax.chain(jax_gradops.clip_by_global_norm(1.0), optax.sgd(0.1))
    >>> params = {"w": jnp.array([3.0, 4.0])}
    >>> updates, state = optimizer.update(params, optimizer.init(params))
    >>> float(state[0].global_norm)
    5.0
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("clip_by_global_norm needs Optax: pip install optax") from error
    op = "clip_by_global_norm"
    _check_max_norm(op, max_norm)
    _check_nonfinite(op, nonfinite)
    _checks.flag(op, "keep_norm", keep_norm)
    resolve_implementation(implementation, op)

    def init(params: Any) -> Any:
        if not keep_norm:
            return optax.EmptyState()
        return ClipByGlobalNormState(_initial_norm(jax.tree.leaves(params)))

    @without_error_checks()
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        last: Any = state
        stateless: bool = state is None or isinstance(state, optax.EmptyState)
        if not (stateless or hasattr(state, "global_norm")):
            expected = "a ClipByGlobalNormState" if keep_norm else "an optax.EmptyState"
            raise TypeError(
                f"{op}: state must be {expected}, as init returns it, got {type(state).__name__}"
            )
        clipped, norm = _clip(op, "updates", updates, max_norm, nonfinite, implementation)
        if not keep_norm:
            return clipped, optax.EmptyState()
        if not stateless:
            norm = _of_type(norm, last.global_norm)
        return clipped, ClipByGlobalNormState(norm)

    return optax.GradientTransformation(init, update)
