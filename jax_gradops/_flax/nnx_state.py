"""Runs a function of NNX modules as a function of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def modules_in(tree: Any) -> list[Any]:
    """The modules, optimizers, random streams and variables among a function's arguments."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_node) if _is_node(leaf)]


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def call(
    run: Callable[..., Any],
    function: Callable[..., Any],
    modules: list[Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs `function`, and updates its modules with what it changed in them."""
    graph, state = nnx.split(modules)
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    others = [None if _is_node(leaf) else leaf for leaf in leaves]

    def of_arrays(state: Any, others: list[Any]) -> Any:
        before = _values(state)
        copies = nnx.merge(graph, state)
        rest = iter(copies)
        full = [next(rest) if _is_node(a) else b for a, b in zip(leaves, others, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, full)
        results = function(*args, **kwargs)
        new_graph, new_state = nnx.split(copies)
        if new_graph != graph:
            raise ValueError(
                "fuse: the function changes the structure of an NNX module: it adds or removes "
                "variables, or sets attributes, as train() and eval() do. Do this before the call"
            )
        return results, _changed(before, new_state)

    results, new_state = run(of_arrays, (state, others), {})
    nnx.update(modules, new_state)
    return results


def _values(state: Any) -> dict[Any, list[Any]]:
    """The arrays of a state, by path. A function of NNX changes the variables of the state."""
    return {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}


def _changed(before: dict[Any, list[Any]], state: Any) -> Any:
    """The part of a state that differs. NNX lets an outer trace's other variables be read only."""
    after = _values(state)
    return nnx.from_flat_state(
        (path, variable)
        for path, variable in nnx.to_flat_state(state)
        if any(a is not b for a, b in zip(after[path], before[path], strict=True))
    )
