"""A run of the GPT on a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_gradops._tools.demo import plots
from jax_gradops._tools.demo.program import Program
from jax_gradops._tools.demo.progress import say
from jax_gradops._tools.demo.runs import Implementation, Run
from jax_gradops._tools.demo.settings import TextSettings
from jax_gradops._tools.demo.text import Corpus, bigram_entropy
from jax_gradops._tools.demo.trainable import TrainState
from jax_gradops._tools.demo.training import History


class TextRun(Run[TextSettings]):
    """Writes a sample of the model's text, and compares its loss with the bigram entropy."""

    def __init__(
        self,
        folder: Path,
        settings: TextSettings,
        corpus: Corpus,
        platform: str,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        super().__init__(folder, settings, corpus.name, platform, mesh)
        self._corpus = corpus
        self._entropy = bigram_entropy(corpus.validation)

    def _introduce(self) -> None:
        corpus, s = self._corpus, self._settings
        say(
            f"Text: {corpus.name}, {len(corpus.train):,} characters to train on and "
            f"{len(corpus.validation):,} for validation, {len(corpus.charset)} different ones"
        )
        say(
            f"GPT: width {s.width}, {s.layers} layers, {s.heads} heads, context {s.context}; "
            f"{s.steps} steps of {s.batch} windows, {s.precision}, seed {s.seed}"
        )

    def _program(self, implementation: Implementation) -> Program:
        return Program(self._settings, self._corpus, implementation, mesh=self._mesh)

    def _about_data(self) -> dict[str, Any]:
        return {"charset": self._corpus.charset, "digest": self._corpus.digest}

    def _judgement(self, history: History) -> str:
        loss, steps = list(history.measured.values())[-1], len(history.losses)
        text = (
            f"{loss:.3f} nats per character. The best guess from one character alone has "
            f"{self._entropy:.3f} (the bigram entropy). "
        )
        if loss < self._entropy:
            return text + "The model is better: it uses more of the text than one character"
        return text + f"The model is not better yet, after {steps} steps: train longer (--steps)"

    def _write_examples(self, program: Program, state: TrainState) -> None:
        start = self._corpus.charset.find("\n")
        sample = self._corpus.decode(program.generate(state, max(0, start)))
        say(f"\nA sample:\n{'-' * 80}\n{sample.strip()}\n{'-' * 80}")
        self._write("sample.txt", sample)

    def _plot(self, histories: Mapping[str, History]) -> bytes:
        return plots.plot(histories, self._entropy, self._title)
