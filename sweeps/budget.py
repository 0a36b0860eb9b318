"""What studies would take: ``python -m sweeps.budget STUDY|all --scale paper``, or ``make plan-X``, before it is spent.

For each arm: the memory on the devices of one run by what holds it, how many devices that takes and whether layers
are computed again there (gradient checkpointing), and the FLOPs of the runs still to do; in all: device-hours at an
assumed share of a device's peak, and money at a price. Starts nothing, asks no hub.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import cost, store
from experiments.config import (
    Checkpointing,
    ConfigError,
    LaunchConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    arm_name,
)
from experiments.split import check_processes
from sweeps.display import warn
from sweeps.grid import Point, Study, known_studies, load_study
from sweeps.plan import find, run_flops

PEAK_TFLOPS = 989.0
"""Of an H100 SXM in dense bf16 (NVIDIA's data sheet)."""
UTILISATION = 0.4
"""Of that peak: what well-tuned training of 8B models reaches; an assumption, to be replaced by a measurement."""
DEVICE_GIB = 80.0
"""An H100's memory."""
DEVICES = (1, 2, 4, 8)
"""That one run may be trained on."""
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One arm on one model: memory of a run, and FLOPs of all its runs that are still to do."""

    model: str
    arm: str
    num_todo: int
    memory: cost.Memory
    flops: float
    devices: int = 1
    again: bool = False  # gradient checkpointing
    fits: bool = True


def placed(config: RunConfig, launch: LaunchConfig, cache: Path, device_bytes: float) -> LaunchConfig:
    """The launch settings on as few devices as hold the run, with gradient checkpointing where it needs that there; on
    as many as it may have where none do. Raises ConfigError for a model without shapes."""
    from experiments import memory  # torch

    found = memory.resolved(config, launch, cache, device_bytes)
    for num in DEVICES if launch.processes == 1 else ():
        wider = replace(launch, processes=num)
        try:
            check_processes(config, wider)
        except ConfigError:
            break
        found = memory.resolved(config, wider, cache, device_bytes)
        if memory.fits(memory.of_run(config, found, cache), device_bytes, num):
            break
    return found


def rows(
    points: Iterable[Point],
    launch: LaunchConfig,
    flops: Mapping[str, float],
    cache: Path,
    device_gib: float = DEVICE_GIB,
) -> list[Row]:
    """One row per model and arm, in the order of the study. Raises ConfigError for a model without shapes."""
    from experiments import memory

    grouped: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        grouped.setdefault((point.config.model.name, arm_name(point.config.method)), []).append(point)
    found = []
    for (model, arm), members in grouped.items():
        kinds = {(p.config.model, p.config.data, p.config.method, p.config.optim.batch_size, p.config.rl): p.config
                 for p in members}  # fmt: skip
        held = []
        for config in kinds.values():
            where = placed(config, launch, cache, device_gib * GIB)
            held.append((memory.of_run(config, where, cache), where))
        largest, where = max(held, key=lambda pair: pair[0].total)
        left = [flops[p.run_id] for p in members if p.run_id in flops]
        found.append(Row(model, arm, len(left), largest, sum(left), where.processes,
                         where.gradient_checkpointing is Checkpointing.always,
                         memory.fits(largest, device_gib * GIB, where.processes)))  # fmt: skip
    return found


def flops_of(points: Iterable[Point], cache: Path) -> dict[str, float]:
    """FLOPs of each run. Raises ConfigError for a model without shapes, or an arm that it cannot have."""
    from experiments import adapters, models

    found: dict[str, float] = {}
    counted: dict[tuple[ModelConfig, MethodConfig], tuple[int, int]] = {}
    for point in points:
        model, method = point.config.model, point.config.method
        if (model, method) not in counted:
            shapes = models.empty_model(model, cache, local_only=True)
            adapters.check_rank(shapes, method)
            counted[model, method] = models.num_matrix_parameters(shapes), adapters.num_trainable(shapes, method)
        found[point.run_id] = run_flops(point.config, *counted[model, method])
    return found


@dataclass(frozen=True)
class Bill:
    """A study's line in the overview: what is still to do of it, and the memory of its largest run."""

    study: Study
    flops: dict[str, float]
    memory: float


def print_budget(
    study: Study, root: Path, others: set[str], options: argparse.Namespace, console: Console
) -> Bill | None:
    """Print one study's table and its totals; None where they are unknown. Raises StoreError for what a launch would
    refuse."""
    todo = [p for p in study.points if find(root, p).state != "done"]
    shared = len({p.run_id for p in study.points} & others)
    shows = f", {study.shows} of the post" if study.shows else ""
    console.print(
        f"[bold]{study.name}[/bold] ({options.scale}{shows}): {len(study.points)} runs, "
        f"{len(study.points) - len(todo)} done, {len(todo)} to do; {shared} are shared with other studies"
    )
    try:
        flops = flops_of(todo, root / "cache")
        found = rows(study.points, study.launch, flops, root / "cache", options.device_gib)
    except ConfigError as error:
        console.print(f"cost unknown: {error}", markup=False)
        return None
    names = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "kv_cache", "sampler")
    table = Table("model", "arm", "to do", *(name.replace("_", " ") for name in names), "GiB", "devices",
                  "checkpointing", "PFLOPs", box=None)  # fmt: skip
    for row in found:
        parts = (f"{getattr(row.memory, name) / GIB:.3g}" for name in names)
        table.add_row(row.model, row.arm, str(row.num_todo), *parts, f"{row.memory.total / GIB:.3g}",
                      str(row.devices) if row.fits else f"more than {row.devices}", "yes" if row.again else "no",
                      f"{row.flops / 1e15:.3g}")  # fmt: skip
    console.print(table)
    total = sum(flops.values())
    console.print(
        f"at most {total / 1e15:.4g} PFLOPs: {_cost(total, options)} at {100 * options.utilisation:g} % of "
        f"{options.tflops:g} TFLOP/s. Memory is of one run on all its devices ({options.device_gib:g} GiB each), at "
        f"micro-batches of {_micro(study)} sequences of the longest kind; the largest of each arm."
    )
    return Bill(study, flops, max(row.memory.total for row in found))


