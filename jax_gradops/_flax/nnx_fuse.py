"""What `jax_gradops.nnx.fuse` does to a model."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.nnx import bridge
from jax.core import Tracer

from jax_gradops._flax import common, nnx_calls
from jax_gradops._flax.nnx_calls import FLAX

# Saved at import: see nnx_calls.py.
_LINEN = (
    linen.LayerNorm,
    linen.RMSNorm,
    linen.BatchNorm,
    linen.GroupNorm,
    linen.InstanceNorm,
    linen.Embed,
)
_TO_NNX: Any = bridge.ToNNX
_UNKNOWN = "fuse does not know the class"
_Path = tuple[Any, ...]  # names of attributes, and indices


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """What `fuse` did to a model.

    Attributes:
      changed: by path in the model, such as ``"blocks[0].norm"``, the old and the new class of a
        module. For a function in an `nnx.Sequential`, what computes it. A shared module is named
        once.
      left: by path, why a norm, an embedding, or a GELU in an `nnx.Sequential`, is unchanged. If
        `fuse` was asked to change them, linear layers and subclasses of `Sequential` are listed
        too. A norm of a class that `fuse` does not know is a module whose class has "norm" in its
        name, or whose `scale`, `weight` or `gamma` has one axis and stands beside an epsilon.
      already: by path, the class of a module that was of this library before. For a function, as in
        `changed`.
    """

    changed: dict[str, str]
    left: dict[str, str]
    already: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        before = f", already fused {len(self.already)}" if self.already else ""
        lines = [f"fused {len(self.changed)}, left {len(self.left)}{before}"]
        lines += [f"  {path}: {what}" for path, what in self.changed.items()]
        lines += [f"  {path}: left, {why}" for path, why in self.left.items()]
        if any(why.startswith(_UNKNOWN) for why in self.left.values()):
            lines.append(
                "  For classes that fuse does not know, use jax_gradops.fuse(function), or call "
                "jax_gradops.rms_norm or layer_norm in them"
            )
        elif not (self.changed or self.left or self.already):
            lines.append(
                "  The model has no modules that fuse changes. For norms in the code of functions, "
                "use jax_gradops.fuse(function)"
            )
        return "\n".join(lines)


def change(
    model: Any, ours: Mapping[type, type], gelu: bool, linear: bool, residuals: str | None
) -> FuseReport:
    """Replaces Flax's classes of a model's modules by their counterparts in `ours`, in place."""
    sequential = ours[FLAX.Sequential]
    wanted = {FLAX.Sequential: gelu, FLAX.Linear: linear}
    ours = {flax: own for flax, own in ours.items() if wanted.get(flax, True)}
    norms = ours[FLAX.LayerNorm], ours[FLAX.RMSNorm]
    changed: dict[_Path, str] = {}
    left: dict[_Path, str] = {}
    already: dict[_Path, str] = {}
    modules = list(modules_of("fuse", model))
    before = {p: nnx_calls.pairs(m, m.gelu) for p, m in modules if type(m) is sequential}
    for path, module in modules:
        kind = type(module)
        why = _why_left(module, ours)
        if why:
            left[path] = why
        elif kind is sequential:
            pass  # its pairs are listed below
        elif _is_ours(module):
            already[path] = kind.__name__
        elif kind is FLAX.Linear and module.bias is None:
            pass  # jax_gradops.nnx.Linear differs in the gradient of the bias only
        elif kind in ours and kind is not FLAX.Sequential:
            object.__setattr__(module, "__class__", ours[kind])
            changed[path] = f"{kind.__name__} -> jax_gradops.nnx.{ours[kind].__name__}"
        if type(module) in norms and residuals not in (None, module.residuals):
            name = changed.get(path, f"jax_gradops.nnx.{type(module).__name__}")
            if residuals == "output" and _has_zeros(module.scale):
                why = f"residuals={residuals!r} is not set: its scale has zeros"
                if path in changed:
                    changed[path] = f"{name}, {why}"
                else:
                    left[path] = why
            else:
                module.residuals = residuals
                changed[path] = f"{name}, residuals={residuals!r}"
    for path, module in modules:  # after the norms: a pair has a norm of this library
        if type(module) not in (FLAX.Sequential, sequential):
            continue
        possible, now = nnx_calls.pairs(module, True), _fused_pairs(module, sequential, gelu)
        for i, layer in enumerate(module.layers):
            of_layer = (*path, "layers", i)
            if i in now:
                known = i in before.get(path, {})
                (already if known else changed)[of_layer] = _described(now[i], i)
            elif getattr(layer, "func", layer) is common.JAX_GELU:
                why = ": gelu=True is not given" if i in possible else " that follows no Linear"
                left[of_layer] = f"a GELU{why}"
    already = {path: what for path, what in already.items() if path not in changed | left}
    return FuseReport(*map(_by_name, (changed, left, already)))


def _fused_pairs(module: Any, sequential: type, gelu: bool) -> dict[int, functools.partial[Any]]:
    """Makes a Sequential compute pairs of layers as one. Returns all pairs that it has."""
    if type(module) is sequential:
        if gelu and not module.gelu:
            del module.gelu
        return nnx_calls.pairs(module, module.gelu)
    found = nnx_calls.pairs(module, gelu)
    if found:
        object.__setattr__(module, "__class__", sequential)
        if not gelu and len(nnx_calls.pairs(module, True)) > len(found):
            module.gelu = False
    return found


def _described(pair: functools.partial[Any], index: int) -> str:
    """What the second layer of a pair became. `index` is the layer's in its Sequential."""
    first = f"layers[{index - 1}]"
    if pair.func is not nnx_calls.linear_gelu:
        return f"{pair.args[0]} -> computed by {first}"
    _, linear = pair.args
    return "gelu -> jax_gradops." + (
        "gelu" if linear.bias is None else f"bias_gelu, with the bias of {first}"
    )


