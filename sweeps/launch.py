"""Launch a study: ``python -m sweeps.launch lr --scale mini [--cluster local] [--dry] [overrides ...]``.

Composes every run first, shows what is already done, runs the rest, on this machine or as jobs of a
cluster, and exits with 0 only if every run ended. Running the same command again does only what is missing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import hub
from experiments.config import ConfigError, DataSource
from experiments.manifests import write_study
from experiments.store import StoreError, ensure_root, log_path
from slurm.client import SlurmError
from slurm.cluster import Cluster, choose
from slurm.follow import Follower
from sweeps.display import Display, warn
from sweeps.grid import Point, Study, known_studies, load_study
from sweeps.plan import find, print_plan
from sweeps.pool import Event, run_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all ended, 1 some failed, 2 bad input, 130 stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.launch", description=__doc__)
    parser.add_argument("study", help=f"one of: {', '.join(known_studies())}")
    launch_options(parser)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run, e.g. optim.steps=50")
    options = parser.parse_intermixed_args(arguments)
    try:
        cluster = choose(options.cluster)
        study = load_study(options.study, options.scale, options.overrides)
        root = Path(study.launch.root)
        if options.dry:
            print_plan(study, root)
            return 0
        return launch(study, ensure_root(root), cluster=cluster, detach=options.detach)
    except (ConfigError, StoreError, SlurmError) as error:
        warn(f"error: {error}")
        return 2


def launch_options(parser: argparse.ArgumentParser) -> None:
    """What every command that launches runs can be told."""
    parser.add_argument("--scale", default="mini", help="mini, smol or paper")
    parser.add_argument("--cluster", default="auto", help="auto, local or a profile of conf/cluster")
    parser.add_argument("--detach", action="store_true", help="submit to the cluster and do not wait")
    parser.add_argument("--dry", action="store_true", help="print the runs and their cost, start nothing")


def launch(
    study: Study, root: Path, parts: Sequence[Study] = (), cluster: Cluster | None = None, detach: bool = False
) -> int:
    """Run what is missing of ``study`` and report; returns the exit code.

    ``parts`` are the studies it is made of, recorded each by itself (default: the study itself). Without a
    ``cluster`` it runs here. With ``detach`` its jobs are submitted and left to themselves.
    """
    todo = [point for point in study.points if find(root, point).state != "done"]
    num_done = len(study.points) - len(todo)
    warn(f"{study.name} ({study.scale}): {len(study.points)} runs, {num_done} done already, {len(todo)} to do")
    if todo:
        hub.require((point.config for point in todo), _prefetch(study))
        ensure_root(log_path(root, todo[0].run_id).parent)
        _check_models(study)
    for part in parts or [study]:
        write_study(root, part.name, part.scale, part.manifest())
    if not todo:
        return 0
    # Longest first, so that no core idles at the end while one long run goes on.
    todo.sort(key=lambda point: -point.config.optim.steps * point.config.optim.batch_size)
    follower = _submitted(study, todo, cluster) if cluster else None
    if follower and detach:
        return 0
    with Display(todo, num_done) as display:
        try:
            if follower:
                follower.on_event = lambda kind, run, detail: display.show(Event(kind, run, detail))
                follower.follow()
            else:
                run_all(todo, study.launch, display.show)
        except KeyboardInterrupt:
            if follower:
                warn(f"detached; the jobs go on: the same command follows, make cancel STUDY={study.name} cancels")
            else:
                warn("stopped; every run is checkpointed, the same command goes on from there")
            return 130
    for run, detail in display.failures.items():
        warn(f"failed: {run}: {detail['cause']} (log: {detail['log']})")
    return 1 if display.failures else 0


def _prefetch(study: Study) -> str:
    """The command that fetches what the study needs; of several together, what all of them need."""
    name, extra = study.name.partition("+")[0], study.settings.get("extra", [])
    one = "" if "," in name else f" STUDY={name}" + (f" ARGS={shlex.quote(' '.join(extra))}" if extra else "")
    return f"make prefetch SCALE={study.scale}{one}"


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


def _submitted(study: Study, todo: Sequence[Point], cluster: Cluster) -> Follower:
    """The jobs of a study, queued, and who follows them."""
    warn(f"submitting with conf/cluster/{cluster.name}.yaml (CLUSTER=local runs on this machine)")
    configs = {point.run_id: point.config for point in todo}
    follower = Follower.prepared(study.name, study.scale, configs, study.launch, cluster)
    follower.start()
    return follower


if __name__ == "__main__":
    sys.exit(main())
