"""Decisions from estimates: equivalence, one-sided tests, trends, and the seeds that would decide.

Noise and resampling are in ``analysis.stats``; this module turns an estimate and its standard error
into *yes*, *no* or *undecided*. A missing standard error (one seed, no pool) never decides anything.

One legend: S seeds of a pair of arms, N observations of a trend, M arrangements of labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

import numpy as np
from scipy import special  # not scipy.stats, which takes a second to import

from analysis.stats import LEVEL, NUM_RESAMPLES, Array, bootstrap_mean, percentile_interval, pooled_sd

Decision = Literal["yes", "no", "undecided"]
Interval = tuple[float, float]

POWER = 0.8
"""Chance of a decision that a number of seeds is planned for."""

EXACT_ARRANGEMENTS = 20_000
"""Jonckheere's p-value is exact up to this many arrangements of the labels."""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, known from ``dof`` degrees of freedom (inf: known exactly).

    No standard error: ``se`` is nan and ``dof`` 0. ``value`` and ``se`` share the units of the data.
    """

    value: float
    se: float
    dof: float

    def interval(self, level: float = LEVEL) -> Interval:
        """Two-sided Student interval; (nan, nan) without a standard error."""
        if not 0 < level < 1:
            raise ValueError(f"level: {level!r} is not allowed; it must be between 0 and 1")
        if not (self.dof > 0 and math.isfinite(self.value) and math.isfinite(self.se)):
            return math.nan, math.nan
        half = float(special.stdtrit(self.dof, (1 + level) / 2)) * self.se
        return self.value - half, self.value + half


def paired(a_S: Array, b_S: Array, pool: Sequence[tuple[Array, Array]] = ()) -> Estimate:
    """Mean of a - b over seeds that both arms ran.

    The SD of one difference is pooled over this pair and the others in ``pool``, each about its own
    mean, dof = sum (S_i - 1); that assumes one noise level for all of them. The standard error is
    SD / sqrt(S). A run that is not finite (diverged) makes the estimate nan, which decides nothing.

    Args:
        a_S, b_S: final values of the two arms, same seeds in the same order.
        pool: further pairs (other settings, same measure), without this one.
    """
    differences = [_difference_of_runs(a, b) for a, b in ((a_S, b_S), *pool)]
    sd, dof = pooled_sd(differences)
    return Estimate(float(differences[0].mean()), sd / math.sqrt(len(differences[0])), dof)


def paired_bootstrap(
    a_S: Array, b_S: Array, rng: np.random.Generator, num: int = NUM_RESAMPLES, level: float = LEVEL
) -> Interval:
    """Interval of the mean of a - b: expanded percentiles of the bootstrap, never narrower than Student's.

    Resampled means of S seeds cannot lie beyond the outermost seed, so with few seeds the percentiles
    alone are too short however far out they are taken: of normal differences around 0 they exclude 0
    in 18 % of studies with 3 seeds, 9 % with 4, 7 % with 5 and 5 % with 10 (simulated), where 5 % is
    meant. Student's interval covers normal differences at any S; the bootstrap adds width where
    they are skew. (nan, nan) for a single seed.
    """
    difference_S = _difference_of_runs(a_S, b_S)
    if len(difference_S) < 2 or not np.isfinite(difference_S).all():
        return math.nan, math.nan
    student = paired(a_S, b_S).interval(level)
    draws_B = bootstrap_mean(difference_S, math.nan, rng, num)
    low, high = percentile_interval(draws_B, len(difference_S) - 1, level)
    return min(low, student[0]), max(high, student[1])


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b of two independent estimates, with Welch and Satterthwaite's degrees of freedom."""
    if not (a.dof > 0 and b.dof > 0):
        return Estimate(a.value - b.value, math.nan, 0)
    se = math.hypot(a.se, b.se)
    if se == 0:
        return Estimate(a.value - b.value, 0.0, min(a.dof, b.dof))
    inverse = (a.se / se) ** 4 / a.dof + (b.se / se) ** 4 / b.dof
    return Estimate(a.value - b.value, se, 1 / inverse if inverse else math.inf)


