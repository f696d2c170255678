"""What the modules of `jax_gradops.nnx` compute, and what they leave to Flax's methods."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jax_gradops._flax import common
from jax_gradops._ops.gelu.bias_gelu import gelu

# Flax's classes and methods, as they are at import. What watches calls, `nnx.tabulate` say, puts
# other methods in their place for a while, and has seen the call already. And a user may give
# Flax's names to this library's classes. So nothing here reads Flax's names at call time.
FLAX: Any = types.SimpleNamespace(
    **{
        name: getattr(nnx, name)
        for name in (
            *("LayerNorm", "RMSNorm", "BatchNorm", "Linear", "Sequential", "LinearGeneral"),
            *("GroupNorm", "InstanceNorm", "WeightNorm", "SpectralNorm"),
        )
    }
)
LAYER_NORM: Any = nnx.LayerNorm.__call__
RMS_NORM: Any = nnx.RMSNorm.__call__
BATCH_NORM: Any = nnx.BatchNorm.__call__
_SEQUENTIAL: Any = nnx.Sequential.__call__
_GELUS: tuple[Any, ...] = (common.JAX_GELU, nnx.gelu, gelu)
#: By class, of Flax's and, once these exist, of ours that compute the same.
LINEARS: dict[type, Any] = {nnx.Linear: nnx.Linear.__call__}
SEQUENTIALS: dict[type, Any] = {nnx.Sequential: _SEQUENTIAL}


# --- Norms ---------------------------------------------------------------------------------------


def norm(module: Any, flax: Any, x: Any, mask: Any) -> Any:
    """A LayerNorm's or RMSNorm's result; `flax` is its method in Flax."""
    offer = common.offer_of(x)
    if offer is not None:
        y, offer.total = _add_norm(module, flax, offer.parts, mask)
        return y
    if isinstance(x, common.Sum):
        return _add_norm(module, flax, x, mask)
    x = jnp.asarray(x)
    shape = common.normalized_shape(module, x, mask)
    if shape is None:
        return flax(module, x, mask=mask)
    centered = flax is LAYER_NORM
    x, *parameters = _promoted(module, x, shape, centered=centered)
    return common.norm(module, x, shape, *parameters, centered=centered)


def _add_norm(module: Any, flax: Any, x: common.Sum, mask: Any) -> Any:
    shape = common.normalized_shape(module, x, mask)
    if shape is not None and module.promote_dtype is promote_dtype:
        centered = flax is LAYER_NORM
        promoted, *parameters = _promoted(module, x.x, shape, centered=centered)
        if promoted.dtype == x.x.dtype:
            return common.norm(module, x, shape, *parameters, centered=centered)
    total = x.plain()
    return norm(module, flax, total, mask), total


def _promoted(module: Any, x: Any, shape: tuple[int, ...], *, centered: bool) -> list[Any]:
    """`x`, scale and bias as Flax takes them, the parameters in `shape`.

    But for what Flax's own function does to parameters: where `dtype` is narrower, it rounds them,
    and their gradients. The op computes in float32, so that this would only take time and digits.
    """
    given = [value(module.scale)]
    if centered:
        given.append(value(module.bias))
    x, *promoted = module.promote_dtype((x, *given), dtype=module.dtype)
    parameters = not_rounded(module, given, promoted)
    for p in parameters:
        if p is not None and p.size != math.prod(shape):
            raise ValueError(
                f"{type(module).__name__}: x must have as many features as num_features says, "
                f"{p.size}, got shape {jnp.shape(x)}"
            )
    return [x, *(None if p is None else p.reshape(shape) for p in parameters)]


def not_rounded(module: Any, given: list[Any], promoted: list[Any]) -> list[Any]:
    """Parameters as they were given where Flax's promotion has rounded them."""
    own = module.promote_dtype is not promote_dtype
    return promoted if own else common.not_rounded(given, promoted)


def value(variable: Any) -> Any:
    """Of a parameter that may be None."""
    return None if variable is None else variable[...]


# --- Linear layers, and what takes their biases --------------------------------------------------


def _product(linear: Any, inputs: Any, out_sharding: Any = None) -> tuple[jax.Array, Any, Any]:
    """What `linear` gives without its bias; the bias as Flax adds it, and not rounded."""
    given = value(linear.bias)
    values = (inputs, value(linear.kernel), given)
    inputs, kernel, bias = linear.promote_dtype(values, dtype=linear.dtype)
    options: dict[str, Any] = {"precision": linear.precision, "out_sharding": out_sharding}
    if linear.preferred_element_type is not None:
        options["preferred_element_type"] = linear.preferred_element_type
    dimensions = (((inputs.ndim - 1,), (0,)), ((), ()))
    y = linear.dot_general(inputs, kernel, dimensions, **options)
    return y, bias, not_rounded(linear, [given], [bias])[0]


def linear(module: Any, inputs: Any, out_sharding: Any) -> jax.Array:
    """What `module` gives, a Linear."""
    y, bias, exact = _product(module, inputs, out_sharding)
    return y if bias is None else common.linear(y, bias, exact)


def linear_gelu(approximate: bool, linear: Any, inputs: Any, out_sharding: Any = None) -> jax.Array:
    """GELU of what `linear` gives, of whose bias the op takes care."""
    y, bias, _ = _product(linear, inputs, out_sharding)
    return common.gelu_of_sum(y, bias, approximate)


def _approximate(layer: Any) -> bool | None:
    """Of a GELU, which form it is; None if `layer` is something else."""
    given: dict[str, Any] = {}
    if isinstance(layer, functools.partial) and not layer.args:
        layer, given = layer.func, layer.keywords
    known = any(layer is one for one in _GELUS)
    return (
        bool(given.get("approximate", True)) if known and given.keys() <= {"approximate"} else None
    )


def sequential(layers: list[Any], *args: Any, **kwargs: Any) -> Any:
    """What Flax's Sequential of these layers gives."""
    module: Any = types.SimpleNamespace(layers=layers)
    return _SEQUENTIAL(module, *args, **kwargs)


def with_pairs(module: nnx.Sequential) -> list[Any]:
    """A Sequential's layers, each Linear in one with the GELU after it."""
    result: list[Any] = []
    for layer in module.layers:
        approximate = _approximate(layer)
        if result and approximate is not None and type(result[-1]) in LINEARS:
            result[-1] = functools.partial(linear_gelu, approximate, result[-1])
        else:
            result.append(layer)
    return result


def deferred_bias(layer: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What `layer` gives without a bias that is added last, and this, or None.

    What is neither Flax's own nor of this library may do anything.
    """
    call: Any = type(layer).__call__
    if call in LINEARS.values():
        return common.deferred(*_product(layer, *args, **kwargs))
    if call in SEQUENTIALS.values() and layer.layers and callable(layer.layers[-1]):
        *layers, last = layer.layers if call is _SEQUENTIAL else with_pairs(layer)
        layers.append(functools.partial(deferred_bias, last))
        return sequential(layers, *args, **kwargs)
    return layer(*args, **kwargs), None
