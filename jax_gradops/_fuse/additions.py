"""Additions of two arrays and of biases: before an op, and after a matrix product."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.extend.core import JaxprEqn, Var

from jax_gradops._fuse import check, search
from jax_gradops._fuse.forms import NoForm
from jax_gradops._fuse.patterns.candidate import Before, Left
from jax_gradops._fuse.polynomial import Leaf
from jax_gradops._fuse.program import Program, Site, has_symbolic_shape, is_float
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import default_implementation
from jax_gradops._linear_bias import linear_bias


def of_arrays(values: Values, site: Site, before: Before, taken: set[int]) -> Site:
    """The norm with the addition of two arrays before it, if there is one.

    If one of the arrays has a bias of its own, its addition becomes a part of the op, too.
    """
    program = values.program
    added = _added(program, values.root)
    if added is None:
        return site
    i = program.producer[values.root]
    region = site.region | {i}
    for x, residual in (added, added[::-1]):
        biased = _biased(program, residual)
        if biased is None or residual in program.results or program.users[residual] != [i]:
            continue
        equations = search.slice_between(program, [residual], set(biased))
        of_bias = search.unshared(program, equations, (residual,))
        if not of_bias & (taken | region):
            added, region = (x, *biased), region | of_bias
            break
    operands = (*added, *site.operands[1:])
    outputs = (*site.outputs, values.root)
    at = program.operand_position(operands)
    outside = [u for v in outputs for u in program.users.get(v, ()) if u not in region]
    if i in taken or any(u < at for u in outside):
        return site
    return Site(before.op, before.call, operands, outputs, region, at)


def _added(program: Program, v: Var) -> tuple[Var, ...] | None:
    """The two arrays of v's type whose sum is v."""
    equation = program.equation_of(v)
    if equation is None or equation.primitive.name != "add":
        return None
    arrays = tuple(u for u in equation.invars if isinstance(u, Var))
    same = [u.aval.shape == v.aval.shape and u.aval.dtype == v.aval.dtype for u in arrays]
    producers = [program.equation_of(u) for u in arrays]
    repeated = any(p is not None and p.primitive.name == "broadcast_in_dim" for p in producers)
    return arrays if len(arrays) == 2 and all(same) and not repeated else None


def of_bias(values: Values, site: Site, before: Before, taken: set[int]) -> Site:
    """The GELU with the addition of a bias before it, if there is one."""
    program, root = values.program, values.root
    if _is_gate(program, site.outputs[0]):
        raise Left("its result is multiplied by another array, which XLA computes with the GELU")
    biased = None if root in program.results else _biased(program, root)
    if biased is None or any(u not in site.region for u in program.users[root]):
        return site
    equations = search.slice_between(program, site.outputs, set(biased))
    region = search.unshared(program, equations, site.outputs)
    if region & taken:
        return site
    return Site(before.op, before.call, biased, site.outputs, region, site.at)


def of_product(program: Program, i: int, taken: set[int]) -> Site | None:
    """The addition of a bias to a matrix product in 16 bits, if equation i is one."""
    (v, *_) = program.items[i].equation.outvars
    if has_symbolic_shape(program.items[i].equation):
        return None
    if not is_float(v.aval.dtype) or v.aval.dtype.itemsize > 2:
        return None
    unused = v not in program.users and v not in program.results
    if unused or default_implementation() == "xla":
        return None
    biased = _biased(program, v, several_axes=True)
    product = program.equation_of(biased[0]) if biased else None
    if biased is None or product is None or product.primitive.name != "dot_general":
        return None
    if not _is_vector(biased[1]) and not _are_columns(product, biased[1]):
        return None
    equations = search.slice_between(program, [v], set(biased))
    region = search.unshared(program, equations, (v,))
    if region & taken:
        return None
    added = [program.items[j].equation for j in sorted(equations)]
    shapes = biased[0].aval.shape, _long(biased[1])
    types = [
        (tuple(min(n, 8) for n in shape), u.aval.dtype)
        for shape, u in zip(shapes, biased, strict=True)
    ]
    lines = [(e.primitive.name, [str(u.aval.dtype) for u in e.outvars]) for e in added]
    key = "linear_bias", str(types), str(lines)
    site = Site("linear_bias", _of_product, biased, (v,), region, i, key)

    def reference(wide: bool, *arrays: jax.Array) -> jax.Array:
        env = dict(zip(biased, arrays, strict=True))
        check.run_broadcast(added, env, wide)
        return env[v]

    check.compare(site.op, reference, site.call, types, key)
    return site


