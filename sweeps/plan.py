"""The table that ``DRY=1`` prints: every run, its state and what it will cost. Starts nothing."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import store
from experiments.config import ConfigError, MethodKind, RunConfig, arm_name
from experiments.cost import full_flops, lora_flops
from sweeps.display import clock
from sweeps.grid import Point, Study
from sweeps.pool import num_workers


def print_plan(study: Study, root: Path, console: Console | None = None) -> None:
    """Print one line per run and the totals; the cost is an upper bound from the longest sequence."""
    from experiments import adapters, models  # torch: shapes are needed for the cost

    console = console or Console(highlight=False, soft_wrap=True, width=140)
    table = Table("run", "arm", "LR", "seed", "steps", "examples", "PFLOPs (max)", "state", box=None)
    unknown: dict[str, str] = {}
    total, todo = 0.0, []
    for point in study.points:
        config = point.config
        state = store.state_of(root / point.run_id)
        try:
            shapes = models.empty_model(config.model, root / "cache", local_only=True)
            adapters.check_rank(shapes, config.method)
            flops = run_flops(
                config, models.num_matrix_parameters(shapes), adapters.num_trainable(shapes, config.method)
            )
        except ConfigError as error:
            unknown[config.model.name] = str(error)
            flops = math.nan
        if state != "done":
            todo.append(point)
            total += flops
        cost = "-" if math.isnan(flops) else f"{flops / 1e15:.4g}"
        examples = config.optim.steps * config.optim.batch_size
        cells = (config.seed.init, config.optim.steps, examples, cost, state)
        table.add_row(point.run_id, arm_name(config.method), f"{config.optim.lr:g}", *map(str, cells))
    console.print(table)
    for name, reason in unknown.items():
        console.print(f"cost of {name} unknown: {reason}", markup=False)
    cost = "cost unknown" if unknown else f"at most {total / 1e15:.4g} PFLOPs"
    console.print(f"{len(study.points)} runs, {len(todo)} to do, {cost}; {_time(study, todo, root)}")


def _time(study: Study, todo: list[Point], root: Path) -> str:
    step_s = _measured_step_s(study, root)
    if step_s is None:
        return "time unknown until a run of this study has been measured"
    workers = num_workers(study.launch, max(1, len(todo)))
    left_s = sum(point.config.optim.steps for point in todo) * step_s / workers
    return f"about {clock(left_s)} with {workers} workers ({step_s:.3f} s per step measured)"


def run_flops(config: RunConfig, num_parameters: int, num_trainable: int) -> float:
    """Upper bound on a run's training FLOPs: every sequence taken at ``data.max_tokens``."""
    tokens = config.optim.steps * config.optim.batch_size * config.data.max_tokens
    if config.method.kind is MethodKind.full:
        return full_flops(num_parameters, tokens)
    return lora_flops(num_parameters, num_trainable, tokens)


def _measured_step_s(study: Study, root: Path) -> float | None:
    """Mean seconds per step of the study's finished runs, or None if there are none."""
    rates = []
    for point in study.points:
        if (root / point.run_id / "summary.json").exists():
            summary = store.read_json(root / point.run_id / "summary.json")
            rates.append(summary["time"]["total_s"] / max(1, summary["step"]))
    return sum(rates) / len(rates) if rates else None
