"""Pairwise testing: a few combinations of parameters that contain each pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def covering(combinations: Sequence[Mapping[str, Any]], strength: int, first: int = 0) -> list[int]:
    """The places of some combinations. Other values of `first` choose others.

    Whichever `strength` values of different parameters occur together, occur together in one of the
    chosen combinations.
    """
    found = [
        list(itertools.combinations([(k, repr(v)) for k, v in c.items()], min(strength, len(c))))
        for c in combinations
    ]
    left = [(first + i) % len(found) for i in range(len(found))]
    uses = dict.fromkeys(itertools.chain(*found), 0)
    chosen = []
    while not all(uses.values()):
        counts = {i: [uses[values] for values in found[i]] for i in left}
        best = max(left, key=lambda i: (counts[i].count(0), -sum(counts[i])))
        left.remove(best)
        chosen.append(best)
        for values in found[best]:
            uses[values] += 1
    return chosen
