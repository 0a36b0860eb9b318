"""The results store: every path, atomic writes, locks, status and the resume point of a run.

What makes a run new? Hashing the code would be too strict (a changed comment would orphan every
result), hashing nothing would be useless (two experiments in one directory). So a run *is* its
``RunConfig``: the directory is named by a hash of the science, and ``config.json`` inside it says
the whole of it. A directory whose ``config.json`` disagrees with the configuration asking for it
is *drift* (an edited file, a changed default) and is refused with the fields named.

Layout of ``<root>/<run id>/``::

    config.json       format version, run id, the full configuration
    provenance.json   commit and diff, versions, hardware, argv, revisions, init hash
    metrics.jsonl     one row per evaluated step; a prefix of the truth after a crash
    checkpoints/      checkpoint-<step>/ with SOUND.json written last
    failure.json      why the last attempt failed, if it did
    summary.json      written last, atomically: it alone means *done*
    lock              held (flock) by the process that writes; dropped by the kernel when it dies

No torch here: the analysis imports the reading half.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the layout above. A store written by a newer version is refused, never guessed at."""

_MISSING = object()


class StoreError(ValueError):
    """The store cannot be used as asked; the message is one line for the user."""


class Busy(StoreError):
    """Another living process is writing this run."""


@dataclass(frozen=True)
class RunRecord:
    """One run directory as found on disk.

    ``state`` is ``done``, ``failed``, ``running``, ``partial`` (begun, nobody writes it) or ``new``.
    ``problems`` holds one line for each thing that was wrong and handled.
    """

    run_id: str
    path: Path
    state: str
    config: dict[str, Any]
    summary: dict[str, Any] | None
    problems: tuple[str, ...] = ()


# ---------------------------------------------------------------- files


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: readers see the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``write_atomic`` of canonical JSON (sorted keys; NaN is refused, write None for missing)."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises StoreError, in one line, if unreadable or not an object."""
    with _explained(path):
        text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def ensure_root(root: Path) -> Path:
    """Make the store's root and prove that it can be written, before any work is started."""
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        try:
            with probe.open("w") as file:  # data is written too: a full disk still makes empty files
                file.write("x" * 8192)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    return root


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError into one line naming the path and what to do."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "the disk is full; free some space and run the same command again",
            errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
            errno.EACCES: "permission denied; choose a writable store with launch.root=DIR",
            errno.EROFS: "read-only file system; choose a writable store with launch.root=DIR",
            errno.ENOTDIR: "a file stands where a directory is needed; choose another launch.root=DIR",
            errno.EEXIST: "a file stands where a directory is needed; choose another launch.root=DIR",
        }.get(error.errno or 0, error.strerror or str(error))
        raise StoreError(f"store: cannot use {path}: {hint}") from error


# ---------------------------------------------------------------- reading half


def read_run(path: Path) -> RunRecord:
    """Read one run directory. Raises StoreError if it is foreign, unreadable or of a newer version."""
    if not (path / "config.json").exists():
        raise StoreError(f"{path.name}: no config.json (not a run of this suite)")
    document = read_json(path / "config.json")
    _check_format(path / "config.json", document)
    if not isinstance(document.get("config"), dict) or document.get("run_id") != path.name:
        raise StoreError(f"{path.name}: config.json is not this run's (run_id {document.get('run_id')!r})")
    problems: list[str] = []
    summary = None
    state = "partial"
    if (path / "summary.json").exists():
        summary = read_json(path / "summary.json")
        state = "done"
    elif _is_locked(path):
        state = "running"
    elif (path / "failure.json").exists():
        state = "failed"
    for name in unsound_checkpoints(path):
        problems.append(f"{path.name}: {name} is incomplete and will be passed over")
    return RunRecord(path.name, path, state, document["config"], summary, tuple(problems))


def state_of(path: Path) -> str:
    """State of a run that may not exist yet (``new``); raises StoreError as ``read_run`` does."""
    return read_run(path).state if (path / "config.json").exists() else "new"


