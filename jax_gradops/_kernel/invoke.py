"""Runs a kernel: platform choice, fallback, vmap, sharding, second derivatives.

All of this follows from the kernel's declaration (`spec.py`). The layers, from the outside in::

    invoke                 Makes a call (`rows.py`). With named axes: one call, or two (`Stages`).
      Invocation           A primitive (`primitive.py`): the reference gives its derivatives.
                           A mapped axis becomes a leading group axis, or a further row axis.
        platform_dependent   The reference on a platform without the kernel.
          jit                  Its name differs if any static value differs.
            sharding             By the mesh's axes: custom_partitioning, or a plain call.
              partitioning         On each device: one call, or two (`Stages`).
                ffi_call

`trees.py` has its own `invoke`, and calls of its own (`call.py`) for the same layers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_gradops import _registry
from jax_gradops._implementation import Implementation
from jax_gradops._kernel import sharding
from jax_gradops._kernel.array_types import Arrays, MeshAxes, accum_dtype, match_vma, mesh_of
from jax_gradops._kernel.call import Call
from jax_gradops._kernel.primitive import Axis, Operands, Operation
from jax_gradops._kernel.rows import RowCall, in_stages
from jax_gradops._kernel.shards import MAPPED
from jax_gradops._kernel.spec import Kernel


def invoke(
    kernel: Kernel,
    *operands: jax.Array | None,
    implementation: Implementation = None,
    skip: Sequence[str] = (),
    dtypes: Mapping[str, Any] | None = None,
    axis_names: Mapping[str, MeshAxes] | None = None,
    **static: Any,
) -> Any:
    """Runs the kernel, or its reference.

    Args:
      kernel: what to run.
      *operands: in the order of `kernel.operands`. None is an absent operand.
      implementation: as in the public functions, resolved.
      skip: names of unwanted results. None is returned in their place.
      dtypes: by result name, the dtype of a sum. The default is the accumulation dtype. A sum is
        rounded once, after the sum over shards.
      axis_names: by letter, names of the mapped axes (`jax.shard_map`, `jax.pmap`, `jax.vmap`) over
        which the letter's axes are sharded. `Kernel.stages` combine over them. A result that is a
        sum stays the sum of one shard. It is the gradient of a parameter, and the caller's
        transformation adds the shards' gradients up.
      **static: attributes, and the numbers of axes in `kernel.ranks`. Each attribute has one fixed
        type: `numpy.float64`, `numpy.int64` or `bool`. Handlers check types strictly, and JAX's
        cache of lowerings compares by equality.
    """
    names = {name: jnp.dtype(dtype).name for name, dtype in (dtypes or {}).items()}
    present, arrays = _present(kernel, operands)
    call = RowCall(kernel, present, tuple(static.items()), frozenset(skip), tuple(names.items()))
    compute = functools.partial(run, implementation=implementation)
    if axis_names:
        results = in_stages(call, compute, MAPPED, axis_names, *arrays, own_sums=True)
    else:
        results = compute(call, *arrays)
    wanted = dict(zip(call.wanted, results, strict=True))
    return tuple(map(wanted.get, kernel.results))


def prepare(kernel: Kernel, *operands: jax.Array | None, **ranks: int) -> Any:
    """Gives operands types that fit together. An op calls this before `invoke`.

    Inside `shard_map`, a replicated parameter becomes varying over the axes over which x varies.
    It is cast to the accumulation dtype. On an Explicit mesh, parameters are sharded as the axes
    of x, and the axes in `Kernel.whole` are gathered. JAX transposes these casts: the transposes
    give the parameters' gradients their `psum` and their sharding. Elsewhere nothing changes.
    """
    wide = accum_dtype(*(a.dtype for a in operands[:1] if a is not None))
    sums = [wide if "n" not in dims else None for dims in kernel.operands.values()]
    operands = match_vma(*operands, sums=sums)
    present, arrays = _present(kernel, operands)
    call = RowCall(kernel, present, tuple(ranks.items()))
    named = dict(zip(present, sharding.reshard_operands(call, arrays)[0], strict=True))
    return tuple(map(named.get, kernel.operands))


def _present(
    kernel: Kernel, operands: Sequence[jax.Array | None]
) -> tuple[tuple[str, ...], list[jax.Array]]:
    """The operands that are present, and their names."""
    pairs = zip(kernel.operands, operands, strict=True)
    named = {name: a for name, a in pairs if a is not None}
    return tuple(named), list(named.values())


def run(call: Call, *arrays: jax.Array, implementation: Implementation = None) -> Arrays:
    """Runs a call, or its reference."""
    if implementation == "xla":
        return formula(call, *arrays)
    return Invocation(call, insist=implementation == "ffi")(*arrays)


def formula(call: Call, *arrays: jax.Array) -> Arrays:
    """Computes the results with the reference, for any number of group axes."""
    function = call.reference
    if call.groups:  # on an Explicit mesh, vmap needs equally sharded group axes
        arrays = tuple(sharding.reshard_operands(call, arrays)[0])
    axes = tuple(None if shared else 0 for shared in call.shared(arrays))
    for _ in range(call.groups):
        function = jax.vmap(function, in_axes=axes)
    if isinstance(call, RowCall) and (call.kernel.program is not None or call.kernel.scatters):
        function = sharding.with_auto_axes(call, function)
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
        name = f"jax_gradops_{self.call.name}_{digest}"

        def kernel(*arrays: jax.Array) -> Arrays:
            return sharding.sharded(self.call, _native, name)(*arrays)

        kernel.__name__ = name
        return jax.jit(kernel)

    def vmapped(
        self, axis: Axis, operands: Operands, mapped: Sequence[bool]
    ) -> tuple[Operation, Operands]:
        call, lifted = self.call.vmapped(axis.size, operands, mapped)
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
            f"jax_gradops: implementation='ffi' is not available: {self.call.name} has no "
            f"kernel for platform {platforms}. Use implementation=None, which takes XLA's "
            "operations where there is no kernel"
        )


def _native(call: Call, *arrays: jax.Array) -> Arrays:
    """Runs a call on one device's arrays."""
    if isinstance(call, RowCall) and call.kernel.program is not None:
        return call.by_program(_native, *arrays)
    return _ffi_call(call, *arrays)


def _ffi_call(call: Call, *arrays: jax.Array) -> Arrays:
    """Calls the native handler on one device's arrays."""
    handler = call.handler_call(arrays)
    target = _registry.TARGET_PREFIX + call.name
    native = jax.ffi.ffi_call(target, handler.types, input_output_aliases=handler.aliases)
    attributes = {"group_rank": np.int64(call.groups), **handler.attributes}
    results = native(*handler.operands, **attributes)
    return tuple(results[i].reshape(shape) for i, shape in handler.wanted)
