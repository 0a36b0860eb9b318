"""Bits of random facts stored against adapter parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import parts
from analysis.judges.common import TooLittle
from analysis.judges.gaps import stored_bits
from analysis.results import StudyRuns

FEW = 1e-3
"""Share of all bits below which a run has no place on the log axis; it stands at the lower edge."""


def figure(study: StudyRuns, caption: str) -> Figure:
    """One point per arm and seed, log-log.

    Args: the study ``capacity``; where its runs come from: what, model, data, scale.
    """
    arms = parts.expected_arms(study)
    looks = parts.arm_looks(arms)
    fig, [[axes]] = style.panels(height=3.7, paper_heights=(2.4,))
    few = parts.attempt(draw, study, axes)
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **{**looks[arm], "linestyle": "none"}) for arm in arms]
    per = study.settings["bits_per_parameter_paper"]
    for line, words in (("--", f"{per:g} bits per parameter (the post)"), (":", "all bits there are")):
        handles.append(Line2D([], [], color=parts.PAPER_COLOR, linestyle=line, label=words))
    style.legend(fig, handles, 4, handlelength=2.2)
    parts.caption(fig, caption, study, "one mark per seed at the arm's best LR",
                  "bits stored: all bits less the NLL of all facts in bits", few)  # fmt: skip
    return fig


def draw(study: StudyRuns, axes: Axes) -> Axes:
    """Marks, the post's line and the total. Notes which arms have next to nothing stored, or no usable run."""
    looks = parts.study_looks(study)
    axes.set_xlabel("trained parameters")
    axes.set_ylabel("bits stored")
    table, failed = bits(study)
    if table.empty:
        raise TooLittle("no finished run")
    total = float(table["total_bits"].max())
    per = float(study.settings["bits_per_parameter_paper"])
    floor = FEW * total
    enough = table[table["bits"] > floor]
    x = table["num_trainable"].to_numpy(float)
    y = np.append(enough["bits"].to_numpy(float), [total, per * x.min()])
    axes.set_xlim(x.min() / 1.5, x.max() * 1.5)
    axes.set_ylim(y.min() / 2, total * 1.6)
    style.log_axis(axes)
    style.log_axis(axes, "y")
    span = np.geomspace(x.min() / 1.5, x.max() * 1.5, 50)
    axes.plot(span, per * span, color=parts.PAPER_COLOR, linestyle="--", linewidth=1.0, zorder=1)
    axes.axhline(total, color=parts.PAPER_COLOR, linestyle=":", linewidth=1.2, zorder=1)
    for arm, rows in table.groupby("arm", sort=False):
        look = {**looks[str(arm)], "linestyle": "none", "markersize": 5.5, "alpha": 0.85}
        above = rows[rows["bits"] > floor]
        axes.plot(above["num_trainable"], above["bits"], **look)
        below = rows[rows["bits"] <= floor]
        if len(below):  # hollow, on the lower edge
            axes.plot(below["num_trainable"], np.full(len(below), 0.0), transform=axes.get_xaxis_transform(),
                      **{**look, "fillstyle": "none", "clip_on": False})  # fmt: skip
    few = list(dict.fromkeys(table.loc[table["bits"] <= floor, "arm"]))
    names = style.arm_labels(list(looks))
    notes = (
        [f"hollow on the axis: less than {100 * FEW:g} % of all bits ({', '.join(names[arm] for arm in few)})"]
        if few
        else []
    )
    return parts.note(axes, *notes, *failed)


def bits(study: StudyRuns) -> tuple[pd.DataFrame, list[str]]:
    """``gaps.stored_bits`` arm by arm, and the reasons for the arms that it cannot give."""
    tables, failed = [], []
    for arm in dict.fromkeys(study.runs["arm"]):
        try:
            tables.append(stored_bits(replace(study, runs=study.runs[study.runs["arm"] == arm])))
        except TooLittle as error:
            failed.append(str(error))
    return (pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()), failed
