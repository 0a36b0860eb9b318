"""``make status``: every study and everything wrong in one line each, whatever else is damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import claim, manifests
from sweeps import status

SUMMARY = {"outcome": "finished", "step": 1, "metrics": {}, "time": {"total_s": 1.0}}
MANIFEST = {"title": "t", "settings": {}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A study of five runs: done, diverged, failed, partial and one not begun."""
    root = tmp_path / "runs"
    for name in ("r-done", "r-diverged", "r-failed", "r-partial"):
        with claim.claim(root, name, {}) as writer:
            if name in ("r-done", "r-diverged"):
                writer.finish(SUMMARY | {"outcome": name.removeprefix("r-").replace("done", "finished")})
            elif name == "r-failed":
                writer.fail("ValueError: no", "traceback")
    ids = ["r-done", "r-diverged", "r-failed", "r-partial", "r-new"]
    manifests.write_study(root, "lr", "mini", MANIFEST | {"run_ids": ids})
    return root


def told(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main(["--root", str(root)]) == 0
    return capsys.readouterr().out


def row(*counts: int) -> str:
    return r"lr\s+mini\s+5\s+" + r"\s+".join(map(str, counts))


def test_status_counts_every_state(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(root, capsys)
    assert re.search(row(2, 1, 0, 1, 1, 0, 1), out)
    assert "failed: r-failed: ValueError: no (log: " in out


@pytest.mark.parametrize("content", ["", '{"cause": "Val', "{}", "[]"])
def test_status_names_a_damaged_failure_and_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (root / "r-failed" / "failure.json").write_text(content)
    out = told(root, capsys)
    assert re.search(row(2, 1, 0, 1, 1, 0, 1), out) and "failed: r-failed: unknown" in out
    assert sum("r-failed/failure.json: damaged: " in line for line in out.splitlines()) == 1


def test_status_names_damaged_and_unreadable_runs_and_goes_on(
    root: Path, capsys: pytest.CaptureFixture[str], forbid: Callable[[Path], None]
) -> None:
    (root / "r-done" / "summary.json").write_text("{}")
    forbid(root / "r-partial")
    out = told(root, capsys)
    assert re.search(row(1, 1, 0, 0, 1, 2, 1), out)
    assert "r-done/summary.json: damaged: outcome: missing" in out
    assert sum("permission denied" in line for line in out.splitlines()) == 1


def test_status_names_damaged_manifests_and_lists_the_others(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = manifests.study_name("lr", ["optim.steps=50", f"model.name={'x' * 200}"])
    manifests.write_study(root, name, "mini", MANIFEST | {"run_ids": ["r-done"]})
    (root / "studies" / "a-mini.json").write_text("{")
    (root / "studies" / "b-mini.json").write_text(json.dumps({"format": 1}))
    out = told(root, capsys)
    assert re.search(row(2, 1, 0, 1, 1, 0, 1), out)
    assert re.search(rf"^ {re.escape(name)} +mini +1 +1 ", out, re.MULTILINE)
    assert "a-mini.json: damaged: not valid JSON" in out and "b-mini.json: damaged: title: missing" in out


def test_status_of_an_unreadable_store_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], forbid: Callable[[Path], None]
) -> None:
    forbid(root.parent)
    assert status.main(["--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "permission denied" in error
