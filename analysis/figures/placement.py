"""Where the adapter sits: the final loss of every placement, and the LR bowls at equal parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.arms import find_arms
from analysis.figures import parts
from analysis.figures.lr import TIMES, draw_bowls
from analysis.judges.common import TooLittle, at_best_lr
from analysis.judges.gaps import dense_and_moe, matched
from analysis.results import StudyRuns

MODEL, PLACEMENT, UNEMBED = "config.model.name", "config.method.placement", "config.method.unembed"
LOOKS: dict[str, dict[str, Any]] = {
    "attn": {"color": colormaps["viridis"](0.80), "marker": "^"},
    "mlp": {"color": colormaps["viridis"](0.48), "marker": "s"},
    "all": {"color": colormaps["viridis"](0.12), "marker": "D"},
}
"""The lighter, the fewer kinds of matrices are adapted."""
_WORDS = {"attn": "attn (attention)", "mlp": "mlp", "all": "all (both)"}


def figure(study: StudyRuns, caption: str) -> Figure:
    """One column per base: final losses above, bowls of the three placements at equal parameters below.

    Args: the study ``placement``; where its runs come from: what, model, data, scale.
    """
    models = bases(study)
    fig, grid = style.panels(2, max(1, len(models)), 5.9, by_column=True, height_ratios=(1.05, 1))
    notes = []
    for model, (top, bottom) in zip(models, grid.T, strict=False):
        top.set_title(model, loc="left")
        notes.append(parts.attempt(draw_finals, study, top, model=model))
        notes.append(parts.attempt(draw_equal, study, bottom, model=model))
    handles = [Line2D([], [], label=_WORDS[name], **look) for name, look in LOOKS.items()]
    for filled, words in ((True, "unembedding adapted too"), (False, "without it")):
        fill = "black" if filled else "white"
        handles.append(Line2D([], [], color="black", marker="o", linestyle="none", markerfacecolor=fill, label=words))
    style.legend(fig, handles, 5, handlelength=2.2)
    above, below = style.place(grid[0], "above"), style.place(grid[1], "below")
    parts.caption(fig, caption, study, f"{above}: each arm at its best LR, mark: mean, whiskers: lowest and highest "
                  "seed, in brackets the trained parameters with / without the unembedding",
                  f"{below}: at the top ▲ mean above the frame, {TIMES} a run diverged there; at the bottom LR* with "
                  "its 95 % interval", *notes)  # fmt: skip
    return fig


def bases(study: StudyRuns) -> list[str]:
    """Names of the base models that the study asks for, the dense one first."""
    names = [str(name) for name in dict.fromkeys(study.points[MODEL])]
    try:
        dense, moe = dense_and_moe(replace(study, runs=study.points))
    except TooLittle:
        return names
    return list(dict.fromkeys([dense, *([moe] if moe else []), *names]))


def draw_finals(study: StudyRuns, axes: Axes, model: str) -> Axes:
    """Final NLL of every arm of one base: a row per placement and rank, filled with the unembedding, hollow without."""
    points = study.points[study.points[MODEL] == model]
    runs = study.runs[study.runs[MODEL] == model]
    rows = sorted(set(points[[PLACEMENT, "rank"]].itertuples(index=False, name=None)),
                  key=lambda row: (list(LOOKS).index(row[0]), row[1]))  # fmt: skip
    for y, (placement, rank) in enumerate(rows):
        asked = points[(points[PLACEMENT] == placement) & (points["rank"] == rank)]
        absent = []
        for unembed in sorted(asked[UNEMBED].unique(), reverse=True):
            arm = str(asked.loc[asked[UNEMBED] == unembed, "arm"].iloc[0])
            try:
                values = at_best_lr(runs, arm)
            except TooLittle:
                absent.append("with the unembedding" if unembed else "without")
                continue
            at = y + (-0.14 if unembed else 0.14)
            fill = LOOKS[placement]["color"] if unembed else "white"
            spread = [[values.mean() - values.min()], [values.max() - values.mean()]]
            axes.errorbar(values.mean(), at, xerr=spread, capsize=2, elinewidth=0.9, markersize=5, linestyle="none",
                          markerfacecolor=fill, **LOOKS[placement])  # fmt: skip
        if absent:
            axes.annotate(f"no usable run {' and '.join(absent)}", (0.5, y + 0.14), va="center", ha="center",
                          xycoords=("axes fraction", "data"), fontsize=style.SMALL_PT, bbox=parts.PAPER)  # fmt: skip
    axes.set_yticks(range(len(rows)), [_row_label(runs, str(placement), int(rank)) for placement, rank in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if not axes.containers:  # then the numbers along the axis mean nothing
        axes.set_xticks([])
    axes.set_xlabel("final " + parts.NLL_LABEL)
    axes.grid(visible=False, axis="y")
    return axes


def _row_label(runs: pd.DataFrame, placement: str, rank: int) -> str:
    inside = runs[(runs[PLACEMENT] == placement) & (runs["rank"] == rank)]
    counts = inside.groupby(UNEMBED)["metric.num_trainable"].first().sort_index(ascending=False)
    sizes = " / ".join(count_text(int(count)) for count in counts)
    return f"{placement}, rank {rank}" + (f"\n({sizes})" if sizes else "")


def count_text(count: int) -> str:
    """``118 k``, ``1.2 M``, ``0.49 B``: three digits at most."""
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.1 * factor and (letter == "k" or count >= factor):
            return f"{count / factor:.3g} {letter}"
    return str(count)


def draw_equal(study: StudyRuns, axes: Axes, model: str) -> Axes:
    """NLL against LR of the three placements at equal parameters, with the unembedding. Notes what is missing."""
    runs = study.runs[study.runs[MODEL] == model]
    arms, absent = equal_arms(runs)
    chosen = runs[runs["arm"].isin(arms)]
    found = find_arms(chosen.assign(panel=""))
    draw_bowls(chosen, found, axes, {arm: LOOKS[placement] for arm, placement in arms.items()})
    axes.set_ylabel("final " + parts.NLL_LABEL.replace(" (", "\n("))
    ranks = {placement: int(chosen.loc[chosen["arm"] == arm, "rank"].iloc[0]) for arm, placement in arms.items()}
    listed = ", ".join(f"{placement} r{ranks[placement]}" for placement in LOOKS if placement in ranks)
    axes.set_title(f"equal parameters: {listed}", loc="left", fontsize=style.SMALL_PT + 0.5)
    return parts.note(axes, f"{model}: no usable run of {', '.join(absent)} at equal parameters" if absent else "")


def equal_arms(runs: pd.DataFrame) -> tuple[dict[str, str], list[str]]:
    """({arm: placement} with as many parameters as mlp at its lowest rank, placements without a usable run)."""
    usable = runs[runs["value"].notna()]
    arms: dict[str, str] = {}
    absent: list[str] = []
    mlp = matched(usable, "mlp", None, True)
    target = float(usable.loc[usable["arm"] == mlp, "metric.num_trainable"].iloc[0])
    for placement in LOOKS:
        try:
            arms[mlp if placement == "mlp" else matched(usable, placement, target, True)] = placement
        except TooLittle:
            absent.append(_WORDS[placement])
    return arms, absent
