"""The ops as PyTorch has them, and libraries of kernels for it.

Each is one `TorchFunction`, made for a case by a function in `MAKERS`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from jax_gradops._cli.benchmark import formulas
from jax_gradops._cli.benchmark.cases import Case


class Unsupported(Exception):
    """A library has no such function; the message says which."""


@dataclasses.dataclass(frozen=True)
class TorchFunction:
    """One call.

    Attributes:
      call: from what `save` returns, and backward dy, in front; returns a list of results.
      save: from x and the parameters.
      wide_parameters: takes float32 parameters beside 16-bit x; else they get x's dtype.
    """

    call: Callable[..., Sequence[Any]]
    save: Callable[..., Sequence[Any]] = lambda x, *parameters: [x, *parameters]
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
    module = importlib.import_module("jax_gradops._cli.benchmark.triton_norm")
    return TorchFunction(
        lambda x, *p: [module.norm(x, *p, epsilon=formulas.EPSILON)], wide_parameters=True
    )


_NORMS = ("layer_norm", "rms_norm")
MAKERS: dict[str, dict[str, Callable[[Case], TorchFunction]]] = {
    "torch": {
        "layer_norm": _torch_layer_norm,
        "rms_norm": _torch_rms_norm,
        "gelu": _torch_gelu,
        "bias_gelu": _torch_gelu,
        "global_norm": _torch_global_norm,
        "clip": _torch_clip,
    },
    "liger": dict.fromkeys(_NORMS, _liger),
    "quack": dict.fromkeys(_NORMS, _quack),
    "triton": dict.fromkeys(_NORMS, _triton),
}
#: What has to be importable for each of these peers, and whether it runs on the CPU.
REQUIREMENTS = {
    "torch": (("torch",), True),
    "liger": (("torch", "liger_kernel"), False),
    "quack": (("torch", "quack"), False),
    "triton": (("torch", "triton"), False),
}


def covers(name: str, case: Case) -> bool:
    """Whether the peer has the case's op at all."""
    return case.op in MAKERS[name] and not (case.dtype == "float64" and name != "torch")
