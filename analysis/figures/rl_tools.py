"""Rewards that are sparse and episodes that are long: reward against LR, and the episodes as they are learned."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import lr, parts, rl_curves, rl_lr
from analysis.results import StudyRuns

CURVES: tuple[tuple[str, str], ...] = (("test/reward", "held-out reward"), ("test/turns", "turns in an episode"))


def figure(study: StudyRuns, caption: str) -> Figure:
    """Reward against LR on the left; reward and number of turns against step, each arm at its best LR.

    Args: the study ``rl-tools``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[left, *others]] = style.panels(1, 1 + len(CURVES), 4.4, width_ratios=(1.5, 1, 1))
    note = parts.attempt(rl_lr.draw, study, left, most=5)
    chosen = rl_curves.best_runs(study, arms)
    for axes, (metric, label) in zip(others, CURVES, strict=True):
        parts.attempt(rl_curves.draw, study, axes, metrics=(metric,), chosen=chosen)
        axes.set_title(label, loc="left", fontsize=style.SMALL_PT)
    names = style.arm_labels(arms)
    lrs = {arm: f"{names[arm]}, LR {style.number_text(float(chosen[arm]['lr'].iloc[0]))}" for arm in chosen}
    handles = [Line2D([], [], label=lrs[arm], **looks[arm]) for arm in chosen]
    handles.append(Line2D([], [], color=parts.PAPER_COLOR, linestyle=":", label="base model"))
    style.legend(fig, handles, style.legend_columns([*lrs.values()]))
    where = style.place(left, "left"), style.place(np.array(others), "right")
    parts.caption(fig, caption, study, f"{where[0]}: mean over seeds, whiskers: lowest and highest seed; {where[1]}: "
                  "each arm at its best LR, bands: lowest to highest seed", f"{lr.TIMES}: a run collapsed there",
                  note)  # fmt: skip
    return fig
