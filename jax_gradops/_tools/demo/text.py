"""The text that the demo trains on: reading, encoding, batches, and its bigram entropy."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops._tools.demo.settings import DemoError

VALIDATION_FRACTION = 0.1
# Enough tokens for three digits of the loss, and few enough for a quick evaluation.
VALIDATION_LIMIT = 2**17


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as numbers: `train` and `validation` hold indices into `charset`."""

    name: str
    charset: str
    train: np.ndarray
    validation: np.ndarray
    digest: str

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes tokens to text."""
        return "".join(self.charset[int(t)] for t in tokens)


def load_corpus(path: str | None, context: int) -> Corpus:
    """Reads `path`, or the Python language reference if `path` is None.

    Args:
      path: a UTF-8 file.
      context: the window length. Both splits must hold at least one window and the token after it.

    Raises:
      DemoError: if the text cannot be read, or is too short.
    """
    name, text = (
        ("the Python language reference", python_reference()) if path is None else _read(path)
    )
    shortest = round((context + 1) / VALIDATION_FRACTION)
    if len(text) < shortest:
        has = f"has {len(text):,} characters" if text else "is empty"
        raise DemoError(f"{name} {has}; --context {context} needs at least {shortest:,}")
    data = text.encode("utf-32-le")
    codes, tokens = np.unique(np.frombuffer(data, np.uint32), return_inverse=True)
    tokens = tokens.astype(np.min_scalar_type(len(codes) - 1))
    split = len(tokens) - max(context + 1, int(len(tokens) * VALIDATION_FRACTION))
    return Corpus(
        name,
        "".join(map(chr, codes.tolist())),
        tokens[:split],
        tokens[split:][:VALIDATION_LIMIT],
        hashlib.sha256(data).hexdigest(),
    )


def python_reference() -> str:
    """The text of the Python language reference. It is part of every Python installation."""
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def _read(path: str) -> tuple[str, str]:
    try:
        return path, Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DemoError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise DemoError(
            f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}"
        ) from None


def bigram_entropy(tokens: np.ndarray) -> float:
    """The empirical conditional entropy H(next | current), in nats per character.

    No table of bigrams predicts `tokens` with a smaller loss, not even a table made from `tokens`.
    """
    pairs = tokens[:-1].astype(np.int64) * (int(tokens.max()) + 1) + tokens[1:]
    joint = np.unique(pairs, return_counts=True)[1]
    current = np.unique(tokens[:-1], return_counts=True)[1]
    return float((np.sum(current * np.log(current)) - np.sum(joint * np.log(joint))) / len(pairs))


def sample_batch(tokens: jax.Array, key: jax.Array, batch: int, context: int) -> jax.Array:
    """`batch` random windows of `context + 1` tokens, [batch, context + 1]; for use under jit."""
    starts = jax.random.randint(key, (batch, 1), 0, len(tokens) - context)
    return tokens[starts + jnp.arange(context + 1)[None]].astype(jnp.int32)


def windows(tokens: np.ndarray, context: int) -> np.ndarray:
    """All complete windows of `context + 1` tokens, [windows, context + 1].

    Each window starts with the last token of the window before. So each token is predicted only
    once.
    """
    count = (len(tokens) - 1) // context
    starts = np.arange(count)[:, None] * context
    return tokens[starts + np.arange(context + 1)].astype(np.int32)
