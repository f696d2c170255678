"""What a compiled training step contains: kernels of this library, and bytes of memory."""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

from jax_gradops import _registry


class Memory(NamedTuple):
    """The bytes of a compiled program.

    Attributes:
      peak: arguments, results and temporary arrays together.
      temporary: arrays that are neither arguments nor results, such as activations and logits.
    """

    peak: int
    temporary: int


def kernel_calls(compiled: Any) -> dict[str, int]:
    """The number of calls of each of this library's kernels in a compiled program."""
    prefix = re.escape(_registry.TARGET_PREFIX)
    found = re.findall(rf'custom_call_target="{prefix}(\w+)', compiled.as_text() or "")
    return dict(sorted(collections.Counter(found).items()))


def memory(compiled: Any) -> Memory | None:
    """The memory of a compiled program. None if XLA does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(kept + stats.temp_size_in_bytes, stats.temp_size_in_bytes)
