"""Figure 1 of the post: held-out NLL against step; pointwise minimum over LRs and best single LR."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import envelope, style
from analysis.arms import FULL, Arm
from analysis.figures import parts

SHOWN_FRAC = 0.05
"""Curves are shown from a twentieth of the run on; the fall of the first steps would hide the arms."""


def figure(
    runs: pd.DataFrame, arms: Sequence[Arm], curves: pd.DataFrame, caption: str, reference: str = FULL
) -> Figure:
    """One row per panel.

    Args: the tables of ``arms.label_arms``, ``arms.find_arms`` and ``load_curves``; where the runs come from.
    """
    means = envelope.mean_curves(runs, curves)
    panels = list(dict.fromkeys(arm.panel for arm in arms))
    looks = style.arm_looks([arm.name for arm in arms], reference)
    fig, grid = style.panels(len(panels), 2, 0.8 + 2.5 * len(panels), sharey="row")
    for panel, (left, right) in zip(panels, grid, strict=True):
        inside = means[means["panel"] == panel]
        names = [arm.name for arm in arms if arm.panel == panel]
        lowest = envelope.envelope(inside)
        draw(lowest, names, left, looks)
        draw(envelope.best_run(inside), names, right, looks)
        _focus(left, right, lowest)
        left.set_ylabel("held-out NLL\n(nats per completion token)")
        left.set_title(f"{panel}: pointwise minimum over LRs" if panel else "pointwise minimum over LRs", loc="left")
        right.set_title("best single LR (chosen at the last step)", loc="left")
    labels = style.arm_labels([*looks], reference)
    handles = [Line2D([], [], label=labels[name], **look) for name, look in looks.items()
               if any(arm.name == name for arm in arms)]  # fmt: skip
    ncols = style.legend_columns([*labels.values()])
    style.legend(fig, handles, ncols, handlelength=2.2)
    counts = runs.groupby(["panel", "arm", "lr"]).size()
    seeds = f"{counts.min()}" if counts.nunique() == 1 else f"{counts.min()} to {counts.max()}"
    lrs = envelope.unequal_counts(runs) or f"{int(runs.groupby(['panel', 'arm'])['lr'].nunique().max())} LRs per arm"
    note = f"mean over seeds (n = {seeds}), bands: ± 1 SD; from {100 * SHOWN_FRAC:g} % of the steps on; {lrs}"
    style.caption(fig, caption, note, parts.interval_text(runs))
    return fig


def draw(table: pd.DataFrame, arms: Sequence[str], axes: Axes, looks: dict[str, dict]) -> Axes:
    """One line per arm of the columns ``arm, step, nll, sd``; step 0 has no place on a log axis."""
    for arm in arms:
        rows = table[(table["arm"] == arm) & (table["step"] > 0)]
        axes.plot(rows["step"], rows["nll"], **looks[arm])
        axes.fill_between(rows["step"], rows["nll"] - rows["sd"], rows["nll"] + rows["sd"],
                          color=looks[arm]["color"], alpha=0.15, linewidth=0)  # fmt: skip
    axes.set_xlabel("step")
    return axes


def _focus(left: Axes, right: Axes, lowest: pd.DataFrame) -> None:
    """Both panels on the late steps' range of the envelopes."""
    late = lowest[(lowest["step"] >= SHOWN_FRAC * lowest["step"].max()) & (lowest["step"] > 0)]
    if late.empty:
        return
    low, high = float(late["nll"].min()), float(late["nll"].max())
    height = (high - low) or 1e-3
    left.set_ylim(low - 0.08 * height, high + 0.08 * height)
    for axes in (left, right):
        axes.set_xlim(late["step"].min() / 1.15, late["step"].max() * 1.1)
        style.log_axis(axes, most=8)
