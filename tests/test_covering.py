"""The choice of the combinations of parameters that tests run with."""

import itertools

import pytest
from covering import covering

VALUES = {"dtype": ["float16", "float32", "float64"], "kind": [None, 1], "inside": [False, True]}
ALL = [dict(zip(VALUES, v, strict=True)) for v in itertools.product(*VALUES.values())]


def tuples(combinations, strength):
    return {t for c in combinations for t in itertools.combinations(c.items(), strength)}


@pytest.mark.parametrize(("strength", "number"), [(1, 3), (2, 6), (3, 12)])
def test_has_each_tuple_of_values(strength, number):
    chosen = [ALL[i] for i in covering(ALL, strength)]
    assert tuples(chosen, strength) == tuples(ALL, strength)
    assert len(chosen) == number


def test_has_only_what_occurs():
    """A combination is never made up: some values do not go together."""
    some = [c for c in ALL if c["kind"] or c["inside"]]
    chosen = [some[i] for i in covering(some, 2)]
    assert tuples(chosen, 2) == tuples(some, 2) and len(chosen) < len(some)


def test_classes_differ():
    """Together, the combinations of several classes have more than those of one class."""
    assert len({tuple(covering(ALL, 1, first)) for first in range(len(ALL))}) > 3


def test_one_parameter_and_none():
    assert sorted(covering([{"a": 1}, {"a": 2}], 2)) == [0, 1]
    assert covering([{}], 2) == [0]
