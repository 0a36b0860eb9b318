"""The study files: all compose, share runs, sweep as many LRs for every arm, and name their claims."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from analysis.claims import CLAIMS
from analysis.figures.registry import FIGURES
from experiments import manifests, store
from experiments.config import encode
from experiments.run import execute
from sweeps import studies
from sweeps.grid import SWEEPS_DIR, Study, known_studies, load_study

STUDIES = [
    (name, scale)
    for name in known_studies()
    for scale in yaml.safe_load((SWEEPS_DIR / f"{name}.yaml").read_text())["scales"]
]


def test_every_study_is_there_at_every_scale_but_the_one_whose_tools_need_a_model() -> None:
    every = {(name, scale) for name in known_studies() for scale in ("mini", "smol", "paper")}
    assert every - set(STUDIES) == {("rl-tools", "smol"), ("rl-tools", "paper")}


@pytest.mark.parametrize(("name", "scale"), STUDIES)
def test_every_study_composes_at_every_scale_with_equal_lr_counts(name: str, scale: str) -> None:
    """An envelope, and a best LR, is flattered by more LRs: arms are compared at equal counts only."""
    study = load_study(name, scale)
    assert len({point.run_id for point in study.points}) == len(study.points) > 1
    lrs, seeds = defaultdict(set), defaultdict(set)
    for point in study.points:
        config = point.config
        compared = (config.model.name, config.optim.batch_size)
        lrs[compared, config.method].add(config.optim.lr)
        seeds[compared, config.method, config.optim.lr].add(config.seed.init)
    if name != "width":  # its alphas are no arms of one comparison
        for compared in {key[0] for key in lrs}:
            assert len({len(found) for key, found in lrs.items() if key[0] == compared}) == 1, compared
    if scale == "mini":  # seeds may be added around an optimum, but every LR of every arm has at least two
        assert min(map(len, seeds.values())) >= 2


@pytest.mark.parametrize("name", known_studies())
def test_claims_and_figure_of_a_study_are_known(name: str) -> None:
    study = load_study(name, "mini")
    assert sorted(study.claims) == sorted(claim.id for claim in CLAIMS if name in claim.studies)
    assert study.figure in {*FIGURES, "lr"}


def test_shared_runs_are_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert studies.main(["lr", "batch", "--dry", f"launch.root={tmp_path}"]) == 0
    lr, batch = (load_study(name, "mini") for name in ("lr", "batch"))
    shared = {p.run_id for p in lr.points} & {p.run_id for p in batch.points}
    assert len(shared) > 20
    said = capsys.readouterr()
    assert f"2 studies ask for {len(lr.points) + len(batch.points)} runs; {len(shared)} are shared" in said.err
    assert f"{len(lr.points) + len(batch.points) - len(shared)} runs" in said.out


def test_each_study_keeps_its_own_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {}
    for name in ("lr", "batch"):
        whole = load_study(name, "mini")
        few[name] = Study(**{**vars(whole), "points": whole.points[:2]})
    monkeypatch.setattr(studies, "load_study", lambda name, scale, extra: few[name])
    trained: list[str] = []
    monkeypatch.setattr("sweeps.launch.run_all", lambda todo, launch, show: trained.extend(p.run_id for p in todo))
    monkeypatch.setattr("sweeps.launch._check_models", lambda study: None)
    monkeypatch.setattr(studies, "ensure_root", lambda root: store.ensure_root(tmp_path))
    assert studies.main(["lr", "batch"]) == 0
    assert sorted(trained) == sorted({p.run_id for study in few.values() for p in study.points})
    for name, study in few.items():
        manifest = manifests.read_study(tmp_path, name, "mini")
        assert manifest["run_ids"] == [p.run_id for p in study.points]
        assert manifest["configs"] == {p.run_id: encode(p.config) for p in study.points}


def test_an_unknown_study_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert studies.main(["lr", "rnak"]) == 2
    assert capsys.readouterr().err == "error: study: 'rnak' is not known; did you mean rank?\n"


@pytest.mark.parametrize("name", known_studies())
def test_a_run_of_every_study_trains(name: str, tmp_path: Path) -> None:
    """Two steps of its last arm on the real base: adapters, data and records of the study fit together."""
    short = ["optim.steps=2", "data.num_test=5", "data.num_train=64", f"launch.root={tmp_path}"]
    study = load_study(name, "mini", short)
    config = study.points[-1].config
    summary = execute(config, study.launch)
    if config.is_rl:
        assert summary["step"] == 2
        assert (0 if config.rl.max_tool_calls else 1e-9) <= summary["metrics"]["test/reward_base"] < 1
        assert summary["metrics"]["test/num_ungraded"] == 0 and summary["num_trainable"] > 0
        return
    assert summary["step"] == 2 and summary["metrics"]["test/nll_nats"] < summary["metrics"]["test/nll_base_nats"]
    assert summary["metrics"]["test/num_tokens"] > 0 and summary["metrics"]["adapter/norm_a_median"] > 0
