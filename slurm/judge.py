"""How a task stands, from both witnesses: Slurm, and what the task left on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import store
from slurm.client import Client, SlurmError
from slurm.ledger import Entry, Ledger, Place
from slurm.states import Fate, Job, Seen, fate, ran_out_of_memory

TAIL_BYTES = 4000


@dataclass
class Snapshot:
    """What Slurm knew at one moment: its queue, and its memory of what has left the queue."""

    queue: dict[str, Job] = field(default_factory=dict)
    accounted: dict[str, Job] = field(default_factory=dict)

    def seen(self, ledger: Ledger, place: Place) -> Seen | None:
        """A task as Slurm knows it, or None.

        An element that is cancelled while it is pending leaves the queue and gets no record, for ever. It is told
        from a lost one by its array, which is known, and by its log, which no start has made.
        """
        name, task = place.entry.name, place.task
        queued, recorded = self.queue.get(name), self.accounted.get(name)
        if queued and task in queued.elements:
            return queued.elements[task]
        seen = recorded.elements.get(task) if recorded else None
        if seen and not _never_ended(seen):
            return seen
        if task in place.entry.cancelled:
            return Seen("CANCELLED")
        if seen is None and (queued or recorded) and not ledger.log_path(place.entry, task).exists():
            return Seen("CANCELLED", "while it was pending")
        return None


def _never_ended(recorded: Seen) -> bool:
    """Whether a record only says that its controller lost the job: killed before it had written it down, it leaves
    it running in the accounting for ever, or cancelled by nobody ("CANCELLED by 1000" names who wanted it)."""
    return fate(recorded) is Fate.alive or recorded.state == "CANCELLED"


def look(client: Client, ledger: Ledger, places: Iterable[Place]) -> Snapshot:
    """Ask the controller, and the accounting about what the controller has forgotten.

    A job id that its launcher could not write down is written down here. Raises SlurmDown if the controller does not
    answer; accounting that does not is done without: its part is that ended jobs may be taken for lost later.
    """
    snapshot = Snapshot(client.queue())
    forgotten: dict[str, Entry] = {}
    for place in places:
        job = snapshot.queue.get(place.entry.name)
        if job and not place.entry.job_id:
            place.entry.job_id = job.job_id
            ledger.save(place.entry)
        if place.entry.job_id and (job is None or place.task not in job.elements):
            forgotten[place.entry.name] = place.entry
    if forgotten:
        try:
            accounted = client.account(entry.job_id for entry in forgotten.values())
        except SlurmError:
            accounted = {}
        snapshot.accounted = {name: job for name, job in accounted.items() if name in forgotten}
    return snapshot


@dataclass(frozen=True)
class Finding:
    """How a run without a summary stands: the fate of its task, and a cause if the run itself has failed."""

    fate: Fate
    cause: str = ""
    failed: bool = False


def fate_of(place: Place, seen: Seen | None) -> Fate:
    """What a task's state means, with what launchers noted: an end that Slurm has forgotten since, and that a held
    task was cancelled by them, to be submitted again."""
    found, noted = fate(seen), place.entry.deaths.get(str(place.task))
    if noted and (found is Fate.unknown or (found is Fate.cancelled and noted == Fate.held.value)):
        return Fate(noted)
    return found


def judge(ledger: Ledger, place: Place, run: str, seen: Seen | None) -> Finding:
    """What became of a run that has no summary. A failure that the run recorded counts if it is of this submission."""
    found = fate_of(place, seen)
    if found in (Fate.alive, Fate.returning, Fate.unknown, Fate.cancelled, Fate.held):
        return Finding(found, seen.detail if seen else "")
    tail = tail_of(ledger.log_path(place.entry, place.task))
    cause = _recorded(ledger.root / run, place.entry.time_unix_s) or _printed(tail, run)
    if found is Fate.memory or ran_out_of_memory(cause) or (found is Fate.died and ran_out_of_memory(tail)):
        return Finding(Fate.memory, cause)
    if _recorded(ledger.root / run, place.entry.time_unix_s):
        return Finding(found, cause, failed=True)
    return Finding(found, cause or (tail.strip().splitlines() or [""])[-1])


def last_step(run: Path) -> int:
    """The step of the newest whole row of a run's metrics, 0 before there is one."""
    for line in reversed(tail_of(run / "metrics.jsonl").split("\n")[:-1]):
        try:
            row: dict[str, Any] = json.loads(line)
            return int(row["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def tail_of(path: Path) -> str:
    """The end of a file, empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _recorded(run: Path, since_unix_s: float) -> str:
    try:
        failure = store.read_json(run / "failure.json") if store.exists(run / "failure.json") else {}
    except store.StoreError:
        return ""
    return str(failure.get("cause", "")) if failure.get("time_unix_s", 0.0) > since_unix_s else ""


def _printed(tail: str, run: str) -> str:
    """The cause that a task printed for a run, where it could not be written into the run's directory."""
    lines = [line for line in tail.splitlines() if line.startswith(f"kind=failed run={run} cause=")]
    return lines[-1].partition("cause=")[2].partition(" log=")[0] if lines else ""
