"""A run of the ResNet on handwritten digits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from jax_gradops._tools.demo.digits import plots
from jax_gradops._tools.demo.digits.data import Digits
from jax_gradops._tools.demo.digits.program import Program
from jax_gradops._tools.demo.progress import say
from jax_gradops._tools.demo.runs import Implementation, Run
from jax_gradops._tools.demo.settings import DigitsSettings
from jax_gradops._tools.demo.trainable import TrainState
from jax_gradops._tools.demo.training import History


class DigitsRun(Run[DigitsSettings]):
    """Trains the ResNet and writes the confusion matrix of the test images."""

    def __init__(
        self,
        folder: Path,
        settings: DigitsSettings,
        digits: Digits,
        platform: str,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        super().__init__(folder, settings, "ResNet on handwritten digits", platform, mesh)
        self._digits = digits

    def _introduce(self) -> None:
        digits, s = self._digits, self._settings
        say(
            f"Digits: {len(digits.train_images):,} images to train on and "
            f"{len(digits.test_images):,} to test, of 8 x 8 pixels"
        )
        say(
            f"ResNet: {s.width}, {2 * s.width} and {4 * s.width} channels; {s.steps} steps of "
            f"{s.batch} images, {s.precision}, seed {s.seed}"
        )

    def _program(self, implementation: Implementation) -> Program:
        return Program(self._settings, self._digits, implementation, mesh=self._mesh)

    def _judgement(self, history: History) -> str:
        accuracy, count = list(history.measured.values())[-1], len(self._digits.test_images)
        return f"{100 * accuracy:.1f} % ({round(accuracy * count)} of {count} images)"

    def _write_examples(self, program: Program, state: TrainState) -> None:
        confusion = program.confusion(state)
        self._write("confusion.png", plots.confusion(confusion, self._title))

    def _plot(self, histories: Mapping[str, History]) -> bytes:
        return plots.training(histories, self._title)
