"""Flax linen's norms and embedding on this library's kernels, and a dense layer with GELU.

Constructors, calls, parameters, collections and initial values are Flax's. Checkpoints of Flax's
modules load into these, and the reverse. The classes are subclasses of Flax's.

    >>> from flax import linen as nn
    >>> import jax_gradops.linen
    >>> norm = jax_gradops.linen.LayerNorm(epsilon=1e-5)  # was nn.LayerNorm(epsilon=1e-5)
    >>> isinstance(norm, nn.LayerNorm)
    True

Flax's own code computes what the kernels do not cover:

- Embed with a table of one row, or of no float dtype.
- `mask`, `axis_index_groups`, `force_float32_reductions=False`, complex or integer arrays.
- Arrays without elements. An epsilon of 0: where the variance is 0, Flax's result is NaN.
- LayerNorm and RMSNorm with an `axis_name`, or with axes that are not the last ones.
- BatchNorm with several axes, or with running averages.
- GroupNorm and InstanceNorm with an `axis_name`, or with statistics of less than a sample. A sample
  is all axes but the first. InstanceNorm with several `feature_axes`.

Results differ from Flax's by rounding. The variance is always the mean of the squared deviations,
never E[x²] - E[x]², whatever `use_fast_variance` says. No gradient flows through the running
averages that BatchNorm stores.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax import lax

from jax_gradops import _checks
from jax_gradops._flax import common
from jax_gradops._ops.embedding.embedding import embedding_lookup

__all__ = [
    "BatchNorm",
    "DeferredBiasDense",
    "DenseGelu",
    "Embed",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "add_norm",
]


# Without linen's wrapper: interceptors and captures of results have already seen the call.
_LAYER_NORM, _RMS_NORM, _BATCH_NORM, _GROUP_NORM, _INSTANCE_NORM, _EMBED = (
    inspect.unwrap(module.__call__)
    for module in (
        linen.LayerNorm,
        linen.RMSNorm,
        linen.BatchNorm,
        linen.GroupNorm,
        linen.InstanceNorm,
        linen.Embed,
    )
)


class LayerNorm(linen.LayerNorm):
    r"""`flax.linen.LayerNorm` by `jax_gradops.layer_norm`. Arguments and parameters are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    Args:
      epsilon: the number that is added to the variance. The default is 1e-6.
      **others: all other arguments of `flax.linen.LayerNorm`, such as `dtype` and `use_bias`.

    A subclass with `residuals = "output"` saves its result for the backward pass, not its input.
    This saves memory if the result is kept anyway, for example for a matrix product in the dtype
    of the result. A scale that is 0 then stays 0, as the result says nothing about the input. See
    `jax_gradops.layer_norm`, also for numerics and references.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> norm, x = jax_gradops.linen.LayerNorm(), jnp.array([[1.0, 3.0]])
    >>> print(norm.apply(norm.init(jax.random.key(0), x), x).round(3))
    [[-1.  1.]]
    """

    residuals = "input"

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalises `x`, as `flax.linen.LayerNorm` does.

        Args:
          x: any shape with at least one axis. Flax's code handles all but the four float dtypes.
          mask: as in Flax. With a mask, Flax's code runs.

        Returns:
          An array of x's shape, in `dtype`, or else in the promoted dtype of x and the parameters.
        """
        return _norm(self, _LAYER_NORM, x, mask)


