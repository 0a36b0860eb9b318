"""Decisions against hand values, and how often they are wrong in simulated studies with a known truth.

False-positive rates come from 1,000 studies: 5 % nominal has a standard deviation of 0.7 %, so a
correct test stays below 7 % and an exact one above 3 %.
"""

import math
from itertools import permutations

import numpy as np
import pytest
from scipy import special

from analysis import inference
from analysis.inference import (
    Estimate,
    curvature,
    difference,
    equivalent,
    greater,
    jonckheere,
    paired,
    paired_bootstrap,
    seeds_for_equivalence,
    seeds_needed,
    slope,
    slopes_equivalent,
    within,
)
from analysis.stats import bootstrap_mean, percentile_interval

STUDIES = 1000


def share(decisions, wanted="yes"):
    return sum(decision == wanted for decision in decisions) / STUDIES


def studies(true, num_seeds, num_pools, sd=1.0):
    """One paired estimate per simulated study; a seed's own shift, ten times the noise, must cancel."""
    rng = np.random.default_rng([num_seeds, num_pools])
    pairs_RPKS = rng.normal(0, sd / math.sqrt(2), (STUDIES, 1 + num_pools, 2, num_seeds))
    pairs_RPKS += rng.normal(0, 10 * sd, (STUDIES, 1 + num_pools, 1, num_seeds))
    pairs_RPKS[:, 1:, 0] += 3 * sd  # pooled pairs have differences of their own
    pairs_RPKS[:, 0, 0] += true
    return [paired(a, b, others) for (a, b), *others in pairs_RPKS]


# Estimates


def test_interval_equals_hand_value():
    # t_{0.975, 4} = 2.7764, t_{0.95, 4} = 2.1318, z_{0.975} = 1.9600
    assert Estimate(2.0, 0.5, 4).interval() == pytest.approx((2 - 1.3882, 2 + 1.3882), abs=1e-4)
    assert Estimate(2.0, 0.5, 4).interval(0.9) == pytest.approx((2 - 1.0659, 2 + 1.0659), abs=1e-4)
    assert Estimate(2.0, 0.5, math.inf).interval() == pytest.approx((2 - 0.98, 2 + 0.98), abs=1e-4)


def test_paired_equals_hand_value():
    a, b = np.array([3.0, 5.0, 7.0]), np.array([1.0, 2.0, 6.0])  # differences 2, 3, 1
    estimate = paired(a, b)
    assert (estimate.value, estimate.se, estimate.dof) == (2, pytest.approx(1 / math.sqrt(3)), 2)
    # a second pair with differences 0, 4: squares about the means 2 + 8 over 2 + 1 degrees of freedom
    estimate = paired(a, b, [(np.array([1.0, 9.0]), np.array([1.0, 5.0]))])
    assert (estimate.value, estimate.se, estimate.dof) == (2, pytest.approx(math.sqrt(10 / 3 / 3)), 3)


def test_one_seed_has_a_standard_error_only_from_the_pool():
    one = np.array([2.0]), np.array([1.0])
    estimate = paired(*one)
    assert (estimate.value, estimate.dof) == (1, 0)
    assert math.isnan(estimate.se)
    estimate = paired(*one, [(np.array([1.0, 9.0]), np.array([1.0, 5.0]))])
    assert (estimate.se, estimate.dof) == (pytest.approx(math.sqrt(8)), 1)


def test_without_a_standard_error_nothing_is_decided():
    bare = Estimate(1.0, math.nan, 0)
    assert {equivalent(bare, 1e9), equivalent(bare, 1e-9), greater(bare), greater(bare, 9)} == {"undecided"}
    assert slopes_equivalent(bare, Estimate(1.0, 0.1, 5), 1e9) == "undecided"
    assert within(bare.interval(), -9, 9) == "undecided"
    assert equivalent(Estimate(1.0, 0.1, 0), 1e9) == "undecided"
    for diverged in (math.nan, math.inf):
        estimate = paired(np.array([1.0, diverged, 2.0]), np.array([0.0, diverged, 0.0]))
        assert greater(estimate) == "undecided"
        assert np.isnan(paired_bootstrap(np.array([1.0, diverged]), np.zeros(2), np.random.default_rng(0))).all()


