"""`python -m jax_gradops bench --suite train --profile`: traces are read and summed up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jax_gradops._tools.bench import train_profile


@pytest.mark.parametrize(
    ("name", "group", "short"),
    [
        (
            "void gradops::(anonymous namespace)::ForwardKernel<float, 1>(RowNormFwdArgs)",
            "jax_gradops norms",
            "gradops::ForwardKernel",
        ),
        ("_ZN7gradops13ForwardKernelENS_15BiasGeluFwdArgsE", "jax_gradops GELU", None),
        (
            "void gradops::(anonymous namespace)::BackwardKernel<float>(CrossEntropyBwdArgs)",
            "jax_gradops loss",
            "gradops::BackwardKernel",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_9x1", "attention", None),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "matrix product", None),
        ("gemm_fusion_dot_12", "matrix product", "gemm_fusion_dot"),
        ("sm90_xmma_wgrad_implicit_gemm_bf16", "convolution", None),
        ("input_scatter_fusion_3", "scatter, gather", "input_scatter_fusion"),
        ("input_reduce_fusion.17", "reduction", "input_reduce_fusion"),
        ("loop_convert_fusion_2", "other fusion", "loop_convert_fusion"),
        ("wrapped_transpose", "copy", None),
        ("MemcpyD2D", "copy", None),
        ("RaggedKernel", "other", None),
    ],
)
def test_groups_of_kernels(name: str, group: str, short: str | None) -> None:
    assert train_profile.group_of(name) == group
    assert train_profile.short_name(name) == (short or name)


def test_profile_of_a_gpu(tmp_path: Path) -> None:
    """A profile has only the events of the GPU's streams."""

    def named(kind: str, pid: int, name: str, **thread: int) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}, **thread}

    def ran(pid: int, tid: int, name: str, us: float, ts: float = 0) -> dict[str, Any]:
        args = {"hlo_op": "fusion"}
        return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": us, "name": name, "args": args}

    events = [
        named("process_name", 1, "/device:GPU:0"),
        named("thread_name", 1, "Stream #13(Compute)", tid=2),
        named("thread_name", 1, "XLA Ops", tid=3),
        named("process_name", 9, "/host:CPU"),
        named("thread_name", 9, "python", tid=2),
        *(ran(1, 2, f"gemm_fusion_dot_{i}", 500, 400 * i) for i in range(4)),
        ran(1, 2, "input_reduce_fusion_1", 3000, 2700),
        ran(1, 3, "input_reduce_fusion_1", 3000),
        ran(9, 2, "a function", 7000),
        {"ph": "C", "pid": 1, "name": "a counter", "args": {}},
        {},
    ]
    path = tmp_path / "plugins" / "profile" / "2026" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    reduction, product, idle = train_profile.read(tmp_path, 2)
    assert (reduction.name, reduction.calls, reduction.ms) == ("reduction", 0.5, 1.5)
    assert product.kernels == (train_profile.Kernel("gemm_fusion_dot", 2, 1.0),)
    assert idle.kernels == (train_profile.Kernel("idle", 0.5, 0.5),)  # from 1,700 to 2,700
    assert train_profile.read(tmp_path / "nothing", 2) == []
