"""One look for all figures: colour-blind-safe, distinct in grey, readable in print, the same bytes twice."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
NO_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
}


def use() -> None:
    """Set the style for this process, on a backend that needs no display."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update(RC)


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
    """How many columns of the longest label fit the text width (7.5 pt type, line sample and gap 0.7 in)."""
    longest_in = 0.7 + 0.06 * max(map(len, labels), default=1)
    return max(1, min(len(labels), int(WIDTH_IN / longest_in)))


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


def caption(figure: Figure, title: str, note: str) -> None:
    """Title and note above the figure, broken at the text width (125 characters of 7 pt on 7 in)."""
    text = "\n".join(line for part in (title, note) for line in textwrap.wrap(part, 125))
    figure.suptitle(text, fontsize=SMALL_PT, x=0.01, ha="left")


def save(figure: Figure, stem: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write PNG, SVG and PDF without dates or versions: equal data, equal bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in formats:
        path = stem.parent / f"{stem.name}.{kind}"
        figure.savefig(path, metadata=NO_METADATA[kind])
        paths.append(path)
    return paths
