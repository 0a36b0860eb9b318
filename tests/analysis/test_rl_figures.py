"""Figures of reinforcement learning: what is on them is what the runs hold, whatever is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from synthetic_rl import RL_STUDIES, make_rl_results
from synthetic_studies import without
from test_study_figures import CAPTION, draw, problems, words

from analysis import style
from analysis.arms import FULL
from analysis.figures import parts
from analysis.figures.registry import FIGURES
from analysis.judges.rl import good_window
from analysis.results import Results

WEAK = dict.fromkeys(("tiny1-tied", "tiny16-tied", "tiny4"), 0.2)
SEEDS = ["0/0/0", "1/1/1", "2/2/2"]


@pytest.fixture(autouse=True)
def _style() -> None:
    style.use()


@pytest.fixture(scope="module")
def results() -> Results:
    return make_rl_results(RL_STUDIES, gains=WEAK)


@pytest.fixture(scope="module")
def figures(results: Results) -> dict[str, Figure]:
    style.use()
    return {name: draw(results, name) for name in RL_STUDIES}


def at_height(axes: Axes, y: float) -> list[Line2D]:
    """Lines across the panel."""
    return [
        line for line in axes.lines if list(line.get_ydata()) == pytest.approx([y, y]) and len(line.get_xdata()) == 2
    ]


def bars(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_linewidth() == 2.4]


def crosses(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", RL_STUDIES)
def test_every_arm_is_on_the_figure_and_nothing_overlaps(results: Results, figures: dict, name: str) -> None:
    labels = style.arm_labels(parts.expected_arms(results.study(name))).values()
    text = words(figures[name])
    assert [label for label in labels if label not in text] == []
    assert text.startswith(f"{CAPTION} n = {results.study(name).runs['seed'].nunique()} seeds;")
    assert "no finished run" not in text and "not yet" not in text
    assert problems(figures[name]) == []


@pytest.mark.parametrize("name", RL_STUDIES)
def test_equal_runs_give_equal_bytes(name: str, tmp_path: Path) -> None:
    files = []
    for folder in ("a", "b"):
        study = make_rl_results((name,)).study(name)
        files += style.save(FIGURES[name](study, CAPTION), tmp_path / folder / name, ["svg"])
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", RL_STUDIES)
def test_missing_arm_is_named_and_the_rest_drawn_with_one_seed(results: Results, name: str) -> None:
    part = without(without(results, "`config.method.rank` == 16"), "`config.seed.init` > 0")
    figure = draw(part, name)
    assert "no finished run of LoRA rank 16" in words(figure) and "n = 1 seed;" in words(figure)
    assert any(len(line.get_xdata()) for line in figure.axes[0].lines)


@pytest.mark.parametrize("name", RL_STUDIES)
def test_arm_that_collapses_everywhere_is_said(name: str) -> None:
    figure = draw(make_rl_results((name,), collapses={"r1-unembed": 1e-9}), name)
    assert "every run diverged of LoRA rank 1" in words(figure)


@pytest.mark.parametrize("name", RL_STUDIES)
def test_study_that_collapses_everywhere_is_no_traceback(name: str) -> None:
    arms = ("full", "r1-unembed", "r4-unembed", "r16-unembed", "tiny1-tied", "tiny16-tied", "tiny4", "tiny64")
    figure = draw(make_rl_results((name,), collapses=dict.fromkeys(arms, 1e-9)), name)
    assert "not yet" in words(figure) and "every run diverged of" in words(figure)


@pytest.mark.parametrize("name", RL_STUDIES)
def test_no_run_at_all_is_no_traceback(results: Results, name: str) -> None:
    figure = draw(without(results, "run_id == run_id"), name)
    assert "n = 0: no finished run" in words(figure) and "not yet" in words(figure)
    assert problems(figure) == []


@pytest.mark.parametrize("name", RL_STUDIES)
def test_first_runs_of_a_study_are_drawn(results: Results, name: str) -> None:
    ids = results.studies[name]["run_ids"]
    figure = draw(without(results, f"run_id in {sorted(set(ids[len(ids) // 10 :]))}"), name)
    assert "no finished run" in words(figure)


# ---------------------------------------------------------------- rl-lr


def test_rewards_are_drawn_against_lr_with_the_base(results: Results, figures: dict) -> None:
    study, left = results.study("rl-lr"), figures["rl-lr"].axes[0]
    assert len(left.containers) == 4
    arms = parts.expected_arms(study)
    for arm, container in zip(arms, left.containers, strict=True):
        means = study.runs[study.runs["arm"] == arm].groupby("lr")["metric.test/reward"].mean()
        assert list(container.lines[0].get_xdata()) == list(means.index)
        assert container.lines[0].get_ydata() == pytest.approx(means.to_numpy())
        assert container.lines[0].get_ydata().max() == pytest.approx(0.8, abs=0.02)
    assert [line.get_linestyle() for line in at_height(left, 0.35)] == [":"]
    low, high = left.get_ylim()
    assert low < 0.35 and high > 0.8


def test_whiskers_reach_from_the_lowest_to_the_highest_seed(results: Results, figures: dict) -> None:
    runs = results.study("rl-lr").runs
    rewards = runs[runs["arm"] == FULL].groupby("lr")["metric.test/reward"]
    segments = figures["rl-lr"].axes[0].containers[0].lines[2][0].get_segments()
    assert np.array(segments)[:, 0, 1] == pytest.approx(rewards.min().to_numpy())
    assert np.array(segments)[:, 1, 1] == pytest.approx(rewards.max().to_numpy())


def test_bars_are_the_ranges_of_good_lrs(results: Results, figures: dict) -> None:
    study = results.study("rl-lr")
    drawn = bars(figures["rl-lr"].axes[0])
    arms = parts.expected_arms(study)
    assert [to_hex(line.get_color()) for line in drawn] == [
        to_hex(look["color"]) for look in parts.arm_looks(arms).values()
    ]
    for arm, line in zip(arms, drawn, strict=True):
        window = good_window(study.runs, arm, 0.9, SEEDS)
        assert list(line.get_xdata()) == [window.low, window.high]
    assert "bars: LRs that reach 90 % of the arm's best gain over the base" in words(figures["rl-lr"])


def test_collapsed_lrs_are_crosses_and_no_points() -> None:
    figure = draw(make_rl_results(("rl-lr",), collapses={"full": 4e-4, "r1-unembed": 4e-3}), "rl-lr")
    left = figure.axes[0]
    assert [list(line.get_xdata()) for line in crosses(left)] == [[4e-4, 8e-4], [4e-3]]
    assert max(left.containers[0].lines[0].get_xdata()) == 2e-4
    assert "a run collapsed there" in words(figure)
    assert crosses(draw(make_rl_results(("rl-lr",)), "rl-lr").axes[0]) == []


def test_arm_that_does_not_improve_has_no_bar() -> None:
    assert len(bars(draw(make_rl_results(("rl-lr",), gains={"r1-unembed": -0.1}), "rl-lr").axes[0])) == 3


def test_ratios_are_beside_with_the_posts_number(figures: dict) -> None:
    right = figures["rl-lr"].axes[1]
    found = [line for line in right.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in found] == pytest.approx([5.0] * 3, rel=0.1)
    assert any(list(line.get_xdata()) == [10, 10] for line in right.lines)


# ---------------------------------------------------------------- rl-curves


def test_curves_are_those_of_the_best_lr_and_end_at_its_reward(results: Results, figures: dict) -> None:
    study, first = results.study("rl-curves"), figures["rl-curves"].axes[0]
    assert len(first.lines) == 4
    for arm, line in zip(parts.expected_arms(study), first.lines, strict=True):
        best = study.runs[study.runs["arm"] == arm].groupby("lr")["metric.test/reward"].mean().max()
        assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 100)
        assert (line.get_ydata()[0], line.get_ydata()[-1]) == pytest.approx((0.35, best))
    text = words(figures["rl-curves"])
    assert "full fine-tuning, LR 1e-4" in text and "LoRA rank 1, LR 5e-4" in text


def test_gradings_that_failed_are_counted_over_all_runs(figures: dict) -> None:
    """In each of 84 runs one hung and one crashed, and two completions had no answer."""
    figure = figures["rl-curves"]
    assert "in all runs: 168 gradings failed, 168 completions had no answer" in words(figure)
    for line in figure.axes[7].lines:
        values = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert values[1] == 2.0 and sum(values.values()) == 2.0 and 0 not in values


def test_only_the_divergence_of_sampler_and_trainer_is_logarithmic(figures: dict) -> None:
    axes = figures["rl-curves"].axes
    assert [one.get_yscale() for one in axes] == ["linear"] * 4 + ["log"] + ["linear"] * 3
    assert axes[4].lines[0].get_ydata() == pytest.approx(1e-12)


def test_both_quantiles_of_the_ratio_are_drawn_for_each_arm(figures: dict) -> None:
    lines = figures["rl-curves"].axes[5].lines
    assert [line.get_ydata()[0] for line in lines] == pytest.approx([0.999, 1.001] * 4)


def test_reward_in_training_is_drawn_at_every_step(figures: dict) -> None:
    for line in figures["rl-curves"].axes[1].lines:
        assert list(line.get_xdata()) == list(range(1, 101)) and line.get_marker() == ""
        assert line.get_ydata()[-1] == pytest.approx(0.78, abs=0.02)


def test_arm_without_a_usable_lr_is_not_drawn() -> None:
    figure = draw(make_rl_results(("rl-curves",), collapses={"full": 1e-9}), "rl-curves")
    assert len(figure.axes[0].lines) == 3
    assert all(not text.get_text().startswith("full") for text in figure.legends[0].get_texts())


# ---------------------------------------------------------------- rl-tools


def test_tools_figure_shows_reward_by_lr_and_how_episodes_grow(figures: dict) -> None:
    left, middle, right = figures["rl-tools"].axes
    assert len(left.containers) == 4 and [line.get_linestyle() for line in at_height(left, 0.35)] == [":"]
    assert middle.get_title(loc="left") == "held-out reward" and right.get_title(loc="left") == "turns in an episode"
    for axes, end in ((middle, 0.8), (right, 1 + 4 * 0.8)):
        assert len(axes.lines) == 4
        for line in axes.lines:
            assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 60)
            assert line.get_ydata()[-1] == pytest.approx(end, abs=0.05)
    assert "LR 1.0e-4" in words(figures["rl-tools"]) or "LR 1e-4" in words(figures["rl-tools"])


# ---------------------------------------------------------------- rl-bits


def test_gains_are_drawn_against_trained_parameters(figures: dict) -> None:
    axes = figures["rl-bits"].axes[0]
    marks = [line for line in axes.lines if line.get_linestyle() == "None"]
    drawn = {int(line.get_xdata()[0]): np.mean(line.get_ydata()) for line in marks}
    assert all(len(line.get_xdata()) == 3 for line in marks)
    assert drawn == pytest.approx(
        {266_816: 0.45, 5504: 0.45, 88_064: 0.45, 1: 0.2, 16: 0.2, 112: 0.2, 1792: 0.45}, abs=0.02
    )
    low, high = axes.get_xlim()
    assert low < 1 and high > 266_816


def test_lines_are_the_share_that_suffices_and_the_room_for_the_bits(results: Results, figures: dict) -> None:
    axes = figures["rl-bits"].axes[0]
    [dashed] = [line for line in axes.lines if line.get_linestyle() == "--"]
    [dotted] = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert dashed.get_ydata()[0] == pytest.approx(0.9 * 0.45, abs=0.01)
    assert dotted.get_xdata()[0] == pytest.approx(7500)
    text = words(figures["rl-bits"])
    assert "15,000 bits of reward in 25,600 episodes of full fine-tuning; TinyLoRA, 64 per matrix suffices" in text


def test_no_adapter_that_suffices_is_said() -> None:
    assert "no adapter suffices" in words(draw(make_rl_results(("rl-bits",), gain=0.1, gains={FULL: 0.4}), "rl-bits"))


def test_without_full_fine_tuning_the_reason_stands_in_the_panel(results: Results) -> None:
    figure = draw(without(results, "`config.method.kind` == 'full'"), "rl-bits")
    assert "not yet: no usable run of full fine-tuning" in words(figure)
