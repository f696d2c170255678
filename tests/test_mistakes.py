"""Every mistake of a user has a clear error message. The messages are in mistakes.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx
from jax_gradops._ops.all import SPECS

#: An op may have a table of its own: mistakes_X.txt.
TABLES = sorted(Path(__file__).parent.glob("mistakes*.txt"))
*_FIRST, _LAST = map(repr, SPECS)
OPS = f"{', '.join(_FIRST)} or {_LAST}"  # "{ops}" in the tables

ARRAYS = {
    "x": np.ones((2, 3, 4), np.float32),
    "half": np.ones((2, 3, 4), np.float16),
    "scale": np.ones(4, np.float32),
    "rows": np.ones((2, 3), np.float32),
    "ints": np.ones((2, 3, 4), np.int32),
    "complexes": np.ones((2, 3, 4), np.complex64),
}
NAMES: dict[str, Any] = {
    **{name: value for name, value in vars(jax_gradops).items() if not name.startswith("_")},
    "jax_gradops": jax_gradops,
    "linen": jax_gradops.linen,
    "nnx": jax_gradops.nnx,
    "flax": flax,
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "optax": optax,
    "objects": np.array([[1.0, None]]),
    "masked": np.ma.masked_array(np.ones(3)),
    "rngs": lambda: flax.nnx.Rngs(0),
    "norm": lambda: jax_gradops.nnx.LayerNorm(4, rngs=flax.nnx.Rngs(0)),
}


def mistakes() -> list[tuple[str, str]]:
    """Calls and their error messages."""
    text = "\n".join(table.read_text() for table in TABLES).replace("{ops}", OPS)
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    return list(zip(lines[::2], map(str.strip, lines[1::2]), strict=True))


def said(code: str, **arrays: Any) -> str:
    try:
        result = eval(code, NAMES | arrays)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing, but it returned {result}"


@pytest.mark.M11
@pytest.mark.parametrize(("code", "message"), [pytest.param(*m, id=m[0]) for m in mistakes()])
def test_mistakes(code, message):
    """The message is exact, for traced arrays too."""
    assert said(code, **ARRAYS) == message
    if "an array of shape" not in message:
        traced = []
        jax.eval_shape(lambda arrays: traced.append(said(code, **arrays)), ARRAYS)
        assert traced == [message]


def test_every_function_is_in_the_table():
    """Every function is tested with each argument that can be wrong."""
    calls = "\n".join(code for code, _ in mistakes())
    public = [n for n, v in vars(jax_gradops).items() if callable(v) and n[0].islower()]
    operators = [n for n in vars(jax_gradops.backward) if n[0].islower()]
    modules = jax_gradops.nnx.__all__
    unmentioned = [n for n in (*public, *operators, *modules) if f"{n}(" not in calls]
    # FuseReport is a result. The layers' arguments are Flax's.
    assert unmentioned == ["Embed", "FuseReport", "Linear", "Sequential"]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "batch_norm", "group_norm", "bias_gelu"])
def test_options_have_names(op):
    with pytest.raises(TypeError, match=r"at most \d positional arguments, got 5. Write"):
        getattr(jax_gradops, op)(*[ARRAYS["x"]] * 5)


# Flax and our modules refuse these with the same exception, because Flax raises it.
OF_FLAX = [
    "nnx.LayerNorm(4, rngs=rngs())(None)",
    "nnx.LayerNorm(4, rngs=rngs())('x')",
    "nnx.RMSNorm(4, rngs=rngs())(np.float32(1))",
    "nnx.LayerNorm(4, reduction_axes=5, rngs=rngs())(x)",
    "nnx.LayerNorm(4, epsilon='a', rngs=rngs())(x)",
    "nnx.LayerNorm(4)",
    "nnx.LayerNorm(4, residuals='output', rngs=rngs())",
    "nnx.BatchNorm(4, rngs=rngs())(objects)",
    "nnx.GroupNorm(4, rngs=rngs())",
    "nnx.GroupNorm(4, 2, 2, rngs=rngs())",
    "nnx.GroupNorm(6, 2, rngs=rngs())(x)",
    "nnx.InstanceNorm(4, feature_axes=0, rngs=rngs())(x)",
    "nnx.Embed(4, 2, rngs=rngs())(x)",
    "nnx.Embed(4, 2, rngs=rngs())([1])",
    "nnx.Embed(4, 2, rngs=rngs())(2)",
    "nnx.Embed(4, 2, rngs=rngs())(mask)",
    "nnx.Embed(4, 2)",
    "linen.LayerNorm().init(jax.random.key(0), None)",
    "linen.LayerNorm().init(jax.random.key(0), 'x')",
    "linen.RMSNorm().init(jax.random.key(0), np.float32(1))",
    "linen.LayerNorm().apply({}, x)",
    "linen.LayerNorm().apply({'params': {'scale': scale[:2], 'bias': scale}}, x)",
    "linen.LayerNorm(reduction_axes=3).init(jax.random.key(0), x)",
    "linen.LayerNorm(reduction_axes=None).init(jax.random.key(0), x)",
    "linen.BatchNorm().init(jax.random.key(0), x)",
    "linen.BatchNorm(use_running_average=False, axis=3).init(jax.random.key(0), x)",
    "linen.GroupNorm().init(jax.random.key(0), x)",
    "linen.GroupNorm(2, 2).init(jax.random.key(0), x)",
    "linen.GroupNorm(2, reduction_axes=(1,)).init(jax.random.key(0), x)",
    "linen.GroupNorm(None, 0).init(jax.random.key(0), x)",
    "linen.InstanceNorm(feature_axes=(0, -1)).init(jax.random.key(0), x)",
    "linen.InstanceNorm(feature_axes=3).init(jax.random.key(0), x)",
    "linen.Embed(4, 2).init(jax.random.key(0), x)",
    "linen.Embed(4, 2).init(jax.random.key(0), [1])",
    "linen.Embed(4, 2).apply({}, labels)",
]


@pytest.mark.parametrize("code", OF_FLAX)
def test_mistakes_of_flax(code, flax_settings):
    ours = said(code, **ARRAYS)
    flaxs = said(code, **ARRAYS, linen=flax.linen, nnx=flax.nnx)
    assert ours.partition(":")[0] == flaxs.partition(":")[0] != "nothing, but it returned"


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_wrong_max_norm_that_is_not_looked_at(wrong):
    """A traced max_norm, or one on a device, is not checked.

    It gives NaN, not reversed gradients.
    """
    leaf = np.ones(3, np.float32)
    clip = jax_gradops.clip_tree_by_global_norm
    for limit, f in ((jnp.float32(wrong), clip), (wrong, jax.jit(clip))):
        (clipped,), norm = f([leaf], limit)
        assert np.isnan(clipped).all() and norm > 1


def test_an_unbound_axis_name_is_a_name_error_too() -> None:
    for error in (ValueError, NameError):
        with pytest.raises(error, match="names no axis here"):
            jax_gradops.batch_norm(ARRAYS["x"], axis_name="nope")


@pytest.mark.parametrize("name", [(("i",),), 0, ([],)], ids=str)
def test_what_names_no_axis(name: Any) -> None:
    with pytest.raises(TypeError, match="axis_name must be the name of a mapped axis, or several"):
        jax_gradops.batch_norm(ARRAYS["x"], axis_name=name)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_the_other_byte_order_is_no_mistake(dtype: str) -> None:
    x = np.linspace(-1, 1, 12).reshape(4, 3)
    for op in (jax_gradops.layer_norm, jax_gradops.gelu):
        swapped, usual = op(x.astype(dtype)), op(x.astype(dtype).astype(dtype[1:]))
        np.testing.assert_array_equal(swapped, usual)
    scale = np.arange(3.0).astype(dtype)
    y, *_ = jax_gradops.batch_norm(x, scale)
    np.testing.assert_array_equal(y, jax_gradops.batch_norm(x, scale.astype(dtype[1:]))[0])
