"""What a search on a user's task will take, before it starts: runs, memory, disk, FLOPs, time; what does not fit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.config import ConfigError, LaunchConfig, MethodKind, arm_name
from slurm.classes import CPU_PARAMETERS, Size, holds, trains
from slurm.cluster import Cluster
from sweeps import budget
from sweeps.devices import device_gib, devices
from sweeps.grid import Point, Study
from sweeps.plan import find
from sweeps.pool import num_workers
from sweeps.search.arms import Searched
from sweeps.search.look import Arm, Runs
from sweeps.search.propose import propose

RUNS_PER_ARM = 25
SPARE_GIB = 0.1
ROUND_S = 8.0
"""Workers start anew in each round: imports, the base model, the data (measured on two cores)."""
GIB = 2**30


@dataclass(frozen=True)
class Quote:
    """Of one run: ``memory_gib`` and ``flops`` by arm. Of all: runs at most and expected, seconds if they are known."""

    memory_gib: Mapping[str, float]
    flops: Mapping[str, float]
    most: int
    expected: int
    rounds: int
    run_s: float | None
    workers: int

    @property
    def seconds(self) -> float | None:
        """Expected, of all runs."""
        if self.run_s is None:
            return None
        return self.run_s * self.expected / self.workers + ROUND_S * self.rounds

    @property
    def mean_flops(self) -> float:
        return sum(self.flops.values()) / len(self.flops)


def fitting(study: Study, memory_gib: Mapping[str, float], room_gib: float | None, cluster: Cluster | None,
            sizes: Mapping[str, Size]) -> tuple[Study, str]:  # fmt: skip
    """The study without the arms that fit nowhere, and why full fine-tuning is one of them ("" if it is not).

    ``room_gib`` bounds a run, on a cluster too; None: not known, and nothing is left out for it.
    Raises ConfigError if an arm of LoRA does not fit.
    """
    left_out = ""
    for name, need in memory_gib.items():
        fits, where = True, ""
        if room_gib is not None:
            fits, where = need <= room_gib, f"{room_gib:.3g} GiB are free for a run"
        if cluster is not None and fits:
            point = next(p for p in study.points if arm_name(p.config.method) == name)
            fits = any(holds(c, sizes[name], sizes[name].memory_gib(point.config.is_rl))
                       and trains(point.config, study.launch, c) for c in cluster.classes)  # fmt: skip
            where = f"no class of conf/cluster/{cluster.name}.yaml can train it"
        if not fits and name != "full":
            raise ConfigError(f"MODEL: {name} needs {need:.3g} GiB; {where}")
        left_out = f"it needs {need:.3g} GiB; {where}" if not fits else left_out
    kept = [p for p in study.points if not left_out or p.config.method.kind is not MethodKind.full]
    return replace(study, points=tuple(kept)), left_out


def room_gib(launch: LaunchConfig, num_points: int) -> float | None:
    """Memory that one run may take here: of its GPUs, or its worker's share of what is available; None if unknown."""
    if devices():
        each = device_gib()
        return None if each is None else launch.processes * each
    try:
        told = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 / GIB for line in told if line.startswith("MemAvailable:")]
    return free[0] / num_workers(launch, num_points) if free else None


def memory_and_flops(study: Study) -> tuple[dict[str, float], dict[str, float], dict[str, Size]]:
    """By arm, of one run: memory in GiB, FLOPs at most, and sizes."""
    from experiments import adapters, models

    cache = Path(study.launch.root) / "cache"
    flops = budget.flops_of(study.points, cache)
    memory = {row.arm: row.memory.total / GIB for row in budget.rows(study.points, study.launch, flops, cache)}
    shapes = models.empty_model(study.points[0].config.model, cache)
    total = sum(p.numel() for p in shapes.parameters())
    each: dict[str, float] = {}
    sizes: dict[str, Size] = {}
    for point in study.points:
        name, method = arm_name(point.config.method), point.config.method
        each.setdefault(name, flops[point.run_id])
        full = method.kind is MethodKind.full
        sizes.setdefault(name, Size(total, total if full else adapters.num_trainable(shapes, method)))
    return memory, each, sizes


def check_disk(study: Study, sizes: Mapping[str, Size]) -> None:
    """Raises ConfigError if the checkpoints of the runs that are under way together may not find room."""
    root = Path(study.launch.root).resolve()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free / GIB
    largest = max(size.checkpoints_gib(study.launch.processes) for size in sizes.values())
    need = num_workers(study.launch, len(study.points)) * largest + SPARE_GIB
    if free < need:
        raise ConfigError(f"launch.root: {str(there)!r} has {free:.2g} GiB free; checkpoints may take {need:.2g} GiB: "
                          "free some space, or name another store with ROOT=DIR")  # fmt: skip


def expected(arms: Sequence[Arm], width: float) -> tuple[int, int]:
    """(runs, rounds) of a search whose bowls lie a grid step above where it begins: a rehearsal, no training."""
    found: dict[str, Runs] = {}
    rounds = 0
    while True:
        moves = [move for move in propose(arms, found, width) if move.runs]
        if not moves:
            return sum(len(runs.lr) for runs in found.values()), rounds
        rounds += 1
        for move in moves:
            arm = next(arm for arm in arms if arm.key == move.arm)
            star = 2 * sorted(arm.grid)[len(arm.grid) // 2]
            before = found.get(arm.key, Runs())
            lrs = (*before.lr, *(lr for lr, _ in move.runs))
            seeds = (*before.seed, *(seed for _, seed in move.runs))
            values = tuple(1 + 0.1 * math.log(lr / star) ** 2 + 1e-3 * (arm.seeds.index(seed) - 1)
                           for lr, seed in zip(lrs, seeds, strict=True))  # fmt: skip
            found[arm.key] = Runs(lrs, values, seeds)


def quote(wanted: Searched, width: float, most: int | None, control: bool, measured: bool = True) -> Quote:
    """What the search will take. ``measured``: time it on this machine where no run of the study tells it."""
    study = wanted.study
    num_seeds = max(len(arm.seeds) for arm in wanted.arms)
    memory, flops, _ = memory_and_flops(study)
    runs, rounds = expected(wanted.arms, width)
    after = len(wanted.arms) * max(0, num_seeds - 2) + (num_seeds if control else 0)
    return Quote(memory, flops, most or RUNS_PER_ARM * len(wanted.arms), runs + after, rounds + 2,
                 run_seconds(study, measured), num_workers(study.launch, len(study.points)))  # fmt: skip


def run_seconds(study: Study, measured: bool) -> float | None:
    """Mean seconds of a run: from those in the store, else timed on this machine; None where neither can be."""
    root = Path(study.launch.root)
    done = [record.summary for p in study.points if (record := find(root, p)).summary]
    if done:
        return sum(summary["time"]["total_s"] for summary in done) / len(done)
    if not measured or devices() or study.points[0].config.is_rl:
        return None
    from experiments import models, step_time
    from experiments.run import prepare_process

    if (
        sum(p.numel() for p in models.empty_model(study.points[0].config.model, root / "cache").parameters())
        > CPU_PARAMETERS
    ):
        return None
    prepare_process(study.launch.processes)
    adapted: list[Point] = [p for p in study.points if p.config.method.kind is not MethodKind.full]
    return step_time.measure(adapted[len(adapted) // 2].config, study.launch)
