"""What the figures of the studies share: the arms a study expects, what is missing of them, marks, notes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from analysis import style
from analysis.arms import FULL, REWARD
from analysis.inference import Estimate
from analysis.judges.common import TooLittle, at_best_lr
from analysis.results import StudyRuns
from analysis.stats import pooled_sd

Looks = dict[str, dict[str, Any]]
"""Line properties by arm."""
NLL_LABEL = "held-out NLL (nats per completion token)"
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
"""Behind words that stand on lines."""
PAPER_COLOR = "#777777"
"""Lines that are not measured here: the post's numbers and theories."""
MOST_NAMED = 6
"""Missing arms or LRs named in a caption; the rest are counted."""
NUM_LINES = 3
"""Lines of caption that a figure's height allows for."""


def expected_arms(study: StudyRuns, panel: str | None = None) -> list[str]:
    """Every arm that the study (or one panel of it) asks for, full first, then by rank; also those without a run."""
    points = study.points if panel is None else study.points[study.points["panel"] == panel]
    return [str(arm) for arm in dict.fromkeys(points.sort_values(["rank", "arm"], kind="stable")["arm"])]


def arm_looks(arms: Sequence[str]) -> Looks:
    """``style.arm_looks``, but a single LoRA arm is dark: the palest shade is for the lowest of several ranks."""
    looks = style.arm_looks(arms)
    lora = [arm for arm in looks if arm != FULL]
    if len(lora) == 1:
        looks[lora[0]]["color"] = colormaps["viridis"](0.35)
    return looks


def study_looks(study: StudyRuns) -> Looks:
    """``arm_looks`` of every arm that the study asks for."""
    return arm_looks(expected_arms(study))


def by_panel(study: StudyRuns) -> list[tuple[str, StudyRuns]]:
    """(panel, the study as if it had nothing else), in the study's order; also panels without a run."""
    parts = []
    for panel in dict.fromkeys(study.points["panel"]):
        runs = study.runs[study.runs["panel"] == panel].reset_index(drop=True)
        curves = study.curves[study.curves["run_id"].isin(set(runs["run_id"]))].reset_index(drop=True)
        points = study.points[study.points["panel"] == panel].reset_index(drop=True)
        parts.append((str(panel), replace(study, points=points, runs=runs, curves=curves)))
    return parts


def seeds_text(runs: pd.DataFrame) -> str:
    """``n = 3 seeds``, or the fewest and most at a point of the grid."""
    if runs.empty:
        return "n = 0: no finished run"
    counts = runs.groupby(["panel", "arm", "lr"])["seed"].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"n = {low} seed{'s' * (low > 1)}" if low == high else f"n = {low} to {high} seeds"


def lacking(study: StudyRuns) -> str:
    """Which arms have no finished run or none that did not diverge, and at which other LRs none is finished."""
    keys = ["panel", "arm"]
    names = style.arm_labels(expected_arms(study))
    expected = [(str(p), str(a)) for p, a in study.points[keys].drop_duplicates().itertuples(index=False)]
    done = set(study.runs[keys].drop_duplicates().itertuples(index=False, name=None))
    absent = [key for key in expected if key not in done]
    usable = set(study.runs.loc[study.runs["value"].notna(), keys].itertuples(index=False, name=None))
    spoilt = [key for key in expected if key in done - usable]
    holes = [f"{_named(p, names[a])} at LR {lr:g}" for p, a, lr in study.holes if (p, a) in done]
    parts = [
        (absent, "no finished run of", [_named(p, names[a]) for p, a in absent]),
        (spoilt, "every run diverged of", [_named(p, names[a]) for p, a in spoilt]),
        (holes, "no finished run yet of", holes),
    ]
    return "; ".join(f"{words} {_listed(named)}" for found, words, named in parts if found)


def _named(panel: str, label: str) -> str:
    return f"{label} ({panel.replace('_', ' ')})" if panel else label


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def blank(study: StudyRuns, text: str) -> Figure:
    """The figure of a study of which not even the configurations are known."""
    figure, [[axes]] = style.panels(height=2.0)
    say(axes, "no run and no configuration of this study is known")
    caption(figure, text, study)
    return figure


