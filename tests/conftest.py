"""Settings of every test run, and the platforms and implementations that tests run on."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# Set before JAX is imported: several CPU devices for meshes, and the CPU beside other platforms.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# Most of the tests' time is compilation of the code around the kernels. Without LLVM's
# optimisations it takes a third less. One module per program and the older of jaxlib 0.10's two
# emitters save a further third. Programs whose values XLA computes are compiled as users' programs
# are (`comparing.OPTIMIZED`). On a GPU host nothing is changed, because the options would change
# GPU programs too.
if not shutil.which("nvidia-smi"):
    faster = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # jaxlib 0.11 has no such option
        faster += "--xla_cpu_use_fusion_emitters=false "
    os.environ["XLA_FLAGS"] = faster + os.environ["XLA_FLAGS"]
if os.environ.get("JAX_PLATFORMS") and "cpu" not in os.environ["JAX_PLATFORMS"].split(","):
    os.environ["JAX_PLATFORMS"] += ",cpu"
os.environ.setdefault(
    "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
)  # pytest-xdist's workers share a GPU

import catalogue
import hypothesis
import jax
import numpy as np
import pytest
from covering import covering

import jax_gradops
from jax_gradops import _registry, clip_tree_by_global_norm
from jax_gradops._fuse import report
from jax_gradops.backward import inplace_clip_by_global_norm

pytest.register_assert_rewrite(
    "comparing", "conformance", "fresh_process", "meshes", "transformations"
)

report.RAISE_ERRORS = True

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "jax_gradops",
    derandomize=True,
    deadline=None,
    max_examples=12,
    database=None,
    # No shrinking: each example must be compiled.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
# `make fuzz`: other examples in each run. The environment variable sets their number.
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=int(os.environ.get("JAX_GRADOPS_FUZZ_EXAMPLES", "500")),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("jax_gradops")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to run without the kernels: the suite would pass without testing them."""
    for row, (what, threads) in catalogue.ROWS.items():
        config.addinivalue_line("markers", f"{row}: {what} ({threads})")
    if "cpu" not in _registry.MODULES:
        raise pytest.UsageError(
            f"the jax_gradops under test ({jax_gradops.__file__}) has no native CPU module: "
            f"{_registry.why_unavailable('cpu')}. Install the package first: `pip install -e .`"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "also run the combinations of parameters that are left out on the CPU"
    parser.addoption("--all-combinations", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the CPU, leaves out combinations of a test's parameters: each pair of values is left.

    `jax_gradops/_kernel` handles transformations and meshes, and all ops share it. So an op meets
    each transformation in one dtype, and other ops meet the transformation in other dtypes.
    Variants meet each value of each parameter of these tests, with the kernels.
    """
    if config.getoption("--all-combinations"):
        return
    groups: dict[Any, list[Any]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and callspec.params.get("platform") != "cuda":
            groups.setdefault((item.cls, item.function), []).append(item)  # type: ignore[attr-defined]
    left_out: set[pytest.Item] = set()
    for (cls, function), group in groups.items():
        strength, chosen = 2, group
        if function.__module__ in ("transformations", "meshes"):
            if cls.variant:
                kernels = [i for i in group if i.callspec.params.get("implementation") != "xla"]
                chosen = kernels or group  # without kernels: the test was asked for by name
            if cls.variant or function.__name__ == "test_transformation":
                strength = 1
        first = zlib.crc32(cls.__name__.encode()) if cls else 0
        places = covering([item.callspec.params for item in chosen], strength, first)
        left_out.update(set(group).difference(chosen[i] for i in places))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Freezes all present objects, so that the garbage collector does not visit them again."""
    gc.freeze()


def pytest_report_header() -> list[str]:
    devices = ", ".join(f"{len(jax.devices(p))} {p}" for p in ("cpu", "gpu") if _present(p))
    modules = ", ".join(str(m.__file__) for m in _registry.MODULES.values())
    return [f"jax {jax.__version__}: {devices}", f"jax_gradops: {modules}"]


def _present(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest):
    """Yields every platform in turn. The test's arrays are made and used on this platform."""
    if request.param == "cuda" and not _present("gpu"):
        pytest.skip("no CUDA device")
    with jax.default_device(jax.devices("gpu" if request.param == "cuda" else "cpu")[0]):
        yield request.param


@pytest.fixture(params=["ffi", "xla"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["float16", "bfloat16", "float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    return jax.numpy.dtype(request.param)


@pytest.fixture(params=["layer_norm", "rms_norm"])
def op(request: pytest.FixtureRequest) -> str:
    """The name of each norm in turn."""
    return request.param


@pytest.fixture(params=["xla", "ffi", "in place"])
def clip(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """clip_tree_by_global_norm with each implementation, and inplace_clip_by_global_norm."""
    if request.param == "in place":
        return functools.partial(inplace_clip_by_global_norm, implementation="ffi")
    return functools.partial(clip_tree_by_global_norm, implementation=request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name, so that tests do not depend on their order."""
    return np.random.default_rng(list(request.node.nodeid.rpartition("::")[2].encode()))


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Sets the dtype promotion that Optax's AdamW needs.

    Several threads compile: it is set in all.
    """
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.fixture
def flax_settings(standard_promotion: None) -> Iterator[None]:
    """Sets the rank promotion that Flax's code needs, and turns TensorFloat-32 off."""
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def as_users_have_it():
    """JAX's default settings, not the strict ones of this suite."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
