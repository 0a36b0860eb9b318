"""Where every launched study stands: ``python -m sweeps.status [--root runs]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import store
from sweeps.display import warn


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per study, then what failed or was left out. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.status", description=__doc__)
    parser.add_argument("--root", default="runs")
    root = Path(parser.parse_args(arguments).root)
    try:
        if not root.is_dir():
            print(f"no runs yet in {root}; start with: make sweep-lr")
            return 0
        records, left_out = store.scan(root)
        studies = [store.read_study(root, *pair) for pair in store.list_studies(root)]
    except store.StoreError as error:
        warn(f"error: {error}")
        return 2
    by_id = {record.run_id: record for record in records}
    console = Console(highlight=False, soft_wrap=True)
    table = Table("study", "scale", "runs", "done", "diverged", "running", "partial", "failed", "not begun", box=None)
    for study in studies:
        found = Counter(_state(by_id.get(run_id)) for run_id in study["run_ids"])
        cells = [found[s] for s in ("done", "diverged", "running", "partial", "failed", "new")]
        cells[0] += found["diverged"]  # a diverged run is a result
        table.add_row(study["study"], study["scale"], str(len(study["run_ids"])), *map(str, cells))
    console.print(table)
    for record in records:
        if record.state == "failed":
            cause = store.read_json(record.path / "failure.json").get("cause", "unknown")
            console.print(
                f"failed: {record.run_id}: {cause} (log: {store.log_path(root, record.run_id)})", markup=False
            )
        for problem in record.problems:
            console.print(problem, markup=False)
    for line in left_out:
        console.print(line, markup=False)
    return 0


def _state(record: store.RunRecord | None) -> str:
    if record is None:
        return "new"
    if record.summary is not None and record.summary["outcome"] == "diverged":
        return "diverged"
    return record.state


if __name__ == "__main__":
    sys.exit(main())
