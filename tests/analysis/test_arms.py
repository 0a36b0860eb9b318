"""From runs to arms: names, panels, and the known answer of a synthetic study."""

import json

import numpy as np
import pytest
from synthetic import STARS, run_id

from analysis import load
from analysis.arms import arm_records, arm_table, find_arms, label_arms


def test_arms_recover_the_known_optima_and_ratios(make_store):
    arms = {arm.name: arm for arm in find_arms(label_arms(load("lr", root=make_store())))}
    assert list(arms) == ["full", "r1", "r16"]
    for name, star in zip(arms, STARS.values(), strict=True):
        low, high = arms[name].optimum.interval
        assert low < star < high
        assert arms[name].optimum.lr_star == pytest.approx(star, rel=0.05)
    assert arms["r16"].ratio.value == pytest.approx(10, rel=0.05)
    assert arms["full"].ratio is None


def test_arms_take_diverged_runs_for_diverged_whatever_their_last_loss(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    table["metric.test/nll_nats"] = table["metric.test/nll_nats"].fillna(0.01)
    runs = label_arms(table)
    assert runs.loc[runs["outcome"] == "diverged", "value"].isna().all()


def test_arm_names_say_placement_alpha_and_unembedding(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    changes = {"placement": "mlp", "alpha": 64.0, "unembed": True}
    for (field, value), k in zip(changes.items(), range(3), strict=True):
        table.loc[table["run_id"] == run_id(16, k, 0), f"config.method.{field}"] = value
    assert set(label_arms(table)["arm"]) == {"full", "r1", "r16", "r16-mlp", "r16-alpha64", "r16-unembed"}


def test_arm_names_say_how_experts_share_the_rank(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    table["config.method.expert_rank"], table["config.method.shared_outer"] = "active", False
    table.loc[table["run_id"] == run_id(16, 0, 0), "config.method.expert_rank"] = "total"
    table.loc[table["run_id"] == run_id(16, 1, 0), "config.method.shared_outer"] = True
    assert set(label_arms(table)["arm"]) == {"full", "r1", "r16", "r16-total", "r16-outer"}


def test_arms_are_compared_within_a_panel_only(make_store):
    runs = label_arms(load("lr", root=make_store(num_seeds=1, models=("w128", "w64"))))
    arms = find_arms(runs)
    assert [arm.panel for arm in arms] == ["w64"] * 3 + ["w128"] * 3  # by number, not by letter
    lonely = find_arms(runs[(runs["panel"] == "w64") | (runs["arm"] != "full")])
    assert [arm.ratio is None for arm in lonely] == [True, False, False, True, True]


def test_panels_name_whatever_else_differs(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    table.loc[::2, "config.optim.batch_size"] = 32
    assert set(label_arms(table)["panel"]) == {"batch_size 16", "batch_size 32"}


def test_label_arms_of_an_unknown_metric_names_the_known_ones(make_store):
    with pytest.raises(ValueError, match=r"'test/acc' is not a metric.*test/nll_nats"):
        label_arms(load("lr", root=make_store(num_seeds=1)), "test/acc")


def test_arm_table_and_records_agree_and_are_strict_json(make_store):
    runs = label_arms(load("lr", root=make_store()))
    arms = find_arms(runs[(runs["arm"] != "r1") | (runs["lr"] < 2.5e-3)])  # r1 loses its right wall
    table, records = arm_table(arms), json.loads(json.dumps(arm_records(arms), allow_nan=False))
    assert [r["verdict"] for r in records] == ["decided", "undecided", "decided"]
    assert records[1]["lr_star"] is None
    assert np.isnan(table["lr_star"][1])
    assert records[2]["ratio_interval"] == pytest.approx([table["ratio_low"][2], table["ratio_high"][2]])
    assert records[1]["add_lrs"] == [4e-3, 8e-3]