def equivalent(estimate: Estimate, margin: float, level: float = LEVEL) -> Decision:
    """Is the true value between -margin and margin? Two one-sided tests (Schuirmann 1987).

    yes: the interval of level 2 * level - 1 (90 %) lies within the margins: each one-sided test
    errs in at most 1 - level of studies. no: the two-sided interval lies wholly beyond one margin.
    """
    _check_margin(margin)
    low, high = _one_sided_limits(estimate, level)
    if -margin < low and high < margin:
        return "yes"
    low, high = estimate.interval(level)
    return "no" if low > margin or high < -margin else "undecided"


def greater(estimate: Estimate, bound: float = 0.0, level: float = LEVEL) -> Decision:
    """Is the true value above ``bound``? yes and no each err in at most 1 - level of studies (one-sided)."""
    low, high = _one_sided_limits(estimate, level)
    if low > bound:
        return "yes"
    return "no" if high < bound else "undecided"


def within(interval: Interval, low: float, high: float) -> Decision:
    """Does the truth lie in [low, high]? yes: the interval is inside. no: it is disjoint from it."""
    if low <= interval[0] and interval[1] <= high:
        return "yes"
    return "no" if interval[0] > high or interval[1] < low else "undecided"


def slope(
    x_N: Array,
    y_N: Array,
    groups: Sequence[Hashable] | None = None,
    noise: tuple[float, float] | None = None,
) -> Estimate:
    """Least-squares slope of y on x, in units of y per unit of x.

    Args:
        x_N, y_N: one entry per run (or mean). Without two different x (in one group) the result is nan.
        groups: label of each entry, e.g. its seed; every group gets its own intercept, so what a seed
            adds at all x alike cancels. dof = N - G - 1, with one group N - 2.
        noise: (SD of one entry about its group's line, its dof), known from elsewhere. The larger
            of it and the scatter about the line sets the standard error, with its own dof. Taking
            the larger errs no more often than the better of the two, and a noise that is too
            small for these data, or a trend that is no line, does not go unseen.
    """
    x_N, y_N = np.asarray(x_N, dtype=float), np.asarray(y_N, dtype=float)
    labels = [0] * len(x_N) if groups is None else list(groups)
    if not len(x_N) == len(y_N) == len(labels):
        raise ValueError(f"y: {len(y_N)} values are not allowed; x has {len(x_N)} and groups {len(labels)}")
    dx_N, dy_N = _within_groups(x_N, labels), _within_groups(y_N, labels)
    squares = float(dx_N @ dx_N)
    if not squares > 0:
        return Estimate(math.nan, math.nan, 0)
    value = float(dx_N @ dy_N) / squares
    residual_N = dy_N - value * dx_N
    dof = len(x_N) - len(set(labels)) - 1
    sd = math.sqrt(float(residual_N @ residual_N) / dof) if dof > 0 else math.nan
    known = [(s, d) for s, d in ((sd, dof), noise or (math.nan, 0)) if d > 0 and math.isfinite(s)]
    if not known:
        return Estimate(value, math.nan, 0)
    sd, free = max(known)
    return Estimate(value, sd / math.sqrt(squares), free)


def slopes_equivalent(a: Estimate, b: Estimate, margin: float, level: float = LEVEL) -> Decision:
    """Do two independent estimates (slopes) differ by less than ``margin``? See ``equivalent``."""
    return equivalent(difference(a, b), margin, level)


def curvature(x_N: Array, y_N: Array) -> tuple[float, float, float]:
    """(R^2 of a line, R^2 of a parabola, BIC of the line minus BIC of the parabola).

    BIC = N ln(RSS / N) + k ln N (Schwarz 1978): a positive difference favours the parabola, above 6
    strongly (Kass and Raftery 1995). Entries count as independent: give means over seeds where seeds
    are shared. What the data cannot show is nan: a parabola needs three different x, its BIC four entries.
    """
    x_N, y_N = np.asarray(x_N, dtype=float), np.asarray(y_N, dtype=float)
    num, distinct = len(x_N), len(np.unique(x_N))
    total = float(((y_N - y_N.mean()) ** 2).sum())
    floor = num * (4 * np.finfo(float).eps * float(np.abs(y_N).max())) ** 2  # what rounding leaves of a perfect fit
    if distinct < 2 or not total > floor:
        return math.nan, math.nan, math.nan
    z_N = (x_N - x_N.mean()) / x_N.std()
    line, parabola = (
        float(((y_N - np.polyval(np.polyfit(z_N, y_N, degree), z_N)) ** 2).sum()) if distinct > degree else math.nan
        for degree in (1, 2)
    )
    gain = (
        num * math.log(max(line, floor) / max(parabola, floor)) - math.log(num)
        if num > 3 and distinct > 2
        else math.nan
    )
    return 1 - line / total, 1 - parabola / total, gain


