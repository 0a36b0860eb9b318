"""Launch a study: ``python -m sweeps.launch lr --scale mini [--cluster local] [--dry] [overrides ...]``.

Composes every run first, shows what is already done, runs the rest and exits with 0 only if every
run ended. Running the same command again does only what is missing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config import ConfigError, DataSource
from experiments.manifests import write_study
from experiments.store import StoreError, ensure_root, log_path
from sweeps.display import Display, warn
from sweeps.grid import Study, known_studies, load_study
from sweeps.plan import find, print_plan
from sweeps.pool import run_all

CLUSTERS = ("auto", "local", "slurm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all ended, 1 some failed, 2 bad input, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.launch", description=__doc__)
    parser.add_argument("study", help=f"one of: {', '.join(known_studies())}")
    parser.add_argument("--scale", default="mini", help="mini, smol or paper")
    parser.add_argument("--cluster", default="auto", help="auto, local or slurm")
    parser.add_argument("--dry", action="store_true", help="print the runs and their cost, start nothing")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run, e.g. optim.steps=50")
    options = parser.parse_intermixed_args(arguments)
    try:
        _check_cluster(options.cluster)
        study = load_study(options.study, options.scale, options.overrides)
        root = Path(study.launch.root)
        if options.dry:
            print_plan(study, root)
            return 0
        return launch(study, ensure_root(root))
    except (ConfigError, StoreError) as error:
        warn(f"error: {error}")
        return 2


def launch(study: Study, root: Path, parts: Sequence[Study] = ()) -> int:
    """Run what is missing of ``study`` and report; returns the exit code.

    ``parts`` are the studies it is made of, recorded each by itself (default: the study itself).
    """
    todo = [point for point in study.points if find(root, point).state != "done"]
    num_done = len(study.points) - len(todo)
    warn(f"{study.name} ({study.scale}): {len(study.points)} runs, {num_done} done already, {len(todo)} to do")
    if todo:
        ensure_root(log_path(root, todo[0].run_id).parent)
        _check_models(study)
    for part in parts or [study]:
        write_study(root, part.name, part.scale, part.manifest())
    if not todo:
        return 0
    # Longest first, so that no core idles at the end while one long run goes on.
    todo.sort(key=lambda point: -point.config.optim.steps * point.config.optim.batch_size)
    with Display(todo, num_done) as display:
        try:
            run_all(todo, study.launch, display.show)
        except KeyboardInterrupt:
            warn("stopped; every run is checkpointed, the same command goes on from there")
            return 130
    for run, detail in display.failures.items():
        warn(f"failed: {run}: {detail['cause']} (log: {detail['log']})")
    return 1 if display.failures else 0


def _check_models(study: Study) -> None:
    """Refuse impossible runs and unusable data before any run is started."""
    from experiments import models
    from experiments.run import check, load_data  # imports torch, so only when something is to be trained

    for point in {(p.config.model, p.config.method, p.config.optim.batch_size): p for p in study.points}.values():
        check(point.config, study.launch)
    for point in {(p.config.model, p.config.data, p.config.rl): p for p in study.points}.values():
        if point.config.data.source is not DataSource.hub:  # a hub data set is read where it is trained on
            tokenizer = models.load_tokenizer(point.config.model, Path(study.launch.root) / "cache")
            load_data(point.config, tokenizer)


def _check_cluster(cluster: str) -> None:
    if cluster not in CLUSTERS:
        raise ConfigError(f"cluster: {cluster!r} is not allowed; choose one of {', '.join(CLUSTERS)}")
    if cluster == "slurm":
        found = "found" if shutil.which("sbatch") else "not found"
        raise ConfigError(f"cluster: 'slurm' is not supported yet (sbatch {found}); use CLUSTER=local")


if __name__ == "__main__":
    sys.exit(main())
