"""How CUDA's layer norm and RMS norm split rows among threads. These tests need no GPU.

The rule is ffi/cuda/row_norm/plan.h, and `_plans` returns its choice. test_row_paths.py tests the
results on a GPU.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from gpus import GPUS, numbers

from jax_gradops import _plans

FULL, PARTIAL, MASKED = 0, 1, 2
NOBODY, DX_KERNEL, AFTER_DX, BESIDE_DX = range(4)
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
    gpu: str = "h200",
    **more: Any,
) -> dict[str, Any]:
    architecture, multiprocessors, shared_bytes, _ = GPUS[gpu]
    return numbers(
        _plans.row_norm_plan(
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
            **more,
        )
    )


def streams(p: dict[str, Any]) -> bool:
    return p["kernel"] in ("ForwardStreamKernel", "BackwardStreamKernel")


def is_narrow(p: dict[str, Any]) -> bool:
    return p["kernel"] in ("ForwardNarrowKernel", "BackwardNarrowKernel")


def owned(p: dict[str, Any], features: int, element_bytes: int, *, lines: bool) -> None:
    """Checks that the threads of a row have all its columns, and how many vectors they lack.

    lines: whether a thread's vectors are whole lines of 128 bytes apart, if that is possible.
    """
    width = 16 // element_bytes
    masked = p["layout"] == MASKED
    columns = features + (width - 1 if masked and (lines or features % width) else 0)
    assert p["block_columns"] * p["cluster"] >= columns
    assert p["block_columns"] * (p["cluster"] - 1) < columns, "a block of the cluster has no column"
    assert p["block_columns"] % width == 0
    assert p["row_threads"] * p["vectors"] * width >= p["block_columns"], "a column has no thread"
    assert (p["row_threads"] <= 32 and 32 % p["row_threads"] == 0) or p["row_threads"] % 32 == 0
    assert 1 <= p["cluster"] <= 16
    if masked:
        assert features > 32 * NARROW_COLUMNS[element_bytes], "the row is narrow"
        return
    assert features % width == 0
    for rank in range(p["cluster"]):
        vectors = min(p["block_columns"], features - rank * p["block_columns"]) // width
        owners = -(-vectors // p["vectors"])
        in_lines = -(-owners // 8) * 8
        if lines and in_lines <= p["row_threads"] and (p["vectors"] - 1) * in_lines <= vectors:
            owners = in_lines
        assert 0 < owners <= p["row_threads"]
        missing = owners * p["vectors"] - vectors
        assert 0 <= missing <= owners
        assert missing == 0 or p["layout"] == PARTIAL or in_lines == owners


NARROW_COLUMNS = {2: 15, 4: 15, 8: 7}


def narrow(p: dict[str, Any], features: int, element_bytes: int) -> None:
    """Checks that the threads of a narrow row have all its columns, and that tiles have room."""
    most = NARROW_COLUMNS[element_bytes]
    assert features <= 32 * most
    assert 1 <= p["columns"] <= most and p["columns"] * p["row_threads"] >= features >= p["columns"]
    assert p["columns"] % 2 == 1 or p["row_threads"] == 1, "threads' elements are in the same banks"
    assert p["row_threads"] == 1 or p["columns"] > most // 2, "kernels count on it"
    assert p["row_threads"] in (1, 2, 4, 8, 16, 32)
    assert p["tile_rows"] * p["row_threads"] == 32 * p["tile_steps"] and 1 <= p["tile_rows"] <= 32
    row_bytes = features * element_bytes
    assert p["tile_steps"] == 1 or p["tile_rows"] * row_bytes <= 4096
    # For any start in a line, and for the last thread of the last row, which reads beyond the row.
    beyond = (most // 2 + 1 | 1) * element_bytes
    assert p["tile_bytes"] >= 127 + p["tile_rows"] * row_bytes + beyond


@pytest.mark.G10
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_every_forward_plan_holds_its_row(gpu: str, element_bytes: int) -> None:
    cases = itertools.product(FEATURES + WIDE, (1, 37, 10**6), (1, 2), (False, True))
    for features, rows, arrays, centered in cases:
        settings: dict[str, Any] = {"rows": rows, "element_bytes": element_bytes}
        settings |= {"arrays": arrays, "centered": centered}
        p = plan(features, backward=False, gpu=gpu, residual_bias=True, **settings)
        is_short = p["kernel"] == "ForwardShortKernel"
        assert is_short == (features * element_bytes in (16, 32, 64, 128, 256, 512))
        if streams(p):
            assert features > 2048, (features, settings)
            continue
        assert p["shared_bytes"] <= GPUS[gpu][2] - 4096, "more than the launcher asks for"
        if is_narrow(p):
            narrow(p, features, element_bytes)
            continue
        owned(p, features, element_bytes, lines=False)
        assert p["threads"] * p["thread_rows"] == p["rows_per_block"] * p["row_threads"]
        assert p["threads"] <= 1024
        if is_short:
            assert features * element_bytes == 16 * p["row_threads"] <= 512
            assert p["layout"] == FULL
            assert p["vectors"] == p["cluster"] == 1 and p["threads"] == 128
            assert 1 <= p["thread_rows"] <= 4
            continue
        assert p["thread_rows"] == 1
        assert p["rows_per_block"] == 1 or p["threads"] == 64
        assert GPUS[gpu][0] >= 90 or p["cluster"] == 1
        if p["layout"] != MASKED:
            assert p["kernel"] == "ForwardKernel"
            assert p["vectors"] in (3, 4, 8) and p["cluster"] == 1
            assert p["vectors"] != 3 or p["layout"] == FULL
            continue
        assert p["kernel"] == "ForwardRowsKernel"
        # So that a thread needs 80 to 128 registers.
        assert p["vectors"] == 4 and p["threads"] <= 512
        # A block's rows have one period. A thread's next row has an equal misalignment.
        assert p["period"] % p["rows_per_block"] == 0 and p["period"] & (p["period"] - 1) == 0
        assert p["period"] * features * element_bytes % 16 == 0
        assert p["stages"] in (1, 2)


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
        if streams(p):
            assert features > 2048, (features, settings)
            assert p["sums_by"] == AFTER_DX
            continue
        assert p["shared_bytes"] <= GPUS[gpu][2] - 4096
        if is_narrow(p):
            narrow(p, features, element_bytes)
            continue
        owned(p, features, element_bytes, lines=True)
        more = {2: 3, 4: 4, 8: 4}[element_bytes]
        assert p["vectors"] in (2, 3 if p["layout"] == MASKED else more)
        assert p["threads"] <= (384 if p["vectors"] == 3 else 512)
        assert p["stages"] in (1, 2)
        assert p["period"] * features * element_bytes % 16 == 0
        assert p["layout"] != MASKED or p["row_threads"] >= 32
        assert GPUS[gpu][0] >= 90 or p["cluster"] == 1


def test_who_adds_up_column_sums() -> None:
    """Few rows have a kernel of their own for column sums, beside the kernel for dx."""
    few = functools.partial(plan, 4096, rows=37, reads_mean=False)
    assert few()["sums_by"] == BESIDE_DX
    assert few(sums=False)["sums_by"] == NOBODY
    assert few(sums_dx=True)["sums_by"] == few(groups=3)["sums_by"] == DX_KERNEL
    assert few(reads_mean=True)["sums_by"] == DX_KERNEL
    assert few(reads_mean=True, knows_epsilon=True)["sums_by"] == BESIDE_DX
    assert plan(4096, rows=257, reads_mean=False)["sums_by"] == DX_KERNEL
    assert plan(16_384, rows=256, reads_mean=False)["sums_by"] == DX_KERNEL, "over 4 MB"
    assert plan(4096, aligned=False)["sums_by"] == AFTER_DX


@pytest.mark.parametrize("backward", [False, True])
def test_what_decides_a_row_s_result(backward: bool) -> None:
    """The number of rows changes no result. Forward, a residual changes none either."""
    kept = ("kernel", "layout", "vectors", "row_threads", "cluster", "block_columns", "columns")
    for arrays, sums_dx in ((2, False), (3, False), (3, True)) if backward else ((1, False),):
        for features, element_bytes in itertools.product(FEATURES + WIDE, (2, 4, 8)):
            layouts = {
                tuple(map(p.get, kept))
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
    """Some lines of the table, as in README.md's."""
    forward = functools.partial(plan, backward=False)
    assert forward(64)["row_threads"] == 8 and forward(64)["rows_per_block"] == 64
    # A thread has several rows if all multiprocessors then still have work.
    assert [forward(64, rows=n)["thread_rows"] for n in (37, 50_000, 10**6)] == [1, 2, 4]
    assert [forward(n)["kernel"] for n in (256, 264)] == ["ForwardShortKernel", "ForwardKernel"]
    assert is_narrow(forward(64, aligned_params=False))
    threads = {1024: (32, 4), 2048: (64, 4), 4096: (128, 4), 5120: (96, 8), 8192: (256, 4)}
    for features, expected in (threads | {16_384: (256, 8)}).items():
        assert (forward(features)["row_threads"], forward(features)["vectors"]) == expected
    # Three vectors per thread if they cover the row, and four vectors would leave threads idle.
    assert [forward(n)["vectors"] for n in (24, 384, 768, 1536, 3072, 640)] == [3, 3, 3, 3, 4, 4]
    floats = functools.partial(forward, element_bytes=4)
    rms_norm = functools.partial(forward, centered=False)
    assert (
        floats(4096)["row_threads"] == 256
        and rms_norm(32_768, element_bytes=4)["row_threads"] == 1024
    )
    assert [floats(n)["vectors"] for n in (8192, 16_384)] == [4, 8]
    # Blocks share a row if it is wide, or if its parameters would cost more than sharing.
    assert [forward(n)["cluster"] for n in (6001, 8193, 12_289, 16_385)] == [1, 3, 1, 6]
    assert [forward(n)["cluster"] for n in (32_768, 65_536)] == [2, 4]
    assert [floats(n)["cluster"] for n in (8193, 32_768, 65_536)] == [2, 4, 8]
    assert streams(forward(65_536, gpu="a100"))
    assert forward(8)["row_threads"] == 1 and forward(4097)["layout"] == MASKED
    assert forward(1000)["layout"] == PARTIAL and forward(1600)["layout"] == FULL
    # Two rows in flight, or one if the current row leaves its place at once.
    assert [p(4097)["stages"] for p in (forward, rms_norm, floats)] == [2, 1, 1]
    assert forward(4096, aligned_params=False)["layout"] == MASKED
    assert streams(forward(4096, aligned=False))


