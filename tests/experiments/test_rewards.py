"""Arithmetic on rewards against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.rewards import frac_mixed, group_bits, ratio_summary

NAN = math.nan


def group(right: int, wrong: int, failed: int = 0) -> list[float]:
    return [1.0] * right + [0.0] * wrong + [NAN] * failed


@pytest.mark.parametrize(
    ("rewards_PG", "bits"),
    [
        ([group(8, 0)], 0.0),
        ([group(0, 8)], 0.0),
        ([group(4, 4)], 8.0),  # H(1/2) = 1, and no completion tells more than one bit
        ([group(4, 4), group(0, 8), group(8, 0), group(4, 4)], 16.0),
        ([group(1, 1, 6)], 2.0),
        ([group(1, 0, 7)], 0.0),  # all that is known of it is right
        ([group(0, 0, 8)], 0.0),
        ([group(2, 2, 2), group(0, 3, 3)], 4.0),
    ],
)
def test_group_bits_of_plain_cases(rewards_PG: list[list[float]], bits: float) -> None:
    assert group_bits(np.array(rewards_PG)) == bits


@pytest.mark.parametrize("failed", [0, 3])
def test_group_bits_has_the_miller_correction(failed: int) -> None:
    """One right of eight: 8 H(1/8) = 3 + 7 log2(8/7) = 4.3485 bits, and 8 / (2 * 8 ln 2) = 0.7213 added back."""
    by_hand = 3 + 7 * math.log2(8 / 7) + 1 / (2 * math.log(2))
    assert group_bits(np.array([group(1, 7, failed)])) == pytest.approx(by_hand, rel=1e-12)
    assert group_bits(np.array([group(7, 1, failed)])) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(5.0699, abs=1e-4)


def test_group_bits_are_summed_group_by_group() -> None:
    """A pooled estimate would see five right of sixteen."""
    one, four = 3 + 7 * math.log2(8 / 7) + 1 / (2 * math.log(2)), 8.0
    assert group_bits(np.array([group(1, 7), group(4, 4)])) == pytest.approx(one + four, rel=1e-12)


def test_group_bits_do_not_depend_on_the_order_within_a_group() -> None:
    assert group_bits(np.array([[0, NAN, 1, 0, 0]])) == group_bits(np.array([[NAN, 0, 0, 0, 1]]))


def test_group_bits_never_exceed_the_number_graded() -> None:
    for size in (2, 3, 4, 8):
        for right in range(size + 1):
            for wrong in range(size + 1 - right):
                bits = group_bits(np.array([group(right, wrong, size - right - wrong)]))
                assert 0 <= bits <= right + wrong
                assert (bits > 0) == (right > 0 and wrong > 0)


def test_group_bits_are_nearer_the_truth_than_the_plug_in_estimate() -> None:
    """50,000 groups of eight with true p = 0.2; one completion carries H(0.2) = 0.7219 bits."""
    truth = 0.2 * math.log2(5) + 0.8 * math.log2(1.25)
    rewards_PG = (np.random.default_rng(0).random((50_000, 8)) < 0.2).astype(float)
    p_P = rewards_PG.mean(axis=1)
    p_mixed = p_P[(p_P > 0) & (p_P < 1)]
    plug_in = -(p_mixed * np.log2(p_mixed) + (1 - p_mixed) * np.log2(1 - p_mixed)).sum() / len(p_P)
    corrected = group_bits(rewards_PG) / rewards_PG.size
    assert plug_in < truth - 0.06
    assert abs(corrected - truth) < 0.5 * abs(plug_in - truth)


@pytest.mark.parametrize(
    ("rewards_PG", "share"),
    [
        ([group(4, 0), group(0, 4)], 0.0),
        ([group(1, 3), group(3, 1)], 1.0),
        ([group(1, 3), group(4, 0), group(0, 4), group(0, 4)], 0.25),
        ([group(1, 0, 3), group(0, 1, 3), group(0, 0, 4), group(1, 1, 2)], 0.25),  # failures mix nothing
    ],
)
def test_frac_mixed_counts_groups_with_a_gradient(rewards_PG: list[list[float]], share: float) -> None:
    assert frac_mixed(np.array(rewards_PG)) == share


def test_ratio_summary_of_agreement_is_no_divergence() -> None:
    assert ratio_summary(np.zeros(5)) == {
        "sampler/kl_nats": 0.0, "sampler/ratio_p01": 1.0, "sampler/ratio_p50": 1.0, "sampler/ratio_p99": 1.0,
        "sampler/ratio_max": 1.0,
    }  # fmt: skip


def test_ratio_summary_by_hand() -> None:
    """Ratios 2 and 1/2: the mean of (2 - 1 - ln 2) and (1/2 - 1 + ln 2) is 1/4; quantiles are interpolated."""
    found = ratio_summary(np.array([math.log(2), -math.log(2)]))
    assert found == pytest.approx(
        {
            "sampler/kl_nats": 0.25, "sampler/ratio_p01": 0.515, "sampler/ratio_p50": 1.25, "sampler/ratio_p99": 1.985,
            "sampler/ratio_max": 2.0,
        }
    )  # fmt: skip


def test_ratio_summary_is_the_divergence_under_the_sampler() -> None:
    """Sampler (3/4, 1/4), learner (1/2, 1/2), tokens as often as sampled: KL(sampler || learner), not the other."""
    log_ratio = np.log([0.5 / 0.75] * 3 + [0.5 / 0.25])
    assert ratio_summary(log_ratio)["sampler/kl_nats"] == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2))


@pytest.mark.parametrize("log_ratio", [[-0.1], [0.1], [-3.0, -1.0], [2.0, 4.0, 0.1], [-1e-4, 1e-4]])
def test_kl_is_never_negative(log_ratio: list[float]) -> None:
    assert ratio_summary(np.array(log_ratio))["sampler/kl_nats"] > 0
