"""The figure of each study, by the ``figure`` field of its file; ``lr`` and ``curves`` need no entry."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from analysis.figures import (
    batch,
    capacity,
    early,
    length,
    parts,
    placement,
    rank,
    rl_bits,
    rl_curves,
    rl_lr,
    rl_tools,
    width,
)
from analysis.results import StudyRuns

Draw = Callable[[StudyRuns, str], Figure]


def _unless_unknown(draw: Draw) -> Draw:
    """``draw``, with an empty panel for a study whose manifest is older than its configurations and runs."""
    return lambda study, caption: parts.blank(study, caption) if study.points.empty else draw(study, caption)


FIGURES: dict[str, Draw] = {
    "rank": _unless_unknown(rank.figure),
    "length": _unless_unknown(length.figure),
    "width": _unless_unknown(width.figure),
    "batch": _unless_unknown(batch.figure),
    "placement": _unless_unknown(placement.figure),
    "early": _unless_unknown(early.figure),
    "capacity": _unless_unknown(capacity.figure),
    "rl-lr": _unless_unknown(rl_lr.figure),
    "rl-curves": _unless_unknown(rl_curves.figure),
    "rl-tools": _unless_unknown(rl_tools.figure),
    "rl-bits": _unless_unknown(rl_bits.figure),
}
