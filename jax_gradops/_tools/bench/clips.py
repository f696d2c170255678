"""What of clip-by-global-norm can be timed: trees, forms, dtypes, something to clip or nothing."""

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

#: From a tree and `max_norm` to the clipped tree.
Clip: TypeAlias = Callable[[Any, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to clip.

    Attributes:
      clip: this library's.
      in_step: whether it is followed by AdamW in the same program; then what counts is how much
        longer that takes than AdamW alone.
      in_place: whether the clipped gradients take over the memory of the gradients.
      passes: over the gradients' bytes at least, by whether there is something to clip.
    """

    clip: Clip
    in_step: bool
    in_place: bool
    passes: dict[bool, int]


def _transform(tree: Any, max_norm: jax.Array) -> Any:
    return clip_tree_by_global_norm(tree, max_norm)[0]


def _inplace(tree: Any, max_norm: jax.Array) -> Any:
    return inplace_clip_by_global_norm(tree, max_norm)[0]


# The norm reads. Alone, the transform's scaling reads and writes, with a factor of 1 too; in a step
# it belongs to the update, which reads the gradients anyhow. In place, nothing is written where
# there is nothing to clip.
FORMS = {
    "transform": Form(_transform, False, True, {True: 3, False: 3}),
    "step": Form(_transform, True, False, {True: 1, False: 1}),
    "inplace": Form(_inplace, False, True, {True: 3, False: 1}),
    "inplace_step": Form(_inplace, True, True, {True: 3, False: 1}),
}


@dataclasses.dataclass(frozen=True)
class Group:
    """What the same programs serve: a tree, in one form and one dtype."""

    tree: str
    form_name: str
    dtype: str

    @property
    def form(self) -> Form:
        """How it is clipped."""
        return FORMS[self.form_name]

    @functools.cached_property
    def leaves(self) -> trees.Leaves:
        """The gradients' types."""
        return trees.leaves(self.tree, self.dtype)

    @property
    def footprint(self) -> int:
        """Bytes that one turn goes through: gradients; parameters and two moments too in a step."""
        return (4 if self.form.in_step else 1) * trees.size_in_bytes(self.leaves)


@dataclasses.dataclass(frozen=True)
class ClipCase:
    """A group, with something to clip or with nothing."""

    group: Group
    clipping: bool

    @property
    def bytes(self) -> int:
        """The least that has to be read and written."""
        return trees.size_in_bytes(self.group.leaves) * self.group.form.passes[self.clipping]

    def describe(self) -> dict[str, Any]:
        """For JSON."""
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
    """All cases of these, those of a group one after the other; a mixed tree has its own dtypes."""
    cases = []
    for tree, form in itertools.product(names, forms):
        for dtype in [trees.MIXED] if trees.is_mixed(tree) else dtypes:
            group = Group(tree, form, dtype)
            cases += [ClipCase(group, clipping) for clipping in (True, False)]
    return cases
