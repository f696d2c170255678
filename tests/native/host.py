"""Runs checks of a driver (driver.cc) on the handlers of a built module, without JAX.

python host.py DRIVER.so MODULE.so CHECK...
"""

import ctypes
import importlib.util
import sys
from pathlib import Path


class NamedHandler(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("call", ctypes.c_void_p)]


def handlers(module_path: str) -> ctypes.Array[NamedHandler]:
    name = Path(module_path).name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(f"jax_gradops.{name}", module_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsules = module.registrations().items()
    named = [NamedHandler(op.encode(), pointer(capsule, None)) for op, capsule in capsules]
    return (NamedHandler * len(named))(*named)


if __name__ == "__main__":
    driver, module, *checks = sys.argv[1:]
    run = ctypes.CDLL(driver).RunCheck
    all_handlers = handlers(module)
    failures = [run(check.encode(), all_handlers, len(all_handlers)) for check in checks]
    sys.exit(any(failures))