def _of_product(y: jax.Array, bias: jax.Array) -> jax.Array:
    bias = bias.reshape([n for n in bias.shape if n != 1] or [1])
    return linear_bias(y, bias.astype(y.dtype), bias)


def _biased(program: Program, v: Var, several_axes: bool = False) -> tuple[Var, Var] | None:
    """The array of v's type, and the vector along its last axis, whose sum is v.

    With `several_axes`, the second one may have several of the last axes.
    """
    equation = program.equation_of(v)
    if equation is None or equation.primitive.name != "add":
        return None
    for x, bias in (equation.invars, equation.invars[::-1]):
        if not isinstance(x, Var) or not isinstance(bias, Var):
            continue
        if x.aval.shape != v.aval.shape or x.aval.dtype != v.aval.dtype:
            continue
        repeated = _repeated(program, bias)
        if repeated is None or repeated is x or not is_float(repeated.aval.dtype):
            continue
        if several_axes or _is_vector(repeated):
            return x, repeated
    return None


def _is_vector(v: Var) -> bool:
    return v.aval.shape[-1] == math.prod(v.aval.shape)


def _long(v: Var) -> tuple[int, ...]:
    """The shape without axes of size 1, but for the last one."""
    return tuple(n for n in v.aval.shape if n != 1) or (1,)


def _are_columns(product: JaxprEqn, bias: Var) -> bool:
    """Whether a bias has the sizes of all axes of a product's second matrix that are not summed."""
    (_, summed), _ = product.params["dimension_numbers"]
    columns = [n for i, n in enumerate(product.invars[1].aval.shape) if i not in summed]
    return _long(bias) == (tuple(n for n in columns if n != 1) or (1,))


def _repeated(program: Program, v: Var) -> Var | None:
    """The array of the last axes that `v` repeats over its other axes."""
    try:
        form = Values(program, v, [], {}, {}, {}).form_of(v)
    except NoForm:
        return None
    single = form.polynomial.single
    if single is None or single[1] != 1 or len(single[0]) != 1:
        return None
    ((atom, exponent),) = single[0]
    if exponent != 1 or not isinstance(atom, Leaf):
        return None
    long = [n for n in atom.var.aval.shape if n != 1]
    last = form.dims[len(form.dims) - len(long) :]
    labels = [p.label for axis in form.dims[: len(form.dims) - len(long)] for p in axis]
    own = [axis for axis in atom.labels if axis]
    same = [tuple(p.label for p in axis) for axis in last] == own
    return atom.var if long and same and all(n is None for n in labels) else None


def _is_gate(program: Program, v: Var, depth: int = 3) -> bool:
    """Whether a value is multiplied by another array of its size."""
    for i in program.users.get(v, ()):
        equation = program.items[i].equation
        name = equation.primitive.name
        others = [u for u in equation.invars if isinstance(u, Var) and u is not v]
        if name == "mul" and any(u.aval.shape == v.aval.shape for u in others):
            return True
        passed = name in ("convert_element_type", "reshape", "copy", "copy_p", "name") and depth > 0
        if passed and _is_gate(program, equation.outvars[0], depth - 1):
            return True
    return False


ADDITIONS: dict[str, Callable[[Values, Site, Before, set[int]], Site]] = {
    "arrays": of_arrays,
    "bias": of_bias,
}
