"""The time of a training step by kernel, from a trace of `jax.profiler`."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: A pattern of kernel names for each group. A kernel is in the first group that matches. Names of
#: CUDA kernels contain argument types. These types tell this library's kernels apart.
GROUPS = {
    "jax_gradops norms": r"gradops.*((Row|Batch)Norm|Bundle)",
    "jax_gradops GELU": r"gradops.*BiasGelu",
    "jax_gradops loss": r"gradops.*CrossEntropy",
    "jax_gradops clip": r"gradops.*(PartialSum|Finalize|Scale)Kernel",
    "jax_gradops, other": r"gradops",
    "attention": r"sdpa|attention|flash|fmha|dot_do_o|convert_dq",
    "convolution": r"convolution|fprop|dgrad|wgrad|implicit",
    "matrix product": r"gemm|nvjet|cutlass|xmma|cublas|splitk|^dot",
    "copy": r"memcpy|memset|^((wrapped|loop|input)_)?(copy|transpose)(_fusion)?([._]\d+)*$",
    "scatter, gather": r"scatter|gather",
    "reduction": r"reduce",
    "custom call": r"ffi_call|custom.call",
    "other fusion": r"fusion|wrapped_",
    "other": "",
}

#: The group of the time in which no GPU kernel runs.
IDLE = "idle"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The number of calls and the milliseconds in a step. `name` is a `short_name`."""

    name: str
    calls: float
    ms: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Kernels of one kind, slowest first."""

    name: str
    kernels: tuple[Kernel, ...]

    @property
    def calls(self) -> float:
        """The calls of all kernels."""
        return sum(kernel.calls for kernel in self.kernels)

    @property
    def ms(self) -> float:
        """The milliseconds of all kernels."""
        return sum(kernel.ms for kernel in self.kernels)


def read(directory: Path, steps: int) -> list[Group]:
    """The groups of the directory's newest profile of `steps` steps, slowest first."""
    traces = sorted(directory.glob("plugins/profile/*/*.trace.json.gz"))
    if not traces:
        return []
    with gzip.open(traces[-1], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    gpu, events = _kernels(events)
    calls, us = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for event in events:
        key = group_of(event["name"]), short_name(event["name"])
        calls[key] += 1
        us[key] += event.get("dur", 0)
    kernels: dict[str, list[Kernel]] = collections.defaultdict(list)
    for (group, name), time in us.most_common():
        kernels[group].append(Kernel(name, calls[group, name] / steps, time / 1e3 / steps))
    if gpu:
        gaps = list(_gaps(events))
        kernels[IDLE].append(Kernel(IDLE, len(gaps) / steps, sum(gaps) / 1e3 / steps))
    groups = [Group(name, tuple(found)) for name, found in kernels.items()]
    return sorted(groups, key=lambda group: -group.ms)


def _gaps(events: Sequence[Any]) -> Iterator[float]:
    """The microseconds of each gap in which nothing ran, from the first kernel to the last one."""
    events = sorted(events, key=lambda event: event["ts"])
    end = events[0]["ts"]
    for event in events:
        if event["ts"] > end:
            yield event["ts"] - end
        end = max(end, event["ts"] + event.get("dur", 0))


def _kernels(events: list[Any]) -> tuple[bool, list[Any]]:
    """Whether anything ran on a GPU's streams, and these events. Else XLA's CPU operations."""
    names: dict[Any, str] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            names[event["pid"], event.get("tid")] = event["args"]["name"]
    on_gpu, on_cpu = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        process, thread = names.get((event["pid"], None), ""), (event["pid"], event["tid"])
        if process.startswith("/device:GPU") and "Stream" in names.get(thread, ""):
            on_gpu.append(event)
        elif "hlo_op" in event.get("args", {}):
            on_cpu.append(event)
    return bool(on_gpu), on_gpu or on_cpu


def group_of(name: str) -> str:
    """The group of a kernel."""
    return next(g for g, found in GROUPS.items() if re.search(found, name, re.IGNORECASE))


def short_name(name: str) -> str:
    """A kernel's name without the parts that differ between instances."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"([._]\d+)+$", "", re.split(r"[<(]", name)[0]) or name
