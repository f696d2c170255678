"""The ops as functions of PyTorch, and of kernel libraries for PyTorch.

Each one is a `TorchFunction`. A function in `MAKERS` makes it for a case.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_gradops._ops.batch_norm.spec import groups_of
from jax_gradops._ops.cross_entropy import oracle
from jax_gradops._tools.bench import formulas
from jax_gradops._tools.bench.cases import Case


class Unsupported(Exception):
    """The library has no such function. The message names the missing function."""


@dataclasses.dataclass(frozen=True)
class TorchFunction:
    """A function on PyTorch tensors.

    Attributes:
      call: takes the results of `save` (backward: dy before them), and returns a list of results.
      save: takes x, further arrays of its shape, and the parameters.
      wide_parameters: whether parameters of 16-bit cases are float32. Else they have x's dtype.
    """

    call: Callable[..., Sequence[Any]]
    save: Callable[..., Sequence[Any]] = lambda *arguments: arguments
    wide_parameters: bool = False


def torch_module() -> Any:
    return importlib.import_module("torch")


def _by_autograd(forward: Callable[..., Any], wide_parameters: bool = False) -> TorchFunction:
    """The backward pass of a differentiable function, without its forward pass."""
    torch = torch_module()

    def save(*arrays: Any) -> list[Any]:
        leaves = [a.detach().requires_grad_() for a in arrays]
        with torch.enable_grad():
            return [forward(*leaves), *leaves]

    def call(dy: Any, y: Any, *leaves: Any) -> Sequence[Any]:
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return TorchFunction(call, save, wide_parameters)


def _of(case: Case, forward: Callable[..., Any], wide_parameters: bool = False) -> TorchFunction:
    """The forward or backward pass of a differentiable function, as the case says."""
    if case.direction == "bwd":
        return _by_autograd(forward, wide_parameters)
    return TorchFunction(lambda *a: [forward(*a)], wide_parameters=wide_parameters)


# --- PyTorch -------------------------------------------------------------------------------------


def _torch_layer_norm(case: Case) -> TorchFunction:
    torch, width = torch_module(), list(case.shape[1:])
    if case.direction == "fwd":
        norm = torch.nn.functional.layer_norm
        return TorchFunction(lambda x, w, b: [norm(x, width, w, b, formulas.EPSILON)])
    aten = torch.ops.aten

    def save(x: Any, w: Any, b: Any) -> list[Any]:
        return [x, *aten.native_layer_norm(x, width, w, b, formulas.EPSILON)[1:], w, b]

    def call(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any) -> Sequence[Any]:
        return aten.native_layer_norm_backward(dy, x, width, mean, rstd, w, b, [True] * 3)

    return TorchFunction(call, save)


def _torch_rms_norm(case: Case) -> TorchFunction:
    norm, width = torch_module().nn.functional.rms_norm, list(case.shape[1:])
    return _of(case, lambda x, w: norm(x, width, w, formulas.EPSILON))


def _batch_norm(
    case: Case, forward: Callable[..., Sequence[Any]], backward: Callable[..., Sequence[Any]]
) -> TorchFunction:
    """Batch norm, then the addition and relu in place, as in torchvision's residual networks.

    `forward` returns y and further results. `backward` takes dy, x, the scale and these results.
    PyTorch's channels are the second axis. If x has channels last, its tensors have the memory
    format "channels last".
    """
    threshold = torch_module().ops.aten.threshold_backward
    relu, axis = case.operation.options["relu"], case.operation.axis

    def call(*arguments: Any) -> list[Any]:
        *arrays, w, b = arguments
        x, *residual = (a.movedim(axis, 1) for a in arrays)
        y, *saved = forward(x, w, b)
        for r in residual:
            y.add_(r)
        if relu:
            y.relu_()
        return [y.movedim(1, axis), *saved]

    def save(x: Any, *others: Any) -> list[Any]:
        y, *saved = call(x, *others)
        return [y if relu else None, x, others[-2], *saved]

    def call_backward(dy: Any, y: Any, x: Any, w: Any, *saved: Any) -> list[Any]:
        dz = threshold(dy, y, 0) if relu else dy
        dx, dw, db = backward(dz.movedim(axis, 1), x.movedim(axis, 1), w, *saved)
        residual = [dz] if case.operation.form.arrays > 1 else []
        return [dx.movedim(1, axis), *residual, dw, db]

    if case.direction == "bwd":
        return TorchFunction(call_backward, save, wide_parameters=True)
    return TorchFunction(lambda *a: call(*a)[:1], wide_parameters=True)


def _torch_batch_norm(case: Case) -> TorchFunction:
    """PyTorch's own kernels. A higher layer of PyTorch chooses between them and cuDNN's kernels."""
    aten = torch_module().ops.aten

    def backward(dy: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Sequence[Any]:
        return aten.native_batch_norm_backward(
            dy, x, w, None, None, mean, rstd, True, formulas.EPSILON, [True] * 3
        )

    def forward(x: Any, w: Any, b: Any) -> Sequence[Any]:
        return aten.native_batch_norm(x, w, b, None, None, True, 0.0, formulas.EPSILON)

    return _batch_norm(case, forward, backward)


def _cudnn_batch_norm(case: Case) -> TorchFunction:
    aten = torch_module().ops.aten

    def backward(dy: Any, x: Any, w: Any, mean: Any, rstd: Any, reserve: Any) -> Sequence[Any]:
        return aten.cudnn_batch_norm_backward(
            x, dy, w, None, None, mean, rstd, formulas.EPSILON, reserve
        )

    def forward(x: Any, w: Any, b: Any) -> Sequence[Any]:
        return aten.cudnn_batch_norm(x, w, b, None, None, True, 0.0, formulas.EPSILON)

    return _batch_norm(case, forward, backward)


def _torch_group_norm(case: Case) -> TorchFunction:
    """Group norm, then the activation: two functions.

    PyTorch's channels are the second axis, as in `_batch_norm`.
    """
    functional, axis = torch_module().nn.functional, case.operation.axis
    activation = {"silu": functional.silu, "relu": functional.relu, None: None}[
        case.operation.options["activation"]
    ]
    channels = case.shape[axis]
    groups = channels if case.op == "instance_norm" else groups_of(channels)

    def forward(x: Any, w: Any, b: Any) -> Any:
        z = functional.group_norm(x.movedim(axis, 1), groups, w, b, formulas.EPSILON)
        return (activation(z) if activation else z).movedim(1, axis)

    return _of(case, forward)


def _torch_gelu(case: Case) -> TorchFunction:
    """GELU. With a bias it takes two functions, because PyTorch has no function for both."""
    form = "tanh" if case.operation.options["approximate"] else "none"
    gelu = functools.partial(torch_module().nn.functional.gelu, approximate=form)
    return _of(case, lambda x, *bias: gelu(x + bias[0] if bias else x))


def _torch_cross_entropy(case: Case) -> TorchFunction:
    """The loss of bfloat16 logits is rounded to bfloat16."""
    torch = torch_module()
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    cross_entropy = torch.nn.functional.cross_entropy

    def forward(x: Any) -> Any:
        return cross_entropy(x, _labels(case, x), reduction="none").to(wide)

    return _of(case, forward)


@functools.cache
def _class(case: Case) -> int:
    return int(oracle.labels_of(np.empty((1, case.shape[-1])))[0])


def _labels(case: Case, x: Any) -> Any:
    return x.new_full(case.shape[:-1], _class(case), dtype=torch_module().int64)


def _torch_global_norm(case: Case) -> TorchFunction:
    torch = torch_module()
    wide = None if case.dtype == "float64" else torch.float32
    return TorchFunction(lambda x: [torch.linalg.vector_norm(x, dtype=wide)])


def _torch_clip(case: Case) -> TorchFunction:
    """As `torch.nn.utils.clip_grad_norm_`, but not in place."""
    torch, norm = torch_module(), _torch_global_norm(case)

    def call(x: Any) -> list[Any]:
        factor = formulas.MAX_NORM / norm.call(x)[0]
        return [x * torch.clamp(factor, max=1.0)]

    return TorchFunction(call)


# --- Libraries -----------------------------------------------------------------------------------


def _liger_layer_norm(case: Case) -> TorchFunction:
    module = importlib.import_module("liger_kernel.ops.layer_norm")
    layer_norm = module.LigerLayerNormFunction.apply
    return _of(case, lambda x, w, b: layer_norm(x, w, b, formulas.EPSILON))


def _liger_rms_norm(case: Case) -> TorchFunction:
    rms_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
    # The last arguments are the offset, the casting mode, and whether dx may take dy's memory. It
    # may not, because the next call needs dy.
    return _of(case, lambda x, w: rms_norm(x, w, formulas.EPSILON, 0.0, "llama", False))


def _quack_rms_norm(case: Case) -> TorchFunction:
    rms_norm = importlib.import_module("quack.rmsnorm").rmsnorm
    return _of(case, lambda x, w: rms_norm(x, w, eps=formulas.EPSILON), wide_parameters=True)


def _quack_layer_norm(case: Case) -> TorchFunction:
    if case.direction == "bwd":
        raise Unsupported("no layer norm backward with a bias's gradient")
    layer_norm = importlib.import_module("quack.rmsnorm").layernorm_fwd
    return TorchFunction(
        lambda x, w, b: [layer_norm(x, w, b, eps=formulas.EPSILON)], wide_parameters=True
    )


def _quack_cross_entropy(case: Case) -> TorchFunction:
    cross_entropy = importlib.import_module("quack.cross_entropy").cross_entropy
    return _of(case, lambda x: cross_entropy(x, _labels(case, x), reduction="none"))


def _triton(case: Case) -> TorchFunction:
    if case.direction == "bwd":
        raise Unsupported("forward only")
    module = importlib.import_module("jax_gradops._tools.bench.triton_norm")
    return TorchFunction(
        lambda x, *p: [module.norm(x, *p, epsilon=formulas.EPSILON)], wide_parameters=True
    )


MAKERS: dict[str, dict[str, Callable[[Case], TorchFunction]]] = {
    "torch": {
        "layer_norm": _torch_layer_norm,
        "rms_norm": _torch_rms_norm,
        "batch_norm": _torch_batch_norm,
        "group_norm": _torch_group_norm,
        "instance_norm": _torch_group_norm,
        "gelu": _torch_gelu,
        "bias_gelu": _torch_gelu,
        "softmax_cross_entropy": _torch_cross_entropy,
        "global_norm": _torch_global_norm,
        "clip": _torch_clip,
    },
    "cudnn": {"batch_norm": _cudnn_batch_norm},
    "liger": {"layer_norm": _liger_layer_norm, "rms_norm": _liger_rms_norm},
    "quack": {
        "layer_norm": _quack_layer_norm,
        "rms_norm": _quack_rms_norm,
        "softmax_cross_entropy": _quack_cross_entropy,
    },
    "triton": {"layer_norm": _triton, "rms_norm": _triton},
}
#: By peer: the modules that it needs, and whether it runs on the CPU.
REQUIREMENTS = {
    "torch": (("torch",), True),
    "cudnn": (("torch",), False),
    "liger": (("torch", "liger_kernel"), False),
    "quack": (("torch", "quack"), False),
    "triton": (("torch", "triton"), False),
}


#: By peer: the dtypes that it does not support. Peers without an entry do not support float64.
#: PyTorch cannot call cuDNN's batch norm with bfloat16 data and float32 parameters.
WITHOUT = {"torch": (), "cudnn": ("bfloat16", "float64")}


def covers(name: str, case: Case) -> bool:
    """Whether the peer has the case's op."""
    return case.op in MAKERS[name] and case.dtype not in WITHOUT.get(name, ("float64",))
