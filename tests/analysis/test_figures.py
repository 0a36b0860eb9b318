"""Figures from the store alone: what is on them, equal bytes, and what the command says."""

import json
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure
from synthetic import run_id

from analysis import load, load_curves, style
from analysis.arms import find_arms, label_arms
from analysis.figures import curves, lr
from analysis.figures.__main__ import main

ARMS = ["full", "r1", "r4-mlp", "r16"]


@pytest.fixture(autouse=True)
def _style():
    style.use()


def texts(figure: Figure) -> str:
    found = [t.get_text() for axes in figure.axes for t in (*axes.texts, axes.title, *axes.get_yticklabels())]
    return "\n".join([*found, figure.get_suptitle()])


def draw_lr(root) -> Figure:
    runs = label_arms(load("lr", root=root))
    return lr.figure(runs, find_arms(runs), "toy, mini scale", paper_ratio=10.0)


def test_lr_figure_states_ratios_seeds_interval_and_scale(make_store):
    written = texts(draw_lr(make_store()))
    assert "n = 3 seeds" in written
    assert "95 % interval" in written
    assert "mini scale" in written
    assert "rank 16" in written
    assert "post's 10" in written
    assert "10.0 [6." in written or "9.9 [6." in written or "10.1 [6." in written


def test_lr_figure_marks_diverged_lrs_above_the_data(make_store):
    axes = draw_lr(make_store()).axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[6.4e-3], [6.4e-2], [6.4e-2]]
    assert len({line.get_ydata()[0] for line in crosses}) == 3  # not on top of each other


def test_lr_figure_says_undecided_instead_of_a_number(make_store):
    runs = label_arms(load("lr", root=make_store()))
    runs = runs[(runs["arm"] != "r1") | (runs["lr"] < 2.5e-3)]
    assert texts(lr.figure(runs, find_arms(runs), "toy")).count("undecided") == 2  # below the bowl, and the ratio


def test_curves_figure_has_a_line_per_arm_in_both_panels(make_store):
    root = make_store()
    runs = label_arms(load("lr", root=root))
    figure = curves.figure(runs, find_arms(runs), load_curves(runs, root), "toy, mini scale")
    assert [len(axes.lines) for axes in figure.axes] == [3, 3]
    assert "7 LRs per arm" in texts(figure)


def test_looks_are_distinct_and_full_is_black():
    looks = style.arm_looks(ARMS)
    assert looks["full"]["color"] == "black"
    assert len({look["marker"] for look in looks.values()}) == len(ARMS)
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b, _ in (looks[arm]["color"] for arm in ARMS[1:])]
    assert grey == sorted(grey, reverse=True)  # rank order survives a grey printer
    assert min(a - b for a, b in zip(grey, grey[1:], strict=False)) > 0.1


def test_labels_are_the_fields_words():
    assert [style.arm_label(arm) for arm in ARMS] == [
        "full fine-tuning", "LoRA rank 1", "LoRA rank 4 (mlp)", "LoRA rank 16",
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(1e-4, 6.4e-2), (4e-6, 5e-4), (1.1, 1.9), (3, 20), (1e-9, 1e3)])
def test_log_ticks_are_few_round_and_inside(low, high):
    ticks = style.round_ticks(low, high)
    assert len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)
    assert all(len(f"{tick:e}".rstrip("0").split("e")[0].rstrip("0").rstrip(".")) == 1 for tick in ticks)


def test_numbers_on_axes_are_short():
    assert [style.number_text(v) for v in (1e-4, 3e-3, 0.5, 20.0, 100.0)] == ["1e-4", "3e-3", "0.5", "20", "100"]


def test_command_redraws_the_same_bytes(make_store, capsys):
    root = make_store()
    out = root / "figures" / "lr-mini"
    assert main(["lr", "--root", str(root)]) == 0
    names = {f"{stem}.{kind}" for stem in ("lr", "curves") for kind in ("png", "svg", "pdf")}
    assert {p.name for p in out.iterdir()} == names | {"optimum.csv", "optimum.json", "runs.csv"}
    first = {p.name: p.read_bytes() for p in out.iterdir()}
    shutil.rmtree(out)
    plt.close("all")
    assert main(["--root", str(root)]) == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == first
    printed = capsys.readouterr().out
    assert "63 of 63 runs have a result, 9 diverged" in printed
    assert "decided" in printed


def test_command_writes_the_arms_and_every_expected_run(make_store, monkeypatch):
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    root = make_store()
    shutil.rmtree(root / run_id(0, 0, 0))
    assert main(["lr", "--root", str(root), "--out", str(root / "elsewhere")]) == 0
    out = root / "elsewhere" / "lr-mini"
    assert len(pd.read_csv(out / "runs.csv")) == 63
    assert pd.read_csv(out / "optimum.csv")["arm"].tolist() == ["full", "r1", "r16"]
    document = json.loads((out / "optimum.json").read_text())
    assert [arm["verdict"] for arm in document["arms"]] == ["decided"] * 3


def test_command_names_what_is_missing_and_draws_the_rest(make_store, capsys, caplog, monkeypatch):
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    root = make_store()
    shutil.rmtree(root / run_id(16, 2, 1))
    assert main(["lr", "--root", str(root)]) == 0
    assert f"missing: {run_id(16, 2, 1)}" in caplog.text
    assert "62 of 63 runs have a result, 9 diverged, 1 missing" in capsys.readouterr().out


def test_command_draws_the_other_studies_when_one_is_damaged(make_store, capsys, monkeypatch):
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    root = make_store(num_seeds=1)
    (root / "studies" / "a-mini.json").write_text("{")
    assert main(["--root", str(root)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "a-mini.json: damaged" in captured.err
    assert (root / "figures" / "lr-mini" / "lr.svg").exists()


def test_command_without_results_says_so(make_store, capsys):
    root = make_store(num_seeds=1)
    for path in root.glob("toy-*/summary.json"):
        path.unlink()
    assert main(["lr", "--root", str(root)]) == 0
    assert "none of its 21 runs is finished" in capsys.readouterr().out


def test_command_of_an_unknown_study_is_one_line_and_exit_code_2(make_store, capsys):
    assert main(["nope", "--root", str(make_store(num_seeds=1))]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "'nope'" in captured.err
