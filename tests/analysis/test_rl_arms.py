"""Rewards as failure rates, and the names of arms below rank 1."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic_rl import make_rl_results, make_rl_study

from analysis.arms import BASES, REWARD, VALUE, as_loss, find_arms, label_arms
from analysis.results import study_runs


def raw(name: str = "rl-lr", **world: float) -> pd.DataFrame:
    """A table as ``load`` gives it."""
    results = make_rl_results((name,), **world)
    return results.points.merge(results.outcomes, on="run_id")


def test_rewards_become_failure_rates_and_losses_stay() -> None:
    values = pd.Series([0.0, 0.25, 1.0, np.nan])
    for metric in (REWARD, BASES[REWARD]):
        assert as_loss(values, metric).tolist()[:3] == [1.0, 0.75, 0.0] and np.isnan(as_loss(values, metric)[3])
    for metric in (VALUE, BASES[VALUE], "test/accuracy_greedy"):
        assert as_loss(values, metric) is values


def test_value_and_base_of_a_reward_are_both_failure_rates() -> None:
    table = raw()
    runs = label_arms(table, REWARD).set_index("run_id")
    raw_reward = table.set_index("run_id")["metric.test/reward"]
    assert runs["value"].to_numpy() == pytest.approx(1 - raw_reward[runs.index].to_numpy())
    assert set(runs["base"]) == {0.65}
    assert runs["metric.test/reward"].to_numpy() == pytest.approx(raw_reward[runs.index].to_numpy())  # as recorded


def test_held_out_loss_is_left_as_it_is() -> None:
    table = raw().assign(**{"metric.test/nll_nats": 2.0, "metric.test/nll_base_nats": 3.0})
    runs = label_arms(table)
    assert set(runs["value"]) == {2.0} and set(runs["base"]) == {3.0}


def test_collapsed_run_has_no_value_though_a_reward_is_recorded() -> None:
    study = make_rl_study(collapses={"full": 4e-4})
    lost = study.runs[study.runs["outcome"] == "diverged"]
    assert set(lost["lr"]) == {4e-4, 8e-4} and len(lost) == 6
    assert lost["value"].isna().all() and (lost["metric.test/reward"] == 0.0).all()


def test_best_lr_is_that_of_the_highest_reward_and_the_ratio_is_known() -> None:
    arms = {arm.name: arm for arm in find_arms(make_rl_study(noise=0.001).runs)}
    assert arms["full"].optimum.lr_star == pytest.approx(1e-4, rel=0.05)
    assert arms["r1-unembed"].ratio.value == pytest.approx(5.0, rel=0.05)
    assert arms["full"].optimum.best == pytest.approx(0.2, abs=0.005)


def test_arms_of_one_study_are_one_panel_and_tiny_ones_are_named_by_their_numbers() -> None:
    study = make_rl_study("rl-bits")
    assert set(study.runs["panel"]) == {""}
    wanted = {"full", "r1-unembed", "r16-unembed", "tiny1-tied", "tiny16-tied", "tiny4", "tiny64"}
    assert set(study.runs["arm"]) == set(study.points["arm"]) == wanted
    assert set(study.runs.loc[study.runs["arm"].str.startswith("tiny"), "rank"]) == {0}


def test_reward_read_off_at_a_step_is_a_failure_rate_too() -> None:
    study = make_rl_study(noise=0.0, collapses={"full": 4e-4})
    early, end = study.at(10, REWARD), study.at(100, REWARD)
    best = (early["arm"] == "full") & (early["lr"] == 1e-4)
    assert early.loc[best, "value"].to_numpy() == pytest.approx([1 - (0.35 + 0.1 * 0.45)] * 3)
    lost = early["outcome"] == "diverged"
    assert early.loc[lost, "value"].to_numpy() == pytest.approx([1 - 0.35 * 0.9] * 6)  # it had not collapsed yet
    assert end.loc[end["outcome"] == "diverged", "value"].isna().all()
    kept = end[end["outcome"] == "finished"].set_index("run_id")["value"]
    assert kept.to_numpy() == pytest.approx(study.runs.set_index("run_id")["value"][kept.index].to_numpy())
    assert len(early) == len(end) == len(study.runs)


def test_other_metrics_read_off_at_a_step_are_left_as_they_are() -> None:
    assert set(make_rl_study().at(10, "test/length")["value"]) == {4.5}


def test_a_study_of_rewards_without_a_finished_run_is_no_traceback() -> None:
    table = raw().assign(state="missing")
    study = study_runs("rl-lr", {"value": REWARD}, table, pd.DataFrame({"run_id": [], "step": []}))
    assert study.runs.empty and len(study.missing) == 84
