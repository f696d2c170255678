"""How the CUDA norms lay out rows. These tests need no GPU.

The tables are ffi/cuda/layer_norm{,_bwd,_narrow}_policy.h. The native module returns their choice
(`row_plan`). `force_row_plan` overrides the choice for the whole process (test_row_paths.py).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from gpus import GPUS

from jax_gradops import _registry

CUDA = _registry.MODULES.get("cuda")
pytestmark = pytest.mark.skipif(CUDA is None, reason="jax_gradops was built without CUDA")

EVEN, UNEVEN, FRAMED = 0, 1, 2
FEATURES = (
    1,
    2,
    6,
    8,
    10,
    14,
    15,
    16,
    17,
    33,
    64,
    128,
    192,
    257,
    480,
    481,
    512,
    513,
    768,
    1000,
    1024,
)
FEATURES += (3072, 3584, 4096, 4097, 5120, 6144, 8192, 8200, 12_288)
WIDE = (16_384, 32_768, 65_535, 65_536, 131_072, 131_080, 10**6)


def plan(
    features: int,
    *,
    rows: int = 100_000,
    element_bytes: int = 2,
    arrays: int = 2,
    backward: bool = True,
    aligned: bool = True,
    aligned_params: bool = True,
    sums_dx: bool = False,
    centered: bool = True,
    gpu: str = "H200",
) -> dict[str, Any]:
    architecture, multiprocessors, shared_bytes, _ = GPUS[gpu]
    assert CUDA is not None
    return CUDA.row_plan(
        rows=rows,
        features=features,
        element_bytes=element_bytes,
        arrays=arrays,
        backward=backward,
        aligned=aligned,
        aligned_params=aligned_params,
        architecture=architecture,
        multiprocessors=multiprocessors,
        shared_bytes=shared_bytes,
        sums_dx=sums_dx,
        centered=centered,
    )


def owned(p: dict[str, Any], features: int, element_bytes: int, *, lines: bool) -> None:
    """Checks that the threads of a row have all its columns, and how many packs they lack.

    lines: whether a thread's packs are whole lines of 128 bytes apart, if that is possible.
    """
    width = 16 // element_bytes
    framed = p["division"] == FRAMED
    columns = features + (width - 1 if framed and (lines or features % width) else 0)
    assert p["share"] * p["cluster"] >= columns
    assert p["share"] * (p["cluster"] - 1) < columns, "a block of the cluster has no column"
    assert p["share"] % width == 0
    assert p["lanes"] * p["packs"] * width >= p["share"], "a column has no thread"
    assert p["lanes"] <= 32 and 32 % p["lanes"] == 0 or p["lanes"] % 32 == 0
    assert 1 <= p["cluster"] <= 16
    if framed:
        return narrow(p, features, element_bytes)
    assert features % width == 0
    for rank in range(p["cluster"]):
        packs = min(p["share"], features - rank * p["share"]) // width
        owners = -(-packs // p["packs"])
        in_lines = -(-owners // 8) * 8
        if lines and in_lines <= p["lanes"] and (p["packs"] - 1) * in_lines <= packs:
            owners = in_lines
        assert 0 < owners <= p["lanes"]
        missing = owners * p["packs"] - packs
        assert 0 <= missing <= owners
        assert missing == 0 or p["division"] == UNEVEN or in_lines == owners


def narrow(p: dict[str, Any], features: int, element_bytes: int) -> None:
    """Checks which rows are processed in chunks, and whether their lanes have all columns."""
    most = {2: 15, 4: 15, 8: 7}[element_bytes]
    assert ("narrow" in p) == (features <= 32 * most)
    if "narrow" not in p:
        return
    n = p["narrow"]
    assert 1 <= n["columns"] <= most and n["columns"] * n["lanes"] >= features >= n["columns"]
    assert n["columns"] % 2 == 1 or n["lanes"] == 1, "lanes' elements are in the same banks"
    assert n["lanes"] == 1 or n["columns"] > most // 2, "kernels count on it"
    assert n["lanes"] in (1, 2, 4, 8, 16, 32)
    assert n["chunk_rows"] * n["lanes"] == 32 * n["steps"] and 1 <= n["chunk_rows"] <= 32
    row_bytes = features * element_bytes
    assert n["steps"] == 1 or n["chunk_rows"] * row_bytes <= 4096
    # For any start in a line, and for the last lane of the last row, which reads beyond the row.
    beyond = (most // 2 + 1 | 1) * element_bytes
    assert n["slot_bytes"] >= 127 + n["chunk_rows"] * row_bytes + beyond


@pytest.mark.G10
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_every_forward_plan_holds_its_row(gpu: str, element_bytes: int) -> None:
    cases = itertools.product(FEATURES + WIDE, (1, 37, 10**6), (1, 2), (False, True))
    for features, rows, arrays, centered in cases:
        settings: dict[str, Any] = {"rows": rows, "element_bytes": element_bytes}
        settings |= {"arrays": arrays, "centered": centered}
        p = plan(features, backward=False, gpu=gpu, **settings)
        if p["stream"]:
            assert features > 2048, (features, settings)
            continue
        owned(p, features, element_bytes, lines=False)
        assert p["threads"] == p["teams"] * p["lanes"] <= 1024
        assert p["teams"] == 1 or p["threads"] == 64
        assert GPUS[gpu][0] >= 90 or p["cluster"] == 1
        if p["division"] in (EVEN, UNEVEN):
            assert p["packs"] in (3, 4, 8) and p["cluster"] == 1
            assert p["packs"] != 3 or p["division"] == EVEN
            continue
        # So that a thread needs 80 to 128 registers.
        assert p["packs"] == 4 and p["threads"] <= 512
        # The teams of a step have one row each. A team's next row has the same offset in its frame.
        assert p["step"] % p["teams"] == 0 and p["step"] & (p["step"] - 1) == 0
        assert p["step"] * features * element_bytes % 16 == 0
        assert p["stages"] in (1, 2)
        for of in (p, p.get("narrow", p)):
            assert of["shared_bytes"] <= GPUS[gpu][2] - 4096, "more than the launcher asks for"


@pytest.mark.G10
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_every_backward_plan_holds_its_row(gpu: str, element_bytes: int) -> None:
    """Plans fit in registers and shared memory, with one row in flight."""
    cases = itertools.product(FEATURES + WIDE, (1, 37, 10**6), (2, 3), (False, True))
    for features, rows, arrays, sums_dx in cases:
        settings: dict[str, Any] = {"rows": rows, "element_bytes": element_bytes}
        settings |= {"arrays": arrays, "sums_dx": sums_dx}
        p = plan(features, gpu=gpu, **settings)
        if p["stream"]:
            assert features > 2048, (features, settings)
            continue
        owned(p, features, element_bytes, lines=True)
        more = {2: 3, 4: 4, 8: 4}[element_bytes]
        assert p["packs"] in (2, 3 if p["division"] == FRAMED else more)
        assert p["threads"] <= (384 if p["packs"] == 3 else 512)
        assert p["stages"] in (1, 2)
        for of in (p, p.get("narrow", p)):
            assert of["shared_bytes"] <= GPUS[gpu][2] - 4096
        assert p["classes"] * features * element_bytes % 16 == 0
        assert p["division"] != FRAMED or p["lanes"] >= 32
        assert GPUS[gpu][0] >= 90 or p["cluster"] == 1


@pytest.mark.parametrize("backward", [False, True])
def test_what_decides_a_row_s_result(backward: bool) -> None:
    """The number of rows changes no result. Forward, a residual changes none either."""
    kept = ("stream", "division", "packs", "lanes", "cluster", "share")
    for arrays, sums_dx in ((2, False), (3, False), (3, True)) if backward else ((1, False),):
        for features, element_bytes in itertools.product(FEATURES + WIDE, (2, 4, 8)):
            layouts = {
                (*map(p.get, kept), *map(p.get("narrow", {}).get, ("lanes", "columns")))
                for rows in (1, 7, 133, 10**7)
                for more in ((0,) if backward else (0, 1))
                for p in [
                    plan(
                        features,
                        rows=rows,
                        arrays=arrays + more,
                        element_bytes=element_bytes,
                        backward=backward,
                        sums_dx=sums_dx,
                    )
                ]
            }
            assert len(layouts) == 1, (features, element_bytes, layouts)


def test_the_forward_table() -> None:
    """Some lines of the table, as in the table's comment."""
    forward = functools.partial(plan, backward=False)
    assert forward(64)["lanes"] == 2 and forward(64)["teams"] == 32
    threads = {1024: (32, 4), 2048: (64, 4), 4096: (128, 4), 5120: (96, 8), 8192: (256, 4)}
    for features, expected in (threads | {16_384: (256, 8)}).items():
        assert (forward(features)["lanes"], forward(features)["packs"]) == expected
    # Three packs per thread if they cover the row, and four packs would leave threads idle.
    assert [forward(n)["packs"] for n in (24, 384, 768, 1536, 3072, 640)] == [3, 3, 3, 3, 4, 4]
    floats = functools.partial(forward, element_bytes=4)
    rms_norm = functools.partial(forward, centered=False)
    assert floats(4096)["lanes"] == 256 and rms_norm(32_768, element_bytes=4)["lanes"] == 1024
    assert [floats(n)["packs"] for n in (8192, 16_384)] == [4, 8]
    # Blocks share a row if it is wide, or if its parameters would cost more than sharing.
    assert [forward(n)["cluster"] for n in (6001, 8193, 12_289, 16_385)] == [1, 3, 1, 6]
    assert [forward(n)["cluster"] for n in (32_768, 65_536)] == [2, 4]
    assert [floats(n)["cluster"] for n in (8193, 32_768, 65_536)] == [2, 4, 8]
    assert forward(65_536, gpu="A100")["stream"]
    assert forward(8)["narrow"]["lanes"] == 1 and forward(4097)["division"] == FRAMED
    assert forward(1000)["division"] == UNEVEN and forward(1600)["division"] == EVEN
    # Two rows in flight, or one if the current row leaves its place at once.
    assert [p(4097)["stages"] for p in (forward, rms_norm, floats)] == [2, 1, 1]
    assert forward(4096, aligned_params=False)["division"] == FRAMED
    assert forward(4096, aligned=False)["stream"]


def test_the_backward_table() -> None:
    assert plan(64)["lanes"] == 4
    # Narrow rows that start anywhere have few lanes, and an odd number of columns per lane.
    lanes = {7: (1, 7), 15: (1, 15), 33: (4, 9), 100: (8, 13), 257: (32, 9), 480: (32, 15)}
    for features, expected in lanes.items():
        n = plan(features, aligned_params=False)["narrow"]
        assert (n["lanes"], n["columns"]) == expected, features
    assert [plan(33, rows=n)["narrow"]["chunk_rows"] for n in (37, 10**6)] == [8, 32]
    assert [plan(257, arrays=n, rows=10**6)["narrow"]["chunk_rows"] for n in (2, 3)] == [5, 3]
    assert plan(512)["lanes"] == 32
    assert plan(4096)["lanes"] == 256 and plan(4096)["units"] == 2
    assert plan(8192)["lanes"] == 512 and plan(8192)["cluster"] == 1
    assert plan(7168)["lanes"] == 448 and plan(7168)["cluster"] == 1, "14 of 16 warps are enough"
    assert plan(5120)["cluster"] == 2, "one block would have 10 of 16 warps"
    assert plan(16_384)["cluster"] == 2
    assert plan(131_072)["cluster"] == 16
    assert plan(200_000)["stream"]
    assert plan(16_384, gpu="A100")["stream"]
    assert plan(65_536, element_bytes=8)["cluster"] == 16
    assert plan(1000)["division"] == UNEVEN
    assert plan(4097)["division"] == FRAMED and plan(4097)["classes"] == 8
    assert plan(4097)["packs"] == 3 and plan(4097)["lanes"] == 192 and plan(4097)["units"] == 2
    assert [plan(n)["packs"] for n in (497, 769, 1001, 2001, 9001)] == [2, 2, 2, 2, 3]
    # 32 bytes per thread for wider types, if a small cluster then holds the row.
    floats = functools.partial(plan, element_bytes=4)
    assert floats(1024)["packs"] == 2 and floats(1024)["lanes"] == 128
    assert floats(1024)["units"] == 4
    assert floats(4096)["lanes"] == 512 and floats(4096)["cluster"] == 1
    assert floats(8192)["packs"] == 2 and floats(8192)["cluster"] == 2
    assert floats(32_768)["packs"] == 4 and floats(32_768)["cluster"] == 4
    assert floats(8192, gpu="A100")["packs"] == 4
    assert floats(4097)["packs"] == 3 and floats(4097)["cluster"] == 1
    assert plan(4096, element_bytes=8)["packs"] == 2
    # More elements per thread if fewer would leave more threads idle.
    assert plan(768)["packs"] == 3 and plan(768)["lanes"] == 32 and plan(768)["units"] == 12
    assert plan(1024)["packs"] == 2 and plan(640)["packs"] == 3 and plan(1600)["packs"] == 2
    assert plan(6144)["packs"] == 3 and plan(6144)["cluster"] == 2
    assert plan(12_288)["packs"] == 3 and plan(12_288)["cluster"] == 4
    assert plan(16_384)["packs"] == 2
    assert plan(768, arrays=3, sums_dx=True)["packs"] == 3
    # A block's share is a number of whole memory lines.
    assert plan(6656)["cluster"] == 3 and plan(6656)["share"] == 2240
    # One row is in flight, or two if one is too little. More are needed if units wait for sums.
    assert plan(1024)["stages"] == 1 and plan(4096)["stages"] == 1 and plan(6144)["stages"] == 1
    assert plan(8192)["stages"] == 2 and plan(16_384)["stages"] == 2 and plan(4097)["stages"] == 2
    assert plan(200)["stages"] == 2 and plan(2560)["stages"] == 2
    assert plan(8192, arrays=3)["stages"] == 1
    assert floats(4096)["stages"] == 1 and floats(8192)["stages"] == 2
    # Few rows are distributed over the multiprocessors.
    assert plan(1024, rows=37)["units"] == 1
    assert plan(1024, rows=10**6)["units"] == 8
