"""The README's numbers are the committed tables' numbers, and those are what the estimator says."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis import reference
from analysis.arms import arm_records, find_arms, label_arms
from experiments.store import StoreError

PUBLISHED = sorted(path.name for path in reference.REFERENCE_DIR.iterdir())


@pytest.mark.parametrize("name", PUBLISHED)
def test_readme_shows_the_committed_numbers(name: str) -> None:
    study, _, scale = name.rpartition("-")
    text = reference.README.read_text()
    content = reference.block(study, scale, reference.REFERENCE_DIR / name)
    assert reference.with_block(text, study, scale, content) == text, "run: make reference"


@pytest.mark.parametrize("name", PUBLISHED)
def test_committed_optima_follow_from_the_committed_runs(name: str) -> None:
    target = reference.REFERENCE_DIR / name
    arms = find_arms(label_arms(pd.read_csv(target / "runs.csv", keep_default_na=False, na_values=[""])))
    recorded = json.loads((target / "optimum.json").read_text())["arms"]
    again = json.loads(json.dumps(arm_records(arms)))
    assert [arm["arm"] for arm in again] == [arm["arm"] for arm in recorded]
    for new, old in zip(again, recorded, strict=True):
        for key in ("lr_star", "ratio", "best_mean"):
            assert new[key] == (None if old[key] is None else pytest.approx(old[key], rel=1e-9))
        assert new["verdict"] == old["verdict"]


def test_block_goes_between_its_marks_and_nowhere_else() -> None:
    text = "a\n<!-- lr-mini: generated, see make reference -->\nold\n<!-- /lr-mini -->\nb\n"
    assert "old" not in reference.with_block(text, "lr", "mini", "new")
    assert reference.with_block(text, "lr", "mini", "old") == text
    with pytest.raises(StoreError, match="no place for rank-mini"):
        reference.with_block(text, "rank", "mini", "new")
