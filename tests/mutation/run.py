"""Puts small faults into the library, one at a time: for each, some test must fail.

    python tests/mutation/run.py [--backend cpu|cuda] [--only TEXT ...] [--part K/N] [--list]

`faults.py` defines the faults. They are applied in a copy of this repository (`--work`). Its native
modules are built once. A fault then recompiles only the files that it touches. The tests that a
fault names must pass without the fault. With the fault, one of them must fail. A fault that
survives shows a gap in the tests. The script needs the `test` extra, CMake and nanobind (`make
mutate`). ``--backend cuda`` needs a GPU and nvcc.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from faults import CPU, CUDA, ROOT, Fault

COPIED = ("CMakeLists.txt", "README.md", "cmake", "pyproject.toml", "ffi", "jax_gradops", "tests")
# Hides an editable installation of the repository from every process of a test.
SITE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""
SECONDS = 300  # the limit for a fault's tests: a fault that makes them hang is found too
HUNG, SKIPPED = "hung", "nothing but skipped tests"
FAILED = 1  # pytest's exit status if some tests failed


class Workshop:
    """A copy of the repository with its own native modules."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.source, self.build = folder / "source", folder / "build"
        self.pristine, self.backend = folder / "pristine", backend

    def prepare(self) -> None:
        """Copies the changed files and builds the native modules."""
        self._copy_sources()
        (self.source / "sitecustomize.py").write_text(SITE)
        if self.pristine.exists():  # a killed run may have left a fault in the build folder
            self._restore_build()
        command = ["cmake", "-S", str(self.source), "-B", str(self.build)]
        command += ["-G", "Ninja"] if shutil.which("ninja") else []
        settings = {
            # Only one CPU level of kernels, without optimisation, so that compilation is fast.
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CXX_FLAGS_RELEASE": "-O0",
            "JAX_GRADOPS_CPU_LEVELS": "v2",
            "JAX_GRADOPS_CUDA": "ON" if self.backend == "cuda" else "OFF",
            "JAX_GRADOPS_TESTING": "ON",
            "Python_EXECUTABLE": sys.executable,
        }
        self._run([*command, *(f"-D{name}={value}" for name, value in settings.items())])
        if error := self._compile():
            sys.exit(f"the build fails without a fault:\n{error}")
        shutil.rmtree(self.pristine, ignore_errors=True)
        shutil.copytree(self.build, self.pristine)
        loaded = self._python("-c", "import jax_gradops; print(jax_gradops.__file__)").stdout
        if Path(loaded.strip()).parent != self.source / "jax_gradops":
            sys.exit(f"the tests would run with another jax_gradops: {loaded}")

    def test(self, tests: str) -> int | str:
        """Returns pytest's exit status (negative for a signal), or HUNG, or SKIPPED."""
        options = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = self._python(*options, *shlex.split(tests))
        except subprocess.TimeoutExpired:
            return HUNG
        return SKIPPED if done.returncode == 0 and " passed" not in done.stdout else done.returncode

    def verdict(self, fault: Fault) -> str:
        """The outcome of a fault. The expected outcome is "killed"."""
        path = self.source / fault.path
        text, times = path.read_text(), path.stat()
        native = fault.path.startswith("ffi/")
        path.write_text(fault.applied(text))
        try:
            if native and (error := self._compile()):
                return f"ERROR, does not compile: {error}"
            status = self.test(fault.tests)
            if status == 0:
                return "SURVIVES"
            found = status == HUNG or (isinstance(status, int) and status < 0) or status == FAILED
            return "killed" if found else f"ERROR, pytest ends with {status}"
        finally:
            path.write_text(text)
            if native:  # restores the file's time too, so that nothing is built again
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
                self._restore_build()
                self._install()

    def _copy_sources(self) -> None:
        def files(root: Path) -> set[Path]:
            found = [root / name for name in COPIED]
            found += [f for folder in found for f in folder.rglob("*")]
            built = (".so", ".pyc")
            return {f.relative_to(root) for f in found if f.is_file() and f.suffix not in built}

        wanted = files(ROOT)
        for gone in files(self.source) - wanted:
            (self.source / gone).unlink()
        for name in wanted:
            path, data = self.source / name, (ROOT / name).read_bytes()
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def _compile(self) -> str:
        """Builds, and installs beside the Python files; returns the compiler's error message."""
        done = self._run(
            ["cmake", "--build", str(self.build), "--parallel", str(os.cpu_count())], check=False
        )
        if done.returncode != 0:
            return done.stdout[-2000:]
        self._install()
        return ""

    def _install(self) -> None:
        self._run(["cmake", "--install", str(self.build), "--prefix", str(self.source)])

    def _restore_build(self) -> None:
        shutil.rmtree(self.build, ignore_errors=True)
        shutil.copytree(self.pristine, self.build)

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # JAX's compilation cache is reused: compiled XLA programs do not contain the kernels.
        environment = os.environ | {
            "PYTHONPATH": str(self.source),
            "JAX_COMPILATION_CACHE_DIR": str(self.source.parent / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.backend == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        command = [sys.executable, "-P", *arguments]
        return self._run(command, check=False, env=environment, cwd=self.source, timeout=SECONDS)

    def _run(self, command: list[str], check: bool = True, **options: Any) -> Any:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, **output, **options)
        if check and done.returncode != 0:
            sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-3000:]}")
        return done


def main() -> int:
    """Returns 0 if all faults are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", help="faults with one of these in name or path")
    parser.add_argument(
        "--part",
        default="1/1",
        help="2/8: every eighth fault from the second one on; each part needs its own --work",
    )
    parser.add_argument("--work", type=Path, help="default: build/mutation-BACKEND")
    parser.add_argument("--list", action="store_true", help="print the faults, and nothing else")
    parser.add_argument("--trust", action="store_true", help="tests are known to pass: after CI")
    arguments = parser.parse_args()
    faults = CPU if arguments.backend == "cpu" else CUDA
    if arguments.only:
        faults = [f for f in faults if any(o in f"{f.name} {f.path}" for o in arguments.only)]
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", arguments.part):
        parser.error(f"--part is not as in 2/8: {arguments.part}")
    part, parts = map(int, arguments.part.split("/"))
    faults = faults[part - 1 :: parts] if part <= parts else []
    if not faults:
        sys.exit("no fault is left by --only and --part")
    if arguments.list:
        print(*(f"{fault.path}: {fault.name}" for fault in faults), sep="\n")
        return 0
    work = arguments.work or ROOT / "build" / f"mutation-{arguments.backend}"
    workshop, start = Workshop(work.absolute(), arguments.backend), time.monotonic()
    workshop.prepare()
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    for tests in [] if arguments.trust else dict.fromkeys(fault.tests for fault in faults):
        if status := workshop.test(tests):
            sys.exit(f"without a fault, pytest {tests} ends with {status}")
        print(f"passes without a fault: {tests}", flush=True)
    print(f"the faults begin after {time.monotonic() - start:.0f} s", flush=True)
    verdicts = []
    for fault in faults:
        began = time.monotonic()
        verdicts.append(workshop.verdict(fault))
        seconds = time.monotonic() - began
        print(f"{verdicts[-1]} ({seconds:.0f} s): {fault.path}: {fault.name}", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(faults)} faults are found, {time.monotonic() - start:.0f} s in all")
    return 0 if killed == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
