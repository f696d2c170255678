"""The cases of the suite "clip": trees, forms, dtypes, with or without something to clip."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jax_gradops._ops.clip.global_norm import clip_tree_by_global_norm, inplace_clip_by_global_norm
from jax_gradops._tools.bench import trees
from jax_gradops._tools.bench.cases import SHORT_DTYPES

#: Maps a tree and `max_norm` to the clipped tree.
Clip: TypeAlias = Callable[[Any, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to clip.

    Attributes:
      clip: this library's function.
      in_step: whether AdamW follows in the program. The figure is then the additional time over
        AdamW alone.
      in_place: whether the clipped gradients take over the gradients' memory.
      passes: the least number of passes over the gradients. The key says if there is something to
        clip.
    """

    clip: Clip
    in_step: bool
    in_place: bool
    passes: dict[bool, int]


def _transform(tree: Any, max_norm: jax.Array) -> Any:
    return clip_tree_by_global_norm(tree, max_norm)[0]


def _inplace(tree: Any, max_norm: jax.Array) -> Any:
    return inplace_clip_by_global_norm(tree, max_norm)[0]


# The norm reads the gradients. The transform's scaling reads and writes them, with a factor of 1
# too. In a step, this scaling is a part of the update, which reads the gradients anyway. The
# in-place clip writes nothing if there is nothing to clip.
FORMS = {
    "transform": Form(_transform, False, True, {True: 3, False: 3}),
    "step": Form(_transform, True, False, {True: 1, False: 1}),
    "inplace": Form(_inplace, False, True, {True: 3, False: 1}),
    "inplace_step": Form(_inplace, True, True, {True: 3, False: 1}),
}


@dataclasses.dataclass(frozen=True)
class Group:
    """A tree in one form and one dtype. All cases of a group use the same programs."""

    tree: str
    form_name: str
    dtype: str

    @property
    def form(self) -> Form:
        """The form of the clip."""
        return FORMS[self.form_name]

    @functools.cached_property
    def leaves(self) -> trees.Leaves:
        """The types of the gradients."""
        return trees.leaves(self.tree, self.dtype)

    @property
    def footprint(self) -> int:
        """Bytes that a turn moves: the gradients; in a step also the parameters and two moments."""
        return (4 if self.form.in_step else 1) * trees.size_in_bytes(self.leaves)


@dataclasses.dataclass(frozen=True)
class ClipCase:
    """A group, with something to clip or with nothing."""

    group: Group
    clipping: bool

    @property
    def bytes(self) -> int:
        """The least number of bytes to read and write."""
        return trees.size_in_bytes(self.group.leaves) * self.group.form.passes[self.clipping]

    def describe(self) -> dict[str, Any]:
        """The values that identify the case, for JSON."""
        group = self.group
        return {
            "op": "clip",
            "form": group.form_name,
            "dtype": group.dtype,
            "tree": group.tree,
            "leaves": len(group.leaves),
            "clipping": self.clipping,
        }

    def __str__(self) -> str:
        group = self.group
        what = "clipping" if self.clipping else "not clipping"
        dtype = SHORT_DTYPES.get(group.dtype, group.dtype)
        return f"{group.form_name} {what} {dtype} {group.tree}"


def select(names: Sequence[str], forms: Sequence[str], dtypes: Sequence[str]) -> list[ClipCase]:
    """All cases, ordered by group. A mixed tree has its own dtypes."""
    cases = []
    for tree, form in itertools.product(names, forms):
        for dtype in [trees.MIXED] if trees.is_mixed(tree) else dtypes:
            group = Group(tree, form, dtype)
            cases += [ClipCase(group, clipping) for clipping in (True, False)]
    return cases
