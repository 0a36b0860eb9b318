"""Where every launched study stands: ``python -m sweeps.status [--root runs]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import manifests, store
from slurm.status import lines as slurm_lines
from sweeps.display import warn


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per study, then what failed or was left out. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.status", description=__doc__)
    parser.add_argument("--root", default="runs")
    root = Path(parser.parse_args(arguments).root)
    try:
        with store.explained(root):
            if not root.is_dir():
                print(f"no runs yet in {root}; start with: make sweep-lr")
                return 0
        records, left_out = store.scan(root)
        studies = manifests.list_studies(root)
    except store.StoreError as error:
        warn(f"error: {error}")
        return 2
    by_id = {record.run_id: record for record in records}
    console = Console(highlight=False, soft_wrap=True, width=manifests.MAX_NAME + 100)  # no name is cut off
    states = ("done", "diverged", "running", "partial", "failed", "damaged", "new")
    table = Table("study", "scale", "runs", *states, box=None)
    for study, scale in studies:
        try:
            run_ids = manifests.read_study(root, study, scale)["run_ids"]
        except store.StoreError as error:
            left_out.append(f"left out: {error}")
            continue
        found = Counter(_state(root / run_id, by_id.get(run_id)) for run_id in run_ids)
        found["done"] += found["diverged"]  # a diverged run is a result
        table.add_row(study, scale, str(len(run_ids)), *(str(found[state]) for state in states))
    console.print(table)
    for record in records:
        if record.state == "failed":
            log = store.log_path(root, record.run_id)
            console.print(f"failed: {record.run_id}: {record.cause or 'unknown'} (log: {log})", markup=False)
        for problem in record.problems:
            console.print(problem, markup=False)
    try:
        left_out += slurm_lines(root, {r.run_id for r in records if r.state == "done"})
    except store.StoreError as error:
        left_out.append(f"left out: {error}")
    for line in left_out:
        console.print(line, markup=False)
    return 0


def _state(run: Path, record: store.RunRecord | None) -> str:
    if record is None:
        try:
            return store.state_of(run)
        except store.StoreError:
            return "damaged"
    if record.summary and record.summary["outcome"] == "diverged":
        return "diverged"
    return record.state


if __name__ == "__main__":
    sys.exit(main())
