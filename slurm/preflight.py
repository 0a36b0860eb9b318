"""What is asked before anything is queued: one line for each reason why it could not work."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from experiments import hub
from experiments.config import ConfigError
from experiments.split import check_processes
from experiments.store import StoreError, ensure_root, explained
from slurm import classes
from slurm.client import Client, SlurmDown, SlurmError
from slurm.submit import Batch, options, script


def check(wanted: Batch, sizes: Sequence[classes.Size], client: Client) -> int:
    """Refuse what cannot be run; returns the cluster's largest array.

    Raises ConfigError or StoreError in one line: a model or data set that was not fetched, no controller, a run that
    no class holds, a store that cannot be written or has too little room for checkpoints, a request that the cluster
    can never fulfil.
    """
    cluster = wanted.cluster
    hub.require(wanted.configs.values(), f"make prefetch SCALE={wanted.scale}")
    processes = []
    for (run, config), size in zip(wanted.configs.items(), sizes, strict=True):
        need_gib = size.memory_gib(config.is_rl)
        if not classes.holds(wanted.classes[run], size, need_gib):
            raise ConfigError(
                f"cluster {cluster.name}: {run} needs {need_gib:.3g} GiB of memory before activations; "
                f"no class has that; add one to conf/cluster/{cluster.name}.yaml"
            )
        launch = classes.task_launch(wanted.launch, wanted.classes[run])
        processes.append(launch.processes)
        try:
            check_processes(config, launch)
        except ConfigError as error:
            raise ConfigError(
                f"cluster {cluster.name}: {run} needs class {wanted.classes[run].name} "
                f"({need_gib:.3g} GiB before activations): {error}"
            ) from None
    for directory in (wanted.root / "slurm", wanted.root / "logs" / "slurm"):
        ensure_root(directory)
    _check_disk(wanted.root, classes.disk_gib(sizes, processes, cluster))
    try:
        max_array_size = int(client.config().get("MaxArraySize", "1001"))
        for resources in dict.fromkeys(wanted.classes.values()):
            num = sum(chosen == resources for chosen in wanted.classes.values())
            num_tasks = min(-(-num // resources.runs_per_task), max_array_size)
            name = f"preflight-{secrets.token_hex(4)}"
            text = script(cluster, wanted.root / "slurm" / "none.runs.json")
            log = wanted.root / "logs" / "slurm" / "TASK.out"
            try:
                client.test(options(cluster, resources, num_tasks, name, log), text)
            except SlurmDown:
                raise
            except SlurmError as error:
                raise ConfigError(f"cluster {cluster.name}: class {resources.name} is refused: {error}") from None
    except SlurmDown as error:
        raise ConfigError(f"cluster {cluster.name}: {error}; nothing was submitted") from None
    except SlurmError as error:
        raise ConfigError(f"cluster {cluster.name}: {error}; CLUSTER=local runs here") from None
    return max_array_size


def _check_disk(root: Path, need_gib: float) -> None:
    with explained(root):
        free_gib = shutil.disk_usage(root).free / 2**30
    if free_gib < need_gib:
        raise StoreError(
            f"store: {root} has {free_gib:.1f} GiB free, checkpoints may take {need_gib:.1f} GiB; "
            "free some space, lower at_once in the cluster's profile, or choose another launch.root=DIR"
        )
