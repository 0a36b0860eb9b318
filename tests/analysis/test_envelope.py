"""Pointwise minima on curves small enough to do by hand."""

import numpy as np
import pandas as pd
import pytest

from analysis.envelope import best_run, envelope, mean_curves, minimum_bias, unequal_counts

RUNS = pd.DataFrame(
    [("a0", 1e-3, "0"), ("a1", 1e-3, "1"), ("b0", 2e-3, "0"), ("b1", 2e-3, "1")], columns=["run_id", "lr", "seed"]
).assign(panel="", arm="r1")


def curves(**by_run: list[float]) -> pd.DataFrame:
    rows = [(run, step, nll) for run, values in by_run.items() for step, nll in zip((1, 10), values, strict=False)]
    return pd.DataFrame(rows, columns=["run_id", "step", "metric.test/nll_nats"])


CURVES = curves(a0=[3.0, 2.0], a1=[5.0, 2.2], b0=[3.0, 2.4], b1=[3.0, 2.6])


def test_mean_curves_average_seeds_first():
    means = mean_curves(RUNS, CURVES).set_index(["lr", "step"])["nll"]
    assert means.to_dict() == pytest.approx({(1e-3, 1): 4.0, (1e-3, 10): 2.1, (2e-3, 1): 3.0, (2e-3, 10): 2.5})


def test_envelope_is_the_minimum_over_lrs_of_the_means():
    found = envelope(mean_curves(RUNS, CURVES))
    assert found["nll"].tolist() == pytest.approx([3.0, 2.1])
    assert found["lr"].tolist() == [2e-3, 1e-3]


def test_best_run_is_one_lr_all_along_chosen_at_the_last_step():
    early_bird = curves(a0=[3.0, 2.0], a1=[5.0, 2.2], b0=[1.0, 2.4], b1=[1.0, 2.6])
    found = best_run(mean_curves(RUNS, early_bird))
    assert set(found["lr"]) == {1e-3}
    assert found["nll"].tolist() == pytest.approx([4.0, 2.1])


def test_mean_curves_drop_an_lr_once_a_seed_has_diverged():
    """Else the mean of the surviving, better seed would win the envelope."""
    means = mean_curves(RUNS, curves(a0=[3.0, 1.0], a1=[5.0, float("nan")], b0=[3.0, 2.4], b1=[3.0, 2.6]))
    assert envelope(means)["nll"].tolist() == pytest.approx([3.0, 2.5])
    assert means[means["lr"] == 1e-3]["step"].tolist() == [1]


def test_unequal_counts_says_which_arm_is_flattered():
    more = pd.concat([RUNS, RUNS.iloc[:1].assign(arm="full", run_id="f")])
    assert unequal_counts(RUNS) == ""
    assert "r1 2, full 1" in unequal_counts(more)


def test_minimum_bias_is_the_expected_least_of_normal_draws():
    rng = np.random.default_rng(0)
    known = {1: 0.0, 2: -1 / np.sqrt(np.pi), 3: -3 / (2 * np.sqrt(np.pi)), 7: -1.3522}  # order statistics
    assert {n: minimum_bias(n, rng) for n in known} == pytest.approx(known, abs=0.02)


def test_envelope_of_equal_lrs_lies_lower_the_more_of_them_there_are():
    """Simulated arms without any difference, 200 studies each: the bias is the one that minimum_bias says, at equal
    counts it cancels, and at 7 LRs against 3 it would pass for half a standard deviation of improvement."""
    rng = np.random.default_rng(1)

    def lowest(num_lrs: int) -> float:
        runs = pd.DataFrame({"run_id": [f"r{k}" for k in range(num_lrs)], "lr": 1e-3 * 2.0 ** np.arange(num_lrs)})
        noise = rng.standard_normal(num_lrs)
        table = pd.DataFrame({"run_id": runs["run_id"], "step": 1, "metric.test/nll_nats": noise})
        return float(envelope(mean_curves(runs.assign(panel="", arm="r1", seed="0"), table))["nll"].iloc[0])

    few, many, again = (np.mean([lowest(n) for _ in range(200)]) for n in (3, 7, 7))
    assert few == pytest.approx(minimum_bias(3, rng), abs=0.15)
    assert many == pytest.approx(minimum_bias(7, rng), abs=0.15)
    assert few - many > 0.3 and abs(many - again) < 0.25
