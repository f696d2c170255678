"""One of the processes of test_processes.py: python process.py PORT PROCESSES ID DEVICES.

All processes run this program in step. Each has some devices of one mesh. The program needs no GPU
and no other host: processes use the loopback interface.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from typing import Any

import jax

PORT, PROCESSES, ID, DEVICES = map(int, sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, ID)

import jax.numpy as jnp
import numpy as np
from conformance import OpTests
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives
from test_bias_gelu import TestBiasGelu, TestGelu
from test_global_norm import TestClip, TestGlobalNorm
from test_layer_norm import TestLayerNorm, TestRmsNorm
from transformations import vjp_of

SPECS = P("data"), P(("data", "model")), P("data", "model"), P("data", None, "model")


def whole(arrays: Any) -> Any:
    """NumPy arrays that hold the parts of all processes."""
    return multihost_utils.process_allgather(arrays, tiled=True)


def check(tests: OpTests, kind: AxisType, spec: P) -> None:
    """Checks an op and its gradient on arrays that are spread over all processes."""
    mesh = jax.make_mesh((DEVICES, PROCESSES), ("data", "model"), axis_types=(kind,) * 2)
    example = tests.example(np.random.default_rng(0), tests.mesh_shape, jnp.float32)
    with jax.set_mesh(mesh):
        arrays = tests.placed(mesh, spec, example)
        compiled = jax.jit(tests.value_and_vjp("ffi")).lower(*arrays).compile()
        results = whole(compiled(*arrays))
    what = f"{type(tests).__name__}, {kind}, {spec}"
    tests.check(results, example, what)
    if len(spec) < 3:
        found = collectives(compiled.as_text())
        assert set(found) <= {"all-reduce"}, f"{what}: {found}"


def check_shard_map(tests: OpTests) -> None:
    """Each device has its own rows. In some cases one axis of the mesh stays automatic."""
    mesh = jax.make_mesh((DEVICES, PROCESSES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    example = tests.example(np.random.default_rng(0), tests.mesh_shape, jnp.float32)
    for axes in ({"data", "model"}, {"data"}, {"model"}):
        spec = P(tuple(sorted(axes)))
        f = vjp_of(
            jax.shard_map(
                functools.partial(tests.op, implementation="ffi"),
                mesh=mesh,
                in_specs=(spec, *[P()] * tests.parameters),
                out_specs=spec,
                axis_names=axes,
            )
        )
        arrays = tests.placed(mesh, P(("data", "model")), example)
        tests.check(whole(jax.jit(f)(*arrays)), example, f"shard_map over {axes}")


def check_training() -> None:
    """Five steps of the demo, data parallel or FSDP, equal the steps on one device."""
    from jax_gradops._tools.demo import meshes, settings, text
    from jax_gradops._tools.demo.program import Program

    jax.config.update("jax_enable_x64", False)
    corpus = text.load_corpus(None, 16)
    small = {"steps": 5, "width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 8}
    given = settings.new_run(small, "cpu")
    devices = meshes.make_mesh({"data": PROCESSES, "fsdp": DEVICES}, given.batch, "cpu")

    def losses(mesh: Any) -> list[float]:
        program = Program(given, corpus, "ffi", mesh=mesh)
        state, found = program.initial_state(), []
        for _ in range(given.steps):
            state, metrics = program.train_step(state)
            found.append(float(metrics.loss))
        return found

    np.testing.assert_allclose(losses(devices), losses(None), rtol=1e-5)


def main() -> None:
    for op_tests in (TestLayerNorm, TestRmsNorm, TestBiasGelu, TestGelu, TestGlobalNorm, TestClip):
        for op_spec in SPECS:
            check(op_tests(), AxisType.Auto, op_spec)
        check(op_tests(), AxisType.Explicit, SPECS[0])
    for op_tests in (TestLayerNorm, TestRmsNorm, TestBiasGelu, TestGelu):
        check_shard_map(op_tests())
    check_training()
    print("all passed", flush=True)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # at an ordinary exit, JAX would wait for the other processes
