"""What every training flow does besides training: metrics, evaluations, checkpoints, ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from experiments import ranks
from experiments.claim import Writer
from experiments.config import LaunchConfig, RunConfig


class Interrupted(Exception):
    """Asked to stop; the run was checkpointed and can be resumed."""


@dataclass
class Progress:
    """What the outside hears and says while a run goes on. ``value`` is the run's headline metric, where evaluated."""

    on_step: Callable[[int, int, float | None], None] = lambda step, steps, value: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Wish:
    """What a trainer is asked to do after a step."""

    save: bool = False
    stop: bool = False


class Recorder(TrainerCallback):
    """Writes the metrics, evaluates on the grid, checkpoints by the clock, stops what diverged.

    ``take_row`` hands over what the trainer measured in a step (its ``finite`` key says whether the loss
    was), ``evaluate`` the held-out metrics, ``measure`` what is looked at besides, after the first step.
    """

    def __init__(
        self,
        config: RunConfig,
        launch: LaunchConfig,
        writer: Writer,
        progress: Progress,
        evaluate: Callable[[], dict[str, float]],
        measure: Callable[[], dict[str, float]] = dict,
        limit: Callable[[float], float] = lambda base: math.inf,
        save_every: int = 1,
    ) -> None:
        self.grid = set(config.eval.grid(config.optim.steps))
        self.config, self.launch, self.writer, self.progress = config, launch, writer, progress
        self.evaluate, self.measure, self.limit, self.save_every = evaluate, measure, limit, save_every
        self.take_row: Callable[[], tuple[dict[str, Any], bool]]
        self.base: Mapping[str, float] = {}
        self.last: Mapping[str, float] = {}
        self.outcome = "finished"
        self.interrupted = False
        self.eval_s = 0.0
        self._saved_at = time.monotonic()

    @property
    def base_value(self) -> float:
        """The headline metric before the first step."""
        return float(self.base[self.config.headline])

    @property
    def last_value(self) -> float:
        """The headline metric of the newest evaluation; NaN where it was not finite."""
        value = self.last[self.config.headline]
        return math.nan if value is None else float(value)

    def start(self) -> None:
        """Evaluate before the first step of a fresh run (a resumed one has that row already)."""
        self.base = self.last = self._timed_evaluation()
        self.writer.append({"step": 0, **self.base})

    def restore(self, rows: list[dict[str, Any]]) -> None:
        """Take up the held-out metrics that the interrupted attempt recorded."""
        evaluated = [row for row in rows if self.config.headline in row]
        self.base, self.last = ({k: v for k, v in row.items() if k.startswith("test/")} for row in
                                (evaluated[0], evaluated[-1]))  # fmt: skip

    def on_train_begin(self, args, state, control, **kwargs):
        """A fresh run is evaluated here at the latest: a sharded model is on its devices from now on only."""
        if not self.base:
            self.start()

    def on_step_end(self, args, state, control, **kwargs):
        wish = self.after_step(state.global_step)
        control.should_save |= wish.save
        control.should_training_stop |= wish.stop
        return control

    def after_step(self, step: int) -> Wish:
        """Record a step, and say whether to checkpoint now and whether to stop."""
        taken, finite = self.take_row()
        row: dict[str, Any] = {"step": step, **taken}
        if not finite:
            self.outcome = "diverged"
        elif step in self.grid:
            self.last = self._timed_evaluation()
            row |= {**{k: finite_or_none(v) for k, v in self.last.items()}, **self.measure()}
            if not self.last_value <= self.limit(self.base_value):
                self.outcome = "diverged"
        self.writer.append(row)
        self.progress.on_step(step, self.config.optim.steps, row.get(self.config.headline))
        last = step >= self.config.optim.steps
        may_save = not last and step % self.save_every == 0
        is_due = time.monotonic() - self._saved_at >= self.launch.checkpoint_every_s
        should_stop, is_due = ranks.agreed(self.progress.should_stop(), is_due)
        if self.outcome == "diverged":
            return Wish(stop=True)
        self.interrupted = should_stop and may_save
        return Wish(save=(should_stop or is_due) and may_save, stop=self.interrupted)

    def on_save(self, args, state, control, **kwargs):
        self.saved(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def saved(self, written: Path) -> None:
        """Make a checkpoint the run's, its last byte being written."""
        self.writer.commit_checkpoint(written)
        self._saved_at = time.monotonic()

    def _timed_evaluation(self) -> dict[str, float]:
        begun = time.monotonic()
        metrics = self.evaluate()
        self.eval_s += time.monotonic() - begun
        return metrics


def finite_or_none(value: float) -> float | None:
    """The value as JSON can hold it."""
    return value if math.isfinite(value) else None
