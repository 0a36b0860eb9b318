"""The writing half of the store: the lock, the resume point, drift, the atomic end of a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.checks import ConfigError
from experiments.config import filled
from experiments.store import (
    FORMAT,
    StoreError,
    check_format,
    checkpoints,
    drift,
    explained,
    prune_checkpoints,
    read_json,
    read_metrics,
    read_rows,
    read_summary,
    seal_checkpoint,
    sealed_by,
    step_of,
    unsound_checkpoints,
    write_atomic,
    write_json,
)


class Busy(StoreError):
    """Another living process is writing this run."""


def _try_lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: a sound checkpoint, its step, and the metric rows up to that step."""

    checkpoint: Path
    step: int
    rows: list[dict[str, Any]]


class Mirror(Protocol):
    """Who else is told what the record of a run holds (``experiments.tracking``)."""

    def log(self, row: Mapping[str, Any]) -> None:
        """A row of metrics that is on disk."""

    def seal(self) -> None:
        """The rows so far will not be trained again."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""


class Writer(Protocol):
    """What a training flow asks of who writes its run."""

    @property
    def path(self) -> Path:
        """The run's directory."""

    def resume_point(self) -> ResumePoint | None:
        """Where to go on, or None to begin."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row of metrics."""

    @property
    def scratch(self) -> Path:
        """Where this attempt writes its checkpoints."""

    def commit_checkpoint(self, written: Path) -> None:
        """Make a checkpoint that lies whole in ``scratch`` the run's."""


