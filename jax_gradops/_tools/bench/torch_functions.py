"""The ops as PyTorch has them, and libraries of kernels for it.

Each is one `TorchFunction`, made for a case by a function in `MAKERS`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from jax_gradops._tools.bench import formulas
from jax_gradops._tools.bench.cases import Case


class Unsupported(Exception):
    """A library has no such function; the message says which."""


@dataclasses.dataclass(frozen=True)
class TorchFunction:
    """One call.

    Attributes:
      call: from what `save` returns, and backward dy, in front; returns a list of results.
      save: from x, others like it, and the parameters.
      wide_parameters: takes float32 parameters beside 16-bit x; else they get x's dtype.
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
    """A differentiable function in the case's direction."""
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
    """Batch norm, and what follows it in place, as torchvision's residual networks have it.

    `forward` returns y and what `backward` takes after dy, x and the scale. Channels are PyTorch's
    second axis; where they are last, tensors are of the memory format that is called so.
    """
    threshold = torch_module().ops.aten.threshold_backward
    relu, axis = bool(case.form), case.operation.axis

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
        residual = [dz] if case.operation.arrays > 1 else []
        return [dx.movedim(1, axis), *residual, dw, db]

    if case.direction == "bwd":
        return TorchFunction(call_backward, save, wide_parameters=True)
    return TorchFunction(lambda *a: call(*a)[:1], wide_parameters=True)


def _torch_batch_norm(case: Case) -> TorchFunction:
    """PyTorch's own kernels: what chooses between these and cuDNN's is a layer above."""
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


def _torch_gelu(case: Case) -> TorchFunction:
    """With a bias: two functions, as PyTorch has none for both."""
    torch, form = torch_module(), {"tanh": "tanh", "exact": "none"}[case.form]
    gelu = functools.partial(torch.nn.functional.gelu, approximate=form)
    return _of(case, lambda x, *bias: gelu(x + bias[0] if bias else x))


def _torch_global_norm(case: Case) -> TorchFunction:
    torch = torch_module()
    wide = None if case.dtype == "float64" else torch.float32
    return TorchFunction(lambda x: [torch.linalg.vector_norm(x, dtype=wide)])


def _torch_clip(case: Case) -> TorchFunction:
    """As `torch.nn.utils.clip_grad_norm_`, which does it in place."""
    torch, norm = torch_module(), _torch_global_norm(case)

    def call(x: Any) -> list[Any]:
        factor = formulas.MAX_NORM / norm.call(x)[0]
        return [x * torch.clamp(factor, max=1.0)]

    return TorchFunction(call)


# --- Libraries -----------------------------------------------------------------------------------


def _liger(case: Case) -> TorchFunction:
    if case.op == "layer_norm":
        module = importlib.import_module("liger_kernel.ops.layer_norm")
        layer_norm = module.LigerLayerNormFunction.apply
        return _of(case, lambda x, w, b: layer_norm(x, w, b, formulas.EPSILON))
    rms_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
    # offset, casting, and no results in dy's place: the next call needs it.
    return _of(case, lambda x, w: rms_norm(x, w, formulas.EPSILON, 0.0, "llama", False))


def _quack(case: Case) -> TorchFunction:
    module = importlib.import_module("quack.rmsnorm")
    if case.op == "rms_norm":
        rms_norm = module.rmsnorm
        return _of(case, lambda x, w: rms_norm(x, w, eps=formulas.EPSILON), wide_parameters=True)
    if case.direction == "bwd":
        raise Unsupported("no layer norm backward with a bias's gradient")
    layer_norm = module.layernorm_fwd
    return TorchFunction(
        lambda x, w, b: [layer_norm(x, w, b, eps=formulas.EPSILON)], wide_parameters=True
    )


def _triton(case: Case) -> TorchFunction:
    if case.direction == "bwd":
        raise Unsupported("forward only")
    module = importlib.import_module("jax_gradops._tools.bench.triton_norm")
    return TorchFunction(
        lambda x, *p: [module.norm(x, *p, epsilon=formulas.EPSILON)], wide_parameters=True
    )


_NORMS = ("layer_norm", "rms_norm")
MAKERS: dict[str, dict[str, Callable[[Case], TorchFunction]]] = {
    "torch": {
        "layer_norm": _torch_layer_norm,
        "rms_norm": _torch_rms_norm,
        "batch_norm": _torch_batch_norm,
        "gelu": _torch_gelu,
        "bias_gelu": _torch_gelu,
        "global_norm": _torch_global_norm,
        "clip": _torch_clip,
    },
    "cudnn": {"batch_norm": _cudnn_batch_norm},
    "liger": dict.fromkeys(_NORMS, _liger),
    "quack": dict.fromkeys(_NORMS, _quack),
    "triton": dict.fromkeys(_NORMS, _triton),
}
#: What has to be importable for each of these peers, and whether it runs on the CPU.
REQUIREMENTS = {
    "torch": (("torch",), True),
    "cudnn": (("torch",), False),
    "liger": (("torch", "liger_kernel"), False),
    "quack": (("torch", "quack"), False),
    "triton": (("torch", "triton"), False),
}


#: Dtypes that a peer does not take; those that are not here have none in float64. PyTorch has no
#: way to cuDNN's batch norm with bfloat16 data and float32 parameters.
WITHOUT = {"torch": (), "cudnn": ("bfloat16", "float64")}


def covers(name: str, case: Case) -> bool:
    """Whether the peer has the case's op at all."""
    return case.op in MAKERS[name] and case.dtype not in WITHOUT.get(name, ("float64",))
