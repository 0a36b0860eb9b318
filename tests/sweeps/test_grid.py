"""Study files: every one composes, has unique points and lines that can be pasted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from experiments.compose import parse
from experiments.config import ConfigError, run_id
from sweeps import grid

STUDIES = [
    (name, scale)
    for name in grid.known_studies()
    for scale in yaml.safe_load((grid.SWEEPS_DIR / f"{name}.yaml").read_text())["scales"]
]


@pytest.mark.parametrize(("name", "scale"), STUDIES)
def test_every_study_composes_into_unique_runs(name: str, scale: str) -> None:
    study = grid.load_study(name, scale)
    ids = [point.run_id for point in study.points]
    assert len(ids) == len(set(ids)) > 0
    assert ids == study.manifest()["run_ids"] == [p.run_id for p in grid.load_study(name, scale).points]
    for point in study.points:
        assert run_id(parse(point.overrides)[0]) == point.run_id


def test_lr_study_at_mini_is_a_fair_grid() -> None:
    """At least 3 seeds, equal LR counts per arm (envelopes), spacing at most 2 (DESIGN 4.8)."""
    points = grid.load_study("lr", "mini").points
    arms: dict[tuple, dict[int, list[float]]] = {}
    for point in points:
        arm = arms.setdefault((point.config.method.kind, point.config.method.rank), {})
        arm.setdefault(point.config.seed.init, []).append(point.config.optim.lr)
    assert len(arms) >= 4 and all(len(seeds) >= 3 for seeds in arms.values())
    counts = {len(lrs) for seeds in arms.values() for lrs in seeds.values()}
    assert len(counts) == 1
    for seeds in arms.values():
        for lrs in seeds.values():
            ordered = sorted(lrs)
            assert all(b / a <= 2.0001 for a, b in zip(ordered, ordered[1:], strict=False))


def test_extra_overrides_reach_every_point() -> None:
    study = grid.load_study("lr", "mini", ["optim.steps=7", "launch.root=elsewhere"])
    assert {point.config.optim.steps for point in study.points} == {7}
    assert study.launch.root == "elsewhere"


def test_unknown_study_and_scale_are_one_line() -> None:
    with pytest.raises(ConfigError, match="study: 'lrr' is not known; did you mean lr?"):
        grid.load_study("lrr", "mini")
    with pytest.raises(ConfigError, match="scale: 'huge' is not allowed for study 'lr'; choose one of mini"):
        grid.load_study("lr", "huge")


def test_malformed_study_names_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "SWEEPS_DIR", tmp_path)
    (tmp_path / "odd.yaml").write_text("title: t\n")
    with pytest.raises(ConfigError, match=r"odd\.yaml: found \['title'\]; a study has exactly the fields"):
        grid.load_study("odd", "mini")


def test_where_a_study_was_launched_is_no_setting_of_it() -> None:
    """Settings are published with the reference results: no path of a machine among them."""
    study = grid.load_study("early", "mini", ["launch.root=/somewhere/runs", "launch.workers=1", "optim.steps=20"])
    assert study.manifest()["settings"]["extra"] == ["optim.steps=20"] and study.launch.root == "/somewhere/runs"
