"""Forward passes of layer norm and RMS norm in Triton. A program has one row in registers."""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _norm(x, scale, bias, y, features, epsilon, CENTERED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    values = tl.load(x + row * features + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, 0) / features, 0.0)
    values *= 1 / tl.sqrt(tl.sum(values * values, 0) / features + epsilon)
    values *= tl.load(scale + columns, mask=inside, other=0.0)
    if CENTERED:
        values += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(y + row * features + columns, values.to(y.dtype.element_ty), mask=inside)


def norm(x: Any, scale: Any, bias: Any = None, *, epsilon: float) -> Any:
    """Normalises x [rows, features]: layer norm, or RMS norm if there is no bias."""
    rows, features = x.shape
    block = triton.next_power_of_2(features)
    y = torch.empty_like(x)
    warps = min(max(block // 1024, 1), 16)
    launch: Any = _norm
    launch[(rows,)](
        x, scale, bias if bias is not None else scale, y, features, epsilon,
        CENTERED=bias is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y
