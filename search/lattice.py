"""The learning rates a search may run: a geometric lattice laid over an arm's own grid, shared by all searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.lr_grid import round_lr

SNAP = math.log(1.04)
"""A lattice point this near to an LR of the study is that LR: grids are typed with two digits, which moves them
by up to a few percent."""
FINENESS = (2, 4)
"""Points per factor of two: sqrt(2) apart, or its square root where a narrower interval is asked for."""


@dataclass(frozen=True)
class Lattice:
    """Points ``anchor * 2**(k / per_octave)``, k any integer, as one would type them.

    ``grid`` are the LRs of the study (all arms): where a point falls on one, it is that one, so that the run is shared.
    """

    anchor: float
    per_octave: int
    grid: tuple[float, ...]

    def lr(self, k: int) -> float:
        """The LR of point ``k``."""
        exact = self.anchor * 2 ** (k / self.per_octave)
        near = min(self.grid, key=lambda lr: abs(math.log(lr / exact)))
        return near if abs(math.log(near / exact)) <= SNAP else round_lr(exact)

    def index(self, lr: float) -> int:
        """The point nearest to ``lr``."""
        return round(self.per_octave * math.log2(lr / self.anchor))

    @property
    def half_decade(self) -> int:
        """Steps that come nearest to a factor of sqrt(10)."""
        return round(self.per_octave * math.log2(10) / 2)

    @property
    def octave(self) -> int:
        """Steps of a factor of two."""
        return self.per_octave


def lay(grid: Sequence[float], shared: Sequence[float], per_octave: int = FINENESS[0]) -> Lattice:
    """The lattice through the central LR of an arm's ``grid``; ``shared`` are the LRs of the whole study."""
    ordered = sorted(grid)
    return Lattice(ordered[len(ordered) // 2], per_octave, tuple(sorted(set(shared) | set(grid))))
