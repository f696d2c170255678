"""JAX's persistent compilation cache: equal programs are found, different ones are not."""

from __future__ import annotations

import collections
import gc
import json
import os
import platform as machine
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cached_programs
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops import _registry

pytestmark = pytest.mark.newest_jax

PROGRAM = str(Path(__file__).with_name("cached_programs.py"))


def start(
    *arguments: Any, before: tuple[str, ...] = (), platform: str = "cpu", **environment: str
) -> Any:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": platform}
    return subprocess.Popen(
        [*before, sys.executable, "-P", PROGRAM, *map(str, arguments)],
        env=os.environ | flags | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: Any) -> list[dict[str, list[str]]]:
    """The tables that a process printed: one per line."""
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in output.splitlines()]


def usual(program: str) -> str | None:
    """The op and the mesh of a program, if its static argument has the usual value."""
    name, _, mesh = program.partition(" | ")
    op, argument = name.split(" ")
    attribute, value = argument.split("=")
    first = str(cached_programs.ATTRIBUTES[op][attribute][0])
    return f"{op} {mesh}" if value == first else None


@pytest.mark.P5
def test_texts_tell_programs_apart():
    """A program's text is equal in all processes. Each static argument changes the text."""
    processes = [start("texts", step, PYTHONHASHSEED=str(step)) for step in (1, 3)]
    levels = [name for name, usable in _registry.MODULES["cpu"].cpu_levels.items() if usable]
    if len(levels) > 1:
        processes.append(start("texts", 7, JAX_GRADOPS_CPU_LEVEL=levels[0]))
    (one,), (other,), *rest = map(said, processes)
    assert len(one) > 200
    assert len(other) > 60 and other == {name: one[name] for name in other}
    for which in range(2):
        programs = collections.defaultdict(list)
        for name, digests in one.items():
            programs[digests[which]].append(name)
        for equal in programs.values():
            same = {usual(name) or name for name in equal}
            assert len(same) == 1, equal
    for (others,) in rest:  # another build's results may differ
        ours = {n for n in others if "implementation=xla" not in n}
        assert not [n for n in ours if set(one[n]) & set(others[n])]


def test_another_build_has_other_names(monkeypatch):
    """The name of a program's function changes with the code that the results depend on."""

    def names() -> set[str]:
        jax.clear_caches()
        text = jax.jit(jax_gradops.gelu).lower(np.ones((2, 3), np.float32)).as_text()
        return set(re.findall(r"jax_gradops_bias_gelu_fwd_\w+", text))

    before, again = names(), names()
    monkeypatch.setattr(_registry, "identity", lambda platform: f"another build for {platform}")
    assert before == again and before and not before & names()
    jax.clear_caches()


@pytest.mark.P5
@pytest.mark.parametrize("how", ["spawned", "without addresses", "same addresses", "forked"])
def test_cache(tmp_path, how):
    """The next process finds exactly the programs that one process has compiled."""
    words = "epsilon=", "layer_norm", "| auto" if how == "spawned" else "| explicit"
    settings: dict[str, Any] = {}
    if how == "without addresses":
        settings = {"JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true"}
    if how == "same addresses":
        if not shutil.which("setarch"):
            pytest.skip("no setarch")
        settings = {"before": ("setarch", machine.machine(), "-R"), "PYTHONHASHSEED": "0"}
    if how == "forked":
        tables = said(start("forked", tmp_path, *words))
        first, second = tables[0] | tables[1], tables[2] | tables[3]
    else:
        (first,), (second,) = (said(start("cache", tmp_path, *words, **settings)) for _ in "12")
    assert len(first) == 4  # two ops, two values
    assert {hit for hit, _ in first.values()} == {"miss"}
    assert {hit for hit, _ in second.values()} == {"hit"}
    assert {n: digest for n, (_, digest) in first.items()} == {
        n: digest for n, (_, digest) in second.items()
    }
    assert len({digest for _, digest in first.values()}) == len(first)


@pytest.mark.P5
@pytest.mark.parametrize("mesh", ["| auto", "| explicit", "| manual and"])
def test_cache_of_gpus(platform, mesh, tmp_path):
    if platform != "cuda" or len(jax.devices("gpu")) < 2:
        pytest.skip("fewer than two GPUs")
    first, second = (
        said(start("cache", tmp_path, "epsilon=", mesh, platform=platform))[0] for _ in "12"
    )
    assert {hit for hit, _ in first.values()} == {"miss"}
    assert {hit for hit, _ in second.values()} == {"hit"}
    assert {n: d for n, (_, d) in first.items()} == {n: d for n, (_, d) in second.items()}
    assert len({d for _, d in first.values()}) == len(first)


def test_program_that_outlives_an_equal_one():
    """XLA asks how to partition a program while it compiles.

    An equal program may be gone by then.
    """
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    x = np.arange(32, dtype=np.float32).reshape(4, 8) ** 1.5
    spread = jax.device_put(x, NamedSharding(mesh, P("data")))
    first, second = (jax.jit(lambda x: jax_gradops.rms_norm(x)).lower(spread) for _ in "12")
    third = jax.jit(lambda x: jax_gradops.rms_norm(x)).lower(spread)
    del first
    gc.collect()
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(second.compile()(spread), expected, rtol=1e-5)
    del second
    gc.collect()
    np.testing.assert_allclose(third.compile()(spread), expected, rtol=1e-5)
