"""Tests of ops on arrays that are sharded over several devices: a part of conformance.py."""

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
from transformations import vjp_of


def mesh(
    platform: str,
    kind: AxisType,
    kind_of_model: AxisType | None = None,
    shape: tuple[int, int] | None = None,
) -> Any:
    """A mesh with the axes "data" and "model" over all devices of the platform, at most eight."""
    devices = jax.devices("gpu" if platform == "cuda" else "cpu")
    if len(devices) < 2:
        pytest.skip(f"only one {platform} device")
    shape = (
        shape or {2: (2, 1), 4: (2, 2), 8: (4, 2)}[max(n for n in (2, 4, 8) if n <= len(devices))]
    )
    return jax.make_mesh(
        shape,
        ("data", "model"),
        axis_types=(kind, kind_of_model or kind),
        devices=devices[: shape[0] * shape[1]],
    )


def collectives(compiled: str) -> dict[str, int]:
    """The number of calls of each collective operation in a compiled program."""
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    counts = {n: len(re.findall(rf" {n}(?:-start)?\(", compiled)) for n in names}
    return {name: count for name, count in counts.items() if count}


def largest_gather(compiled: str) -> int:
    """The number of elements of the largest result of an all-gather."""
    types = "".join(re.findall(r"= (.*?) all-gather(?:-start)?\(", compiled))
    shapes = re.findall(r"\w\[([\d,]*)\]", types)
    return max((int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes), default=0)


