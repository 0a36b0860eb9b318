"""Boundary to wandb: mirrors metrics that are already on disk. Never read back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.config import LaunchConfig, RunConfig, encode, run_id

PROJECT = "lora-vs-full"


class Tracker:
    """The null tracker: a run without wandb needs no ``if``."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Mirror one row of metrics.jsonl."""


class WandbTracker(Tracker):
    """One wandb run per run id: a preempted run goes on in the same one."""

    def __init__(self, config: RunConfig, root: str) -> None:
        import wandb  # imported only where asked for: it starts a service

        name = run_id(config)
        self.run = wandb.init(project=PROJECT, id=name, name=name, resume="allow", config=encode(config), dir=root)

    def log(self, row: Mapping[str, Any]) -> None:
        self.run.log({k: v for k, v in row.items() if v is not None and k != "step"}, step=row["step"])


@contextlib.contextmanager
def tracker(config: RunConfig, launch: LaunchConfig) -> Iterator[Tracker]:
    """The tracker that ``launch.wandb`` asks for; WANDB_MODE=offline works as everywhere."""
    if not launch.wandb:
        yield Tracker()
        return
    active = WandbTracker(config, launch.root)
    try:
        yield active
    finally:
        active.run.finish()
