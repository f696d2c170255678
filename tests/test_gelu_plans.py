"""How CUDA's bias + GELU cuts arrays into bands and tiles. These tests need no GPU.

The rule is ffi/cuda/gelu/plan.h, and `_plans` returns its choice. test_bias_gelu.py tests the
results on a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gpus import GPUS, numbers

from jax_gradops import _plans
from jax_gradops._kernel import spec

MULTIPROCESSORS = GPUS["h200"][1]
FORWARD_THREADS = 256  # threads of a forward block
THREADS = 320  # maximum for a backward block
RESIDENT = 2 * MULTIPROCESSORS  # resident backward blocks

GROUPS = (1, 3, 600)
ROWS = (1, 2, 37, 300, 1101, 40_003, 2**20, 2**33)
FEATURES = (
    1, 3, 8, 20, 33, 64, 100, 129, 320, 768, 1000, 1001, 4096, 4097, 5001, 65_537, 2**24 + 1,
)  # fmt: skip


def plan(
    rows: int,
    features: int,
    width: int,
    *,
    groups: int = 1,
    backward: bool = True,
    partial_rows: int | None = None,
) -> dict[str, Any]:
    """The plan for arrays whose vectors have `width` elements."""
    if partial_rows is None:
        partial_rows = spec.column_sum_workspace(groups, {"n": rows, "d": features}, 1)[1]
    return numbers(
        _plans.gelu_plan(
            backward=backward,
            groups=groups,
            rows=rows,
            features=features,
            element_bytes=16 // width if width > 1 else 4,
            aligned=width > 1,
            has_columns=True,
            partial_rows=partial_rows if backward else 0,
            multiprocessors=MULTIPROCESSORS,
        )
    )


def check(found: dict[str, Any], rows: int, features: int, width: int, threads: int) -> None:
    """Every vector of a band has exactly one thread, and every vector has a band."""
    size, vectors = found["tile_vectors"], found["band_vectors"]
    what = f"{[rows, features]} in vectors of {width}: {found}"
    assert found["width"] in (1, width), what
    assert 1 <= size * found["block_bands"] <= threads, what
    for thread in range(threads):
        assert thread * found["inverse"] >> 20 == thread // size, what
    assert vectors * found["width"] == found["band_rows"] * features, what
    assert (found["tiles"] - 1) * size < vectors <= found["tiles"] * size, what
    all_vectors = -(-rows * features // found["width"])
    assert (found["bands"] - 1) * vectors <= all_vectors <= found["bands"] * vectors, what
    assert found["tiles"] < 2**31, what


def most_vectors(width: int) -> int:
    """The most vectors of a thread forward. It is less for float64."""
    return 5 if width == 2 else 6


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_vector_has_a_thread_forward(width: int) -> None:
    for groups, rows, features in itertools.product(GROUPS, ROWS, FEATURES):
        found = plan(rows, features, width, groups=groups, backward=False)
        assert found["kernel"] == "GeluForwardKernel"
        check(found, rows, features, width, FORWARD_THREADS)
        assert 1 <= found["thread_vectors"] <= most_vectors(width), found
        bands = found["block_bands"] * found["thread_vectors"]  # bands of a slice
        assert (found["slices"] - 1) * bands < found["bands"] <= found["slices"] * bands, found


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(
    "features", [33, 100, 129, 333, 768, 1000, 1001, 4096, 4097, 5001, 7777, 10_007, 65_537]
)
def test_large_arrays_forward(features: int, width: int) -> None:
    """Tiles end at lines of 128 bytes, and nearly all threads have work."""
    found = plan(2**27 // features, features, width, backward=False)
    size, vectors = found["tile_vectors"], found["band_vectors"]
    assert found["thread_vectors"] == most_vectors(width)
    assert vectors % 8 == size % 8 == 0
    assert vectors * found["block_bands"] >= 0.93 * FORWARD_THREADS * found["tiles"], found
    assert size == (256 if vectors >= 4096 else min(size, 40)), found
    # For few wide rows, the bands hold at most 8 times the vectors that exist.
    wide = plan(3, 2**22 + 1, width, backward=False)
    assert wide["band_vectors"] * wide["bands"] <= 8 * 3 * 2**22 // width
    few = plan(3, features, width, backward=False)
    assert few["band_rows"] <= width
    assert few["thread_vectors"] == 1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_vector_has_a_thread(width: int) -> None:
    """Every vector has exactly one thread. There is room for all rows of sums."""
    for groups, rows, features in itertools.product(GROUPS, ROWS, FEATURES):
        for partial_rows in (None, 0, 1, 7, 64):
            found = plan(rows, features, width, groups=groups, partial_rows=partial_rows)
            what = f"{[groups, rows, features]} in vectors of {width}, {partial_rows}: {found}"
            assert found["kernel"] == "GeluBackwardKernel"
            check(found, rows, features, width, THREADS)
            assert found["slices"] >= 1, what
            if partial_rows == 0:  # no sums are wanted
                continue
            room = (
                partial_rows or spec.column_sum_workspace(groups, {"n": rows, "d": features}, 1)[1]
            )
            assert found["slices"] * found["partial_rows"] <= room, what
            per_band = 1 if found["tiles"] == 1 else min(rows, found["band_rows"])
            assert found["partial_rows"] == per_band, what


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("features", [1000, 1001, 1100, 3001, 4097, 5001])
def test_bands_end_with_lines(features: int, width: int) -> None:
    """Bands of many rows end at lines of 128 bytes. Few rows have the shortest bands."""
    assert plan(60_000, features, width)["band_vectors"] * 16 % 128 == 0
    few = plan(37, features, width)
    assert few["band_rows"] <= width
    assert few["slices"] * few["tiles"] > 1


@pytest.mark.parametrize("width", [2, 4, 8])
def test_whole_bands(width: int) -> None:
    """A tile of narrow rows is one band. Other bands are cut into tiles of 8 to 32 vectors."""
    many = plan(2_000_000, 33, width)
    assert many["tile_vectors"] == many["band_vectors"] == 264
    assert many["slices"] == RESIDENT
    assert plan(300, 33, width)["tile_vectors"] == 8
    assert plan(20_000, 40 * width, width)["tile_vectors"] == 8


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize(
    "features", [33, 333, 768, 1000, 1001, 3072, 4096, 4097, 5001, 5120, 7777, 8192, 65_536]
)
def test_large_arrays(features: int, width: int) -> None:
    """One wave of blocks, with work for nearly all threads that the GPU needs."""
    found = plan(2**27 // features, features, width)
    assert found["tiles"] * found["slices"] <= RESIDENT, found
    per_thread = -(-found["bands"] // (found["block_bands"] * found["slices"]))
    vectors = 2**27 // features * features / width
    assert vectors >= 0.9 * RESIDENT * 256 * per_thread, found
    assert found["block_bands"] * found["tile_vectors"] >= 240, found
