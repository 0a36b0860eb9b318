"""Pure statistics against hand values and simulated data with known answers."""

import math

import numpy as np
import pytest

from analysis.stats import bootstrap_mean, percentile_interval, pooled_sd, remove_seed_effects, stream


def test_pooled_sd_equals_hand_value():
    # squares about the means: 2 + 8 = 10 over 1 + 1 degrees of freedom
    sd, dof = pooled_sd([np.array([1.0, 3.0]), np.array([10.0, 14.0]), np.array([7.0])])
    assert (sd, dof) == (pytest.approx(math.sqrt(5)), 2)


def test_pooled_sd_without_repeats_is_missing_not_zero():
    sd, dof = pooled_sd([np.array([1.0]), np.array([2.0])])
    assert math.isnan(sd)
    assert dof == 0


def test_seed_effects_common_to_all_lrs_are_removed():
    clean = [np.full(3, level) for level in (3.0, 1.0, 2.0)]
    shift = np.array([-0.5, 0.1, 0.4])
    removed = remove_seed_effects([c + shift for c in clean], [("a", "b", "c")] * 3)
    np.testing.assert_allclose(removed, clean, atol=1e-12)


def test_seed_effects_are_not_taken_from_one_wild_lr():
    runs = [np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([3.0, 3.0]), np.array([0.0, 50.0])]
    removed = remove_seed_effects(runs, [(0, 1)] * 4)
    np.testing.assert_allclose(removed, runs)


def test_seed_effects_leave_unlabelled_repeats_alone():
    runs = [np.array([1.0, 2.0])] * 3
    np.testing.assert_array_equal(remove_seed_effects(runs, [(0, 0)] * 3), runs)


def test_bootstrap_mean_has_the_standard_error_of_the_mean():
    values = np.random.default_rng(1).normal(5.0, 2.0, 12)
    draws = bootstrap_mean(values, math.nan, stream(0), 40_000)
    assert draws.mean() == pytest.approx(values.mean(), abs=0.02)
    assert draws.std() == pytest.approx(values.std(ddof=1) / math.sqrt(12), rel=0.02)


def test_bootstrap_mean_of_one_run_needs_a_noise():
    assert bootstrap_mean(np.array([2.0]), math.nan, stream(0)).std() == 0
    assert bootstrap_mean(np.array([2.0]), 0.3, stream(0)).std() == pytest.approx(0.3, rel=0.05)


def test_percentile_interval_of_a_normal_sample():
    draws = np.random.default_rng(0).normal(0, 1, 400_000)
    assert percentile_interval(draws) == pytest.approx((-1.96, 1.96), abs=0.02)
    # few degrees of freedom: Student's quantile instead, t_{0.975, 4} = 2.776
    assert percentile_interval(draws, dof=4) == pytest.approx((-2.776, 2.776), abs=0.05)


def test_stream_depends_on_its_names_only():
    first = stream(0, "a").random()
    stream(0, "b").random()
    assert stream(0, "a").random() == first
    assert stream(1, "a").random() != first
