"""What `jax_gradops.fuse` replaced and what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sysconfig
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import JaxprEqn

if TYPE_CHECKING:
    from jax_gradops._fuse.program import Site

# Tests set this, so that they see the errors that users do not see.
RAISE_ERRORS = False
_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(p)) + os.sep for p in (jax.__file__, os.path.dirname(__file__))
)
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Code that an op of this library has replaced.

    Attributes:
      op: the name of the op's function. ``"linear_bias"`` is the bias of a matrix product. Its
        gradient is computed as in `jax_gradops.nnx.Linear`.
      shapes: the operands' dtypes and shapes, such as ``"bfloat16[8,128,768], float32[768]"``.
      where: the file and the line of the code, as ``"file.py:12"``.
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
    """Code that is nearly an op of this library, and was left as it is.

    Attributes:
      kind: ``"norm"``, ``"gelu"``, ``"loss"``, ``"bias"``, ``"shard_map"`` or ``"function"``.
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
      left: the code that is nearly an op.
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

    def found(self, site: Site, equation: JaxprEqn, options: str) -> None:
        shapes = ", ".join(_type(v) for v in site.operands)
        entry = Replaced(site.op, shapes + (f"; {options}" if options else ""), where(equation))
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
            self.left(kind, equation, f"the search failed: {type(error).__name__}: {first}")

    def summary(self) -> FuseSummary:
        return FuseSummary(
            tuple(dataclasses.replace(e, times=n) for e, n in self._replaced.items()),
            tuple(dataclasses.replace(e, times=n) for e, n in self._left.items()),
        )


def _type(v: Any) -> str:
    return f"{v.aval.dtype.name}[{','.join(map(str, v.aval.shape))}]"


def where(equation: JaxprEqn) -> str:
    """The file and line of the user's code. The line in an installed library, if there is none."""
    traceback = equation.source_info.traceback
    frames = [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []
    frames = [f for f in frames if not f[0].startswith((*_PACKAGES, "<"))]
    own = [f for f in frames if not f[0].startswith(_LIBRARIES)]
    file, line = next(iter(own or frames), ("unknown", 0))
    return f"{file}:{line}"
