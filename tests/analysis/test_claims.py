"""Verdicts in invented worlds with a known answer, and what becomes of them when runs are taken away."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from synthetic_studies import ALL, make_results, without

from analysis import verdict
from analysis.claims import CLAIMS, Verdict, judge
from analysis.inference import Estimate
from analysis.judges import gaps
from analysis.results import Results, from_reference, save
from experiments import store

BY_ID = {claim.id: claim for claim in CLAIMS}
RL = {"Q1", "C17", "C18", "C19", "C20"}
"""Judged in test_judges_rl.py: these worlds hold supervised runs only."""


@lru_cache(maxsize=1)
def post() -> Results:
    """The post's world."""
    return make_results()


def judged(results: Results, *ids: str) -> dict[str, Verdict]:
    return {v.claim.id: v for v in judge(results, [BY_ID[i] for i in ids] if ids else CLAIMS)}


def test_every_claim_of_the_post_is_there_once() -> None:
    assert [claim.id for claim in CLAIMS] == [*(f"C{k}" for k in range(1, 25)), "Q1"]
    assert {name for claim in CLAIMS for name in claim.studies} == {*ALL, "rl-lr", "rl-bits", "rl-tools"}


def test_the_posts_world_reproduces_every_claim_that_runs_can_settle() -> None:
    found = judged(post())
    found["C15"] = judged(make_results(("placement",), seeds_noise=0.002), "C15")["C15"]  # two seeds: needs quiet
    assert {i for i, v in found.items() if v.verdict == "reproduced"} == set(BY_ID) - RL
    assert all(found[i].verdict == "not run" for i in RL)
    assert all(v.here and v.why and v.n for i, v in found.items() if i not in RL)


@pytest.mark.parametrize(
    ("claim", "study", "truth"),
    [
        ("C1", "rank", {"lora_gap": 0.6}),
        ("C4", "rank", {"slow": 1.2}),
        ("C5", "lr", {"ratio": 3.0}),
        ("C6", "width", {"width_power": 1.0, "ratio": 4.0}),
        ("C7", "lr", {"rank_one": 2.5, "ratio": 4.0}),
        ("C8", "capacity", {"bits_per_parameter": 2.6}),
        ("C9", "early", {"leaves": 32.0, "slow": 1.0}),
        ("C10", "length", {"length_power": -0.2}),
        ("C11", "batch", {"batch_slope": -0.05}),
        ("C13", "batch", {"batch_cost": -0.1}),
        ("C14", "placement", {"attn_penalty": -0.3}),
        ("C16", "placement", {"attn_penalty": -0.3}),
        ("C22", "rank", {"frac_b": 0.02}),
    ],
)
def test_the_opposite_world_contradicts(claim: str, study: str, truth: dict[str, float]) -> None:
    studies = BY_ID[claim].studies
    assert study in studies
    assert judged(make_results(studies, **truth), claim)[claim].verdict == "contradicted"


def test_noise_leaves_claims_undecided_and_says_what_it_takes() -> None:
    found = judged(make_results(("batch", "placement"), seeds_noise=0.5), "C11", "C12", "C14", "C15")
    undecided = [v for v in found.values() if v.verdict == "undecided"]
    assert undecided and all(v.needs for v in undecided)


def test_exact_claims_follow_their_records() -> None:
    ranks = post().exact["C9"]["adam"]["ranks"]
    shifted = {**ranks[0], "along_gradient": 1.1 * ranks[1]["along_gradient"]}
    wrong = {
        "C9": {**post().exact["C9"], "adam": {**post().exact["C9"]["adam"], "ranks": [shifted, *ranks[1:]]}},
        "C21": {**post().exact["C21"], "largest": {"corrected_eps": {"weights": 1e-6}, "shared_eps": {"weights": 0.1}}},
        "C23": {**post().exact["C23"], "layers": [{"ratio": 0.9, "rank": 16, "width": 64}]},
        "C24": {"rows": [r | {"with_unembedding": r["without_unembedding"]} for r in post().exact["C24"]["rows"]]},
    }
    for name, record in wrong.items():
        results = dataclasses.replace(post(), exact={**post().exact, name: record})
        assert judged(results, name)[name].verdict == "contradicted"
        assert judged(dataclasses.replace(post(), exact={}), name)[name].verdict == "not run"


@pytest.mark.parametrize("study", ALL)
def test_a_study_never_begun_is_not_run(study: str) -> None:
    others = {name: manifest for name, manifest in post().studies.items() if name != study}
    resting = [claim.id for claim in CLAIMS if study in claim.studies]
    found = judged(dataclasses.replace(post(), studies=others), *resting)
    assert {v.verdict for v in found.values()} == {"not run"}
    assert all(f"make sweep-{study}" in v.needs for v in found.values())


@pytest.mark.parametrize("study", ALL)
def test_any_run_taken_away_shows_in_every_verdict_that_rests_on_it(study: str) -> None:
    """Whichever run is deleted, no verdict silently stays: it is undecided or says what it rests on."""
    resting = [claim for claim in CLAIMS if study in claim.studies and claim.id not in RL]
    ids = post().studies[study]["run_ids"]
    for gone in np.random.default_rng(0).choice(ids, 3, replace=False):
        for v in judge(without(post(), f"run_id == '{gone}'"), resting):
            assert v.verdict == "undecided" or f"1 of {len(ids)} runs of {study} are missing" in v.why


