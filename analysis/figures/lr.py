"""Figure 2 of the post: final held-out NLL against learning rate, and the LR ratio of each arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

from analysis import style
from analysis.arms import FULL, Arm
from analysis.figures import parts

NEAR = math.log(4.0)
"""A bowl is shown up to a factor of four to each side of its best LR; steeper walls are clipped."""


COARSE = "coarse"
"""The stage of a search whose LRs were fixed before any run."""
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class _Frame:
    """y limits of the data, and the height of one row of marks above and below them."""

    low: float
    high: float
    row: float


def figure(
    runs: pd.DataFrame,
    arms: Sequence[Arm],
    caption: str,
    paper_ratio: float | None = None,
    reference: str = FULL,
    value_label: str = "final held-out NLL\n(nats per completion token)",
    phases: Mapping[str, str] | None = None,
) -> Figure:
    """Bowls on the left, ratios with 95 % intervals on the right; one row per panel.

    Args:
        runs: the table of ``arms.label_arms``.
        arms: the result of ``arms.find_arms`` on it.
        caption: where the runs come from: what, model, data, scale.
        paper_ratio: drawn as a line among the ratios.
        reference: the arm that ratios are taken to, drawn in black.
        phases: of a search, the stage in which it asked for each run (by id): points that it chose after it had
            seen others are open.
    """
    if phases:
        runs = runs.assign(phase=runs["run_id"].map(phases))
    panels = list(dict.fromkeys(arm.panel for arm in arms))
    looks = style.arm_looks([arm.name for arm in arms], reference)
    inside = {panel: [arm for arm in arms if arm.panel == panel] for panel in panels}
    heights = [inches for panel in panels for inches in (1.8, ratios_height(inside[panel]))]
    fig, grid = style.panels(len(panels), 2, 0.9 + 2.9 * len(panels), width_ratios=(2.0, 1), paper_heights=heights)
    for panel, (left, right) in zip(panels, grid, strict=True):
        draw_bowls(runs[runs["panel"] == panel], inside[panel], left, looks)
        draw_ratios(inside[panel], right, looks, paper_ratio, reference)
        left.set_ylabel(value_label)
        left.set_title(panel, loc="left")
    labels = style.arm_labels([*looks], reference)
    handles = [Line2D([], [], label=labels[name], **look) for name, look in looks.items()
               if any(arm.name == name for arm in arms)]  # fmt: skip
    ncols = style.legend_columns([*labels.values()])
    style.legend(fig, handles, ncols, handlelength=2.2)
    how = "points: mean over seeds, whiskers: lowest and highest seed; at the top: ▲ mean above the frame, "
    how += f"{TIMES} a run diverged there; at the bottom: LR* with its 95 % interval (bootstrap over seeds, at least"
    how += " half a grid step to each side)"
    counted = _searched_text(runs) if phases else seed_text(arms)
    style.caption(fig, caption, f"{counted}; {how}", parts.interval_text(runs))
    return fig


def seed_text(arms: Sequence[Arm]) -> str:
    """``n = 3 seeds`` or the range over the arms."""
    counts = sorted({arm.optimum.num_seeds for arm in arms})
    if counts == [1]:
        return "n = 1 seed"
    return f"n = {counts[0]} seeds" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]} seeds"


def _searched_text(runs: pd.DataFrame) -> str:
    """What the marks of a search mean, and over how many seeds a point of it is."""
    counts = runs.groupby(["panel", "arm", "lr"]).size()
    seeds = f"n = {counts.min()} to {counts.max()} seeds at an LR"
    return f"{seeds}; filled: {COARSE} LRs, fixed beforehand; open: LRs that the search chose after it had seen others"


def chosen(grid: pd.DataFrame) -> pd.Index:
    """The LRs of one arm's runs that no coarse grid had: what was found decided that they were run."""
    return grid.groupby("lr")["phase"].agg(lambda phases: COARSE not in set(phases)).loc[lambda is_new: is_new].index


def draw_bowls(runs: pd.DataFrame, arms: Sequence[Arm], axes: Axes, looks: dict[str, dict]) -> Axes:
    """Mean and range over seeds per arm; clipped and diverged LRs above, LR* below. One panel only."""
    frame = _focus(runs, arms)
    for k, arm in enumerate(arms):
        grid = runs[runs["arm"] == arm.name].groupby("lr")["value"].agg(["mean", "min", "max", "size", "count"])
        usable = grid[grid["count"] == grid["size"]]
        look = looks[arm.name]
        whiskers = np.array([usable["mean"] - usable["min"], usable["max"] - usable["mean"]])
        axes.errorbar(usable.index, usable["mean"], yerr=whiskers, capsize=1.5, elinewidth=0.7, **look)
        if "phase" in runs:
            opened = usable.index[usable["mean"] <= frame.high].intersection(chosen(runs[runs["arm"] == arm.name]))
            marker = {**look, "linestyle": "none", "markerfacecolor": "white", "zorder": 3}  # over the filled ones
            axes.plot(opened, usable["mean"][opened], **marker)
        above = frame.high + frame.row * (k + 1)
        _marks(axes, usable.index[usable["mean"] > frame.high + 0.4 * frame.row], above, look["color"], "^")
        _marks(axes, grid.index[grid["count"] < grid["size"]], above, look["color"], "x")
        _draw_optimum(axes, arm, frame.low - frame.row * (k + 1), look)
    count = len(arms) + 0.8
    axes.axhspan(frame.high + frame.row * 0.4, frame.high + frame.row * count, color="white", zorder=2.5)
    axes.axhspan(frame.low - frame.row * count, frame.low - frame.row * 0.4, color="white", zorder=2.5)
    for y in (frame.high + frame.row * 0.4, frame.low - frame.row * 0.4):
        axes.axhline(y, color="#999999", linewidth=0.6, zorder=3)
    axes.set_ylim(frame.low - frame.row * count, frame.high + frame.row * count)
    axes.set_xlim(runs["lr"].min() / 1.25, runs["lr"].max() * 1.25)
    style.log_axis(axes, most=9)
    ticks = MaxNLocator(6).tick_values(frame.low, frame.high)
    axes.yaxis.set_major_locator(FixedLocator([t for t in ticks if frame.low <= t <= frame.high]))
    axes.set_xlabel("learning rate (constant)")
    return axes


