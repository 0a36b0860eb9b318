"""What the finished runs of one arm show, in the terms of a search: lattice points, best, bracket, noise, shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from analysis.bowl import WINDOW, bottom
from analysis.lr_grid import Sweep, survivors
from analysis.optimum import Optimum, estimate
from search.design import Shape
from search.lattice import Lattice


@dataclass(frozen=True)
class Arm:
    """One arm of a study, to be searched.

    ``grid`` are the study's own LRs of it and ``seeds`` its seeds, in order. ``reference`` and ``donor`` are keys of
    other arms ("" for none): the one that its LR* is divided by, and the one whose bracket it may borrow.
    """

    key: str
    panel: str
    name: str
    lattice: Lattice
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
    """An arm and its runs. Points are indices of the arm's lattice, ascending, survivors only (``Sweep``)."""

    arm: Arm
    runs: Runs

    @cached_property
    def sweep(self) -> Sweep:
        return survivors(np.array(self.runs.lr), np.array(self.runs.value), list(self.runs.seed), 1.0)

    @cached_property
    def points(self) -> list[int]:
        return [self.arm.lattice.index(math.exp(x)) for x in self.sweep.log_lr_L]

    @cached_property
    def place(self) -> int:
        """Where the best point stands in ``points``; seeds weigh alike, as in the estimator."""
        return int(np.argmin([values.mean() for values in self.sweep.runs]))

    @property
    def best(self) -> int:
        return self.points[self.place]

    @cached_property
    def seeds_at(self) -> Mapping[int, set[str]]:
        """Seeds by lattice point, diverged runs too."""
        found: dict[int, set[str]] = {}
        for lr, seed in zip(self.runs.lr, self.runs.seed, strict=True):
            found.setdefault(self.arm.lattice.index(lr), set()).add(seed)
        return found

    @property
    def bracketed(self) -> bool:
        """Whether the best point has both of its neighbours on the lattice, surviving."""
        return bool(self.points) and {self.best - 1, self.best + 1} <= set(self.points)

    @cached_property
    def repeats(self) -> int:
        """Seeds that have run at three or more of the surviving LRs, which takes a seed's own shift out."""
        counts = [sum(seed in self.seeds_at[k] for k in self.points) for seed in self.arm.seeds]
        return sum(count >= 3 for count in counts)

    @cached_property
    def optimum(self) -> Optimum:
        return estimate(self.runs.lr, self.runs.value, self.runs.seed, name=(self.arm.panel, self.arm.name))

    @cached_property
    def vertex(self) -> int | None:
        """The lattice point nearest to the fitted minimum."""
        means = np.array([values.mean() for values in self.sweep.runs])
        fit = bottom(self.sweep.log_lr_L, means) if len(means) >= 3 else None
        return self.arm.lattice.index(math.exp(fit.vertex)) if fit else None

    def noise(self) -> tuple[float, float]:
        """(SD of one run, its degrees of freedom), 0 of them where nothing shows it."""
        optimum = self.optimum
        return (optimum.noise, optimum.dof) if optimum.noise_from in ("repeats", "scatter") else (math.nan, 0.0)

    def shape(self, noise: float) -> Shape | None:
        """The parabola through all within half a decade of the best, wide enough that noise does not bend it.

        None where it does not open upward or has its minimum elsewhere.
        """
        x, values = self.sweep.log_lr_L, np.array([v.mean() for v in self.sweep.runs])
        reach = self.arm.lattice.half_decade * math.log(2) / self.arm.lattice.per_octave
        near = np.abs(x - x[self.place]) <= 1.1 * reach  # typed LRs are a few percent off
        if near.sum() < 3:
            return None
        c2, c1, _ = np.polyfit(x[near] - x[self.place], values[near], 2)
        if c2 <= 0 or abs(c1 / (2 * c2)) > WINDOW:
            return None
        vertex = self.optimum.lr_star
        return Shape(math.log(vertex) if vertex else float(x[self.place] - c1 / (2 * c2)), float(c2), noise)
