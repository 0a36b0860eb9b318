"""Cancel the jobs of a study: ``python -m slurm.cancel STUDY [--scale SCALE] [--root runs]``.

Every task with an unfinished run of the study is cancelled, whoever submitted it: runs are shared between studies.
What has been trained is kept; launching the study again goes on from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import manifests, store
from slurm.client import Client, SlurmError
from slurm.ledger import Ledger


def cancel(root: Path, study: str, scale: str | None = None, client: Client | None = None) -> tuple[int, list[int]]:
    """Cancel; returns the number of tasks and their jobs. Raises StoreError for an unknown study, SlurmError if
    Slurm did not take it (it may be asked again)."""
    ledger = Ledger(root)
    scales = [scale] if scale else [s for name, s in manifests.list_studies(root) if name == study]
    wanted = {run for s in scales or ["mini"] for run in manifests.read_study(root, study, s)["run_ids"]}
    with ledger.locked():
        chosen: dict[str, list[int]] = {}
        for run, place in ledger.places().items():
            if run in wanted and not store.exists(root / run / "summary.json"):
                chosen.setdefault(place.entry.name, []).append(place.task)
        entries = [entry for entry in ledger.entries() if entry.name in chosen and entry.job_id]
        elements = []
        for entry in entries:
            tasks = sorted(set(chosen[entry.name]))
            whole = len(tasks) == len(entry.tasks)
            elements += [str(entry.job_id)] if whole else [f"{entry.job_id}_{task}" for task in tasks]
        if elements:
            (client or Client()).cancel(elements)
        for entry in entries:
            entry.cancelled = sorted({*entry.cancelled, *chosen[entry.name]})
            ledger.save(entry)
        return sum(len(set(chosen[entry.name])) for entry in entries), [entry.job_id for entry in entries]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 cancelled or nothing to cancel, 2 bad input or no answer from Slurm."""
    parser = argparse.ArgumentParser(prog="python -m slurm.cancel", description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--scale")
    parser.add_argument("--root", default="runs")
    given = parser.parse_args(arguments)
    try:
        num_tasks, jobs = cancel(Path(given.root), given.study, given.scale)
    except (store.StoreError, SlurmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.study}: {num_tasks} tasks cancelled" + (f" (jobs {', '.join(map(str, jobs))})" if jobs else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