def _by_name(entries: dict[_Path, str]) -> dict[str, str]:
    """The entries in the order of their paths, each path as Python code after ``model.``."""
    result = {}
    for path in sorted(entries, key=lambda path: [(isinstance(k, str), k) for k in path]):
        name = "".join(f".{k}" if isinstance(k, str) else f"[{k}]" for k in path)
        result[name.removeprefix(".") or "the model"] = entries[path]
    return result


def modules_of(function: str, model: Any) -> Iterator[tuple[_Path, Any]]:
    """The path and the module for each module of a model, each once."""
    if not isinstance(model, nnx.Module):
        got = type(model).__name__
        if isinstance(model, linen.Module):
            got += (
                ", which is a flax.linen.Module. Linen modules cannot be changed in place: write "
                "the classes of jax_gradops.linen in their code, or use jax_gradops.fuse(function) "
                "for a function that calls them"
            )
        raise TypeError(f"{function}: model must be a flax.nnx.Module, got {got}")
    found = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    yield from found


def _why_left(module: Any, ours: Mapping[type, type]) -> str:
    """Why `fuse` leaves a module of a requested kind unchanged; "" if there is no reason."""
    kind = type(module)
    if kind in (FLAX.Sequential, FLAX.Linear) or _is_ours(module):
        return ""
    if kind in ours:
        return common.why_uncovered(module)
    for flax, own in ours.items():
        if isinstance(module, flax) and not isinstance(module, own):
            return f"{kind.__name__} is a subclass of {flax.__name__}, maybe with code of its own"
    if isinstance(module, _TO_NNX) and isinstance(module.to_nnx__module, _LINEN):
        return "a linen module: jax_gradops.linen has its like"
    if FLAX.Linear in ours and isinstance(module, FLAX.LinearGeneral):
        return f"no class for {kind.__name__}"
    if isinstance(module, (FLAX.WeightNorm, FLAX.SpectralNorm)):
        return f"no kernel for {kind.__name__}"
    return f"{_UNKNOWN} {_class_name(module)}" if _is_norm_of_unknown_class(module) else ""


def _is_ours(module: Any) -> bool:
    return any(kind.__module__ == "jax_gradops.nnx" for kind in type(module).__mro__)


def _class_name(module: Any) -> str:
    return type(module.to_nnx__module if isinstance(module, _TO_NNX) else module).__name__


def _has_name_of_norm(module: Any) -> bool:
    """Whether the class's name has "norm" in it, but not as a part of "normal"."""
    name = _class_name(module)
    return re.search("norm(?!al)|normali[sz]", name, re.IGNORECASE) is not None


def _is_norm_of_unknown_class(module: Any) -> bool:
    """Decides by the class's name, or by a parameter of one axis beside an epsilon.

    A module that contains norms, such as a block "PreNorm", leaves the computation to them.
    """
    if _has_name_of_norm(module):
        inner = (m for _, m in nnx.iter_graph(module) if isinstance(m, nnx.Module))
        return not any(m is not module and _has_name_of_norm(m) for m in inner)
    words = {word for name in vars(module) for word in name.split("_")}
    values = (getattr(module, name, None) for name in ("scale", "weight", "gamma"))
    return not words.isdisjoint({"eps", "epsilon"}) and any(
        isinstance(v, nnx.Variable) and getattr(v.get_value(), "ndim", None) == 1 for v in values
    )


def _has_zeros(variable: Any) -> bool:
    """Whether a parameter has zeros. A parameter of an abstract model has no values: False."""
    value = None if variable is None else variable.get_value()
    concrete = isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, Tracer)
    return concrete and not bool(jnp.all(value != 0))