def jonckheere(groups: Sequence[Array]) -> tuple[float, float]:
    """Jonckheere and Terpstra's test for values that increase over ordered groups.

    The statistic counts the pairs of values from two groups that are in order, ties by half (Jonckheere
    1954). The one-sided p-value comes from all arrangements of the values over the groups where these
    are few, else from the normal with correction for ties (Hollander and Wolfe 1999, section 6.2) and
    continuity. Only order counts, so a diverged run may enter as inf. Groups count as independent:
    seeds they share make the test cautious, not wrong.

    Args:
        groups: one array of values per group, in the order in which an increase is expected.
    Returns: (statistic, p-value).
    """
    parts = [np.asarray(values, dtype=float) for values in groups if len(values)]
    if len(parts) < 2:
        raise ValueError(f"groups: {len(parts)} is not allowed; a trend needs two groups with values")
    value_N = np.concatenate(parts)
    if np.isnan(value_N).any():
        raise ValueError("groups: nan is not allowed; it has no place in an order")
    sizes = tuple(len(values) for values in parts)
    order_NN = (value_N[:, None] < value_N) + 0.5 * (value_N[:, None] == value_N)
    observed = float(_in_order(np.repeat(np.arange(len(sizes)), sizes)[None], order_NN)[0])
    if math.factorial(len(value_N)) // math.prod(map(math.factorial, sizes)) <= EXACT_ARRANGEMENTS:
        return observed, float(np.mean(_in_order(_arrangements(sizes), order_NN) >= observed - 1e-9))
    mean = (len(value_N) ** 2 - sum(n * n for n in sizes)) / 4
    sd = math.sqrt(_jonckheere_variance(np.array(sizes), np.unique(value_N, return_counts=True)[1]))
    return observed, float(special.ndtr((mean + 0.5 - observed) / sd)) if sd else 1.0


def seeds_needed(sd: float, delta: float, level: float = LEVEL, power: float = POWER) -> int:
    """Fewest pairs (2 or more) whose one-sided paired t test resolves a true difference ``delta``.

    Exact for normal differences: power from the noncentral t distribution.

    Args:
        sd: SD of one paired difference. delta: the true difference, positive, same units.
        power: chance that ``greater`` then says yes.
    """
    _check_plan(sd, level, power)
    if not 0 < delta < math.inf:
        raise ValueError(f"delta: {delta!r} is not allowed; it must be positive")
    return _fewest(lambda n: _power(delta, sd, n, level), power)


def seeds_for_equivalence(
    value: float, sd: float, margin: float, level: float = LEVEL, power: float = POWER
) -> int | None:
    """Fewest pairs with which ``equivalent`` says yes, if the true difference is the present ``value``.

    None when |value| >= margin: no number of seeds makes such arms equivalent; what it takes to
    show the opposite is ``seeds_needed(sd, |value| - margin)``. The two one-sided tests are
    combined by Bonferroni, 1 - power <= sum of their failures, so the number is never too small.
    """
    _check_plan(sd, level, power)
    _check_margin(margin)
    if not math.isfinite(value):
        raise ValueError(f"value: {value!r} is not allowed; it must be a finite number")
    if abs(value) >= margin:
        return None
    gaps = (margin - value, margin + value)
    return _fewest(lambda n: sum(_power(gap, sd, n, level) for gap in gaps) - 1, power)


def _difference_of_runs(a_S: Array, b_S: Array) -> Array:
    a_S, b_S = np.asarray(a_S, dtype=float), np.asarray(b_S, dtype=float)
    if a_S.shape != b_S.shape or a_S.ndim != 1 or not len(a_S):
        raise ValueError(f"pair: shapes {a_S.shape} and {b_S.shape} are not allowed; give one value per shared seed")
    with np.errstate(invalid="ignore"):
        difference_S: Array = np.where(np.isfinite(a_S) & np.isfinite(b_S), a_S - b_S, math.nan)
    return difference_S