def _marks(axes: Axes, lrs: pd.Index, y: float, color: object, marker: str) -> None:
    axes.plot(lrs, np.full(len(lrs), y), linestyle="none", color=color, marker=marker, markersize=3.5, zorder=4)


def _draw_optimum(axes: Axes, arm: Arm, y: float, look: dict) -> None:
    optimum = arm.optimum
    if optimum.lr_star is None or optimum.interval is None:
        if math.isfinite(optimum.best_lr):
            axes.annotate("undecided", (optimum.best_lr, y), ha="center", va="center", fontsize=style.SMALL_PT,
                          color=look["color"], zorder=4)  # fmt: skip
        return
    axes.plot(optimum.interval, [y, y], color=look["color"], linewidth=1.2, zorder=4)
    axes.plot([optimum.lr_star], [y], color=look["color"], marker=look["marker"], zorder=4)


def _focus(runs: pd.DataFrame, arms: Sequence[Arm]) -> _Frame:
    """Limits within which every arm's floor and the walls near it show."""
    bottoms, floors, walls = [], [], []
    for arm in arms:
        grid = runs[runs["arm"] == arm.name].groupby("lr")["value"].agg(["mean", "min", "size", "count"])
        grid = grid[grid["count"] == grid["size"]]
        if grid.empty:
            continue
        best = grid["mean"].idxmin()
        near = np.abs(np.log(grid.index.to_numpy() / best)) <= NEAR * 1.001
        bottoms.append(float(grid["min"].min()))
        floors.append(float(grid["mean"].min()))
        walls.append(float(grid["mean"][near].max()))
    if not floors:
        return _Frame(0.0, 1.0, 0.05)
    low = min(bottoms)
    # The median wall, so that one arm's cliff does not press all bowls flat; every floor shows.
    high = max(float(np.median(walls)), max(floors) + 0.1 * (max(floors) - low))
    height = (high - low) or 1e-3
    return _Frame(low - 0.03 * height, high + 0.05 * height, 0.055 * height)


def ratios_height(arms: Sequence[Arm]) -> float:
    """What the ratios of these arms need in one column, in inches."""
    return 0.6 + 0.18 * len(arms)


def draw_ratios(
    arms: Sequence[Arm], axes: Axes, looks: dict[str, dict], paper_ratio: float | None, reference: str = FULL
) -> Axes:
    """LR*(arm) / LR*(reference) per arm with its interval written beside it; undecided arms say so."""
    shown = [arm for arm in arms if arm.name != reference]
    known = [paper_ratio] if paper_ratio else []
    for arm in shown:
        known += arm.ratio.interval if arm.ratio and arm.ratio.interval else ()
    low, high = (min(known) / 1.4, max(known) * 1.4) if known else (0.5, 50.0)
    for y, arm in enumerate(shown):
        look, found = looks[arm.name], arm.ratio
        if found is None or found.value is None or found.interval is None:
            axes.annotate("undecided", (0.5, y), xycoords=("axes fraction", "data"), ha="center", va="center",
                          fontsize=style.SMALL_PT, bbox=parts.PAPER)  # fmt: skip
            continue
        axes.plot(found.interval, [y, y], color=look["color"], linewidth=1.4)
        axes.plot([found.value], [y], color=look["color"], marker=look["marker"])
        text = f"{found.value:.1f} [{found.interval[0]:.1f}, {found.interval[1]:.1f}]"
        axes.annotate(text, (0.5, y), xycoords=("axes fraction", "data"), xytext=(0, 5), textcoords="offset points",
                      ha="center", fontsize=style.SMALL_PT,
                      bbox=parts.PAPER)  # fmt: skip
    if paper_ratio:
        axes.axvline(paper_ratio, color="#777777", linestyle="--", linewidth=0.9, zorder=1)
        axes.set_title(f"dashed: the post's {paper_ratio:g}{TIMES}", fontsize=style.SMALL_PT)
    labels = style.arm_labels([arm.name for arm in arms], reference)
    axes.set_yticks(range(len(shown)), [labels[arm.name].removeprefix("LoRA ") for arm in shown])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    axes.set_xlim(low, high)
    style.log_axis(axes, most=6)
    axes.set_xlabel(f"LR* ratio to {style.arm_label(reference)}")
    axes.grid(visible=False, axis="y")
    return axes
