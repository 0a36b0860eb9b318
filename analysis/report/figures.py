"""A study's figures for a page: the image, what it shows in words, and the rows behind it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.arms import Arm, arm_table
from analysis.figures.__main__ import caption_of, draw
from analysis.page import data_uri
from analysis.results import StudyRuns

ALONG_STEPS = frozenset({"rank", "curves", "early", "length", "width", "batch", "rl-curves", "rl-tools", "experts"})
"""Figures that read more of a run than its end."""
LINE_IN = 1.2 * style.SMALL_PT / 72


@dataclass(frozen=True)
class Download:
    """A file inside the page."""

    file: str
    text: str
    href: str


@dataclass(frozen=True)
class Drawing:
    """One figure. ``what`` says where its runs come from, ``note`` n, the interval and the marks."""

    id: str
    image: str
    width: int
    height: int
    alt: str
    what: str
    note: str
    downloads: tuple[Download, ...]


def drawings(study: StudyRuns, manifest: Mapping[str, Any], scale: str, arms: Sequence[Arm]) -> list[Drawing]:
    """Every figure of a study, redrawn from its runs."""
    what = caption_of(manifest, scale, study.runs, len(study.points))
    made = []
    for name, figure in draw(study, manifest, scale, arms).items():
        stem = f"{study.name}-{name}"
        said = " ".join(figure.get_suptitle().split())
        note = said.removeprefix(" ".join(what.split())).strip()
        alt = f"{what.partition(':')[0]}. {words(figure)}"
        image, width, height = picture(figure)
        files = [csv(f"{stem}-runs.csv", "The runs behind it", runs_behind(study))]
        if name.removesuffix("-adaptive") in ALONG_STEPS:
            files.append(csv(f"{stem}-curves.csv", "Their curves", curves_behind(study)))
        if arms:
            files.append(csv(f"{stem}-optima.csv", "LR* of each arm", arm_table(arms)))
        made.append(Drawing(f"figure-{stem}", image, width, height, alt, what, note, tuple(files)))
    return made


def picture(figure: Figure) -> tuple[str, int, int]:
    """(SVG as a data URI, width, height in CSS pixels) without the title, which stands beside it as text."""
    lines = figure.get_suptitle().count("\n") + 1
    figure.suptitle("")
    figure.set_figheight(figure.get_figheight() - lines * LINE_IN)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata=style.NO_METADATA["svg"])
    width, height = figure.get_size_inches() * 96
    return data_uri("image/svg+xml", file.getvalue()), round(width), round(height)


def words(figure: Figure) -> str:
    """What is drawn against what, and for which arms, for a reader who does not see it."""
    said = [text for text in map(_axes_said, figure.axes) if text]
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    shown = dict.fromkeys(text.get_text() for legend in legends for text in legend.get_texts())
    many = f"{len(said)} panels: " if len(said) > 1 else ""
    return " ".join(f"{many}{'; '.join(dict.fromkeys(said))}. Shown: {'; '.join(shown)}.".split())


def _axes_said(axes: Axes) -> str:
    x, y, title = axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left") or axes.get_title()
    if x and title and not y:  # titled with what it shows, or a row for each arm
        return f"{title}, along {x}"
    return (f"{title}: " if title else "") + " against ".join(filter(None, (y, x)))


def runs_behind(study: StudyRuns) -> pd.DataFrame:
    """One row per expected run; those without a result have no outcome and no value."""
    told = ["run_id", "outcome", "step", "value", "base", "metric.num_trainable", "metric.time.total_s"]
    ends = study.runs[[column for column in told if column in study.runs]]
    table = study.points[["run_id", "panel", "arm", "rank", "lr", "seed"]].merge(ends, on="run_id", how="left")
    return table.rename(columns=lambda name: str(name).removeprefix("metric.").removeprefix("time."))


def curves_behind(study: StudyRuns) -> pd.DataFrame:
    """One row per run and step at which the study's value was recorded."""
    value = f"metric.{study.settings.get('value', 'test/nll_nats')}"
    held_out = [c for c in ("metric.test/nll_nats", "metric.test/reward") if c in study.curves]
    kept = list(dict.fromkeys(c for c in (value, *held_out) if c in study.curves and study.curves[c].notna().any()))
    experts = [c for c in study.curves if str(c).startswith("metric.experts/")]
    rows = study.curves.dropna(subset=[*kept, *experts], how="all") if kept or experts else study.curves.iloc[:0]
    names = study.runs[["run_id", "panel", "arm", "lr", "seed"]]
    table = names.merge(rows[["run_id", "step", *kept, *experts]], on="run_id").drop(columns="run_id")
    return table.rename(columns=lambda name: str(name).removeprefix("metric."))


def csv(file: str, text: str, table: pd.DataFrame) -> Download:
    """A table as a download; its link says how many rows it has."""
    content = table.to_csv(index=False, float_format="%.8g").encode()
    return Download(file, f"{text} (CSV, {len(table):,} row{'s' * (len(table) != 1)})", data_uri("text/csv", content))
