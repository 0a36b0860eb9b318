"""A study of paced runs and its launcher; as a program, that launcher.

``python paced_study.py ROOT [seconds a step [line of the job's shell before the task]]`` prints one JSON line for each
event.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.compose import parse
from experiments.config import LaunchConfig, RunConfig, run_id
from experiments.manifests import list_studies, write_study
from slurm import submit
from slurm.cluster import Cluster, ResourceClass
from slurm.follow import Follower

CLUSTER = Cluster(
    name="test",
    classes=(
        ResourceClass("small", memory_gib=0.2, time_min=5, runs_per_task=3),
        ResourceClass("large", memory_gib=1.0, time_min=5),
    ),
    poll_s=1.0, call_s=10.0, lost_s=6.0, retry_pause_s=0.5, outage_s=120.0, signal_s=30, spare_gib=0.01,
)  # fmt: skip


def paced_configs(num: int = 12, steps: int = 14, step_s: float = 0.1, sampling: int = 0) -> dict[str, RunConfig]:
    config, _ = parse(["scale=mini", f"optim.steps={steps}", f"optim.lr={step_s}", f"seed.sampling={sampling}"])
    found = [replace(config, seed=replace(config.seed, init=k)) for k in range(num)]
    return {run_id(c): c for c in found}


def paced_batch(
    root: Path, configs: dict[str, RunConfig] | None = None, cluster: Cluster = CLUSTER, on_event: Any = None
) -> Follower:
    """A launcher, after its preflight. Its events are kept in ``events`` unless they are handled."""
    configs = configs or paced_configs()
    follower = Follower.prepared("paced", "mini", configs, LaunchConfig(root=str(root)), cluster)
    if ("paced", "mini") not in list_studies(root):
        manifest = {"title": "Paced", "settings": {}, "run_ids": list(configs), "configs": {}}
        write_study(root, "paced", "mini", manifest)
    follower.events = []  # type: ignore[attr-defined]
    follower.on_event = on_event or (lambda *event: follower.events.append(event))  # type: ignore[attr-defined]
    return follower


def main(arguments: Sequence[str]) -> int:
    submit.TASK = "paced"
    configs = paced_configs(step_s=float(arguments[1]) if len(arguments) > 1 else 0.1)
    cluster = replace(CLUSTER, setup=tuple(arguments[2:]))
    follower = paced_batch(Path(arguments[0]), configs, cluster, lambda *e: print(json.dumps(e), flush=True))
    follower.start()
    print(json.dumps(["submitted", "", {}]), flush=True)
    follower.follow()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
