"""What `jax_gradops.nnx.fuse` does to a model."""

from __future__ import annotations

import dataclasses
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
_LINEN_NORMS = (
    linen.LayerNorm,
    linen.RMSNorm,
    linen.BatchNorm,
    linen.GroupNorm,
    linen.InstanceNorm,
)
_TO_NNX: Any = bridge.ToNNX
_UNKNOWN = "fuse does not know the class"


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """What `fuse` did to a model.

    Attributes:
      changed: by the module's path in the model, what the module is now.
      left: by path, why a norm is unchanged. If `fuse` was asked to change them, linear layers and
        subclasses of `Sequential` are listed too. A norm of a class that `fuse` does not know is a
        module whose class has "norm" in its name, or whose `scale`, `weight` or `gamma` has one
        axis and stands beside an epsilon.
      already: by path, the class of a module that was of this library before.
    """

    changed: dict[str, str]
    left: dict[str, str]
    already: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        before = f", already fused {len(self.already)}" if self.already else ""
        lines = [f"fused {len(self.changed)}, left {len(self.left)}{before}"]
        lines += [f"  {path}: now {what}" for path, what in self.changed.items()]
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
    changed: dict[str, str] = {}
    left: dict[str, str] = {}
    already: dict[str, str] = {}
    modules = list(modules_of("fuse", model))
    for path, module in modules:
        kind = type(module)
        why = _why_left(module, ours)
        if why:
            left[path] = why
        elif _is_ours(module):
            already[path] = kind.__name__
        elif kind is FLAX.Linear and module.bias is None:
            pass  # jax_gradops.nnx.Linear differs in the gradient of the bias only
        elif kind in ours and kind is not FLAX.Sequential:
            object.__setattr__(module, "__class__", ours[kind])
            changed[path] = f"jax_gradops.nnx.{ours[kind].__name__}"
        if type(module) in norms and residuals not in (None, module.residuals):
            name = f"jax_gradops.nnx.{type(module).__name__}"
            if residuals == "output" and _has_zeros(module.scale):
                changed[path] = f"{name}, without residuals={residuals!r}: its scale has zeros"
            else:
                module.residuals = residuals
                changed[path] = f"{name}, residuals={residuals!r}"
    for path, module in modules:  # after the norms: a pair has a norm of this library
        if _pairs(module, sequential, gelu):
            changed[path] = f"jax_gradops.nnx.{sequential.__name__}"
    return FuseReport(
        {path: changed[path] for path, _ in modules if path in changed},
        left,
        {path: name for path, name in already.items() if path not in changed},
    )


def _pairs(module: Any, sequential: type, gelu: bool) -> bool:
    """Makes a Sequential compute pairs of layers as one. Returns whether this is a change."""
    if type(module) not in (FLAX.Sequential, sequential):
        return False
    without, with_gelu = (len(nnx_calls.with_pairs(module, each)) for each in (False, True))
    if type(module) is sequential:
        if not gelu or module.gelu:
            return False
        del module.gelu
        return with_gelu < without
    if (with_gelu if gelu else without) == len(module.layers):
        return False
    object.__setattr__(module, "__class__", sequential)
    if not gelu and with_gelu < without:
        module.gelu = False
    return True


def modules_of(function: str, model: Any) -> Iterator[tuple[str, Any]]:
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
    for path, module in found:
        yield ".".join(map(str, path)) or "the model", module


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
    if isinstance(module, _TO_NNX) and isinstance(module.to_nnx__module, _LINEN_NORMS):
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
