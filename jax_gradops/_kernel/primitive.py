"""Operations whose derivatives JAX cannot lose: all are one primitive.

JAX keeps a primitive's rules in every transformation. JAX drops the rules of `jax.custom_jvp` and
`jax.custom_vjp` when it differentiates a loop. A second derivative through `jax.lax.scan` then
differentiates the code inside them. An `Operation` says how it is computed. It may also say how it
is differentiated, transposed, vmapped and lowered. Operands and results are tuples of arrays. None
stands for an absent array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, PartitionSpec

from jax_gradops._kernel.array_types import axes_of, for_each, match_vma
from jax_gradops._kernel.error_checks import without_error_checks

Array: TypeAlias = jax.Array
#: Arrays. None stands for an absent array.
Operands: TypeAlias = Sequence[Any]

#: In `Operation.transpose`, stands for a linear operand whose value is not known.
Unknown = ad.UndefinedPrimal


class Axis(NamedTuple):
    """An axis that `jax.vmap` maps."""

    size: int
    name: Any
    spmd_name: Any


class Operation:
    """A computation with its static values. Subclasses are hashable: frozen dataclasses."""

    #: Positions of the operands in which the operation is linear if the others are constant.
    linear: tuple[int, ...] = ()
    #: Names of mapped axes over which the operation sums.
    axis_names: tuple[Any, ...] = ()
    #: The types of the results, if known. `compute` is then traced only when it is lowered. If
    #: another operation serves the platform, `compute` is never traced.
    types: tuple[Any, ...] | None = None
    #: Positions of operands that may vary over fewer mesh axes than the other operands.
    unmatched: tuple[int, ...] = ()
    #: Whether a 16-bit operand and its copy in float32 give the same results. If so, the operation
    #: reads the 16-bit array. XLA cannot fuse the cast into the operation, and would write the copy
    #: to memory.
    widens: bool = False

    def common(self, mapped: Sequence[bool]) -> tuple[int, ...]:
        """Positions of the results that are equal for all indices of `axis_names`.

        `mapped` says which operands have a different value for each index.
        """
        del mapped
        return ()

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        """Computes the results."""
        raise NotImplementedError

    def formula(self, *operands: Any) -> tuple[Any, ...]:
        """Computes the results with operations that JAX can differentiate."""
        return self.compute(*operands)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        """The results and their tangents. None stands for a zero tangent."""
        present = [t is not None for t in tangents]

        def of_tangents(*some: Array) -> tuple[Any, ...]:
            return self.formula(*_merged(present, some, operands))

        some = [t for t in tangents if t is not None]
        primals = [o for o, p in zip(operands, present, strict=True) if p]
        return self(*operands), jax.jvp(of_tangents, primals, some)[1]

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        """Cotangents of the operands that are `Unknown`, and None for the others."""
        unknown = [isinstance(o, Unknown) for o in operands]
        wanted = [ct is not None for ct in cotangents]

        def of_unknown(*some: Array) -> list[Any]:
            results = self.formula(*_merged(unknown, some, operands))
            return [r for r, w in zip(results, wanted, strict=True) if w]

        zeros = [ad.zeros_like_aval(o.aval) for o in operands if isinstance(o, Unknown)]
        _, pullback = jax.vjp(of_unknown, *zeros)
        found = pullback([ct for ct in cotangents if ct is not None])
        return _merged(unknown, found, [None] * len(operands))

    def vmapped(
        self, axis: Axis, operands: Operands, mapped: Sequence[bool]
    ) -> tuple[Operation, Operands]:
        """The operation and operands whose results have the mapped axis first."""
        operands, mapped = list(operands), list(mapped)
        must = {i for i in self.linear if operands[i] is not None}
        if not any(mapped):  # the axis is known by its name only
            must.add(next(i for i, o in enumerate(operands) if o is not None))
        like = next((o for o, m in zip(operands, mapped, strict=True) if m), None)
        for i in must:
            if not mapped[i]:
                operands[i] = for_each(operands[i], axis.size, like)
                mapped[i] = True
        return Vmapped(self, tuple(mapped), axis), operands

    def lower(self, lowering: Callable[[], Sequence[Any]], context: Any) -> Sequence[Any]:
        """Makes the MLIR values of the results. `lowering` makes them from `compute`."""
        del context
        return lowering()

    def _matched(self, operands: Operands) -> list[Array]:
        """The present operands. All but `unmatched` ones vary over the same mesh axes."""
        apart = [i in self.unmatched for i in range(len(operands))]
        pairs = [(o, u) for o, u in zip(operands, apart, strict=True) if o is not None]
        matched = match_vma(*(o for o, u in pairs if not u))
        return _merged([not u for _, u in pairs], matched, [o for o, _ in pairs])

    @without_error_checks()
    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """Computes the results with the primitive."""
        present = tuple(o is not None for o in operands)
        arrays = self._matched(operands)
        if self.types is not None:
            static = {"there": (True,) * len(self.types), "jaxpr": None}
        else:
            traced = _traced(self, present).trace(*arrays)
            static = {
                "there": tuple(r is not None for r in traced.out_info),
                "jaxpr": traced.jaxpr,
            }
        results = _operations[self.widens].bind(*arrays, op=self, present=present, **static)
        return tuple(_spread(static["there"], results))


def _merged(which: Sequence[bool], some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`others`, with the next element of `some` at each place where `which` is true."""
    found = iter(some)
    return [next(found) if w else other for w, other in zip(which, others, strict=True)]


