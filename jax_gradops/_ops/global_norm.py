"""Global norm and clip-by-global-norm over a whole tree of arrays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._array_types import Arrays, accum_dtype, match_vma
from jax_gradops._core import Kernel, Result
from jax_gradops._implementation import Implementation, resolve_implementation

if TYPE_CHECKING:
    import optax

Nonfinite: TypeAlias = Literal["propagate", "zero"]

# --- Reference: the meaning of the kernel in jax.numpy -------------------------------------------


def _sum_of_squares_reference(*leaves: jax.Array) -> Arrays:
    """The sum of squares in three ranges, as ffi/ops/global_norm.h defines them.

    Squares of float32 reach from 2^-298 to 2^256: where their sum leaves float32's range, the
    leaves are scaled by a power of two before they are squared.
    """
    dtype = accum_dtype(*(leaf.dtype for leaf in leaves))

    def sum_of_squares(factor: float) -> jax.Array:
        return functools.reduce(
            jnp.add, (jnp.sum(jnp.square(leaf.astype(dtype) * factor)) for leaf in leaves)
        )

    normal = sum_of_squares(1)
    _, zero = match_vma(normal, jnp.zeros_like(normal))
    assert zero is not None
    if dtype == jnp.float64:
        return zero, normal, zero
    is_huge, is_tiny = normal == jnp.inf, normal < 2.0**-96
    # At most one turn. It is no `cond`, whose vmap would choose between leaves on a mesh.
    _, huge, tiny = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (carry[0] & False, sum_of_squares(2.0**-96), sum_of_squares(2.0**96)),
        (is_huge | is_tiny, zero, zero),
    )
    return (
        jnp.where(is_huge, huge, 0),
        jnp.where(is_huge | is_tiny, 0, normal),
        jnp.where(is_tiny, tiny, 0),
    )


# --- Kernel --------------------------------------------------------------------------------------

SUM_OF_SQUARES = Kernel(
    name="sum_of_squares",
    operands={"leaves": "n"},
    results={"huge": Result(""), "normal": Result(""), "tiny": Result("")},
    reference=_sum_of_squares_reference,
    variadic=True,
    # 2,048 partial sums in double, a dtype that JAX may not know; at least one for each group.
    workspace=lambda groups, rows, features, sums: (
        groups,
        -(-2048 // max(1, groups)) if isinstance(groups, int) else 2048,
        2,
    ),
)


@jax.custom_jvp
def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """X * factor, rounded once; x itself where the factor is 1."""
    dtype = accum_dtype(x.dtype, factor.dtype)
    # A choice rather than a product with 1: that would flush subnormals where the hardware does.
    return jnp.where(factor == 1, x, (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype))


# The choice has no derivative by a factor of 1, which may come of norm == max_norm.
@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    (x, factor), (dx, dfactor) = primals, tangents
    dtype = accum_dtype(x.dtype, factor.dtype)
    change = dx.astype(dtype) * factor.astype(dtype) + x.astype(dtype) * dfactor.astype(dtype)
    return _scaled(x, factor), change.astype(x.dtype)


def _scale_reference(*operands: jax.Array) -> Arrays:
    *leaves, factor = operands
    return tuple(_scaled(x, factor) for x in leaves)


# XLA compares all pairs of a call's results and operands: 10,000 in one call compile for minutes.
_LEAVES_PER_CALL = 250

# Where the factor is 1, no leaf is written.
SCALE = Kernel(
    name="scale",
    operands={"leaves": "n", "factor": ""},
    results={"scaled": Result("n", "x")},
    reference=_scale_reference,
    variadic=True,
    in_place={"scaled": "leaves"},
)


# --- Differentiation -----------------------------------------------------------------------------


def _norm_of(leaves: tuple[jax.Array, ...], implementation: Implementation) -> jax.Array:
    huge, normal, tiny = SUM_OF_SQUARES(*leaves, implementation=implementation)
    # The root of each part has float32's range; scalars only, so that XLA makes one small kernel.
    parts = (jnp.sqrt(huge) * 2.0**96, jnp.sqrt(normal), jnp.sqrt(tiny) * 2.0**-96)
    largest = functools.reduce(jnp.maximum, parts)
    scalable = (largest > 0) & (largest < jnp.inf)
    divisor = jnp.where(scalable, largest, 1)
    total = sum(jnp.square(part / divisor) for part in parts)
    return jnp.where(scalable, largest * jnp.sqrt(total), largest)


@jax.custom_jvp
def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """A / b, for a scalar b, whose derivative does not need b² (JAX's leaves float32's range)."""
    return a / b


@_quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    q = _quotient(a, b)
    return q, _quotient(da, b) - q * _quotient(db, b)


# The rule does not differentiate the kernel, so it serves every implementation, order and mode.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _norm(leaves: tuple[jax.Array, ...], implementation: Implementation) -> jax.Array:
    return _norm_of(leaves, implementation)


@_norm.defjvp
def _norm_jvp(implementation: Implementation, primals: Any, tangents: Any) -> Any:
    (leaves,), (dleaves,) = primals, tangents
    norm = _norm(leaves, implementation)
    safe = jnp.where(norm == 0, 1, norm)  # the gradient at norm 0 is 0
    pairs = zip(leaves, dleaves, strict=True)
    return norm, sum(
        jnp.sum(_quotient(x.astype(norm.dtype), safe) * d.astype(norm.dtype)) for x, d in pairs
    )


@functools.partial(jax.jit, static_argnames="implementation")
def _traced_norm(leaves: tuple[jax.Array, ...], *, implementation: Implementation) -> jax.Array:
    norm: Any = _norm(SUM_OF_SQUARES.prepare(*leaves), implementation)
    return norm


# --- Public functions ----------------------------------------------------------------------------


def _leaves(op: str, tree: Any, name: str = "tree") -> list[jax.Array]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [_checks.array(op, name + jax.tree_util.keystr(path), leaf) for path, leaf in paths]


def _norm_of_all(leaves: list[jax.Array], implementation: Implementation) -> jax.Array:
    with_elements = tuple(leaf for leaf in leaves if leaf.size)
    if not with_elements:
        return jnp.zeros((), accum_dtype(*(leaf.dtype for leaf in leaves)))
    return _traced_norm(with_elements, implementation=implementation)


def global_norm(tree: Any) -> jax.Array:
    r"""L2 norm over all elements of all leaves, in one multi-tensor operation.

    .. math:: \sqrt{\textstyle\sum_i \sum_j x_{ij}^2}

    Args:
      tree: any pytree of float16, bfloat16, float32 or float64 arrays, in any mixture. None and
        empty leaves are passed over.

    Returns:
      A float32 scalar (float64 if any leaf with elements is float64); 0 for a tree without any.

    Raises:
      TypeError: for a leaf of another dtype; the message names its place in the tree.

    The whole dynamic range of float32 is respected: leaves of 1e20 or of 1e-25 give the right norm.
    The kernel accumulates in float64 in a fixed order: results are bitwise the same from run to
    run. The gradient at norm 0 is 0.

    >>> import jax.numpy as jnp, jax_gradops
    >>> float(jax_gradops.global_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0])}))
    5.0
    """
    return _norm_of_all(_leaves("global_norm", tree), resolve_implementation(None, "global_norm"))


def _check_max_norm(op: str, max_norm: Any) -> ArrayLike:
    """A number that is known now is checked now; a traced one is checked for its kind only."""
    if isinstance(max_norm, jax.Array) and max_norm.shape == () and _checks.is_real(max_norm):
        return max_norm  # a look at a device array's value would wait for the device
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

    The norm is one native operation over the whole tree; the scaling is left to XLA, which fuses it
    with what follows, such as an optimizer's update.

    Args:
      tree: any pytree of float16, bfloat16, float32 or float64 arrays, in any mixture. None,
        `optax.MaskedNode` and empty leaves pass through.
      max_norm: a number, or a scalar array, which may be traced; at least 0. An array is not looked
        at: a negative one makes clipped leaves NaN, as NaN does.
      nonfinite: what to do when the norm is infinite or NaN. ``"propagate"``, as Optax: a NaN norm
        makes all leaves NaN, an infinite one makes them ``g * 0`` (NaN if `max_norm` is infinite,
        too). ``"zero"``: all leaves become 0.
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      The clipped tree, each leaf in its dtype, and the norm before clipping: a float32 scalar
      (float64 if any leaf with elements is float64).

    Raises:
      TypeError: for a leaf of another dtype, or a `max_norm` that is no number.
      ValueError: for a `max_norm` that is negative or NaN, an unknown `nonfinite`, or
        ``implementation="ffi"`` where there is no kernel.

    Where nothing is clipped (norm < max_norm, or norm == 0) leaves come back bitwise unchanged.
    Otherwise each element is multiplied in the accumulation dtype and rounded once. The derivative
    at a tree whose norm is not finite is NaN, also with ``nonfinite="zero"``.

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
    norm = _norm_of_all(leaves, implementation)
    clipped = _scale(tuple(leaves), norm, limit, nonfinite=nonfinite)
    return jax.tree.unflatten(jax.tree.structure(tree), clipped), norm


def _factor(norm: jax.Array, max_norm: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Whether leaves are kept as they are, and by what they are multiplied: 1 if they are."""
    max_norm = jnp.asarray(max_norm, norm.dtype)
    # NaN if it is negative, as gradients would be turned round. With a root, as a NaN written here
    # would stop jax_debug_nans.
    max_norm += jnp.sqrt(jnp.where(max_norm < 0, -1, 0).astype(norm.dtype))
    keep = (norm < max_norm) | (norm == 0)
    # Where it is not used it is 1 / 1, so that no derivative is infinite times 0.
    return keep, _quotient(jnp.where(keep, 1, max_norm), jnp.where(keep, 1, norm))


