"""A store looked at again and again: what has ended is read once, what goes on is read on from where it was.

Nothing is written. Whatever cannot be read is a note, and the rest is shown.
"""

from __future__ import annotations

import os
from pathlib import Path

from analysis.live.records import Run, Study, describe, study_of
from experiments import manifests, store

MAX_LOG_BYTES = 1_000_000
TAIL_BYTES, TAIL_LINES = 20_000, 40
"""What of a log is shown at once."""


class Watch:
    """The store at ``root``. ``look`` brings ``studies``, ``runs`` and ``notes`` up to date."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.studies: list[Study] = []
        self.runs: dict[str, Run] = {}
        self.notes: list[str] = []
        self._manifests: dict[tuple[str, str], tuple[tuple[int, int], Study]] = {}
        self._ended: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Read what has changed since the last look."""
        self.notes = []
        try:
            self.studies = self._read_studies()
            names = self._directories()
        except store.StoreError as error:
            self.notes.append(str(error))
            return
        expected = {run_id for study in self.studies for run_id in study.run_ids}
        for gone in set(self.runs) - names:
            del self.runs[gone]
            self._ended.pop(gone, None)
        for name in sorted(names):
            self._look_at(name, expected)
        self.notes += [note for name in sorted(self.runs) for note in self.runs[name].notes]

    def _read_studies(self) -> list[Study]:
        found = []
        for name, scale in manifests.list_studies(self.root):
            try:
                stamp = _stamp(self.root / "studies" / f"{name}-{scale}.json")
                if self._manifests.get((name, scale), (None,))[0] != stamp:
                    manifest = manifests.read_study(self.root, name, scale)
                    self._manifests[name, scale] = stamp, study_of(name, scale, manifest)
                found.append(self._manifests[name, scale][1])
            except store.StoreError as error:
                self.notes.append(f"left out: {error}")
        return found

    def _directories(self) -> set[str]:
        with store.explained(self.root):
            if not self.root.is_dir():
                return set()
            with os.scandir(self.root) as entries:
                return {e.name for e in entries if e.name not in store.RESERVED and e.name[0] != "." and e.is_dir()}

    def _look_at(self, name: str, expected: set[str]) -> None:
        path = self.root / name
        try:
            ended = _stamp(path / "summary.json") if (path / "summary.json").exists() else None
            if ended and self._ended.get(name) == ended:
                return
            if not store.exists(path / "config.json"):  # a run that another process is about to begin, or none at all
                self.runs.pop(name, None)
                if name not in expected and any(p.name != "lock" for p in path.iterdir()):
                    self.notes.append(f"left out: {name}: no config.json (not a run of this suite)")
                return
            record = store.read_run(path)
            run = self.runs.setdefault(name, Run(name))
            describe(run, record)
            assert run.curve is not None
            run.curve.read_on()
            run.notes = tuple(filter(None, [*record.problems, run.curve.note]))
            if ended and record.summary:
                self._ended[name] = ended
        except (store.StoreError, OSError) as error:
            run = self.runs.setdefault(name, Run(name))
            run.state, run.notes = "damaged", (f"left out: {error}",)

    def log(self, run_id: str, most_bytes: int = MAX_LOG_BYTES) -> str | None:
        """The end of what a run printed; None for an unknown run, or where a link leads out of the store."""
        if run_id not in self.runs:
            return None
        file, logs = store.log_path(self.root, run_id), self.root / "logs"
        try:
            if file.resolve().parent != logs.resolve() or logs.resolve().parent != self.root.resolve():
                return None
            with file.open("rb") as opened:
                opened.seek(max(0, os.fstat(opened.fileno()).st_size - most_bytes))
                return opened.read(most_bytes).decode(errors="replace")
        except OSError:
            return None

    def tail(self, run_id: str) -> str:
        """The last lines of a run's log, or of the traceback that it left where there is no log."""
        text = self.log(run_id, TAIL_BYTES) or self._traceback(run_id)
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _traceback(self, run_id: str) -> str:
        try:
            return str(store.read_json(self.root / run_id / "failure.json").get("detail", ""))
        except store.StoreError:
            return ""


def _stamp(file: Path) -> tuple[int, int]:
    with store.explained(file):
        found = file.stat()
    return found.st_mtime_ns, found.st_ino
