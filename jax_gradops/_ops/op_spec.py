"""What a public op is, as data. Each family has an `OpSpec` per op in its `spec.py`.

`implementation_in_use`, `EXPORT_DISABLED_CHECKS`, `doctor`, the benchmark, the sanitizers' runs and
the tests derive from it what they do with the op.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from jax_gradops._kernel.spec import Kernel
from jax_gradops._kernel.trees import TreeKernel
from jax_gradops._oracles import Reference

Direction = Literal["fwd", "bwd"]
#: The options of ops wherever results are compared with results of other libraries.
EPSILON = 1e-6
MAX_NORM = 1.0


class Gpu(NamedTuple):
    """What a CUDA kernel's plan depends on."""

    architecture: int  # 90 is compute capability 9.0
    multiprocessors: int
    shared_bytes: int  # shared memory of a multiprocessor
    l2_bytes: int  # size of the L2 cache


class PlanTask(NamedTuple):
    """A call whose plan is asked for. All arrays start at 16-byte boundaries."""

    direction: Direction
    shape: tuple[int, ...]  # of x
    element_bytes: int
    gpu: Gpu


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to call an op.

    The operands are `arrays` arrays of x's shape, then `parameters` arrays of one number per
    column. An op of kind "leaves" takes any number of arrays of any shapes instead.

    Attributes:
      call: maps operands to one result or to a tuple of results.
      oracle: maps operands in float64 to a `Reference` for each result, in the same structure.
      kernels: the kernels that the call and its gradient run.
      oracle_vjp: maps the results' cotangents and the operands to a `Reference` for each operand.
        It may return more, for absent operands. None if the form is not differentiated by kernels.
      name: tells the op's forms apart. Empty for the plain form.
      options: keyword arguments of the call and of both oracles. The methods' options replace them.
      arrays: number of operands of x's shape.
      parameters: number of operands of one number per column.
      traffic: by direction, the least number of arrays of x's size to read or write. The benchmark
        times these directions.
      roundings: how often a value is rounded to x's dtype before the last rounding.
      in_place: what the gradient of x may take over the memory of: y's cotangent, x, or neither.
    """

    call: Callable[..., Any]
    oracle: Callable[..., Reference | tuple[Reference, ...]]
    kernels: tuple[Kernel | TreeKernel, ...]
    oracle_vjp: Callable[..., tuple[Reference, ...]] | None = None
    name: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: int = 1
    parameters: int = 0
    traffic: Mapping[Direction, int] = dataclasses.field(default_factory=dict)
    roundings: int = 0
    in_place: Literal["", "dy", "x"] = ""

    def value_and_vjp(self, cotangents: Any, *operands: Any, **options: Any) -> tuple[Any, Any]:
        """The results, and the gradients of all operands: none without an `oracle_vjp`."""
        call = functools.partial(self.call, **{**self.options, **options})
        if self.oracle_vjp is None:
            return call(*operands), ()
        results, pull = jax.vjp(call, *operands)
        return results, pull(cotangents)

    def expected(self, *operands: Any, **options: Any) -> list[Reference]:
        """The results in float64."""
        found = self.oracle(*operands, **{**self.options, **options})
        return [found] if isinstance(found, Reference) else list(found)

    def expected_gradients(
        self, cotangents: Any, *operands: Any, **options: Any
    ) -> list[Reference]:
        """The gradients of all operands in float64: none without an `oracle_vjp`."""
        if self.oracle_vjp is None:
            return []
        found = self.oracle_vjp(cotangents, *operands, **{**self.options, **options})
        return list(found[: len(operands)])


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """A public op.

    Attributes:
      name: the name of the public function.
      kind: "rows": the op works on each row of x, along the last axis. "channels": it works on each
        channel. "samples": it works on each sample, along axis 0. Calls and oracles of these two
        kinds have the option `axis`, the channel axis. "leaves": it takes a tree.
      forms: the ways to call it.
      by_xla: why the op runs XLA's operations by default, although there is a kernel.
      requires: a package that the op needs.
      plan: how the op's CUDA kernel splits its work, as `_plans` describes it. It may have "notes":
        sentences for the reader.
    """

    name: str
    kind: Literal["rows", "channels", "samples", "leaves"]
    forms: tuple[Form, ...]
    by_xla: str = ""
    requires: str = ""
    plan: Callable[[PlanTask], dict[str, Any]] | None = None

    @property
    def has_channels(self) -> bool:
        """Whether calls have the option `axis`."""
        return self.kind in ("channels", "samples")

    @property
    def kernels(self) -> tuple[Kernel | TreeKernel, ...]:
        """The kernels of all forms."""
        return tuple(dict.fromkeys(kernel for form in self.forms for kernel in form.kernels))
