"""What studies would take: ``python -m sweeps.budget STUDY|all --scale paper``, or ``make plan-X``, before it is spent.

For each arm: the memory on the devices of one run by what holds it, and the FLOPs of the runs still to do;
in all: device-hours at an assumed share of a device's peak, and money at a price. Starts nothing, asks no hub.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import cost, store
from experiments.config import ConfigError, Dtype, LaunchConfig, MethodKind, RunConfig, arm_name
from sweeps.display import warn
from sweeps.grid import Point, Study, known_studies, load_study
from sweeps.plan import find, run_flops

PEAK_TFLOPS = 989.0
"""Of an H100 SXM in dense bf16 (NVIDIA's data sheet)."""
UTILISATION = 0.4
"""Of that peak: what well-tuned training of 8B models reaches; an assumption, to be replaced by a measurement."""
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One arm on one model: memory of a run, and FLOPs of all its runs that are still to do."""

    model: str
    arm: str
    num_todo: int
    memory: cost.Memory
    flops: float


def run_memory(config: RunConfig, launch: LaunchConfig, cache: Path) -> cost.Memory:
    """Memory of one run, all devices together; activations of one micro-batch of the longest sequences.

    In RL with a separate sampler that adds its copy of the weights in 16 bit, and the keys and values of a whole
    batch; sampling with the trainer itself needs only the latter. Raises ConfigError for a model without shapes.
    """
    from experiments import adapters, models  # torch

    shapes = models.empty_model(config.model, cache, local_only=True)
    dims, total = models.dims(shapes.config), sum(p.numel() for p in shapes.parameters())
    rank = config.method.rank if config.method.kind is MethodKind.lora else 0
    adapter = config.method.kind is not MethodKind.full
    group, new = (config.rl.group_size, config.rl.max_new_tokens) if config.is_rl else (1, 0)
    longest = config.data.max_tokens + new
    num_tokens = (launch.micro_batch_size or config.optim.batch_size) * group * longest
    value_bytes = 2.0 if config.optim.autocast is Dtype.bfloat16 else 4.0
    weight_bytes = 2.0 if config.model.weight_dtype is Dtype.bfloat16 else 4.0
    separate = config.is_rl and launch.sampler.name != "transformers"
    state = cost.state_memory(
        total, adapters.num_trainable(shapes, config.method), weight_bytes, adapter, 2.0 if separate else 0.0
    )
    sampled = config.optim.batch_size * group * longest if config.is_rl else 0
    return cost.Memory(
        state.weights, state.gradients, state.optimizer,
        cost.activation_bytes(dims, num_tokens, value_bytes, rank), cost.logits_bytes(dims, num_tokens),
        cost.kv_cache_bytes(dims, sampled, value_bytes), state.sampler,
    )  # fmt: skip


def rows(points: Iterable[Point], launch: LaunchConfig, todo: set[str], cache: Path) -> list[Row]:
    """One row per model and arm, in the order of the study. Raises ConfigError for a model without shapes."""
    from experiments import adapters, models

    grouped: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        grouped.setdefault((point.config.model.name, arm_name(point.config.method)), []).append(point)
    found = []
    for (model, arm), members in grouped.items():
        flops = 0.0
        for point in members:
            shapes = models.empty_model(point.config.model, cache, local_only=True)
            if point.run_id in todo:
                trained = adapters.num_trainable(shapes, point.config.method)
                flops += run_flops(point.config, models.num_matrix_parameters(shapes), trained)
        largest = max((run_memory(p.config, launch, cache) for p in members), key=lambda memory: memory.total)
        found.append(Row(model, arm, sum(p.run_id in todo for p in members), largest, flops))
    return found


def print_budget(study: Study, root: Path, others: set[str], options: argparse.Namespace, console: Console) -> None:
    """Print one study's table and its totals. Raises StoreError for what a launch would refuse."""
    done = {p.run_id for p in study.points if find(root, p).state == "done"}
    todo = {p.run_id for p in study.points} - done
    shared = len({p.run_id for p in study.points} & others)
    console.print(
        f"[bold]{study.name}[/bold] ({options.scale}): {len(study.points)} runs, {len(done)} done, {len(todo)} to do; "
        f"{shared} are shared with other studies"
    )
    try:
        found = rows(study.points, study.launch, todo, root / "cache")
    except ConfigError as error:
        console.print(f"cost unknown: {error}", markup=False)
        return
    names = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "sampler")
    table = Table("model", "arm", "to do", *(name.replace("_", " ") for name in names), "GiB", "PFLOPs", box=None)
    for row in found:
        parts = (f"{getattr(row.memory, name) / GIB:.3g}" for name in names)
        table.add_row(row.model, row.arm, str(row.num_todo), *parts, f"{row.memory.total / GIB:.3g}",
                      f"{row.flops / 1e15:.3g}")  # fmt: skip
    console.print(table)
    total = sum(row.flops for row in found)
    hours = cost.device_hours(total, options.tflops * 1e12, options.utilisation)
    money = f", {hours * options.price:,.0f} at {options.price:g} an hour" if options.price else ""
    console.print(
        f"at most {total / 1e15:.4g} PFLOPs: {hours:,.3g} device-hours at {100 * options.utilisation:g} % of "
        f"{options.tflops:g} TFLOP/s{money}. Memory is of one run on all its devices together, at micro-batches of "
        f"{_micro(study)} sequences of the longest kind; the largest of each arm."
    )


