"""The post's Figure 3: batch size. Learning curves at equal examples, final losses, and the gap to full fine-tuning."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import FULL, VALUE
from analysis.figures import parts
from analysis.judges.common import TooLittle, at_best_lr, gap, grid_of
from analysis.results import StudyRuns

BATCH = "config.optim.batch_size"
SHOWN_FRAC = 0.05
"""Curves are shown from a twentieth of the examples on; the fall of the first would hide the arms."""
_MARKERS = ("o", "s", "^", "D", "v", "P")


def figure(study: StudyRuns, caption: str) -> Figure:
    """Curves on the left, final losses in the middle, gaps with 95 % intervals on the right.

    Args: the study ``batch``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[left, middle, right]] = style.panels(1, 3, 3.6, width_ratios=(1.35, 1, 1))
    drawn = ((draw_curves, left), (draw_finals, middle), (draw_gaps, right))
    notes = [parts.attempt(draw, study, axes) for draw, axes in drawn]
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms]
    style.legend(fig, handles, min(5, len(handles)), handlelength=2.2)
    parts.caption(fig, caption, study, "each batch size and arm at its best LR of its own sweep",
                  f"{style.place(left, 'left')}: mean over seeds, from {100 * SHOWN_FRAC:g} % of the examples on",
                  f"{style.place(middle, 'middle')}: mean, whiskers lowest and highest seed",
                  f"{style.place(right, 'right')}: whiskers 95 % interval of the paired difference",
                  *notes)  # fmt: skip
    return fig


def batch_sizes(study: StudyRuns) -> list[int]:
    """Those that the study asks for, smallest first."""
    return sorted(int(batch) for batch in study.points[BATCH].unique())


def batch_looks(batches: list[int]) -> dict[int, dict[str, Any]]:
    """Line properties per batch size: colours of another map than the ranks', ordered in lightness too."""
    shades = [0.75 - 0.65 * k / max(1, len(batches) - 1) for k in range(len(batches))]
    return {batch: {"color": colormaps["plasma"](shade), "marker": _MARKERS[k % len(_MARKERS)], "markersize": 3}
            for k, (batch, shade) in enumerate(zip(batches, shades, strict=True))}  # fmt: skip


def draw_curves(study: StudyRuns, axes: Axes) -> Axes:
    """Held-out NLL against examples seen of full and the highest rank."""
    shown = []
    arms, looks = parts.expected_arms(study), batch_looks(batch_sizes(study))
    for batch in looks:
        for arm, line in ((FULL, "-"), (arms[-1], "--")):
            try:
                table = best_curve(study, batch, arm)
            except TooLittle:  # the caption names arms without a usable run
                continue
            axes.plot(table["examples"], table["nll"], linestyle=line, **looks[batch])
            shown.append(table)
    axes.set_xlabel("examples seen")
    axes.set_ylabel(parts.NLL_LABEL.replace(" (", "\n("))
    if not shown:
        raise TooLittle("no finished run")
    table = pd.concat(shown)
    late = table[table["examples"] >= SHOWN_FRAC * table["examples"].max()]
    height = float(late["nll"].max() - late["nll"].min()) or 1e-3
    axes.set_ylim(late["nll"].min() - 0.06 * height, late["nll"].max() + 0.3 * height)  # room for the legend
    axes.set_xlim(late["examples"].min() / 1.15, late["examples"].max() * 1.15)
    style.log_axis(axes, most=5)
    handles = [Line2D([], [], label=f"batch size {batch}", **look) for batch, look in looks.items()]
    for arm, line in ((FULL, "-"), (arms[-1], "--")):
        handles.append(Line2D([], [], color="#555555", linestyle=line, label=style.arm_labels(arms)[arm]))
    axes.legend(handles=handles, loc="upper right", handlelength=2.4, labelspacing=0.3)
    return axes


def best_curve(study: StudyRuns, batch: int, arm: str) -> pd.DataFrame:
    """Mean over seeds at the LR that ends lowest: columns ``examples, nll``. Raises TooLittle without one."""
    runs = study.runs[study.runs[BATCH] == batch]
    chosen = runs[(runs["arm"] == arm) & (runs["lr"] == grid_of(runs, arm).idxmin())]
    column = f"metric.{VALUE}"
    rows = study.curves.loc[study.curves["run_id"].isin(set(chosen["run_id"])), ["step", column]].dropna()
    mean = rows[rows["step"] > 0].groupby("step")[column].mean()
    return pd.DataFrame({"examples": mean.index.to_numpy(float) * batch, "nll": mean.to_numpy()})


def draw_finals(study: StudyRuns, axes: Axes) -> Axes:
    """Final NLL by batch size and arm."""
    batches = batch_sizes(study)
    parts.value_ticks(axes, batches)
    axes.set_xlabel("batch size")
    axes.set_ylabel("final held-out NLL (nats)")
    drawn = 0
    for k, (arm, look) in enumerate(parts.study_looks(study).items()):
        rows = []
        for batch in batches:
            try:
                values = at_best_lr(study.runs[study.runs[BATCH] == batch], arm)
            except TooLittle:
                continue
            rows.append({"batch": batch * _aside(k), "nll": values.mean(), "low": values.min(), "high": values.max()})
        drawn += len(rows)
        if rows:
            parts.whiskers(axes, pd.DataFrame(rows), "batch", "nll", look)
    if not drawn:
        raise TooLittle("no finished run")
    return axes


def draw_gaps(study: StudyRuns, axes: Axes) -> Axes:
    """LoRA - full by batch size and rank, paired by seed. Notes what could not be compared."""
    batches = batch_sizes(study)
    parts.value_ticks(axes, batches)
    axes.set_xlabel("batch size")
    axes.set_ylabel("gap to full fine-tuning (nats)")
    axes.axhline(0, color="black", linewidth=0.7)
    failed = []
    drawn = 0
    for k, (arm, look) in enumerate(parts.study_looks(study).items()):
        rows = []
        for batch in batches if arm != FULL else []:
            try:
                found = gap(study.runs[study.runs[BATCH] == batch], arm, FULL).estimate
            except TooLittle as error:
                inside = study.runs[(study.runs[BATCH] == batch) & study.runs["value"].notna()]
                if {arm, FULL} <= set(inside["arm"]):  # else the caption names the arm as it is
                    failed.append(f"{batch}: {error}")
                continue
            low, high = found.interval()
            rows.append({"batch": batch * _aside(k), "gap": found.value, "low": low, "high": high})
        drawn += len(rows)
        if rows:
            parts.whiskers(axes, pd.DataFrame(rows), "batch", "gap", look)
    if not drawn:
        raise TooLittle("no batch size with both LoRA and full fine-tuning")
    return parts.note(axes, f"no gap at batch size {'; '.join(dict.fromkeys(failed))}" if failed else "")


def _aside(k: int) -> float:
    """Factor that puts the marks of arm ``k`` beside those of the others."""
    return float(1.08 ** (k - 1))
