"""The learning rates a search may run: those of the arm's own grid, and more beyond its ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.lr_grid import round_lr

REACH_DECADES = 4
"""How far beyond the study's grid a minimum is looked for (a guess; an LR a decade off is already unusual)."""
TYPED = math.log(1.05)
"""Grids are typed with two digits, which moves a step by up to a few percent."""
HALF_DECADE = math.sqrt(10)


@dataclass(frozen=True)
class Rungs:
    """LRs in ascending order; a rung is an index into them."""

    lrs: tuple[float, ...]

    def index(self, lr: float) -> int:
        """The rung nearest to ``lr``."""
        return int(np.argmin(np.abs(np.log(self.lrs) - math.log(lr))))

    def away(self, k: int, factor: float) -> int:
        """The rung nearest to ``factor`` times rung ``k``: another one, except at the last."""
        found = self.index(self.lrs[k] * factor)
        if found == k:
            found += 1 if factor > 1 else -1
        return min(max(found, 0), len(self.lrs) - 1)


def lay(grid: Sequence[float], gap: float = math.inf, decades: float = REACH_DECADES) -> Rungs:
    """The LRs of ``grid``, what is needed between them for steps of ``gap`` at most, and ``decades`` beyond its ends.

    Inside the grid's ends without a ``gap`` they are the grid itself, so that every run is one of the study's.
    """
    x = np.log(sorted(set(grid)))
    step = min(float(np.median(np.diff(x))), math.log(gap))
    lrs = {float(lr) for lr in grid}
    for low, high in zip(x[:-1], x[1:], strict=True):
        parts = max(1, math.ceil((high - low - TYPED) / math.log(gap))) if math.isfinite(gap) else 1
        lrs |= {round_lr(math.exp(low + (high - low) * n / parts)) for n in range(1, parts)}
    for n in range(1, round(decades * math.log(10) / step) + 1):
        lrs |= {round_lr(math.exp(x[0] - n * step)), round_lr(math.exp(x[-1] + n * step))}
    return Rungs(tuple(sorted(lrs)))
