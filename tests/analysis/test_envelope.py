"""Pointwise minima on curves small enough to do by hand."""

import pandas as pd
import pytest

from analysis.envelope import best_run, envelope, mean_curves, unequal_counts

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
