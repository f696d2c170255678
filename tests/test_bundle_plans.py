"""How CUDA's kernels of one pass divide a bundle of batch norm or group norm.

The rule is ffi/cuda/batch_norm/bundle_plan.h, and `_plans` returns its choice. test_group_norm.py
tests the results on a GPU. These tests need no GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gpus import GPUS, numbers

from jax_gradops import _plans


def task(
    groups: int, rows: int, channels: int, inner: int, bundle: int, gpu: str = "h200", **other: Any
) -> dict[str, Any]:
    architecture, multiprocessors, shared_bytes, l2_bytes = GPUS[gpu]
    return {
        "groups": groups,
        "rows": rows,
        "channels": channels,
        "inner": inner,
        "bundle": bundle,
        "element_bytes": 2,
        "accum_bytes": 4,
        "aligned": True,
        "statistics": True,
        "apply": True,
        "multiprocessors": multiprocessors,
        "shared_bytes": shared_bytes,
        "l2_bytes": l2_bytes,
        "clusters": architecture >= 90,
        **other,
    }


# Sizes, and what runs forward and backward in 16 bits: the kernel, the elements of a vector, and
# the lanes of a run.
CHOICES = {
    (16, 1, 1280, 64, 40): (("BundleFwdKernel", 8, 8), ("BundleBwdKernel", 8, 8)),
    (256, 1, 512, 49, 16): (("BundleFwdKernel", 8, 32), ("BundleBwdKernel", 1, 32)),
    (16, 1, 320, 3969, 10): (("BundleFwdKernel", 1, 32), None),
    (16, 1, 320, 65536, 10): (None, None),
    (1024, 1, 512, 64, 1): (("SmallBundleFwdKernel", 8, 4), ("SmallBundleBwdKernel", 8, 4)),
    (1024, 1, 256, 64, 8): (("SmallBundleFwdKernel", 8, 32), ("BundleBwdKernel", 8, 8)),
    (256, 1, 512, 49, 1): (("SmallBundleFwdKernel", 1, 8), ("SmallBundleBwdKernel", 1, 8)),
    (4096, 1, 1024, 1, 32): (("SmallBundleFwdKernel", 8, 2), ("SmallBundleBwdKernel", 8, 2)),
    (1024, 16, 512, 1, 16): (("PanelFwdKernel", 8, 4), ("PanelBwdKernel", 8, 4)),
    (256, 64, 512, 1, 16): (("PanelFwdKernel", 8, 16), ("PanelBwdKernel", 8, 16)),
    (1024, 9, 160, 1, 5): (("PanelFwdKernel", 8, 1), ("PanelBwdKernel", 8, 1)),
    (1024, 9, 33, 1, 3): (("PanelFwdKernel", 1, 2), ("PanelBwdKernel", 1, 2)),
    (65536, 1, 64, 1, 2): (("SmallBundleFwdKernel", 1, 1), ("SmallBundleBwdKernel", 1, 1)),
    (16, 1024, 640, 1, 20): (None, None),
    (64, 1024, 256, 1, 8): (None, None),
    (1, 16, 512, 1, 1): (None, None),
}


@pytest.mark.parametrize("sizes", CHOICES, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_choice(sizes, backward):
    found = numbers(_plans.bundle_plan(**task(*sizes, backward=backward)))
    want = CHOICES[sizes][backward]
    assert (tuple(found[k] for k in ("kernel", "width", "lanes")) if want else None) == want
    assert want or found == {"kernel": ""}


# Sizes and bytes of an element, and how many blocks share a bundle, forward and backward. 0: no
# kernel takes such bundles in one pass.
BLOCKS = {
    (16, 1, 320, 4096, 10, 2): (1, 4),
    (16, 1, 320, 4096, 10, 4): (4, 8),
    (8, 1, 256, 9216, 8, 2): (2, 8),
    (8, 1, 256, 9216, 8, 4): (4, 8),
    (4, 1, 128, 65536, 4, 2): (8, 0),
    (4, 1, 128, 65536, 4, 4): (0, 0),
    (8, 1, 256, 9217, 8, 2): (2, 0),
    # The cases of check_batch_norm.cu.
    (2, 1, 6, 10240, 3, 4): (2, 8),
    (1, 1, 3, 30720, 1, 4): (2, 8),
    (2, 1, 16, 15361, 8, 4): (8, 0),
}


@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_blocks(sizes, backward):
    given = task(*sizes[:-1], element_bytes=sizes[-1], backward=backward)
    assert numbers(_plans.bundle_plan(**given)).get("blocks", 0) == BLOCKS[sizes][backward]
    without_clusters = numbers(_plans.bundle_plan(**given | {"clusters": False}))
    assert without_clusters.get("blocks", 1) == 1


# Sizes and bytes of an element, and a block's warps, forward and backward.
WARPS = {
    (16, 1, 320, 4096, 10, 2): (16, 8),  # two blocks of 81 KB at a time, five of 41 KB
    (16, 1, 640, 1024, 20, 2): (10, 16),  # of 512 blocks, four are on a multiprocessor
    (64, 1, 1280, 256, 40, 4): (8, 16),  # of 2048 blocks, five or two
    (8, 1, 320, 65536, 1, 2): (13, 6),  # clusters: three blocks of 65 KB, six of 33 KB
    (2, 1, 320, 4096, 10, 2): (16, 10),  # of 64 blocks, one; backward, a block has 1,280 vectors
    (1024, 1, 320, 1024, 1, 4): (2, 2),  # a block has 256 vectors
    (0, 1, 320, 4096, 10, 2): (16, 10),
}


@pytest.mark.parametrize("sizes", WARPS, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_warps(sizes, backward):
    given = task(*sizes[:-1], element_bytes=sizes[-1], backward=backward)
    assert numbers(_plans.bundle_plan(**given))["warps"] == WARPS[sizes][backward]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_plans_of_many_shapes(gpu, element_bytes):
    """Sizes fit each other, and a block's shared memory and its number of warps have limits."""
    kernels = set()
    for groups, rows, bundle, inner, backward, aligned in itertools.product(
        (1, 3, 700),
        (1, 2, 17, 200),
        (1, 2, 3, 8, 24, 300),
        (1, 3, 8, 49, 256, 5000, 40000),
        (0, 1),
        (0, 1),
    ):
        given = task(
            groups, rows, 5 * bundle, inner, bundle, gpu, backward=backward, aligned=aligned,
            element_bytes=element_bytes, accum_bytes=max(4, element_bytes),
        )  # fmt: skip
        found = numbers(_plans.bundle_plan(**given))
        kernels.add(found["kernel"])
        if not found["kernel"]:
            continue
        assert found["lanes"] <= 32, given
        assert aligned or found["width"] == 1, given
        if found["kernel"].startswith("Panel"):
            assert inner == 1 and (groups > 1 or rows == 1), given
            assert found["channels"] % bundle == 0 and found["groups"] <= groups, given
            # A part of a group, or whole groups.
            whole = found["channels"] == 5 * bundle * found["groups"]
            assert whole or (found["groups"] == 1 and found["channels"] < 5 * bundle), given
            assert found["row_vectors"] * found["width"] == found["channels"], given
            threads = found["row_vectors"] * found["step_rows"]
            assert threads <= 32 * found["warps"] <= 256 and found["step_rows"] <= rows, given
            panel_bytes = rows * found["channels"] * element_bytes * (1 + backward)
            assert panel_bytes < found["shared_bytes"] <= GPUS[gpu][2] - 2048, given
            continue
        assert rows == 1, given
        if found["kernel"].startswith("Small"):
            assert found["vectors"] * found["width"] == bundle * inner, given
            most = 2 if found["width"] > 1 else 8  # vectors of a lane
            assert found["vectors"] <= most * found["lanes"], given
        else:
            assert found["shared_bytes"] <= GPUS[gpu][2] - 2048, given
            assert 1 <= found["warps"] <= 16, given
            held = bundle * inner * element_bytes * (1 + backward)
            assert held < found["blocks"] * found["shared_bytes"], given
            if found["blocks"] > 1:
                assert given["clusters"] and found["width"] > 1, given
                assert found["blocks"] <= 8 and found["shared_bytes"] <= 75 * 1024, given
            vectors = found["channel_vectors"] * found["width"]
            assert vectors in (inner, bundle * inner), given
    assert len(kernels) == 7
