"""Two sets of runs held against each other: the committed reference and itself with a change."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis import compare
from analysis.results import Results, from_reference
from analysis.verdict import REFERENCE_DIR


@pytest.fixture(scope="module")
def reference() -> Results:
    return from_reference(REFERENCE_DIR / "mini")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two claims are enough, and quick."""
    monkeypatch.setattr(compare, "CLAIMS", [claim for claim in compare.CLAIMS if claim.id in ("C5", "C9", "C15")])


@pytest.mark.usefixtures("few")
def test_runs_held_against_themselves_differ_in_nothing(reference: Results) -> None:
    found = compare.compare(reference, reference)
    assert len(found.table) == len(reference.outcomes) and found.table["difference"].abs().max() == 0
    assert not found.otherwise and not found.changed
    assert found.verdicts.keys() == {"C5", "C9", "C15"}
    without = compare.compare(reference, replace(reference, exact={}))
    assert without.verdicts.keys() == {"C5", "C15"}  # C9 rests on exact records too, which no engine makes


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("change", [{"outcome": "diverged"}, {"step": 7}])
def test_run_that_ended_otherwise_is_named(reference: Results, change: dict[str, object]) -> None:
    run = reference.outcomes.query("outcome == 'finished'")["run_id"].iloc[0]
    outcomes = reference.outcomes.copy()
    outcomes.loc[outcomes["run_id"] == run, list(change)] = list(change.values())
    found = compare.compare(reference, replace(reference, outcomes=outcomes))
    assert found.otherwise == [run] and run in "\n".join(compare.describe(found))
    lost = found.table.loc[found.table["run_id"] == run, "difference"].isna().all()
    assert lost == ("outcome" in change)  # a diverged run's loss counts for nothing


@pytest.mark.usefixtures("few")
def test_verdict_that_differs_is_named(reference: Results) -> None:
    """Full fine-tuning that is best at the smallest LR decides no ratio."""
    table = reference.points.merge(reference.outcomes, on="run_id")
    full = table[(table["config.method.kind"] == "full") & (table["config.data.name"] == "symbols")]
    outcomes = reference.outcomes.copy()
    outcomes.loc[outcomes["run_id"].isin(full["run_id"]), compare.COLUMN] = full["config.optim.lr"].to_numpy() * 1000
    found = compare.compare(reference, replace(reference, outcomes=outcomes))
    assert found.changed == {"C5": ("contradicted", "undecided")}
    assert "  C5: contradicted in the reference, undecided here" in compare.describe(found)


@pytest.mark.usefixtures("few")
def test_study_that_is_not_whole_is_not_judged(reference: Results) -> None:
    run = reference.studies["lr"]["run_ids"][0]
    outcomes = reference.outcomes[reference.outcomes["run_id"] != run]
    assert "C5" not in compare.compare(reference, replace(reference, outcomes=outcomes)).verdicts


@pytest.mark.usefixtures("few")
def test_command_tells_by_its_exit_code(
    reference: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "from_store", lambda root, scale: ours)
    ours = reference
    assert compare.main(["--out", str(tmp_path)]) == 0 and "0 verdicts differ" in (tmp_path / "compare.md").read_text()
    assert set(pd.read_csv(tmp_path / "compare.csv")["run_id"]) == set(reference.outcomes["run_id"])
    ours = replace(reference, outcomes=reference.outcomes.assign(step=1))
    assert compare.main([]) == 1
    ours = replace(reference, outcomes=reference.outcomes.iloc[:0])
    capsys.readouterr()
    assert compare.main([]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_readme_says_what_the_engines_differ_by(reference: Results) -> None:
    """From the committed results of the other engine's runs; what they come to is computed again."""
    theirs = pd.read_csv(REFERENCE_DIR / "mini" / "compare.csv")
    both = reference.points.merge(reference.outcomes, on="run_id").merge(theirs, on="run_id")
    alike = (both["outcome"] == both["outcome_ours"]) & (both["step"] == both["step_ours"])
    difference = (both[f"{compare.COLUMN}_ours"] - both[compare.COLUMN]).where(
        (both["outcome"] == "finished") & (both["outcome_ours"] == "finished")
    )
    assert difference.to_numpy() == pytest.approx(both["difference"].to_numpy(), abs=1e-7, nan_ok=True)
    lines = (REFERENCE_DIR / "mini" / "compare.md").read_text()
    readme = " ".join((REFERENCE_DIR.parents[1] / "README.md").read_text().split())
    half, nine = (
        f"{float(found):.1e}".replace("e-0", "e-")
        for found in re.findall(r"best .* 50 %: (\S+), 90 %: (\S+),", lines)[0]
    )
    commit = re.findall(r"\(at commit (\w+)\)", readme)[0]
    judged, differ = map(int, re.findall(r"(\d+) claims judged in both, (\d+) verdicts differ", lines)[0])
    for said in (
        f"All {len(both)} supervised runs made again by this engine (at commit {commit}): {alike.sum()} ended alike",
        f"within {half} nats for half",
        f"within {nine} for nine in ten",
        f"Of {judged} verdicts on these studies {judged - differ} are the same",
    ):
        assert said in readme
