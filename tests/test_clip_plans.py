"""How many blocks CUDA's global norm and clip have. These tests need no GPU.

The rule is ffi/cuda/clip/plan.h, and `_plans` returns its choice. test_global_norm.py tests the
results on a GPU.
"""

from __future__ import annotations

import itertools

import pytest
from gpus import GPUS, numbers

from jax_gradops import _plans

CHUNKS = (1, 7, 600, 2049, 30_000, 2**31 + 5)
GROUPS = (1, 3, 64, 700, 5000)


@pytest.mark.parametrize("gpu", GPUS)
def test_partial_sums_have_room(gpu: str) -> None:
    """A table has at most a segment per chunk, and all partial sums fit into the workspace."""
    multiprocessors = GPUS[gpu][1]
    for chunks, groups in itertools.product(CHUNKS, GROUPS):
        room = groups * -(-2048 // groups)
        found = numbers(
            _plans.clip_plan(
                scales=False,
                chunks=chunks,
                groups=groups,
                workspace_doubles=room,
                multiprocessors=multiprocessors,
            )
        )
        assert found["kernel"] == "PartialSumKernel"
        assert 1 <= found["segments"] <= chunks, found
        assert found["segments"] * groups <= room, found
        assert found["finalize_threads"] in (32, 256), found
        if groups == 1 and chunks >= 2048:  # the grid is whole waves of 5 blocks
            assert found["segments"] % (5 * multiprocessors) == 0, found


@pytest.mark.parametrize("gpu", GPUS)
def test_few_chunks_are_spread_over_the_gpu(gpu: str) -> None:
    """A block that scales has one chunk, or eight chunks if there are many."""
    multiprocessors = GPUS[gpu][1]
    for chunks, groups in itertools.product(CHUNKS, GROUPS):
        found = numbers(
            _plans.clip_plan(
                scales=True,
                chunks=chunks,
                groups=groups,
                workspace_doubles=0,
                multiprocessors=multiprocessors,
            )
        )
        assert found["kernel"] == "ScaleKernel"
        many = chunks * groups >= 32 * multiprocessors
        assert found["segments"] == (-(-chunks // 8) if many else chunks), found
