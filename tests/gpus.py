"""GPUs for which tests ask what the kernels' tables choose; none of them needs to be there."""

from __future__ import annotations

#: Architecture, multiprocessors, shared bytes of a multiprocessor.
GPUS = {
    "A100": (80, 108, 167_936),
    "RTX 4090": (89, 128, 102_400),
    "H200": (90, 132, 233_472),
    "RTX 5090": (120, 170, 102_400),
}