def test_difference_has_welchs_degrees_of_freedom():
    # (9 + 16)^2 / (81 / 4 + 256 / 10) = 13.631
    result = difference(Estimate(7.0, 3.0, 4), Estimate(2.0, 4.0, 10))
    assert (result.value, result.se, result.dof) == (5, 5, pytest.approx(625 / 45.85))
    assert difference(Estimate(7.0, 3.0, math.inf), Estimate(2.0, 4.0, math.inf)).dof == math.inf


# Decisions


def test_equivalent_needs_the_90_percent_interval_inside_and_refuses_on_the_95_percent_one():
    # z_{0.95} = 1.645, t_{0.95, 2} = 2.920, z_{0.975} = 1.960
    assert [equivalent(Estimate(0.0, 1.0, math.inf), m) for m in (1.66, 1.63)] == ["yes", "undecided"]
    assert [equivalent(Estimate(0.0, 1.0, 2), m) for m in (2.93, 2.91)] == ["yes", "undecided"]
    assert [equivalent(Estimate(0.5, 1.0, math.inf), m) for m in (2.16, 2.13)] == ["yes", "undecided"]
    for sign in (-1, 1):
        assert [equivalent(Estimate(4.0 * sign, 1.0, math.inf), m) for m in (2.03, 2.05)] == ["no", "undecided"]
    assert equivalent(Estimate(0.0, 1.0, math.inf), 2.0, level=0.99) == "undecided"


def test_greater_is_one_sided():
    assert [greater(Estimate(v, 1.0, math.inf)) for v in (1.66, 1.63, -1.63, -1.66)] == [
        "yes",
        "undecided",
        "undecided",
        "no",
    ]
    assert [greater(Estimate(v, 1.0, 2), bound=10) for v in (12.93, 12.91, 7.07)] == ["yes", "undecided", "no"]


def test_within_compares_an_interval_with_a_band():
    assert within((1, 2), 1, 2) == "yes"
    assert within((3, 4), 1, 2) == within((-1, 0), 1, 2) == "no"
    assert within((1.5, 3), 1, 2) == within((0, 3), 1, 2) == "undecided"


def test_what_is_not_allowed_is_named():
    with pytest.raises(ValueError, match=r"^margin: -1 is not allowed; it must be positive$"):
        equivalent(Estimate(0.0, 1.0, 2), -1)
    with pytest.raises(ValueError, match=r"^delta: 0 is not allowed; it must be positive$"):
        seeds_needed(1.0, 0)
    with pytest.raises(ValueError, match=r"^level: 0.05 is not allowed"):  # alpha in place of the level
        greater(Estimate(0.0, 1.0, 2), level=0.05)
    with pytest.raises(ValueError, match=r"^pair: shapes \(3,\) and \(2,\) are not allowed"):
        paired(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match=r"^groups: nan is not allowed"):
        jonckheere([np.zeros(2), np.array([math.nan])])


@pytest.mark.parametrize("num_pools", [0, 3])
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_decisions_are_wrong_as_often_as_they_may_be(num_seeds, num_pools):
    null = studies(0.0, num_seeds, num_pools)
    decisions = [greater(estimate) for estimate in null]
    assert 0.03 <= share(decisions) <= 0.07
    assert 0.03 <= share(decisions, "no") <= 0.07
    # the strictest cases: a difference of exactly the margin (wide, so that only one side matters) ...
    for side in (-10, 10):
        decisions = [equivalent(estimate, 10.0) for estimate in studies(side, num_seeds, num_pools)]
        assert 0.03 <= share(decisions) <= 0.07
        assert share(decisions, "no") <= 0.045  # one tail of 2.5 %
    # ... and no difference at all against a margin far below the noise
    decisions = [equivalent(estimate, 0.001) for estimate in null]
    assert 0.03 <= share(decisions, "no") <= 0.07
    assert share(decisions) == 0


