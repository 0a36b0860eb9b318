"""Figure 6 of the post: held-out reward against learning rate, the range of good LRs, and the LR ratios."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import find_arms
from analysis.figures import lr, parts
from analysis.judges.common import TooLittle
from analysis.judges.rl import good_window
from analysis.results import StudyRuns

REWARD_LABEL = "held-out reward (share of samples that are right)"


def figure(study: StudyRuns, caption: str) -> Figure:
    """Reward on the left, ratios of optimal LRs on the right.

    Args: the study ``rl-lr``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    found = find_arms(study.runs) if len(study.runs) else []
    fig, [[left, right]] = style.panels(1, 2, 3.9, width_ratios=(2.0, 1), paper_heights=(1.9, lr.ratios_height(found)))
    note = parts.attempt(draw, study, left)
    ten = study.settings.get("ratio_paper")
    if found:
        lr.draw_ratios(found, right, looks, float(ten) if ten else None)
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms]
    handles.append(Line2D([], [], color=parts.PAPER_COLOR, linestyle=":", label="base model"))
    style.legend(fig, handles, style.legend_columns([*names.values()]))
    parts.caption(fig, caption, study, "points: mean over seeds, whiskers: lowest and highest seed",
                  f"{lr.TIMES}: a run collapsed there", note)  # fmt: skip
    return fig


def draw(study: StudyRuns, axes: Axes, most: int = 9) -> Axes:
    """Reward per LR, and below it each arm's range of good LRs as a bar. Notes what the bars mean.

    ``most``: labels on the axis of LRs, by the width of the panel.
    """
    runs, looks, share = study.runs, parts.study_looks(study), float(study.settings["window_share"])
    if runs["value"].notna().sum() == 0:
        raise TooLittle("no usable run")
    axes.axhline(1 - float(runs["base"].mean()), color=parts.PAPER_COLOR, linestyle=":", linewidth=1.0)
    present = [arm for arm in looks if (runs["arm"] == arm).any()]
    for k, arm in enumerate(present):
        inside = runs[runs["arm"] == arm]
        grid = inside.groupby("lr")["value"].agg(["mean", "min", "max", "size", "count"])
        usable = grid[grid["size"] == grid["count"]]
        spread = np.array([usable["max"] - usable["mean"], usable["mean"] - usable["min"]])
        axes.errorbar(usable.index, 1 - usable["mean"], yerr=spread, capsize=1.5, elinewidth=0.7, **looks[arm])
        lost = grid.index[grid["count"] < grid["size"]]
        row = 0.03 + 0.045 * k
        if len(lost):
            axes.plot(lost, np.full(len(lost), 0.985 - 0.045 * k), transform=axes.get_xaxis_transform(),
                      linestyle="none", marker="x", markersize=4, color=looks[arm]["color"])  # fmt: skip
        window = good_window(runs, arm, share, sorted(set(inside["seed"])))
        if window is not None:
            axes.plot([window.low, window.high], [row, row], transform=axes.get_xaxis_transform(),
                      color=looks[arm]["color"], linewidth=2.4, solid_capstyle="butt")  # fmt: skip
    best, worst = 1 - runs["value"].min(), 1 - max(runs["value"].max(), runs["base"].max())
    height = max(best - worst, 0.05)
    axes.set_ylim(worst - height * (0.1 + 0.06 * len(present)), best + height * (0.06 + 0.05 * len(present)))
    axes.set_xlim(runs["lr"].min() / 1.25, runs["lr"].max() * 1.25)
    style.log_axis(axes, most=most)
    axes.set_xlabel("learning rate (constant)")
    axes.set_ylabel(REWARD_LABEL)
    return parts.note(axes, f"bars: LRs that reach {100 * share:g} % of the arm's best gain over the base")
