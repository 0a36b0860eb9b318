"""The first steps of many ranks on the same batches, and the difference of two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import VALUE
from analysis.figures import parts
from analysis.judges.common import TooLittle
from analysis.judges.curves import early_difference
from analysis.results import StudyRuns

TRAIN = "train/nll_nats"
_KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    TRAIN: ("training loss, same batches", {"color": "#b0502b", "linestyle": "-", "linewidth": 1.0}),
    VALUE: ("held-out NLL", {"color": "black", "linestyle": "--", "marker": "o", "markersize": 3.5}),
}


def figure(study: StudyRuns, caption: str) -> Figure:
    """Loss of every rank on the left, the difference of the study's two ranks on the right.

    Args: the study ``early``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[left, right]] = style.panels(1, 2, 3.7)
    notes = [parts.attempt(draw_losses, study, left), parts.attempt(draw_difference, study, right)]
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms]
    style.legend(fig, handles, min(5, len(handles)), handlelength=2.2)
    lrs = ", ".join(f"{lr:g}" for lr in sorted(study.points["lr"].unique()))
    parts.caption(fig, caption, study, f"LR {lrs} for every rank",
                  f"{style.place(left, 'left')}: mean over seeds, lines: training loss, markers: held-out NLL",
                  f"{style.place(right, 'right')}: mean over seeds, bands: lowest and highest seed",
                  *notes)  # fmt: skip
    return fig


def draw_losses(study: StudyRuns, axes: Axes) -> Axes:
    """Training loss (line) and held-out NLL (marker) per arm against step, mean over the seeds."""
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per completion token)")
    if study.runs.empty:
        raise TooLittle("no finished run")
    joined = study.curves.merge(study.runs[["run_id", "arm"]], on="run_id")
    joined = joined[joined["step"] > 0]
    looks = parts.study_looks(study)
    drawn = [arm for arm in looks if arm in set(joined["arm"])]
    for k, arm in enumerate(drawn):
        look = looks[arm]
        size = 6.5 - 4.0 * k / len(drawn)  # hollow and nested: where the ranks coincide, all of them show
        inside = joined[joined["arm"] == arm]
        train = inside.dropna(subset=f"metric.{TRAIN}").groupby("step")[f"metric.{TRAIN}"].mean()
        held_out = inside.dropna(subset=f"metric.{VALUE}").groupby("step")[f"metric.{VALUE}"].mean()
        axes.plot(train.index, train, color=look["color"], linewidth=0.9)
        axes.plot(held_out.index, held_out, **{**look, "linestyle": "none", "markersize": size},
                  fillstyle="none", markeredgewidth=0.9)  # fmt: skip
    axes.set_xlim(0.9, joined["step"].max() * 1.1)
    style.log_axis(axes)
    _mark_early(study, axes)
    return axes


def draw_difference(study: StudyRuns, axes: Axes) -> Axes:
    """Loss of the first rank minus that of the second, on the same batches. Notes the margin in words."""
    low, high = study.settings["ranks"]
    axes.set_xlabel("step")
    axes.set_ylabel(f"rank {low} - rank {high} (nats)")
    if study.runs.empty:
        raise TooLittle("no finished run")
    table = early_difference(study)
    axes.axhline(0, color="black", linewidth=0.7)
    axes.set_xlim(0.9, table["step"].max() * 1.1)
    style.log_axis(axes)
    for metric, (words, look) in _KINDS.items():
        try:
            found = early_difference(replace(study, settings={**study.settings, "value": metric}))
        except (TooLittle, KeyError):  # not recorded
            continue
        rows = found[found["step"] > 0].groupby("step")["difference"].agg(["mean", "min", "max"])
        axes.plot(rows.index, rows["mean"], label=words, **look)
        axes.fill_between(rows.index, rows["min"], rows["max"], color=look["color"], alpha=0.18, linewidth=0)
    margin = early_margin(study, table)
    known = margin > 0
    if known:
        for y in (-margin, margin):
            axes.plot([0.9, study.settings["early_steps"]], [y, y], color=parts.PAPER_COLOR, linestyle=":", zorder=1)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))  # room for the legend
    _mark_early(study, axes)
    legend = axes.legend(loc="upper left", bbox_to_anchor=(0, 0.94), handlelength=2.4, frameon=True, framealpha=1)
    legend.get_frame().set(**{"facecolor": "white", "edgecolor": "none"})
    share = 100 * float(study.settings["margin_frac"])
    return parts.note(axes, f"dotted: ± {margin:.2g} nats, {share:g} % of what was learnt by then" if known else "")


def early_margin(study: StudyRuns, table: pd.DataFrame) -> float:
    """Within which the ranks count as equal early on (nats), by the rule fixed in the study file."""
    learnt = table[table["step"] <= study.settings["early_steps"]].groupby("seed")["learnt"].last()
    return float(study.settings["margin_frac"]) * float(learnt.mean())


def _mark_early(study: StudyRuns, axes: Axes) -> None:
    limit = int(study.settings["early_steps"])
    axes.axvline(limit, color=parts.PAPER_COLOR, linestyle="--", linewidth=0.8, zorder=1)
    parts.say_left_of(axes, limit, f"early: to step {limit}")