class RunWriter:
    """The one writer of a run directory, holding its lock. Made by ``claim``.

    On a shared file system a lock ends with the lease of its machine: a machine that was cut off from the others
    may come back and go on writing a run that was given to another one. So every write first looks whether the lock
    file still names this attempt, and raises Busy if not; what such an attempt appends before it notices goes to the
    file that its successor has replaced. Checkpoints take long to write: each attempt does it in a directory of its
    own, and only a whole one becomes the run's, by a rename.
    """

    def __init__(self, path: Path, lock: Any, owner: str = "") -> None:
        self.path = path
        self.owner = owner
        self.notes: list[str] = []
        self.mirrors: list[Mirror] = []
        self._lock = lock
        self._metrics: Any = None

    @property
    def scratch(self) -> Path:
        """Where this attempt alone writes its checkpoints, each until ``commit_checkpoint``."""
        return self.path / "checkpoints" / f".{self.owner.rpartition(' ')[2] or 'attempt'}"

    @property
    def summary(self) -> dict[str, Any] | None:
        """The finished run's summary, or None while it is not done."""
        return read_summary(self.path)

    @property
    def descriptor(self) -> int:
        """The lock, to be inherited by processes that write for this one: it is held until the last of them ends."""
        return int(self._lock.fileno())

    def resume_point(self, processes: int = 1) -> ResumePoint | None:
        """The newest sound checkpoint with the metrics up to it, or None to begin at step 0.

        What cannot be trusted is removed and said in ``notes``: unsound checkpoints, rows after the
        checkpoint. If rows before it are lost the run begins again, since nothing else gives them back. So it does
        where another number of processes wrote the checkpoint: one process does not read what several write, and
        what goes on with another number is no longer to the bit what it would have been.
        """
        for abandoned in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(abandoned, ignore_errors=True)  # its writer may be alive: what it still writes is nobody's
        for name in unsound_checkpoints(self.path):
            self.notes.append(f"{name} is incomplete: deleted, its steps are trained again")
            shutil.rmtree(self.path / "checkpoints" / name)
        rows, torn = read_metrics(self.path)
        self.notes += torn
        found = None
        for checkpoint in reversed(checkpoints(self.path)):
            if sealed_by(checkpoint) != processes:
                written = f"{checkpoint.name} was written by {sealed_by(checkpoint)} processes, here are {processes}"
                self.notes.append(f"{written}: passed over")
                shutil.rmtree(checkpoint)
                continue
            kept = [row for row in rows if row["step"] <= step_of(checkpoint)]
            if kept and kept[-1]["step"] == step_of(checkpoint):
                found = ResumePoint(checkpoint, step_of(checkpoint), kept)
                break
            self.notes.append(f"{checkpoint.name}: metrics.jsonl lost rows it builds on; passed over")
            shutil.rmtree(checkpoint)
        if found:
            self.notes.append(f"resumed from step {found.step}")
        write_atomic(self.path / "metrics.jsonl", "".join(_row(row) for row in found.rows) if found else "")
        self._cut_samples(found.step if found else -1)
        for mirror in self.mirrors:
            for row in found.rows if found else ():
                mirror.log(row)
            mirror.seal()
        return found

    def _cut_samples(self, step: int) -> None:
        """Forget the samples drawn after ``step``: they are drawn again."""
        file = self.path / "samples.jsonl"
        if file.exists():
            rows, _ = read_rows(file)
            write_atomic(file, "".join(_row(row) for row in rows if row["step"] <= step))

    def check_owner(self) -> None:
        """Raises Busy if another process has taken this run over."""
        with explained(self.path / "lock"):
            found = (self.path / "lock").read_text(encoding="utf-8")
        if self.owner and found != self.owner:
            raise Busy(f"{self.path.name}: taken over by {found.strip() or 'another process'}")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to metrics.jsonl and flush it to the operating system."""
        self.check_owner()
        with explained(self.path / "metrics.jsonl"):
            if self._metrics is None:
                self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(_row(row))
            self._metrics.flush()
        for mirror in self.mirrors:
            mirror.log(row)

    def append_sample(self, row: Mapping[str, Any]) -> None:
        """Add one sampled completion to samples.jsonl."""
        self.check_owner()
        with explained(self.path / "samples.jsonl"), (self.path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(_row(row))

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one of the run's JSON documents atomically."""
        self.check_owner()
        write_json(self.path / name, value)

    def write_provenance(self, record: Mapping[str, Any]) -> None:
        """Where this attempt's steps come from, in provenance.json.

        ``earlier`` in it are attempts that left a checkpoint to go on from, oldest first, where they differ in more
        than the time: part of the result is theirs. Raises ConfigError if one of them read other commits of the hub:
        the run's id holds the revision, which may be a branch.
        """
        attempts: list[Mapping[str, Any]] = []
        if checkpoints(self.path):
            try:
                last = read_json(self.path / "provenance.json")
                attempts = [*last.pop("earlier", []), last]
            except StoreError as error:
                self.notes.append(f"the attempt before this left no provenance: {error}")
        for old in attempts:
            self._check_commits(old.get("hub", {}), record.get("hub", {}))
        different = [old for old in attempts if {**old, "time_unix_s": 0} != {**record, "time_unix_s": 0}]
        self.write("provenance.json", {**record, **({"earlier": different} if different else {})})

    def _check_commits(self, recorded: Mapping[str, str | None], present: Mapping[str, str | None]) -> None:
        """Refuse to go on from steps on another base or other data. A commit that is not known is no other one."""
        for piece, commit in recorded.items():
            here = present.get(piece)
            if commit and here and commit != here:
                raise ConfigError(
                    f"hub: {piece} is commit {here!r} here, and {self.path.name} has steps on {commit!r}; bring back "
                    f"the cache of before (HF_HOME), or remove {self.path / 'checkpoints'} to begin again"
                )

    def commit_checkpoint(self, written: Path, processes: int = 1) -> None:
        """Make a checkpoint that lies whole in ``scratch`` the run's, and drop older ones.

        ``processes`` wrote it. Raises Busy, with the run's checkpoints as they were, if another process has taken
        this run over.
        """
        seal_checkpoint(written, processes)
        place = self.path / "checkpoints" / written.name
        self.check_owner()
        with explained(place):
            if place.exists():  # of an attempt that was replaced between its own look and its rename
                place.rename(self.scratch / f"replaced-{written.name}")
            written.rename(place)
        prune_checkpoints(self.path)
        for mirror in self.mirrors:
            mirror.seal()

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Commit the run: metrics to disk, then summary.json; checkpoints are dropped afterwards."""
        self.check_owner()
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
            self._metrics.close()
            self._metrics = None
        (self.path / "failure.json").unlink(missing_ok=True)
        self.write("summary.json", summary)
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        for mirror in self.mirrors:
            mirror.end(summary)
        return dict(summary)

    def fail(self, cause: str, detail: str) -> None:
        """Record why this attempt failed. The run stays resumable."""
        self.write("failure.json", {"cause": cause, "detail": detail, "time_unix_s": time.time()})


def _row(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, allow_nan=False) + "\n"


@contextlib.contextmanager
def claim(root: Path, run_id: str, config: Mapping[str, Any]) -> Iterator[RunWriter]:
    """Take a run for writing: make its directory, take its lock, refuse drift.

    The lock belongs to the open file, so the kernel frees it when its owner dies, however it dies.
    Raises Busy if a living process holds it, StoreError on drift or an unusable store.
    """
    path = root / run_id
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+")
    writer = None
    try:
        if not _try_lock(lock):
            lock.seek(0)
            raise Busy(f"{run_id}: being written by {lock.read().strip() or 'another process'}")
        lock.seek(0)
        lock.truncate()
        owner = f"pid {os.getpid()} on {socket.gethostname()}, attempt {secrets.token_hex(8)}"
        lock.write(owner)
        lock.flush()
        if (path / "config.json").exists():
            document = read_json(path / "config.json")
            check_format(path / "config.json", document)
            differing = drift(filled(document.get("config", {})), filled(config))
            if differing:
                raise StoreError(f"{run_id}: the store holds another configuration: {'; '.join(differing)}")
        else:
            write_json(path / "config.json", {"format": FORMAT, "run_id": run_id, "config": config})
        writer = RunWriter(path, lock, owner)
        yield writer
    finally:
        if writer is not None:
            shutil.rmtree(writer.scratch, ignore_errors=True)
        lock.close()
