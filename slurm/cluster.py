"""A cluster profile, ``conf/cluster/<name>.yaml``, as typed values: what to ask of Slurm, and how patiently."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from experiments.checks import ConfigError, positive, require
from slurm.client import Client

PROFILES_DIR = Path(__file__).resolve().parent.parent / "conf" / "cluster"
DEFAULT_PROFILE = "slurm"


@dataclass(frozen=True)
class ResourceClass:
    """What one task asks for. ``gpus`` 0 means a task of ``cpus`` cores.

    ``memory_gib`` 0 leaves it to the cluster. ``gpu_gib`` is the memory of one GPU; ``gpu_type`` is the name in
    ``--gres=gpu:<type>:<count>``, empty for any. ``runs_per_task`` runs are trained one after the other by one task.
    """

    name: str
    gpus: int = 0
    gpu_type: str = ""
    gpu_gib: float = 80.0
    cpus: int = 1
    memory_gib: float = 0.0
    time_min: int = 60
    runs_per_task: int = 1

    def __post_init__(self) -> None:
        for name in ("gpu_gib", "cpus", "time_min", "runs_per_task"):
            positive(f"cluster.classes.{self.name}.{name}", getattr(self, name))
        for name in ("gpus", "memory_gib"):
            value = getattr(self, name)
            require(value >= 0, f"cluster.classes.{self.name}.{name}", value, "it must be 0 or more")


@dataclass(frozen=True)
class Cluster:
    """One profile. ``classes`` are in order of size: a run goes to the first that holds it, and one size up
    after it died of memory.

    Empty ``partition``, ``account`` and ``qos`` leave the choice to the cluster. ``setup`` lines run in the job's
    shell before the task; ``container`` is put before the interpreter, ``options`` are handed to sbatch as they are.
    ``at_once`` bounds the tasks of one array that run together (0: no bound). A task hears ``signal_s`` before its
    time limit. Slurm is asked each ``poll_s``, each call for at most ``call_s``; a task that it has not known for
    ``lost_s`` is lost; a controller that has not answered for ``outage_s`` ends the following, not the jobs.
    """

    name: str
    classes: tuple[ResourceClass, ...]
    partition: str = ""
    account: str = ""
    qos: str = ""
    setup: tuple[str, ...] = ()
    container: str = ""
    python: str = ""
    options: tuple[str, ...] = ()
    at_once: int = 0
    signal_s: int = 120
    poll_s: float = 15.0
    call_s: float = 30.0
    lost_s: float = 120.0
    outage_s: float = 3600.0
    retry_pause_s: float = 20.0
    spare_gib: float = 1.0

    def __post_init__(self) -> None:
        require(len(self.classes) > 0, "cluster.classes", self.classes, "name at least one resource class")
        require(self.at_once >= 0, "cluster.at_once", self.at_once, "it must be 0 (no bound) or more")
        for name in ("signal_s", "poll_s", "call_s", "lost_s", "outage_s", "retry_pause_s"):
            positive(f"cluster.{name}", getattr(self, name))


def known_profiles() -> list[str]:
    """Names of the profiles in ``conf/cluster``."""
    return sorted(path.stem for path in PROFILES_DIR.glob("*.yaml"))


def load_cluster(name: str) -> Cluster:
    """The profile called ``name``. Raises ConfigError, in one line, for an unknown one or a bad field."""
    path = PROFILES_DIR / f"{name}.yaml"
    if not path.is_file():
        allowed = ", ".join(["auto", "local", *known_profiles()])
        raise ConfigError(f"cluster: {name!r} is not allowed; choose one of {allowed}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        classes = document.pop("classes", None) or {}
        built = tuple(_built(ResourceClass, {"name": key, **(values or {})}) for key, values in classes.items())
        return _built(Cluster, {"name": name, "classes": built, **document})
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path.name}: {str(error).splitlines()[0]}") from None


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from YAML values; unknown fields and wrong types are refused."""
    known = {f.name: f for f in fields(kind)}
    done = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"cluster.{key}: not a field; allowed: {', '.join(known)}")
        wanted = str(known[key].type)
        if wanted == "tuple[str, ...]" and isinstance(value, list):
            value = tuple(str(item) for item in value)
        elif wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not wanted.startswith("tuple") and (type(value).__name__ != wanted):
            raise ConfigError(f"cluster.{key}: {value!r} is not allowed; expected {wanted}")
        done[key] = value
    return kind(**done)


def choose(name: str) -> Cluster | None:
    """The profile that ``--cluster`` names, None for this machine.

    ``auto`` submits where Slurm is set up, unless this process is already inside a job.
    """
    if name == "local":
        return None
    if name != "auto":
        return load_cluster(name)
    if shutil.which("sbatch") is None or "SLURM_JOB_ID" in os.environ or not Client().is_configured():
        return None
    return load_cluster(DEFAULT_PROFILE)
