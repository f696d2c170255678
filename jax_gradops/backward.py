"""The gradient operators themselves: callable without autodiff, on statistics that were saved.

They are what other frameworks call LayerNormalizationGrad, InvertibleLayerNormalizationGrad,
SimplifiedLayerNormalizationGrad, BatchNormalizationGrad, GeluGrad, FastGeluGrad, BiasGeluGrad_dX,
BiasFastGeluGrad_dX and InplaceClipGradNorm (ONNX Runtime) and LayerNormBackward (oneDNN Graph).
They run the same kernels as the derivatives of `jax_gradops.layer_norm`, `rms_norm`, `batch_norm`,
`gelu` and `bias_gelu`. Use them in training loops that do without autodiff, and to compare with
those frameworks.

The norms take any shape whose axes from `begin_norm_axis` on are normalised; all take any mixture
of float16, bfloat16, float32 and float64 among x, parameters and statistics, and run under
`jax.jit` and every other transformation. Inside `jax.shard_map`, gradients of parameters are sums
over the device's own rows: `jax.lax.psum` adds them up.
"""

from jax_gradops._ops.batch_norm.backward import batch_norm_backward as batch_norm_backward
from jax_gradops._ops.batch_norm.backward import batch_norm_forward as batch_norm_forward
from jax_gradops._ops.clip.global_norm import (
    inplace_clip_by_global_norm as inplace_clip_by_global_norm,
)
from jax_gradops._ops.gelu.bias_gelu import bias_gelu_backward as bias_gelu_backward
from jax_gradops._ops.gelu.bias_gelu import gelu_backward as gelu_backward
from jax_gradops._ops.row_norm.backward import layer_norm_backward as layer_norm_backward
from jax_gradops._ops.row_norm.backward import (
    layer_norm_backward_from_output as layer_norm_backward_from_output,
)
from jax_gradops._ops.row_norm.backward import layer_norm_forward as layer_norm_forward
from jax_gradops._ops.row_norm.rms_backward import rms_norm_backward as rms_norm_backward
from jax_gradops._ops.row_norm.rms_backward import (
    rms_norm_backward_from_output as rms_norm_backward_from_output,
)
from jax_gradops._ops.row_norm.rms_backward import rms_norm_forward as rms_norm_forward