def _spread(present: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """The arrays at the places where `present` is true, and None at the other places."""
    return _merged(present, arrays, [None] * len(present))


# JAX's caches compare functions by identity: a new function in each call is traced again.
@functools.lru_cache(maxsize=4096)
def _traced(op: Operation, present: tuple[bool, ...]) -> Any:
    return jax.jit(lambda *arrays: tuple(op.compute(*_spread(present, arrays))))


@dataclasses.dataclass(frozen=True)
class Vmapped(Operation):
    """An operation for each index of a mapped axis: the first axis of operands and results."""

    op: Operation
    mapped: tuple[bool, ...]
    axis: Axis

    @property
    def linear(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.op.linear

    @property
    def axis_names(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(name for name in self.op.axis_names if name != self.axis.name)

    @property
    def unmatched(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.op.unmatched

    @property
    def widens(self) -> bool:  # type: ignore[override]
        return self.op.widens

    def common(self, mapped: Sequence[bool]) -> tuple[int, ...]:
        return self.op.common(mapped)

    def is_common(self, position: int) -> bool:
        """Whether a result is equal for all indices and therefore has no mapped axis."""
        return self.axis.name in self.op.axis_names and position in self.op.common(self.mapped)

    def _split(self, results: Operands) -> tuple[list[Any], list[Any]]:
        """Results that have the mapped axis, and results that have none."""
        common = [self.is_common(i) for i in range(len(results))]
        pairs = list(zip(results, common, strict=True))
        return [None if c else r for r, c in pairs], [r if c else None for r, c in pairs]

    def _vmap(self, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Any:
        return jax.vmap(
            function,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_size=self.axis.size,
            axis_name=self.axis.name,
            spmd_axis_name=self.axis.spmd_name,
        )

    @property
    def _axes(self) -> tuple[int | None, ...]:
        return tuple(0 if m else None for m in self.mapped)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        def of_index(*some: Any) -> Any:
            return self._split(self.op.compute(*some))

        return _joined(*self._vmap(of_index, self._axes, (0, None))(*operands))

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        def of_index(operands: Operands, tangents: Operands) -> Any:
            results, derivatives = self.op.jvp(operands, tangents)
            return self._split(results), self._split(derivatives)

        out_axes = (0, None), (0, None)
        each = self._vmap(of_index, (self._axes, self._axes), out_axes)
        results, derivatives = each(tuple(operands), tuple(tangents))
        return _joined(*results), _joined(*derivatives)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        unknown = [isinstance(o, Unknown) for o in operands]
        known = tuple(None if u else o for o, u in zip(operands, unknown, strict=True))
        mapped, common = self._split(cotangents)
        # The transpose adds up the cotangents of all indices: each index gets an equal part.
        parts = [None if ct is None else ct / self.axis.size for ct in common]

        missing = [Unknown(_of_index(o.aval)) for o in operands if isinstance(o, Unknown)]

        def of_index(known: Operands, mapped: Operands, parts: Operands) -> tuple[Any, ...]:
            given = _joined(mapped, parts)
            return tuple(self.op.transpose(_merged(unknown, missing, known), given))

        return self._vmap(of_index, (self._axes, 0, None), 0)(known, mapped, parts)


def _of_index(mapped: Any) -> Any:
    """The type of one element along the first axis."""
    sharding = mapped.sharding
    spec = PartitionSpec(*sharding.spec[1:])
    return mapped.update(shape=mapped.shape[1:], sharding=sharding.update(spec=spec))


def _joined(some: Operands, others: Operands) -> tuple[Any, ...]:
    """Undoes `Vmapped._split`."""
    return tuple(o if s is None else s for s, o in zip(some, others, strict=True))


def unchanged(operands: Operands, result: Array, tangents: Operands, *static: Any) -> Array:
    """The derivative of a `Function` that only rounds its operand: the tangent, not rounded."""
    del operands, result, static
    return tangents[0]


@dataclasses.dataclass(frozen=True)
class Function(Operation):
    """A function with one result and its own derivative.

    Attributes:
      function: takes the operands and the static arguments. Returns an array.
      derivative: takes the operands, the result, the tangents (None for zero) and the static
        arguments. Returns the tangent of the result.
      static: static arguments.
    """

    function: Callable[..., Array]
    derivative: Callable[..., Array]
    static: tuple[Any, ...] = ()

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        return (self.function(*operands, *self.static),)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        results = self(*operands)
        return results, (self.derivative(operands, results[0], tangents, *self.static),)


# --- The primitive's rules ------------------------------------------------------------------------


def _types(*_: Any, op: Operation, jaxpr: Any, **static: Any) -> Sequence[Any]:
    del static
    return op.types or jaxpr.out_avals


@without_error_checks()
def _run(*arrays: Array, op: Operation, present: tuple[bool, ...], **static: Any) -> list[Array]:
    del static
    with jax.disable_jit(False):  # a kernel runs only inside a compiled program
        return jax.tree.leaves(_traced(op, present)(*arrays))


@without_error_checks()
def _jvp(
    arrays: Sequence[Array],
    tangents: Sequence[Any],
    *,
    op: Operation,
    present: tuple[bool, ...],
    **static: Any,
) -> tuple[list[Array], list[Any]]:
    del static
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    results, derivatives = op.jvp(_spread(present, arrays), _spread(present, given))
    pairs = [(r, d) for r, d in zip(results, derivatives, strict=True) if r is not None]
    zero = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r, _ in pairs]
    return [r for r, _ in pairs], [
        z if d is None else d for (_, d), z in zip(pairs, zero, strict=True)
    ]


@without_error_checks()
def _transpose(
    cotangents: Sequence[Any],
    *arrays: Any,
    op: Operation,
    present: tuple[bool, ...],
    there: tuple[bool, ...],
    **static: Any,
) -> list[Any]:
    del static
    given = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    if all(ct is None for ct in given):
        return [None] * len(arrays)
    found = op.transpose(_spread(present, arrays), _spread(there, given))
    return [f for f, p in zip(found, present, strict=True) if p]


@without_error_checks()
def _batch(
    axis_data: Any,
    arrays: Sequence[Array],
    axes: Sequence[int | None],
    *,
    op: Operation,
    present: tuple[bool, ...],
    **static: Any,
) -> tuple[list[Array], list[int | None]]:
    del static
    mapped = [axis is not None for axis in axes]
    if any(mapped) or axis_data.name in op.axis_names:
        moved = [
            a if i is None else jnp.moveaxis(a, i, 0) for a, i in zip(arrays, axes, strict=True)
        ]
        axis = Axis(axis_data.size, axis_data.name, axis_data.spmd_name)
        op, operands = op.vmapped(
            axis, _spread(present, moved), _merged(present, mapped, [False] * len(present))
        )
        results = [(i, r) for i, r in enumerate(op(*operands)) if r is not None]
        common = [isinstance(op, Vmapped) and op.is_common(i) for i, _ in results]
        return [r for _, r in results], [None if c else 0 for c in common]
    results = [r for r in op(*_spread(present, arrays)) if r is not None]
    return results, [None] * len(results)


@without_error_checks()
def _lower(
    context: Any,
    *values: Any,
    op: Operation,
    present: tuple[bool, ...],
    jaxpr: Any,
    **static: Any,
) -> Sequence[Any]:
    del static
    if op.widens:
        pairs = map(_before_widening, values, context.avals_in)
        values, avals = zip(*pairs, strict=True)
        if any(a is not b for a, b in zip(avals, context.avals_in, strict=True)):
            context, jaxpr = context.replace(avals_in=avals), None

    def compute(*arrays: Array) -> Sequence[Any]:
        return jaxpr_as_fun(jaxpr)(*arrays) if jaxpr else op.compute(*_spread(present, arrays))

    inline = mlir.lower_fun(compute, multiple_results=True)
    return op.lower(lambda: inline(context, *values), context)


def _before_widening(value: Any, aval: Any) -> tuple[Any, Any]:
    """A value and its type. For a float32 copy of a 16-bit array, returns the 16-bit array."""
    made_by = value.owner
    # On an Explicit mesh, JAX constrains the sharding of each value.
    explicit = axes_of(AxisType.Explicit, aval.sharding.mesh)
    if explicit and getattr(made_by, "name", "") == "sdy.sharding_constraint":
        made_by = made_by.operands[0].owner
    if aval.dtype == jnp.float32 and getattr(made_by, "name", "") == "stablehlo.convert":
        (narrow,) = made_by.operands
        for name, dtype in (("bf16", jnp.bfloat16), ("f16", jnp.float16)):
            if str(narrow.type.element_type) == name:
                return narrow, aval.update(dtype=jnp.dtype(dtype), weak_type=False)
    return value, aval


def _primitive(name: str, *, cacheable: bool) -> Primitive:
    """If not `cacheable`, an operation is lowered in place: it sees what made its operands."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(_run)
    made.def_abstract_eval(_types)
    ad.primitive_jvps[made] = _jvp
    ad.primitive_transposes[made] = _transpose
    batching.fancy_primitive_batchers[made] = _batch
    mlir.register_lowering(made, _lower, cacheable=cacheable)
    return made


# By `Operation.widens`.
_operations = {
    False: _primitive("jax_gradops", cacheable=True),
    True: _primitive("jax_gradops_widening", cacheable=False),
}
