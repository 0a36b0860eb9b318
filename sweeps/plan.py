"""The table that ``DRY=1`` prints: every run, its state and what it will cost. Starts nothing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import store
from experiments.config import MethodKind, RunConfig, arm_name
from experiments.cost import full_flops, lora_flops
from sweeps.display import clock
from sweeps.grid import Study
from sweeps.pool import num_workers


def print_plan(study: Study, root: Path, console: Console | None = None) -> None:
    """Print one line per run and the totals; the cost is an upper bound from the longest sequence."""
    from experiments import adapters, models  # torch: shapes are needed for the cost

    console = console or Console(highlight=False, soft_wrap=True, width=120)
    table = Table("run", "arm", "LR", "seed", "steps", "examples", "PFLOPs (max)", "state", box=None)
    total, left_steps = 0.0, 0
    shapes: dict = {}
    for point in study.points:
        config = point.config
        state = store.state_of(root / point.run_id)
        key = config.model
        if key not in shapes:
            shapes[key] = models.empty_model(config.model, root / "cache")
        count = sum(p.numel() for p in shapes[key].parameters() if p.ndim >= 2)
        adapters.check_rank(shapes[key], config.method)
        flops = run_flops(config, count, adapters.num_trainable(shapes[key], config.method))
        if state != "done":
            total += flops
            left_steps += config.optim.steps
        table.add_row(
            point.run_id, arm_name(config.method), f"{config.optim.lr:g}", str(config.seed.init),
            str(config.optim.steps), str(config.optim.steps * config.optim.batch_size), f"{flops / 1e15:.4g}", state,
        )  # fmt: skip
    console.print(table)
    num_left = sum(store.state_of(root / p.run_id) != "done" for p in study.points)
    seconds = _measured_step_s(study, root)
    workers = num_workers(study.launch, max(1, num_left))
    guess = (
        f"about {clock(left_steps * seconds / workers)} with {workers} workers (from {seconds:.3f} s per step measured)"
        if seconds else "time unknown until a run of this study has been measured"
    )  # fmt: skip
    console.print(f"{len(study.points)} runs, {num_left} to do, at most {total / 1e15:.4g} PFLOPs; {guess}")


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
