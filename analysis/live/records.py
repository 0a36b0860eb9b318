"""A study, a run and its curve as the live page keeps them between two looks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.arms import arm_name
from experiments import store
from experiments.config import filled


@dataclass(frozen=True)
class Study:
    """A manifest: which runs it expects, and of how many steps."""

    name: str
    scale: str
    title: str
    run_ids: tuple[str, ...]
    steps: Mapping[str, int]


@dataclass
class Run:
    """One run as it stands. ``state`` is that of ``store.RunRecord``, or ``diverged``, ``damaged``."""

    run_id: str
    state: str = "new"
    cause: str = ""
    arm: str = ""
    panel: str = ""
    metric: str = "test/nll_nats"
    num_steps: int = 0
    curve: Curve | None = None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps that need not be made any more: all of a run that has ended."""
        if self.state in ("done", "diverged"):
            return self.num_steps
        return min(self.curve.step, self.num_steps) if self.curve else 0


@dataclass
class Curve:
    """``metrics.jsonl`` of one run: its last step and the points of its headline metric so far."""

    file: Path
    metric: str
    step: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)
    note: str = ""
    _offset: int = 0
    _inode: int = 0

    def read_on(self) -> None:
        """Take in the whole lines that were added; a file that was replaced is read again. Raises StoreError."""
        with store.explained(self.file):
            if not self.file.exists():
                return
            found = self.file.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:  # a resumed run dropped its last rows
                self.step, self.points, self.note, self._offset, self._inode = 0, [], "", 0, found.st_ino
            if found.st_size == self._offset or self.note:
                return
            with self.file.open("rb") as opened:
                opened.seek(self._offset)
                whole, newline, _ = opened.read().rpartition(b"\n")  # what follows is still being written
        self._offset += len(whole) + len(newline)
        for line in whole.split(b"\n") if newline else []:
            if line and not self._take(line):
                run, file = self.file.parent.name, self.file.name
                self.note = f"{run}: {file} is damaged after step {self.step}; rows before it are used"
                return

    def _take(self, line: bytes) -> bool:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return False
        self.step, value = row["step"], row.get(self.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            self.points.append((self.step, float(value)))
        return True


def study_of(name: str, scale: str, manifest: Mapping[str, Any]) -> Study:
    """A manifest as the page needs it."""
    configs = manifest.get("configs") or {}
    run_ids = tuple(map(str, manifest["run_ids"]))
    steps = {run_id: _num_steps(configs.get(run_id) or {}) for run_id in run_ids}
    return Study(name, scale, manifest["title"], run_ids, steps)


def _num_steps(config: Mapping[str, Any]) -> int:
    steps = filled(config)["optim"].get("steps")
    return steps if isinstance(steps, int) else 0


def describe(run: Run, record: store.RunRecord) -> None:
    """How the run stands, and, the first time, what it is."""
    summary = record.summary or {}
    run.state = "diverged" if summary.get("outcome") == "diverged" else record.state
    run.cause = record.cause or ""
    if run.curve is not None:
        return
    config = filled(record.config)
    group_size = config["rl"].get("group_size")
    run.metric = "test/reward" if isinstance(group_size, int) and group_size > 0 else "test/nll_nats"
    run.num_steps = _num_steps(record.config)
    run.panel = (
        f"{config['model'].get('name')} on {config['data'].get('name')}, batch {config['optim'].get('batch_size')}"
    )
    try:
        run.arm = arm_name({f"config.method.{key}": value for key, value in config["method"].items()})
    except (KeyError, TypeError, ValueError):
        run.arm = "unknown arm"
    run.curve = Curve(record.path / "metrics.jsonl", run.metric)