def _cost(flops: float, options: argparse.Namespace) -> str:
    hours = cost.device_hours(flops, options.tflops * 1e12, options.utilisation)
    money = f", {hours * options.price:,.0f} at {options.price:g} an hour," if options.price else ""
    return f"{hours:,.3g} device-hours{money}"


def print_overview(bills: Sequence[Bill], options: argparse.Namespace, console: Console) -> None:
    """One line a study, and what all of them take when shared runs are trained once."""
    table = Table("study", "of the post", "runs", "to do", "device-hours", "GiB of a run, at most", box=None)
    for bill in bills:
        hours = cost.device_hours(sum(bill.flops.values()), options.tflops * 1e12, options.utilisation)
        table.add_row(bill.study.name, bill.study.shows or "-", str(len(bill.study.points)), str(len(bill.flops)),
                      f"{hours:,.3g}", f"{bill.memory / GIB:,.3g}")  # fmt: skip
    console.print(table)
    once = {run: flops for bill in bills for run, flops in bill.flops.items()}
    console.print(f"all studies: {len(once)} runs to do, each once; at most {_cost(sum(once.values()), options)}")


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
    parser.add_argument("--device-gib", type=float, default=DEVICE_GIB, help="memory of one device")
    parser.add_argument("--price", type=float, default=0.0, help="of one device-hour")
    options = parser.parse_intermixed_args(arguments)
    try:
        for name, value, good in (
            ("tflops", options.tflops, options.tflops > 0),
            ("device-gib", options.device_gib, options.device_gib > 0), ("price", options.price, options.price >= 0),
            ("utilisation", options.utilisation, 0 < options.utilisation <= 1),
        ):  # fmt: skip
            if not good or not math.isfinite(value):
                raise ConfigError(f"{name}: {value:g} is not allowed; it must be positive (a utilisation: at most 1)")
        studies = _load_all(options)
        wanted = studies if options.study == "all" else studies[:1]
        if not wanted:
            raise ConfigError(f"study: {options.study!r} has no scale {options.scale!r}")
        console = Console(highlight=False, soft_wrap=True, width=160)
        bills = []
        for study in wanted:
            others = {p.run_id for s in studies if s.name != study.name for p in s.points}
            bills.append(print_budget(study, Path(study.launch.root), others, options, console))
        if options.study == "all":
            print_overview([bill for bill in bills if bill], options, console)
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