@pytest.mark.parametrize(("num_seeds", "percentiles_alone"), [(3, 0.18), (5, 0.07), (10, 0.05)])
def test_paired_bootstrap_excludes_a_true_zero_in_5_percent(num_seeds, percentiles_alone):
    rng = np.random.default_rng(num_seeds)
    wrong = bare = 0
    for _ in range(STUDIES):
        b_S = rng.normal(0, 10, num_seeds)
        a_S = b_S + rng.normal(0, 1, num_seeds)
        wrong += within((0.0, 0.0), *paired_bootstrap(a_S, b_S, rng, num=1000)) == "no"
        low, high = percentile_interval(bootstrap_mean(a_S - b_S, math.nan, rng, 1000), num_seeds - 1)
        bare += not low <= 0 <= high
    assert 0.03 <= wrong / STUDIES <= 0.07
    # why Student's interval is the least: this is what the expanded percentiles do without it
    assert bare / STUDIES == pytest.approx(percentiles_alone, abs=0.025)


def test_paired_bootstrap_widens_where_differences_are_skew():
    # mean 1, SE 1, t_{0.95, 9} = 1.833. Resampled means are tenths of 10 x binomial(10, 0.1): the upper
    # percentile is 3, stretched by sqrt(10 / 9) about the mean
    a_S = np.array([0.0] * 9 + [10.0])
    interval = paired_bootstrap(a_S, np.zeros(10), np.random.default_rng(0), level=0.9)
    assert interval == pytest.approx((1 - 1.833, 1 + 2 * math.sqrt(10 / 9)), abs=1e-3)
    assert np.isnan(paired_bootstrap(a_S[:1], np.zeros(1), np.random.default_rng(0))).all()


# Trends


def test_slope_equals_hand_value():
    # Sxx = 5, Sxy = 5.5, residuals -0.1, 0.8, -1.3, 0.6: RSS = 2.7 over 2 degrees of freedom
    estimate = slope(np.arange(4.0), np.array([1.0, 3.0, 2.0, 5.0]))
    assert (estimate.value, estimate.se, estimate.dof) == (pytest.approx(1.1), pytest.approx(math.sqrt(0.27)), 2)


def test_slope_within_groups_equals_a_fit_with_one_intercept_each():
    rng = np.random.default_rng(3)
    seeds = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]  # unequal, one of them alone
    x, y = rng.normal(size=10), rng.normal(size=10) + 50 * np.array(seeds)
    design = np.column_stack([x, *(np.array(seeds) == s for s in range(4))])
    coefficients, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    se = math.sqrt(squares[0] / 5 * np.linalg.inv(design.T @ design)[0, 0])
    estimate = slope(x, y, groups=[f"seed {s}" for s in seeds])
    assert (estimate.value, estimate.se) == (pytest.approx(coefficients[0]), pytest.approx(se))
    assert estimate.dof == 5  # 10 entries, 4 intercepts, 1 slope


def test_slope_takes_the_larger_of_scatter_and_known_noise():
    x, y = np.arange(4.0), np.array([1.0, 3.0, 2.0, 5.0])  # scatter: SD sqrt(1.35) = 1.16
    quiet, loud = slope(x, y, noise=(0.5, 30)), slope(x, y, noise=(2.0, 30))
    assert (quiet.se, quiet.dof) == (pytest.approx(math.sqrt(0.27)), 2)
    assert (loud.se, loud.dof) == (pytest.approx(2 / math.sqrt(5)), 30)
    assert slope(x, y, noise=(math.nan, 0)) == slope(x, y)
    two = slope(x[:2], y[:2], noise=(2.0, 30))  # two points have no scatter
    assert (two.value, two.se, two.dof) == (2, pytest.approx(2 * math.sqrt(2)), 30)
    assert math.isnan(slope(x[:2], y[:2]).se)