class RMSNorm(linen.RMSNorm):
    r"""`flax.linen.RMSNorm` by `jax_gradops.rms_norm`. `residuals` is as in `LayerNorm`.

    .. math:: y = \frac{x}{\sqrt{\text{mean}(x^2) + \text{epsilon}}} \cdot \text{scale}

    Numerics and references: see `jax_gradops.rms_norm`.

    Args:
      epsilon: the number that is added to the mean square. The default is 1e-6.
      **others: all other arguments of `flax.linen.RMSNorm`, such as `dtype` and `use_scale`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen, numpy as np
    >>> norm, x = jax_gradops.linen.RMSNorm(), jnp.array([[3.0, 4.0]])
    >>> print(np.asarray(norm.apply(norm.init(jax.random.key(0), x), x)).round(3))
    [[0.849 1.131]]
    """

    residuals = "input"

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalises `x`, as `flax.linen.RMSNorm` does: see `LayerNorm`."""
        return _norm(self, _RMS_NORM, x, mask)


class BatchNorm(linen.BatchNorm):
    r"""`flax.linen.BatchNorm`, in training by `jax_gradops.batch_norm`, and a ReLU.

    .. math:: y = \text{activation}\left(\frac{x - \text{mean}}{\sqrt{\text{var} +
              \text{epsilon}}} \cdot \text{scale} + \text{bias} + \text{residual}\right)

    With running averages, Flax's code runs: XLA fuses it with the operations around it. The
    running averages are updated from the batch's statistics. These have no gradient. Numerics and
    references: see `jax_gradops.batch_norm`. All arguments but `activation` and `residual` are
    Flax's.

    Attributes:
      activation: "relu", or None. In training it takes no extra pass over memory, and no mask is
        saved.

    Args:
      use_running_average: whether the call is for inference. Give it here or to the call.
      momentum: the weight of the old running average in an update. The default is 0.99.
      epsilon: the number that is added to the variance. The default is 1e-5.
      **others: all other arguments of `flax.linen.BatchNorm`, such as `axis` and `axis_name`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> norm = jax_gradops.linen.BatchNorm(use_running_average=False, momentum=0.9)
    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, changed = norm.apply(norm.init(jax.random.key(0), x), x, mutable="batch_stats")
    >>> print(y[:, 0].round(3), changed["batch_stats"]["mean"])
    [-1.  1.] [0.2]
    """

    activation: Literal["relu"] | None = dataclasses.field(default=None, kw_only=True)

    @linen.compact
    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalises `x` as `flax.linen.BatchNorm` does: see `LayerNorm`.

        Flax's code handles an `x` with fewer than two or more than five axes.

        Args:
          x: as in Flax.
          use_running_average: as in Flax.
          mask: as in Flax.
          residual: an array of x's shape, or None. It is added before the activation. In training,
            the addition takes no extra pass if `residual` has the dtype of the norm's result.

        Returns:
          An array of x's shape, in `dtype`, or else in the promoted dtype of x and the parameters.
          With a residual of another dtype, the dtype of the sum.
        """
        after = common.after_batch_norm(self.activation, x, residual)
        axis = common.channel_axis(self, x, mask)
        if axis is None or linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        ):
            return after.plain(_BATCH_NORM(self, x, use_running_average, mask=mask))
        shape = (jnp.shape(x)[axis],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        initializing = self.is_initializing()
        y, batch_mean, batch_var = common.batch_norm(
            self,
            x,
            *_parameters(self, shape),
            axis=axis,
            axis_name=None if initializing else self.axis_name,
            after=after,
        )
        if not initializing:
            mean.value = common.running(self, mean.value, batch_mean)
            var.value = common.running(self, var.value, batch_var)
        return y


class GroupNorm(linen.GroupNorm):
    r"""`flax.linen.GroupNorm` by `jax_gradops.group_norm`, and an activation.

    .. math:: y = \text{activation}\left(\frac{x - \text{mean}}{\sqrt{\text{var} +
              \text{epsilon}}} \cdot \text{scale} + \text{bias}\right)

    Channels are the last axis. All arguments but `activation` are Flax's. Numerics and references:
    see `jax_gradops.group_norm`.

    Attributes:
      activation: "silu" (also named swish), "relu", or None. It takes no extra pass over memory.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> norm, x = jax_gradops.linen.GroupNorm(num_groups=2), jnp.array([[1.0, 3.0, 5.0, 9.0]])
    >>> print(norm.apply(norm.init(jax.random.key(0), x), x).round(3))
    [[-1.  1. -1.  1.]]
    """

    activation: Literal["silu", "relu"] | None = dataclasses.field(default=None, kw_only=True)

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `x`, as `flax.linen.GroupNorm` does: see `LayerNorm`."""
        return _group_norm(self, _GROUP_NORM, x, mask)


class InstanceNorm(linen.InstanceNorm):
    r"""`flax.linen.InstanceNorm` by `jax_gradops.instance_norm`. `activation` is as in `GroupNorm`.

    .. math:: y = \text{activation}\left(\frac{x - \text{mean}}{\sqrt{\text{var} +
              \text{epsilon}}} \cdot \text{scale} + \text{bias}\right)

    Numerics and references: see `jax_gradops.instance_norm`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> norm, x = jax_gradops.linen.InstanceNorm(), jnp.array([[[1.0], [3.0]]])
    >>> print(norm.apply(norm.init(jax.random.key(0), x), x)[..., 0].round(3))
    [[-1.  1.]]
    """

    activation: Literal["silu", "relu"] | None = dataclasses.field(default=None, kw_only=True)

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `x`, as `flax.linen.InstanceNorm` does: see `LayerNorm`."""
        return _group_norm(self, _INSTANCE_NORM, x, mask)


class Embed(linen.Embed):
    r"""`flax.linen.Embed` by `jax_gradops.embedding_lookup`. Arguments and parameters are Flax's.

    .. math:: y = \text{embedding}_{\text{inputs}}

    The gradient of the table is added up in float32. Only the rows that are looked up are cast to
    `dtype`. Numerics and references: see `jax_gradops.embedding_lookup`.

    Args:
      num_embeddings: the number of rows of the table.
      features: the size of the result's last axis.
      **others: all other arguments of `flax.linen.Embed`, such as `dtype` and `embedding_init`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> layer, tokens = jax_gradops.linen.Embed(5, 4), jnp.array([[0, 3]])
    >>> layer.apply(layer.init(jax.random.key(0), tokens), tokens).shape
    (1, 2, 4)
    """

    def __call__(self, inputs: Any) -> jax.Array:
        """Looks up rows, as `flax.linen.Embed` does.

        Args:
          inputs: integers of any shape. Flax's code handles all others, and a table of one row.

        Returns:
          An array of shape inputs.shape + (features,) in `dtype`, or else in the table's dtype.
        """
        table: Any = self.embedding
        dtype = self.dtype
        if self.promote_dtype is not promote_dtype:
            (table,), dtype = self.promote_dtype(table, dtype=dtype, inexact=False), None
        if not common.looks_up(table, inputs, dtype):
            return _EMBED(self, inputs)
        return embedding_lookup(table, inputs, dtype=dtype)


class DenseGelu(linen.Dense):
    r"""``gelu(Dense(x))``: a `flax.linen.Dense` with bias and GELU in one operation.

    .. math:: y = \mathrm{gelu}(x \, \text{kernel} + \text{bias})

    Parameters are `kernel` and `bias`, as in Flax. Flax counts it as a `Dense` when it gives names:
    in the place of the first `Dense`, its name is Dense_0, and that layer's checkpoint fits.
    Numerics and references: see `jax_gradops.gelu`.

    Args:
      features: the size of y's last axis.
      approximate: whether GELU has the tanh form, as in `jax.nn.gelu`.
      **others: all other arguments of `flax.linen.Dense`, such as `dtype` and `use_bias`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> layer = jax_gradops.linen.DenseGelu(8)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'bias': (8,), 'kernel': (4, 8)}
    """

    approximate: bool = True

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        """Maps [..., inputs] to [..., features], in `dtype` or the promoted dtype of all arrays."""
        y, bias, _ = _product(self, inputs)
        return common.gelu_of_sum(y, bias, self.approximate)


class DeferredBiasDense(linen.Dense):
    r"""`flax.linen.Dense` that leaves the bias to `add_norm`. It returns product and bias.

    .. math:: (x \, \text{kernel}, \text{bias})

    A separate addition is one more pass over memory. So is a separate sum of the bias's gradient.
    Parameters are `kernel` and `bias`, as in Flax. Its automatic names are those of a `Dense`, as
    for `DenseGelu`.

    Args:
      features: the size of the product's last axis.
      **others: all other arguments of `flax.linen.Dense`, such as `dtype` and `kernel_init`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jax_gradops.linen import DeferredBiasDense, LayerNorm, add_norm
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, hidden):
    ...         return add_norm(LayerNorm(), x, *DeferredBiasDense(2)(hidden))
    >>> variables = Block().init(jax.random.key(0), jnp.ones((1, 2)), jnp.ones((1, 4)))
    >>> jax.tree.map(jnp.shape, variables["params"]["Dense_0"])
    {'bias': (2,), 'kernel': (4, 2)}
    """

    @linen.compact
    def __call__(self, inputs: Any) -> Any:
        """Maps [..., inputs] to the product and the bias [features], or None without a bias.

        The product is as in `flax.linen.Dense`. The bias is not rounded to `dtype`.
        """
        return common.deferred(*_product(self, inputs))


# Flax makes automatic names of the class's name and a counter for this name. With the name of the
# class that they replace, these layers fit into checkpoints and between other layers.
for _layer in (DenseGelu, DeferredBiasDense):
    _layer.__name__ = "Dense"


@_checks.with_hints
def add_norm(
    norm: Any, x: jax.Array, residual: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``(norm(x + residual), x + residual)``, in one pass over memory if `norm` is of this module.

    The backward pass, too, is one pass: it adds the cotangents of both results. With a separate
    norm, each addition to a residual stream is one more pass.

    With `bias`, the sum is ``x + (residual + bias)``. The bias and its gradient take no further
    pass: see `DeferredBiasDense`.

    Args:
      norm: a linen module. `LayerNorm` and `RMSNorm` of `jax_gradops.linen` fuse the addition.
      x: the input of `norm`.
      residual: an array. The addition is fused only if x has equal shape and dtype.
      bias: shape ``residual.shape[-1:]``, any dtype. An addition that is not fused casts it to
        the dtype of residual. None: no bias.

    Returns:
      The result of `norm` for the sum, and the sum.

    Raises:
      TypeError: if `norm` cannot be called, or another argument is not an array.
      ValueError: if `bias` has another shape.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jax_gradops.linen import LayerNorm, add_norm
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, update):
    ...         return add_norm(LayerNorm(), x, update)
    >>> x, update = jnp.ones((1, 2)), jnp.array([[1.0, 3.0]])
    >>> (y, x), _ = Block().init_with_output(jax.random.key(0), x, update)
    >>> print(y.round(3), x)
    [[-1.  1.]] [[2. 4.]]
    """
    return common.add_norm((LayerNorm, RMSNorm), norm, x, residual, bias)


def _norm(module: Any, flax: Any, x: Any, mask: Any) -> Any:
    """The result of a LayerNorm or RMSNorm. `flax` is the method in Flax."""
    offer = common.offer_of(x)
    if offer is not None:
        y, offer.total = _norm(module, flax, offer.parts, mask)
        return y
    shape = common.normalized_shape(module, x, mask)
    if shape is None:
        if not isinstance(x, common.Sum):
            return flax(module, x, mask=mask)
        total = x.plain()
        return flax(module, total, mask=mask), total
    centered = flax is _LAYER_NORM
    return common.norm(module, x, shape, *_parameters(module, shape), centered=centered)


def _group_norm(module: Any, flax: Any, x: Any, mask: Any) -> jax.Array:
    """The result of a GroupNorm or InstanceNorm. `flax` is the method in Flax."""
    after = common.after_group_norm(module, module.activation)
    axes = common.samples(module, x, mask)
    if axes is None:
        return after.plain(flax(module, x, mask=mask))
    axis, groups = axes
    parameters = _parameters(module, (jnp.shape(x)[axis],))
    return common.group_norm(
        module, x, *parameters, axis=axis, groups=groups, activation=after.activation
    )


def _product(dense: Any, inputs: Any) -> tuple[jax.Array, Any, Any]:
    """A Dense's result without its bias, the bias that Flax adds, and the unrounded bias."""
    shape = (jnp.shape(inputs)[-1], dense.features)
    kernel: Any = dense.param("kernel", dense.kernel_init, shape, dense.param_dtype)
    given: Any = None
    if dense.use_bias:
        given = dense.param("bias", dense.bias_init, (dense.features,), dense.param_dtype)
    inputs, kernel, bias = dense.promote_dtype(inputs, kernel, given, dtype=dense.dtype)
    dot_general: Any = dense.dot_general or lax.dot_general
    if dense.dot_general_cls is not None:
        dot_general = dense.dot_general_cls()
    dimensions = (((inputs.ndim - 1,), (0,)), ((), ()))
    y = dot_general(inputs, kernel, dimensions, precision=dense.precision)
    own = dense.promote_dtype is not promote_dtype
    return y, bias, bias if own else common.not_rounded([given], [bias])[0]


def _parameters(module: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Scale and bias. None stands for a parameter that the module does not have."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if getattr(module, "use_bias", False):
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias
