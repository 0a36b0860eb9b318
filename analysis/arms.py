"""From a table of runs to arms: labels, LR*, ratio to full fine-tuning."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.optimum import Optimum, Ratio, estimate, ratio
from analysis.window import Window, usable_window

VALUE = "test/nll_nats"
REWARD = "test/reward"
BASES = {VALUE: "test/nll_base_nats", REWARD: "test/reward_base"}
"""The same metric before the first step."""
FULL = "full"

_NOT_A_PANEL = ("config.method.", "config.optim.lr", "config.seed.")  # the arm, its LR, its repeats
_PANEL_ORDER = ("config.model.name", "config.data.name", "config.optim.batch_size", "config.optim.steps")


@dataclass(frozen=True)
class Arm:
    """One arm's result. ``ratio`` is None for the reference itself and where there is no reference.

    Divergence is data: ``num_diverged`` runs at ``num_diverged_lrs`` LRs; ``window`` is the range of LRs that
    do most of the work (None without the base's loss, or for a reward).
    """

    panel: str
    name: str
    optimum: Optimum
    ratio: Ratio | None
    num_lrs: int
    num_diverged: int
    num_diverged_lrs: int = 0
    window: Window | None = None


def as_loss(values: pd.Series, metric: str) -> pd.Series:
    """The metric so that less is better: a reward, which is a rate of success, becomes the rate of failure."""
    return 1.0 - values if metric in (REWARD, BASES[REWARD]) else values


def label_arms(table: pd.DataFrame, value: str = VALUE) -> pd.DataFrame:
    """The finished runs of ``load``'s table with the columns ``panel, arm, rank, lr, seed, value`` added.

    ``arm`` is full, r1, r4-mlp ...; ``rank`` 0 for full; ``value`` is the metric named, NaN where the
    run diverged, a reward as the rate of failure (``as_loss``); ``base`` the same before the first step;
    ``seed`` joins the three seeds; ``panel`` says in what else the runs of the table
    differ ("" if in nothing): arms are compared within a panel only.
    Raises: ValueError if no run has the metric.
    """
    labelled = label_points(table)
    done = labelled[labelled["state"] == "done"].reset_index(drop=True)
    column = f"metric.{value}"
    if len(done) and column not in done and (done["outcome"] == "finished").any():
        names = ", ".join(c.removeprefix("metric.") for c in _columns(done, "metric."))
        raise ValueError(f"value: {value!r} is not a metric of these runs; allowed: {names}")
    if done.empty or column not in done:  # nothing finished, or every run diverged
        return done.assign(value=np.nan)
    known = as_loss(pd.to_numeric(done[column], errors="coerce"), value)
    done["value"] = known.where(done["outcome"] == "finished")
    if f"metric.{BASES.get(value)}" in done:
        done["base"] = as_loss(done[f"metric.{BASES[value]}"].astype(float), value)
    return done


def label_points(table: pd.DataFrame) -> pd.DataFrame:
    """Every row whose configuration is known, finished or not, with ``panel, arm, rank, lr, seed`` added."""
    if "config.method.kind" not in table:
        return table.iloc[:0].assign(panel="", arm="", rank=0, lr=np.nan, seed="")
    points = table[table["config.method.kind"].notna()].copy()
    kinds = points["config.method.kind"]
    points["rank"] = points["config.method.rank"].where(kinds == "lora", 0).astype(int)
    points["arm"] = [arm_name(row) for _, row in points.iterrows()]
    points["lr"] = points["config.optim.lr"].astype(float)
    points["seed"] = points[_columns(points, "config.seed.")].astype(int).astype(str).agg("/".join, axis=1)
    points["panel"] = _panels(points)
    points["order"] = points["panel"].map(_natural)  # mini-w64 before mini-w128
    points = points.sort_values(["order", "rank", "arm", "lr", "seed"], kind="stable")
    return points.drop(columns="order").reset_index(drop=True)


def _natural(text: str) -> str:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text)


def arm_name(row: pd.Series | Mapping[str, Any]) -> str:
    """``full``, ``r4-mlp`` or ``tiny4`` of a row with ``config.method.*``. Raises KeyError for an unknown kind."""
    named = {"full": lambda row: FULL, "lora": _lora_name, "tiny": _tiny_name}
    return named[row["config.method.kind"]](row)


def _lora_name(row: pd.Series | Mapping[str, Any]) -> str:
    """``r16``, with the placement, alpha, the experts' rank and the unembedding where they are not the protocol's."""
    name = f"r{int(row['config.method.rank'])}"
    placement, alpha = row["config.method.placement"], row.get("config.method.alpha", 32.0)
    name += "" if placement == "all" else f"-{placement}"
    name += "" if float(alpha) == 32.0 else f"-alpha{float(alpha):g}"
    name += "-total" if row.get("config.method.expert_rank", "active") == "total" else ""
    name += "-outer" if row.get("config.method.shared_outer", False) is True else ""
    return name + ("-unembed" if row["config.method.unembed"] else "")


def _tiny_name(row: pd.Series | Mapping[str, Any]) -> str:
    """``tiny4``: trained numbers for each matrix; ``tiny4-tied``: in all."""
    return f"tiny{int(row['config.method.dims'])}" + ("-tied" if row["config.method.tied"] else "")


def _panels(points: pd.DataFrame) -> list[str]:
    """Name the settings in which runs differ; what another named setting determines (a model's path by its
    name, the steps by the batch size at equal examples) is not repeated."""
    columns = [c for c in _columns(points, "config.") if not c.startswith(_NOT_A_PANEL)]
    named: list[str] = []
    for column in sorted(columns, key=lambda c: _PANEL_ORDER.index(c) if c in _PANEL_ORDER else len(_PANEL_ORDER)):
        groups = points.groupby(named, dropna=False)[column] if named else points[column]
        if np.max(groups.nunique(dropna=False)) > 1:
            named.append(column)
    return [
        ", ".join(str(row[c]) if c.endswith(".name") else f"{c.rpartition('.')[2]} {_number(row[c])}" for c in named)
        for _, row in points.iterrows()
    ]


def _number(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value  # 16.0 where a column has a missing entry


def _columns(table: pd.DataFrame, prefix: str) -> list[str]:
    return [str(c) for c in table.columns if str(c).startswith(prefix)]


def find_arms(runs: pd.DataFrame, reference: str = FULL, *, maximize: bool = False) -> list[Arm]:
    """LR* of every arm of ``label_arms``'s table and its ratio to the reference arm of its panel.

    The reference comes first in its panel, then by rank.
    """
    arms = []
    for panel, inside in runs.groupby("panel", sort=False):
        names = sorted(dict.fromkeys(inside["arm"]), key=lambda name: name != reference)
        rows = {name: inside[inside["arm"] == name] for name in names}
        optima = {
            name: estimate(
                r["lr"].to_numpy(), r["value"].to_numpy(), r["seed"].tolist(), maximize=maximize, name=(panel, name)
            )
            for name, r in rows.items()
        }
        for name in names:
            against = ratio(optima[name], optima[reference]) if reference in optima and name != reference else None
            num_diverged = int((rows[name]["outcome"] == "diverged").sum())
            lost_lrs = int(rows[name].loc[rows[name]["outcome"] == "diverged", "lr"].nunique())
            window = None if maximize else _window(rows[name])
            num_lrs = rows[name]["lr"].nunique()
            arms.append(Arm(str(panel), name, optima[name], against, num_lrs, num_diverged, lost_lrs, window))
    return arms


def _window(rows: pd.DataFrame) -> Window | None:
    if "base" not in rows or rows["base"].isna().all():
        return None
    means = rows.groupby("lr")["value"].agg(lambda values: values.mean() if values.notna().all() else np.nan)
    return usable_window(np.asarray(means.index, float), np.asarray(means, float), float(rows["base"].mean()))


def arm_table(arms: Sequence[Arm]) -> pd.DataFrame:
    """One flat row per arm, for CSV and JSON; what is undecided is NaN. Intervals are 95 %."""
    rows = []
    for arm in arms:
        optimum = arm.optimum
        low, high = optimum.interval or (math.nan, math.nan)
        against = arm.ratio or Ratio(None, None, "")
        ratio_low, ratio_high = against.interval or (math.nan, math.nan)
        rows.append(
            {
                "panel": arm.panel,
                "arm": arm.name,
                "lr_star": optimum.lr_star,
                "lr_star_low": low,
                "lr_star_high": high,
                "plateau": " ".join(f"{lr:g}" for lr in optimum.plateau),
                "ratio": against.value,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
                "best_mean": optimum.best,
                "best_sd": optimum.best_sd,
                "best_lr": optimum.best_lr,
                "num_seeds": optimum.num_seeds,
                "num_runs": optimum.num_runs,
                "num_lrs": arm.num_lrs,
                "num_diverged": arm.num_diverged,
                "num_diverged_lrs": arm.num_diverged_lrs,
                "window_from": arm.window.low if arm.window else math.nan,
                "window_to": arm.window.high if arm.window else math.nan,
                "window_open": _open_sides(arm.window),
                "noise": optimum.noise,
                "noise_from": optimum.noise_from,
                "verdict": optimum.verdict,
                "why": optimum.why,
                "ratio_why": against.why,
                "add_lrs": " ".join(f"{lr:g}" for lr in optimum.add_lrs),
            }
        )
    numeric = ["lr_star", "ratio"]
    return pd.DataFrame(rows).astype(dict.fromkeys(numeric, float)) if rows else pd.DataFrame()


def _open_sides(window: Window | None) -> str:
    if window is None:
        return ""
    return " ".join(side for side, is_open in (("below", window.open_low), ("above", window.open_high)) if is_open)


def arm_records(arms: Sequence[Arm]) -> list[dict[str, object]]:
    """``arm_table`` for JSON: intervals, plateau and LRs to add as lists, null for what is undecided."""
    table = arm_table(arms).astype(object)
    records: list[dict[str, object]] = []
    for arm, row in zip(arms, table.where(table.notna(), None).to_dict("records"), strict=True):
        record = {str(key): value for key, value in row.items() if not str(key).endswith(("_low", "_high"))}
        record["interval"] = list(arm.optimum.interval) if arm.optimum.interval else None
        record["ratio_interval"] = list(arm.ratio.interval) if arm.ratio and arm.ratio.interval else None
        record["plateau"], record["add_lrs"] = list(arm.optimum.plateau), list(arm.optimum.add_lrs)
        records.append(record)
    return records
