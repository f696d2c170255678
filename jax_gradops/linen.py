"""Flax linen's norms on this library's kernels, and a dense layer with GELU.

Constructors, calls, parameters, collections and initial values are Flax's: a checkpoint made with
one loads into the other. The classes are subclasses of Flax's.

    >>> from flax import linen as nn
    >>> import jax_gradops.linen
    >>> norm = jax_gradops.linen.LayerNorm(epsilon=1e-5)  # was nn.LayerNorm(epsilon=1e-5)
    >>> isinstance(norm, nn.LayerNorm)
    True

What the kernels do not cover takes Flax's own path: `mask`, `axis_index_groups`, LayerNorm and
RMSNorm with an `axis_name` or with axes that are not the last ones, BatchNorm with several axes or
with running averages, `force_float32_reductions=False`, complex or integer arrays.

Differences: roundings; the variance is always that of the deviations, never E[x²] - E[x]², whatever
`use_fast_variance` says; no gradient flows through the running averages that BatchNorm stores.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax import lax

from jax_gradops._flax import common

__all__ = ["BatchNorm", "DeferredBiasDense", "DenseGelu", "LayerNorm", "RMSNorm", "add_norm"]


# Without linen's wrapper: interceptors, and what captures results, have seen the call already.
_LAYER_NORM, _RMS_NORM, _BATCH_NORM = (
    inspect.unwrap(module.__call__) for module in (linen.LayerNorm, linen.RMSNorm, linen.BatchNorm)
)


class LayerNorm(linen.LayerNorm):
    r"""`flax.linen.LayerNorm` on `jax_gradops.layer_norm`: arguments and parameters are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    A subclass with `residuals = "output"` saves its result for the backward pass, not its input:
    less memory where the result is kept anyway, in the same dtype, for a matrix product say. Where
    a scale is 0 it then stays so, as the result says nothing of the input: see
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
          x: any shape with at least one axis; what is none of the four floats takes Flax's path.
          mask: as Flax's, whose own path it takes.

        Returns:
          An array of x's shape, of `dtype` or, without that, of x's and the parameters' together.
        """
        return _norm(self, _LAYER_NORM, x, mask)


class RMSNorm(linen.RMSNorm):
    r"""`flax.linen.RMSNorm` on `jax_gradops.rms_norm`; `residuals` as for `LayerNorm`.

    .. math:: y = \frac{x}{\sqrt{\text{mean}(x^2) + \text{epsilon}}} \cdot \text{scale}

    Numerics and references: see `jax_gradops.rms_norm`.

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
    r"""`flax.linen.BatchNorm` on `jax_gradops.batch_norm` in training: arguments are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    With running averages it is Flax's, which XLA fuses with what comes before and after. The
    batch's statistics, of which the running averages are made, have no gradient. Numerics and
    references: see `jax_gradops.batch_norm`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> norm = jax_gradops.linen.BatchNorm(use_running_average=False, momentum=0.9)
    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, changed = norm.apply(norm.init(jax.random.key(0), x), x, mutable="batch_stats")
    >>> print(y[:, 0].round(3), changed["batch_stats"]["mean"])
    [-1.  1.] [0.2]
    """

    @linen.compact
    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises `x` as `flax.linen.BatchNorm` does: see `LayerNorm`.

        Of other than two to five axes, that is by Flax's own path.
        """
        axis = common.channel_axis(self, x, mask)
        if axis is None or linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        ):
            return _BATCH_NORM(self, x, use_running_average, mask=mask)
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
        )
        if not initializing:
            mean.value = common.running(self, mean.value, batch_mean)
            var.value = common.running(self, var.value, batch_var)
        return y


class DenseGelu(linen.Dense):
    r"""``gelu(Dense(x))``: `flax.linen.Dense`, whose bias and GELU are one operation.

    .. math:: y = \mathrm{gelu}(x \, \text{kernel} + \text{bias})

    Parameters are `kernel` and `bias`, as Flax's: with the name that a `Dense` had, "Dense_0" say,
    it loads that one's checkpoint. Numerics and references: see `jax_gradops.gelu`.

    Attributes:
      approximate: the tanh form, as in `jax.nn.gelu`.

    >>> import jax, jax.numpy as jnp, jax_gradops.linen
    >>> layer = jax_gradops.linen.DenseGelu(8)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'bias': (8,), 'kernel': (4, 8)}
    """

    approximate: bool = True

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        """[..., inputs] to [..., features], of `dtype` or of inputs' and parameters' together."""
        y, bias, _ = _product(self, inputs)
        return common.gelu_of_sum(y, bias, self.approximate)


class DeferredBiasDense(linen.Dense):
    r"""`flax.linen.Dense`, of which `add_norm` adds the bias: the result is a pair.

    .. math:: (x \, \text{kernel}, \text{bias})

    By itself, the addition is a pass over memory more, and so is the sum of the bias's gradient.
    Parameters are `kernel` and `bias`, as Flax's: with the name that a `Dense` had, "Dense_0" say,
    it loads that one's checkpoint.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jax_gradops.linen import DeferredBiasDense, LayerNorm, add_norm
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, hidden):
    ...         return add_norm(LayerNorm(), x, *DeferredBiasDense(2, name="Dense_0")(hidden))
    >>> variables = Block().init(jax.random.key(0), jnp.ones((1, 2)), jnp.ones((1, 4)))
    >>> jax.tree.map(jnp.shape, variables["params"]["Dense_0"])
    {'bias': (2,), 'kernel': (4, 2)}
    """

    @linen.compact
    def __call__(self, inputs: Any) -> Any:
        """[..., inputs] to the product, as `flax.linen.Dense`, and [features]; None: no bias.

        The bias is the parameter, not rounded to `dtype`.
        """
        return common.deferred(*_product(self, inputs))


def add_norm(
    norm: Any, x: jax.Array, residual: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``(norm(x + residual), x + residual)``, in one pass over memory if `norm` is of this module.

    So is the backward pass, which sums the cotangents of both: with a norm on its own, each
    addition to a residual stream is a pass more.

    With `bias`, it is ``x + (residual + bias)``, in the same pass too, and so is the bias's
    gradient: see `DeferredBiasDense`.

    Args:
      norm: a linen module; `LayerNorm` and `RMSNorm` of this one fuse the addition.
      x: what `norm` takes.
      residual: of the same shape and dtype, else the addition is one of its own.
      bias: shape ``residual.shape[-1:]``, any dtype. Where the addition is one of its own, it is
        cast to residual's. None: no bias.

    Returns:
      What `norm` returns of the sum, and the sum.

    Raises:
      TypeError: for a `norm` that cannot be called, or another argument that is no array.
      ValueError: for a `bias` of another shape.

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
    """A LayerNorm's or RMSNorm's result; `flax` is its method in Flax."""
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


def _product(dense: Any, inputs: Any) -> tuple[jax.Array, Any, Any]:
    """A Dense's result without its bias; the bias as Flax adds it, and not rounded."""
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
    """Scale and bias; None for one that the module does not have."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if getattr(module, "use_bias", False):
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias
