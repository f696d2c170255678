"""Flax NNX's norms and embedding on this library's kernels, a linear layer with GELU, and `fuse`.

Constructors, calls, parameters and initial values are Flax's. Checkpoints of Flax's modules load
into these, and the reverse. The classes are subclasses of Flax's.

    >>> from flax import nnx
    >>> import jax_gradops.nnx
    >>> norm = jax_gradops.nnx.LayerNorm(8, rngs=nnx.Rngs(0))  # was nnx.LayerNorm(...)
    >>> isinstance(norm, nnx.LayerNorm)
    True

`fuse` changes the norms and embeddings of an existing model to the classes of `jax_gradops.nnx`.

Flax's own code computes what the kernels do not cover:

- Embed with a table of one row, or of no float dtype.
- `mask`, `axis_index_groups`, complex or integer arrays.
- Arrays without elements. An epsilon of 0: where the variance is 0, Flax's result is NaN.
- LayerNorm and RMSNorm with an `axis_name`, or with axes that are not the last ones.
- BatchNorm with several axes, or with running averages.
- GroupNorm and InstanceNorm with an `axis_name`, or with statistics of less than a sample. A sample
  is all axes but the first. InstanceNorm with several `feature_axes`.

Results differ from Flax's by rounding. If `dtype` is narrower than the parameters, Flax rounds the
parameters; these modules do not. The variance is always the mean of the squared deviations, never
E[x²] - E[x]², whatever `use_fast_variance` says. No gradient flows through the running averages
that BatchNorm stores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from flax import nnx

from jax_gradops import _checks
from jax_gradops._flax import common, nnx_calls, nnx_fuse
from jax_gradops._flax.nnx_fuse import FuseReport

__all__ = [
    "BatchNorm",
    "DenseGelu",
    "Embed",
    "FuseReport",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Sequential",
    "add_norm",
    "deferred_bias",
    "fuse",
    "unfuse",
]

_logger = logging.getLogger("jax_gradops")


class LayerNorm(nnx.LayerNorm):
    r"""`flax.nnx.LayerNorm` by `jax_gradops.layer_norm`. Arguments and parameters are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    Args:
      num_features: the size of the last axis, which is normalised.
      epsilon: the number that is added to the variance. The default is 1e-6.
      rngs: Flax's random keys, such as ``nnx.Rngs(0)``.
      **others: all other arguments of `flax.nnx.LayerNorm`, such as `dtype` and `use_bias`.

    Attributes:
      residuals: "input", or "output" to save the result for the backward pass, not the input. This
        saves memory if the result is kept anyway, for example for a matrix product in the dtype of
        the result. A scale that is 0 then stays 0, as the result says nothing about the input. See
        `jax_gradops.layer_norm`, also for numerics and references. Set it after construction.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.LayerNorm(2, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0, 3.0]])).round(3))
    [[-1.  1.]]
    """

    residuals = "input"

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalises `x`, as `flax.nnx.LayerNorm` does.

        Args:
          x: [..., num_features]. Flax's code handles all but the four float dtypes.
          mask: as in Flax. With a mask, Flax's code runs.

        Returns:
          An array of x's shape, in `dtype`, or else in the promoted dtype of x and the parameters.
        """
        return nnx_calls.norm(self, nnx_calls.LAYER_NORM, x, mask)


class RMSNorm(nnx.RMSNorm):
    r"""`flax.nnx.RMSNorm` by `jax_gradops.rms_norm`. `residuals` is as in `LayerNorm`.

    .. math:: y = \frac{x}{\sqrt{\text{mean}(x^2) + \text{epsilon}}} \cdot \text{scale}

    Numerics and references: see `jax_gradops.rms_norm`.

    Args:
      num_features: the size of the last axis, which is normalised.
      epsilon: the number that is added to the mean square. The default is 1e-6.
      rngs: Flax's random keys, such as ``nnx.Rngs(0)``.
      **others: all other arguments of `flax.nnx.RMSNorm`, such as `dtype` and `use_scale`.

    >>> import jax.numpy as jnp, jax_gradops.nnx, numpy as np
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.RMSNorm(2, rngs=nnx.Rngs(0))
    >>> print(np.asarray(norm(jnp.array([[3.0, 4.0]]))).round(3))
    [[0.849 1.131]]
    """

    residuals = "input"

    def __call__(self, x: Any, mask: jax.Array | None = None) -> Any:
        """Normalises `x`, as `flax.nnx.RMSNorm` does: see `LayerNorm`."""
        return nnx_calls.norm(self, nnx_calls.RMS_NORM, x, mask)


