"""One look for all figures: colour-blind-safe, distinct in grey, readable in print, the same bytes twice.

Two styles: ``screen`` is seven inches wide, panels side by side, title and note on the figure; ``paper`` is one column
wide, panels lettered and one below the other, title and note in a text file beside it, in vector formats only.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

WIDTH_IN = 7.0
"""Full text width of a paper; nothing is set below 7 pt at this size."""
SMALL_PT = 7.0
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "h", "p")
RC: dict[str, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.hashsalt": "lora-vs-full",  # else every redraw has other ids
    "svg.fonttype": "path",  # the reader's machine may lack the font
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}
UNEMBED = "-unembed"
FORMATS = ("png", "svg", "pdf")
VECTOR = ("pdf", "svg")
"""Those of a paper."""
COLUMN_IN = 3.3
"""Width of one column of a paper; nothing is set below 6.5 pt at this size."""


@dataclass(frozen=True)
class Style:
    """What the styles differ in, with the average width of a character and that of a legend's sample and gaps."""

    name: str
    width_in: float
    character_in: float
    sample_in: float
    rc: dict[str, Any]

    @property
    def is_paper(self) -> bool:
        return self.name == "paper"


SCREEN = Style("screen", WIDTH_IN, 0.06, 0.7, {})
PAPER = Style("paper", COLUMN_IN, 0.056, 0.5, {
    "font.size": 7, "axes.labelsize": 7, "axes.titlesize": 7, "legend.fontsize": 7, "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5, "lines.linewidth": 1.0, "lines.markersize": 3.5,
})  # fmt: skip
STYLES = {style.name: style for style in (SCREEN, PAPER)}
_current = SCREEN
NO_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
}


def use(name: str = "screen") -> None:
    """Set the style for this process, on a backend that needs no display. Raises ValueError for an unknown one."""
    global _current
    if name not in STYLES:
        raise ValueError(f"style: {name!r} is not allowed; one of {', '.join(STYLES)}")
    _current = STYLES[name]
    matplotlib.use("Agg")
    matplotlib.rcParams.update(RC | _current.rc)


def current() -> Style:
    """The style that ``use`` has set for this process."""
    return _current


def arm_looks(arms: Sequence[str], reference: str = "full") -> dict[str, dict[str, Any]]:
    """Line properties per arm: the reference black, LoRA arms along viridis by rank, one marker each.

    Viridis is ordered in lightness too, so the ranks stay in order when printed in grey.
    """
    ranked = [arm for arm in dict.fromkeys(arms) if arm != reference]
    looks: dict[str, dict[str, Any]] = {reference: {"color": "black", "marker": "o", "linewidth": 1.6}}
    for k, arm in enumerate(ranked):
        shade = 0.88 - 0.70 * (k / max(1, len(ranked) - 1))  # rank 1 lightest; the darkest stays apart from black
        looks[arm] = {"color": colormaps["viridis"](shade), "marker": MARKERS[k % len(MARKERS)]}
    return looks


def arm_label(arm: str) -> str:
    """``full fine-tuning`` or ``LoRA rank 4 (mlp)``."""
    tiny = re.fullmatch(r"tiny(\d+)(-tied)?", arm)
    if tiny:
        return f"TinyLoRA, {tiny[1]} " + ("in all" if tiny[2] else "per matrix")
    match = re.fullmatch(r"r(\d+)(?:-(.*))?", arm)
    if not match:
        return "full fine-tuning" if arm == "full" else arm
    return f"LoRA rank {match[1]}" + (f" ({match[2].replace('-', ', ')})" if match[2] else "")


def arm_labels(arms: Sequence[str], reference: str = "full") -> dict[str, str]:
    """Legend text per arm; the unembedding is named only where the LoRA arms differ in it."""
    lora = [arm for arm in arms if arm != reference]
    alike = bool(lora) and all(arm.endswith(UNEMBED) for arm in lora)
    return {arm: arm_label(arm.removesuffix(UNEMBED) if alike else arm) for arm in arms}


def legend_columns(labels: Sequence[str]) -> int:
    """How many columns of the longest label fit the width of the figure."""
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    longest_in = _current.sample_in + _current.character_in * longest
    return max(1, min(len(labels), int(_current.width_in / longest_in)))


