"""The replay on the committed reference: the table beside it is what it gives, and it asks for nothing unknown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from analysis.results import from_reference
from sweeps.search import bench


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    folder = tmp_path_factory.mktemp("reference")
    shutil.copytree(bench.REFERENCE / "mini", folder / "mini", ignore=shutil.ignore_patterns("search.csv", "figures"))
    assert bench.main(["--reference", str(folder)]) == 0
    return pd.read_csv(folder / "mini" / "search.csv")


def test_committed_table_is_what_the_replay_gives(replayed: pd.DataFrame) -> None:
    committed = pd.read_csv(bench.REFERENCE / "mini" / "search.csv")
    fixed = ["study", "asked", "arm", "steps_grid", "steps", "equal", "end"]
    pd.testing.assert_frame_equal(replayed[fixed], committed[fixed])
    pd.testing.assert_frame_equal(replayed[["lr_star", "factor"]], committed[["lr_star", "factor"]], rtol=2e-3)


def test_readme_says_what_the_replay_gives(replayed: pd.DataFrame) -> None:
    rows = bench.summarise(replayed).query("asked == 'same'").set_index("study")
    shares, equal = rows["steps of grid"], rows.loc["all", "LR* equal"]
    readme = " ".join((bench.REFERENCE.parents[1] / "README.md").read_text().split())
    assert f"agrees on LR* in {equal} arms that both decide" in readme
    assert (
        f"takes {shares['lr']} of the grid's steps in `lr`, {shares['batch']} in `batch`, {shares['all']} in" in readme
    )


def test_grid_side_of_the_table_is_the_published_optimum(replayed: pd.DataFrame) -> None:
    """In study lr every seed ran at every LR, so nothing is left out of the comparison."""
    published = pd.read_csv(bench.REFERENCE / "mini" / "optima" / "lr" / "optimum.csv").set_index("arm")
    here = replayed[(replayed["study"] == "lr") & (replayed["asked"] == "same")].set_index("arm")
    assert here["lr_star_grid"].to_dict() == pytest.approx(published["lr_star"].to_dict(), rel=1e-3)
    assert here["steps_grid"].tolist() == [2100] * 5


def test_no_result_is_used_twice_and_steps_are_those_trained() -> None:
    study = from_reference(bench.REFERENCE / "mini").study("lr")
    assert study is not None
    arms = [a for a in bench.arms_of(study.runs, "full", None, reach=0) if a.name == "full"]
    rows = study.runs[study.runs["arm"] == "full"]
    answers = {("full", lr, seed): (value, 7) for lr, seed, value in
               zip(rows["lr"], rows["seed"], rows["value"], strict=True)}  # fmt: skip
    found, moves = bench.replay(arms, answers, 1.5)
    pairs = list(zip(found["full"].lr, found["full"].seed, strict=True))
    assert len(set(pairs)) == len(pairs) and moves[0].phase == "done"
    assert bench._steps(arms[0], found, answers) == 7 * len(pairs)


def test_missing_reference_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--reference", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
