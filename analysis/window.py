"""The usable range of learning rates of an arm: how far off the optimum still does most of the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.stats import Array

SHARE = 0.98
"""An LR is usable if its run makes at least this share of the best run's improvement over the base."""


@dataclass(frozen=True)
class Window:
    """Lowest and highest usable LR. An open side reaches the edge of the grid: the window is at least so wide."""

    low: float
    high: float
    open_low: bool
    open_high: bool

    @property
    def factor(self) -> float:
        """high / low."""
        return self.high / self.low


def usable_window(lr_L: Array, mean_L: Array, base: float, share: float = SHARE) -> Window | None:
    """The connected range of LRs around the best whose mean is at most best + (1 - share) (base - best).

    Between two LRs the mean is interpolated linearly in log LR. A diverged LR (mean not finite) bounds
    the window at the last LR that survived. None if nothing survives or the base is not improved on.

    Args:
        lr_L, mean_L: LRs, ascending, and the mean final loss at each, nats.
        base: loss of the untrained base, same units.
    """
    usable = np.isfinite(mean_L)
    if not usable.any():
        return None
    best = int(np.nanargmin(mean_L))
    if not mean_L[best] < base:
        return None
    limit = mean_L[best] + (1 - share) * (base - mean_L[best])
    x_L = np.log(lr_L)

    def edge(step: int) -> tuple[float, bool]:
        at = best
        while 0 <= at + step < len(x_L) and np.isfinite(mean_L[at + step]) and mean_L[at + step] <= limit:
            at += step
        beyond = at + step
        if not 0 <= beyond < len(x_L):
            return float(lr_L[at]), True
        if not np.isfinite(mean_L[beyond]):
            return float(lr_L[at]), False
        part = (limit - mean_L[at]) / (mean_L[beyond] - mean_L[at])
        return float(np.exp(x_L[at] + part * (x_L[beyond] - x_L[at]))), False

    (low, open_low), (high, open_high) = edge(-1), edge(1)
    return Window(low, high, open_low, open_high)
