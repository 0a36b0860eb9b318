"""What the finished runs of one arm show, in the terms of a search: survivors, best, bracket, LR*."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.bowl import WINDOW, bottom
from analysis.lr_grid import Sweep, survivors
from analysis.optimum import Optimum, estimate, ratio
from sweeps.search.rungs import Rungs


@dataclass(frozen=True)
class Arm:
    """One arm of a study, to be searched.

    ``grid`` are the study's own LRs of it and ``seeds`` its seeds, in order. ``reference`` and ``donor`` are keys of
    other arms ("" for none): the one that its LR* is divided by, and the one whose bracket it may borrow.
    """

    key: str
    panel: str
    name: str
    rungs: Rungs
    grid: tuple[float, ...]
    seeds: tuple[str, ...]
    reference: str = ""
    donor: str = ""


@dataclass(frozen=True)
class Runs:
    """The finished runs of an arm, parallel; a diverged run's value is nan, lower is better."""

    lr: tuple[float, ...] = ()
    value: tuple[float, ...] = ()
    seed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """An arm and its runs. ``points`` are rungs, ascending: none where a run diverged, nor beyond one (``Sweep``)."""

    arm: Arm
    runs: Runs

    @cached_property
    def sweep(self) -> Sweep:
        return survivors(np.array(self.runs.lr), np.array(self.runs.value), list(self.runs.seed), 1.0)

    @cached_property
    def points(self) -> list[int]:
        return [self.arm.rungs.index(math.exp(x)) for x in self.sweep.log_lr_L]

    @cached_property
    def means(self) -> np.ndarray:
        """By point; seeds weigh alike, as in the estimator."""
        return np.array([values.mean() for values in self.sweep.runs])

    @property
    def best(self) -> int:
        return self.points[int(np.argmin(self.means))]

    @cached_property
    def seeds_at(self) -> Mapping[int, set[str]]:
        """Seeds by rung, diverged runs too."""
        found: dict[int, set[str]] = {}
        for lr, seed in zip(self.runs.lr, self.runs.seed, strict=True):
            found.setdefault(self.arm.rungs.index(lr), set()).add(seed)
        return found

    @property
    def bracketed(self) -> bool:
        """Whether the best point has both of its neighbours among the rungs, surviving."""
        return bool(self.points) and {self.best - 1, self.best + 1} <= set(self.points)

    @cached_property
    def depth(self) -> int:
        """Seeds that ran at three surviving LRs or more, which takes out what a seed adds at all LRs alike."""
        counts = [sum(seed in self.seeds_at[k] for k in self.points) for seed in self.arm.seeds]
        return sum(count >= 3 for count in counts)

    @property
    def repeated(self) -> bool:
        """Whether that are two seeds, if the study has them: one shows no noise."""
        return self.depth >= min(2, len(self.arm.seeds))

    @cached_property
    def optimum(self) -> Optimum:
        return estimate(self.runs.lr, self.runs.value, self.runs.seed, name=(self.arm.panel, self.arm.name))

    @cached_property
    def vertex(self) -> int:
        """The rung nearest to the fitted minimum, the best where none can be fitted."""
        fit = bottom(self.sweep.log_lr_L, self.means) if len(self.points) >= 3 else None
        return self.arm.rungs.index(math.exp(fit.vertex)) if fit else self.best

    @cached_property
    def window(self) -> list[int]:
        """The surviving side's rungs that the estimator's fit around the best may rest on, run or not."""
        lrs, best = self.arm.rungs.lrs, self.best
        low = -math.inf if self.sweep.below is None else self.sweep.below
        high = math.inf if self.sweep.above is None else self.sweep.above
        near = [k for k, lr in enumerate(lrs) if abs(math.log(lr / lrs[best])) <= WINDOW * (1 + 1e-9)]
        return [k for k in sorted({best - 1, best + 1, *near}) if 0 <= k < len(lrs) and low < lrs[k] < high]


def reached(look: Look, reference: Look | None) -> tuple[float, float] | None:
    """Half of the log width of the interval of the ratio to ``reference`` (of LR* without one), and the least that
    the LRs resolve. None while undecided, or where nothing shows the noise."""
    optima = [other.optimum for other in (look, reference) if other is not None]
    if any(o.interval is None or o.verdict != "decided" or o.noise_from not in ("repeats", "scatter") for o in optima):
        return None
    interval = ratio(*optima).interval if len(optima) == 2 else optima[0].interval
    assert interval is not None
    below, above = optima[0].half_steps
    if len(optima) == 2:  # errors of two grids add in squares, as in ``analysis.optimum.ratio``
        below, above = math.hypot(below, optima[1].half_steps[1]), math.hypot(above, optima[1].half_steps[0])
    return math.log(interval[1] / interval[0]) / 2, (below + above) / 2