def _one_sided_limits(estimate: Estimate, level: float) -> Interval:
    """Each end is a one-sided limit of ``level``: together, the two-sided interval of 2 * level - 1."""
    _check_level(level)
    return estimate.interval(2 * level - 1)


def _check_level(level: float) -> None:
    if not 0.5 < level < 1:
        raise ValueError(f"level: {level!r} is not allowed; it must be between 0.5 and 1")


def _check_margin(margin: float) -> None:
    if not margin > 0:
        raise ValueError(f"margin: {margin!r} is not allowed; it must be positive")


def _check_plan(sd: float, level: float, power: float) -> None:
    if not 0 <= sd < math.inf:
        raise ValueError(f"sd: {sd!r} is not allowed; it must be a finite number, 0 or more")
    _check_level(level)
    if not 0 < power < 1:
        raise ValueError(f"power: {power!r} is not allowed; it must be between 0 and 1")


def _within_groups(values_N: Array, labels: Sequence[Hashable]) -> Array:
    """Deviations from the group's mean. Relative to its first value, so that equal values give exact zeros."""
    members: dict[Hashable, list[int]] = {}
    for i, label in enumerate(labels):
        members.setdefault(label, []).append(i)
    centred_N = np.empty(len(values_N))
    for index in members.values():
        moved = values_N[index] - values_N[index[0]]
        centred_N[index] = moved - moved.mean()
    return centred_N


def _in_order(labels_MN: np.ndarray, order_NN: Array) -> Array:
    """Jonckheere's statistic of each arrangement; order_NN[p, q] is 1 where value p < value q, 0.5 at a tie."""
    total_M = np.zeros(len(labels_MN))
    for k in range(int(labels_MN.max())):
        total_M += (((labels_MN == k) @ order_NN) * (labels_MN > k)).sum(axis=1)
    return total_M


@lru_cache(maxsize=8)
def _arrangements(sizes: tuple[int, ...]) -> np.ndarray:
    """All distinct ways to label sum(sizes) values with groups of these sizes. Returns (M, N), read-only."""
    rows = [np.full(sum(sizes), -1)]
    for k, size in enumerate(sizes):
        filled = []
        for row in rows:
            for places in combinations(np.flatnonzero(row < 0).tolist(), size):
                filled.append(row.copy())
                filled[-1][list(places)] = k
        rows = filled
    labels_MN = np.stack(rows)
    labels_MN.flags.writeable = False
    return labels_MN


def _jonckheere_variance(sizes: np.ndarray, ties: np.ndarray) -> float:
    """Null variance given the group sizes and how often each value occurs (Hollander and Wolfe 1999, section 6.2)."""
    num = int(sizes.sum())

    def three(n: np.ndarray) -> float:
        return float((n * (n - 1) * (2 * n + 5)).sum())

    def falling(n: np.ndarray, order: int) -> float:
        return float((n * (n - 1) * (n - 2 if order == 3 else 1)).sum())

    whole = np.array([num])
    variance = (three(whole) - three(sizes) - three(ties)) / 72
    variance += falling(sizes, 3) * falling(ties, 3) / (36 * falling(whole, 3))
    variance += falling(sizes, 2) * falling(ties, 2) / (8 * falling(whole, 2))
    return max(variance, 0.0)


def _power(gap: float, sd: float, num: int, level: float) -> float:
    """Chance that a one-sided paired t test of ``num`` pairs resolves a true difference ``gap``."""
    if sd == 0:
        return 1.0
    return 1 - float(special.nctdtr(num - 1, gap / sd * math.sqrt(num), special.stdtrit(num - 1, level)))


def _fewest(power_of: Callable[[int], float], power: float) -> int:
    """Smallest n >= 2 with the power asked for, which must grow with n: doubling, then bisection."""
    high = 2
    while power_of(high) < power:
        high *= 2
    low = max(high // 2, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power_of(middle) < power else (low, middle)
    return high