@pytest.mark.parametrize("claim", ["C1", "C5", "C6", "C11", "C14", "C10", "C8"])
def test_an_lr_without_any_run_leaves_the_claim_undecided(claim: str) -> None:
    study = BY_ID[claim].studies[0]
    results = make_results((study,))
    found = results.study(study)
    assert found is not None
    panel, arm, lr = found.points[["panel", "arm", "lr"]].iloc[-2]
    same = found.points[(found.points["panel"] == panel) & (found.points["arm"] == arm) & (found.points["lr"] == lr)]
    v = judged(without(results, f"run_id in {same['run_id'].tolist()}"), claim)[claim]
    assert v.verdict == "undecided" and f"{arm} at LR {lr:g}" in v.why and "make sweep" in v.needs


@pytest.mark.parametrize(
    "gone",
    [
        "`config.method.kind` == 'lora'",
        "`config.method.kind` == 'full'",
        "`config.method.rank` != 1",
        "`config.method.placement` != 'attn'",
        "`config.seed.init` > 0",
    ],
)
def test_a_store_with_only_a_part_of_the_runs_is_no_traceback(gone: str) -> None:
    """What a stopped sweep leaves: every claim says something, and none of them is decided."""
    results = without(post(), gone)
    for v in judge(results):
        studies = [results.study(name) for name in v.claim.studies]
        if any(study is not None and study.missing for study in studies):
            assert v.verdict in ("undecided", "not run") or "fewer seeds" in v.why, v


def test_growth_shown_to_be_smaller_than_the_margin_is_no_growth() -> None:
    study = make_results(("batch",), seeds_noise=0.001, batch_slope=0.0).study("batch")
    assert study is not None
    assert gaps.slope_margin(study) > 0
    tiny, clear = gaps.slope_margin(study) / 2, gaps.slope_margin(study) * 3
    assert gaps._grows(Estimate(0.0, tiny / 10, 9), 2 * tiny, 0.95) == "no"
    assert gaps._grows(Estimate(tiny, tiny / 10, 9), 2 * tiny, 0.95) == "undecided"  # above 0, below the margin
    assert gaps._grows(Estimate(clear, tiny, 9), 2 * tiny, 0.95) == "yes"


def test_studies_looked_at_twice_are_judged_at_half_the_error() -> None:
    study = make_results(("rank",)).study("rank")
    assert study is not None and study.level == pytest.approx(0.975)
    assert dataclasses.replace(study, settings={}).level == 0.95


def test_bits_count_all_facts_though_only_some_are_asked_for() -> None:
    results = make_results(("capacity",))
    study = results.study("capacity")
    assert study is not None
    whole = gaps.stored_bits(study)
    runs = study.runs.assign(**{"config.data.num_test": 128, "metric.test/num_tokens": 9 * 128})
    part = gaps.stored_bits(dataclasses.replace(study, runs=runs))
    assert (part["total_bits"] == 512 * 32).all()
    assert np.allclose(part["bits"], whole["bits"])


def test_an_arm_that_diverges_everywhere_is_no_traceback() -> None:
    found = judged(make_results(("lr", "batch"), diverges=1e-6), "C5", "C7", "C11", "C13")
    assert {v.verdict for v in found.values()} == {"undecided"}


def test_reference_tables_give_the_same_verdicts_and_the_same_bytes(tmp_path: Path) -> None:
    save(post(), tmp_path / "a")
    save(from_reference(tmp_path / "a"), tmp_path / "b")
    tables, texts = ("curves", "points", "runs"), ("exact", "provenance", "studies")
    files = sorted([*(f"{name}.parquet" for name in tables), *(f"{name}.json" for name in texts)])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    again = judged(from_reference(tmp_path / "a"), "C1", "C5", "C9", "C14", "C21")
    for name, v in judged(post(), "C1", "C5", "C9", "C14", "C21").items():
        assert (again[name].verdict, again[name].here, again[name].why) == (v.verdict, v.here, v.why)


def test_command_writes_three_files_that_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(verdict, "REFERENCE_DIR", tmp_path)
    save(make_results(("lr",)), tmp_path / "mini")
    assert verdict.main(["--out", str(tmp_path / "out")]) == 0
    records = json.loads((tmp_path / "out" / "verdict.json").read_text())["claims"]
    assert [r["claim"] for r in records] == list(BY_ID)
    five = next(r for r in records if r["claim"] == "C5")
    assert five["verdict"] == "reproduced" and five["interval"][0] < five["value"] < five["interval"][1]
    markdown, table = (tmp_path / "out" / f"verdict.{kind}" for kind in ("md", "csv"))
    assert f"| **C5** {five['statement']} | 10 (9.8) | {five['here']} |" in markdown.read_text()
    assert table.read_text().count("not run") == sum(r["verdict"] == "not run" for r in records)
    printed = capsys.readouterr().out
    assert f"{len(CLAIMS)} claims at scale mini" in printed and "105 of 105 runs of 1 studies" in printed


def test_a_missing_reference_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(verdict, "REFERENCE_DIR", tmp_path)
    assert verdict.main([]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises(store.StoreError, match="not readable"):
        from_reference(tmp_path / "nowhere")