@functools.partial(jax.jit, static_argnames="nonfinite")
def _scale(
    leaves: tuple[jax.Array, ...], norm: jax.Array, max_norm: ArrayLike, *, nonfinite: Nonfinite
) -> tuple[jax.Array, ...]:
    keep, factor = _factor(norm, max_norm)
    drop = ~jnp.isfinite(norm) if nonfinite == "zero" else None

    def scaled(x: jax.Array) -> jax.Array:
        dtype = accum_dtype(x.dtype, norm.dtype)
        # A choice rather than a factor of 1: that would flush subnormals where the hardware does.
        y = jnp.where(keep, x, (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype))
        return y if drop is None else jnp.where(drop, jnp.zeros_like(y), y)

    return tuple(map(scaled, leaves))


@functools.partial(jax.jit, static_argnames="implementation")
def _scale_in_place(
    leaves: tuple[jax.Array, ...],
    norm: jax.Array,
    max_norm: ArrayLike,
    *,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    *operands, factor = SCALE.prepare(*leaves, _factor(norm, max_norm)[1])
    calls = (operands[i : i + _LEAVES_PER_CALL] for i in range(0, len(leaves), _LEAVES_PER_CALL))
    return tuple(x for some in calls for x in SCALE(*some, factor, implementation=implementation))


def inplace_clip_by_global_norm(
    tree: Any, max_norm: ArrayLike, *, implementation: Implementation = None
) -> tuple[Any, jax.Array]:
    r"""Clips a tree by its global norm where it lies.

    .. math:: g \cdot \frac{\text{max\_norm}}{\text{norm}} \quad\text{where norm}
              \ge \text{max\_norm}, \text{ else } g

    ONNX Runtime's InplaceClipGradNorm: a sequence of gradients in, the same sequence out, in the
    same memory. The norm and the scaling are native operations over the whole tree; where nothing
    is clipped, the kernels write no leaf. `jax_gradops.clip_tree_by_global_norm` leaves the scaling
    to XLA, which is faster where an optimizer's update follows.

    Args:
      tree: any pytree (a list, say) of float16, bfloat16, float32 or float64 arrays, in any
        mixture. None and empty leaves pass through. The results take over the leaves' memory where
        nobody needs these later: inside `jax.jit`, and where the tree is an argument of that, if it
        is donated. Otherwise XLA copies it.
      max_norm: a number, or a scalar array, which may be traced; at least 0.
      implementation: as in `jax_gradops.clip_tree_by_global_norm`.

    Returns:
      The clipped tree, each leaf in its dtype, and the norm before clipping: a float32 scalar
      (float64 if any leaf with elements is float64).

    Raises:
      TypeError: for a leaf of another dtype, or a `max_norm` that is no number.
      ValueError: for a `max_norm` that is negative or NaN; for ``implementation="ffi"`` where there
        is no kernel.

    Numerics are those of `jax_gradops.clip_tree_by_global_norm` with ``nonfinite="propagate"``:
    leaves are bitwise unchanged, or each element is multiplied in the accumulation dtype and
    rounded once. The original divides by ``max(norm, 1e-6)``; here a smaller norm is divided by
    itself.

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
    norm = _norm_of_all(leaves, implementation)
    with_elements = tuple(leaf for leaf in leaves if leaf.size)
    scaled = iter(
        _scale_in_place(with_elements, norm, limit, implementation=implementation)
        if with_elements
        else ()
    )
    clipped = [next(scaled) if leaf.size else leaf for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), clipped), norm


class ClipByGlobalNormState(NamedTuple):
    """State of `clip_by_global_norm`.

    Attributes:
      global_norm: the norm of the last updates before clipping; 0 before the first.
    """

    global_norm: jax.Array


def clip_by_global_norm(
    max_norm: ArrayLike,
    *,
    nonfinite: Nonfinite = "propagate",
    implementation: Implementation = None,
) -> optax.GradientTransformation:
    """Clip-by-global-norm as an Optax `GradientTransformation`, for `optax.chain`.

    Args:
      max_norm: as in `clip_tree_by_global_norm`; may be traced (`optax.inject_hyperparams`).
      nonfinite: as in `clip_tree_by_global_norm`.
      implementation: as in `clip_tree_by_global_norm`.

    Returns:
      An `optax.GradientTransformation` whose state is a `ClipByGlobalNormState`: it holds the norm
      of the last updates, so that a training loop can show it at no cost. In chains it is
      ``optax.tree.get(state, "global_norm")``; of an `nnx.Optimizer`'s ``opt_state`` that is a
      variable, which the next step changes: take its value, ``[...]``.

    Raises:
      ImportError: if Optax is not installed (``pip install optax``).
      TypeError, ValueError: as `clip_tree_by_global_norm`.

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
    resolve_implementation(implementation, op)

    def init(params: Any) -> ClipByGlobalNormState:
        dtypes = (leaf.dtype for leaf in _leaves(op, params, "params"))
        return ClipByGlobalNormState(jnp.zeros((), accum_dtype(*dtypes)))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        if not hasattr(state, "global_norm"):
            raise TypeError(
                f"{op}: state must be a ClipByGlobalNormState, as init returns it, got "
                f"{type(state).__name__}"
            )
        clipped, norm = _clip(op, "updates", updates, max_norm, nonfinite, implementation)
        return clipped, ClipByGlobalNormState(norm.astype(state.global_norm.dtype))

    return optax.GradientTransformation(init, update)
