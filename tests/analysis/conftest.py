"""Fixtures of the analysis tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic import STARS, write_run

from experiments import manifests


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Path]:
    def make(num_seeds: int = 3, models: tuple[str, ...] = ("toy",)) -> Path:
        root = tmp_path / "runs"
        rng = np.random.default_rng(0)
        ids = [
            write_run(root, rank, k, seed, rng.normal(0, 0.001), model)
            for model in models
            for rank in STARS
            for k in range(7)
            for seed in range(num_seeds)
        ]
        settings = {"reference": "full", "value": "test/nll_nats", "ratio_paper": 10}
        manifest = {"title": "Loss against learning rate", "figure": "lr", "claims": [], "settings": settings}
        manifests.write_study(root, "lr", "mini", {**manifest, "run_ids": ids})
        return root

    return make
