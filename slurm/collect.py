"""What came of a study, looked at once: ``python -m slurm.collect STUDY [--scale mini] [--root runs]``.

One line for each run without a summary, with what became of its task and where its log is; exit code 0 only if
every run has its summary. Results need no fetching: the tasks write them into the store.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import manifests, store
from slurm.client import Client, SlurmError
from slurm.holds import release
from slurm.judge import Snapshot, judge, look
from slurm.ledger import Ledger
from slurm.states import SAID, Fate, is_held


def collect(root: Path, study: str, scale: str, client: Client | None = None) -> tuple[int, list[str]]:
    """The number of finished runs, and a line for each other one. Raises StoreError for an unknown study."""
    run_ids = manifests.read_study(root, study, scale)["run_ids"]
    open_runs = [run for run in run_ids if store.read_summary(root / run) is None]
    ledger = Ledger(root)
    places = {run: place for run, place in ledger.places().items() if run in open_runs}
    said = []
    try:
        snapshot = look(client or Client(), ledger, places.values()) if places else Snapshot()
    except SlurmError as error:
        return len(run_ids) - len(open_runs), [f"slurm: {error}"] + [f"{run}: not done" for run in open_runs]
    for run in open_runs:
        if run not in places:
            said.append(f"{run}: never submitted")
            continue
        place = places[run]
        found = judge(ledger, place, run, snapshot.seen(ledger, place))
        words = "queued or running" if found.fate is Fate.alive else SAID[found.fate]
        if is_held(snapshot.seen(ledger, place)):
            words = f"held; to let it go on: {release(place.entry.job_id, [place.task])}"
        cause = f" ({found.cause})" if found.cause and found.cause != "None" else ""
        said.append(f"{run}: {words}{cause} (log: {ledger.log_path(place.entry, place.task)})")
    return len(run_ids) - len(open_runs), said


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 every run is done, 1 some are not, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m slurm.collect", description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    given = parser.parse_args(arguments)
    try:
        num_done, missing = collect(Path(given.root), given.study, given.scale)
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"{given.study} ({given.scale}): {num_done} done, {len(missing)} not", *missing]))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
