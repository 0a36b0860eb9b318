"""What a sweep shows while it runs: a live line on a terminal, one line per event elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sweeps.grid import Point
from sweeps.pool import Event

ENDS = ("finished", "diverged", "failed")


def clock(seconds: float) -> str:
    """``1:02:03`` or ``4:05``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class Display:
    """Counts, current runs and time left. Use as a context manager and feed it with ``show``."""

    def __init__(self, points: Sequence[Point], num_done_before: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.steps_total = {p.run_id: p.config.optim.steps for p in points}
        self.num_before = num_done_before
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, dict] = {}
        self.active: dict[str, int] = {}
        self.first_step: dict[str, int] = {}
        self.steps_ended = 0
        self.begun = time.monotonic()
        self.stepping_since: float | None = None
        self.steps_skipped = 0  # steps that a resumed run did not have to repeat
        self._live = Live(console=self.console, get_renderable=self._picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Take in one event; print it if it is worth a line."""
        run, detail = event.run, event.detail
        if event.kind == "started":
            self.active[run] = 0
            self.first_step.pop(run, None)
            return
        if event.kind == "step":
            self.active[run] = detail["step"]
            self.stepping_since = self.stepping_since or time.monotonic()  # imports and data come before
            if run not in self.first_step:
                self.first_step[run] = detail["step"] - 1
                self.steps_skipped += detail["step"] - 1
            return
        self.active.pop(run, None)
        if event.kind in ENDS:
            self.counts[event.kind] += 1
            self.steps_ended += self.steps_total[run]
        if event.kind == "failed":
            self.failures[run] = detail
        if event.kind != "busy":
            self.console.print(self._line(event), markup=False)

    def _line(self, event: Event) -> str:
        place = f"[{self.num_before + sum(self.counts.values())}/{self.num_before + len(self.steps_total)}]"
        detail = event.detail
        said = {
            "finished": lambda: detail["found"],
            "diverged": lambda: f"diverged at step {detail['step']}",
            "failed": lambda: f"FAILED: {detail['cause']} (log: {detail['log']})",
        }.get(event.kind, lambda: detail.get("cause", ""))()
        left = f", {clock(self.left_s())} left" if event.kind in ENDS and self.left_s() > 0 else ""
        notes = "".join(f"; {note}" for note in detail.get("notes", []))
        kind = "" if event.kind in ENDS else f"{event.kind}: "
        return f"{place} {event.run}: {kind}{said}{notes}{left}"

    def left_s(self) -> float:
        """Seconds left, from the steps per second of this launch so far (0 while nothing is known)."""
        done = self.steps_ended + sum(self.active.values())
        elapsed_s = time.monotonic() - (self.stepping_since or time.monotonic())
        rate = (done - self.steps_skipped) / elapsed_s if elapsed_s > 0 else 0.0
        return (sum(self.steps_total.values()) - done) / rate if rate > 0 else 0.0

    def _picture(self) -> Group:
        left_s = self.left_s()
        head = (
            f"done {self.num_before + self.counts['finished'] + self.counts['diverged']}"
            f"/{self.num_before + len(self.steps_total)}   running {len(self.active)}"
            f"   diverged {self.counts['diverged']}   failed {self.counts['failed']}"
            f"   elapsed {clock(time.monotonic() - self.begun)}" + (f"   left {clock(left_s)}" if left_s > 0 else "")
        )
        runs = [Text(f"  {step:>5}/{self.steps_total[run]}  {run}") for run, step in self.active.items()]
        return Group(Text(head, style="bold"), *runs)


def warn(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr)
