"""LR ratio against run length: short runs want a larger learning rate for LoRA, says the post."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import FULL, find_arms
from analysis.figures import parts
from analysis.judges.common import TooLittle, arms_of
from analysis.judges.rates import ratio_by_length
from analysis.results import StudyRuns

_PAPER_STYLES = {"short": "--", "long": "-."}


def figure(study: StudyRuns, caption: str) -> Figure:
    """Ratios on the left, the LRs behind them on the right, both with 95 % intervals.

    Args: the study ``length``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[left, right]] = style.panels(1, 2, 3.7)
    unknown = parts.attempt(draw_ratios, study, left)
    parts.attempt(draw_optima, study, right)
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms]
    handles += [
        Line2D([], [], color=parts.PAPER_COLOR, linestyle=line, linewidth=0.9,
               label=f"the post's {study.settings['ratio_paper'][run]:g} ({run} runs)")
        for run, line in _PAPER_STYLES.items() if run in study.settings["ratio_paper"]
    ]  # fmt: skip
    handles.append(Line2D([], [], color="black", marker="x", linestyle="none", markersize=4, label="undecided"))
    style.legend(fig, handles, 3, handlelength=2.6)
    parts.caption(fig, caption, study, "lengths read off the same runs (constant LR)",
                  "whiskers: 95 % interval (bootstrap over seeds, at least half a grid step to each side)",
                  unknown)  # fmt: skip
    return fig


def draw_ratios(study: StudyRuns, axes: Axes) -> Axes:
    """LR*(LoRA) / LR*(full) by length, log-log. Notes the reasons for undecided lengths."""
    looks = parts.study_looks(study)
    lengths = [float(n) for n in study.settings["lengths"]]
    parts.value_ticks(axes, lengths)
    axes.set_xlabel("run length (steps)")
    axes.set_ylabel("LR* ratio of LoRA to full fine-tuning")
    table = ratio_by_length(study) if len(study.runs) else pd.DataFrame()
    if table.empty:
        raise TooLittle("no length with both LoRA and full fine-tuning")
    shown = table[table["ratio"].notna()]
    paper = {run: float(value) for run, value in study.settings["ratio_paper"].items()}
    _log_limits(axes, [*paper.values(), *shown["low"], *shown["high"]])
    for run, value in paper.items():
        axes.axhline(value, color=parts.PAPER_COLOR, linestyle=_PAPER_STYLES.get(run, ":"), linewidth=0.9, zorder=1)
    for k, (arm, rows) in enumerate(table.groupby("arm", sort=False)):
        moved = rows.assign(steps=rows["steps"] * 1.06**k)  # side by side
        parts.whiskers(axes, moved[moved["ratio"].notna()], "steps", "ratio", looks[str(arm)])
        parts.undecided(axes, moved.loc[moved["ratio"].isna(), "steps"], looks[str(arm)])
    unknown = table[table["ratio"].isna()]
    reasons = dict.fromkeys(
        f"{steps} steps: {why}" for steps, why in zip(unknown["steps"], unknown["why"], strict=True)
    )
    return parts.note(axes, f"undecided at {'; '.join(reasons)}" if reasons else "")


def draw_optima(study: StudyRuns, axes: Axes) -> Axes:
    """LR* of every arm by length, log-log."""
    looks = parts.study_looks(study)
    lengths = [int(n) for n in study.settings["lengths"]]
    parts.value_ticks(axes, lengths)
    axes.set_xlabel("run length (steps)")
    axes.set_ylabel("LR*")
    table = optima_by_length(study, lengths)
    if table.empty:
        raise TooLittle("no finished run")
    shown = table[table["lr_star"].notna()]
    if len(shown):
        _log_limits(axes, [*shown["low"], *shown["high"]])
    for k, arm in enumerate(arm for arm in looks if arm in set(table["arm"])):
        rows = table[table["arm"] == arm]
        rows = rows.assign(steps=rows["steps"] * 1.06 ** (k - 0.5))
        parts.whiskers(axes, rows[rows["lr_star"].notna()], "steps", "lr_star", looks[arm])
        parts.undecided(axes, rows.loc[rows["lr_star"].isna(), "steps"], looks[arm], row=k)
    return axes


def optima_by_length(study: StudyRuns, lengths: list[int]) -> pd.DataFrame:
    """LR* of each arm at each length: columns ``steps, arm, lr_star, low, high`` (NaN where undecided)."""
    rows = []
    for steps in lengths:
        runs = study.at(steps) if len(study.runs) else study.runs
        for arm in find_arms(arms_of(runs), FULL) if len(runs) else []:
            known = arm.optimum.lr_star is not None and arm.optimum.interval is not None
            low, high = arm.optimum.interval if known and arm.optimum.interval else (math.nan, math.nan)
            lr_star = arm.optimum.lr_star if known else math.nan
            rows.append({"steps": steps, "arm": arm.name, "lr_star": lr_star, "low": low, "high": high})
    return pd.DataFrame(rows)


def _log_limits(axes: Axes, values: list[float]) -> None:
    axes.set_ylim(min(values) / 1.5, max(values) * 1.25)
    style.log_axis(axes, "y", most=6)
