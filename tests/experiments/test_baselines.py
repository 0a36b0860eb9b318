"""The baselines of the benchmark train the runs that the suite trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.bench import plain, steps
from experiments.compose import parse
from experiments.run import execute


@pytest.mark.parametrize("baseline", [plain.by_trl, plain.by_peft])
@pytest.mark.parametrize("method", [["method=full"], ["method=lora", "method.rank=2", "method.unembed=true"]])
def test_baseline_ends_where_the_suite_does(
    baseline: Callable, method: list[str], tiny_overrides: list[str], tmp_path: Path
) -> None:
    config, launch = parse([*tiny_overrides, *method])
    ours = execute(config, launch)["metrics"]["test/nll_nats"]
    assert baseline(config, tmp_path) == pytest.approx(ours, abs=1e-5)


def test_medians_are_of_the_rounds_and_so_are_ratios() -> None:
    assert steps.medians([[1.0, 1.0], [9.0, 3.0], [4.0, 2.0]]) == (4.0, 2.0, 2.0)


def test_packed_arms_of_unlike_ranks_are_all_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost between the groups."""
    seen: list[str] = []
    monkeypatch.setattr(steps.Pack, "step", lambda pack: seen.extend(pack.arms))
    steps.Bench(64, tmp_path).packed([1, 4, 16, 64], 32, 4)()
    assert sorted(seen) == list("0123")
