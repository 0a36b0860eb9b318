"""The table that ``DRY=1`` prints: every run, its state and what it will cost. Starts nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments import store
from experiments.config import ConfigError, MethodKind, RunConfig, arm_name, encode, filled
from experiments.cost import full_flops, lora_flops
from sweeps.display import clock
from sweeps.grid import Point, Study
from sweeps.pool import num_workers


def find(root: Path, point: Point) -> store.RunRecord:
    """A point's run as it stands: ``new``, or ``damaged`` with the cause, where ``store.read_run`` gives no record.

    A damaged run is to do: it fails with its cause and stops no other. Raises StoreError for the run of another
    configuration (a default has changed since) or of a newer version: a launch refuses to touch those.
    """
    run = root / point.run_id
    try:
        if not store.exists(run / "config.json"):
            return store.RunRecord(point.run_id, run, "new", {}, None)
        record = store.read_run(run)
    except store.NewerStore:
        raise
    except store.StoreError as error:
        return store.RunRecord(point.run_id, run, "damaged", {}, None, cause=str(error), problems=(str(error),))
    differing = store.drift(filled(record.config), encode(point.config))
    if differing:
        raise store.StoreError(f"{point.run_id}: the store holds another configuration: {'; '.join(differing)}")
    return record


def print_plan(study: Study, root: Path, console: Console | None = None) -> None:
    """Print one line per run and the totals; the cost is an upper bound from the longest sequence.

    Raises StoreError for what a launch would refuse.
    """
    from experiments import adapters, models  # torch: shapes are needed for the cost

    console = console or Console(highlight=False, soft_wrap=True, width=140)
    table = Table("run", "arm", "LR", "seed", "steps", "examples", "PFLOPs (max)", "state", box=None)
    unknown: dict[str, str] = {}
    total, todo = 0.0, []
    records = {point.run_id: find(root, point) for point in study.points}
    for point in study.points:
        config = point.config
        state = records[point.run_id].state
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
    for problem in (problem for record in records.values() for problem in record.problems):
        console.print(problem, markup=False)
    for name, reason in unknown.items():
        console.print(f"cost of {name} unknown: {reason}", markup=False)
    cost = "cost unknown" if unknown else f"at most {total / 1e15:.4g} PFLOPs"
    console.print(f"{len(study.points)} runs, {len(todo)} to do, {cost}; {_time(study, todo, records.values())}")


def _time(study: Study, todo: list[Point], records: Iterable[store.RunRecord]) -> str:
    step_s = _measured_step_s(records)
    if step_s is None:
        return "time unknown until a run of this study has been measured"
    workers = num_workers(study.launch, max(1, len(todo)))
    left_s = sum(point.config.optim.steps for point in todo) * step_s / workers
    return f"about {clock(left_s)} with {workers} workers ({step_s:.3f} s per step measured)"


def run_flops(config: RunConfig, num_parameters: int, num_trainable: int) -> float:
    """Upper bound on a run's training FLOPs: every sequence taken at ``data.max_tokens``.

    In RL every prompt is continued ``rl.group_size`` times, up to ``rl.max_new_tokens``, and sampling costs
    one more forward pass.
    """
    sequences, longest = config.optim.steps * config.optim.batch_size, config.data.max_tokens
    if config.is_rl:
        sequences, longest = sequences * config.rl.group_size, longest + config.rl.max_new_tokens
    tokens = sequences * longest
    sampling = 2.0 * num_parameters * tokens if config.is_rl else 0.0
    if config.method.kind is MethodKind.full:
        return full_flops(num_parameters, tokens) + sampling
    return lora_flops(num_parameters, num_trainable, tokens) + sampling


def _measured_step_s(records: Iterable[store.RunRecord]) -> float | None:
    """Mean seconds per step of the finished runs, or None if there are none."""
    rates = [r.summary["time"]["total_s"] / max(1, r.summary["step"]) for r in records if r.summary]
    return sum(rates) / len(rates) if rates else None
