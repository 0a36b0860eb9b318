"""The shared-outer form of experts in a run: it learns, stops and goes on as it would have without the stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.compose import parse
from experiments.recorder import Interrupted, Progress
from experiments.run import execute

WORDS = ["model=mini-moe", "method=lora", "method.rank=4", "method.shared_outer=true", "optim.lr=4e-3", "optim.steps=6",
         "optim.batch_size=4", "data.num_train=64", "data.num_test=16"]  # fmt: skip


def test_stopped_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    config, launch = parse([*WORDS, f"launch.root={tmp_path / 'whole'}"])
    whole = execute(config, launch)
    assert whole["metrics"]["test/nll_nats"] < whole["metrics"]["test/nll_base_nats"] - 0.1
    config, launch = parse([*WORDS, f"launch.root={tmp_path / 'stopped'}"])
    steps: list[int] = []
    with pytest.raises(Interrupted):
        execute(config, launch, Progress(lambda step, *_: steps.append(step), lambda: len(steps) >= 3))
    again = execute(config, launch)
    assert steps == [1, 2, 3] and again["metrics"] == whole["metrics"]
    assert again["expert_tokens"] == whole["expert_tokens"]