class BatchNorm(nnx.BatchNorm):
    r"""`flax.nnx.BatchNorm`, in training by `jax_gradops.batch_norm`, and a ReLU.

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
      num_features: the number of channels: the size of the last axis.
      use_running_average: whether the call is for inference. The default is False: for training.
      momentum: the weight of the old running average in an update. The default is 0.99.
      epsilon: the number that is added to the variance. The default is 1e-5.
      rngs: Flax's random keys, such as ``nnx.Rngs(0)``.
      **others: all other arguments of `flax.nnx.BatchNorm`, such as `axis` and `axis_name`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0], [3.0]]))[:, 0].round(3), norm.mean[...])
    [-1.  1.] [0.2]
    """

    activation: Literal["relu"] | None = None
    __init__: Any = nnx_calls.with_activation(nnx.BatchNorm)

    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalises `x` as `flax.nnx.BatchNorm` does: see `LayerNorm`.

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
        return nnx_calls.batch_norm(
            self.activation, self, x, use_running_average, mask=mask, residual=residual
        )


nnx_calls.ACTIVATED[BatchNorm] = nnx_calls.batch_norm, ("relu",)


class GroupNorm(nnx.GroupNorm):
    r"""`flax.nnx.GroupNorm` by `jax_gradops.group_norm`, and an activation.

    .. math:: y = \text{activation}\left(\frac{x - \text{mean}}{\sqrt{\text{var} +
              \text{epsilon}}} \cdot \text{scale} + \text{bias}\right)

    Channels are the last axis. All arguments but `activation` are Flax's. Numerics and references:
    see `jax_gradops.group_norm`.

    Attributes:
      activation: "silu" (also named swish), "relu", or None. It takes no extra pass over memory.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0, 3.0, 5.0, 9.0]])).round(3))
    [[-1.  1. -1.  1.]]
    """

    activation: Literal["silu", "relu"] | None = None
    __init__: Any = nnx_calls.with_activation(nnx.GroupNorm)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `x`, as `flax.nnx.GroupNorm` does: see `LayerNorm`."""
        return nnx_calls.group_norm(self.activation, self, x, mask=mask)


class InstanceNorm(nnx.InstanceNorm):
    r"""`flax.nnx.InstanceNorm` by `jax_gradops.instance_norm`. `activation` is as in `GroupNorm`.

    .. math:: y = \text{activation}\left(\frac{x - \text{mean}}{\sqrt{\text{var} +
              \text{epsilon}}} \cdot \text{scale} + \text{bias}\right)

    Numerics and references: see `jax_gradops.instance_norm`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.InstanceNorm(1, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[[1.0], [3.0]]]))[..., 0].round(3))
    [[-1.  1.]]
    """

    activation: Literal["silu", "relu"] | None = None
    __init__: Any = nnx_calls.with_activation(nnx.InstanceNorm)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises `x`, as `flax.nnx.InstanceNorm` does: see `LayerNorm`."""
        return nnx_calls.group_norm(self.activation, self, x, mask=mask)


for _norm in (GroupNorm, InstanceNorm):
    nnx_calls.ACTIVATED[_norm] = nnx_calls.group_norm, ("silu", "relu")


