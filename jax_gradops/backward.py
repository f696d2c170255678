"""The gradient operators as functions: call them without autodiff, with saved statistics.

Use them in training loops without autodiff, and for comparisons with other frameworks. They run the
kernels that the derivatives of `jax_gradops.layer_norm`, `rms_norm`, `batch_norm`, `group_norm`,
`gelu` and `bias_gelu` run. Their names elsewhere are:

- ONNX Runtime: LayerNormalizationGrad, InvertibleLayerNormalizationGrad,
  SimplifiedLayerNormalizationGrad, BatchNormalizationGrad; GeluGrad, FastGeluGrad, BiasGeluGrad_dX,
  BiasFastGeluGrad_dX, InplaceClipGradNorm, GatherGrad.
- oneDNN Graph: LayerNormBackward.

Layer norm and RMS norm normalise the axes from `begin_norm_axis` on. All functions take any mixture
of float16, bfloat16, float32 and float64 among x, parameters and statistics. They run under
`jax.jit` and every other transformation. Inside `jax.shard_map`, gradients of parameters are sums
over the device's own rows. Add them up by `jax.lax.psum`.
"""

from jax_gradops._ops.batch_norm.backward import batch_norm_backward as batch_norm_backward
from jax_gradops._ops.batch_norm.backward import batch_norm_forward as batch_norm_forward
from jax_gradops._ops.batch_norm.group_backward import group_norm_backward as group_norm_backward
from jax_gradops._ops.batch_norm.group_backward import group_norm_forward as group_norm_forward
from jax_gradops._ops.clip.global_norm import (
    inplace_clip_by_global_norm as inplace_clip_by_global_norm,
)
from jax_gradops._ops.cross_entropy.cross_entropy import (
    softmax_cross_entropy_backward as softmax_cross_entropy_backward,
)
from jax_gradops._ops.embedding.embedding import embedding_backward as embedding_backward
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
