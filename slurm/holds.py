"""Tasks that Slurm holds: they stay in the queue until somebody releases them, so that is said with the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from slurm.judge import Snapshot
from slurm.ledger import Ledger, Place
from slurm.states import Seen, is_held


def held_lines(ledger: Ledger, places: Iterable[Place], snapshot: Snapshot) -> list[str]:
    """One line for each array and reason with held tasks: how many, why, and the command that lets them go on."""
    found: dict[tuple[int, str], set[int]] = {}
    for place in places:
        seen = snapshot.seen(ledger, place)
        if seen is not None and is_held(seen):
            found.setdefault((place.entry.job_id, _reason(seen)), set()).add(place.task)
    return [
        f"slurm: job {job}: {len(tasks)} tasks held ({reason}); to let them go on: {release(job, sorted(tasks))}"
        for (job, reason), tasks in sorted(found.items())
    ]


def release(job_id: int, tasks: Sequence[int]) -> str:
    """The command that releases elements of an array."""
    parts: list[list[int]] = []
    for task in tasks:
        if parts and parts[-1][1] == task - 1:
            parts[-1][1] = task
        else:
            parts.append([task, task])
    listed = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
    elements = f"{job_id}_[{listed}]" if len(tasks) > 1 else f"{job_id}_{listed}"
    return f"scontrol release {shlex.quote(elements)}"


def _reason(seen: Seen) -> str:
    if seen.detail == "JobHeldAdmin":
        return "JobHeldAdmin: an administrator's, who alone can release it"
    return seen.detail if seen.detail not in ("", "None") else seen.state
