"""Several processes, each with some devices of one mesh, as on a cluster."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PROCESSES, DEVICES, SECONDS = 2, 4, 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes(tmp_path):
    """The program of all of them is process.py, which says what is checked."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    flags = os.environ.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    program = str(Path(__file__).with_name("process.py"))
    port = free_port()
    outputs = [tmp_path / f"{i}.txt" for i in range(PROCESSES)]
    processes = []
    try:
        for i, path in enumerate(outputs):
            with open(path, "w") as output:
                command = [sys.executable, program, *map(str, (port, PROCESSES, i, DEVICES))]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        end = time.monotonic() + SECONDS
        # When one has failed, the others would wait for it.
        while time.monotonic() < end and not any(p.poll() for p in processes):
            if all(p.poll() == 0 for p in processes):
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [path.read_text() for path in outputs]
    said = "\n".join(f"--- process {i}\n{t[-3000:]}" for i, t in enumerate(texts))
    assert all(p.returncode == 0 for p in processes) and all("all passed" in t for t in texts), said
