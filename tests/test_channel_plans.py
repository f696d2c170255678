"""How CUDA's batch norm divides its elements among threads. These tests need no GPU.

The rule is ffi/cuda/batch_norm/plan.h, and `_plans` returns its choice. test_batch_norm.py tests
the results on a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gpus import GPUS, numbers

from jax_gradops import _plans
from jax_gradops._kernel import spec

ROWS = (1, 2, 37, 1000, 4096, 25_088, 100_000)
CHANNELS = (
    1, 2, 3, 7, 8, 33, 34, 64, 68, 84, 100, 256, 320, 1000, 1001, 1024, 2048, 3000, 4096, 5120,
    8192, 16_384,
)  # fmt: skip
INNER = (1, 2, 7, 9, 49, 196, 784, 3136)


def partial_rows(groups: int, rows: int, channels: int, backward: bool) -> int:
    """The number of partial rows in the op's workspace."""
    return spec.column_sum_workspace(groups, {"n": rows, "d": channels}, 2 if backward else 4)[1]


def plan(
    rows: int,
    channels: int,
    inner: int = 1,
    *,
    groups: int = 1,
    element_bytes: int = 2,
    aligned: bool = True,
    backward: bool = False,
    residual: bool = False,
    gpu: str = "h200",
) -> dict[str, Any]:
    architecture, multiprocessors, shared_bytes, l2_bytes = GPUS[gpu]
    task = {
        "groups": groups,
        "rows": rows,
        "channels": channels,
        "inner": inner,
        "element_bytes": element_bytes,
        "accum_bytes": max(4, element_bytes),
        "aligned": aligned,
        "backward": backward,
        "statistics": True,
        "apply": True,
        "transient_arrays": int(residual),
        "partial_rows": partial_rows(groups, rows * inner, channels, backward),
        "multiprocessors": multiprocessors,
        "shared_bytes": shared_bytes,
        "l2_bytes": l2_bytes,
        "clusters": architecture >= 90,
    }
    coverage = numbers(_plans.batch_norm_coverage(**task))
    return coverage | numbers(_plans.batch_norm_plan(**task))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_every_step_has_a_block(gpu: str, element_bytes: int) -> None:
    """Each step has exactly one block. There is room for a block's kept values and its results."""
    _, multiprocessors, shared_bytes, _ = GPUS[gpu]
    for rows, channels, inner in itertools.product(ROWS, CHANNELS, INNER):
        if rows * channels * inner > 2**31:
            continue
        for aligned, backward, groups in ((True, False, 1), (True, True, 1), (False, False, 2)):
            found = plan(
                rows,
                channels,
                inner,
                groups=groups,
                element_bytes=element_bytes,
                aligned=aligned,
                backward=backward,
                residual=channels % 2 == 0,
                gpu=gpu,
            )
            what = (rows, channels, inner, aligned, backward, found)
            assert found["least_steps"] == found["most_steps"] == found["steps"], what
            assert found["tiles"] * found["tile_channels"] >= channels, what
            assert 1 <= found["blocks"] <= multiprocessors, what
            assert found["shared_bytes"] <= shared_bytes - 2048, what
            assert found["most_parts"] <= partial_rows(groups, rows * inner, channels, backward)
            if found["dynamic_chunks"] > 0:
                most = found["dynamic_chunks"] / found["tile_blocks"]
                assert 2 <= found["static_chunks"] <= most, what
                # Each warp's counter has room after the partial results.
                room = partial_rows(groups, rows * inner, channels, backward)
                assert found["tile_blocks"] + 16 <= room, what
            if found["combines_locally"]:  # a block reads few partial results for its own sums
                assert found["tile_blocks"] <= 48, what
                numbers = found["tile_blocks"] * found["tile_channels"] * (2 if backward else 4)
                assert numbers * max(4, element_bytes) <= 96 << 10, what
            if not found["plane"]:
                assert found["row_threads"] * found["step_rows"] <= 512, what
                columns = found["tile_channels"] * inner * found["fold"]
                assert columns <= found["row_threads"] * found["width"], what
                # Each vector of a step has a place, at any start of a tile in its cache line.
                row_pitch = found["row_pitch"]
                places = found["array_stage_bytes"] // (found["width"] * element_bytes)
                if row_pitch != found["row_threads"]:
                    assert row_pitch % 8 == 0 and row_pitch >= found["row_threads"], what
                    assert found["step_rows"] * row_pitch + 7 <= places, what


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_tiles_of_wide_rows_start_where_memory_is_read(element_bytes: int) -> None:
    """Tiles start at multiples of 128 bytes.

    With tiles of 63 vectors, 8,192 channels took a fifth longer.
    """
    for channels in (2048, 3072, 4096, 5120, 8192, 12_288, 16_384, 24_576, 32_768):
        for rows, backward in itertools.product((1000, 4096, 8192), (False, True)):
            found = plan(rows, channels, element_bytes=element_bytes, backward=backward)
            assert found["tiles"] == 1 or found["row_threads"] % 8 == 0, (channels, rows, found)
            # Almost all multiprocessors have work.
            assert found["blocks"] >= 0.9 * GPUS["h200"][1], (channels, rows, found)


