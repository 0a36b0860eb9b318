"""A synthetic store with a known answer, written file by file in the documented layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from experiments import store

STEPS = (0, 1, 2, 5, 10, 22, 46, 100)
STARS = {0: 5e-4, 1: 3e-3, 16: 5e-3}
"""LR* by rank (0: full fine-tuning); the ratio of rank 16 is 10."""


def run_id(rank: int, k: int, seed: int, model: str = "toy") -> str:
    return f"{model}-r{rank}-lr{k}-s{seed}"


def write_run(root: Path, rank: int, k: int, seed: int, noise: float, model: str = "toy") -> str:
    """One run of the grid: LR doubling with k; the largest LRs of every arm diverge after step 10."""
    lr = (1e-4 if rank == 0 else 1e-3) * 2**k
    full = rank == 0
    config: dict[str, Any] = {
        "model": {"name": model},
        "data": {"name": "sorting", "tasks": ["number_sorting"]},
        "method": {
            "kind": "full" if full else "lora",
            "rank": rank,
            "alpha": 32.0,
            "placement": "all",
            "unembed": False,
        },
        "optim": {"lr": lr, "batch_size": 16, "steps": 100},
        "seed": {"init": seed, "data": seed, "sampling": 0},
    }
    final = 0.7 + 0.03 * math.log(lr / STARS[rank]) ** 2 + (0.05 if rank == 1 else 0.0) + 0.01 * seed + noise
    diverged = k == 6
    rows = []
    for step in STEPS:
        lost = diverged and step > 10
        rows.append({"step": step, "test/nll_nats": None if lost else final + 2 / (1 + step) - 2 / 101})
        if lost:
            break
    path = root / run_id(rank, k, seed, model)
    path.mkdir(parents=True)
    document = {"format": store.FORMAT, "run_id": path.name, "config": config}
    (path / "config.json").write_text(json.dumps(document))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "outcome": "diverged" if diverged else "finished",
        "step": rows[-1]["step"],
        "metrics": {"test/nll_nats": None if diverged else final},
        "time": {"total_s": 2.0, "eval_s": 0.5},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path.name