def scan(root: Path) -> tuple[list[RunRecord], list[str]]:
    """All runs of a store, sorted by id, and one line for each thing left out and why."""
    records, left_out = [], []
    if not root.is_dir():
        raise StoreError(f"store: {root} is not a directory")
    with _explained(root):
        entries = sorted(p for p in root.iterdir() if p.is_dir() and p.name not in RESERVED)
    for path in entries:
        if path.name.startswith("."):
            continue
        try:
            records.append(read_run(path))
        except StoreError as error:
            left_out.append(f"left out: {error}")
    return records, left_out


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of ``<run>/metrics.jsonl`` and notes on what was dropped.

    A torn last line (the process died while writing) ends the reading; rows after any bad line
    cannot be trusted to be in order, so everything from the first bad line on is left out and said.
    """
    file = path / "metrics.jsonl"
    if not file.exists():
        return [], []
    rows: list[dict[str, Any]] = []
    with _explained(file):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            torn = number == len(lines)  # complete rows end with a newline
        except ValueError:
            torn, row = True, None
        if torn or not isinstance(row, dict) or "step" not in row:
            return rows, [f"{path.name}: metrics.jsonl is cut off at line {number}; rows before it are used"]
        rows.append(row)
    return rows, []


RESERVED = frozenset({"studies", "figures", "cache", "bases", "logs"})
"""Names under the root that are not runs."""


def log_path(root: Path, run_id: str) -> Path:
    """What a run printed, over all its attempts. Outside its directory, which only ``claim`` makes."""
    return root / "logs" / f"{run_id}.log"


def _study_path(root: Path, study: str, scale: str) -> Path:
    return root / "studies" / f"{study}-{scale}.json"


def write_study(root: Path, study: str, scale: str, manifest: Mapping[str, Any]) -> None:
    """Record which runs a study is made of, so that the analysis can name what is missing."""
    with _explained(root):
        (root / "studies").mkdir(parents=True, exist_ok=True)
    write_json(_study_path(root, study, scale), {"format": FORMAT, "study": study, "scale": scale, **manifest})


def read_study(root: Path, study: str, scale: str) -> dict[str, Any]:
    """The manifest of a study. Raises StoreError naming the known ones if it was never launched."""
    path = _study_path(root, study, scale)
    if not path.exists():
        known = ", ".join(f"{name} ({s})" for name, s in list_studies(root)) or "none yet"
        raise StoreError(f"study: {study!r} at scale {scale!r} is not in {root}; launched so far: {known}")
    document = read_json(path)
    _check_format(path, document)
    return document


def list_studies(root: Path) -> list[tuple[str, str]]:
    """(study, scale) of every manifest in the store."""
    pairs = (p.stem.rpartition("-") for p in sorted((root / "studies").glob("*.json")))
    return [(study, scale) for study, _, scale in pairs]


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    version = document.get("format")
    if not isinstance(version, int) or version < 1:
        raise StoreError(f"{path}: format: {version!r} is not a version of this suite (allowed: 1 to {FORMAT})")
    if version > FORMAT:
        raise StoreError(
            f"{path}: format: {version} was written by a newer version of this suite "
            f"(this one reads up to {FORMAT}); update, or choose another launch.root"
        )


# ---------------------------------------------------------------- checkpoints


def checkpoint_files(checkpoint: Path) -> dict[str, int]:
    """Relative name -> size in bytes of every file of a checkpoint, SOUND.json aside."""
    files = (p for p in sorted(checkpoint.rglob("*")) if p.is_file() and p.name != "SOUND.json")
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in files}


def seal_checkpoint(checkpoint: Path) -> None:
    """Declare a checkpoint complete. Called after its last byte is written."""
    write_json(checkpoint / "SOUND.json", {"files": checkpoint_files(checkpoint)})


def is_sound(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed and still has every file at its sealed size."""
    try:
        files = read_json(checkpoint / "SOUND.json")["files"]
    except (StoreError, KeyError):
        return False
    return bool(files) and files == checkpoint_files(checkpoint)


