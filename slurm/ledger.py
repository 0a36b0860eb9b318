"""What this store has submitted: one small file per array, ``<root>/slurm/<name>.json``, and the lock around it.

``<name>.json`` says which runs each element trains, its job id, and how elements died; ``<name>.runs.json``
beside it is what a task reads. The entry is written before ``sbatch`` is called and the job carries its name,
so that a launcher killed in between leaves a job that can be found again.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.store import FORMAT, check_format, explained, read_json, with_fields, write_json


@dataclass
class Entry:
    """One array job. ``job_id`` 0: not known to have been accepted. ``tasks[k]`` are the runs of element k.

    ``deaths`` tells how elements ended that did not finish their runs, by index. ``spent`` tells how often runs had
    been submitted again before, this time included, by run and cause.
    """

    name: str
    sequence: int
    study: str
    scale: str
    resources: str
    tasks: list[list[str]]
    job_id: int = 0
    time_unix_s: float = field(default_factory=time.time)
    cancelled: list[int] = field(default_factory=list)
    deaths: dict[str, str] = field(default_factory=dict)
    spent: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a run was last submitted to."""

    entry: Entry
    task: int


class Ledger:
    """The submissions of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "slurm"
        self._known: dict[Path, tuple[int, Entry]] = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the ledger: between looking what is in flight and submitting, nobody else does."""
        with explained(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "lock").open("a")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def entries(self) -> list[Entry]:
        """All submissions, oldest first. Raises StoreError for a damaged one: guessing would submit twice."""
        with explained(self.directory):
            paths = [p for p in self.directory.glob("*.json") if not p.name.endswith(".runs.json") and p.name[0] != "."]
            for path in paths:
                changed = path.stat().st_mtime_ns
                if path not in self._known or self._known[path][0] != changed:
                    self._known[path] = (changed, _read(path))
        return sorted((self._known[path][1] for path in paths), key=lambda entry: entry.sequence)

    def places(self) -> dict[str, Place]:
        """For each run ever submitted, its newest submission."""
        return {run: Place(entry, k) for entry in self.entries() for k, runs in enumerate(entry.tasks) for run in runs}

    def add(
        self, study: str, scale: str, resources: str, tasks: Sequence[list[str]], runs: Mapping[str, Any],
        spent: Mapping[str, dict[str, int]] | None = None,
    ) -> Entry:  # fmt: skip
        """Record an array about to be submitted, with what its tasks will read. Call it under the lock."""
        sequence = max((entry.sequence for entry in self.entries()), default=0) + 1
        slug = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{study}-{scale}-{resources}")[:60]
        entry = Entry(f"{slug}-{secrets.token_hex(4)}", sequence, study, scale, resources, [list(t) for t in tasks])
        entry.spent = {run: counts for runs_ in tasks for run in runs_ if (counts := (spent or {}).get(run))}
        write_json(self.runs_path(entry), {"format": FORMAT, "tasks": entry.tasks, **runs})
        self.save(entry)
        return entry

    def save(self, entry: Entry) -> None:
        """Write an entry that has changed."""
        write_json(self.directory / f"{entry.name}.json", {"format": FORMAT, **asdict(entry)})

    def remove(self, entry: Entry) -> None:
        """Forget a submission that was refused."""
        with explained(self.directory):
            for path in (self.directory / f"{entry.name}.json", self.runs_path(entry)):
                path.unlink(missing_ok=True)

    def runs_path(self, entry: Entry) -> Path:
        """What the tasks of an entry read."""
        return self.directory / f"{entry.name}.runs.json"

    def log_path(self, entry: Entry, task: int | str) -> Path:
        """What a task printed; it exists once the task has started."""
        return self.root / "logs" / "slurm" / f"{entry.name}-{task}.out"


def _read(path: Path) -> Entry:
    document = read_json(path)
    check_format(path, document)
    with_fields(path, document, name=str, sequence=int, tasks=list, resources=str)
    return Entry(**{f.name: document[f.name] for f in fields(Entry) if f.name in document})