def test_the_backward_table() -> None:
    assert plan(64)["row_threads"] == 4
    # Narrow rows that start anywhere have few threads, and an odd number of columns per thread.
    narrow_rows = {7: (1, 7), 15: (1, 15), 33: (4, 9), 100: (8, 13), 257: (32, 9), 480: (32, 15)}
    for features, expected in narrow_rows.items():
        n = plan(features, aligned_params=False)
        assert (n["row_threads"], n["columns"]) == expected, features
    assert [plan(33, rows=n)["tile_rows"] for n in (37, 10**6)] == [8, 32]
    assert [plan(257, arrays=n, rows=10**6)["tile_rows"] for n in (2, 3)] == [5, 3]
    assert plan(512)["row_threads"] == 32
    assert plan(4096)["row_threads"] == 256 and plan(4096)["teams"] == 2
    assert plan(8192)["row_threads"] == 512 and plan(8192)["cluster"] == 1
    assert plan(7168)["row_threads"] == 448 and plan(7168)["cluster"] == 1, (
        "14 of 16 warps are enough"
    )
    assert plan(5120)["cluster"] == 2, "one block would have 10 of 16 warps"
    assert plan(16_384)["cluster"] == 2
    assert plan(131_072)["cluster"] == 16
    assert streams(plan(200_000))
    assert streams(plan(16_384, gpu="a100"))
    assert plan(65_536, element_bytes=8)["cluster"] == 16
    assert plan(1000)["layout"] == PARTIAL
    assert plan(4097)["layout"] == MASKED and plan(4097)["period"] == 8
    assert (
        plan(4097)["vectors"] == 3 and plan(4097)["row_threads"] == 192 and plan(4097)["teams"] == 2
    )
    assert [plan(n)["vectors"] for n in (497, 769, 1001, 2001, 9001)] == [2, 2, 2, 2, 3]
    # 32 bytes per thread for wider types, if a small cluster then holds the row.
    floats = functools.partial(plan, element_bytes=4)
    assert floats(1024)["vectors"] == 2 and floats(1024)["row_threads"] == 128
    assert floats(1024)["teams"] == 4
    assert floats(4096)["row_threads"] == 512 and floats(4096)["cluster"] == 1
    assert floats(8192)["vectors"] == 2 and floats(8192)["cluster"] == 2
    assert floats(32_768)["vectors"] == 4 and floats(32_768)["cluster"] == 4
    assert floats(8192, gpu="a100")["vectors"] == 4
    assert floats(4097)["vectors"] == 3 and floats(4097)["cluster"] == 1
    assert plan(4096, element_bytes=8)["vectors"] == 2
    # More elements per thread if fewer would leave more threads idle.
    assert plan(768)["vectors"] == 3 and plan(768)["row_threads"] == 32 and plan(768)["teams"] == 12
    assert plan(1024)["vectors"] == 2 and plan(640)["vectors"] == 3 and plan(1600)["vectors"] == 2
    assert plan(6144)["vectors"] == 3 and plan(6144)["cluster"] == 2
    assert plan(12_288)["vectors"] == 3 and plan(12_288)["cluster"] == 4
    assert plan(16_384)["vectors"] == 2
    assert plan(768, arrays=3, sums_dx=True)["vectors"] == 3
    # A block has whole memory lines.
    assert plan(6656)["cluster"] == 3 and plan(6656)["block_columns"] == 2240
    # One row is in flight, or two if one is too little. More are needed if teams wait for sums.
    assert plan(1024)["stages"] == 1 and plan(4096)["stages"] == 1 and plan(6144)["stages"] == 1
    assert plan(8192)["stages"] == 2 and plan(16_384)["stages"] == 2 and plan(4097)["stages"] == 2
    assert plan(200)["stages"] == 2 and plan(2560)["stages"] == 2
    assert plan(8192, arrays=3)["stages"] == 1
    assert floats(4096)["stages"] == 1 and floats(8192)["stages"] == 2
    # Few rows are distributed over the multiprocessors.
    assert plan(1024, rows=37)["teams"] == 1
    assert plan(1024, rows=10**6)["teams"] == 8
