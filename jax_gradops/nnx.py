"""Flax NNX's norms on this library's kernels, a linear layer with GELU, and `fuse`.

Constructors, calls, parameters and initial values are Flax's, so that a checkpoint made with one
loads into the other. The classes are subclasses of Flax's.

    >>> from flax import nnx
    >>> import jax_gradops.nnx
    >>> norm = jax_gradops.nnx.LayerNorm(8, rngs=nnx.Rngs(0))  # was nnx.LayerNorm(...)
    >>> isinstance(norm, nnx.LayerNorm)
    True

`fuse` gives a model that exists already the classes of this module.

What the kernels do not cover takes Flax's own path: `mask`, `axis_index_groups`, LayerNorm and
RMSNorm with an `axis_name` or with axes that are not the last ones, BatchNorm with several axes or
with running averages, complex or integer arrays.

Differences: roundings, fewer where `dtype` is narrower than the parameters, which Flax rounds; the
variance is always that of the deviations, never E[x²] - E[x]², whatever `use_fast_variance`
says; no gradient flows through the running averages that BatchNorm stores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_gradops import _checks
from jax_gradops._flax import common, nnx_calls, nnx_fuse
from jax_gradops._flax.nnx_fuse import FuseReport

__all__ = [
    "BatchNorm",
    "DenseGelu",
    "FuseReport",
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
    r"""`flax.nnx.LayerNorm` on `jax_gradops.layer_norm`: arguments and parameters are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    Attributes:
      residuals: "input", or "output" to save the result for the backward pass, not the input: less
        memory where the result is kept anyway, in the same dtype, for a matrix product say. Where a
        scale is 0 it then stays so, as the result says nothing of the input: see
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
          x: [..., num_features]; what is none of the four floats takes Flax's path.
          mask: as Flax's, whose own path it takes.

        Returns:
          An array of x's shape, of `dtype` or, without that, of x's and the parameters' together.
        """
        return nnx_calls.norm(self, nnx_calls.LAYER_NORM, x, mask)


class RMSNorm(nnx.RMSNorm):
    r"""`flax.nnx.RMSNorm` on `jax_gradops.rms_norm`; `residuals` as for `LayerNorm`.

    .. math:: y = \frac{x}{\sqrt{\text{mean}(x^2) + \text{epsilon}}} \cdot \text{scale}

    Numerics and references: see `jax_gradops.rms_norm`.

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
    r"""`flax.nnx.BatchNorm` on `jax_gradops.batch_norm` in training: arguments are Flax's.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}
              \cdot \text{scale} + \text{bias}

    With running averages it is Flax's, which XLA fuses with what comes before and after. The
    batch's statistics, of which the running averages are made, have no gradient. Numerics and
    references: see `jax_gradops.batch_norm`.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> norm = jax_gradops.nnx.BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0], [3.0]]))[:, 0].round(3), norm.mean[...])
    [-1.  1.] [0.2]
    """

    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises `x` as `flax.nnx.BatchNorm` does: see `LayerNorm`.

        Of other than two to five axes, that is by Flax's own path.
        """
        x = jnp.asarray(x)
        axis = common.channel_axis(self, x, mask)
        running = self.use_running_average if use_running_average is None else use_running_average
        if axis is None or running is None or running:
            return nnx_calls.BATCH_NORM(self, x, use_running_average, mask=mask)
        given = [nnx_calls.value(v) for v in (self.mean, self.var, self.scale, self.bias)]
        x, *promoted = self.promote_dtype((x, *given), dtype=self.dtype)
        _, _, scale, bias = nnx_calls.not_rounded(self, given, promoted)
        y, mean, var = common.batch_norm(self, x, scale, bias, axis=axis, axis_name=self.axis_name)
        for average, new in ((self.mean, mean), (self.var, var)):
            average[...] = common.running(self, average[...], new).astype(average[...].dtype)
        return y


class Linear(nnx.Linear):
    r"""`flax.nnx.Linear`, the gradient of whose bias reads that of y once.

    .. math:: y = x \, \text{kernel} + \text{bias}

    It is for layers whose bias neither `DenseGelu` nor `deferred_bias` takes, such as the one that
    gives a transformer block's queries, keys and values: XLA puts the gradients of these together
    anew for each use, here they are put together once. With 16-bit elements on an NVIDIA GPU, their
    columns are summed up by a matrix product with ones: exact products, float32 sums, rounded once,
    to the bias's dtype. Elsewhere, and of arrays that are sharded on an Explicit mesh, by XLA.

    >>> import jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> jax_gradops.nnx.Linear(4, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
    (2, 8)
    """

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """[..., in_features] to [..., out_features], as `flax.nnx.Linear` does."""
        return nnx_calls.linear(self, inputs, out_sharding)


nnx_calls.LINEARS[Linear] = Linear.__call__


class DenseGelu(nnx.Linear):
    r"""``gelu(Linear(x))``: `flax.nnx.Linear`, whose bias and GELU are one operation.

    .. math:: y = \mathrm{gelu}(x \, \text{kernel} + \text{bias})

    Parameters are `kernel` and `bias`, as Flax's. Numerics and references: see `jax_gradops.gelu`.

    Args:
      in_features: as `flax.nnx.Linear`.
      out_features: as `flax.nnx.Linear`.
      approximate: the tanh form, as in `jax.nn.gelu`.
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
        """[..., in_features] to [..., out_features], of `dtype` or of inputs' and parameters'."""
        return nnx_calls.linear_gelu(self.approximate, self, inputs, out_sharding)


class Sequential(nnx.Sequential):
    """`flax.nnx.Sequential`, in which a `Linear` and the GELU after it are computed as `DenseGelu`.

    GELU is `jax.nn.gelu` (which `nnx.gelu` is), `jax_gradops.gelu`, or a `functools.partial` of one
    of them with `approximate`. The layers themselves are not changed; what watches their calls, as
    `nnx.tabulate` does, does not see such a `Linear`'s.

    >>> import jax, jax.numpy as jnp, jax_gradops.nnx
    >>> from flax import nnx
    >>> mlp = jax_gradops.nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.nn.gelu)
    >>> "bias_gelu_fwd" in jax.jit(lambda x: mlp(x)).lower(jnp.ones((2, 4))).as_text()
    True
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls one layer after the other, as `flax.nnx.Sequential` does."""
        return nnx_calls.sequential(nnx_calls.with_pairs(self), *args, **kwargs)


nnx_calls.SEQUENTIALS[Sequential] = Sequential.__call__


def add_norm(
    norm: Any, x: jax.Array, residual: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``(norm(x + residual), x + residual)``, in one pass over memory if `norm` is of this module.

    So is the backward pass, which sums the cotangents of both: with a norm on its own, each
    addition to a residual stream is a pass more.

        def __call__(self, x, update):  # a transformer's block: x + update is its input
            y, x = add_norm(self.attention_norm, x, update)
            y, x = add_norm(self.mlp_norm, x, self.attention(y))
            return x, self.mlp(y)

    With `bias`, it is ``x + (residual + bias)``, in the same pass too, and so is the bias's
    gradient: see `deferred_bias`.

    Args:
      norm: any callable; `LayerNorm` and `RMSNorm` of this module fuse the addition.
      x: what `norm` takes.
      residual: of the same shape and dtype, else the addition is one of its own.
      bias: shape ``residual.shape[-1:]``, any dtype. Where the addition is one of its own, it is
        cast to residual's. None: no bias.

    Returns:
      What `norm` returns of the sum, and the sum.

    Raises:
      TypeError: for a `norm` that cannot be called, or another argument that is no array.
      ValueError: for a `bias` of another shape.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_gradops.nnx import LayerNorm, add_norm
    >>> norm = LayerNorm(2, rngs=nnx.Rngs(0))
    >>> y, x = add_norm(norm, jnp.ones((1, 2)), jnp.array([[1.0, 3.0]]))
    >>> print(y.round(3), x)
    [[-1.  1.]] [[2. 4.]]
    """
    return common.add_norm((LayerNorm, RMSNorm), norm, x, residual, bias)


def deferred_bias(linear: Any, inputs: Any) -> tuple[jax.Array, jax.Array | None]:
    """A linear layer's result without its bias, and the bias, for `add_norm` to add.

    By itself, the addition is a pass over memory more, and so is the sum of the bias's gradient.

        y, x = add_norm(self.mlp_norm, x, *deferred_bias(self.attention_out, y))

    Args:
      linear: a `flax.nnx.Linear`, or an `nnx.Sequential` whose last layer is one. Any other
        callable, or a subclass with a call of its own, may do more: its whole result is taken.
      inputs: what `linear` takes.

    Returns:
      The result without the bias, and the parameter's value, which is not rounded to the layer's
      `dtype`; or ``linear(inputs)`` and None.

    Raises:
      TypeError: for a `linear` that cannot be called.

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
    nnx.Linear: Linear,
    nnx.Sequential: Sequential,
}


def fuse(
    model: _Model,
    *,
    gelu: bool = False,
    linear: bool = False,
    residuals: Literal["input", "output"] | None = None,
    report: Callable[[FuseReport], Any] | None = None,
) -> _Model:
    """Gives a model's layer, RMS and batch norms the classes of this module, in place.

    Modules and parameters stay the same objects under the same names: optimizers, checkpoints and
    references stay valid. Call it outside of `nnx.jit`.

    Args:
      model: an NNX module: its norms are changed, and those of all modules in it.
      gelu: also compute each `Linear` of an `nnx.Sequential` together with a GELU that follows it.
        Elsewhere a GELU is code of a module's, of which nothing can be proved: use `DenseGelu`.
      linear: also change each `Linear`: see the class of that name. `LinearGeneral`, of which
        Flax's attention is made, stays.
      residuals: what layer and RMS norms save for the backward pass: see `LayerNorm`. None leaves
        each as it is, "input" at first. A norm whose scale has zeros, which would stay so with
        "output", keeps "input".
      report: is given what was changed, what was left and why; by default, it is logged by the
        logger "jax_gradops" at level INFO.

    Returns:
      `model`.

    Raises:
      TypeError: if it is not an NNX module, or another argument is of a wrong kind.
      ValueError: if `residuals` is neither.

    >>> import jax_gradops.nnx
    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs))
    >>> model = jax_gradops.nnx.fuse(model, report=print)
    fused 1, left 0
      layers.0: now jax_gradops.nnx.LayerNorm
    """
    _checks.choice("fuse", "residuals", residuals, "input", "output", None)
    _checks.flag("fuse", "gelu", gelu)
    _checks.flag("fuse", "linear", linear)
    if report is not None and not callable(report):
        raise _checks.wrong("fuse", "report", "a function, print say", report, TypeError)
    done = nnx_fuse.change(model, _OURS, gelu, linear, residuals)
    (report or functools.partial(_logger.info, "%s"))(done)
    return model


def unfuse(model: _Model) -> _Model:
    """Undoes `fuse`, in place: gives the modules that have classes of this module Flax's.

    `DenseGelu` stays, as no module of Flax's does the same.

    Args:
      model: an NNX module.

    Returns:
      `model`.

    Raises:
      TypeError: if it is not an NNX module.

    >>> import jax_gradops.nnx
    >>> from flax import nnx
    >>> model = nnx.Sequential(jax_gradops.nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    >>> type(jax_gradops.nnx.unfuse(model).layers[0]) is nnx.LayerNorm
    True
    """
    flax = {ours: flax for flax, ours in _OURS.items()}
    for _, module in nnx_fuse.modules_of("unfuse", model):
        if type(module) in flax:
            object.__setattr__(module, "__class__", flax[type(module)])
            if "residuals" in vars(module):
                del module.residuals
    return model
