"""What `jax_gradops.fuse` replaced and what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

# Tests set this, so that they see the errors that users do not see.
RAISE_ERRORS = False
# A reader looks for a norm in the model, not in the framework that the model calls. Other installed
# packages may be models.
NEVER_SHOWN = ("jax", "jax_gradops")
_FRAMEWORKS = (*NEVER_SHOWN, "flax", "haiku", "equinox", "keras", "optax", "distrax", "chex")
_FRAMEWORKS += ("tensorflow_probability", "einops", "jaxtyping", "beartype", "typeguard")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
# A report names no more operands than this.
_MOST_OPERANDS = 6


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Code that an op of this library has replaced.

    Attributes:
      op: the name of the op's function. ``"linear_bias"`` is the bias of a matrix product. Its
        gradient is computed as in `jax_gradops.nnx.Linear`.
      shapes: the operands' dtypes and shapes, such as ``"bfloat16[8,128,768], float32[768]"``. The
        code may add axes of size 1 to its arrays: the shapes do not have these axes.
      where: the file and the line of the code, as ``"file.py:12"``. It is the innermost line that
        belongs neither to JAX nor to a framework such as Flax or Optax.
      times: how often this code was found in the traced function.
    """

    op: str
    shapes: str
    where: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.op}({self.shapes})" + _times(self.times)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A norm, an activation, a loss, a clip, an embedding or a bias that was left as it is.

    Attributes:
      kind: ``"norm"``, ``"gelu"``, ``"loss"``, ``"clip"``, ``"embedding"`` or ``"bias"``.
        ``"activation"``: one for which the library has no kernel. ``"shard_map"`` or
        ``"function"``: the search in a function failed, or a setting of JAX forbids it.
      why: the reason.
      where: the file and the line of the code.
      times: how often this code was found in the traced function.
    """

    kind: str
    why: str
    where: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} left as it is: {self.why}" + _times(self.times)


@dataclasses.dataclass(frozen=True)
class FuseSummary:
    """What one call of a fused function replaced when it was traced.

    Attributes:
      replaced: the code that was replaced, in order.
      left: the norms, activations, losses, clips, embeddings and biases that were left.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Kept, ...]

    def __str__(self) -> str:
        count = sum(each.times for each in self.replaced)
        lines = [
            f"jax_gradops.fuse: {count} replaced, {sum(each.times for each in self.left)} left"
        ]
        return "\n  ".join([*lines, *map(str, self.replaced), *map(str, self.left)])


def _times(times: int) -> str:
    return f" ({times} times)" if times > 1 else ""


class Report:
    """Collects what is found during one trace."""

    def __init__(self) -> None:
        self._replaced: dict[Replaced, int] = {}
        self._left: dict[Kept, int] = {}
        self.failed = False  # whether a search ended with an error

    def add(self, other: Report) -> None:
        for entry, times in other._replaced.items():
            self._replaced[entry] = self._replaced.get(entry, 0) + times
        for kept, times in other._left.items():
            self._left[kept] = self._left.get(kept, 0) + times
        self.failed |= other.failed

    def found(self, op: str, operands: Sequence[Any], equation: JaxprEqn, options: str) -> None:
        shapes = ", ".join(map(_type, operands))
        if len(operands) > _MOST_OPERANDS:
            shapes = ", ".join(map(_type, operands[:2])) + f", … ({len(operands)} arrays)"
        entry = Replaced(op, shapes + (f"; {options}" if options else ""), where(equation))
        self._replaced[entry] = self._replaced.get(entry, 0) + 1

    def left(self, kind: str, equation: JaxprEqn, why: str) -> None:
        entry = Kept(kind, why, where(equation))
        self._left[entry] = self._left.get(entry, 0) + 1

    @contextlib.contextmanager
    def guard(self, kind: str, equation: JaxprEqn) -> Iterator[None]:
        """Leaves code as it is if the search in it fails. The user's program must run."""
        try:
            yield
        except Exception as error:
            if RAISE_ERRORS:
                raise
            self.failed = True
            first = (str(error).splitlines() or [""])[0]
            self.left(kind, equation, f"the search failed: {type(error).__name__}: {first[:200]}")

    def summary(self) -> FuseSummary:
        return FuseSummary(
            tuple(dataclasses.replace(e, times=n) for e, n in self._replaced.items()),
            tuple(dataclasses.replace(e, times=n) for e, n in self._left.items()),
        )


def _type(v: Any) -> str:
    return f"{v.aval.dtype.name}[{','.join(map(str, v.aval.shape))}]"


def where(equation: JaxprEqn) -> str:
    """The file and line of the code: the innermost ones that are no framework's, if there are.

    A fused `optimizer.update` has only Optax's lines.
    """
    traceback = equation.source_info.traceback
    frames = [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []
    own = [f for f in frames if is_own(f[0])] or [f for f in frames if is_own(f[0], NEVER_SHOWN)]
    file, line = own[0] if own else ("unknown", 0)
    return f"{file}:{line}"


@functools.lru_cache(maxsize=4096)
def is_own(file: str | None, frameworks: tuple[str, ...] = _FRAMEWORKS) -> bool:
    """Whether a file may be a user's, or a model's: neither of a framework nor of Python."""
    if file is None:
        return False
    if file.startswith("<"):  # else Python made the function, as of a dataclass
        return file.startswith(("<stdin>", "<ipython"))
    if file.startswith(_STANDARD_LIBRARY) and not any(name in file for name in _INSTALLED):
        return False
    found = (getattr(sys.modules.get(name), "__file__", None) for name in frameworks)
    folders = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in found if each)
    return not file.startswith(folders)
