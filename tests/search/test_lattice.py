"""The lattice meets the study's own LRs and is the same from both sides."""

from __future__ import annotations

import math

import pytest
from worlds import FULL_GRID, LORA_GRID

from search.lattice import lay


@pytest.mark.parametrize("grid", [FULL_GRID, LORA_GRID])
def test_lattice_holds_every_lr_of_the_study(grid: tuple[float, ...]) -> None:
    lattice = lay(grid, (*FULL_GRID, *LORA_GRID))
    points = {lattice.lr(k) for k in range(-8, 9)}
    assert {*FULL_GRID, *LORA_GRID} <= points
    assert [lattice.index(lattice.lr(k)) for k in range(-20, 21)] == list(range(-20, 21))


@pytest.mark.parametrize(("per_octave", "steps"), [(2, 3), (4, 7)])
def test_half_decade_is_the_nearest_number_of_steps(per_octave: int, steps: int) -> None:
    lattice = lay(FULL_GRID, FULL_GRID, per_octave)
    assert lattice.half_decade == steps
    assert abs(math.log(lattice.lr(steps) / lattice.lr(0)) - math.log(10) / 2) < math.log(2) / per_octave / 2


def test_points_beyond_the_grid_are_typed_with_two_digits() -> None:
    lattice = lay((3.6e-6, 7.2e-6, 1.4e-5, 2.9e-5, 5.8e-5), (3.6e-6, 7.2e-6, 1.4e-5, 2.9e-5, 5.8e-5))
    assert [lattice.lr(2 * k) for k in (-2, -1, 0, 1, 2)] == [3.6e-6, 7.2e-6, 1.4e-5, 2.9e-5, 5.8e-5]
    assert lattice.lr(5) == 7.9e-5
