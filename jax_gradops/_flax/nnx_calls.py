"""The calls of the modules of `jax_gradops.nnx`: ops of this library, or Flax's methods."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jax_gradops import _checks
from jax_gradops._flax import common
from jax_gradops._linear_bias import linear_bias
from jax_gradops._ops.embedding.embedding import embedding_lookup
from jax_gradops._ops.gelu.bias_gelu import gelu

# Flax's classes and methods, saved at import. Nothing here reads Flax's names at call time. Code
# that watches calls, such as `nnx.tabulate`, replaces Flax's methods for a while. It has already
# seen the call. And a user may set Flax's names to this library's classes.
FLAX: Any = types.SimpleNamespace(
    **{
        name: getattr(nnx, name)
        for name in (
            *("LayerNorm", "RMSNorm", "BatchNorm", "Linear", "Sequential", "LinearGeneral"),
            *("GroupNorm", "InstanceNorm", "WeightNorm", "SpectralNorm", "Embed"),
        )
    }
)
LAYER_NORM: Any = nnx.LayerNorm.__call__
RMS_NORM: Any = nnx.RMSNorm.__call__
_BATCH_NORM: Any = nnx.BatchNorm.__call__
_GROUP_NORM: Any = nnx.GroupNorm.__call__
_INSTANCE_NORM: Any = nnx.InstanceNorm.__call__
_EMBED: Any = nnx.Embed.__call__
_SEQUENTIAL: Any = nnx.Sequential.__call__
_GELUS: tuple[Any, ...] = (common.JAX_GELU, nnx.gelu, gelu)
#: Call methods by class: Flax's, and later also our classes that compute the same.
LINEARS: dict[type, Any] = {nnx.Linear: nnx.Linear.__call__}
SEQUENTIALS: dict[type, Any] = {nnx.Sequential: _SEQUENTIAL}
#: By class of norm: a function that calls it with an activation, and the activations it knows.
ACTIVATED: dict[type, tuple[Any, tuple[str, ...]]] = {}


# --- Norms ---------------------------------------------------------------------------------------


def norm(module: Any, flax: Any, x: Any, mask: Any) -> Any:
    """The result of a LayerNorm or RMSNorm. `flax` is the method in Flax."""
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
    """`x`, scale and bias after Flax's promotion; the parameters unrounded, reshaped to `shape`.

    If `dtype` is narrower, Flax's promotion rounds the parameters and their gradients. The op
    computes in float32: rounding would only cost time and digits.
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


def with_activation(flax: type) -> Any:
    """The constructor of a Flax class, with one more argument, `activation`."""
    constructor: Any = flax.__init__

    @functools.wraps(constructor)
    def init(self: Any, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if activation is not None:
            name = type(self).__name__
            known = next(ACTIVATED[c][1] for c in type(self).__mro__ if c in ACTIVATED)
            self.activation = _checks.choice(name, "activation", activation, *known, None)

    signature = inspect.signature(constructor)
    more = inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None)
    init.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[*signature.parameters.values(), more]
    )
    return init


def batch_norm(
    activation: Any,
    module: Any,
    x: Any,
    use_running_average: bool | None = None,
    *,
    mask: Any = None,
    residual: Any = None,
) -> jax.Array:
    """activation(y + residual) of y, the result of `module`, a BatchNorm."""
    x = jnp.asarray(x)
    after = common.after_batch_norm(activation, x, residual)
    axis = common.channel_axis(module, x, mask)
    running = module.use_running_average if use_running_average is None else use_running_average
    if axis is None or running is None or running:
        return after.plain(_BATCH_NORM(module, x, use_running_average, mask=mask))
    given = [value(v) for v in (module.mean, module.var, module.scale, module.bias)]
    x, *promoted = module.promote_dtype((x, *given), dtype=module.dtype)
    _, _, scale, bias = not_rounded(module, given, promoted)
    y, mean, var = common.batch_norm(
        module, x, scale, bias, axis=axis, axis_name=module.axis_name, after=after
    )
    for average, new in ((module.mean, mean), (module.var, var)):
        average[...] = common.running(module, average[...], new).astype(average[...].dtype)
    return y


def group_norm(activation: Any, module: Any, x: Any, *, mask: Any = None) -> jax.Array:
    """The activation of the result of `module`, a GroupNorm or InstanceNorm."""
    after = common.after_group_norm(module, activation)
    x = jnp.asarray(x)
    axes = common.samples(module, x, mask)
    if axes is None:
        flax = _INSTANCE_NORM if isinstance(module, FLAX.InstanceNorm) else _GROUP_NORM
        return after.plain(flax(module, x, mask=mask))
    axis, groups = axes
    given = [value(module.scale), value(module.bias)]
    x, *promoted = module.promote_dtype((x, *given), dtype=module.dtype)
    parameters = not_rounded(module, given, promoted)
    return common.group_norm(
        module, x, *parameters, axis=axis, groups=groups, activation=after.activation
    )


