"""GPUs for tests of the tables that choose kernels. No test needs these GPUs."""

from __future__ import annotations

#: Architecture, multiprocessors, bytes of shared memory per multiprocessor, bytes of L2 cache.
GPUS = {
    "A100": (80, 108, 167_936, 40 << 20),
    "RTX 4090": (89, 128, 102_400, 72 << 20),
    "H200": (90, 132, 233_472, 50 << 20),
    "RTX 5090": (120, 170, 102_400, 96 << 20),
}
