"""Arithmetic on the rewards of groups of completions: arrays in, numbers out. No I/O, no configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def mean_graded(rewards: Sequence[float | None]) -> float:
    """Mean of what was graded, NaN if nothing was."""
    known = [reward for reward in rewards if reward is not None]
    return float(np.mean(known)) if known else math.nan


def group_bits(rewards_PG: np.ndarray) -> float:
    """Bits that one step's rewards can tell at most: the entropy of each completion's reward, summed.

    Within a group of G completions of one problem the reward is a coin with the group's success rate p;
    its entropy H(p) is what one episode can carry (post, section on RL capacity: at most 1 bit). The
    estimate from p-hat is too low by about 1 / (2 G ln 2) per coin that is not constant (Miller 1955); that
    is added back, up to 1 bit.

    Args:
        rewards_PG: 0 or 1 for each of P problems and G completions, NaN where the grader failed.
    Returns: bits over all completions that were graded; at most their number.
    """
    graded_P = (~np.isnan(rewards_PG)).sum(axis=1)
    sums_P = np.nansum(rewards_PG, axis=1)
    bits = 0.0
    for graded, right in zip(graded_P, sums_P, strict=True):
        if graded == 0 or right in (0, graded):
            continue
        p = right / graded
        plain = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
        bits += graded * min(1.0, plain + 1 / (2 * graded * np.log(2)))
    return float(bits)


def frac_mixed(rewards_PG: np.ndarray) -> float:
    """Share of the groups that carry any gradient: those whose graded rewards are not all the same."""
    high, low = (pick(np.nan_to_num(rewards_PG, nan=fill), axis=1) for pick, fill in ((np.max, -1.0), (np.min, 2.0)))
    return float((high > low).mean())


def ratio_summary(log_ratio: np.ndarray) -> dict[str, float]:
    """How far learner and sampler disagree on the sampled tokens: log p_learner - log p_sampler in, for each.

    Returns the KL of the sampler from the learner in nats per token (the k3 estimator, which is never
    negative: Schulman 2020, "Approximating KL divergence") and quantiles of the ratio.
    """
    ratio = np.exp(log_ratio)
    low, middle, high = np.quantile(ratio, [0.01, 0.5, 0.99])
    return {
        "sampler/kl_nats": float(np.mean(ratio - 1 - log_ratio)),
        "sampler/ratio_p01": float(low),
        "sampler/ratio_p50": float(middle),
        "sampler/ratio_p99": float(high),
        "sampler/ratio_max": float(ratio.max()),
    }
