"""Fused CUDA and CPU kernels for norms, GELU, cross-entropy and gradient clipping in JAX.

Norms: `layer_norm`, `rms_norm`, `add_layer_norm`, `add_rms_norm`, `batch_norm`,
`batch_norm_inference`, `group_norm`, `instance_norm`. Activations: `gelu`, `bias_gelu`. Losses:
`softmax_cross_entropy_with_integer_labels`, `linear_softmax_cross_entropy`. Embeddings:
`embedding_lookup`. Clipping: `clip_by_global_norm` for Optax, `clip_tree_by_global_norm`,
`global_norm`. `fuse` puts these ops into any function. `jax_gradops.nnx` and `jax_gradops.linen`
have modules for Flax. `jax_gradops.backward` has the gradient operators.
"""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from jax_gradops import backward as backward
from jax_gradops._fuse.fuse import fuse as fuse
from jax_gradops._fuse.report import FuseSummary as FuseSummary
from jax_gradops._implementation import ImplementationInUse as ImplementationInUse
from jax_gradops._implementation import use_implementation as use_implementation
from jax_gradops._ops.batch_norm.batch_norm import batch_norm as batch_norm
from jax_gradops._ops.batch_norm.batch_norm import batch_norm_inference as batch_norm_inference
from jax_gradops._ops.batch_norm.group_norm import group_norm as group_norm
from jax_gradops._ops.batch_norm.group_norm import instance_norm as instance_norm
from jax_gradops._ops.clip.global_norm import ClipByGlobalNormState as ClipByGlobalNormState
from jax_gradops._ops.clip.global_norm import clip_by_global_norm as clip_by_global_norm
from jax_gradops._ops.clip.global_norm import clip_tree_by_global_norm as clip_tree_by_global_norm
from jax_gradops._ops.clip.global_norm import global_norm as global_norm
from jax_gradops._ops.cross_entropy.cross_entropy import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from jax_gradops._ops.cross_entropy.linear import (
    linear_softmax_cross_entropy as linear_softmax_cross_entropy,
)
from jax_gradops._ops.embedding.embedding import embedding_lookup as embedding_lookup
from jax_gradops._ops.gelu.bias_gelu import bias_gelu as bias_gelu
from jax_gradops._ops.gelu.bias_gelu import gelu as gelu
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm as add_layer_norm
from jax_gradops._ops.row_norm.layer_norm import add_rms_norm as add_rms_norm
from jax_gradops._ops.row_norm.layer_norm import layer_norm as layer_norm
from jax_gradops._ops.row_norm.layer_norm import rms_norm as rms_norm
from jax_gradops._status import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
from jax_gradops._status import implementation_in_use as implementation_in_use

if _typing.TYPE_CHECKING:
    from jax_gradops import linen as linen
    from jax_gradops import nnx as nnx

try:
    __version__ = _metadata.version("jax_gradops")
except _metadata.PackageNotFoundError:  # a source folder
    __version__ = "0+unknown"


def __getattr__(name: str) -> _typing.Any:
    """Imports `jax_gradops.linen` or `jax_gradops.nnx` at the first use: they import Flax."""
    if name not in ("linen", "nnx"):
        hint = ": did you mean jax_gradops.nnx.unfuse?" if name == "unfuse" else ""
        raise AttributeError(f"module 'jax_gradops' has no attribute {name!r}{hint}")
    try:
        return _importlib.import_module(f"jax_gradops.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flax":
            raise
        raise ImportError(f"jax_gradops.{name} needs Flax: pip install flax") from error
