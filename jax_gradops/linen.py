"""Flax linen's norms, and Dense with GELU, on this library's kernels.

Constructors, calls, parameters, collections and initial values are Flax's, so that a checkpoint made
with one loads into the other; the classes are subclasses of Flax's.

    >>> from jax_gradops import linen as nn

What the kernels do not cover takes Flax's own path: `mask`, `axis_index_groups`,
`force_float32_reductions=False`, complex or integer inputs, axes that are not trailing. Differences
are roundings; and that the variance is always computed from deviations, never as E[x²] - E[x]²,
whatever `use_fast_variance` says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from jax_gradops import _modules
from jax_gradops._ops.bias_gelu import bias_gelu, gelu

__all__ = ["BatchNorm", "DenseGelu", "LayerNorm", "RMSNorm"]


def _parameters(module: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """scale and bias, or None."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if getattr(module, "use_bias", False):
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias


def _is_plain(module: Any, x: Any, mask: Any) -> bool:
    return (
        mask is None
        and module.axis_index_groups is None
        and module.force_float32_reductions
        and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and jnp.issubdtype(module.param_dtype, jnp.floating)
        and (module.dtype is None or jnp.issubdtype(module.dtype, jnp.floating))
    )


def _norm(module: Any, x: Any, mask: Any, centered: bool) -> jax.Array | None:
    if not _is_plain(module, x, mask) or module.axis_name is not None:
        return None
    x = jnp.asarray(x)
    axes = _modules.trailing_axes(x.ndim, module.reduction_axes, module.feature_axes)
    if axes is None or x.size == 0:
        return None
    scale, bias = _parameters(module, x.shape[x.ndim - axes :])
    return _modules.norm(
        x,
        scale,
        bias,
        centered=centered,
        epsilon=module.epsilon,
        dtype=module.dtype,
        reduction_axes=module.reduction_axes,
        feature_axes=module.feature_axes,
    )


class LayerNorm(linen.LayerNorm):
    """`flax.linen.LayerNorm` on `jax_gradops.layer_norm`."""

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        y = _norm(self, x, mask, centered=True)
        return super().__call__(x, mask=mask) if y is None else y


class RMSNorm(linen.RMSNorm):
    """`flax.linen.RMSNorm` on `jax_gradops.rms_norm`."""

    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        y = _norm(self, x, mask, centered=False)
        return super().__call__(x, mask=mask) if y is None else y


class BatchNorm(linen.BatchNorm):
    """`flax.linen.BatchNorm` on `jax_gradops.batch_norm` in training; with running averages it is
    Flax's, which XLA fuses with what comes before and after.

    The batch's statistics, of which the running averages are made, have no gradient.
    """

    @linen.compact
    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        running = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        axes = _modules.canonical_axes(jnp.ndim(x), self.axis)
        if running or not _is_plain(self, x, mask) or len(axes) != 1 or jnp.size(x) == 0:
            return super().__call__(
                x, running if self.use_running_average is None else None, mask=mask
            )
        if not 2 <= jnp.ndim(x) <= 5:
            return super().__call__(
                x, running if self.use_running_average is None else None, mask=mask
            )
        x = jnp.asarray(x)
        shape = (x.shape[axes[0]],)
        ra_mean = self.variable("batch_stats", "mean", lambda s: jnp.zeros(s, jnp.float32), shape)
        ra_var = self.variable("batch_stats", "var", lambda s: jnp.ones(s, jnp.float32), shape)
        result = _modules.batch_norm(
            x,
            *_parameters(self, shape),
            axis=axes,
            epsilon=self.epsilon,
            dtype=self.dtype,
            axis_name=None if self.is_initializing() else self.axis_name,
        )
        assert result is not None
        y, mean, var = result
        if not self.is_initializing():
            ra_mean.value = self.momentum * ra_mean.value + (1 - self.momentum) * mean
            ra_var.value = self.momentum * ra_var.value + (1 - self.momentum) * var
        return y


class DenseGelu(linen.Dense):
    """gelu(Dense(x)): `flax.linen.Dense`, of which the bias and GELU are one operation.

    Attributes:
      approximate: the tanh form, as in `jax.nn.gelu`.
    """

    approximate: bool = True

    @linen.compact
    def __call__(self, inputs: Any) -> jax.Array:
        kernel: Any = self.param(
            "kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype
        )
        bias: Any = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        dot_general = self.dot_general or lax.dot_general
        if self.dot_general_cls is not None:
            dot_general = self.dot_general_cls()
        y = dot_general(
            inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())), precision=self.precision
        )
        if not jnp.issubdtype(y.dtype, jnp.floating):  # complex: no kernel
            return jax.nn.gelu(y if bias is None else y + bias, self.approximate)
        if bias is None:
            return gelu(y, self.approximate)
        return bias_gelu(y, bias.astype(y.dtype), self.approximate)
