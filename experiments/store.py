"""The results store: every path, atomic writes, status, checkpoints. Writing a run is ``experiments.claim``.

What makes a run new? Hashing the code would be too strict (a changed comment would orphan every
result), hashing nothing would be useless (two experiments in one directory). So a run *is* its
``RunConfig``: the directory is named by a hash of the science, and ``config.json`` inside it says
the whole of it. A directory whose ``config.json`` disagrees with the configuration asking for it
is *drift* (an edited file, a changed default) and is refused with the fields named.

Layout of ``<root>/<run id>/``::

    config.json       format version, run id, the full configuration
    provenance.json   commit and diff, versions, hardware, argv, revisions; ``earlier``: of attempts it goes on from
    metrics.jsonl     one row per evaluated step; a prefix of the truth after a crash
    samples.jsonl     RL: a few held-out completions of each evaluation
    checkpoints/      checkpoint-<step>/ with SOUND.json; .<attempt>/ where one is written before it is moved here
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the layout above. A store written by a newer version is refused, never guessed at."""


_MISSING = object()


class StoreError(ValueError):
    """The store cannot be used as asked; the message is one line for the user."""


class NewerStore(StoreError):
    """The store was written by a newer version of the suite: nothing in it may be touched."""


@dataclass(frozen=True)
class RunRecord:
    """One run directory as found on disk.

    ``state`` is ``done``, ``failed``, ``running``, ``partial`` (begun, nobody writes it), ``new`` or ``damaged``.
    ``cause`` says why it failed; ``problems`` holds one line for each thing that was wrong and handled.
    """

    run_id: str
    path: Path
    state: str
    config: dict[str, Any]
    summary: dict[str, Any] | None
    cause: str | None = None
    problems: tuple[str, ...] = ()


# ---------------------------------------------------------------- files


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: readers see the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
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
    with explained(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: damaged: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path}: damaged: expected a JSON object, found {type(value).__name__}")
    return value


def with_fields(path: Path, document: dict[str, Any], **fields: type) -> dict[str, Any]:
    """The ``document`` read from ``path``. Raises StoreError if one of ``fields`` is not there with its type."""
    for name, kind in fields.items():
        if not isinstance(document.get(name), kind):
            found = f"{document[name]!r:.60} is not allowed" if name in document else "missing"
            raise StoreError(f"{path}: damaged: {name}: {found}; expected {kind.__name__}")
    return document


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a library failed because no space was left; few of them say it with an OSError."""
    said = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing", "unexpected pos")
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(words in str(error) for words in said):
            return True
        error = error.__context__
    return False


def ensure_root(root: Path) -> Path:
    """Make the store's root, or a directory in it, and prove that it can be written, before any work is started."""
    with explained(root):
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
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError into one line naming the path and what to do."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOSPC: "the disk is full; free some space and run the same command again",
            errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
            errno.EACCES: "permission denied; get access to it, or choose another store with launch.root=DIR",
            errno.EROFS: "read-only file system; choose a writable store with launch.root=DIR",
            errno.ENOTDIR: "a file stands where a directory is needed; choose another launch.root=DIR",
            errno.EEXIST: "a file stands where a directory is needed; choose another launch.root=DIR",
        }.get(error.errno or 0, error.strerror or str(error))
        raise StoreError(f"store: cannot use {path}: {hint}") from error


def exists(path: Path) -> bool:
    """Whether ``path`` is there. Raises StoreError where that cannot be told (no permission above it)."""
    with explained(path):
        return path.exists()


# ---------------------------------------------------------------- reading half


def read_run(path: Path) -> RunRecord:
    """Read one run directory. Raises StoreError if it is foreign, unreadable or of a newer version."""
    if not exists(path / "config.json"):
        raise StoreError(f"{path.name}: no config.json (not a run of this suite)")
    document = read_json(path / "config.json")
    check_format(path / "config.json", document)
    if not isinstance(document.get("config"), dict) or document.get("run_id") != path.name:
        raise StoreError(f"{path.name}: config.json is not this run's (run_id {document.get('run_id')!r})")
    problems: list[str] = []
    state, cause = "partial", None
    summary, failure = read_summary(path), path / "failure.json"
    if summary is not None:
        state = "done"
    elif _is_locked(path):
        state = "running"
    elif exists(failure):
        state = "failed"
        try:
            cause = with_fields(failure, read_json(failure), cause=str)["cause"]
        except StoreError as error:  # it only tells about the last attempt; the next one does not need it
            problems.append(str(error))
    with explained(path / "checkpoints"):
        unsound = unsound_checkpoints(path)
    problems += [f"{path.name}: {name} is incomplete and will be passed over" for name in unsound]
    return RunRecord(path.name, path, state, document["config"], summary, cause, tuple(problems))


