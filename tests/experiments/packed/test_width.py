"""The law of packing and the width that follows from it."""

from __future__ import annotations

import pytest

from experiments.packed.width import ENOUGH, LEAST_GAIN, WIDTHS, Timing


def test_gain_is_time_in_turn_over_time_together() -> None:
    timing = Timing(tau_s=3.0, per_token_s=0.5, num_tokens=4)
    for width in WIDTHS:
        assert timing.gain(width) == pytest.approx(width * (3 + 2) / (3 + 2 * width))
    assert timing.gain(1) == 1
    assert timing.gain(10**9) == pytest.approx(1 + 3 / 2)  # its limit, 1 + tau / (w b)


def test_b_half_is_where_many_arms_are_twice_as_fast() -> None:
    timing = Timing(tau_s=0.02, per_token_s=1e-4, num_tokens=200)
    assert timing.b_half == pytest.approx(200)
    assert timing.gain(10**9) == pytest.approx(2)


@pytest.mark.parametrize("num_arms", [1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize("tau_s", [0.0, 0.05, 0.1, 0.2, 1.0, 4.0, 100.0])
def test_width_is_the_narrowest_that_is_enough(tau_s: float, num_arms: int) -> None:
    timing = Timing(tau_s, per_token_s=1.0, num_tokens=1)
    allowed = [width for width in WIDTHS if width <= num_arms]
    best = max(map(timing.gain, allowed))
    chosen = timing.width(num_arms)
    if best < LEAST_GAIN:
        assert chosen == 1
    else:
        assert chosen in allowed and timing.gain(chosen) >= ENOUGH * best
        assert all(timing.gain(width) < ENOUGH * best for width in allowed if width < chosen)


def test_packing_pays_where_the_fixed_cost_is_large_and_only_there() -> None:
    assert [Timing(tau_s, 1.0, 1).width(16) for tau_s in (0.0, 0.1, 100.0)] == [1, 1, 16]
    assert Timing(100.0, 1.0, 1).width(5) == 4
