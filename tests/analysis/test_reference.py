"""The committed reference results: whole, small, reproducible, and what README and verdicts say of them."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
from synthetic_studies import make_results, without

from analysis import findings, reference
from analysis.claims import CLAIMS, Verdict, judge
from analysis.results import Results, from_reference
from analysis.verdict import REFERENCE_DIR, record
from experiments.store import StoreError

FOLDER = REFERENCE_DIR / "mini"


@lru_cache(maxsize=1)
def committed() -> Results:
    return from_reference(FOLDER)


@lru_cache(maxsize=1)
def judged() -> list[Verdict]:
    return judge(committed())


def test_every_expected_run_is_there_from_committed_code() -> None:
    reference.check(committed())
    assert committed().provenance["num_runs"] == len(committed().points) == len(committed().outcomes)
    assert reference.size(FOLDER) <= reference.LIMIT_BYTES


def test_committed_verdicts_follow_from_the_committed_runs() -> None:
    recorded = json.loads((FOLDER / "verdict.json").read_text())["claims"]
    for now, then in zip(judged(), recorded, strict=True):
        again = record(now)
        assert (again["claim"], again["verdict"], again["here"]) == (then["claim"], then["verdict"], then["here"])


def test_readme_shows_what_the_tables_say() -> None:
    text = reference.README.read_text()
    for name, content in reference.blocks(committed(), judged(), FOLDER).items():
        assert reference.with_block(text, name, content) == text, "run: make reference"


def test_page_of_findings_says_what_the_tables_say() -> None:
    assert findings.PAGE.read_text() == findings.page(judged(), committed()), "run: make reference"


def test_every_claim_answers_one_question() -> None:
    answering = [claim for _, ids in findings.QUESTIONS for claim in ids]
    assert sorted(answering) == sorted(claim.id for claim in CLAIMS)


def test_every_picture_of_the_readme_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", reference.README.read_text())
    assert len(pictures) > 4 and all((reference.PROJECT / picture).is_file() for picture in pictures)


def test_what_is_not_whole_is_refused() -> None:
    whole = make_results(("lr",))
    reference.check(whole)
    with pytest.raises(StoreError, match="1 of 105 runs of 'lr'"):
        reference.check(without(whole, f"run_id == '{whole.points['run_id'][3]}'"))
    with pytest.raises(StoreError, match="no exact record"):
        reference.check(dataclasses.replace(whole, exact={}))
    with pytest.raises(StoreError, match="uncommitted changes"):
        reference.check(dataclasses.replace(whole, provenance={"dirty": True}))


def test_publishing_writes_tables_figures_verdicts_and_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    marks = "<!-- {0}: generated, see make reference -->\nTYPED BY HAND\n<!-- /{0} -->\n"
    readme.write_text("head\n" + marks.format("verdict") + marks.format("lr") + "tail\n")
    monkeypatch.setattr(reference, "README", readme)
    monkeypatch.setattr(reference, "PROJECT", tmp_path)
    monkeypatch.setattr(findings, "PAGE", tmp_path / "findings.md")
    target = tmp_path / "reference" / "mini"
    reference.publish(make_results(("lr",)), target)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {"points.parquet", "runs.parquet", "curves.parquet", "verdict.md", "figures/lr-lr.png"} <= names
    text = readme.read_text()
    assert "TYPED BY HAND" not in text and text.startswith("head\n") and text.endswith("tail\n")
    assert "**C5, reproduced**: LoRA's optimal LR" in (tmp_path / "findings.md").read_text()
    assert "| **C5** LoRA's optimal LR" in text and "![final held-out loss" in text and "reproduced" in text


def test_block_goes_between_its_marks_and_nowhere_else() -> None:
    text = "a\n<!-- lr: generated, see make reference -->\nold\n<!-- /lr -->\nb\n"
    assert "old" not in reference.with_block(text, "lr", "new")
    assert reference.with_block(text, "lr", "old") == text
    with pytest.raises(StoreError, match="no place for rank"):
        reference.with_block(text, "rank", "new")
