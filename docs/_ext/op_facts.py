"""What each op supports, found out by tracing the calls that its `OpSpec` lists."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops._ops.all import SPECS
from jax_gradops._ops.op_spec import Form, OpSpec

PLATFORMS = ("CPU", "CUDA")
_DTYPES = (
    *("float8_e4m3fn", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "int32"),
)
_KERNEL, _XLA = "kernel", "XLA"
_DERIVATIVE_BY_XLA = "kernel, derivative by XLA"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an op supports.

    Attributes:
      dtypes: dtypes of x, or of the leaves.
      by_xla: as in `OpSpec`.
      transformations: what runs, by transformation.
    """

    dtypes: tuple[str, ...]
    by_xla: str
    transformations: dict[str, str]


def _operands(spec: OpSpec, form: Form, dtype: str) -> list[Any]:
    x = jnp.ones((4, 8), dtype)
    if spec.kind == "leaves":
        return [x, x]
    return [x] * form.arrays + [jnp.ones(8)] * form.parameters


def _accepts(spec: OpSpec, form: Form, dtype: str) -> bool:
    try:
        jax.eval_shape(functools.partial(form.call, **form.options), *_operands(spec, form, dtype))
    except TypeError:
        return False
    return True


def _sum(call: Callable[..., Any]) -> Callable[..., Any]:
    def total(*operands: Any) -> Any:
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(call(*operands)))

    return total


def _grad(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: jax.grad(_sum(call), tuple(range(len(operands))))(*operands)


def _lowered(function: Callable[..., Any], *operands: Any) -> str:
    return jax.jit(function).lower(*operands).as_text()


def _batched(operands: Any) -> Any:
    return [jnp.stack([operand, operand]) for operand in operands]


def _jit(call: Any, *operands: Any) -> str:
    return _lowered(call, *operands)


def _reverse(call: Any, *operands: Any) -> str:
    return _lowered(_grad(call), *operands)


def _second(call: Any, *operands: Any) -> str:
    return _lowered(_grad(_grad(call)), *operands)


def _forward(call: Any, *operands: Any) -> str:
    return _lowered(lambda *o: jax.jvp(call, o, o), *operands)


def _vmap(call: Any, *operands: Any) -> str:
    return _lowered(jax.vmap(call), *_batched(operands))


def _scan(call: Any, *operands: Any) -> str:
    return _lowered(lambda *o: jax.lax.map(lambda row: call(*row), tuple(o)), *_batched(operands))


def _remat(call: Any, *operands: Any) -> str:
    return _lowered(_grad(jax.checkpoint(call)), *operands)


def _export(call: Any, *operands: Any) -> str:
    disabled = jax_gradops.EXPORT_DISABLED_CHECKS
    return jax.export.export(jax.jit(call), disabled_checks=disabled)(*operands).mlir_module()


def _mesh(auto: bool) -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Auto if auto else jax.sharding.AxisType.Explicit
    return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def _sharded(call: Any, *operands: Any, auto: bool) -> str:
    """With the rows on two devices. Raises an exception if the program gathers arrays."""
    mesh = _mesh(auto)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(o, NamedSharding(mesh, P("data") if o.ndim > 1 else P()))
            for o in operands
        ]
        text = jax.jit(_grad(call)).lower(*placed).compile().as_text()
    assert "all-gather" not in text
    return text


def _shard_map(call: Any, *operands: Any) -> str:
    specs = tuple(P("data") if o.ndim > 1 else P() for o in operands)
    mapped = jax.shard_map(
        lambda *o: jax.lax.psum(_sum(call)(*o), "data"),
        mesh=_mesh(auto=True),
        in_specs=specs,
        out_specs=P(),
    )
    return _lowered(mapped, *operands)


# The name in the table, the function, and whether it differentiates.
_PROBES: dict[str, tuple[Callable[..., str], bool]] = {
    "`jax.jit`": (_jit, False),
    "`jax.grad`": (_reverse, True),
    "`jax.grad` of `jax.grad`": (_second, True),
    "`jax.jvp`": (_forward, True),
    "`jax.vmap`": (_vmap, False),
    "`jax.lax.scan`": (_scan, False),
    "`jax.checkpoint`, then `jax.grad`": (_remat, True),
    "`jax.shard_map`": (_shard_map, False),
    "rows sharded, Auto mesh, `jax.grad`": (functools.partial(_sharded, auto=True), True),
    "rows sharded, Explicit mesh, `jax.grad`": (functools.partial(_sharded, auto=False), True),
    "`jax.export`, one device": (_export, False),
}
TRANSFORMATIONS = tuple(_PROBES)


def _runs(text: str) -> set[str]:
    return set(re.findall(r"jax_gradops\.(\w+)", text))


def _transformations(spec: OpSpec) -> dict[str, str]:
    form = spec.forms[0]
    call = functools.partial(form.call, **form.options)
    operands = _operands(spec, form, "float32")
    plain = _runs(_jit(call, *operands))
    found = {}
    for name, (probe, differentiates) in _PROBES.items():
        runs = _runs(probe(call, *operands))
        if not runs:
            found[name] = _XLA
        elif differentiates and not runs - plain:
            found[name] = _DERIVATIVE_BY_XLA
        else:
            found[name] = _KERNEL
    return found


@functools.cache
def of(name: str) -> Facts:
    """The facts of an op."""
    if jax_gradops.implementation_in_use("layer_norm", "cpu").implementation != "ffi":
        raise RuntimeError("the tables need the CPU's kernels: install the library first")
    spec = SPECS[name]
    with jax.enable_x64(True):
        dtypes = tuple(d for d in _DTYPES if _accepts(spec, spec.forms[0], d))
    return Facts(dtypes, spec.by_xla, _transformations(spec))
