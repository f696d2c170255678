"""Runs a kernel: platform choice, fallback, vmap, sharding, second derivatives.

All of this follows from the kernel's declaration (`spec.py`). The layers, from the outside in::

    invoke
      Invocation           A primitive (`primitive.py`): the reference gives its derivatives.
                           A mapped axis becomes a leading group axis, or a further row axis.
        platform_dependent   The reference on a platform without the kernel.
          jit                  Its name differs if any static value differs.
            sharding             By the mesh's axes: custom_partitioning, or a plain call.
              ffi_call
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_gradops import _registry
from jax_gradops._implementation import Implementation
from jax_gradops._kernel import sharding
from jax_gradops._kernel.array_types import (
    Arrays,
    accum_dtype,
    for_each,
    match_vma,
    mesh_of,
    result_type,
)
from jax_gradops._kernel.primitive import Axis, Operands, Operation
from jax_gradops._kernel.spec import Call, Kernel, Result


def invoke(
    kernel: Kernel,
    *operands: jax.Array | None,
    implementation: Implementation = None,
    skip: Sequence[str] = (),
    dtypes: Mapping[str, Any] | None = None,
    inner: int = 0,
    **attributes: Any,
) -> Any:
    """Runs the kernel, or its reference.

    Args:
      kernel: what to run.
      *operands: in the order of `kernel.operands`. None is an absent operand.
      implementation: as in the public functions, resolved.
      skip: names of unwanted results. None is returned in their place.
      dtypes: by result name, the dtype of a sum over rows. The default is the accumulation dtype.
        A sum is rounded once, after the sum over shards.
      inner: how many axes ``m`` stands for.
      **attributes: static values. Each has one fixed type: `numpy.float64`, `numpy.int64` or
        `bool`. Handlers check types strictly, and JAX's cache of lowerings compares by equality.
    """
    present = tuple(a is not None for a in operands)
    names = {name: jnp.dtype(dtype).name for name, dtype in (dtypes or {}).items()}
    call = Call(
        kernel,
        present,
        tuple(attributes.items()),
        frozenset(skip),
        tuple(names.items()),
        inner,
    )
    arrays = [a for a in operands if a is not None]
    if implementation == "xla":
        results = formula(call, *arrays)
    else:
        results = Invocation(call, insist=implementation == "ffi")(*arrays)
    if call.elementwise:
        return tuple(results)
    wanted = iter(results)
    return tuple(None if name in call.skip else next(wanted) for name in kernel.results)


def prepare(kernel: Kernel, *operands: jax.Array | None, inner: int = 0) -> Any:
    """Gives operands types that fit together. An op calls this before `invoke`.

    Inside `shard_map`, a replicated parameter becomes varying over the axes over which x varies.
    It is cast to the accumulation dtype. On an Explicit mesh, parameters are sharded as the axes
    of x, and the axes in `Kernel.whole` are gathered. JAX transposes these casts: the transposes
    give the parameters' gradients their `psum` and their sharding. Elsewhere nothing changes.
    """
    if kernel.variadic:
        return match_vma(*operands)
    wide = accum_dtype(*(a.dtype for a in operands[:1] if a is not None))
    sums = [wide if "n" not in dims else None for dims in kernel.operands.values()]
    operands = match_vma(*operands, sums=sums)
    call = Call(kernel, tuple(a is not None for a in operands), inner=inner)
    present = [a for a in operands if a is not None]
    arrays = iter(sharding.reshard_operands(call, present)[0])
    return tuple(None if a is None else next(arrays) for a in operands)


def formula(call: Call, *arrays: jax.Array) -> Arrays:
    """Computes the results with the reference, for any number of group axes."""
    function = call.reference
    if call.groups:  # on an Explicit mesh, vmap needs equally sharded group axes
        arrays = tuple(sharding.reshard_operands(call, arrays)[0])
    pairs = zip(arrays, call.in_dims, strict=True)
    axes = tuple(None if call.is_shared(a, dims) else 0 for a, dims in pairs)
    for _ in range(call.groups):
        function = jax.vmap(function, in_axes=axes)
    return function(*arrays)


@dataclasses.dataclass(frozen=True)
class Invocation(Operation):
    """Calls the kernel, or the reference on a platform without the kernel.

    Attributes:
      insist: whether a platform without the kernel is an error.
    """

    call: Call
    insist: bool = False

    def formula(self, *arrays: jax.Array) -> Arrays:
        return formula(self.call, *arrays)

    def compute(self, *arrays: jax.Array) -> Arrays:
        """Runs the kernel, or the reference on a platform without the kernel."""
        kernels = {p: self._on(p, mesh_of(arrays)) for p in _registry.platforms()}
        if not kernels:
            return self.formula(*arrays)
        types = next(iter(kernels.values())).trace(*arrays).jaxpr.out_avals
        elsewhere = Elsewhere(self.call, self.insist, tuple(types))
        return lax.platform_dependent(*arrays, **kernels, default=elsewhere)

    def _on(self, platform: str, mesh: Any) -> Any:
        """The kernel of a platform, as a function with a unique name.

        A Python function tells XLA how to shard a call. The program's text does not show that
        function: the persistent compilation cache would mix up programs that differ in an
        attribute. So the name has a digest of all static values and of the code.
        """
        shape = (mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        text = f"{self.call.text} {shape} {_registry.identity(platform)}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        name = f"jax_gradops_{self.call.kernel.name}_{digest}"

        def kernel(*arrays: jax.Array) -> Arrays:
            return sharding.sharded(self.call, _ffi_call, name)(*arrays)

        kernel.__name__ = name
        return jax.jit(kernel)

    def vmapped(
        self, axis: Axis, operands: Operands, mapped: Sequence[bool]
    ) -> tuple[Operation, Operands]:
        call = self.call
        given = list(zip(operands, mapped, call.in_dims, strict=True))
        more_rows = (
            call.groups == 0
            and not call.kernel.variadic
            and all("n" in r.dims for r in call.wanted)
            and not any(m for _, m, dims in given if "n" not in dims)
        )
        x, x_mapped, _ = given[0]
        lead = (axis.size, *x.shape[x_mapped : x_mapped + call.groups])
        like = next(a for a, m, _ in given if m)
        lifted = [_lifted(a, m, dims, lead, call.kernel.variadic, like) for a, m, dims in given]
        groups = call.groups if more_rows else call.groups + 1
        call = dataclasses.replace(call, groups=groups)
        return dataclasses.replace(self, call=call), lifted


@dataclasses.dataclass(frozen=True)
class Elsewhere(Operation):
    """A call on a platform without the kernel: runs the reference, or raises if `insist` is set."""

    call: Call
    insist: bool
    types: tuple[Any, ...] | None

    def compute(self, *arrays: jax.Array) -> Arrays:
        return formula(self.call, *arrays)

    def lower(self, lowering: Callable[[], Sequence[Any]], context: Any) -> Sequence[Any]:
        if not self.insist:
            return lowering()
        platforms = ", ".join(context.platforms or context.module_context.platforms)
        raise ValueError(
            f"jax_gradops: implementation='ffi' is not available: {self.call.kernel.name} has no "
            f"kernel for platform {platforms}. Use implementation=None, which takes XLA's "
            "operations where there is no kernel"
        )


# --- vmap ---------------------------------------------------------------------------------------


def _lifted(
    a: jax.Array, batched: bool, dims: str, lead: tuple[int, ...], variadic: bool, like: jax.Array
) -> jax.Array:
    """Gives an operand the mapped axis. `lead` has all leading sizes, the mapped axis first.

    `like` is an operand that has the mapped axis already.
    """
    shared = not variadic and "n" not in dims and a.ndim == batched + len(dims)
    if not batched:
        return a if shared else for_each(a, lead[0], like)
    if not shared:
        return a
    # All groups shared the operand so far. Now the groups of one mapped index share it.
    features = a.shape[1:]
    return jnp.broadcast_to(a.reshape(lead[0], *[1] * len(lead[1:]), *features), lead + features)


# --- The call -----------------------------------------------------------------------------------


def _ffi_call(call: Call, *arrays: jax.Array) -> Arrays:
    """Calls the native handler on one device's arrays."""
    kernel, groups = call.kernel, call.groups
    x = arrays[0]
    lead, axes = x.shape[:groups], call.axes(x.shape[groups:])
    accum = accum_dtype(*(a.dtype for a in (arrays if kernel.variadic else (x,))))
    dtypes = {name: x.dtype if r.dtype == "x" else accum for name, r in kernel.results.items()}
    dtypes |= dict(call.dtypes)

    def type_of(name: str, result: Result) -> Any:
        if name in call.skip:
            return result_type(x, (0,), accum)
        shape = (*lead, *(size for letter in result.dims for size in axes[letter]))
        return result_type(x, shape, dtypes[name])

    if call.elementwise:
        types = [result_type(a, a.shape, a.dtype) for a in arrays[: call.arrays]]
    else:
        types = [type_of(name, result) for name, result in kernel.results.items()]
    if kernel.workspace is not None:
        sums = sum("n" not in r.dims for r in call.wanted)
        rows = math.prod((*axes["n"], *axes["m"]))
        shape = kernel.workspace(math.prod(lead), rows, math.prod(axes["d"]), sums)
        # Not floats: jax_debug_nans would look for NaN in memory that was never written.
        scratch = jnp.uint64 if accum == jnp.float64 else jnp.uint32
        types.append(result_type(x, shape, scratch))

    # Handlers have a fixed signature: an absent operand is an array without elements.
    operands: Sequence[jax.Array] = arrays
    if not all(call.present):
        # Made from x: `jax.ensure_compile_time_eval` would turn `jnp.zeros` into a constant.
        nothing = lax.slice_in_dim(x, 0, 0).reshape(0).astype(accum)
        given = iter(arrays)
        operands = [next(given) if p else nothing for p in call.present]
    target = _registry.TARGET_PREFIX + kernel.name
    attributes = {"group_rank": np.int64(groups), **dict(call.attributes)}
    if any("m" in dims for dims in kernel.operands.values()):
        attributes["inner_rank"] = np.int64(call.inner)
    inputs, outputs = list(kernel.operands), list(kernel.results)
    aliases = {inputs.index(i): outputs.index(o) for o, i in kernel.in_place.items()}
    if call.elementwise and aliases:
        aliases = {i: i for i in range(call.arrays)}
    results = jax.ffi.ffi_call(target, types, input_output_aliases=aliases)(*operands, **attributes)
    named = zip(call.named, results, strict=False)  # drops the workspace: it has no name
    return tuple(r for (name, _), r in named if name not in call.skip)
