"""What a sweep shows: counts that add up and a time left that is not fooled by resumed steps."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from sweeps import display
from sweeps.grid import Point
from sweeps.pool import Event


def points(count: int, steps: int = 100) -> list[Point]:
    made = [
        SimpleNamespace(run_id=f"r{k}", config=SimpleNamespace(optim=SimpleNamespace(steps=steps)))
        for k in range(count)
    ]
    return cast(list[Point], made)


def test_one_line_per_event_off_a_terminal() -> None:
    out = io.StringIO()
    shown = display.Display(points(3), 5, Console(file=out, width=200))
    with shown:
        shown.show(Event("started", "r0"))
        shown.show(Event("step", "r0", {"step": 1}))
        shown.show(Event("finished", "r0", {"found": "held-out NLL 1.2500", "notes": ["resumed from step 3"]}))
        shown.show(Event("busy", "r1", {"cause": "elsewhere"}))
        shown.show(Event("diverged", "r1", {"step": 9}))
        shown.show(Event("failed", "r2", {"cause": "ValueError: x", "log": "r2.log"}))
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "[6/8] r0: held-out NLL 1.2500; resumed from step 3",
        "[7/8] r1: diverged at step 9",
        "[8/8] r2: FAILED: ValueError: x (log: r2.log)",
    ]
    assert shown.failures == {"r2": {"cause": "ValueError: x", "log": "r2.log"}}


def test_time_left_counts_only_steps_trained_now(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = display.Display(points(2), 0, Console(file=io.StringIO()))
    now[0] += 60  # imports: no step yet, no guess
    assert shown.left_s() == 0
    shown.show(Event("started", "r0"))
    shown.show(Event("step", "r0", {"step": 51}))  # resumed at 50
    now[0] += 10
    shown.show(Event("step", "r0", {"step": 61}))  # 11 steps in 10 s; 39 + 100 are left
    assert shown.left_s() == pytest.approx((39 + 100) * 10 / 11)


def test_clock_reads_as_a_clock() -> None:
    assert [display.clock(s) for s in (4.6, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
