"""Handlers refuse calls that Python would refuse, and name the operand.

These tests call handlers through JAX, so also on GPUs, with operands that do not fit together.
`test_native.py` tests each operand's shape, dtype and memory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from signatures import Good, good

from jax_gradops import _registry
from jax_gradops._kernel.trees import TreeKernel
from jax_gradops._ops.all import SPECS
from jax_gradops._tools import testing


def full(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def scratch(*shape: int) -> np.ndarray:
    return full(*shape, dtype=np.uint32)


ROWS, PARAMETER, STAT, NOTHING = full(3, 4), full(4), full(3), full(0)
HALF = full(4, dtype=np.float16)
IMAGES = full(3, 4, 2)  # channels first: 3 images with 4 channels and 2 points

DECLARED: dict[str, dict[str, Any]] = {
    name: signature
    for modules in (_registry.MODULES, testing.MODULES)
    if "cpu" in modules
    for name, signature in modules["cpu"].signatures().items()
}
GOOD = {name: good(signature) for name, signature in DECLARED.items() if name != "device_clock"}
if "device_copy" in GOOD:  # a release has no handlers of the benchmark
    GOOD["device_clock"] = Good({}, {"ns": full(2, dtype=np.uint32)}, {"wait_ms": np.float64(0)})
    GOOD["device_copy"] = GOOD["device_copy"]._replace(attributes={})


def call(target: str, **changes: Any) -> Any:
    """Runs a handler. Named operands, results and attributes are replaced."""
    if target not in GOOD:
        pytest.skip("needs the modules for tests")
    operands, results, attributes = (
        {name: changes.pop(name.replace(" ", "_"), value) for name, value in values.items()}
        for values in GOOD[target]
    )
    assert not changes, "a name that the handler does not have"
    types = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results.values()]
    function = jax.ffi.ffi_call(_registry.TARGET_PREFIX + target, types)
    run = jax.jit(lambda *operands: function(*operands, **attributes))
    return jax.block_until_ready(run(*operands.values()))


@pytest.mark.parametrize("platform", _registry.MODULES)
def test_declarations(platform: str) -> None:
    """Python's kernels and the native declarations say the same."""
    kernels = {k.name: k for op in SPECS.values() for k in op.kernels}
    declared = _registry.MODULES[platform].signatures()
    assert declared.keys() == kernels.keys() == _registry.MODULES[platform].registrations().keys()
    assert declared == _registry.MODULES["cpu"].signatures()
    for name, signature in declared.items():
        kernel = kernels[name]
        if isinstance(kernel, TreeKernel):
            assert signature["variadic"], name
            assert [a["name"] for a in signature["operands"][1:]] == list(kernel.scalars), name
            sums = [a["name"] for a in signature["results"] if a["axes"] != "n"]
            assert sums == list(kernel.sums), name
            assert signature["workspace"] == (kernel.workspace is not None), name
            continue
        assert not signature["variadic"], name
        of_kernel = dict(kernel.operands) | {n: r.dims for n, r in kernel.results.items()}
        arrays = signature["operands"] + signature["results"]
        assert {a["name"]: a["axes"] for a in arrays} == {
            n: axes.replace(kernel.features, "d") for n, axes in of_kernel.items()
        }, name
        for result in signature["results"]:
            # A sum over rows may have the dtype of a parameter.
            dtype = kernel.results[result["name"]].dtype
            may_have = {"x": {"x"}, "accum": {"accum", "any float"}}[dtype]
            assert result["dtype"] in may_have, (name, result)
            in_place_of = kernel.in_place.get(result["name"], result["in_place_of"])
            assert result["in_place_of"] == in_place_of, (name, result)
        assert signature["workspace"] == (kernel.workspace is not None), name


@pytest.mark.P3
@pytest.mark.parametrize("target", GOOD)
def test_good(platform, target):
    """The valid calls work. Otherwise the errors below would prove nothing."""
    call(target)