class Embed(nnx.Embed):
    r"""`flax.nnx.Embed` by `jax_gradops.embedding_lookup`. Arguments and parameters are Flax's.

    .. math:: y = \text{embedding}_{\text{inputs}}

    The gradient of the table is added up in float32. Only the rows that are looked up are cast to
    `dtype`. Numerics and references: see `jax_gradops.embedding_lookup`.

    Args:
      num_embeddings: the number of rows of the table.
      features: the size of the result's last axis.
      rngs: Flax's random keys, such as ``nnx.Rngs(0)``.
      **others: all other arguments of `flax.nnx.Embed`, such as `dtype` and `embedding_init`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> jax_gradops.nnx.Embed(5, 4, rngs=nnx.Rngs(0))(jnp.array([[0, 3]])).shape
    (1, 2, 4)
    """

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """Looks up rows, as `flax.nnx.Embed` does.

        Args:
          inputs: integers of any shape. Flax's code handles all others, and a table of one row.
          out_sharding: as in Flax.

        Returns:
          An array of shape inputs.shape + (features,) in `dtype`, which is the table's by default.
        """
        return nnx_calls.embed(self, inputs, out_sharding)


class Linear(nnx.Linear):
    r"""`flax.nnx.Linear` with a faster gradient of the bias: it reads the gradient of y once.

    .. math:: y = x \, \text{kernel} + \text{bias}

    Use it for a layer whose bias is not fused by `DenseGelu` or `deferred_bias`. The typical case
    is the query-key-value projection of a transformer block. XLA concatenates the gradients of
    queries, keys and values again for each use. Here they are concatenated once. For 16-bit
    elements on an NVIDIA GPU, a matrix product with ones sums up the columns. Its products are
    exact, and its float32 sums are rounded once, to the bias's dtype. XLA sums up the columns in
    all other cases, and for arrays that are sharded on an Explicit mesh.

    Args:
      in_features: the size of x's last axis.
      out_features: the size of y's last axis.
      rngs: Flax's random keys, such as ``nnx.Rngs(0)``.
      **others: all other arguments of `flax.nnx.Linear`, such as `dtype` and `use_bias`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> jax_gradops.nnx.Linear(4, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
    (2, 8)
    """

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """Maps [..., in_features] to [..., out_features], as `flax.nnx.Linear` does."""
        return nnx_calls.linear(self, inputs, out_sharding)


nnx_calls.LINEARS[Linear] = Linear.__call__


class DenseGelu(nnx.Linear):
    r"""``gelu(Linear(x))``: a `flax.nnx.Linear` with bias and GELU in one operation.

    .. math:: y = \mathrm{gelu}(x \, \text{kernel} + \text{bias})

    Parameters are `kernel` and `bias`, as in Flax. Numerics and references: see `jax_gradops.gelu`.

    Args:
      in_features: as in `flax.nnx.Linear`.
      out_features: as in `flax.nnx.Linear`.
      approximate: whether GELU has the tanh form, as in `jax.nn.gelu`.
      **linear: all other arguments of `flax.nnx.Linear`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> jax_gradops.nnx.DenseGelu(4, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
    (2, 8)
    """

    def __init__(
        self, in_features: int, out_features: int, *, approximate: bool = True, **linear: Any
    ) -> None:
        super().__init__(in_features, out_features, **linear)
        self.approximate = _checks.flag("DenseGelu", "approximate", approximate)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """Maps [..., in_features] to [..., out_features], in `dtype` or a promoted dtype."""
        return nnx_calls.linear_gelu(self.approximate, self, inputs, out_sharding)


