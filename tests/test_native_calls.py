"""Handlers refuse calls that Python would refuse, and name the operand.

These tests call handlers through JAX, so also on GPUs, with operands that do not fit together.
`test_native.py` tests each operand's shape, dtype and memory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_gradops import _registry


def full(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def scratch(*shape: int) -> np.ndarray:
    return full(*shape, dtype=np.uint32)


ROWS, PARAMETER, STAT, NOTHING = full(3, 4), full(4), full(3), full(0)
HALF = full(4, dtype=np.float16)
GROUPS = {"group_rank": np.int64(0)}
# Channels first: 2 images with 4 channels and 3 points.
IMAGES = full(2, 4, 3)
BATCH_NORM = GROUPS | {"inner_rank": np.int64(1), "relu": False}
OFFSET, EPSILON = {"scale_offset": np.float64(1)}, {"epsilon": np.float64(1e-6)}

# A valid call of each handler: its operands, its results (only their types are used), and its
# attributes.
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "layer_norm_fwd": (
        {
            "x": ROWS,
            "residual": NOTHING,
            "residual_bias": NOTHING,
            "scale": PARAMETER,
            "bias": NOTHING,
        },
        {"y": ROWS, "sum": NOTHING, "mean": STAT, "rstd": STAT},
        GROUPS | OFFSET | EPSILON,
    ),
    "layer_norm_bwd": (
        {"dy": ROWS, "x": ROWS, "dsum": ROWS, "scale": NOTHING, "mean": STAT, "rstd": STAT},
        {
            "dx": ROWS,
            "dscale": PARAMETER,
            "dbias": PARAMETER,
            "dresidual_bias": HALF,
            "workspace": scratch(1, 1, 3, 4),
        },
        GROUPS | OFFSET | EPSILON,
    ),
    "layer_norm_bwd_from_output": (
        {"dy": ROWS, "y": ROWS, "dsum": NOTHING, "scale": HALF, "bias": PARAMETER, "rstd": STAT},
        {
            "dx": ROWS,
            "dscale": HALF,
            "dbias": PARAMETER,
            "dresidual_bias": NOTHING,
            "workspace": scratch(1, 1, 2, 4),
        },
        GROUPS | OFFSET,
    ),
    "rms_norm_fwd": (
        {"x": ROWS, "residual": ROWS, "residual_bias": HALF, "scale": PARAMETER},
        {"y": ROWS, "sum": ROWS, "rstd": STAT},
        GROUPS | OFFSET | EPSILON,
    ),
    "rms_norm_bwd": (
        {"dy": ROWS, "x": ROWS, "dsum": NOTHING, "scale": PARAMETER, "rstd": STAT},
        {
            "dx": ROWS,
            "dscale": PARAMETER,
            "dresidual_bias": NOTHING,
            "workspace": scratch(1, 1, 1, 4),
        },
        GROUPS | OFFSET,
    ),
    "rms_norm_bwd_from_output": (
        {"dy": ROWS, "y": ROWS, "dsum": ROWS, "scale": PARAMETER, "rstd": STAT},
        {"dx": ROWS, "dscale": NOTHING, "dresidual_bias": NOTHING, "workspace": scratch(0)},
        GROUPS | OFFSET,
    ),
    "bias_gelu_fwd": (
        {"x": ROWS, "bias": PARAMETER},
        {"y": ROWS},
        GROUPS | {"approximate": True},
    ),
    "bias_gelu_bwd": (
        {"dy": ROWS, "x": ROWS, "bias": NOTHING},
        {"dx": ROWS, "dbias": PARAMETER, "workspace": scratch(1, 1, 1, 4)},
        GROUPS | {"approximate": False},
    ),
    "batch_norm_fwd": (
        {
            "x": IMAGES,
            "residual": NOTHING,
            "scale": HALF,
            "bias": NOTHING,
            "mean": NOTHING,
            "rstd": NOTHING,
            "delta": NOTHING,
        },
        {
            "y": IMAGES,
            "batch_mean": PARAMETER,
            "batch_variance": PARAMETER,
            "batch_rstd": PARAMETER,
            "batch_delta": PARAMETER,
            "workspace": scratch(1, 1, 4, 4),
        },
        BATCH_NORM | EPSILON,
    ),
    "batch_norm_bwd": (
        {
            "dy": IMAGES,
            "x": IMAGES,
            "y": NOTHING,
            "scale": PARAMETER,
            "bias": NOTHING,
            "mean": PARAMETER,
            "rstd": PARAMETER,
            "delta": NOTHING,
            "mean_dz": NOTHING,
            "mean_dz_x_hat": NOTHING,
        },
        {
            "dx": IMAGES,
            "dresidual": NOTHING,
            "dscale": HALF,
            "dbias": PARAMETER,
            "workspace": scratch(1, 1, 2, 4),
        },
        BATCH_NORM,
    ),
    "device_clock": ({}, {"ns": full(2, dtype=np.uint32)}, {}),
    "device_copy": ({"x": ROWS}, {"y": ROWS}, {}),
    "sum_of_squares": (
        {"leaf 0": full(3), "leaf 1": full(2, 2)},
        {"huge": full(), "normal": full(), "tiny": full(), "workspace": scratch(2048, 2)},
        GROUPS,
    ),
    # The results of "scale" need not take over its operands.
    "scale": (
        {
            "leaf 0": full(3),
            "leaf 1": full(2, 2, dtype=np.float16),
            "factor": full(),
            "second_factor": full(),
        },
        {"scaled 0": full(3), "scaled 1": full(2, 2, dtype=np.float16)},
        GROUPS,
    ),
}


def call(target: str, **changes: Any) -> Any:
    """Runs a handler. Named operands, results and attributes are replaced."""
    operands, results, attributes = (
        {name: changes.pop(name.replace(" ", "_"), value) for name, value in values.items()}
        for values in GOOD[target]
    )
    assert not changes, "a name that the handler does not have"
    types = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results.values()]
    function = jax.ffi.ffi_call(_registry.TARGET_PREFIX + target, types)
    run = jax.jit(lambda *operands: function(*operands, **attributes))
    return jax.block_until_ready(run(*operands.values()))


def test_every_handler_is_called(platform):
    assert _registry.MODULES[platform].registrations().keys() == GOOD.keys()


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
        ("layer_norm_fwd", {"x": full(3, 4, dtype=np.int32)}, "x"),
        ("layer_norm_fwd", {"bias": full(4, dtype=np.int32)}, "bias.*float16, bfloat16"),
        ("layer_norm_fwd", {"bias": full(0, dtype=np.float64)}, "bias"),
        ("layer_norm_fwd", {"bias": full(0, 4)}, "bias"),
        ("layer_norm_fwd", {"epsilon": np.float64(-1)}, "epsilon"),
        ("layer_norm_fwd", {"residual": ROWS}, "residual and sum must be both"),
        ("layer_norm_fwd", {"sum": ROWS}, "residual and sum must be both"),
        ("layer_norm_fwd", {"group_rank": np.int64(3)}, "group_rank"),
        ("layer_norm_bwd", {"dscale": full(0, 4)}, "dscale"),
        ("layer_norm_bwd", {"dbias": full(0, dtype=np.float64)}, "dbias"),
        ("layer_norm_bwd", {"workspace": scratch(0)}, "workspace"),
        ("layer_norm_bwd", {"workspace": full(1, 1, 3, 4)}, "workspace.*uint32.*got float32"),
        ("layer_norm_bwd", {"workspace": scratch(1, 1, 2, 4)}, "workspace"),
        ("layer_norm_bwd_from_output", {"workspace": scratch(1, 1, 1, 4)}, "workspace"),
        ("rms_norm_bwd_from_output", {"dscale": PARAMETER}, "workspace"),
        ("rms_norm_fwd", {"residual": NOTHING}, "residual and sum must be both"),
        ("rms_norm_fwd", {"residual": NOTHING, "sum": NOTHING}, "residual_bias.*residual"),
        ("rms_norm_fwd", {"residual_bias": full(3)}, "residual_bias"),
        ("rms_norm_bwd", {"rstd": full(4)}, "rstd"),
        ("rms_norm_bwd", {"dresidual_bias": HALF}, "workspace"),
        ("bias_gelu_fwd", {"bias": full(4, dtype=np.float16)}, "bias.*accumulation dtype"),
        ("bias_gelu_bwd", {"dbias": full(4, 0)}, "dbias"),
        ("batch_norm_fwd", {"scale": full(3)}, r"scale must have x's group axes and axis 1"),
        ("batch_norm_fwd", {"group_rank": np.int64(2)}, "inner_rank must be in"),
        ("batch_norm_fwd", {"mean": PARAMETER}, "mean and rstd must be both"),
        ("batch_norm_fwd", {"mean": PARAMETER, "rstd": PARAMETER}, "mean and batch_mean must be"),
        ("batch_norm_fwd", {"batch_variance": NOTHING}, "batch_mean and batch_variance must be"),
        ("batch_norm_fwd", {"workspace": scratch(1, 1, 2, 4)}, "workspace"),
        ("batch_norm_bwd", {"mean": NOTHING}, "mean"),
        ("batch_norm_bwd", {"mean_dz": PARAMETER}, "mean_dz and mean_dz_x_hat must be both"),
        (
            "batch_norm_bwd",
            {"mean_dz": PARAMETER, "mean_dz_x_hat": PARAMETER},
            "dscale and mean_dz must be not both there",
        ),
        (
            "batch_norm_bwd",
            {"dx": NOTHING, "dresidual": IMAGES},
            "dresidual and dx must be the latter there",
        ),
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
        jax.block_until_ready(jax.jit(lambda *a: function(*a, **GROUPS))(full(3)))


def test_wrong_attribute_type(platform):
    """XLA decodes attributes strictly. Ops therefore convert the numbers that they pass."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?s)layer_norm_fwd.*F64 but got F32"):
        call("layer_norm_fwd", epsilon=np.float32(1e-6))
