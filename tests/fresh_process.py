"""Runs code that needs a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run_python(code: str, tmp_path: Any, timeout: float = 120, **environment: str) -> Any:
    """Runs code in a new process, outside the source folder; returns the JSON that it prints."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
