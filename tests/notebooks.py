"""Executes the notebooks: in tests, and as a program to refresh the committed outputs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  (makes a missing font cache, with a message)
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 300


def execute(path: Path, environment: Mapping[str, str]) -> nbformat.NotebookNode:
    """The notebook with new outputs. Raises the error of a cell. The file does not change.

    The kernel runs on this interpreter, in an empty folder beside the committed measurements.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / "benchmarks").symlink_to(ROOT / "benchmarks")
        folder = Path(parent) / "notebooks"
        folder.mkdir()
        manager = AsyncKernelManager(
            kernel_name="python3",
            # Kernels that are installed in folders are not used: they may run another interpreter.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            transport="ipc",  # with TCP, several workers could choose one port
            connection_file=f"{folder}/kernel.json",
        )
        NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute(env=dict(environment), cleanup_kc=True)
    # The other entries would differ between interpreters.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":  # all notebooks, or the named ones
    for notebook_path in map(Path, sys.argv[1:]) if sys.argv[1:] else NOTEBOOKS:
        nbformat.write(execute(notebook_path, os.environ), notebook_path)
        print(f"{notebook_path.name}: executed, {notebook_path.stat().st_size / 1e3:.0f} kB")
