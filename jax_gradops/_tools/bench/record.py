"""The file of a run's results. It is written after each case, read for plots, and resumed from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_gradops import _registry
from jax_gradops._cli import info
from jax_gradops._tools import testing
from jax_gradops._tools.bench import timing
from jax_gradops._tools.bench.errors import BenchError, unwritable

#: The version of the file's layout. Files of other versions are not read.
FORMAT = 1
#: These entries of two runs must be equal, so that one file may hold results of both.
_ENVIRONMENT = (
    "suite", "rounds", "device", "processor", "platform", "cache_bytes", "copy", "competitors",
    "versions", "kernels", "library", "threads",
)  # fmt: skip
#: The PyPI names of competitors.
PACKAGES = {
    "flax": "flax",
    "optax": "optax",
    "torch": "torch",
    "cudnn": "torch",
    "liger": "liger_kernel",
    "quack": "quack_kernels",
    "triton": "triton",
}
_DIGITS = 6  # significant digits of figures


def environment(device: Any, platform: str, competitors: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions, as JSON values."""
    found = info.collect()
    versions = {p: info.version(p) for c, p in PACKAGES.items() if c in competitors}
    return {
        "device": device.device_kind,
        "processor": info.processor(),
        "platform": platform,
        "cache_bytes": timing.cache_bytes(device),
        "copy": "device_copy" if testing.has_handlers(platform) else "jax.numpy.copy",
        "competitors": list(competitors),
        "versions": found["versions"] | versions,
        "kernels": found["kernels"],
        "library": _library(platform),
        "threads": found["threads"],
    }


def _library(platform: str) -> str:
    """A digest of the code that computes: the native module and the Python modules around it."""
    return _registry.identity(_registry.canonical_platform(platform))[:16]


def describe(content: dict[str, Any]) -> str:
    """The machine and the versions as a text."""
    versions = (f"{name} {v}" for name, v in content["versions"].items() if v)
    processor = f"{content['processor']}, {content['threads']} threads"
    device = processor if content["platform"] == "cpu" else content["device"]
    return f"{device}, {', '.join(versions)}"


def read(path: Path) -> dict[str, Any]:
    """Reads a file's content; raises BenchError."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BenchError(f"{path} is no --json file of this version of bench")
    return content


class Record:
    """The results of a run, and of the earlier run that it resumes.

    Attributes:
      content: the content of the file.
    """

    def __init__(self, path: Path | None, header: dict[str, Any], command: str) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "commands": [command],
            **header,
            "left_out": [],
            "results": [],
        }

    def go_on(self) -> None:
        """Takes over the file's results; raises BenchError if their conditions were different."""
        if self._path is None:
            raise BenchError("--resume: --json FILE says what to go on with")
        if not self._path.exists():
            return
        earlier = read(self._path)
        for name in _ENVIRONMENT:
            difference = _difference(name, earlier.get(name), self.content.get(name))
            if difference:
                raise BenchError(
                    f"cannot go on with {self._path}: {difference}; "
                    "without --resume all is measured anew"
                )
        # Cases that had a problem run again.
        self.results.extend(r for r in earlier["results"] if not r["problem"])
        commands = [*earlier["commands"], *self.content["commands"]]
        self.content["commands"] = list(dict.fromkeys(commands))

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results of all finished cases."""
        return self.content["results"]

    def find(self, case: Any) -> dict[str, Any] | None:
        """The result of a case, or None."""
        described = json.loads(json.dumps(case.describe())).items()
        for result in self.results:
            if all(name in result and result[name] == value for name, value in described):
                return result
        return None

    def add(self, result: dict[str, Any], left: Sequence[Any]) -> None:
        """Adds the result of a case. `left` are the cases that are still to run."""
        self.results.append(_rounded(result))
        self.write(left)

    def write(self, left: Sequence[Any]) -> None:
        """Writes the whole file. After an error, the old file is unchanged."""
        self.content["left_out"] = [str(case) for case in left]
        if self._path is not None:
            write(self._path, _text(self.content).encode())


def _difference(name: str, then: Any, now: Any) -> str:
    """A text about the first difference; empty if there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        found = (_difference(f"{name} {n}", then.get(n), now.get(n)) for n in {**then, **now})
        return next(filter(None, found), "")
    return "" if then == now else f"its {name} was {json.dumps(then)} and is {json.dumps(now)}"


def write(path: Path, data: bytes) -> None:
    """Writes a file that nobody sees half-written; raises BenchError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raises BenchError if the file cannot be written. The check comes before long measurements."""
    folder = path.parent
    try:
        if path.is_dir():
            raise BenchError(f"cannot write to {path}: it is a folder")
        if not folder.is_dir():
            raise BenchError(f"cannot write to {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BenchError(f"cannot write to {path}: no permission in {folder}")
        probe = folder / f".{path.name}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(path, error) from None


def _text(content: dict[str, Any]) -> str:
    """JSON with one line for each result."""
    *header, (last, results) = content.items()
    head = json.dumps(dict(header), indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(result)}" for result in results)
    return f'{head},\n "{last}": [\n{lines}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    return value
