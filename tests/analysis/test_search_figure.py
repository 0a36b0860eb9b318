"""The figure of a search: what was chosen after results were seen is marked, and the caption says so."""

from __future__ import annotations

import matplotlib.pyplot as plt

from analysis.arms import find_arms
from analysis.figures import lr
from analysis.figures.__main__ import draw
from analysis.load import load, load_curves
from analysis.optimum import estimate
from analysis.results import study_runs
from experiments import manifests


def searched_study(make_store):
    root = make_store()
    table = load("lr", "mini", root)
    manifest = manifests.read_study(root, "lr", "mini")
    coarse = {run for run in manifest["run_ids"] if "-lr1-" in run or "-lr4-" in run}
    phases = {run: "coarse" if run in coarse else "repeat" for run in manifest["run_ids"]}
    study = study_runs("lr", manifest["settings"], table, load_curves(table, root))
    return study, manifest, phases


def test_points_that_a_search_chose_are_open_and_only_those(make_store):
    study, _, phases = searched_study(make_store)
    runs = study.runs.assign(phase=study.runs["run_id"].map(phases))
    full = runs[runs["arm"] == "full"]
    assert [round(x, 7) for x in lr.chosen(full)] == [1e-4, 4e-4, 8e-4, 3.2e-3, 6.4e-3]
    arms = find_arms(study.runs)
    looks = {arm.name: {"color": "black", "marker": "o"} for arm in arms}
    _, axes = plt.subplots()
    lr.draw_bowls(runs, arms, axes, looks)
    opened = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [round(x, 7) for x in opened[0].get_xdata()] == [
        1e-4,
        4e-4,
        8e-4,
    ]  # 3.2e-3 is above the frame, 6.4e-3 diverged
    filled = [line for line in axes.lines if line.get_markerfacecolor() == "black" and len(line.get_xdata()) > 3]
    assert opened[0].get_zorder() > max(line.get_zorder() for line in filled)  # not hidden behind them
    _, plain = plt.subplots()
    lr.draw_bowls(study.runs, arms, plain, looks)
    assert not [line for line in plain.lines if line.get_markerfacecolor() == "white"]


def test_figures_of_a_search_have_their_own_names_and_caption(make_store):
    study, manifest, phases = searched_study(make_store)
    arms = find_arms(study.runs)
    search = {"phases": phases, "arms": {}}
    figures = draw(study, {**manifest, "search": search}, "mini", arms)
    assert set(figures) == {"lr-adaptive"} and set(draw(study, manifest, "mini", arms)) == {"lr", "curves"}
    words = " ".join(text.get_text() for text in figures["lr-adaptive"].texts).replace("\n", " ")
    assert "LRs searched instead of a full grid" in words
    assert "open: LRs that the search chose after it had seen others" in words and "3 seeds at an LR" in words


def test_optimum_of_unequal_seeds_says_what_it_rests_on():
    lrs = [1e-3, 1e-3, 1.4e-3, 2e-3, 2e-3, 2.8e-3, 4e-3, 4e-3]
    values = [1.1, 1.11, 1.03, 1.0, 1.01, 1.03, 1.1, 1.11]
    found = estimate(lrs, values, ["0", "1", "0", "0", "1", "0", "0", "1"])
    assert found.verdict == "decided" and found.why.startswith("some LRs of the fit have one seed")
