"""What runs have, read off the columns ``config.*`` of their table: in words, or run by run whether it is so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import pandas as pd

from analysis.style import number_text
from experiments.config import MethodConfig, OptimConfig

Runs = pd.DataFrame
_ABSENT: dict[str, Any] = {
    "config.rl.group_size": 0,
    "config.rl.max_new_tokens": 0,
    "config.rl.off_objective": "",
    "config.method.expert_rank": "active",
}
"""Fields that a table of runs without them may lack."""


def with_defaults(points: Runs) -> Runs:
    """``points`` whose configuration is known, with the fields that only some have."""
    runs = points[points["config.method.kind"].notna()] if "config.method.kind" in points else points.iloc[:0]
    runs = runs.copy()
    for name, value in _ABSENT.items():
        if name not in runs:
            runs[name] = value
    return runs


def is_rl(runs: Runs) -> pd.Series:
    """Whether a run learns from rewards."""
    return runs["config.rl.group_size"].fillna(0) > 0


def supervised(runs: Runs) -> pd.Series:
    """Whether a run learns from completions."""
    return ~is_rl(runs)


def lora(runs: Runs) -> pd.Series:
    """Whether a run trains a LoRA adapter."""
    return runs["config.method.kind"] == "lora"


def moe_lora(runs: Runs) -> pd.Series:
    """Whether it does so on a mixture of experts."""
    return lora(runs) & runs["config.model.name"].str.contains("moe|a3b", case=False)


def column(name: str) -> Callable[[Runs], pd.Series]:
    """A field of every run."""
    return lambda runs: runs[f"config.{name}"]


def values(name: str, most: int = 14) -> Callable[[Runs], str]:
    """The distinct values of a column, numbers in order; of many, the ends."""

    def said(runs: Runs) -> str:
        found: Iterable[Any] = sorted(runs[f"config.{name}"].dropna().unique())
        texts = [number_text(float(v)) if isinstance(v, int | float) else str(v) for v in found]
        return ", ".join(texts) if len(texts) <= most else f"{texts[0]} to {texts[-1]} ({len(texts)} values)"

    return said


def share(name: str, value: Any) -> Callable[[Runs], str]:
    """How many of the runs have this value."""

    def said(runs: Runs) -> str:
        return f"{(runs[f'config.{name}'] == value).sum():,} of {len(runs):,} LoRA runs"

    return said


def passes(runs: Runs) -> pd.Series:
    """Examples taken over examples there are."""
    return runs["config.optim.steps"] * runs["config.optim.batch_size"] / runs["config.data.num_train"]


def said_passes(runs: Runs) -> str:
    """The fewest and most passes."""
    found = passes(runs)
    return f"{found.min():.2g} to {found.max():.2g} passes over the training examples"


def lrs(runs: Runs) -> str:
    """The fewest and most LRs of a condition."""
    counts = num_lrs(runs)
    return f"{counts.min()} to {counts.max()} LRs for each condition"


def num_lrs(runs: Runs) -> pd.Series:
    """How many LRs there are of a run's condition: all that it is, but for LR and seeds."""
    named = [c for c in runs if str(c).startswith("config.") and ".seed." not in str(c) and c != "config.optim.lr"]
    return runs.groupby(named, dropna=False)["config.optim.lr"].transform("nunique")


def num_seeds(runs: Runs) -> str:
    """The fewest and most seeds of a point."""
    named = [c for c in runs if str(c).startswith("config.") and not str(c).startswith("config.seed.")]
    counts = runs.groupby(named, dropna=False)["config.seed.init"].nunique()
    return f"{counts.min()} to {counts.max()} seeds a point (initialisation, data order and sampling seeded apart)"


def adam(runs: Runs) -> str:
    """The optimiser's numbers."""
    parts = [f"{name} {values(f'optim.{name}')(runs)}" for name in ("beta1", "beta2", "eps")]
    for name, word in (("weight_decay", "weight decay"), ("max_grad_norm", "clipping")):
        used = bool(runs[f"config.optim.{name}"].any())
        parts.append(f"{word} {values(f'optim.{name}')(runs)}" if used else f"no {word}")
    return ", ".join(["AdamW", *parts])


def no_schedule(runs: Runs) -> pd.Series:
    """An optimiser that has no field for a schedule has none."""
    named = [f.name for f in fields(OptimConfig) if any(word in f.name for word in ("schedule", "warm", "decay_lr"))]
    return pd.Series(not named, runs.index)


def one_lr(runs: Runs) -> pd.Series:
    """An optimiser with one field for an LR has one for A and B."""
    return pd.Series([f.name for f in fields(OptimConfig) if "lr" in f.name] == ["lr"], runs.index)


def scaled_by_rank(runs: Runs) -> pd.Series:
    scales = [MethodConfig(rank=int(r), alpha=float(a)).scale == float(a) / int(r) for r, a in
              zip(runs["config.method.rank"], runs["config.method.alpha"], strict=True)]  # fmt: skip
    return pd.Series(scales, runs.index)


def basic_objective(runs: Runs) -> pd.Series:
    """No setting left the objective, and none is named that did."""
    plain = ~runs["config.rl.scale_rewards"].astype(bool) & (runs["config.rl.clip_ratio"].astype(float) == 0)
    return plain & (runs["config.rl.off_objective"].fillna("") == "")


def objective(runs: Runs) -> str:
    """Which settings left the objective."""
    left = runs.loc[~basic_objective(runs), "config.rl.off_objective"].unique()
    return f"left by: {', '.join(left)}" if len(left) else "the same: no division by the group's SD, no clipping, no KL"
