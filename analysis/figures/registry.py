"""The figure of each study, by the ``figure`` field of its file; ``lr`` and ``curves`` need no entry."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from analysis.figures import batch, capacity, early, length, placement, rank, width
from analysis.results import StudyRuns

FIGURES: dict[str, Callable[[StudyRuns, str], Figure]] = {
    "rank": rank.figure,
    "length": length.figure,
    "width": width.figure,
    "batch": batch.figure,
    "placement": placement.figure,
    "early": early.figure,
    "capacity": capacity.figure,
}
