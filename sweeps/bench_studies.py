"""What sharing, read-offs and packing are worth together: ``python -m sweeps.bench_studies``, ``make bench-studies``.

``make studies`` in an empty store, against plain PEFT and AdamW, one process per core (``sweeps.bench``: B2), that
makes every point of every study by a run of its own: a point that two studies plot twice, and each length that a study
reads off a longer run by a run of that length. B2 is timed on every SAMPLE-th of these runs, in order, and stands for
all of them; ours is timed whole, figures and verdicts included. Adds ``studies`` to ``--out``'s ``bench.json``. An hour
on a quiet machine; stopped, the same command goes on with the studies, but then ours is no longer the time of one
command, and it says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from experiments import provenance, store
from experiments.config import ConfigError, RunConfig
from sweeps.bench import PROJECT, Broken, Cost, measured, one_process_per_core
from sweeps.display import clock, warn
from sweeps.grid import Study, load_study
from sweeps.studies import supervised

SAMPLE = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.bench_studies", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        found = run([load_study(name, "mini") for name in supervised()], options.out)
        file = options.out / "bench.json"
        store.write_json(file, {**(store.read_json(file) if file.exists() else {}), "studies": found})
    except (ConfigError, store.StoreError, OSError, Broken) as error:
        warn(f"error: {error}")
        return 2
    return 0


def run(studies: Sequence[Study], out: Path) -> dict:
    """Both ways once; B2 first, which is the shorter."""
    wanted = [config for study in studies for config in as_runs(study)]
    b2 = one_process_per_core(wanted[::SAMPLE])
    warn(f"B2, {len(wanted[::SAMPLE])} of {len(wanted)} runs: {clock(b2.wall_s)}, CPU {clock(b2.cpu_s)}")
    root = out / "studies"
    begun_before = any(root.glob("*/config.json"))
    ours = whole_studies(root)
    warn(f"make studies: {clock(ours.wall_s)}, CPU {clock(ours.cpu_s)}")
    return {
        "num_runs": len(wanted), "num_sampled": len(wanted[::SAMPLE]), "num_ours": len(ours.nll),
        "whole": not begun_before, "provenance": provenance.collect(config={}), "b2": asdict(b2), "ours": asdict(ours),
    }  # fmt: skip


def as_runs(study: Study) -> list[RunConfig]:
    """Each of the study's points, at each length that it is read off at, as a run of its own."""
    found = []
    for point in study.points:
        steps = point.config.optim.steps
        lengths = {*study.settings.get("lengths", ()), round(study.settings.get("small_frac", 1.0) * steps), steps}
        for length in sorted(at for at in lengths if at <= steps):
            found.append(replace(point.config, optim=replace(point.config.optim, steps=length)))
    return found


def whole_studies(root: Path) -> Cost:
    """``make studies`` into ``root``."""
    total = Cost()
    command = ["make", "-s", "studies", "CLUSTER=local", f"ROOT={root.absolute()}"]
    with measured(total) as running:
        running.append(subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL, text=True))
        code = running[0].wait()
    if code:
        raise Broken(f"{' '.join(command)} ended with exit code {code}")
    for summary in root.glob("*/summary.json"):
        total.nll[summary.parent.name] = store.read_json(summary)["metrics"]["test/nll_nats"]
    return total


if __name__ == "__main__":
    sys.exit(main())
