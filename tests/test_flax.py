"""Compares Flax's modules with ours: constructors, variables, results, gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_cases import APIS, CASES, Case, results

#: Our norms, and by method the arguments that Flax's norms do not have.
NORMS: dict[str, dict[str, set[str]]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "BatchNorm": {"__init__": {"activation"}, "__call__": {"residual"}},
    "GroupNorm": {"__init__": {"activation"}},
    "InstanceNorm": {"__init__": {"activation"}},
}

pytestmark = pytest.mark.usefixtures("flax_settings")


def assert_same(expected: Any, actual: Any, dtypes: tuple[Any, ...] = ()) -> None:
    """Equal trees, up to some roundings in the narrowest of `dtypes` and the array's own dtype."""
    one, two = jax.tree.structure(expected), jax.tree.structure(actual)
    assert one == two, f"{two}, expected {one}"
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        what = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {b.shape} {b.dtype}"
        allowed = max(map(rounding, (a.dtype, *dtypes)))
        a, b = (np.asarray(v, np.complex128 if jnp.iscomplexobj(v) else np.float64) for v in (a, b))
        np.testing.assert_allclose(
            b, a, rtol=0, atol=allowed * np.max(np.abs(a), initial=1), err_msg=what
        )


def rounding(dtype: Any) -> float:
    """The allowed error as a fraction of the largest value.

    Flax's E[x²] - E[x]² loses some digits of float32.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    return float(jnp.finfo(dtype).eps) * (4 if jnp.dtype(dtype).itemsize == 2 else 64)


def cases() -> Iterator[Any]:
    for api in APIS:
        for case in CASES:
            if case.only in (None, api):
                yield pytest.param(api, case, id=f"{api}-{case}")


@pytest.mark.parametrize(("api", "case"), list(cases()))
# Flax updates float64 running averages if parameters are float32. JAX warns of this.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_as_flax(api: str, case: Case, platform: str) -> None:
    (flax, _), (ours, program) = (results(api, modules, case) for modules in APIS[api])
    jax.tree.map(np.testing.assert_array_equal, flax["initial"], ours.pop("initial"))
    initial = flax.pop("initial")
    # NNX rounds x to `dtype` first. On GPUs, XLA omits this rounding, but not before our kernel.
    rounded = case.options.get("dtype") if (api, platform) == ("nnx", "cuda") else None
    assert_same(flax.pop("after"), ours.pop("after"), () if rounded is None else (rounded,))
    # If an output is rounded, its cotangent differs by the rounding error, and so do all gradients.
    dtypes = {jnp.dtype(case.dtype), *(v.dtype for v in jax.tree.leaves((initial, flax)))}
    assert_same(flax, ours, tuple(dtypes))
    assert ("jax_gradops" in program) == case.kernel


@pytest.mark.newest_jax
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", NORMS)
def test_signatures(api: str, name: str) -> None:
    flax, ours = (getattr(modules, name) for modules in APIS[api])
    assert issubclass(ours, flax)
    for method in ("__init__", "__call__"):
        expected, found = (
            [
                (p.name, p.kind, p.default)
                for p in inspect.signature(getattr(c, method)).parameters.values()
            ]
            for c in (flax, ours)
        )
        own = NORMS[name].get(method, set())
        assert expected == [p for p in found if p[0] not in own], method
        only = inspect.Parameter.KEYWORD_ONLY
        assert sorted(p for p in found if p[0] in own) == sorted((n, only, None) for n in own)
