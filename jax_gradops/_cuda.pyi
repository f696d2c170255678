# What ffi/module.cc makes for CUDA.
from jax_gradops._cpu import build_info as build_info
from jax_gradops._cpu import cpu_levels as cpu_levels
from jax_gradops._cpu import cuda_skipped as cuda_skipped
from jax_gradops._cpu import ffi_api_version as ffi_api_version
from jax_gradops._cpu import registrations as registrations

def devices() -> tuple[list[int], int, int]: ...
def row_plan(
    *,
    rows: int,
    features: int,
    element_bytes: int,
    arrays: int,
    backward: bool,
    aligned: bool,
    aligned_params: bool,
    architecture: int,
    multiprocessors: int,
    shared_bytes: int,
    sums_dx: bool = False,
    centered: bool = True,
) -> dict[str, int | bool]: ...
def force_row_plan(
    *,
    architecture: int = 0,
    max_cluster: int = 0,
    max_threads: int = 0,
    max_stages: int = 0,
    stream: bool = False,
    packs: int = 0,
) -> None: ...
def gelu_forward_cut(
    *, groups: int, rows: int, features: int, width: int, turns: int, resident: int
) -> dict[str, int]: ...
def gelu_cut(
    *,
    groups: int,
    rows: int,
    features: int,
    width: int,
    element_bytes: int,
    partial_rows: int,
    resident: int,
) -> dict[str, int]: ...
def channel_plan(
    *,
    groups: int,
    rows: int,
    channels: int,
    inner: int,
    element_bytes: int,
    aligned: bool,
    backward: bool,
    residual: bool,
    partial_rows: int,
    multiprocessors: int,
    shared_bytes: int,
    l2_bytes: int,
) -> dict[str, int | bool]: ...
