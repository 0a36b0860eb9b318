"""The figure of experts shows what was recorded of them, and only where there were any."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import style
from analysis.figures import experts
from analysis.figures.__main__ import draw
from analysis.results import StudyRuns, study_runs

STEPS = (1, 10, 100)
METRICS = ("entropy_frac", "busiest_frac", "top_frac", "load_p10", "load_p90", "num_unused")


def study(models: tuple[str, ...]) -> StudyRuns:
    """Two arms at three LRs of each model; only ``moe`` has experts. LR 2e-3 is the best."""
    rows, curves = [], []
    for model in models:
        for rank in (4, 16):
            for lr in (1e-3, 2e-3, 4e-3):
                run = f"{model}-{rank}-{lr}"
                rows.append({
                    "run_id": run, "state": "done", "outcome": "finished", "step": 100, "config.model.name": model,
                    "config.data.name": "d", "config.method.kind": "lora", "config.method.rank": rank,
                    "config.method.placement": "all", "config.method.unembed": True, "config.optim.lr": lr,
                    "config.seed.init": 0, "metric.test/nll_nats": abs(np.log2(lr / 2e-3)),
                })  # fmt: skip
                for step in STEPS:
                    counted = {f"metric.experts/{m}": rank * lr * step for m in METRICS} if model == "moe" else {}
                    curves.append({"run_id": run, "step": step, "metric.test/nll_nats": 1.0, **counted})
    table = pd.DataFrame(rows)
    return study_runs("placement", {"value": "test/nll_nats"}, table, pd.DataFrame(curves))


def test_figure_shows_each_arm_at_its_best_lr() -> None:
    style.use()
    fig = experts.figure(study(("dense", "moe")), "caption")
    panels = [axes for axes in fig.axes if axes.get_title(loc="left")]
    assert len(panels) == 4  # one row: the dense model has none
    for axes, lines in zip(panels, (2, 4, 4, 2), strict=True):
        assert len(axes.lines) == lines
        drawn = sorted(tuple(line.get_ydata()) for line in axes.lines)
        assert {tuple(np.round(y, 9)) for y in drawn} == {tuple(round(r * 2e-3 * s, 9) for s in STEPS) for r in (4, 16)}


@pytest.mark.parametrize(("models", "there"), [(("dense",), False), (("dense", "moe"), True)])
def test_figure_is_drawn_where_there_are_experts(models: tuple[str, ...], there: bool) -> None:
    style.use()
    assert ("experts" in draw(study(models), {"figure": "none", "title": "t"}, "mini", [])) == there
