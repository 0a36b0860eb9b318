"""How narrow an interval a set of runs would give: the variance of a parabola's vertex, for planning only.

Near its vertex v a bowl is y = y0 + c (x - v)^2, x = log LR. Least squares over LRs x_l with S_l seeds each gives
b = P y for the coefficients, and by the delta method

    Var(v) = sum_l (P_1l + 2 v P_2l)^2 sigma^2 / S_l / (2 c)^2,

with P the pseudo-inverse of (1, x, x^2), and x and v counted from the best LR.

The same rules as ``analysis.optimum``: its window, its degrees of freedom, never less than half a step to each side.
What a search reports is always that module's bootstrap; this only says which runs are worth their cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from analysis.bowl import window_of
from analysis.stats import LEVEL, Array


@dataclass(frozen=True)
class Shape:
    """The bowl as far as it is known: vertex in log LR, curvature c > 0, SD of one run."""

    vertex: float
    curvature: float
    noise: float


@dataclass(frozen=True)
class Spread:
    """Of an LR* in log LR: its standard deviation from ``dof`` degrees of freedom, and half the steps beside it."""

    sd: float
    dof: float
    below: float
    above: float


def spread(x_L: Array, counts_L: Array, shape: Shape) -> Spread | None:
    """Of the LR* that runs at ``x_L`` (log LR, ascending) with ``counts_L`` seeds would give.

    None where they would give none: the LR nearest to the vertex is at an edge, or nothing shows the noise.
    """
    i = int(np.argmin(np.abs(x_L - shape.vertex)))
    if i in (0, len(x_L) - 1):
        return None
    window = window_of(x_L, i)
    at, counts = x_L[window] - x_L[i], counts_L[window]
    coefficients = np.linalg.pinv(np.vander(at, 3, increasing=True))
    weights = coefficients[1] + 2 * (shape.vertex - x_L[i]) * coefficients[2]
    sd = shape.noise * math.sqrt(float((weights**2 / counts).sum())) / (2 * shape.curvature)
    repeated = bool(counts.min() > 1)
    dof = float((counts - 1).sum()) if repeated or len(window) == 3 else float(counts.sum() - 3)
    return Spread(sd, dof, float(x_L[i] - x_L[i - 1]) / 2, float(x_L[i + 1] - x_L[i]) / 2) if dof > 0 else None


def half_width(of: Spread) -> float:
    """Half of the 95 % interval of LR*, in log LR: the mean of its two sides."""
    noise = _quantile(of.dof) * of.sd
    return (max(of.below, noise) + max(of.above, noise)) / 2


def ratio_half_width(arm: Spread, reference: Spread) -> float:
    """The same of LR*(arm) / LR*(reference): errors and half steps add in squares, as in ``analysis.optimum``."""
    noise = _quantile(min(arm.dof, reference.dof)) * math.hypot(arm.sd, reference.sd)
    below, above = math.hypot(arm.below, reference.above), math.hypot(arm.above, reference.below)
    return (max(below, noise) + max(above, noise)) / 2


def _quantile(dof: float) -> float:
    return float(special.stdtrit(dof, (1 + LEVEL) / 2))
