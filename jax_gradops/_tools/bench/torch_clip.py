"""PyTorch's clip `torch.nn.utils.clip_grad_norm_`, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_gradops._tools.bench import timing, torch_functions, torch_peers
from jax_gradops._tools.bench.peers import PeerError, Plan


class TorchClip:
    """PyTorch's clip on a copy of the leaves.

    The time of its kernels does not depend on whether there is something to clip. All calls
    therefore use one copy and one limit. The first call clips, and later calls change little.
    """

    def __init__(self, pristine: Sequence[jax.Array], max_norm: float, plan: Plan) -> None:
        torch = torch_functions.torch_module()
        if plan.platform == "gpu" and not torch.cuda.is_available():
            raise PeerError("this PyTorch finds no GPU")
        self._pristine, self._max_norm = pristine, max_norm
        self._parameters = []
        jax.block_until_ready(list(pristine))
        for leaf in pristine:
            tensor = torch.from_dlpack(leaf)
            parameter = torch.nn.Parameter(tensor)
            parameter.grad = tensor.clone()
            self._parameters.append(parameter)
        self._stream = None
        if plan.platform == "gpu":
            torch.cuda.synchronize()
            self._stream = torch.cuda.Stream()

    def _call(self) -> list[Any]:
        clip = torch_functions.torch_module().nn.utils.clip_grad_norm_
        return [clip(self._parameters, self._max_norm, foreach=True)]

    def clipped(self) -> list[jax.Array]:
        """The leaves after the first call. They are valid until the next call."""
        torch_peers.LaunchedCalls([self._call], False, self._stream).wait_for_all()
        return [jax.dlpack.from_dlpack(p.grad) for p in self._parameters]

    def runner(self, calls: int) -> timing.Runner:
        """Makes a runner of `calls` calls."""
        if self._stream is None:
            return torch_peers.LaunchedCalls([self._call] * calls, False)
        try:
            return torch_peers.CapturedCalls([self._call] * calls, False, self._stream)
        except RuntimeError:  # a CUDA error: the capture does not permit an operation
            return torch_peers.LaunchedCalls([self._call] * calls, False, self._stream)