class MeshTests:
    """Mixed into `OpTests`. XLA's operations are tested only where JAX's types of arrays matter."""

    # The shape of x in these tests. Rows and features are divisible by every mesh axis.
    mesh_shape: tuple[int, ...] = (8, 4, 32)
    # The allowed numbers of all-reduces in forward and backward together, if only rows are sharded.
    # One all-reduce serves all gradients of parameters. No other collective is allowed.
    all_reduces: tuple[int, ...] = (1,)
    # The number of elements of the largest parameter.
    largest_parameter: int = mesh_shape[-1]
    # Whether the op divides features: their mesh axes may then be divided, too.
    divides_features: bool = False

    def placed(self, mesh: Any, spec: Any, example: Any) -> list[Any]:
        """Puts dy and x on the mesh with `spec`, and parameters on every device."""
        specs = [spec if np.ndim(a) == len(self.mesh_shape) else P() for a in example]
        return [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(example, specs, strict=True)
        ]

    @pytest.mark.R5
    @pytest.mark.parametrize(
        "spec",
        [P("data"), P(("data", "model")), P("data", "model"), P("model", None), P(None, "data")],
        ids=str,
    )
    def test_rows_spread(self, platform, spec, rng):
        """Equals the unsharded result. With the kernels, only partial sums are sent."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        arrays = self.placed(devices, spec, example)
        compiled = jax.jit(self.value_and_vjp("ffi")).lower(*arrays).compile()
        self.check(results := compiled(*arrays), example, str(spec))
        found = collectives(compiled.as_text())
        count = found.pop("all-reduce", 0)
        assert count <= max(self.all_reduces) and not found
        if devices.shape["model"] > 1:
            assert count in self.all_reduces
            if self.output_shape((1,)):
                assert results[0].sharding.is_equivalent_to(arrays[1].sharding, 3)
            assert results[1].sharding.is_equivalent_to(arrays[1].sharding, 3)

    @pytest.mark.parametrize(
        "spec",
        [P(None, None, "model"), P("data", None, "model"), P(None, None, ("data", "model"))],
        ids=str,
    )
    def test_features_spread(self, platform, spec, rng):
        """Features are sharded. In some cases the shardings of x and dy differ."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        arrays = self.placed(devices, spec, example)
        self.check(jax.jit(self.value_and_vjp("ffi"))(*arrays), example, str(spec))
        if self.divides_features and spec[-1] == ("data", "model") and jax.__version__ >= "0.12":
            # XLA has to move a part of "data" to another axis of the array. For this, jaxlib 0.12.0
            # aborts the process ("Adjacent axes in dimension sharding can be merged"), in programs
            # without this library, too.
            return
        if np.ndim(example[0]):
            arrays[0] = jax.device_put(example[0], NamedSharding(devices, P("model", "data")))
        self.check(jax.jit(self.value_and_vjp("ffi"))(*arrays), example, "dy elsewhere")

    @pytest.mark.parametrize(
        ("spec", "cut"),
        [
            (P("data"), lambda a: a[:5]),
            (P("data"), lambda a: np.pad(a, ((0, 1), (0, 0), (0, 0)))),
            (P(None, "data"), lambda a: a[:, :-1]),
            (P("data", "model"), lambda a: a[:, :-1]),
        ],
        ids=["five of eight", "one more", "the second axis", "both axes"],
    )
    def test_rows_spread_unequally(self, platform, spec, cut, rng):
        """XLA pads the last shards. Sums must not contain the padding."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        f = self.value_and_vjp("ffi")
        is_x = [np.ndim(a) == 3 for a in example]

        def of_parts(*arrays: Any) -> Any:
            return f(*(cut_here(a) if cut else a for a, cut in zip(arrays, is_x, strict=True)))

        def cut_here(a: Any) -> Any:
            if cut(np.zeros(self.mesh_shape)).shape[0] > self.mesh_shape[0]:
                return jnp.pad(a, ((0, 1), (0, 0), (0, 0)))
            return cut(a)

        results = jax.jit(of_parts)(*self.placed(devices, spec, example))
        cut_example = [cut(a) if c else a for a, c in zip(example, is_x, strict=True)]
        self.check(results, cut_example, f"{spec}")

    def test_parameters_spread(self, platform, rng):
        """As in FSDP: parameters are gathered, x and dy are not."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        placed = self.placed(devices, P("data"), example)
        spread = NamedSharding(devices, P("data"))
        arrays = [*placed[:2], *(jax.device_put(a, spread) for a in placed[2:])]
        f = self.value_and_vjp("ffi")

        def with_spread_gradients(*arrays: Any) -> Any:
            y, dx, *gradients = f(*arrays)
            return y, dx, *(jax.lax.with_sharding_constraint(g, spread) for g in gradients)

        compiled = jax.jit(with_spread_gradients).lower(*arrays).compile()
        self.check(compiled(*arrays), example, "parameters spread")
        assert largest_gather(compiled.as_text()) <= self.largest_parameter

    def test_half_an_axis(self, platform, rng):
        """A reshape shards the rows over a part of a mesh axis."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, (2, 16, 32), jnp.float32)
        flat = [a.reshape(32, -1) if np.ndim(a) == 3 else a for a in example]
        specs = [P("data") if np.ndim(a) == 2 else P() for a in flat]
        arrays = [
            jax.device_put(a, NamedSharding(devices, s)) for a, s in zip(flat, specs, strict=True)
        ]

        def f(*arrays: Any) -> Any:
            return self.value_and_vjp("ffi")(
                *(a.reshape(2, 16, -1) if a.ndim == 2 else a for a in arrays)
            )

        self.check(jax.jit(f)(*arrays), example, "half an axis")

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (AxisType.Auto, {}),
            (AxisType.Auto, {"spmd_axis_name": "data"}),
            (AxisType.Explicit, {}),
            ((AxisType.Explicit, AxisType.Auto), {}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("implementation", [None, "xla"])
    def test_vmap_spread(self, platform, implementation, kind, options, rng):
        """vmap over a sharded axis. Parameters are not mapped."""
        devices = mesh(platform, *(kind if isinstance(kind, tuple) else (kind,)))
        examples = [self.example(rng, (4, 32), jnp.float32) for _ in range(8)]
        parameters = examples[0][2:]
        dy, x = (np.stack([e[i] for e in examples]) for i in range(2))
        f = self.value_and_vjp(implementation)
        f = jax.vmap(f, in_axes=(0, 0, *[None] * len(parameters)), **options)
        with jax.set_mesh(devices):
            arrays = [jax.device_put(a, NamedSharding(devices, P("data"))) for a in (dy, x)]
            arrays += self.placed(devices, P(), parameters)
            compiled = jax.jit(f).lower(*arrays).compile()
            results = list(map(np.asarray, compiled(*arrays)))
        for i in range(8):
            self.check([r[i] for r in results], [dy[i], x[i], *parameters], f"slice {i}")
        if implementation is None:
            assert "jax_gradops." in compiled.as_text() and not collectives(compiled.as_text())

    @pytest.mark.parametrize(
        "spec",
        [P("data"), P("data", "model"), P(("data", "model")), P("data", None, "model")],
        ids=str,
    )
    @pytest.mark.parametrize("model", [AxisType.Explicit, AxisType.Auto], ids=str)
    def test_explicit_mesh(self, platform, spec, model, rng):
        """All axes are Explicit, or one of them is Auto."""
        devices = mesh(platform, AxisType.Explicit, model)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        with jax.set_mesh(devices):
            arrays = self.placed(devices, spec, example)
            compiled = jax.jit(self.value_and_vjp("ffi")).lower(*arrays).compile()
            results = compiled(*arrays)
        self.check(results, example, f"explicit {spec}")
        if len(spec) < 3:
            assert set(collectives(compiled.as_text())) <= {"all-reduce"}
        if model == AxisType.Auto:
            return
        with jax.set_mesh(devices):
            forward = jax.jit(functools.partial(self.op, implementation="ffi"))(*arrays[1:])
        assert_matches(
            forward, self.expected(*example)[0], forward.dtype, jnp.float32, "forward alone"
        )
        if self.output_shape((1,)):
            assert forward.sharding.is_equivalent_to(arrays[0].sharding, 3)  # as dy's

    @pytest.mark.parametrize("implementation", [None, "xla"])
    def test_explicit_mesh_that_is_not_set(self, platform, implementation, rng):
        """`jax.make_mesh` makes Explicit axes. JAX does not require that the mesh is set."""
        devices = mesh(platform, AxisType.Explicit)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        arrays = self.placed(devices, P("data", None, "model"), example)
        f = self.value_and_vjp(implementation)
        self.check(f(*arrays), example, "eager")
        self.check(jax.jit(f)(*arrays), example, "jit")

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_second_order_spread(self, platform, kind, rng):
        """A Hessian-vector product on a mesh equals the product on one device."""
        devices = mesh(platform, kind)
        example = self.example(rng, self.mesh_shape, jnp.float64)
        direction = self.example(rng, self.mesh_shape, jnp.float64)

        def product(example: Any, direction: Any) -> Any:
            return jax.jvp(self.value_and_vjp("ffi"), tuple(example), tuple(direction))[1]

        expected = jax.jit(product)(example, direction)
        with jax.set_mesh(devices):
            spread = [self.placed(devices, P("data", "model"), e) for e in (example, direction)]
            results = jax.jit(product)(*spread)
        for actual, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=1e-9, atol=1e-9)


class RowMeshTests:
    """Mixed into `RowOpTests`: inside shard_map, each device has its own rows."""

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("implementation", [None, "xla"])
    def test_shard_map(self, platform, implementation, check_vma, rng):
        """The gradient of a shard_map. Rows are sharded, parameters are replicated."""
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
    def test_gradient_inside_shard_map(self, platform, check_vma, rng):
        """With check_vma, a replicated parameter's gradient is the sum over devices."""
        devices = mesh(platform, AxisType.Auto)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        spec = P("data", "model")

        def local(dy: Any, *operands: Any) -> Any:
            y, dx, *grads = self.value_and_vjp("ffi")(dy, *operands)
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

    @pytest.mark.parametrize("manual", ["data", "model", "pipe"])
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_three_axes(self, platform, kind, manual, rng):
        """One axis is Manual. Two axes are Auto or Explicit, and one of them shards rows."""
        names = ("data", "model", "pipe")
        devices = jax.devices("gpu" if platform == "cuda" else "cpu")[:8]
        if len(devices) < 8:
            pytest.skip(f"fewer than eight {platform} devices")
        cube = jax.make_mesh((2, 2, 2), names, axis_types=(kind,) * 3, devices=devices)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        mapped = jax.shard_map(
            functools.partial(self.op, implementation=None),
            mesh=cube,
            in_specs=(P(manual), *[P()] * self.parameters),
            out_specs=P(manual),
            axis_names={manual},
        )
        specs = []
        for other in (n for n in names if n != manual):
            specs += [P(manual, other), P((manual, other))]
            if kind == AxisType.Auto:  # then dy need not be sharded as y is
                specs.append(P(other, manual))
        with jax.set_mesh(cube):
            layouts = [self.placed(cube, spec, example) for spec in specs]
            results = jax.jit(lambda layouts: [vjp_of(mapped)(*a) for a in layouts])(layouts)
        for result, spec in zip(results, specs, strict=True):
            self.check(result, example, f"{manual} {spec}")

    def test_partial_manual_beside_one_device(self, platform, rng):
        """The axis that is not Manual has size 1. Nothing must be partitioned."""
        devices = mesh(platform, AxisType.Auto, shape=(2, 1))
        example = self.example(rng, self.mesh_shape, jnp.float32)
        mapped = jax.shard_map(
            functools.partial(self.op, implementation="ffi"),
            mesh=devices,
            in_specs=(P("data"), *[P()] * self.parameters),
            out_specs=P("data"),
            axis_names={"data"},
        )
        self.check(jax.jit(vjp_of(mapped))(*example), example, "partial manual")

    @pytest.mark.parametrize("inside", [False, True], ids=["grad outside", "grad inside"])
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_partial_manual(self, platform, kind, check_vma, inside, rng):
        """shard_map over one axis of the mesh. The other axis shards rows too."""
        devices = mesh(platform, kind)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        f = self.value_and_vjp("ffi")
        parameters = [P()] * self.parameters

        def local(dy: Any, *operands: Any) -> Any:
            y, dx, *gradients = f(dy, *operands)
            if not check_vma:
                gradients = jax.lax.psum(gradients, "data") if gradients else gradients
            return (y, dx, *gradients)

        shard_map = functools.partial(
            jax.shard_map, mesh=devices, axis_names={"data"}, check_vma=check_vma
        )
        op = functools.partial(self.op, implementation="ffi")
        if inside:
            both = (P("data"), P("data"), *parameters)
            mapped = shard_map(local, in_specs=both, out_specs=both)
        else:
            mapped = vjp_of(shard_map(op, in_specs=(P("data"), *parameters), out_specs=P("data")))
        with jax.set_mesh(devices):
            arrays = self.placed(devices, P("data", "model"), example)
            compiled = jax.jit(mapped).lower(*arrays).compile()
            self.check(compiled(*arrays), example, "partial manual")
        assert 'custom_call_target="jax_gradops.' in compiled.as_text()
        if kind == AxisType.Auto:  # on an Explicit mesh, jax 0.10's shard_map gathers arrays itself
            assert set(collectives(compiled.as_text())) <= {"all-reduce"}

    def test_pmap(self, platform, rng):
        devices = mesh(platform, AxisType.Auto).devices.ravel()
        examples = [self.example(rng, (4, 9), jnp.float32) for _ in devices]
        stacked = list(map(np.stack, zip(*examples, strict=True)))
        f = jax.pmap(self.value_and_vjp("ffi"), devices=list(devices))
        results = list(map(np.asarray, f(*stacked)))
        for i, example in enumerate(examples):
            self.check([r[i] for r in results], example, f"device {i}")
