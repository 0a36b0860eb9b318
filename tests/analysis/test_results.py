"""Results of all studies: what is expected, what is there, and values read off earlier steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from synthetic_studies import make_results, without

from analysis.results import Results, from_store, provenance
from experiments import manifests, store


def test_values_are_read_off_at_an_earlier_step_while_the_run_lives() -> None:
    study = make_results(("lr",), diverges=1.5).study("lr")
    assert study is not None
    lost = study.runs[study.runs["outcome"] == "diverged"]
    died = int(lost["step"].iloc[0])
    assert len(lost) and (lost["step"] == died).all() and died > 1
    early, late = study.at(1), study.at(100)
    assert len(early) == len(late) == len(study.runs)
    assert early["value"].notna().all()  # nobody has diverged yet
    assert set(late.loc[late["value"].isna(), "run_id"]) == set(lost["run_id"])
    one = study.curves[study.curves["step"] == 1].set_index("run_id")["metric.test/nll_nats"]
    assert (early.set_index("run_id")["value"].sort_index() == one.sort_index()).all()
    final = study.runs.set_index("run_id")["value"]
    pd.testing.assert_series_equal(late.set_index("run_id")["value"].sort_index(), final.sort_index())


def test_runs_that_were_not_evaluated_at_a_step_have_no_row() -> None:
    study = make_results(("width",)).study("width")
    assert study is not None
    assert set(study.at(316)["config.model.name"]) == {"mini-w128"}  # the others end at 100
    assert set(study.at(100)["config.model.name"]) == {"mini-w64", "mini-w128", "mini-w256"}


def test_holes_are_points_without_any_run_and_missing_counts_every_run() -> None:
    whole = make_results(("lr",))
    ids = whole.studies["lr"]["run_ids"]
    one = without(whole, f"run_id == '{ids[0]}'").study("lr")
    assert one is not None and one.missing == [ids[0]] and one.holes == []
    gone = without(whole, "`config.method.rank` == 4 and `config.optim.lr` == 0.002").study("lr")
    assert gone is not None and len(gone.missing) == 3
    assert gone.holes == [("", "r4-unembed", 0.002)]


def test_shared_runs_are_held_once() -> None:
    results = make_results(("lr", "batch"))
    ids = [set(results.studies[name]["run_ids"]) for name in ("lr", "batch")]
    assert results.num_shared == len(ids[0] & ids[1]) > 20
    assert len(results.points) == len(ids[0] | ids[1])


def test_store_and_its_missing_runs(make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    root: Path = make_store(num_seeds=2)  # without provenance files
    monkeypatch.setattr("analysis.results.provenance", lambda ids, root: {"num_runs": len(ids), "dirty": False})
    manifest = manifests.read_study(root, "lr", "mini")
    more = {"run_ids": [*manifest["run_ids"], "gone-1"], "configs": {"gone-1": {"method": {"kind": "full"}}}}
    manifests.write_study(root, "lr", "mini", manifest | more)
    manifests.write_study(root, "lr+optim.steps=5", "mini", manifest)
    measured = {"host": "mine", "commit": "1" * 40, "diff": "+x"}
    store.write_json(root / "exact.json", {"C24": {"rows": []}, "provenance": measured})
    results: Results = from_store(root)
    assert results.exact == {"C24": {"rows": []}} and results.provenance["dirty"] is True
    assert results.provenance["exact"]["commit"] == "1" * 40 and "mine" not in str(results.provenance)
    assert list(results.studies) == ["lr"]  # overridden studies are others
    assert "gone-1" in set(results.points["run_id"]) and "gone-1" not in set(results.outcomes["run_id"])
    assert len(results.curves) and results.study("nope") is None


def test_provenance_names_every_value_and_uncommitted_changes(tmp_path: Path) -> None:
    for name, commit, diff in (("a", "1" * 40, ""), ("b", "2" * 40, ""), ("c", "2" * 40, "+x")):
        (tmp_path / name).mkdir()
        store.write_json(tmp_path / name / "provenance.json", {"commit": commit, "diff": diff, "python": "3.11"})
    found = provenance(["a", "b"], tmp_path)
    assert found["commit"] == ["1" * 40, "2" * 40] and found["python"] == "3.11" and found["dirty"] is False
    assert provenance(["a", "c"], tmp_path)["dirty"] is True
    record = store.read_json(tmp_path / "a" / "provenance.json")
    earlier = [{**record, "commit": "3" * 40, "diff": "+x"}]
    store.write_json(tmp_path / "a" / "provenance.json", {**record, "earlier": earlier})
    found = provenance(["a"], tmp_path)
    assert found["commit"] == ["1" * 40, "3" * 40] and found["dirty"] is True