class Sequential(nnx.Sequential):
    """`flax.nnx.Sequential` that computes some pairs of neighbouring layers as one operation.

    One pair is a `Linear` and the GELU after it: see `DenseGelu`. A GELU is `jax.nn.gelu` (also
    named `nnx.gelu`), `jax_gradops.gelu`, or a `functools.partial` of one of them with
    `approximate`.

    The other pair is a norm of this module and `jax.nn.relu` or `jax.nn.silu` (also named
    `nnx.relu`, `nnx.silu`, `nnx.swish`) after it: see `activation` of `BatchNorm` and `GroupNorm`.

    The layers themselves are not changed. Code that watches calls, such as `nnx.tabulate`, does not
    see the call of the first layer of a pair.

    Attributes:
      gelu: whether a `Linear` and a GELU become one operation. `fuse` sets it to False if it was
        not asked for that.

    Args:
      *fns: the layers, as in Flax.

    >>> import jax, jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> mlp = jax_gradops.nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.nn.gelu)
    >>> "bias_gelu_fwd" in jax.jit(lambda x: mlp(x)).lower(jnp.ones((2, 4))).as_text()
    True
    """

    gelu: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls one layer after the other, as `flax.nnx.Sequential` does."""
        return nnx_calls.sequential(nnx_calls.with_pairs(self, self.gelu), *args, **kwargs)


nnx_calls.SEQUENTIALS[Sequential] = Sequential.__call__


@_checks.with_hints
def add_norm(
    norm: Any, x: jax.Array, residual: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``(norm(x + residual), x + residual)``, in one pass over memory if `norm` is of this module.

    The backward pass, too, is one pass: it adds the cotangents of both results. With a separate
    norm, each addition to a residual stream is one more pass::

        def __call__(self, x, update):  # a transformer's block: x + update is its input
            y, x = add_norm(self.attention_norm, x, update)
            y, x = add_norm(self.mlp_norm, x, self.attention(y))
            return x, self.mlp(y)

    With `bias`, the sum is ``x + (residual + bias)``. The bias and its gradient take no further
    pass: see `deferred_bias`.

    Args:
      norm: any callable. `LayerNorm` and `RMSNorm` of `jax_gradops.nnx` fuse the addition.
      x: the input of `norm`.
      residual: an array. The addition is fused only if x has equal shape and dtype.
      bias: shape ``residual.shape[-1:]``, any dtype. An addition that is not fused casts it to
        the dtype of residual. None: no bias.

    Returns:
      The result of `norm` for the sum, and the sum.

    Raises:
      TypeError: if `norm` cannot be called, or another argument is not an array.
      ValueError: if `bias` has another shape.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_gradops.nnx import LayerNorm, add_norm
    >>> norm = LayerNorm(2, rngs=nnx.Rngs(0))
    >>> y, x = add_norm(norm, jnp.ones((1, 2)), jnp.array([[1.0, 3.0]]))
    >>> print(y.round(3), x)
    [[-1.  1.]] [[2. 4.]]
    """
    return common.add_norm((LayerNorm, RMSNorm), norm, x, residual, bias)


@_checks.with_hints
def deferred_bias(linear: Any, inputs: Any) -> tuple[jax.Array, jax.Array | None]:
    """A linear layer's result without its bias, and the bias, for `add_norm` to add.

    A separate addition is one more pass over memory. So is a separate sum of the bias's gradient::

        y, x = add_norm(self.mlp_norm, x, *deferred_bias(self.attention_out, y))

    Args:
      linear: a `flax.nnx.Linear`, or an `nnx.Sequential` with a `Linear` as last layer. Any other
        callable, or a subclass with its own `__call__`, may do more: its whole result is returned.
      inputs: the input of `linear`.

    Returns:
      The result without the bias, and the bias, not rounded to the layer's `dtype`. If there is no
      bias to defer, ``linear(inputs)`` and None.

    Raises:
      TypeError: if `linear` cannot be called.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_gradops.nnx import deferred_bias
    >>> linear = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> print(*deferred_bias(linear, jnp.ones((1, 2))))
    [[2. 2. 2.]] [0. 0. 0.]
    >>> print(*deferred_bias(nnx.relu, jnp.ones(2)))
    [1. 1.] None
    """
    common.check_callable("deferred_bias", "linear", linear)
    return nnx_calls.deferred_bias(linear, inputs)


# --- Models that exist already -------------------------------------------------------------------