def test_slope_without_two_different_x_is_missing():
    assert math.isnan(slope(np.full(3, 0.1), np.arange(3.0)).value)
    assert math.isnan(slope(np.array([0.1, 0.1, 0.3, 0.3]), np.arange(4.0), groups=[0, 0, 1, 1]).value)


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_slope_of_no_trend_is_found_in_5_percent(num_seeds):
    rng = np.random.default_rng(num_seeds)
    plain, known, too_quiet, grouped = [], [], [], []
    x_N = np.arange(num_seeds)  # as many points as seeds: 1 and 3 degrees of freedom
    x_SN, seeds = np.tile(np.arange(3.0), num_seeds), np.repeat(np.arange(num_seeds), 3)
    for _ in range(STUDIES):
        y_N = rng.normal(0, 1, num_seeds)
        plain.append(greater(slope(x_N, y_N)))
        known.append(greater(slope(x_N, y_N, noise=(rng.normal(0, 1, 7).std(ddof=1), 6))))
        too_quiet.append(greater(slope(x_N, y_N, noise=(0.1, math.inf))))
        y_SN = rng.normal(0, 1, 3 * num_seeds) + rng.normal(0, 10, num_seeds)[seeds]
        grouped.append(greater(slope(x_SN, y_SN, groups=seeds.tolist())))
    assert 0.03 <= share(plain) <= 0.07
    assert 0.01 <= share(known) <= 0.07
    assert 0.0 <= share(too_quiet) <= 0.07
    assert 0.03 <= share(grouped) <= 0.07


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_slopes_that_differ_by_the_margin_are_called_equivalent_in_5_percent(num_seeds):
    rng = np.random.default_rng(num_seeds)
    x_N, seeds = np.tile(np.arange(3.0), num_seeds), np.repeat(np.arange(num_seeds), 3).tolist()
    decisions = []
    for _ in range(STUDIES):
        noise_KN = rng.normal(0, 1, (2, len(x_N))) * [[1.0], [3.0]]  # one arm three times as noisy
        a, b = (slope(x_N, k * x_N + noise_N, seeds) for k, noise_N in zip((20.0, 0.0), noise_KN, strict=True))
        decisions.append(slopes_equivalent(a, b, 20.0))
    assert 0.03 <= share(decisions) <= 0.07
    assert share(decisions, "no") <= 0.045


def by_brute_force(groups):
    """Statistic and p-value from the definition, over all permutations of the values."""

    def statistic(values):
        split = [values[i : i + n] for i, n in zip(np.cumsum([0, *sizes]), sizes, strict=False)]
        pairs = [(x, y) for i, low in enumerate(split) for high in split[i + 1 :] for x in low for y in high]
        return sum(x < y for x, y in pairs) + 0.5 * sum(x == y for x, y in pairs)

    sizes = [len(values) for values in groups]
    flat = [float(x) for values in groups for x in values]
    null = np.array([statistic(values) for values in permutations(flat)])
    return statistic(flat), float(np.mean(null >= statistic(flat))), float(null.std())


def test_jonckheere_equals_hand_values():
    # all four pairs in order, one of 4! / (2! 2!) arrangements; reversed, every arrangement is as high
    assert jonckheere([np.array([1.0, 2.0]), np.array([3.0, 4.0])]) == (4, pytest.approx(1 / 6))
    assert jonckheere([np.array([3.0, 4.0]), np.array([1.0, 2.0])]) == (0, 1)
    assert jonckheere([np.array([1.0]), np.array([2.0]), np.array([math.inf])]) == (3, pytest.approx(1 / 6))
    assert jonckheere([np.ones(3), np.ones(2)]) == (3, 1)


TIED = [[2, 1, 3], [2, 4], [2, 5]]
SMALL = [[1.0, 4.0], [2.0, 6.0, 3.0], [5.0, 7.0]]


@pytest.mark.parametrize("groups", [SMALL, TIED])
def test_jonckheere_equals_enumeration(groups):
    statistic, p, _ = by_brute_force(groups)
    assert jonckheere([np.array(values) for values in groups]) == (statistic, pytest.approx(p))


@pytest.mark.parametrize("groups", [SMALL, TIED])
def test_jonckheeres_normal_approximation_has_the_variance_of_all_permutations(groups, monkeypatch):
    monkeypatch.setattr(inference, "EXACT_ARRANGEMENTS", 0)
    statistic, _, sd = by_brute_force(groups)
    p = jonckheere([np.array(values) for values in groups])[1]
    assert p == pytest.approx(special.ndtr(-(statistic - 0.5 - 8) / sd))  # mean (49 - 9 - 4 - 4) / 4 = 8


def test_jonckheere_equals_a_published_example():
    # math.wustl.edu/~sawyer, m408s07, OneWayLayout: J = 62.5, mean 37.5, variance 88.8919 with ties
    a, b, c = [53, 31, 139, 5, 16], [75, 64, 205, 97, 139], [54, 139, 194, 1253, 275]
    statistic, p = jonckheere([np.array(values) for values in (a, b, c)])
    assert statistic == 62.5
    assert p == pytest.approx(special.ndtr(-24.5 / math.sqrt(88.8919)), rel=1e-5)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 3, 3, 3, 3), (5, 5), (5, 5, 5)])  # exact, normal, exact, normal
