"""How CUDA's bias + GELU cuts arrays into spans and tiles. These tests need no GPU.

The table is ffi/cuda/gelu/policy.h. The native module returns its choice (`gelu_forward_cut`,
and backward `gelu_cut`). test_bias_gelu.py tests the results on a GPU.
"""

from __future__ import annotations

import itertools

import pytest

from jax_gradops import _registry
from jax_gradops._kernel import spec

CUDA = _registry.MODULES.get("cuda")
pytestmark = pytest.mark.skipif(CUDA is None, reason="jax_gradops was built without CUDA")

FORWARD_THREADS = 256  # threads of a forward block
THREADS = 320  # maximum for a backward block
FORWARD_RESIDENT = 528  # resident forward blocks on an H200
RESIDENT = 264  # resident backward blocks on an H200
TURNS = 6  # the maximum, forward

GROUPS = (1, 3, 600)
ROWS = (1, 2, 37, 300, 1101, 40_003, 2**20, 2**33)
FEATURES = (
    1,
    3,
    8,
    20,
    33,
    64,
    100,
    129,
    320,
    768,
    1000,
    1001,
    4096,
    4097,
    5001,
    65_537,
    2**24 + 1,
)


def cut(
    rows: int, features: int, width: int, *, groups: int = 1, partial_rows: int | None = None
) -> dict[str, int]:
    if partial_rows is None:
        partial_rows = spec.column_sum_workspace(groups, {"n": rows, "d": features}, 1)[1]
    assert CUDA is not None
    return CUDA.gelu_cut(
        groups=groups,
        rows=rows,
        features=features,
        width=width,
        element_bytes=16 // width if width > 1 else 4,
        partial_rows=partial_rows,
        resident=RESIDENT,
    )


def forward_cut(rows: int, features: int, width: int, *, groups: int = 1) -> dict[str, int]:
    assert CUDA is not None
    return CUDA.gelu_forward_cut(
        groups=groups,
        rows=rows,
        features=features,
        width=width,
        turns=TURNS,
        resident=FORWARD_RESIDENT,
    )


def check(found: dict[str, int], rows: int, features: int, width: int, threads: int) -> None:
    """Every pack of a span has exactly one thread, and every pack has a span."""
    lanes = found["lanes"]
    what = f"{[rows, features]} in packs of {width}: {found}"
    assert 1 <= lanes * found["at_once"] <= threads, what
    for thread in range(threads):
        assert thread * found["inverse_lanes"] >> 20 == thread // lanes, what
    assert found["span"] * width == found["copies"] * features, what
    assert (found["tiles"] - 1) * lanes < found["span"] <= found["tiles"] * lanes, what
    packs = -(-rows * features // width)
    assert (found["spans"] - 1) * found["span"] <= packs <= found["spans"] * found["span"], what
    assert found["tiles"] < 2**31, what


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_pack_has_a_thread_forward(width: int) -> None:
    for groups, rows, features in itertools.product(GROUPS, ROWS, FEATURES):
        found = forward_cut(rows, features, width, groups=groups)
        check(found, rows, features, width, FORWARD_THREADS)
        assert 1 <= found["turns"] <= TURNS, found
        spans = found["at_once"] * found["turns"]  # spans of a slice
        assert (found["slices"] - 1) * spans < found["spans"] <= found["slices"] * spans, found


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(
    "features", [33, 100, 129, 333, 768, 1000, 1001, 4096, 4097, 5001, 7777, 10_007, 65_537]
)
def test_large_arrays_forward(features: int, width: int) -> None:
    """Tiles end at lines of 128 bytes, and nearly all threads have work."""
    found = forward_cut(2**27 // features, features, width)
    assert found["turns"] == TURNS
    assert found["span"] % 8 == found["lanes"] % 8 == 0
    assert found["span"] * found["at_once"] >= 0.93 * FORWARD_THREADS * found["tiles"], found
    assert found["lanes"] == (256 if found["span"] >= 4096 else min(found["lanes"], 40)), found
    # For few wide rows, the spans hold at most 8 times the packs that exist.
    wide = forward_cut(3, 2**22 + 1, width)
    assert wide["span"] * wide["spans"] <= 8 * 3 * 2**22 // width
    few = forward_cut(3, features, width)
    assert few["copies"] <= width
    assert few["turns"] == 1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_pack_has_a_thread(width: int) -> None:
    """Every pack has exactly one thread. There is room for all rows of sums."""
    for groups, rows, features in itertools.product(GROUPS, ROWS, FEATURES):
        for partial_rows in (None, 0, 1, 7, 64):
            found = cut(rows, features, width, groups=groups, partial_rows=partial_rows)
            what = f"{[groups, rows, features]} in packs of {width}, {partial_rows}: {found}"
            check(found, rows, features, width, THREADS)
            if partial_rows == 0:  # no sums are wanted
                assert found["slices"] >= 1, what
                continue
            room = (
                partial_rows or spec.column_sum_workspace(groups, {"n": rows, "d": features}, 1)[1]
            )
            assert found["slices"] * found["partial_rows"] <= room, what
            assert found["slices"] >= 1 or width > 1, what
            per_span = 1 if found["tiles"] == 1 else min(rows, found["copies"])
            assert found["partial_rows"] == per_span, what


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("features", [1000, 1001, 1100, 3001, 4097, 5001])
def test_spans_end_with_lines(features: int, width: int) -> None:
    """Spans of many rows end at lines of 128 bytes. Few rows have the shortest spans."""
    assert cut(60_000, features, width)["span"] * 16 % 128 == 0
    few = cut(37, features, width)
    assert few["copies"] <= width
    assert few["slices"] * few["tiles"] > 1


@pytest.mark.parametrize("width", [2, 4, 8])
def test_whole_spans(width: int) -> None:
    """A tile of narrow rows is one span. Other spans are cut into tiles of 8 to 32 packs."""
    many = cut(2_000_000, 33, width)
    assert many["lanes"] == many["span"] == 264
    assert many["slices"] == RESIDENT
    assert cut(300, 33, width)["lanes"] == 8
    assert cut(20_000, 40 * width, width)["lanes"] == 8


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize(
    "features", [33, 333, 768, 1000, 1001, 3072, 4096, 4097, 5001, 5120, 7777, 8192, 65_536]
)
def test_large_arrays(features: int, width: int) -> None:
    """One wave of blocks, with work for nearly all threads that the GPU needs."""
    found = cut(2**27 // features, features, width)
    assert found["tiles"] * found["slices"] <= RESIDENT, found
    turns = -(-found["spans"] // (found["at_once"] * found["slices"]))
    packs = 2**27 // features * features / width
    assert packs >= 0.9 * RESIDENT * 256 * turns, found
    assert found["at_once"] * found["lanes"] >= 240, found
