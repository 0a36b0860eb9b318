"""Runs into tables: column families, missing values, and nothing dropped without a name."""

import json
import logging
import shutil
import time

import numpy as np
import pytest
from synthetic import run_id

from analysis import load, load_curves
from experiments import manifests, store


def test_load_gives_one_row_per_expected_run_in_the_manifest_order(make_store):
    root = make_store(num_seeds=1)
    table = load("lr", root=root)
    assert table["run_id"].tolist() == manifests.read_study(root, "lr", "mini")["run_ids"]
    assert {"run_id", "state", "outcome", "step", "config.method.rank", "metric.test/nll_nats"} <= set(table)


def test_load_keeps_config_and_metric_families_apart(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    families = [c for c in table if c not in ("run_id", "state", "outcome", "step")]
    assert all(c.startswith(("config.", "metric.")) for c in families)
    assert table["metric.time.total_s"].eq(2.0).all()


def test_load_has_nan_not_zero_for_a_diverged_loss(make_store):
    table = load("lr", root=make_store(num_seeds=1))
    lost = table[table["outcome"] == "diverged"]
    assert len(lost) == 3
    assert lost["metric.test/nll_nats"].isna().all()


def test_load_names_missing_partial_and_unreadable_runs(make_store, caplog):
    root = make_store(num_seeds=1)
    shutil.rmtree(root / run_id(0, 0, 0))
    (root / run_id(0, 1, 0) / "summary.json").unlink()
    config = root / run_id(0, 2, 0) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "format": 99}))
    with caplog.at_level(logging.WARNING):
        table = load("lr", root=root)
    assert len(table) == 21
    assert table["state"].value_counts().to_dict() == {"done": 18, "missing": 1, "partial": 1, "left_out": 1}
    assert table.attrs["missing"] == [run_id(0, 0, 0)]
    assert table.attrs["unfinished"] == [f"{run_id(0, 1, 0)} (partial)"]
    assert "newer version" in table.attrs["left_out"][0]
    assert all(run_id(0, k, 0) in caplog.text for k in range(3))
    assert table.loc[table["state"] == "missing", "step"].isna().all()


def test_load_names_what_it_cannot_read_and_goes_on(make_store, caplog, forbid):
    root = make_store(num_seeds=1)
    (root / run_id(0, 0, 0) / "summary.json").write_text("{}")
    forbid(root / run_id(0, 1, 0))
    forbid(root / run_id(0, 2, 0) / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        table = load("lr", root=root)
        curves = load_curves(table, root)
    assert table["state"].value_counts().to_dict() == {"done": 19, "left_out": 2}
    hollow, unreadable = table.attrs["left_out"]
    assert f"{run_id(0, 0, 0)}/summary.json: damaged: outcome: missing" in hollow
    assert run_id(0, 1, 0) in unreadable and "permission denied" in unreadable
    assert curves["run_id"].nunique() == 19  # the curve of the hollow one is there
    assert f"{run_id(0, 2, 0)}/metrics.jsonl: permission denied" in caplog.text


@pytest.mark.parametrize("study", [None, "lr"])
def test_load_names_a_run_behind_a_link_that_it_cannot_follow(make_store, forbid, tmp_path, study):
    root = make_store(num_seeds=1)
    run = root / run_id(0, 0, 0)
    (tmp_path / "elsewhere").mkdir()
    run.rename(tmp_path / "elsewhere" / run.name)
    run.symlink_to(tmp_path / "elsewhere" / run.name)
    forbid(tmp_path / "elsewhere")
    table = load(study, root=root)
    assert (table["state"] == "done").sum() == 20
    assert f"{run}: permission denied" in table.attrs["left_out"][0]


@pytest.mark.parametrize("study", [None, "lr"])
def test_load_of_an_unreadable_store_is_one_line(make_store, forbid, study):
    root = make_store(num_seeds=1)
    forbid(root)
    with pytest.raises(store.StoreError, match="permission denied"):
        load(study, root=root)


def test_load_without_a_study_scans_the_store_and_names_foreign_directories(make_store):
    root = make_store(num_seeds=1)
    (root / "notes").mkdir()
    table = load(root=root)
    assert len(table) == 21
    assert "notes" in table.attrs["left_out"][0]


def test_load_of_an_unknown_study_names_the_known_ones(make_store):
    with pytest.raises(store.StoreError, match=r"'nope'.*lr \(mini\)"):
        load("nope", root=make_store(num_seeds=1))


def test_load_of_an_empty_store_has_the_columns(tmp_path):
    assert list(load(root=tmp_path)) == ["run_id", "state", "outcome", "step"]
    assert load_curves(load(root=tmp_path), tmp_path).empty


def test_load_curves_has_one_row_per_step_and_nan_for_null(make_store):
    root = make_store(num_seeds=1)
    curves = load_curves(load("lr", root=root), root)
    lost = curves[curves["run_id"] == run_id(16, 6, 0)]
    assert lost["step"].tolist() == [0, 1, 2, 5, 10, 22]
    assert np.isnan(lost["metric.test/nll_nats"].iloc[-1])


def test_load_curves_says_what_a_crash_cut_off(make_store, caplog):
    root = make_store(num_seeds=1)
    file = root / run_id(0, 0, 0) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 101, "test/nl')
    curves = load_curves(load("lr", root=root), root)
    assert curves[curves["run_id"] == run_id(0, 0, 0)]["step"].max() == 100
    assert "cut off" in caplog.text


def test_load_is_fast_on_hundreds_of_runs(make_store):
    root = make_store(num_seeds=10)
    begun = time.process_time()
    assert len(load("lr", root=root)) == 210
    assert time.process_time() - begun < 1.0