def test_jonckheere_finds_no_trend_in_5_percent(sizes):
    rng = np.random.default_rng(sizes)
    p_R = np.array([jonckheere([rng.normal(size=n) for n in sizes])[1] for _ in range(STUDIES)])
    assert 0.02 <= np.mean(p_R <= 0.05) <= 0.07


def test_curvature_equals_hand_value():
    # means 1.5, 0.5, 1.5 of two runs each: the parabola leaves 1.5, the line (flat) and the mean 17 / 6
    x, y = np.tile([-1.0, 0.0, 1.0], 2), np.array([2.0, 0.0, 2.0, 1.0, 1.0, 1.0])
    expected = (0, 8 / 17, 6 * math.log(17 / 9) - math.log(6))
    assert curvature(x, y) == pytest.approx(expected, abs=1e-12)


def test_curvature_tells_a_line_from_a_parabola():
    x = np.linspace(100, 110, 7)
    assert curvature(x, 3 * x + 1) == pytest.approx((1, 1, -math.log(7)))
    assert curvature(x, (x - 103) ** 2)[2] > 50
    assert curvature(x[:3], np.array([1.0, 5.0, 2.0]))[1:] == (pytest.approx(1), pytest.approx(math.nan, nan_ok=True))
    assert np.isnan(curvature(x, np.full(7, 0.1))).all()
    assert np.isnan(curvature(np.repeat(x[:2], 2), np.arange(4.0))[1:]).all()


# Power


def test_seeds_needed_equals_table_values():
    # one-sided t test, 5 %, power 80 %: d = 0.5 needs 27, d = 1 needs 8 (Cohen 1988; G*Power)
    assert seeds_needed(2.0, 1.0) == 27
    assert seeds_needed(0.1, 0.1) == 8
    assert seeds_needed(1.0, 100.0) == 2
    assert seeds_needed(0.0, 1e-9) == 2
    assert seeds_needed(1.0, 1e-3) == pytest.approx((1.64485 + 0.84162) ** 2 * 1e6, rel=1e-4)
    assert seeds_needed(1.0, 1.0, level=0.99) > seeds_needed(1.0, 1.0) < seeds_needed(1.0, 1.0, power=0.9)


def test_seeds_needed_equals_the_power_integral_for_three_seeds():
    # dof 2: the SD is sqrt(-ln u) times the true one for a uniform u; 2.920 is t_{0.95, 2}
    u_Q = (np.arange(100_000) + 0.5) / 100_000
    for delta, num_seeds in ((2.29, 4), (2.31, 3)):
        power = special.ndtr(delta * math.sqrt(3) - 2.919986 * np.sqrt(-np.log(u_Q))).mean()
        assert (power >= 0.8) == (num_seeds == 3)
        assert seeds_needed(1.0, delta) == num_seeds


def simulated_power(decide, true, num_seeds, count=4000):
    differences_RS = np.random.default_rng(num_seeds).normal(true, 1, (count, num_seeds))
    return sum(decide(paired(d_S, np.zeros(num_seeds))) == "yes" for d_S in differences_RS) / count


def test_seeds_needed_is_where_the_simulated_power_passes_80_percent():
    assert simulated_power(greater, 1.0, seeds_needed(1.0, 1.0)) > 0.79
    assert simulated_power(greater, 1.0, seeds_needed(1.0, 1.0) - 1) < 0.79


@pytest.mark.parametrize("true", [0.0, -0.3, 0.3])
def test_seeds_for_equivalence_is_where_the_simulated_power_passes_80_percent(true):
    num_seeds = seeds_for_equivalence(true, 1.0, 1.0)
    assert simulated_power(lambda estimate: equivalent(estimate, 1.0), true, num_seeds) > 0.79
    assert simulated_power(lambda estimate: equivalent(estimate, 1.0), true, num_seeds - 1) < 0.8


def test_no_number_of_seeds_makes_a_difference_beyond_the_margin_equivalent():
    assert seeds_for_equivalence(1.0, 0.5, 1.0) is None
    assert seeds_for_equivalence(-2.0, 0.0, 1.0) is None
    assert seeds_for_equivalence(0.5, 0.0, 1.0) == 2
