# What ffi/module.cc makes: _cpu, and on x86-64 _cpu_v3 and _cpu_v4, which have the same names.
ffi_api_version: tuple[int, int]
build_info: str
cpu_levels: dict[str, bool]
cuda_skipped: str

def registrations() -> dict[str, object]: ...
def signatures() -> dict[str, dict[str, object]]: ...