def test_blocks_put_partial_results_together_for_themselves() -> None:
    """Blocks add partial results themselves if a tile has few blocks. This saves a barrier.

    Tiles are narrow enough for this.
    """
    for backward in (False, True):
        for rows, channels, inner in (
            (256 * 49, 2048, 1), (256 * 49, 512, 1), (256 * 196, 1024, 1), (8192, 2048, 1),
            (256, 2048, 49), (256, 1024, 196), (256, 512, 784), (256, 64, 112 * 112),
        ):  # fmt: skip
            found = plan(rows, channels, inner, backward=backward)
            assert found["combines_locally"], (rows, channels, inner, found)
        # All blocks have all channels. A block would have to read many results of other blocks.
        assert not plan(256 * 112 * 112, 64, backward=backward)["combines_locally"]


def test_a_block_has_whole_channels() -> None:
    """If there are enough channels, a block has whole channels: it waits for no other block."""
    for backward in (False, True):
        for channels, inner, element_bytes in (
            (1024, 196, 2), (1024, 196, 4), (512, 784, 2), (256, 784, 4), (2048, 49, 2),
            (2048, 49, 4), (256, 196, 2), (256, 196, 4),
        ):  # fmt: skip
            found = plan(256, channels, inner, element_bytes=element_bytes, backward=backward)
            what = (channels, inner, element_bytes, found)
            assert found["tiles"] == found["blocks"] == 128, what
            assert not found["plane"], what


def test_more_is_on_its_way_where_threads_have_no_vector() -> None:
    """A step has the vectors of 392 threads. Four steps in flight would leave bandwidth unused."""
    assert plan(256, 1024, 196)["row_threads"] == 196
    assert plan(256, 1024, 196)["chunk_steps"] == 6
    assert plan(256, 2048, 49)["chunk_steps"] == 4  # 490 threads
    assert plan(256 * 196, 1024)["chunk_steps"] == 4
    assert plan(256, 1024, 196, gpu="rtx 5090")["chunk_steps"] == 4  # there is no room for more


def test_what_the_l2_cache_is_to_keep() -> None:
    """The cache keeps three fifths of its size, all of a small array, and little of a large one."""
    for gpu, rows, channels, inner in (
        ("h200", 256 * 196, 512, 1), ("a100", 256 * 196, 512, 1), ("a100", 64, 256, 3136),
        ("rtx 5090", 256, 512, 784),
    ):  # fmt: skip
        for backward in (False, True):
            found = plan(rows, channels, inner, backward=backward, gpu=gpu)
            if found["cached_steps"] == 0:
                continue  # two arrays are too large
            step = (512 if found["plane"] else found["row_threads"] * found["step_rows"]) * 16
            steps = found["tiles"] * found["steps"] - found["evict_first_steps"]
            kept = steps * step * (2 if backward else 1)
            assert 0.5 * GPUS[gpu][3] < kept <= 0.62 * GPUS[gpu][3], (gpu, found)
    for backward in (False, True):
        assert plan(256 * 196, 512, backward=backward)["cached_steps"] > 0
        assert plan(256 * 49, 512, backward=backward)["cached_steps"] == 0
        assert plan(256 * 112 * 112, 64, backward=backward)["cached_steps"] == 0


def test_rows_of_a_step_lie_in_lines_as_in_memory() -> None:
    """Rows in shared memory keep their offset in a cache line, if this takes little room.

    Otherwise the hardware takes three times the number of steps for a warp's copies.
    """
    assert plan(256, 2048, 49)["row_pitch"] == 104
    assert plan(256, 2048, 49)["row_threads"] == 98


def test_last_chunks_are_dynamic() -> None:
    """Large arrays with channels last have dynamic chunks. Small ones have none."""
    large, small = 256 * 56 * 56, 1000
    for backward in (False, True):
        assert plan(large, 256, backward=backward)["dynamic_chunks"] > 0
        assert plan(small, 2048, backward=backward)["dynamic_chunks"] == 0
