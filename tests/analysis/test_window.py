"""The usable window of learning rates, against bowls worked out by hand."""

import math

import numpy as np
import pytest

from analysis.window import usable_window

LR = np.array([1e-4, 1e-3, 1e-2, 1e-1])


def test_window_edges_are_interpolated_in_log_lr():
    # best 1.0, base 2.0: the limit is 1.1, half way up from 1.0 to 1.2 and a quarter up from 1.0 to 1.4
    window = usable_window(LR, np.array([9.0, 1.2, 1.0, 1.4]), base=2.0, share=0.9)
    assert window is not None and not window.open_low and not window.open_high
    assert window.low == pytest.approx(10**-2.5) and window.high == pytest.approx(10**-1.75)
    assert window.factor == pytest.approx(10**0.75)


def test_window_is_open_where_the_grid_ends_and_closed_where_runs_diverge():
    window = usable_window(LR, np.array([1.05, 1.0, 1.05, math.nan]), base=2.0, share=0.9)
    assert window is not None
    assert (window.low, window.open_low) == (1e-4, True)
    assert (window.high, window.open_high) == (1e-2, False)


def test_window_is_connected():
    window = usable_window(LR, np.array([1.0, 1.5, 1.02, 1.5]), base=2.0, share=0.9)
    assert window is not None and window.high < 1e-3


def test_window_needs_an_improvement():
    assert usable_window(LR, np.full(4, math.nan), base=2.0, share=0.9) is None
    assert usable_window(LR, np.array([2.5, 2.1, 2.0, 3.0]), base=2.0, share=0.9) is None
