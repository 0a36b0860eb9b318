"""The bottom of an LR bowl: a parabola in log LR, for one curve or for thousands of resamples.

The rule, the same for every table:

1. Take the learning rate with the lowest value (of the seed means). At either end of the grid there
   is no optimum: nothing shows that the loss rises again on that side.
2. The window is its two neighbours on the grid, and every other LR within a factor of two of it.
   Two is the spacing the protocol asks of a grid, so on such a grid and on any coarser one the
   window is exactly three points and the fit the parabola through them. A finer grid adds points to
   the same window: they average noise and do not change what is estimated. Points further out (a
   collapse at ten times the best LR, say) have no say.
3. LR* is the vertex of the least-squares parabola through the window. Should that not open upward,
   or its vertex leave the window, the parabola through the three central points is used, which
   always has its minimum between the midpoints to the neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WINDOW = math.log(2.0)
"""Half-width of the window in log LR, see rule 2 above."""


@dataclass(frozen=True)
class Bottom:
    """The fitted minimum of one curve: ``vertex`` in log LR, fitted ``value`` and the LRs used."""

    vertex: float
    value: float
    window: tuple[int, ...]
    residuals: tuple[float, ...]


def window_of(x_L: Array, i: int) -> NDArray[np.intp]:
    """Indices of the LRs that a fit around the interior point ``i`` rests on."""
    near = np.abs(x_L - x_L[i]) <= WINDOW * (1 + 1e-9)
    near[i - 1 : i + 2] = True
    return np.flatnonzero(near)


def _parabola(x: Array, y_BK: Array) -> Array:
    """Least-squares coefficients (c0, c1, c2) of c0 + c1 x + c2 x^2 for each row. Returns (3, B)."""
    return np.linalg.pinv(np.vander(x, 3, increasing=True)) @ y_BK.T


def bottom(x_L: Array, y_L: Array) -> Bottom | None:
    """Fit one curve (x = log LR, ascending; y lower is better). None if the minimum is at an edge."""
    i = int(np.argmin(y_L))
    if i in (0, len(x_L) - 1):
        return None
    window = window_of(x_L, i)
    vertex = float(vertices(x_L, y_L[None, :])[0])
    c = _parabola(x_L[window] - x_L[i], y_L[None, window])[:, 0]
    at = x_L[window] - x_L[i]
    if not _accepted(c[1:2], c[2:3], at[0], at[-1])[0]:
        window = np.arange(i - 1, i + 2)
        at = x_L[window] - x_L[i]
        c = _parabola(at, y_L[None, window])[:, 0]
    residuals = y_L[window] - np.polyval(c[::-1], at)
    value = float(np.polyval(c[::-1], vertex - x_L[i]))
    return Bottom(vertex, value, tuple(int(k) for k in window), tuple(float(r) for r in residuals))


def vertices(x_L: Array, y_BL: Array) -> Array:
    """log LR* of every row of ``y_BL``; rows whose minimum is at an edge get that edge's log LR.

    Args:
        x_L: log learning rates, ascending, L >= 3.
        y_BL: values, lower is better, all finite.
    Returns: (B,).
    """
    lowest_B = np.argmin(y_BL, axis=1)
    out_B = x_L[lowest_B].astype(float)
    for i in range(1, len(x_L) - 1):
        rows = np.flatnonzero(lowest_B == i)
        if len(rows) == 0:
            continue
        window = window_of(x_L, i)
        out_B[rows] = x_L[i] + _offsets(x_L - x_L[i], y_BL[rows], window, np.arange(i - 1, i + 2))
    return out_B


def _accepted(c1: Array, c2: Array, low: float, high: float) -> NDArray[np.bool_]:
    # c2 > 0 and low <= -c1 / (2 c2) <= high, without dividing
    return (c2 > 0) & (-c1 >= 2 * c2 * low) & (-c1 <= 2 * c2 * high)


def _offsets(at_L: Array, y_BL: Array, window: NDArray[np.intp], centre: NDArray[np.intp]) -> Array:
    """Vertices relative to the central LR, for rows that share it."""
    _, c1, c2 = _parabola(at_L[window], y_BL[:, window])
    good = _accepted(c1, c2, at_L[window[0]], at_L[window[-1]])
    if len(window) > 3:
        _, d1, d2 = _parabola(at_L[centre], y_BL[:, centre])
        c1, c2, good = np.where(good, c1, d1), np.where(good, c2, d2), good | (d2 > 0)
    # Three equal values have no vertex: the grid point itself stands.
    return np.where(good, -c1 / np.where(good, 2 * c2, 1.0), 0.0)