def _step_of(checkpoint: Path) -> int:
    suffix = checkpoint.name.rpartition("-")[2]
    return int(suffix) if suffix.isdigit() else -1


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("checkpoint-*"), key=_step_of)


def unsound_checkpoints(run: Path) -> list[str]:
    """Names of checkpoints that were begun and never completed, or damaged since."""
    return [p.name for p in _checkpoints(run) if not is_sound(p)]


# ---------------------------------------------------------------- writing half


def _try_lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(run: Path) -> bool:
    try:
        with (run / "lock").open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False


def drift(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names and both values of every field in which two nested configurations differ."""
    lines = []
    for key in sorted({*found, *wanted}):
        a, b = found.get(key, _MISSING), wanted.get(key, _MISSING)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += drift(a, b, f"{prefix}{key}.")
        elif a != b:
            left = "absent" if a is _MISSING else repr(a)
            right = "absent" if b is _MISSING else repr(b)
            lines.append(f"{prefix}{key}: {left} in the store, {right} asked for")
    return lines


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: a sound checkpoint, its step, and the metric rows up to that step."""

    checkpoint: Path
    step: int
    rows: list[dict[str, Any]]


class RunWriter:
    """The one writer of a run directory, holding its lock. Made by ``claim``."""

    def __init__(self, path: Path, lock: Any) -> None:
        self.path = path
        self.notes: list[str] = []
        self.mirrors: list[Callable[[Mapping[str, Any]], None]] = []
        self._lock = lock
        self._metrics: Any = None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The finished run's summary, or None while it is not done."""
        file = self.path / "summary.json"
        return read_json(file) if file.exists() else None

    def resume_point(self) -> ResumePoint | None:
        """The newest sound checkpoint with the metrics up to it, or None to begin at step 0.

        What cannot be trusted is removed and said in ``notes``: unsound checkpoints, rows after the
        checkpoint. If rows before it are lost the run begins again, since nothing else gives them back.
        """
        for name in unsound_checkpoints(self.path):
            self.notes.append(f"{name} is incomplete: deleted, its steps are trained again")
            shutil.rmtree(self.path / "checkpoints" / name)
        rows, torn = read_metrics(self.path)
        self.notes += torn
        found = None
        for checkpoint in reversed(_checkpoints(self.path)):
            kept = [row for row in rows if row["step"] <= _step_of(checkpoint)]
            if kept and kept[-1]["step"] == _step_of(checkpoint):
                found = ResumePoint(checkpoint, _step_of(checkpoint), kept)
                break
            self.notes.append(f"{checkpoint.name}: metrics.jsonl lost rows it builds on; passed over")
            shutil.rmtree(checkpoint)
        if found:
            self.notes.append(f"resumed from step {found.step}")
        write_atomic(self.path / "metrics.jsonl", "".join(_row(row) for row in found.rows) if found else "")
        return found

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to metrics.jsonl and flush it to the operating system."""
        with _explained(self.path / "metrics.jsonl"):
            if self._metrics is None:
                self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(_row(row))
            self._metrics.flush()
        for mirror in self.mirrors:
            mirror(row)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one of the run's JSON documents atomically."""
        write_json(self.path / name, value)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Commit the run: metrics to disk, then summary.json; checkpoints are dropped afterwards."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
            self._metrics.close()
            self._metrics = None
        (self.path / "failure.json").unlink(missing_ok=True)
        self.write("summary.json", summary)
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
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
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+")
    try:
        if not _try_lock(lock):
            lock.seek(0)
            raise Busy(f"{run_id}: being written by {lock.read().strip() or 'another process'}")
        lock.seek(0)
        lock.truncate()
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        if (path / "config.json").exists():
            document = read_json(path / "config.json")
            _check_format(path / "config.json", document)
            differing = drift(document.get("config", {}), config)
            if differing:
                raise StoreError(f"{run_id}: the store holds another configuration: {'; '.join(differing)}")
        else:
            write_json(path / "config.json", {"format": FORMAT, "run_id": run_id, "config": config})
        writer = RunWriter(path, lock)
        yield writer
    finally:
        lock.close()
