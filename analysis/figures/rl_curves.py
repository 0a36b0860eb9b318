"""Figures 7 and 8 of the post: reward, length of completions and the sampler's health against step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import parts
from analysis.judges.common import TooLittle, grid_of
from analysis.results import StudyRuns

Panel = tuple[tuple[str, ...], str, bool]
"""Metrics of one panel, its label, whether its axis is logarithmic."""
POLICY: tuple[Panel, ...] = (
    (("test/reward",), "held-out reward", False),
    (("train/reward",), "reward in training", False),
    (("test/accuracy_greedy",), "held-out accuracy, greedy", False),
    (("test/length",), "completion length (tokens)", False),
)
HEALTH: tuple[Panel, ...] = (
    (("sampler/kl_nats",), "KL, sampler from trainer\n(nats per token)", True),
    (("sampler/ratio_p01", "sampler/ratio_p99"), "ratio learner / sampler,\n1 % and 99 % quantile", False),
    (("sampler/frac_truncated",), "share of completions\nthat were truncated", False),
    (("grader/failed",), "gradings that hung\nor crashed", False),
)


FEW_STEPS = 15
"""With more steps than these a line has no marks."""


def figure(study: StudyRuns, caption: str) -> Figure:
    """One line per arm at its best LR: what the policy does above, whether the numbers can be trusted below.

    Args: the study ``rl-curves``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, grid = style.panels(2, 4, 5.0, paper_heights=(1.6,), paper_columns=2)
    chosen = best_runs(study, arms)
    for axes, (metrics, label, log) in zip(grid.flat, (*POLICY, *HEALTH), strict=True):
        parts.attempt(draw, study, axes, metrics=metrics, chosen=chosen, log=log)
        axes.set_title(label, loc="left", fontsize=style.SMALL_PT)
    names = style.arm_labels(arms)
    lrs = {arm: f"{names[arm]}, LR {style.number_text(float(chosen[arm]['lr'].iloc[0]))}" for arm in chosen}
    handles = [Line2D([], [], label=lrs[arm], **looks[arm]) for arm in chosen]
    if handles:
        style.legend(fig, handles, style.legend_columns([*lrs.values()]))
    failed = _count(study, "grader/failed")
    none = _count(study, "grader/no_answer")
    parts.caption(fig, caption, study, "each arm at its best LR, mean over seeds, bands: lowest to highest seed",
                  f"in all runs: {failed:,.0f} gradings failed, {none:,.0f} completions had no answer")  # fmt: skip
    return fig


def best_runs(study: StudyRuns, arms: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The runs of each arm at its best LR; arms without a usable LR are left out (the caption names them)."""
    chosen = {}
    for arm in arms:
        try:
            best = grid_of(study.runs, arm).idxmin()
        except TooLittle:
            continue
        chosen[arm] = study.runs[(study.runs["arm"] == arm) & (study.runs["lr"] == best)]
    return chosen


def draw(
    study: StudyRuns,
    axes: Axes,
    metrics: Sequence[str],
    *,
    chosen: dict[str, pd.DataFrame] | None = None,
    looks: parts.Looks | None = None,
    log: bool = False,
) -> Axes:
    """Metrics against step, one line per arm and metric. ``chosen``: the runs of each arm, by ``best_runs`` if None."""
    looks = looks or parts.study_looks(study)
    chosen = best_runs(study, [*looks]) if chosen is None else chosen
    curves = with_failed(study.curves)
    columns = [f"metric.{metric}" for metric in metrics]
    if not chosen or not set(columns) <= set(curves):
        raise TooLittle("nothing recorded")
    for arm, runs in chosen.items():
        for column in columns:
            rows = curves[curves["run_id"].isin(set(runs["run_id"])) & curves[column].notna()]
            table = rows.groupby("step")[column].agg(["mean", "min", "max"])
            look = {**looks[arm], "marker": "" if len(table) > FEW_STEPS else looks[arm]["marker"]}
            axes.plot(table.index, table["mean"], **look)
            axes.fill_between(table.index, table["min"], table["max"], color=look["color"], alpha=0.15, linewidth=0)
    if log and (curves[columns] > 0).any(axis=None):
        axes.set_yscale("log")
        if style.current().is_paper:  # powers of ten have small exponents
            style.log_axis(axes, "y", most=3)
    axes.set_xlabel("step")
    return axes


def with_failed(curves: pd.DataFrame) -> pd.DataFrame:
    """The curves with the number of gradings that hung or crashed at each step."""
    names = [f"metric.grader/{name}" for name in ("timeout", "crash")]
    if not set(names) <= set(curves):
        return curves
    return curves.assign(**{"metric.grader/failed": curves[names].sum(axis=1, min_count=1)})


def _count(study: StudyRuns, metric: str) -> float:
    curves = with_failed(study.curves)
    column = f"metric.{metric}"
    return float(np.nansum(curves[column])) if column in curves else 0.0
