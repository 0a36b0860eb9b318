"""Where the jobs of a store stand: ``python -m slurm.status [--root runs]``; one line for each array with work left.

What Slurm holds is said with the command that releases it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from experiments import store
from slurm.client import Client, SlurmError
from slurm.holds import held_lines
from slurm.judge import Snapshot, fate_of, look
from slurm.ledger import Ledger, Place
from slurm.states import Fate, Seen, is_held

STATUS_CALL_S = 10.0
"""Status answers soon: with the controller down it says so after this."""


def lines(root: Path, done: Collection[str] | None = None, client: Client | None = None) -> list[str]:
    """One line for each array that has runs without a summary; none where nothing was ever submitted.

    ``done`` are the finished runs, where the caller knows them. Raises StoreError for a damaged ledger.
    """
    ledger = Ledger(root)
    if not store.exists(ledger.directory):
        return []
    places = ledger.places()
    if done is None:
        done = {run for run in places if store.exists(root / run / "summary.json")}
    unfinished = {run: place for run, place in places.items() if run not in done}
    if not unfinished:
        return []
    said = []
    try:
        snapshot = look(client or Client(STATUS_CALL_S), ledger, unfinished.values())
    except SlurmError as error:
        said.append(f"slurm: {error}; what follows is from the store alone")
        snapshot = Snapshot()
    for entry in ledger.entries():
        runs = {run: place for run, place in unfinished.items() if place.entry.name == entry.name}
        if not runs:
            continue
        found = Counter(_word(snapshot.seen(ledger, place), place) for place in runs.values())
        states = ", ".join(f"{found[word]} {word}" for word in sorted(found))
        job = f"job {entry.job_id}" if entry.job_id else "job not confirmed"
        said.append(f"slurm: {entry.study} ({entry.scale}), class {entry.resources}, {job}: {states}")
    return said + held_lines(ledger, unfinished.values(), snapshot)


def _word(seen: Seen | None, place: Place) -> str:
    found = fate_of(place, seen)
    if is_held(seen):
        return "held"
    if found is Fate.alive and seen is not None:
        return "queued" if seen.state == "PENDING" else seen.state.lower()
    if found is Fate.cancelled:
        return "cancelled"
    if found is Fate.unknown:
        return "unknown to Slurm"
    if found is Fate.returning and seen is not None:
        return f"stopped ({seen.state.lower()})"
    return "ended without a summary"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a store that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m slurm.status", description=__doc__)
    parser.add_argument("--root", default="runs")
    try:
        found = lines(Path(parser.parse_args(arguments).root))
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(found or ["slurm: no jobs with work left"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
