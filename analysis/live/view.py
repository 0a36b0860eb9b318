"""What the live page shows of a store: progress, curves so far, failures. Plain data."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.colors import to_hex

from analysis.live.records import Run, Study
from analysis.live.watch import Watch
from analysis.report.ends import duration
from analysis.style import arm_label, arm_looks, number_text

WINDOW_S = 600.0
"""Time left is told from the steps of this many seconds."""
LEAST_S = 4.0
MOST_FAILURES = 50
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 320, 190, 44, 16, 22, 8
SHOWN_FROM = 0.05
"""The fall of the first steps would hide the rest."""


@dataclass(frozen=True)
class Progress:
    """A study's line."""

    name: str
    scale: str
    title: str
    done: int
    diverged: int
    running: int
    failed: int
    todo: int
    num_runs: int
    percent: int
    left: str


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes; ``lines`` are (points of an SVG polyline, colour)."""

    title: str
    metric: str
    lines: tuple[tuple[str, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]

    @property
    def num_lines(self) -> int:
        """How many runs are drawn."""
        return len(self.lines)


@dataclass(frozen=True)
class Curves:
    """A study's curves so far. One of two scales is another study: ``key`` tells them apart."""

    name: str
    scale: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, str], ...]
    going_on: bool

    @property
    def key(self) -> str:
        return f"curves-{self.name}-{self.scale}"


@dataclass(frozen=True)
class Failure:
    """A failed run and the end of its log."""

    run_id: str
    cause: str
    tail: str


@dataclass(frozen=True)
class View:
    """The whole page at one moment."""

    root: str
    progress: tuple[Progress, ...]
    curves: tuple[Curves, ...]
    failures: tuple[Failure, ...]
    num_failed: int
    notes: tuple[str, ...]


class Viewer:
    """Looks at a store whenever it is asked; remembers how many steps each study had, to tell the time left."""

    def __init__(self, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self.watch, self.clock = watch, clock
        self._seen: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def look(self) -> View:
        """The store as it is now."""
        self.watch.look()
        runs = self.watch.runs
        failed = [run for run in runs.values() if run.state == "failed"]
        shown = tuple(
            Failure(r.run_id, r.cause or "unknown", self.watch.tail(r.run_id)) for r in failed[:MOST_FAILURES]
        )
        progress = tuple(self._progress(study) for study in self.watch.studies)
        drawn = (curves(study, [runs[i] for i in study.run_ids if i in runs]) for study in self.watch.studies)
        return View(str(self.watch.root), progress, tuple(found for found in drawn if found.panels), shown, len(failed),
                    tuple(self.watch.notes))  # fmt: skip

    def _progress(self, study: Study) -> Progress:
        runs = [self.watch.runs.get(run_id) or Run(run_id) for run_id in study.run_ids]
        counts = Counter(run.state for run in runs)
        planned = [run.num_steps or study.steps[run.run_id] for run in runs]
        made, total = sum(run.step for run in runs), sum(planned)
        ended = counts["done"] + counts["diverged"]
        left = "" if ended == len(runs) else self._left(study, made, total)
        return Progress(study.name, study.scale, study.title, ended, counts["diverged"], counts["running"],
                        counts["failed"] + counts["damaged"], counts["new"] + counts["partial"], len(runs),
                        100 * made // total if total else 0, left)  # fmt: skip

    def _left(self, study: Study, made: int, total: int) -> str:
        """From the steps per second since this page was first asked for, at most ``WINDOW_S`` ago."""
        now, seen = self.clock(), self._seen.setdefault((study.name, study.scale), deque())
        seen.append((now, made))
        while seen[0][0] < now - WINDOW_S:
            seen.popleft()
        begun, before = seen[0]
        if now - begun < LEAST_S or made <= before:
            return ""
        return duration((total - made) * (now - begun) / (made - before))


def curves(study: Study, runs: Sequence[Run]) -> Curves:
    """Every run of a study that has been evaluated, on axes for each base, data set and batch size."""
    begun = [run for run in runs if run.curve and run.curve.points]
    arms = sorted({run.arm for run in begun}, key=_by_rank)
    colours = {arm: to_hex(look["color"]) for arm, look in arm_looks(arms).items()}
    titles = dict.fromkeys(run.panel for run in begun)
    panels = (panel(title, [run for run in begun if run.panel == title], colours) for title in titles)
    legend = tuple((arm_label(arm), colours[arm]) for arm in arms)
    ended = sum(run.state in ("done", "diverged") for run in runs)
    return Curves(
        study.name, study.scale, tuple(found for found in panels if found), legend, ended < len(study.run_ids)
    )


def _by_rank(arm: str) -> tuple[int, str]:
    digits = "".join(c for c in arm.partition("-")[0] if c.isdigit())
    return (0 if arm == "full" else int(digits or 0) + 1), arm


def panel(title: str, runs: Sequence[Run], colours: dict[str, str]) -> Panel | None:
    """One pair of axes: the steps on a log scale; None while there is nothing to show."""
    points = [point for run in runs if run.curve for point in run.curve.points if point[0] > 0]
    if not points:
        return None
    last = max(step for step, _ in points)
    first = max(1.0, SHOWN_FROM * last)
    shown = sorted(value for step, value in points if step >= first)
    maximise = runs[0].metric == "test/reward"
    low, high = shown[0], shown[-1] if maximise else shown[math.ceil(0.9 * (len(shown) - 1))]
    height = (high - low) or 1e-3

    def x(step: float) -> float:
        along = math.log(step / first) / math.log(last / first) if last > first else 0.5
        return LEFT + (WIDTH - LEFT - RIGHT) * along

    def y(value: float) -> float:  # what lies above (a loss that diverges) runs along the top
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, (value - low) / height))

    lines = []
    for run in runs:
        inside = [(s, v) for s, v in run.curve.points if s >= first] if run.curve else []
        if inside:
            lines.append((" ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in inside), colours[run.arm]))
    y_ticks = tuple((round(y(value), 1), f"{value:.3g}") for value in _ticks(low, low + height))
    x_ticks = tuple((round(x(step), 1), number_text(round(step))) for step in (first, math.sqrt(first * last), last))
    return Panel(title, runs[0].metric, tuple(lines), y_ticks, x_ticks if last > first else x_ticks[-1:])


def _ticks(low: float, high: float) -> Iterable[float]:
    return (low, (low + high) / 2, high)
