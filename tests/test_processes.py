"""Several processes, each with some devices of one mesh, as on a cluster."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

PROCESSES, DEVICES, SECONDS = 2, 4, 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes():
    """The program of all of them is process.py, which says what is checked."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    with contextlib.ExitStack() as stack:
        arguments = [str(free_port()), str(PROCESSES)]
        processes = []
        for i in range(PROCESSES):
            process = subprocess.Popen(
                [
                    sys.executable,
                    Path(__file__).with_name("process.py"),
                    *arguments,
                    str(i),
                    str(DEVICES),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # before the wait; does nothing to one that has ended
            processes.append(process)
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and "all passed" in output, output[-4000:]