def read_summary(run: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None while it is not done. Raises StoreError if it is damaged."""
    file = run / "summary.json"
    if not exists(file):
        return None
    summary = with_fields(file, read_json(file), outcome=str, step=int, metrics=dict, time=dict)
    with_fields(file, summary["time"], total_s=float)
    return summary


def state_of(path: Path) -> str:
    """State of a run that may not exist yet (``new``); raises StoreError as ``read_run`` does."""
    return read_run(path).state if exists(path / "config.json") else "new"


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


def scan(root: Path) -> tuple[list[RunRecord], list[str]]:
    """All runs of a store, sorted by id, and one line for each thing left out and why."""
    records, left_out = [], []
    with explained(root):
        if not root.is_dir():
            raise StoreError(f"store: {root} is not a directory")
        entries = sorted(p for p in root.iterdir() if p.name not in RESERVED and not p.name.startswith("."))
    for path in entries:
        try:
            with explained(path):
                if not path.is_dir():
                    continue
            records.append(read_run(path))
        except StoreError as error:
            left_out.append(f"left out: {error}")
    return records, left_out


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of ``<run>/metrics.jsonl`` and notes on what was dropped.

    A torn last line (the process died while writing) ends the reading; rows after any bad line
    cannot be trusted to be in order, so everything from the first bad line on is left out and said.
    """
    return read_rows(path / "metrics.jsonl")


def read_rows(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """As ``read_metrics``, of any file of rows with a step."""
    rows: list[dict[str, Any]] = []
    with explained(file):
        if not file.exists():
            return [], []
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
            return rows, [f"{file.parent.name}: {file.name} is cut off at line {number}; rows before it are used"]
        rows.append(row)
    return rows, []


RESERVED = frozenset(
    {"studies", "figures", "cache", "bases", "logs", "slurm", "verdict", "wandb", "regret", "notebooks"}
)
"""Names under the root that are not runs."""


def log_path(root: Path, run_id: str) -> Path:
    """What a run printed, over all its attempts. Outside its directory, which only ``claim`` makes."""
    return root / "logs" / f"{run_id}.log"


def check_format(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a document of a newer version of the layout, or of none. Raises StoreError."""
    version = document.get("format")
    if not isinstance(version, int) or version < 1:
        raise StoreError(f"{path}: format: {version!r} is not a version of this suite (allowed: 1 to {FORMAT})")
    if version > FORMAT:
        raise NewerStore(
            f"{path}: format: {version} was written by a newer version of this suite "
            f"(this one reads up to {FORMAT}); update, or choose another launch.root"
        )


# ---------------------------------------------------------------- checkpoints


def checkpoint_files(checkpoint: Path) -> dict[str, int]:
    """Relative name -> size in bytes of every file of a checkpoint, SOUND.json aside."""
    files = (p for p in sorted(checkpoint.rglob("*")) if p.is_file() and p.name != "SOUND.json")
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in files}


def seal_checkpoint(checkpoint: Path, processes: int = 1) -> None:
    """Declare a checkpoint complete. Called after its last byte is written, by the last of its writers."""
    several = {"processes": processes} if processes > 1 else {}
    write_json(checkpoint / "SOUND.json", {"files": checkpoint_files(checkpoint), **several})


def sealed_by(checkpoint: Path) -> int:
    """How many processes wrote a sound checkpoint."""
    return int(read_json(checkpoint / "SOUND.json").get("processes", 1))


def is_sound(checkpoint: Path) -> bool:
    """Whether a checkpoint was sealed and still has every file at its sealed size."""
    try:
        files = read_json(checkpoint / "SOUND.json")["files"]
        return bool(files) and files == checkpoint_files(checkpoint)
    except (StoreError, KeyError, FileNotFoundError):  # its writer may be deleting it
        return False


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 if it has none."""
    suffix = checkpoint.name.rpartition("-")[2]
    return int(suffix) if suffix.isdigit() else -1


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, sound or not, by step."""
    return sorted((run / "checkpoints").glob("checkpoint-*"), key=step_of)


def prune_checkpoints(run: Path, keep: int = 2) -> None:
    """Delete all but the newest ``keep`` sound checkpoints: one more than is needed, should one be damaged."""
    for checkpoint in [c for c in checkpoints(run) if is_sound(c)][:-keep]:
        shutil.rmtree(checkpoint)


def unsound_checkpoints(run: Path) -> list[str]:
    """Names of checkpoints that were begun and never completed, or damaged since."""
    return [p.name for p in checkpoints(run) if not is_sound(p)]


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
