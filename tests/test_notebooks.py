"""The notebooks run without a warning. The committed outputs are readable."""

from __future__ import annotations

import os
import re

import pytest

nbformat = pytest.importorskip("nbformat")
notebooks = pytest.importorskip("notebooks", reason="nbclient or ipykernel is not installed")

MAX_BYTES = 300_000
OF_A_MACHINE = re.compile(r"site-packages|/(home|Users|root|tmp|var|opt|work)/")

every_notebook = pytest.mark.parametrize(
    "path", notebooks.NOTEBOOKS, ids=[path.stem for path in notebooks.NOTEBOOKS]
)


def outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def test_there_are_notebooks():
    assert notebooks.NOTEBOOKS


@every_notebook
def test_runs(path):
    # With JAX's default settings, not the settings of conftest.py.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = notebooks.execute(path, environment | {"JAX_PLATFORMS": "cpu"})
    assert not [o.text for o in outputs(done) if o.get("name") == "stderr"]


@every_notebook
def test_what_is_committed(path):
    """Outputs are of one complete run. They are small, and contain nothing about the machine."""
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), (
        "refresh it: python tests/notebooks.py"
    )
    for output in outputs(notebook):
        assert output.output_type in ("stream", "display_data", "execute_result")
        assert output.get("name") != "stderr"
        text = output.get("text") or output.data.get("text/plain", "")
        assert not OF_A_MACHINE.search(text), text