_Model = TypeVar("_Model", bound=nnx.Module)
_OURS = {
    nnx.LayerNorm: LayerNorm,
    nnx.RMSNorm: RMSNorm,
    nnx.BatchNorm: BatchNorm,
    nnx.GroupNorm: GroupNorm,
    nnx.InstanceNorm: InstanceNorm,
    nnx.Embed: Embed,
    nnx.Linear: Linear,
    nnx.Sequential: Sequential,
}


@_checks.with_hints
def fuse(
    model: _Model,
    *,
    gelu: bool = False,
    linear: bool = False,
    residuals: Literal["input", "output"] | None = None,
    report: Callable[[FuseReport], Any] | None = None,
) -> _Model:
    """Changes a model's norms and embeddings to the classes of this module, in place.

    Modules and parameters keep their identity and their names: optimizers, checkpoints and
    references stay valid. Call it outside of `nnx.jit`.

    The norms are layer, RMS, batch, group and instance norms. In an `nnx.Sequential`, a batch norm
    and the `jax.nn.relu` after it become one operation. So do a group or instance norm and the
    `jax.nn.silu` or `jax.nn.relu` after it. No other code can see the result between them.

    Args:
      model: an NNX module. Its norms and embeddings and those of all modules in it are changed.
      gelu: also compute each `Linear` of an `nnx.Sequential` together with a GELU that follows it.
        Any other GELU is called by a module's code, and `fuse` cannot see it: use `DenseGelu`.
      linear: also change each `Linear` that has a bias: see `jax_gradops.nnx.Linear`.
        `LinearGeneral` stays: Flax's attention uses it.
      residuals: what layer and RMS norms save for the backward pass: see `LayerNorm`. None changes
        nothing: a new norm has "input". A norm whose scale has zeros is not set to "output": the
        zeros would then stay zeros.
      report: a function that gets a `FuseReport`: what was changed, what was left, and why. By
        default, the logger "jax_gradops" logs the report. The level is INFO, or WARNING if the
        model has no module of this library after the call.

    Returns:
      `model`.

    Raises:
      TypeError: if `model` is not an NNX module, or another argument has a wrong type.
      ValueError: if `residuals` is another value.

    >>> import jax_gradops.nnx
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs))
    >>> model = jax_gradops.nnx.fuse(model, report=print)
    fused 1, left 0
      layers[0]: LayerNorm -> jax_gradops.nnx.LayerNorm
    """
    _checks.choice("fuse", "residuals", residuals, "input", "output", None)
    _checks.flag("fuse", "gelu", gelu)
    _checks.flag("fuse", "linear", linear)
    if report is not None and not callable(report):
        raise _checks.wrong("fuse", "report", "a function, print say", report, TypeError)
    done = nnx_fuse.change(model, _OURS, gelu, linear, residuals)
    level = logging.INFO if done.changed or done.already else logging.WARNING
    (report or functools.partial(_logger.log, level, "%s"))(done)
    return model


@_checks.with_hints
def unfuse(model: _Model) -> _Model:
    """Undoes `fuse`, in place: changes modules of `jax_gradops.nnx` to Flax's classes.

    `DenseGelu` and norms with an `activation` stay: Flax has no modules that compute the same.

    Args:
      model: an NNX module.

    Returns:
      `model`.

    Raises:
      TypeError: if `model` is not an NNX module.

    >>> import jax_gradops.nnx
    >>> from flax import nnx
    >>> model = nnx.Sequential(jax_gradops.nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    >>> type(jax_gradops.nnx.unfuse(model).layers[0]) is nnx.LayerNorm
    True
    """
    flax = {ours: flax for flax, ours in _OURS.items()}
    for _, module in nnx_fuse.modules_of("unfuse", model):
        if type(module) in flax and getattr(module, "activation", None) is None:
            object.__setattr__(module, "__class__", flax[type(module)])
            for own in {"residuals", "gelu", "activation"} & vars(module).keys():
                delattr(module, own)
    return model
