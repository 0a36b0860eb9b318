"""Noise, resampling and intervals: pure functions of arrays, no files and no global random state.

One legend: L learning rates of one arm, S seeds, B bootstrap resamples. Runs come as one 1-d array
of final values per learning rate (``runs[l]``), because LRs may have unequal numbers of repeats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special  # not scipy.stats, which takes a second to import

Array = NDArray[np.float64]

LEVEL = 0.95
"""Coverage that every interval of the suite aims at."""

NUM_RESAMPLES = 4000
"""Bootstrap resamples: the 0.7 % tails used with few seeds still rest on about 30 of them."""


def remove_seed_effects(runs: Sequence[Array], seeds: Sequence[Sequence[Hashable]]) -> list[Array]:
    """Subtract from every run what its seed adds at all learning rates alike.

    Arms of one seed see the same batches, so a seed shifts a whole LR curve up or down. Such a shift
    cannot move the minimum and would only inflate its interval. The effect of a seed is the median
    over LRs (not the mean: near divergence one LR scatters a hundred times more) of its deviation
    from the LR's mean, taken over the LRs at which the full set of seeds ran; it needs three of them.
    LR means over the full set are unchanged. Without labels or a shared set the runs come back as given.

    Args:
        runs: L arrays of final values.
        seeds: L sequences of labels, parallel to ``runs``.
    """
    everyone = set().union(*seeds) if len(seeds) else set()
    full = [i for i, labels in enumerate(seeds) if set(labels) == everyone and len(labels) == len(everyone)]
    if len(everyone) < 2 or len(full) < 3:
        return [np.asarray(values, dtype=float) for values in runs]
    order = sorted(everyone, key=str)  # a set of strings iterates differently in every process
    deviation_LS = np.array([[runs[i][list(seeds[i]).index(s)] - runs[i].mean() for s in order] for i in full])
    effect_S = np.median(deviation_LS, axis=0)
    effect = dict(zip(order, effect_S - effect_S.mean(), strict=True))
    return [values - np.array([effect[s] for s in labels]) for values, labels in zip(runs, seeds, strict=True)]


def pooled_sd(runs: Sequence[Array]) -> tuple[float, int]:
    """Standard deviation of one run about its LR's mean, pooled over LRs, and its degrees of freedom.

    sd^2 = sum_l sum_s (y_ls - mean_l)^2 / sum_l (S_l - 1). Returns (nan, 0) without any repeat.
    """
    dof = sum(len(values) - 1 for values in runs)
    if dof <= 0:
        return math.nan, 0
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in runs)
    return math.sqrt(squares / dof), dof


def stream(seed: int, *names: Hashable) -> np.random.Generator:
    """A generator that depends on ``seed`` and the names alone, not on what was drawn before.

    Two arms that ask for the same LR and seeds therefore resample the same seeds (pairing), and
    adding an arm to a study moves nobody else's interval.
    """
    return np.random.default_rng([seed, zlib.crc32(repr(names).encode())])


def bootstrap_mean(values: Array, noise: float, rng: np.random.Generator, num: int = NUM_RESAMPLES) -> Array:
    """Resampled means of the runs at one learning rate. Returns (B,).

    Two or more runs: seeds are drawn with replacement and deviations stretched by sqrt(S / (S - 1)),
    without which S seeds look too quiet (Davison and Hinkley 1997, section 2.3). A single run has
    nothing to resample: normal noise of the given SD takes its place (nan or 0: none).
    """
    if len(values) == 1:
        scale = noise if math.isfinite(noise) else 0.0
        return values[0] + scale * rng.standard_normal(num)
    picks_BS = rng.integers(0, len(values), size=(num, len(values)))
    centre = values.mean()
    return centre + math.sqrt(len(values) / (len(values) - 1)) * (values[picks_BS].mean(axis=1) - centre)


def percentile_interval(draws: Array, dof: float = math.inf, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval, widened for a noise level known from ``dof`` degrees of freedom only.

    The tail probability is that of the normal at Student's quantile, Phi(-t_dof): the expanded
    percentile interval of Hesterberg 2015 (arXiv:1411.5279, section 4.4). dof = inf is the plain one.
    """
    if dof <= 0:
        raise ValueError(f"dof: {dof!r} is not allowed; it must be positive")
    tail = float(special.ndtr(special.stdtrit(dof, (1 - level) / 2)))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def one_sided_margin(standard_error: float, dof: float, level: float = LEVEL) -> float:
    """How far one mean may lie above another before noise cannot explain it (Student's t, one-sided)."""
    return float(special.stdtrit(dof, level)) * standard_error