def panels(
    rows: int = 1,
    columns: int = 1,
    height: float = 3.6,
    *,
    paper_heights: Sequence[float] = (1.9,),
    paper_columns: int = 1,
    by_column: bool = False,
    **options: Any,
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, an array of (rows, columns).

    On a screen the figure has that height and takes the options of ``Figure.subplots``. In a paper the panels stand one
    below the other, or in ``paper_columns``, row by row or ``by_column``, with ``paper_heights`` in turn (inches), and
    panels that share their y axis in a row go on sharing it.
    """
    if not _current.is_paper:
        figure = Figure(figsize=(_current.width_in, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options)
    lines = -(-rows * columns // paper_columns)
    heights = [paper_heights[k % len(paper_heights)] for k in range(lines)]
    figure = Figure(figsize=(_current.width_in, sum(heights)), layout="constrained")
    stacked = figure.subplots(lines, paper_columns, squeeze=False, height_ratios=heights).ravel()
    for unused in stacked[rows * columns :]:
        unused.remove()
    used = stacked[: rows * columns]
    grid = used.reshape(columns, rows).T if by_column else used.reshape(rows, columns)
    for first, *others in grid if options.get("sharey") else ():
        for axes in others:
            axes.sharey(first)
    return figure, grid


def place(axes: Axes | np.ndarray, words: str) -> str:
    """What a caption calls a panel, or several: ``words`` on a screen, their letters in a paper."""
    if not _current.is_paper:
        return words
    chosen = np.ravel(np.asarray(axes, dtype=object))
    return " and ".join(f"({_letter(panel)})" for panel in chosen)


def _letter(axes: Axes) -> str:
    """a to z, then aa, ab, ..."""
    round_, k = divmod(axes.figure.axes.index(axes), 26)
    return (ascii_lowercase[round_ - 1] if round_ else "") + ascii_lowercase[k]


def legend(figure: Figure, handles: Sequence[Artist], ncols: int, **options: Any) -> Legend:
    """The figure's legend, below its panels. In a paper as many columns as fit and long labels broken."""
    if not _current.is_paper:
        return figure.legend(handles=handles, loc="outside lower center", ncols=ncols, **options)
    longest = _characters(_current.width_in - _current.sample_in)
    labels = [textwrap.fill(str(handle.get_label()), longest) for handle in handles]
    drawn = figure.legend(handles, labels, loc="outside lower center", ncols=min(ncols, legend_columns(labels)),
                          columnspacing=1.2, labelspacing=0.35, **options)  # fmt: skip
    height = drawn.get_window_extent(FigureCanvasAgg(figure).get_renderer()).height / figure.dpi
    figure.set_figheight(figure.get_figheight() + height)  # the panels keep theirs
    return drawn


def _characters(inches: float) -> int:
    return max(8, int(inches / _current.character_in))


def log_axis(axes: Axes, which: str = "x", *, most: int = 7) -> None:
    """Logarithmic axis with at most ``most`` labels at round numbers inside the current limits."""
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(round_ticks(low, high, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axis.set_minor_formatter(NullFormatter())


def round_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers of one series (1-2-5, 1-3 or 1 of every k-th decade) within [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = []
    for mantissas, stride in (((1, 2, 3, 5, 7), 1), ((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
        values = [float(f"{m}e{e}") for e in range(first, last + 1, stride) for m in mantissas]
        ticks = [v for v in values if low <= v <= high]
        if len(ticks) <= most:
            break
    return ticks


def number_text(value: float) -> str:
    """Short: 3e-4, 1e-3 below 0.1; plain from there to 99999."""
    if 0.1 <= value < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def caption(figure: Figure, title: str, note: str, interval: str = "") -> None:
    """Title and note above the figure, broken at the text width (125 characters of 7 pt on 7 in).

    In a paper they are the figure's own label, which ``save`` writes to a text file, with a sentence on the
    ``interval`` of what has none in the figure; the panels get their letters.
    """
    if _current.is_paper:
        figure.set_label(" ".join(f"{part}." for part in (title, note, interval) if part))
        _letter_panels(figure)
        return
    text = "\n".join(line for part in (title, note) for line in textwrap.wrap(part, 125))
    figure.suptitle(text, fontsize=SMALL_PT, x=0.01, ha="left")


def _letter_panels(figure: Figure) -> None:
    """Letter every panel, name the axes that a neighbour named for it, break what is longer than its panel."""
    for axes in figure.axes:
        spec = axes.get_subplotspec()
        assert spec is not None  # made by panels
        grid = spec.get_gridspec()
        heights = np.asarray(grid.get_height_ratios(), dtype=float)  # inches
        across = _characters(figure.get_figwidth() / grid.ncols - 0.4)  # less the tick labels
        up = _characters(heights[spec.rowspan.start] - 0.3)
        named = [other.get_ylabel() for other in axes.get_shared_y_axes().get_siblings(axes) if other.get_ylabel()]
        axes.set_ylabel(_broken(axes.get_ylabel() or next(iter(named), ""), up))
        axes.set_xlabel(_broken(axes.get_xlabel(), across))
        letter = f"({_letter(axes)}) " if len(figure.axes) > 1 else ""
        axes.set_title(_broken(letter + axes.get_title(loc="left"), across), loc="left", fontsize=SMALL_PT)


def _broken(text: str, characters: int) -> str:
    return "\n".join(textwrap.wrap(text, characters)) if max(map(len, text.split("\n"))) > characters else text


def save(figure: Figure, stem: Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write the style's formats without dates or versions: equal data, equal bytes. In a paper the caption too."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    if figure.get_label():
        paths.append(stem.parent / f"{stem.name}.txt")
        paths[0].write_text("\n".join(textwrap.wrap(str(figure.get_label()), 100)) + "\n")
    for kind in formats or (VECTOR if _current.is_paper else FORMATS):
        path = stem.parent / f"{stem.name}.{kind}"
        figure.savefig(path, metadata=NO_METADATA[kind])
        paths.append(path)
    return paths