def _micro(study: Study) -> str:
    """Sequences in a micro-batch; of RL, a group for each prompt."""
    micro = study.launch.micro_batch_size
    sizes = {(micro or p.config.optim.batch_size) * max(1, p.config.rl.group_size) for p in study.points}
    return " or ".join(map(str, sorted(sizes)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.budget", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", help=f"one of: {', '.join(known_studies())}; or all")
    parser.add_argument("overrides", nargs="*", help="as for sweeps.launch, e.g. launch.micro_batch_size=4")
    parser.add_argument("--scale", default="mini", help="mini, smol or paper")
    parser.add_argument("--tflops", type=float, default=PEAK_TFLOPS, help="peak of one device, TFLOP/s")
    parser.add_argument("--utilisation", type=float, default=UTILISATION, help="share of the peak that is reached")
    parser.add_argument("--price", type=float, default=0.0, help="of one device-hour")
    options = parser.parse_intermixed_args(arguments)
    try:
        for name, value, good in (
            ("tflops", options.tflops, options.tflops > 0), ("price", options.price, options.price >= 0),
            ("utilisation", options.utilisation, 0 < options.utilisation <= 1),
        ):  # fmt: skip
            if not good or not math.isfinite(value):
                raise ConfigError(f"{name}: {value:g} is not allowed; it must be positive (a utilisation: at most 1)")
        studies = _load_all(options)
        wanted = studies if options.study == "all" else studies[:1]
        if not wanted:
            raise ConfigError(f"study: {options.study!r} has no scale {options.scale!r}")
        console = Console(highlight=False, soft_wrap=True, width=160)
        for study in wanted:
            others = {p.run_id for s in studies if s.name != study.name for p in s.points}
            print_budget(study, Path(study.launch.root), others, options, console)
    except (ConfigError, store.StoreError) as error:
        warn(f"error: {error}")
        return 2
    return 0


def _load_all(options: argparse.Namespace) -> list[Study]:
    """Every study of the scale, as asked for: runs are shared between them."""
    studies = []
    if options.study != "all":  # says what is wrong with it
        studies.append(load_study(options.study, options.scale, options.overrides))
    for name in known_studies():
        if name == options.study:
            continue
        with contextlib.suppress(ConfigError):  # of a study without this scale
            studies.append(load_study(name, options.scale, options.overrides))
    return studies


if __name__ == "__main__":
    sys.exit(main())
