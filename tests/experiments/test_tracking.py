"""wandb only mirrors: one run per run id, from rows that are already on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.compose import parse
from experiments.config import run_id
from experiments.run import execute


def test_wandb_run_carries_the_run_id(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    plain, _ = parse(tiny_overrides)
    config, launch = parse([*tiny_overrides, "launch.wandb=true", "optim.steps=2"])
    execute(config, launch)
    (mirrored,) = (tmp_path / "runs" / "wandb").glob("offline-run-*")
    assert mirrored.name.endswith(run_id(config))
    assert (tmp_path / "runs" / run_id(config) / "summary.json").exists() and config != plain
