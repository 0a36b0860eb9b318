"""The search through the real launcher: rounds, what is free, what is recorded, what a repeated command does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.results import from_store
from experiments import manifests, store
from experiments.config import encode
from sweeps import grid
from sweeps import launch as grid_launch
from sweeps.grid import Study, load_study
from sweeps.search import launch
from sweeps.search.arms import MARK, finished, searched
from sweeps.search.launch import as_study, run

pytestmark = pytest.mark.sweep
PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def study(tiny_study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Full and two ranks, five LRs a factor of two apart, two seeds: 30 runs."""
    mini = tiny_study["scales"]["mini"]
    lrs = "5e-3,1e-2,2e-2,4e-2,8e-2"
    mini["arms"] = [f"method=full optim.lr={lrs}", f"method=lora method.rank=2,4 optim.lr={lrs}"]
    sweeps = tmp_path / "sweeps"
    sweeps.mkdir()
    (sweeps / "tiny.yaml").write_text(yaml.safe_dump(tiny_study))
    (sweeps / "fixed.yaml").write_text(yaml.safe_dump(tiny_study | {"scales": {"mini": {
        "common": mini["common"], "arms": ["method=full optim.lr=1e-2,2e-2"]}}}))  # fmt: skip
    monkeypatch.setattr(grid, "SWEEPS_DIR", sweeps)
    return "tiny"


class Pretend:
    """A launcher that trains nothing: bowls in a store, as real runs write them."""

    def __init__(self, root: Path, stop_after: int = 10**9) -> None:
        self.root, self.left, self.trained = root, stop_after, []

    def __call__(self, study: Study) -> int:
        manifests.write_study(self.root, study.name, study.scale, study.manifest())
        for point in study.points:
            if (self.root / point.run_id / "summary.json").exists():
                continue
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.trained.append(point.run_id)
            pretend(self.root, point)
        return 0


def pretend(root: Path, point: grid.Point) -> None:
    star = {"full": 1.2e-2, "lora": 2.5e-2}[point.config.method.kind.name]
    wobble = 1e-4 * (hash((point.config.optim.lr, point.config.seed.init)) % 7)
    value = 1 + 0.1 * math.log(point.config.optim.lr / star) ** 2 + wobble
    path = root / point.run_id
    path.mkdir(parents=True, exist_ok=True)
    document = {"format": store.FORMAT, "run_id": point.run_id, "config": encode(point.config)}
    store.write_json(path / "config.json", document)
    (path / "metrics.jsonl").write_text(json.dumps({"step": 8, "test/nll_nats": value}) + "\n")
    metrics = {"test/nll_nats": value, "test/nll_base_nats": 3.0}
    summary = {"outcome": "finished", "step": 8, "metrics": metrics, "time": {"total_s": 1.0, "eval_s": 0.1}}
    store.write_json(path / "summary.json", summary)


