"""Submit what is missing of a study: ``python -m slurm.submit STUDY [--scale mini] [--root runs] [--cluster NAME]``.

The study is taken as the store recorded it when it was last launched. Nothing that is queued or running
is submitted again. Prints the jobs and returns; they go on by themselves.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.compose import decode, decode_launch
from experiments.config import ConfigError, LaunchConfig, RunConfig, encode
from experiments.manifests import read_study
from experiments.store import StoreError, explained
from experiments.worker import ENVIRONMENT
from slurm import classes
from slurm.client import Client, SlurmDown, SlurmError
from slurm.cluster import Cluster, ResourceClass, load_cluster
from slurm.ledger import Entry, Ledger

PROJECT = Path(__file__).resolve().parent.parent
TASK = "slurm.task"
"""The module that a job runs."""


@dataclass(frozen=True)
class Batch:
    """Runs of one study for one cluster, longest first. ``classes`` says what each needs."""

    study: str
    scale: str
    configs: Mapping[str, RunConfig]
    launch: LaunchConfig
    cluster: Cluster
    classes: Mapping[str, ResourceClass]

    @property
    def root(self) -> Path:
        return Path(self.launch.root).resolve()


def batch(
    study: str, scale: str, configs: Mapping[str, RunConfig], launch: LaunchConfig, cluster: Cluster
) -> tuple[Batch, list[classes.Size]]:
    """Classify the runs; the sizes are for the preflight. Raises ConfigError for a model that cannot be read."""
    found = classes.sizes(list(configs.values()), Path(launch.root) / "cache")
    chosen = {run: classes.class_of(configs[run], size, cluster) for run, size in zip(configs, found, strict=True)}
    return Batch(study, scale, configs, launch, cluster, chosen), found


def options(cluster: Cluster, resources: ResourceClass, num_tasks: int, name: str, log: Path) -> list[str]:
    """What is asked of sbatch for one array of a class."""
    bound = f"%{cluster.at_once}" if cluster.at_once else ""
    chosen = [
        f"--job-name={name}",
        f"--array=0-{num_tasks - 1}{bound}",
        f"--output={str(log).replace('%', '%%').replace('TASK', '%a')}",
        "--open-mode=append",  # all lives of a task in one file
        "--requeue",
        f"--signal=B:USR2@{min(cluster.signal_s, 65535)}",
        f"--chdir={Path.cwd()}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={resources.cpus}",
        f"--time={resources.time_min}",
    ]
    if resources.memory_gib:
        chosen.append(f"--mem={round(resources.memory_gib * 1024)}M")
    if resources.gpus:
        chosen.append(f"--gres=gpu:{resources.gpu_type + ':' if resources.gpu_type else ''}{resources.gpus}")
    for field in ("partition", "account", "qos"):
        if getattr(cluster, field):
            chosen.append(f"--{field}={getattr(cluster, field)}")
    return [*chosen, *cluster.options]


def script(cluster: Cluster, runs: Path) -> str:
    """The batch script. The task replaces the shell, so that the signals of Slurm reach it and nothing else."""
    command = [*shlex.split(cluster.container), cluster.python or sys.executable, "-u", "-m", TASK, str(runs)]
    lines = ["#!/bin/bash", "trap '' USR2 # the task takes it; here it would kill"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items()]
    lines += [f"export PYTHONPATH={shlex.quote(str(PROJECT))}${{PYTHONPATH:+:$PYTHONPATH}}", *cluster.setup]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def submit(
    wanted: Batch, run_ids: Sequence[str], ledger: Ledger, client: Client, max_array_size: int,
    chosen: Mapping[str, ResourceClass] | None = None, spent: Mapping[str, dict[str, int]] | None = None,
) -> list[Entry]:  # fmt: skip
    """Queue these runs, one array for each class, cut to what the cluster takes. Call it under the ledger's lock.

    ``chosen`` are their classes where they are not the batch's, ``spent`` how often each was tried again by cause.

    An array that sbatch refuses leaves nothing behind and raises SlurmError. Where the controller did not answer the
    entry stays without a job id: the following finds the job by its name, or finds that there is none.
    """
    chosen = chosen or wanted.classes
    entries = []
    for resources in dict.fromkeys(chosen[run] for run in run_ids):
        mine = [run for run in run_ids if chosen[run] == resources]
        for tasks in classes.chunks(classes.pack(mine, resources.runs_per_task), max_array_size):
            configs = {run: encode(wanted.configs[run]) for runs in tasks for run in runs}
            document = {"launch": encode(classes.task_launch(wanted.launch, resources)), "configs": configs}
            entry = ledger.add(wanted.study, wanted.scale, resources.name, tasks, document, spent)
            log = ledger.log_path(entry, "TASK")
            with explained(log.parent):
                log.parent.mkdir(parents=True, exist_ok=True)
            try:
                entry.job_id = client.submit(
                    options(wanted.cluster, resources, len(tasks), entry.name, log),
                    script(wanted.cluster, ledger.runs_path(entry)),
                )
                ledger.save(entry)
            except SlurmDown:
                pass
            except SlurmError:
                ledger.remove(entry)
                raise
            entries.append(entry)
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 submitted or nothing to do, 2 bad input."""
    from slurm.follow import Follower

    parser = argparse.ArgumentParser(prog="python -m slurm.submit", description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    parser.add_argument("--cluster", default="slurm")
    given = parser.parse_args(arguments)
    try:
        manifest = read_study(Path(given.root), given.study, given.scale)
        configs = {run: decode(manifest["configs"][run]) for run in manifest["run_ids"]}
        launch = decode_launch({**manifest.get("launch", {}), "root": given.root})
        follower = Follower.prepared(given.study, given.scale, configs, launch, load_cluster(given.cluster))
        follower.start()
    except (ConfigError, StoreError, SlurmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
