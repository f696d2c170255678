"""Ops on arrays that are spread over several devices: a part of the suite in conformance.py."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_matches
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh(platform: str, kind: AxisType) -> jax.sharding.Mesh:
    """Of the axes "data" and "model" over all devices of the platform, up to eight."""
    devices = jax.devices("gpu" if platform == "cuda" else "cpu")
    if len(devices) < 2:
        pytest.skip(f"only one {platform} device")
    shape = {2: (2, 1), 4: (2, 2), 8: (4, 2)}[max(n for n in (2, 4, 8) if n <= len(devices))]
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(kind,) * 2, devices=devices[: shape[0] * shape[1]]
    )


def collectives(compiled: str) -> dict[str, int]:
    """How often each collective operation stands in a compiled program."""
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    counts = {n: len(re.findall(rf" {n}(?:-start)?\(", compiled)) for n in names}
    return {name: count for name, count in counts.items() if count}


class MeshTests:
    """Mixed into `OpTests`."""

    # The shape of x in these tests: divisible by every mesh, rows and features.
    mesh_shape: tuple[int, ...] = (8, 4, 32)
    # How many all-reduces there may be, in forward and backward together, when only rows are
    # spread: one, for all gradients of parameters. There is no other collective.
    all_reduces: tuple[int, ...] = (1,)

    def placed(self, mesh: Any, spec: Any, example: Any) -> list[Any]:
        """dy and x laid out by `spec`, parameters on every device."""
        specs = [spec if np.ndim(a) == len(self.mesh_shape) else P() for a in example]
        return [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(example, specs, strict=True)
        ]

    @pytest.mark.parametrize(
        "spec",
        [P("data"), P(("data", "model")), P("data", "model"), P("model", None), P(None, "data")],
        ids=str,
    )
    def test_rows_spread(self, platform, implementation, spec, rng):
        """R5: equal to the unsharded result, and with the kernels only partial sums travel."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        arrays = self.placed(devices, spec, example)
        compiled = jax.jit(self.value_and_vjp(implementation)).lower(*arrays).compile()
        self.check(results := compiled(*arrays), example, str(spec))
        if implementation == "ffi" and devices.shape["model"] > 1:
            found = collectives(compiled.as_text())
            assert found.pop("all-reduce", 0) in self.all_reduces and not found
            if self.output_shape((1,)):
                assert results[0].sharding.is_equivalent_to(arrays[1].sharding, 3)
            assert results[1].sharding.is_equivalent_to(arrays[1].sharding, 3)

    @pytest.mark.parametrize(
        "spec",
        [P(None, None, "model"), P("data", None, "model"), P(None, None, ("data", "model"))],
        ids=str,
    )
    def test_features_spread(self, platform, implementation, spec, rng):
        """Also where x and dy are spread in different ways."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        arrays = self.placed(devices, spec, example)
        self.check(jax.jit(self.value_and_vjp(implementation))(*arrays), example, str(spec))
        if np.ndim(example[0]):
            arrays[0] = jax.device_put(example[0], NamedSharding(devices, P("model", "data")))
        self.check(jax.jit(self.value_and_vjp(implementation))(*arrays), example, "dy elsewhere")

    def test_vmap_spread(self, platform, implementation, rng):
        """vmap over an axis that is spread, parameters not mapped."""
        devices = mesh(platform, AxisType.Auto)
        examples = [self.example(rng, (4, 32), jnp.float32) for _ in range(8)]
        parameters = examples[0][2:]
        dy, x = (np.stack([e[i] for e in examples]) for i in range(2))
        arrays = self.placed(devices, P("data"), [dy, x, *parameters])
        f = jax.vmap(self.value_and_vjp(implementation), in_axes=(0, 0, *[None] * len(parameters)))
        results = jax.jit(f)(*arrays)
        for i in range(8):
            self.check([r[i] for r in results], [dy[i], x[i], *parameters], f"slice {i}")

    @pytest.mark.parametrize("spec", [P("data"), P("data", "model")], ids=str)
    def test_explicit_mesh(self, platform, implementation, spec, rng):
        devices = mesh(platform, AxisType.Explicit)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        with jax.set_mesh(devices):
            arrays = self.placed(devices, spec, example)
            results = jax.jit(self.value_and_vjp(implementation))(*arrays)
            forward = jax.jit(functools.partial(self.op, implementation=implementation))(
                *arrays[1:]
            )
        self.check(results, example, f"explicit {spec}")
        assert_matches(
            forward, self.expected(*example)[0], forward.dtype, jnp.float32, "forward alone"
        )
        if self.output_shape((1,)):
            padded = P(*spec, *[None] * (3 - len(spec)))
            assert forward.sharding.is_equivalent_to(NamedSharding(devices, padded), 3)


class RowMeshTests:
    """Mixed into `RowOpTests`: inside shard_map, each device has rows of its own."""

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_shard_map(self, platform, implementation, check_vma, rng):
        """The gradient of a shard_map: of rows spread, parameters replicated."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        spec = P("data", "model")
        op = functools.partial(self.op, implementation=implementation)
        mapped = jax.shard_map(
            op,
            mesh=devices,
            in_specs=(spec, *[P()] * self.parameters),
            out_specs=spec,
            check_vma=check_vma,
        )

        def f(dy: Any, *operands: Any) -> Any:
            y, pull = jax.vjp(mapped, *operands)
            return (y, *pull(dy))

        self.check(jax.jit(f)(*example), example, "shard_map")

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_gradient_inside_shard_map(self, platform, implementation, check_vma, rng):
        """With check_vma, a replicated parameter's gradient is the sum over devices."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        spec = P("data", "model")

        def local(dy: Any, *operands: Any) -> Any:
            y, dx, *grads = self.value_and_vjp(implementation)(dy, *operands)
            if not check_vma:
                grads = jax.lax.psum(grads, ("data", "model")) if grads else grads
            return (y, dx, *grads)

        mapped = jax.shard_map(
            local,
            mesh=devices,
            in_specs=(spec, spec, *[P()] * self.parameters),
            out_specs=(spec, spec, *[P()] * self.parameters),
            check_vma=check_vma,
        )
        self.check(jax.jit(mapped)(*example), example, "inside shard_map")