def test_command_trains_what_is_missing_draws_marks_and_repeats_for_nothing(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from analysis.figures.__main__ import main as draw

    root = tmp_path / "runs"
    wanted = searched(load_study(study, "mini"), study, [], 4.0)
    run(wanted, root, Pretend(root), 4.0)
    missing = wanted.point("full", 8e-2, wanted.arms[0].seeds[0])  # the end of the coarse grid, far from the best
    shutil.rmtree(root / missing.run_id)
    shutil.rmtree(root / "studies")
    assert launch.main([study, "--cluster", "local", "--width", "4"]) == 0
    said = capsys.readouterr().err
    assert "round 1, full: coarse: LRs half a decade apart" in said and "the full grid has 30" in said
    assert "1 to do" in said and store.read_json(root / missing.run_id / "provenance.json")
    summaries = {path: path.stat().st_mtime_ns for path in root.glob("*/summary.json")}
    name = f"{study}+{MARK}"
    manifest = manifests.read_study(root, name, "mini")
    assert set(manifest["run_ids"]) == {path.parent.name for path in summaries} == set(manifest["search"]["phases"])
    assert not (root / "studies" / "tiny-mini.json").exists()
    assert launch.main([study, "--cluster", "local", "--width", "4"]) == 0
    assert {path: path.stat().st_mtime_ns for path in root.glob("*/summary.json")} == summaries
    assert manifests.read_study(root, name, "mini") == manifest
    assert draw([study, "--root", str(root), "--overrides", MARK]) == 0
    folder = root / "figures" / f"{name}-mini"
    assert (folder / "lr-adaptive.png").exists() and not (folder / "curves.png").exists()
    assert "search: full: " in capsys.readouterr().out


def test_runs_of_the_grid_are_free_and_the_result_does_not_depend_on_them(study: str, tmp_path: Path) -> None:
    results = []
    for base, with_grid in ((tmp_path / "a", False), (tmp_path / "b", True)):
        loaded = load_study(study, "mini", [f"launch.root={base}"])
        wanted = searched(loaded, study, [], None)
        if with_grid:
            for point in loaded.points:
                pretend(base, point)
        pool = Pretend(base)
        assert run(wanted, base, pool)[0] == 0
        results.append((manifests.read_study(base, wanted.name, "mini")["search"], set(pool.trained)))
    assert results[0][0] == results[1][0]
    grid_ids = {point.run_id for point in load_study(study, "mini").points}
    assert results[1][1] == results[0][1] - grid_ids and results[0][1] & grid_ids


def test_interrupted_search_goes_on_to_the_same_end(study: str, tmp_path: Path) -> None:
    straight, broken = tmp_path / "a", tmp_path / "b"
    ends = []
    for root in (straight, broken):
        wanted = searched(load_study(study, "mini", [f"launch.root={root}"]), study, [], None)
        trained: list[str] = []
        for stop_after in (10**9,) if root == straight else (2, 5, 3, 10**9):
            pool = Pretend(root, stop_after)
            with contextlib.suppress(KeyboardInterrupt):
                run(wanted, root, pool)
            trained += pool.trained
        assert len(trained) == len(set(trained))
        ends.append((manifests.read_study(root, wanted.name, "mini")["search"], set(trained)))
    assert ends[0] == ends[1]


def test_failed_runs_end_the_search_with_the_launchers_code(study: str, tmp_path: Path) -> None:
    wanted = searched(load_study(study, "mini"), study, [], None)
    code, progress = run(wanted, tmp_path / "runs", lambda _: 1)
    assert code == 1 and progress.rounds == 1


def test_verdicts_and_reference_do_not_read_a_search(study: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    loaded = load_study(study, "mini")
    wanted = searched(loaded, study, [], None)
    run(wanted, root, Pretend(root))
    assert manifests.list_studies(root) == [(f"{study}+{MARK}", "mini")]
    results = from_store(root, "mini")
    assert not results.studies and results.points.empty


def test_points_are_the_runs_of_the_grid(study: str) -> None:
    loaded = load_study(study, "mini", ["optim.steps=4"])
    wanted = searched(loaded, study, ["optim.steps=4"], None)
    assert wanted.name == f"{study}+optim.steps=4+{MARK}"
    known = {point.run_id: point for point in loaded.points}
    for arm in wanted.arms:
        for lr in arm.grid:
            for seed in arm.seeds:
                point = wanted.point(arm.key, lr, seed)
                assert known.pop(point.run_id).config == point.config
                assert grid.parse(point.overrides)[0] == point.config  # its line can be pasted
    assert not known
    families = {arm.key: (arm.reference, arm.donor) for arm in wanted.arms}
    assert families == {"full": ("", ""), "r2": ("full", "r4"), "r4": ("full", "")}


def test_diverged_and_missing_runs_are_told_apart(study: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    wanted = searched(load_study(study, "mini"), study, [], None)
    seed = wanted.arms[0].seeds[0]
    points = {lr: wanted.point("full", lr, seed) for lr in (1e-2, 2e-2, 4e-2)}
    for lr in (1e-2, 2e-2):
        pretend(root, points[lr])
    path = root / points[2e-2].run_id / "summary.json"
    document = json.loads(path.read_text())
    document |= {"outcome": "diverged", "metrics": {"test/nll_nats": None}}
    path.write_text(json.dumps(document))
    found = finished(wanted, {p.run_id: ("full", lr, seed) for lr, p in points.items()}, root)
    assert found["full"].lr == (1e-2, 2e-2)
    assert found["full"].value[0] < 2 and found["full"].value[1] != found["full"].value[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--width", "1"], "width: 1 is not allowed"),
        (["tiny", "--width", "nan"], "width: nan is not allowed"),
        (["tiny", "--width", "1.05"], "width: 1.05 is not allowed; a factor of 1.07 is what the closest LRs resolve"),
        (["tiny", "--search", "random"], "search: 'random' is not allowed; choose adaptive"),
        (["tiny", "--budget", "0"], "budget: 0 is not allowed"),
        (["fixed"], "does not sweep the LR of full (LRs: 2)"),
        (["nope"], "study: 'nope' is not known"),
        (["tiny", "optim.lrr=1"], "did you mean optim.lr?"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    study: str, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*arguments, "--cluster", "local"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ") and said in captured.err
    assert not list(tmp_path.glob("runs/tiny-*"))


def test_dry_run_prints_the_next_round_alone(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main([study, "--cluster", "local", "--dry"]) == 0
    assert "6 runs, 6 to do" in capsys.readouterr().out and not list(tmp_path.glob("runs/tiny-*"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "sweeps.launch lr"),
        (["SEARCH=adaptive"], "sweeps.search.launch lr --search adaptive"),
        (["SEARCH=adaptive", "SEARCH_WIDTH=1.3", "SEARCH_BUDGET=60"], "--search adaptive --width 1.3 --budget 60"),
    ],
)
def test_make_starts_and_draws_the_search(options: list[str], expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-n", "sweep-lr", *options]
    printed = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=True).stdout
    launched, drawn = printed.strip().splitlines()[-1].split(" && ")
    assert expected in launched
    assert drawn.rstrip().endswith("--overrides search=adaptive" if options else "--overrides")


def test_width_without_a_search_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):  # make passes SEARCH_WIDTH on, whatever SEARCH is
        grid_launch.main(["lr", "--width", "1.3"])
    assert "--width" in capsys.readouterr().err


def test_budget_ends_the_search_before_a_round_that_would_pass_it(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = searched(load_study(study, "mini"), study, [], None)
    ends = {}
    for budget in (9, None):
        root = tmp_path / f"runs{budget}"
        code, progress = run(wanted, root, Pretend(root), budget=budget)
        recorded = manifests.read_study(root, wanted.name, "mini")
        assert code == 0 and recorded["search"]["end"] == progress.end and len(recorded["run_ids"]) <= (budget or 30)
        ends[budget] = progress.end
    assert ends[None] == "every arm is done or has ended"
    assert ends[9].startswith("budget of 9 runs: the next round has ")
    assert "over after" in (said := capsys.readouterr().err) and "not run: LR" in said and ends[9] in said


def test_recorded_study_says_why_of_every_arm(study: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    wanted = searched(load_study(study, "mini"), study, [], 2.0)
    _, progress = run(wanted, root, Pretend(root), 2.0)
    manifest = as_study(wanted, progress, 2.0).manifest()
    assert manifest["search"]["width"] == 2.0 and set(manifest["search"]["arms"]) == {"full", "r2", "r4"}
    assert manifest["settings"]["extra"][-1] == MARK and manifest["title"] == "Tiny"