def not_rounded(module: Any, given: list[Any], promoted: list[Any]) -> list[Any]:
    """Each promoted parameter, or the given one if Flax's promotion rounded it."""
    own = module.promote_dtype is not promote_dtype
    return promoted if own else common.not_rounded(given, promoted)


def value(variable: Any) -> Any:
    """The value of a parameter; None if the parameter is None."""
    return None if variable is None else variable[...]


# --- Embeddings ----------------------------------------------------------------------------------


def embed(module: Any, inputs: Any, out_sharding: Any) -> jax.Array:
    """The result of `module`, an Embed. Only the rows that are looked up are cast to `dtype`."""
    table, dtype = value(module.embedding), module.dtype
    if module.promote_dtype is not promote_dtype:
        (table,), dtype = module.promote_dtype((table,), dtype=dtype, inexact=False), None
    if not common.looks_up(table, inputs, dtype):
        return _EMBED(module, inputs, out_sharding)
    lookup: Any = functools.partial(embedding_lookup, dtype=dtype)
    if out_sharding is not None:
        lookup = jax.sharding.auto_axes(lookup, out_sharding=out_sharding)
    return lookup(table, inputs)


# --- Linear layers, and what takes their biases --------------------------------------------------


def _product(linear: Any, inputs: Any, out_sharding: Any = None) -> tuple[jax.Array, Any, Any]:
    """The result of `linear` without its bias, the bias that Flax adds, and the unrounded bias."""
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
    """The result of `module`, a Linear."""
    y, bias, exact = _product(module, inputs, out_sharding)
    return y if bias is None else linear_bias(y, bias, exact)


def linear_gelu(approximate: bool, linear: Any, inputs: Any, out_sharding: Any = None) -> jax.Array:
    """GELU of the result of `linear`. The op adds the bias."""
    y, bias, _ = _product(linear, inputs, out_sharding)
    return common.gelu_of_sum(y, bias, approximate)


def _approximate(layer: Any) -> bool | None:
    """Whether a GELU has the tanh form; None if `layer` is not a GELU."""
    given: dict[str, Any] = {}
    if isinstance(layer, functools.partial) and not layer.args:
        layer, given = layer.func, layer.keywords
    known = any(layer is one for one in _GELUS)
    return (
        bool(given.get("approximate", True)) if known and given.keys() <= {"approximate"} else None
    )


def sequential(layers: list[Any], *args: Any, **kwargs: Any) -> Any:
    """The result of Flax's Sequential with these layers."""
    module: Any = types.SimpleNamespace(layers=layers)
    return _SEQUENTIAL(module, *args, **kwargs)


def pairs(module: nnx.Sequential, gelu: bool) -> dict[int, functools.partial[Any]]:
    """One function for each pair of a Sequential's layers, by the second layer's index.

    A pair is a norm of this library and an activation, or (`gelu`) a Linear and a GELU.
    """
    neighbours = enumerate(itertools.pairwise(module.layers), 1)
    found = {i: _pair(first, second, gelu) for i, (first, second) in neighbours}
    return {i: pair for i, pair in found.items() if pair is not None}


def with_pairs(module: nnx.Sequential, gelu: bool) -> list[Any]:
    """A Sequential's layers. Each pair becomes one function."""
    found = pairs(module, gelu)
    return [found.get(i + 1, layer) for i, layer in enumerate(module.layers) if i not in found]


def _pair(first: Any, second: Any, gelu: bool) -> functools.partial[Any] | None:
    """One function for two layers; None if they are no pair."""
    if gelu and type(first) in LINEARS and (approximate := _approximate(second)) is not None:
        return functools.partial(linear_gelu, approximate, first)
    call, known = ACTIVATED.get(type(first), (None, ()))
    if call is not None and first.activation is None:
        for name in known:
            if second is common.ACTIVATIONS[name]:
                return functools.partial(call, name, first)
    return None


def deferred_bias(layer: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The result of `layer` without the bias that it adds last, and that bias or None.

    A layer that is neither Flax's nor this library's may do anything: it keeps its bias.
    """
    call: Any = type(layer).__call__
    if call in LINEARS.values():
        return common.deferred(*_product(layer, *args, **kwargs))
    if call in SEQUENTIALS.values() and layer.layers and callable(layer.layers[-1]):
        *layers, last = layer.layers if call is _SEQUENTIAL else with_pairs(layer, layer.gelu)
        layers.append(functools.partial(deferred_bias, last))
        return sequential(layers, *args, **kwargs)
    return layer(*args, **kwargs), None
