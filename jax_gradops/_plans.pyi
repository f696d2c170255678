# What ffi/plans.cc makes.

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
