"""Several processes: in one mesh as on a cluster, or forked and spawned as data loaders do."""

import json
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
    """All processes run process.py, which lists the checks."""
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
        # If one process has failed, the others would wait for it.
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


FORK_AND_SPAWN = """
import hashlib, json, multiprocessing, sys
import numpy as np
import jax, jax_gradops

X = np.random.default_rng(0).standard_normal((300, 129)).astype(np.float32)

def digest(_):
    y, pull = jax.vjp(lambda x: jax_gradops.gelu(jax_gradops.layer_norm(x, x[0])), X)
    results = [y, *pull(X), jax_gradops.global_norm([X])]
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in results)).hexdigest()

def send(function, queue):
    queue.put(function())

def forked(function):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=send, args=(function, queue))
    process.start()
    result = queue.get()
    process.join()
    assert process.exitcode == 0, process.exitcode
    return result

if __name__ == "__main__":
    # A child that computes is forked before JAX has threads; later ones do without it.
    found = [forked(lambda: digest(0)), digest(0)]
    assert forked(lambda: float(X[0, 0])) == X[0, 0]
    found.append(digest(0))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found += pool.map(digest, range(2))
    print(json.dumps(found))
"""


def test_fork_and_spawn(tmp_path):
    """Children get their parent's results. The parent continues afterwards."""
    program = tmp_path / "program.py"
    program.write_text(FORK_AND_SPAWN)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", str(program)],
        env=environment, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5 and len(set(found)) == 1