@pytest.mark.M9
@pytest.mark.M10
@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("row_norm_fwd", {"x": full(3, 4, dtype=np.int32)}, "x"),
        ("row_norm_fwd", {"bias": full(4, dtype=np.int32)}, "bias.*float16, bfloat16"),
        ("row_norm_fwd", {"bias": full(0, dtype=np.float64)}, "bias"),
        ("row_norm_fwd", {"bias": full(0, 4)}, "bias"),
        ("row_norm_fwd", {"epsilon": np.float64(-1)}, "epsilon"),
        ("row_norm_fwd", {"scale_offset": np.float64("nan")}, "scale_offset must be finite"),
        ("row_norm_fwd", {"sum": NOTHING}, "residual and sum must be both"),
        ("row_norm_fwd", {"residual": NOTHING}, "residual and sum must be both"),
        ("row_norm_fwd", {"residual": NOTHING, "sum": NOTHING}, "residual_bias.*residual"),
        ("row_norm_fwd", {"residual_bias": full(3)}, "residual_bias"),
        ("row_norm_fwd", {"mean": NOTHING}, "mean and rstd must be both"),
        ("row_norm_fwd", {"centered": False}, "mean and centered.*got float32.* and false"),
        ("row_norm_fwd", {"centered": False, "mean": NOTHING}, "bias and centered must be"),
        ("row_norm_fwd", {"group_rank": np.int64(3)}, "group_rank"),
        ("row_norm_bwd", {"dscale": full(0, 4)}, "dscale"),
        ("row_norm_bwd", {"dbias": full(0, dtype=np.float64)}, "dbias"),
        ("row_norm_bwd", {"workspace": scratch(0)}, "workspace"),
        ("row_norm_bwd", {"workspace": full(1, 1, 3, 4)}, "workspace.*uint32.*got float32"),
        ("row_norm_bwd", {"workspace": scratch(1, 1, 2, 4)}, "workspace"),
        ("row_norm_bwd", {"dresidual_bias": NOTHING}, "workspace"),
        ("row_norm_bwd", {"mean": STAT}, "mean and from_output must be one there"),
        ("row_norm_bwd", {"from_output": False}, "mean and from_output must be one there"),
        (
            "row_norm_bwd",
            {"from_output": False, "mean": STAT},
            "bias and from_output must be the latter there",
        ),
        ("row_norm_bwd", {"centered": False}, "bias and centered must be the latter there"),
        ("row_norm_bwd", {"centered": False, "bias": NOTHING}, "dbias and centered must be"),
        ("row_norm_bwd", {"rstd": full(4)}, "rstd"),
        ("bias_gelu_fwd", {"bias": full(4, dtype=np.float16)}, "bias.*accumulation dtype"),
        ("bias_gelu_bwd", {"dbias": full(4, 0)}, "dbias"),
        ("batch_norm_fwd", {"scale": full(3)}, r"scale must have x's group axes and axis 1"),
        ("batch_norm_fwd", {"group_rank": np.int64(2)}, "inner_rank must be in"),
        ("batch_norm_fwd", {"delta": PARAMETER}, "delta and mean must be the latter there"),
        ("batch_norm_fwd", {"mean": PARAMETER}, "mean and rstd must be both"),
        ("batch_norm_fwd", {"mean": PARAMETER, "rstd": PARAMETER}, "mean and batch_mean must be"),
        ("batch_norm_fwd", {"batch_variance": NOTHING}, "batch_mean and batch_variance must be"),
        ("batch_norm_fwd", {"workspace": scratch(1, 1, 2, 4)}, "workspace"),
        (
            "group_norm_fwd",
            {"batch_mean": full(3)},
            "batch_mean must have a last axis that divides",
        ),
        (
            "group_norm_fwd",
            {"batch_rstd": full(4)},
            "batch_rstd must have .* one of size 2, as batch_mean has",
        ),
        ("group_norm_fwd", {"scale": full(2)}, "scale must have x's group axes and axis 1"),
        ("group_norm_bwd", {"mean": full()}, "mean must have a last axis that divides x's axis 1"),
        (
            "group_norm_bwd",
            {"mean": full(1, 2)},
            "mean must have x's group axes and one of size 2,",
        ),
        ("batch_norm_bwd", {"mean": NOTHING}, "mean"),
        ("batch_norm_bwd", {"mean_dz": NOTHING}, "mean_dz and mean_dz_x_hat must be both"),
        ("batch_norm_bwd", {"dscale": HALF}, "dscale and mean_dz must be one there"),
        (
            "batch_norm_bwd",
            {"mean_dz": NOTHING, "mean_dz_x_hat": NOTHING},
            "dscale and mean_dz must be one there",
        ),
        ("batch_norm_bwd", {"dx": NOTHING}, "dresidual and dx must be the latter there"),
        ("sum_of_squares", {"leaf_1": full(3, dtype=np.float64)}, "float64"),
        ("sum_of_squares", {"workspace": scratch(0)}, "workspace"),
        ("sum_of_squares", {"huge": full(2)}, "group_rank|results"),
        ("sum_of_squares", {"group_rank": np.int64(1)}, "group_rank"),
        ("scale", {"leaf_0": full(4)}, "leaf 0 must have its result's shape"),
        ("scale", {"scaled_0": full(3, dtype=np.float64)}, "leaf 0 must have its result's"),
        ("scale", {"factor": full(2)}, "group_rank must be the rank of factor"),
        (
            "scale",
            {"factor": full(2), "second_factor": full(2), "group_rank": np.int64(1)},
            "leaf 0 must start",
        ),
        ("scale", {"second_factor": full(dtype=np.float64)}, "second_factor must have factor's"),
        ("scale", {"second_factor": full(2)}, "second_factor must have factor's"),
        ("device_clock", {"ns": full(2)}, r"ns must be uint32\[2\]; got float32"),
        ("device_clock", {"ns": full(1, dtype=np.uint32)}, r"ns must be uint32\[2\]"),
        ("device_clock", {"wait_ms": np.float64(-1)}, "wait_ms must be 0 to 1000 ms"),
        ("device_clock", {"wait_ms": np.float64(1001)}, "0 to 1000 ms; got 1001"),
        ("device_copy", {"x": full(3, 4, dtype=np.int32)}, "x must be float16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_malformed(platform, target, changes, message):
    """A malformed call gives an error, not a crash. The process continues."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{target}.*{message}"):
        call(target, **changes)
    call(target)


def test_scale_out_of_place(platform):
    """Results have their own memory. A factor may be 1."""
    for first, second in ((0.5, 1.0), (1.0, 1.0), (1.0, 0.25), (0.5, 2.0)):
        factors = {"factor": first, "second_factor": second}
        results = call("scale", **{k: np.float32(v).reshape(()) for k, v in factors.items()})
        for result, operand in zip(results, (full(3), full(2, 2)), strict=True):
            np.testing.assert_array_equal(result, operand * first * second)


def test_scale_without_enough_results(platform):
    """The handler checks the number of results."""
    types = [jax.ShapeDtypeStruct((3,), np.float32)]
    function = jax.ffi.ffi_call(_registry.TARGET_PREFIX + "scale", types)
    with pytest.raises(jax.errors.JaxRuntimeError, match="scale: must have a result for each"):
        jax.block_until_ready(jax.jit(lambda *a: function(*a, group_rank=np.int64(0)))(full(3)))


def test_wrong_attribute_type(platform):
    """XLA decodes attributes strictly. Ops therefore convert the numbers that they pass."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?s)row_norm_fwd.*F64 but got F32"):
        call("row_norm_fwd", epsilon=np.float32(1e-6))
