"""LR ratio against model width and against alpha, beside what three accounts of it say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import parts
from analysis.judges import rates
from analysis.judges.common import TooLittle
from analysis.results import StudyRuns

ALPHA = 32.0
"""The protocol's, at which widths are compared."""
_POINTS: dict[str, Any] = {"color": "black", "marker": "o", "linestyle": "none", "zorder": 4}
_LINES = {"constant": "--", "square root of width": "-.", "width / (2 alpha)": ":"}


def figure(study: StudyRuns, caption: str) -> Figure:
    """Ratio against width on the left, against alpha at the smallest width on the right.

    Args: the study ``width``; where its runs come from: what, model, data, scale.
    """
    fig, [[left, right]] = style.panels(1, 2, 3.9, sharey=True, width_ratios=(1.35, 1))
    table = ratios(study)
    notes = [
        parts.attempt(draw, study, axes, table=table) for draw, axes in ((draw_widths, left), (draw_alphas, right))
    ]
    _limits(left, right, table)
    left.set_ylabel("LR* ratio of LoRA to full fine-tuning")
    handles, _ = left.get_legend_handles_labels()
    if handles:
        style.legend(fig, handles, 1, handlelength=2.8)
    read_at = f"read off at {study.settings['read_at']} steps"
    crosses = "; crosses: undecided" if len(table) and table["ratio"].isna().any() else ""
    parts.caption(fig, caption, study, read_at, "whiskers: 95 % interval (bootstrap over seeds, at least half a "
                  f"grid step to each side){crosses}; excluded: outside the 95 % interval of the slope "
                  "of log ratio on log width, or of the ratio at a width", *dict.fromkeys(notes))  # fmt: skip
    return fig


def ratios(study: StudyRuns) -> pd.DataFrame:
    """``rates.ratio_by_width``; empty without a run."""
    return rates.ratio_by_width(study) if len(study.runs) else pd.DataFrame()


def draw_widths(study: StudyRuns, axes: Axes, table: pd.DataFrame | None = None) -> Axes:
    """Measured ratios at the protocol's alpha and the hypotheses as lines. Notes slope and undecided widths.

    ``table``: that of ``ratios``, if it is there already.
    """
    table = ratios(study) if table is None else table
    asked = sorted({rates.width_of(str(name)) for name in study.points["config.model.name"]})
    parts.value_ticks(axes, asked)
    axes.set_xlabel("model width")
    axes.set_title(f"alpha {ALPHA:g}", loc="left")
    known = table[(table["alpha"] == ALPHA) & table["ratio"].notna()] if len(table) else table
    verdicts, slope_text = judge_accounts(table, float(study.settings["ratio_paper"]))
    span = np.geomspace(asked[0] / 1.15, asked[-1] * 1.15, 50)
    for name, (line, words) in _accounts(study, known).items():
        axes.plot(span, line(span), color=parts.PAPER_COLOR, linestyle=_LINES[name], linewidth=1.1, zorder=1,
                  label=f"{words}: {verdicts.get(name, 'not judged')}")  # fmt: skip
    if table.empty:
        raise TooLittle("no width with both LoRA and full fine-tuning")
    parts.whiskers(axes, known, "width", "ratio", _POINTS, label="measured")
    unknown = table[(table["alpha"] == ALPHA) & table["ratio"].isna()]
    parts.undecided(axes, unknown["width"], _POINTS)
    return parts.note(axes, slope_text, *(f"width {row.width} is undecided: {row.why}" for row in unknown.itertuples()))


def judge_accounts(table: pd.DataFrame, ratio_paper: float) -> tuple[dict[str, str], str]:
    """(excluded or not and by what, by the name of each hypothesis; the slope, or why there is none)."""
    if table.empty:
        return {}, ""
    levels = rates.excluded_levels(table, ratio_paper, ALPHA)
    by_level = {name: f"by its value at {', '.join(map(str, at))}" for name, at in levels.items() if at}
    try:
        slope = rates.width_slope(table, ALPHA)
    except TooLittle as error:
        return {name: f"excluded {words}" for name, words in by_level.items()}, f"no slope: {error}"
    low, high = slope.interval()
    verdicts = {}
    for name, is_out in rates.excluded(slope).items():
        reasons = [*(["by the slope"] if is_out else []), *([by_level[name]] if name in by_level else [])]
        verdicts[name] = f"excluded {' and '.join(reasons)}" if reasons else "not excluded"
    return verdicts, f"slope {slope.value:+.2f} [{low:.2f}, {high:.2f}]"


def _accounts(study: StudyRuns, known: pd.DataFrame) -> dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]]:
    """Ratio as a function of width (W,) and its legend, by the names of ``rates.HYPOTHESES``."""
    constant = float(study.settings["ratio_paper"])
    accounts: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
        "constant": (lambda width: np.full(len(width), constant), f"constant (the post's {constant:g})"),
        "width / (2 alpha)": (lambda width: width / (2 * ALPHA), "width / (2 alpha)"),
    }
    if len(known):
        middle = float(np.exp(np.log(known["width"]).mean()))
        ratio = float(np.exp(np.log(known["ratio"]).mean()))
        words = "square root of width (through the measured mean)"
        accounts["square root of width"] = (lambda width: ratio * np.sqrt(width / middle), words)
    return accounts


def draw_alphas(study: StudyRuns, axes: Axes, table: pd.DataFrame | None = None) -> Axes:
    """Ratios of the smallest width's arms by alpha, and the prediction width / (2 alpha). Notes what is undecided."""
    table = ratios(study) if table is None else table
    lora = study.points[study.points["rank"] > 0]
    width = min(rates.width_of(str(name)) for name in lora["config.model.name"])
    small = lora[[rates.width_of(str(name)) == width for name in lora["config.model.name"]]]
    asked = sorted(set(small["config.method.alpha"].astype(float)))
    parts.value_ticks(axes, asked)
    axes.set_xlabel("alpha")
    axes.set_title(f"width {width}", loc="left")
    span = np.geomspace(asked[0] / 1.15, asked[-1] * 1.15, 50)
    axes.plot(span, width / (2 * span), color=parts.PAPER_COLOR, linestyle=_LINES["width / (2 alpha)"], zorder=1)
    rows = table[table["width"] == width] if len(table) else table
    if rows.empty:
        raise TooLittle(f"no ratio at width {width}")
    parts.whiskers(axes, rows[rows["ratio"].notna()], "alpha", "ratio", _POINTS)
    unknown = rows[rows["ratio"].isna()]
    parts.undecided(axes, unknown["alpha"], _POINTS)
    return parts.note(axes, *(f"alpha {row.alpha:g} is undecided: {row.why}" for row in unknown.itertuples()))


def _limits(left: Axes, right: Axes, table: pd.DataFrame) -> None:
    """Both panels share them: all that is measured and every line."""
    lines = [line for axes in (left, right) for line in axes.lines if line.get_transform() == axes.transData]
    values = [float(y) for line in lines for y in np.ravel(line.get_ydata()) if np.isfinite(y)]
    values += [v for column in ("low", "high") for v in (table[column].dropna() if len(table) else [])]
    if values:
        left.set_ylim(min(values) / 1.6, max(values) * 1.3)
    style.log_axis(left, "y", most=6)
