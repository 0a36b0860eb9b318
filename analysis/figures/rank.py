"""The post's Figure 1: learning curves by rank, where each rank leaves, and the gap to full fine-tuning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import FULL
from analysis.figures import parts
from analysis.judges import curves
from analysis.judges.common import TooLittle, arms_of, gap, lora_arms
from analysis.results import StudyRuns

_LEAVES: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": "#c1272d",
           "markeredgewidth": 1.1, "linestyle": "none", "zorder": 5}  # fmt: skip
_SIZES: parts.Looks = {
    "small": {"linestyle": ":", "fillstyle": "none"},
    "large": {"linestyle": "-", "fillstyle": "full"},
}


def figure(study: StudyRuns, caption: str) -> Figure:
    """Curves on the left, gaps with 95 % intervals on the right; one row per base model.

    Args: the study ``rank``; where its runs come from: what, model, data, scale.
    """
    panels = parts.by_panel(study)
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    rows = max(1, len(panels))
    fig, grid = style.panels(rows, 2, 1.1 + 2.7 * rows, width_ratios=(1.9, 1))
    notes = []
    for (panel, inside), (left, right) in zip(panels, grid, strict=False):
        notes.append(parts.attempt(draw_curves, inside, left, looks=looks))
        notes.append(parts.attempt(draw_gaps, inside, right))
        left.set_title(f"{panel}: pointwise minimum over LRs".removeprefix(": "), loc="left")
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms]
    handles.append(Line2D([], [], label="leaves the highest rank's curve", **_LEAVES))
    style.legend(fig, handles, 3, handlelength=2.2)
    leaves = f"stays above the highest rank by {study.settings['departure']['seed_sd']:g} seed SDs"
    parts.caption(fig, caption, study, "lines: mean over seeds, bands: lowest and highest seed",
                  f"circles: median over seeds of the first step from which a rank {leaves}",
                  f"{style.place(grid[:, 1], 'right')}: each arm at its best LR, whiskers: 95 % interval of the paired "
                  "difference",
                  *notes)  # fmt: skip
    return fig


def draw_curves(study: StudyRuns, axes: Axes, looks: parts.Looks | None = None) -> Axes:
    """Envelopes, departures and the ends of the data sets. Notes which ranks never leave."""
    looks = looks or parts.study_looks(study)
    if study.runs.empty:
        raise TooLittle("no finished run")
    shown, ends, left = seeds_with_every_lr(study), curves.sizes(study), departure_steps(study)
    table = curves.envelopes(shown)
    mean = table.groupby(["arm", "step"], sort=True)["nll"].agg(["mean", "min", "max"]).reset_index()
    for arm in (arm for arm in looks if arm in set(mean["arm"])):
        rows = mean[mean["arm"] == arm]
        axes.plot(rows["step"], rows["mean"], markevery=2, **{"markersize": 3, **looks[arm]})
        axes.fill_between(rows["step"], rows["min"], rows["max"], color=looks[arm]["color"], alpha=0.2, linewidth=0)
        if math.isfinite(left.get(arm, math.inf)):  # a median of two seeds may lie between two evaluations
            nll = float(np.interp(math.log(left[arm]), np.log(rows["step"]), rows["mean"]))
            axes.plot([left[arm]], [nll], **_LEAVES)
    # The fall of the first steps would hide the arms, but every departure is shown.
    burn_in = float(study.settings["burn_in_frac"]) * ends["large"]
    first = min([burn_in, *left.values()]) / 1.05
    _focus(axes, mean[mean["step"] >= max(first, 1.0)], ends)
    axes.set_xlabel("step")
    axes.set_ylabel(parts.NLL_LABEL.replace(" (", "\n("))
    names = style.arm_labels([*looks])
    never = ", ".join(names[arm] for arm, step in left.items() if math.isinf(step))
    fewer = f"{style.place(axes, 'left')}: the seeds that ran every LR of an arm"
    return parts.note(axes, fewer if len(shown.runs) < len(study.runs) else "",
                      f"{never} did not leave in at least half of the seeds" if never else "")  # fmt: skip


def seeds_with_every_lr(study: StudyRuns) -> StudyRuns:
    """Per arm the seeds with the most LRs: seeds added around the optimum alone have no minimum over all LRs."""
    counts = study.runs.groupby(["panel", "arm", "seed"])["lr"].transform("nunique")
    most = counts.groupby([study.runs["panel"], study.runs["arm"]]).transform("max")
    return replace(study, runs=study.runs[counts == most].reset_index(drop=True))


def departure_steps(study: StudyRuns) -> dict[str, float]:
    """Median over seeds of the step at which each LoRA arm but the highest leaves, lowest rank first; inf: never."""
    table = curves.departures(study)
    if table.empty:
        return {}
    median = table.groupby(["rank", "arm"])["step"].median()
    return dict(zip(median.index.get_level_values("arm"), median, strict=True))


def _focus(axes: Axes, shown: pd.DataFrame, ends: dict[str, int]) -> None:
    low, high = float(shown["min"].min()), float(shown["max"].max())
    height = (high - low) or 1e-3
    axes.set_ylim(low - 0.05 * height, high + 0.2 * height)
    axes.set_xlim(shown["step"].min() / 1.1, max(shown["step"].max(), ends["large"]) * 1.15)
    style.log_axis(axes, most=8)
    for size, step in ends.items():
        axes.axvline(step, color=parts.PAPER_COLOR, linewidth=0.8, linestyle="--", zorder=1)
        parts.say_left_of(axes, step, f"{size} data set\nends ({step})")


def draw_gaps(study: StudyRuns, axes: Axes) -> Axes:
    """LoRA - full by rank at the ends of both data sets. Notes what could not be compared."""
    if study.runs.empty:
        raise TooLittle("no finished run")
    ranks, failed = [], []
    for k, (size, step) in enumerate(curves.sizes(study).items()):
        table, why = gaps(study, step)
        failed += [f"{size} data set, {reason}" for reason in why]
        if table.empty:
            continue
        ranks += table["rank"].tolist()
        table["rank"] *= 1.07 ** (2 * k - 1)  # side by side
        look = {"color": "black", "marker": "so"[k], "markersize": 4, "linewidth": 0.8, **_SIZES[size]}
        parts.whiskers(axes, table, "rank", "gap", look, label=f"{size} data set ({step} steps)")
    if not ranks:
        raise TooLittle("; ".join(dict.fromkeys(failed)) or "no LoRA arm beside full fine-tuning")
    axes.axhline(0, color="black", linewidth=0.7)
    parts.value_ticks(axes, ranks)
    axes.set_xlabel("LoRA rank")
    axes.set_ylabel("gap to full fine-tuning (nats)")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    axes.legend(loc="upper right")
    return parts.note(axes, *failed)


def gaps(study: StudyRuns, step: int) -> tuple[pd.DataFrame, list[str]]:
    """(columns ``arm, rank, gap, low, high`` at ``step``, reasons for the arms that are not among them)."""
    runs = study.at(step)
    rows, why = [], []
    for arm in lora_arms(arms_of(runs)) if len(runs) else []:
        try:
            found = gap(arms_of(runs), arm, FULL)
        except TooLittle as error:
            why.append(str(error))
            continue
        low, high = found.estimate.interval()
        rank = float(runs.loc[runs["arm"] == arm, "rank"].iloc[0])
        rows.append({"arm": arm, "rank": rank, "gap": found.estimate.value, "low": low, "high": high})
    return pd.DataFrame(rows), list(dict.fromkeys(why))
