"""The demo on many devices: data parallelism, and parameters spread over devices as in FSDP."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_gradops._tools.demo.settings import DemoError

#: Examples are sharded over both axes. Parameters and optimizer state are sharded over "fsdp".
AXES = ("data", "fsdp")


def parse(text: str) -> dict[str, int]:
    """Parses ``data=4,fsdp=2`` to the sizes of `AXES`; an axis that is left out has size 1."""
    sizes: dict[str, int] = {axis: 1 for axis in AXES}
    parts = [part.partition("=") for part in text.split(",")]
    for name, _, size in parts:
        repeated = [n for n, _, _ in parts].count(name) > 1
        if name not in AXES or repeated or not size.isdecimal() or int(size) < 1:
            raise DemoError(f"--mesh must be such as data=4, fsdp=2 or data=2,fsdp=4; got {text!r}")
        sizes[name] = int(size)
    return sizes


def prepare_devices(sizes: dict[str, int]) -> None:
    """Gives the CPU the number of devices that the mesh needs, if JAX has not started yet."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))


def make_mesh(sizes: dict[str, int], batch: int, platform: str) -> Mesh:
    """Makes a mesh over the first devices of the platform."""
    devices, needed = jax.devices(platform), math.prod(sizes.values())
    if needed > len(devices):
        raise DemoError(f"--mesh needs {needed} {platform} devices, JAX finds {len(devices)}")
    if batch % needed:
        raise DemoError(f"--batch must be a multiple of the mesh's {needed} devices, got {batch}")
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=devices[:needed],
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds completely."""
    return NamedSharding(mesh, P())


def of_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first axis is the axis of examples."""
    return NamedSharding(mesh, P(AXES))


def of_state(mesh: Mesh, tree: Any) -> Any:
    """Shards each array over the ``fsdp`` axis, along its longest axis that can be divided."""

    def spread(array: Any) -> NamedSharding:
        size = mesh.shape["fsdp"]
        axes = [i for i, n in enumerate(array.shape) if n % size == 0 and n > 1]
        if not axes or array.ndim < 2:  # vectors are small: each device holds all of them
            return replicated(mesh)
        longest = max(axes, key=lambda i: array.shape[i])
        return NamedSharding(mesh, P(*[None] * longest, "fsdp"))

    return jax.tree.map(spread, tree)
