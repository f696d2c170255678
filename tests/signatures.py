"""Good calls of the native handlers, made from the declarations that the modules export."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

# The features d have g bundles, if the handler has bundles. A table has v rows.
SIZES = {"n": (3,), "d": (4,), "m": (2,), "g": (2,), "v": (5,)}
LEAVES = (np.ones(3, np.float32), np.ones((2, 2), np.float16))
VALUES = {"bool": False, "int64": np.int64(0), "float64": np.float64(1e-6)}


class Good(NamedTuple):
    """A call. Of the results, only the types are used."""

    operands: dict[str, Any]
    results: dict[str, Any]
    attributes: dict[str, Any]


def allowed(signature: dict[str, Any], choice: dict[str, bool]) -> bool:
    """Whether a choice of arrays and boolean attributes follows all rules."""

    def holds(kind: str, first: bool, second: bool) -> bool:
        return {
            "both or none": first == second,
            "one of": first != second,
            "needs": second or not first,
            "not both": not (first and second),
        }[kind]

    return all(
        holds(kind, choice[first], choice[second])
        for first, kind, second, when in signature["rules"]
        if not when or choice[when]
    )


def fullest(signature: dict[str, Any]) -> dict[str, bool]:
    """The choice that has the most arrays."""
    arrays = {a["name"]: a["optional"] for a in signature["operands"] + signature["results"]}
    free = [name for name, optional in arrays.items() if optional]
    free += [name for name, kind in signature["attributes"].items() if kind == "bool"]
    choices = (
        dict.fromkeys(arrays, True) | dict(zip(free, values, strict=True))
        for values in itertools.product((True, False), repeat=len(free))
    )
    return max((c for c in choices if allowed(signature, c)), key=lambda c: sum(c.values()))


def good(signature: dict[str, Any]) -> Good:
    """A call with as many arrays as the rules allow, without group axes."""
    if signature["variadic"]:
        return _good_of_tree(signature)
    choice = fullest(signature)
    dtypes = {"x": np.float32, "accum": np.float32, "any float": np.float16, "int32": np.int32}

    def array(declared: dict[str, Any]) -> Any:
        if not choice[declared["name"]]:
            return np.ones(0, np.float32)
        shape = [size for letter in declared["axes"] for size in SIZES[letter]]
        return np.ones(shape, dtypes[declared["dtype"]])

    operands, results = (
        {a["name"]: array(a) for a in signature[kind]} for kind in ("operands", "results")
    )
    if signature["workspace"]:
        sums = sum(choice[a["name"]] and "n" not in a["axes"] for a in signature["results"])
        results["workspace"] = np.ones((1, 1, sums, 4) if sums else 0, np.uint32)
    attributes = {"group_rank": np.int64(0)}
    if any("m" in a["axes"] for a in signature["operands"]):
        attributes["inner_rank"] = np.int64(len(SIZES["m"]))
    for name, kind in signature["attributes"].items():
        attributes[name] = choice[name] if kind == "bool" else VALUES[kind]
    return Good(operands, results, attributes)


def _good_of_tree(signature: dict[str, Any]) -> Good:
    """A call with two leaves."""
    _, *others = signature["operands"]
    operands = {f"leaf {i}": leaf for i, leaf in enumerate(LEAVES)}
    operands |= {other["name"]: np.ones((), np.float32) for other in others}
    results = {}
    for result in signature["results"]:
        if "n" in result["axes"]:
            results |= {f"{result['name']} {i}": leaf for i, leaf in enumerate(LEAVES)}
        else:
            results[result["name"]] = np.ones((), np.float32)
    if signature["workspace"]:
        results["workspace"] = np.ones((2048, 2), np.uint32)
    return Good(operands, results, {"group_rank": np.int64(0)})