def caption(figure: Figure, text: str, study: StudyRuns, *notes: str) -> None:
    """Where the runs come from; n; what the marks mean; what is missing; in a paper what an interval would be."""
    note = "; ".join(filter(None, [seeds_text(study.runs), *notes, lacking(study)]))
    what = "final reward" if study.settings.get("value") == REWARD else "final NLL in nats"
    style.caption(figure, text, note, interval_text(study.runs, what))
    if style.current().is_paper:
        return
    more = figure.get_suptitle().count("\n") + 1 - NUM_LINES
    figure.set_figheight(figure.get_figheight() + max(0, more) * 1.2 * style.SMALL_PT / 72)  # the panels keep theirs


def interval_text(runs: pd.DataFrame, what: str = "final NLL in nats") -> str:
    """How far an arm's mean final value is known: its 95 % interval over seeds, the noise of a run pooled over arms."""
    values = []
    for _, inside in runs.groupby(["panel", "arm"], sort=False):
        try:
            values.append(at_best_lr(inside, str(inside["arm"].iloc[0])).to_numpy(float))
        except TooLittle:  # the note names it
            continue
    sd, dof = pooled_sd(values)
    if not dof:
        return f"No 95 % interval of the {what}: no arm has two seeds at its best LR"
    counts = sorted({len(inside) for inside in values}, reverse=True)
    half = [Estimate(0.0, sd / math.sqrt(count), dof).interval()[1] for count in (counts[0], counts[-1])]
    width = " to ± ".join(dict.fromkeys(f"{size:.2g}" for size in half))
    noise = f"SD of a run {sd:.2g}, pooled over arms"
    return f"95 % interval of an arm's mean {what}, at its best LR: ± {width} (Student's t, {noise})"


def note(axes: Axes, *texts: str) -> Axes:
    """The panel, with what the caption says of it as its label (``axes.get_label()``), which is not drawn."""
    axes.set_label("; ".join(filter(None, texts)))
    return axes


def attempt(draw: Callable[..., Axes], study: StudyRuns, axes: Axes, **options: Any) -> str:
    """The note of the panel that ``draw`` makes; where the runs do not suffice, the reason stands in it instead."""
    try:
        return str(draw(study, axes, **options).get_label())
    except TooLittle as error:
        say(axes, f"not yet: {error}")
        return ""


def say(axes: Axes, text: str) -> None:
    """Words in the middle of a panel that has nothing to show."""
    if not axes.has_data():  # then the numbers along its axes mean nothing
        axes.set(xticks=[], yticks=[])
    axes.annotate(textwrap.fill(text, 30), (0.5, 0.5), xycoords="axes fraction", ha="center", va="center",
                  fontsize=style.SMALL_PT, bbox=PAPER)  # fmt: skip


def say_left_of(axes: Axes, x: float, text: str) -> None:
    """Words at the top of a panel, to the left of a vertical line at ``x``."""
    axes.annotate(text, (x, 0.985), xycoords=("data", "axes fraction"), xytext=(-3, 0), textcoords="offset points",
                  ha="right", va="top", fontsize=style.SMALL_PT, bbox=PAPER)  # fmt: skip


def whiskers(axes: Axes, table: pd.DataFrame, x: str, y: str, look: dict[str, Any], **more: Any) -> None:
    """Points at columns ``x`` and ``y`` with bars from column ``low`` to ``high``; a NaN end leaves the bar away."""
    spread = np.array([table[y] - table["low"], table["high"] - table[y]], dtype=float)
    axes.errorbar(table[x], table[y], yerr=spread, capsize=2, elinewidth=0.9, **{**look, **more})


def value_ticks(axes: Axes, values: Sequence[float], which: str = "x") -> None:
    """Logarithmic axis that is labelled at the settings there are (ranks, widths, batch sizes) and nowhere else."""
    low, high = min(values), max(values)
    pad = (high / low) ** 0.12 if high > low else 1.5
    getattr(axes, f"set_{which}lim")(low / pad, high * pad)
    style.log_axis(axes, which)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def undecided(axes: Axes, at: pd.Series, look: dict[str, Any], row: int = 0) -> None:
    """Crosses just above the x axis where there is no number; ``row`` 1, 2, ... stand above row 0."""
    if at.empty:  # an empty unclipped line has no extent, which the layout cannot take
        return
    axes.plot(at, np.full(len(at), 0.03 + 0.045 * row), transform=axes.get_xaxis_transform(), linestyle="none",
              marker="x", markersize=5, color=look["color"], clip_on=False, zorder=5)  # fmt: skip
