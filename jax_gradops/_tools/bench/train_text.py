"""The text that the suite's language models learn.

The text comes with Python, so any machine has it: the language reference, and the standard
library's modules that are single files. Tokens are words, runs of punctuation and runs of white
space, each with the space before it. GPT-2's tokenizer begins in this way too, but splits these
tokens further. Tokens are numbered by frequency: token 0 is the most frequent. If there are more
tokens than a model's vocabulary holds, all rarer ones become the last token. Losses cannot be
compared with losses of other tokens or texts.
"""

from __future__ import annotations

import collections
import re
import sysconfig
from pathlib import Path

import numpy as np

from jax_gradops._tools.demo import text


def read_text() -> str:
    """The language reference, and the sources of the standard library if they are installed."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return "\n".join((text.python_reference(), *sources))


def tokens(of: str, vocabulary: int) -> np.ndarray:
    """Words by rank: 0 is the most frequent. Words beyond the vocabulary get the last rank."""
    words = re.findall(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+", of)
    # Of equally frequent words, the first one in the text comes first.
    ranked = collections.Counter(words).most_common()
    ranks = {word: min(rank, vocabulary - 1) for rank, (word, _) in enumerate(ranked)}
    return np.array([ranks[word] for word in words], np.int32)
