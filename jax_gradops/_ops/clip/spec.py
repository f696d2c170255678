"""What the global norm and clipping are, as data: see `op_spec`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_gradops import _oracles
from jax_gradops._ops.clip import global_norm as module
from jax_gradops._ops.clip.kernels import SCALE, SUM_OF_SQUARES
from jax_gradops._ops.op_spec import MAX_NORM, Form, OpSpec


def _global_norm(*leaves: Any) -> Any:
    return module.global_norm(leaves)


def _clip(function: Callable[..., Any], *leaves: Any, **options: Any) -> tuple[Any, ...]:
    return function(leaves, **options)[0]


def _update(*leaves: Any, max_norm: float) -> tuple[Any, ...]:
    """The norm, and the clipped leaves, by the gradient transformation for Optax."""
    transform = module.clip_by_global_norm(max_norm)
    updates: Any
    state: Any
    updates, state = transform.update(leaves, transform.init(leaves))
    return state.global_norm, *updates


def _update_oracle(*leaves: Any, max_norm: float) -> tuple[_oracles.Reference, ...]:
    return _oracles.global_norm(*leaves), *_oracles.clip(*leaves, max_norm=max_norm)


_CLIP = functools.partial(
    Form,
    oracle=_oracles.clip,
    oracle_vjp=_oracles.clip_vjp,
    options={"max_norm": MAX_NORM},
    roundings=2,
)

GLOBAL_NORM = OpSpec(
    "global_norm",
    "leaves",
    (
        Form(
            _global_norm,
            _oracles.global_norm,
            (SUM_OF_SQUARES,),
            _oracles.global_norm_vjp,
            traffic={"fwd": 1},
        ),
    ),
)
CLIP_TREE = OpSpec(
    "clip_tree_by_global_norm",
    "leaves",
    (
        _CLIP(
            functools.partial(_clip, module.clip_tree_by_global_norm),
            kernels=(SUM_OF_SQUARES,),
            traffic={"fwd": 3},
        ),
    ),
)
CLIP_TRANSFORM = OpSpec(
    "clip_by_global_norm",
    "leaves",
    (Form(_update, _update_oracle, (SUM_OF_SQUARES,), options={"max_norm": MAX_NORM}),),
    requires="optax",
)
INPLACE_CLIP = OpSpec(
    "inplace_clip_by_global_norm",
    "leaves",
    (
        _CLIP(
            functools.partial(_clip, module.inplace_clip_by_global_norm),
            kernels=(SUM_OF_SQUARES, SCALE),
        ),
    ),
)
SPECS = (GLOBAL_NORM, CLIP_TREE, CLIP_TRANSFORM, INPLACE_CLIP)
