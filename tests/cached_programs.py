"""Programs that differ in one static argument, for `test_compilation_cache.py`.

- ``python cached_programs.py texts STEP`` prints two digests for every STEP-th program. The first
  is of its text. The second is of the text that JAX uses as the key of its persistent compilation
  cache, if addresses are removed.
- ``python cached_programs.py cache FOLDER WORD...`` runs the programs whose names contain all the
  words. It prints whether each was in the cache, and a digest of its results.
- ``python cached_programs.py forked FOLDER WORD...`` runs these programs in two forked processes,
  one after the other. Each process runs every second program.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops import backward

#: The static arguments of each op, with two values. Only the operand x is sharded.
ATTRIBUTES: dict[str, dict[str, tuple[Any, Any]]] = {
    "layer_norm": {
        "epsilon": (1e-6, 1.0), "scale_offset": (0.0, 1.0), "residuals": ("input", "output"),
        "implementation": ("ffi", "xla"),
    },
    "rms_norm": {
        "epsilon": (1e-6, 1.0), "scale_offset": (0.0, 1.0), "residuals": ("input", "output"),
    },
    "add_layer_norm": {"epsilon": (1e-6, 1.0), "scale_offset": (0.0, 1.0)},
    "add_rms_norm": {"epsilon": (1e-6, 1.0), "scale_offset": (0.0, 1.0)},
    "gelu": {"approximate": (True, False)},
    "bias_gelu": {"approximate": (True, False)},
    "batch_norm": {"epsilon": (1e-5, 1.0), "activation": (None, "relu"), "residual": (False, True)},
    "batch_norm_inference": {"epsilon": (1e-5, 1.0)},
    "group_norm": {"num_groups": (1, 4), "epsilon": (1e-5, 1.0), "activation": (None, "silu")},
    "embedding_lookup": {"mode": ("fill", "clip"), "dtype": ("float32", "bfloat16")},
    "clip_tree_by_global_norm": {"max_norm": (1.0, 2.0), "nonfinite": ("propagate", "zero")},
    "inplace_clip_by_global_norm": {"max_norm": (1.0, 2.0)},
    "layer_norm_backward": {"scale_offset": (0.0, 1.0), "has_bias": (True, False)},
    "rms_norm_backward": {"scale_offset": (0.0, 1.0)},
    "bias_gelu_backward": {"approximate": (True, False)},
}  # fmt: skip
MESHES = ("auto", "explicit", "manual", "manual and auto", "gspmd", "none")
ROWS, FEATURES = 8, 16


def called(op: str, arguments: dict[str, Any], x: jax.Array) -> Any:
    """The op's result. All operands are made from x."""
    vector = jnp.linspace(0.5, 2, FEATURES, dtype=x.dtype)
    row = jnp.ones(x.shape[:1], x.dtype)
    arguments = {"implementation": "ffi", **arguments}
    if op == "batch_norm":
        residual = x if arguments.pop("residual", False) else None
        return jax_gradops.batch_norm(x, vector, residual=residual, **arguments)[0]
    operands: dict[str, tuple[Any, ...]] = {
        "gelu": (x,), "bias_gelu": (x, vector), "bias_gelu_backward": (x, x, vector),
        "add_layer_norm": (x, x, vector), "add_rms_norm": (x, x, vector),
        "batch_norm_inference": (x, vector), "group_norm": (x, vector, vector),
        "embedding_lookup": (x, jnp.arange(FEATURES) % 3),
        "layer_norm_backward": (x, x, vector, row, row), "rms_norm_backward": (x, x, vector, row),
        "clip_tree_by_global_norm": ([x],), "inplace_clip_by_global_norm": ([x],),
    }  # fmt: skip
    if "clip" in op:
        arguments = {"max_norm": 1.0, **arguments}
    if op == "batch_norm_inference":
        arguments = {"mean": vector, "var": vector, **arguments}
    if op == "group_norm":
        arguments = {"num_groups": 2, **arguments}
    if "bias_gelu_backward" in op:
        arguments = {"approximate": True, **arguments}
    function = getattr(jax_gradops, op, None) or getattr(backward, op)
    return function(*operands.get(op, (x, vector)), **arguments)


def program(op: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """A program of the op and its gradient. A backward op stands alone."""

    def run(x: jax.Array) -> Any:
        if op.endswith("backward"):
            return called(op, arguments, x)
        results, pull = jax.vjp(functools.partial(called, op, arguments), x)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    return run


def on(kind: str, run: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """The program on a mesh, and its argument."""
    x = np.linspace(-3, 5, ROWS * FEATURES, dtype=np.float32).reshape(ROWS, FEATURES)
    if kind == "none":
        return run, x
    explicit = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    shape = (2, 2) if len(jax.devices()) > 3 else (2, 1)
    mesh = jax.make_mesh(
        shape, ("data", "model"), axis_types=explicit, devices=jax.devices()[: shape[0] * shape[1]]
    )
    if kind.startswith("manual"):
        names = {"data", "model"} if kind == "manual" else {"data"}
        spec = P(("data", "model")) if kind == "manual" else P("data")
        run = jax.shard_map(
            run, mesh=mesh, in_specs=spec, out_specs=P(), axis_names=names, check_vma=False
        )
    return run, jax.device_put(x, NamedSharding(mesh, P(("data", "model"))))


def variants() -> Iterator[tuple[str, str, Callable[..., Any], Any]]:
    """Yields name, mesh, program and argument."""
    for kind in MESHES:
        jax.config.update("jax_use_shardy_partitioner", kind != "gspmd")
        for op, attributes in ATTRIBUTES.items():
            for name, values in attributes.items():
                for value in values:
                    run, x = on(kind, program(op, {name: value}))
                    yield f"{op} {name}={value}", kind, run, x


def texts(step: int) -> None:
    found = {}
    for name, kind, run, x in itertools.islice(variants(), 0, None, step):
        text = jax.jit(run).lower(x).as_text()
        # The text that JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY leaves.
        shorn = re.sub(r'(@CustomSPMDPartitioning\(.*?backend_config = )"[^"]*"', r"\1", text)
        found[f"{name} | {kind}"] = [hashlib.sha256(t.encode()).hexdigest() for t in (text, shorn)]
    print(json.dumps(found))


def cache(folder: str, words: list[str], every: slice = slice(None)) -> None:
    settings = {"compilation_cache_dir": folder, "persistent_cache_min_compile_time_secs": 0}
    for name, value in (settings | {"persistent_cache_min_entry_size_bytes": -1}).items():
        jax.config.update(f"jax_{name}", value)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.split("/")[-1]))
    found = {}
    wanted = [v for v in variants() if all(word in f"{v[0]} | {v[1]}" for word in words)]
    for name, kind, run, x in wanted[every]:
        jax.config.update("jax_use_shardy_partitioner", kind != "gspmd")
        events.clear()
        results = jax.tree.map(np.asarray, jax.jit(run)(x))
        digest = hashlib.sha256(b"".join(r.tobytes() for r in jax.tree.leaves(results)))
        hit = "hit" if "cache_hits" in events else "miss"
        found[f"{name} | {kind}"] = [hit, digest.hexdigest()]
    print(json.dumps(found), flush=True)


def forked(folder: str, words: list[str]) -> None:
    for i in (0, 1, 0, 1):
        child = os.fork()
        if not child:
            cache(folder, words, slice(i, None, 2))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("a child failed")


if __name__ == "__main__":
    if sys.argv[1] == "texts":
        texts(int(sys.argv[2]))
    else:
        {"cache": cache, "forked": forked}[sys.argv[1]](sys.argv[2], sys.argv[3:])
