"""Which resource class a run needs, and how runs are packed into tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import experiments
from experiments.config import ConfigError, LaunchConfig, MethodKind, ModelConfig, ModelSource, RunConfig
from experiments.cost import state_memory
from experiments.split import check_processes
from slurm.cluster import Cluster, ResourceClass

BASES_DIR = Path(experiments.__file__).resolve().parent / "bases"
CPU_PARAMETERS = 200_000_000
"""The largest model that is trained without a GPU (SmolLM2-135M takes hours)."""
USABLE_FRAC = 0.8
"""Of a device's memory: the rest is for activations and logits. A guess; a run that dies of memory goes one size up."""
CHECKPOINT_BYTES = 12
"""Per trained parameter: the weight and two moments of AdamW, in fp32."""
SHARDED_CHECKPOINT_BYTES = 16
"""Where several processes write: the weight once more, in the form that FSDP reads."""
CHECKPOINTS_KEPT = 3
"""Two are kept, and a third is there while it is written."""


@dataclass(frozen=True)
class Size:
    """Parameters of a run's model, and how many of them are trained."""

    num_parameters: int
    num_trainable: int
    weight_bytes: float = 4.0  # of a parameter of the base, as it is stored

    def memory_gib(self, is_rl: bool) -> float:
        """Fixed memory: weights, gradients and moments, and in RL the sampler's copy in 16 bit."""
        adapter = self.num_trainable < self.num_parameters
        sampler = 2.0 if is_rl else 0.0
        held = state_memory(self.num_parameters, self.num_trainable, self.weight_bytes, adapter, sampler)
        return held.fixed / 2**30

    def checkpoints_gib(self, processes: int = 1) -> float:
        """Disk that one unfinished run may take."""
        each = SHARDED_CHECKPOINT_BYTES if processes > 1 else CHECKPOINT_BYTES
        return each * CHECKPOINTS_KEPT * self.num_trainable / 2**30


def sizes(configs: Sequence[RunConfig], cache: Path) -> list[Size]:
    """The size of each run, a model's shapes read once. Raises ConfigError for a model that cannot be read."""
    known: dict[object, Size] = {}
    for config in configs:
        key = (config.model, config.method)
        if key not in known:
            known[key] = _size(config, cache)
    return [known[(config.model, config.method)] for config in configs]


def _size(config: RunConfig, cache: Path) -> Size:
    if config.model.source is ModelSource.bundled:  # from the size of the file: torch takes seconds to import
        total = bundled_bytes(config.model) // 2  # shipped in 16 bit
        return Size(total, total)
    from experiments import adapters, memory, models

    shapes = models.empty_model(config.model, cache)
    total = sum(p.numel() for p in shapes.parameters())
    full = config.method.kind is MethodKind.full
    trained = total if full else adapters.num_trainable(shapes, config.method)
    return Size(total, trained, memory.weight_bytes(shapes, config))


def bundled_bytes(model: ModelConfig) -> int:
    """Size of a shipped base's weights; 0 for an unknown one, which is refused elsewhere."""
    weights = BASES_DIR / model.path / "model.safetensors"
    return weights.stat().st_size if weights.is_file() else 0


def class_of(config: RunConfig, size: Size, cluster: Cluster) -> ResourceClass:
    """The first class of the profile whose memory holds the run; the last where none does, which preflight refuses."""
    need_gib = size.memory_gib(config.is_rl)
    for candidate in cluster.classes:
        if holds(candidate, size, need_gib):
            return candidate
    return cluster.classes[-1]


def holds(candidate: ResourceClass, size: Size, need_gib: float) -> bool:
    """Whether a class has the memory that a run fixes, and a GPU where the model wants one."""
    if candidate.gpus:
        return need_gib <= USABLE_FRAC * candidate.gpus * candidate.gpu_gib
    return size.num_parameters <= CPU_PARAMETERS and not (0 < candidate.memory_gib < need_gib)


def larger(name: str, cluster: Cluster) -> ResourceClass | None:
    """The next class after the one called ``name``, None after the largest or for a name that has gone."""
    names = [c.name for c in cluster.classes]
    at = names.index(name) + 1 if name in names else len(names)
    return cluster.classes[at] if at < len(names) else None


def trains(config: RunConfig, launch: LaunchConfig, resources: ResourceClass) -> bool:
    """Whether the processes of a class, one for each GPU, can train the run together."""
    try:
        check_processes(config, task_launch(launch, resources))
    except ConfigError:
        return False
    return True


def pack(run_ids: Sequence[str], runs_per_task: int) -> list[list[str]]:
    """Tasks of at most ``runs_per_task`` runs. The runs come longest first and are dealt out in turn, so that
    tasks are about equally long."""
    num_tasks = -(-len(run_ids) // runs_per_task)
    return [list(run_ids[k::num_tasks]) for k in range(num_tasks)]


def chunks(tasks: Sequence[list[str]], max_array_size: int) -> list[Sequence[list[str]]]:
    """Arrays of at most ``max_array_size`` tasks."""
    return [tasks[at : at + max_array_size] for at in range(0, len(tasks), max_array_size)]


def disk_gib(all_sizes: Sequence[Size], processes: Sequence[int], cluster: Cluster) -> float:
    """Disk for the checkpoints of the runs that are unfinished at the same time: the largest ones, at worst."""
    each = (size.checkpoints_gib(num) for size, num in zip(all_sizes, processes, strict=True))
    largest = sorted(each, reverse=True)
    return sum(largest[: cluster.at_once or len(largest)]) + cluster.spare_gib


def task_launch(launch: LaunchConfig, resources: ResourceClass) -> LaunchConfig:
    """The launch settings as a task of a class reads them: it may start in another directory, and each GPU that it
    asks for has a process of its own."""
    return replace(launch, root=str(Path(launch.root).resolve()), processes=resources.gpus or launch.processes)
