"""Figures for a paper: one column wide, fonts embedded, nothing small or off the page, a caption that says all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_study_figures import problems, words

from analysis import style
from analysis.arms import find_arms
from analysis.figures import batch, capacity, early, length, lr, parts, placement, rank, rl_bits, rl_lr, width
from analysis.figures.__main__ import draw, main, sweeps_of
from analysis.figures.registry import FIGURES
from analysis.results import Results, from_reference
from analysis.verdict import REFERENCE_DIR

REFERENCE = from_reference(REFERENCE_DIR / "mini")
WIDTH_PT = 72 * 3.3


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    style.use("paper")
    yield
    style.use()


@pytest.fixture(scope="module")
def drawn() -> Iterator[dict[str, dict[str, Figure]]]:
    """Every figure of every study of the committed reference."""
    style.use("paper")
    figures = {}
    for name, manifest in REFERENCE.studies.items():
        study = REFERENCE.study(name)
        assert study is not None
        figures[name] = draw(study, manifest, "mini", sweeps_of(study))
        for figure in figures[name].values():
            FigureCanvasAgg(figure).draw()
    yield figures
    style.use()


@pytest.mark.parametrize("name", REFERENCE.studies)
def test_figure_is_one_column_and_everything_on_it_can_be_read(drawn: dict, name: str) -> None:
    assert drawn[name]
    for figure in drawn[name].values():
        assert figure.get_size_inches()[0] == style.COLUMN_IN
        assert figure.get_size_inches()[1] < 11  # or it is no page of a paper
        assert figure._suptitle is None
        assert [problem for problem in problems(figure) if "too small" not in problem] == []
        shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
        assert [text.get_text() for text in shown if text.get_fontsize() < 6.5] == []
        assert [text.get_text() for text in shown if "$" in text.get_text()] == []  # has small exponents


@pytest.mark.parametrize("name", REFERENCE.studies)
def test_caption_has_n_interval_and_scale(drawn: dict, name: str) -> None:
    for key, figure in drawn[name].items():
        said = figure.get_label()
        for part in (r"n = \d", r"95 % interval of an arm's mean final (NLL in nats|reward), .* ± 0\.\d", "mini scale"):
            assert re.search(part, said), (key, part)
        assert not re.search(r"\b(left|right|middle|above|below): ", said)  # the panels stand below each other


@pytest.mark.parametrize("name", REFERENCE.studies)
def test_file_is_one_column_and_holds_its_fonts(drawn: dict, name: str, tmp_path: Path) -> None:
    figure = next(iter(drawn[name].values()))
    text, pdf = style.save(figure, tmp_path / "figure", formats=("pdf",))
    content = pdf.read_bytes()
    fonts = content.count(b"/Type /FontDescriptor")
    assert fonts and content.count(b"/FontFile2 ") == fonts and b"/Subtype /Type3" not in content
    [box] = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) [\d.]+ \]", content)
    assert float(box) == pytest.approx(WIDTH_PT)
    assert " ".join(text.read_text().split()) == " ".join(figure.get_label().split())


def test_svg_needs_no_font(drawn: dict, tmp_path: Path) -> None:
    _, svg = style.save(drawn["early"]["early"], tmp_path / "early", formats=("svg",))
    assert b"<text" not in svg.read_bytes() and b"font-family" not in svg.read_bytes()


def test_interval_of_the_caption_is_students_on_the_pooled_noise() -> None:
    rows = [("full", 1.0), ("full", 1.1), ("full", 1.2), ("r4", 2.0), ("r4", 2.3), ("r4", 2.6)]
    runs = pd.DataFrame(rows, columns=["arm", "value"]).assign(panel="", lr=1e-3, seed=[*"012"] * 2)
    # SD² = (2 · 0.01 + 2 · 0.09) / 4 = 0.05; t(4) = 2.776; 2.776 · √(0.05 / 3) = 0.358
    assert parts.interval_text(runs) == (
        "95 % interval of an arm's mean final NLL in nats, at its best LR: ± 0.36 "
        "(Student's t, SD of a run 0.22, pooled over arms)"
    )
    assert "no arm has two seeds" in parts.interval_text(runs.drop_duplicates("arm"))


def test_panels_are_lettered_and_the_caption_uses_the_letters(drawn: dict) -> None:
    figure = drawn["placement"]["placement"]
    assert [axes.get_title(loc="left")[:4].strip() for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert "(a) and (c): each arm at its best LR" in figure.get_label()
    assert "equal parameters" in figure.axes[1].get_title(loc="left")  # of the base above it
    assert [axes.get_title(loc="left") for axes in drawn["capacity"]["capacity"].axes] == [""]


def test_shared_axis_is_named_on_both_panels(drawn: dict) -> None:
    upper, lower = drawn["width"]["width"].axes
    assert upper.get_ylabel() == lower.get_ylabel() != "" and upper.get_ylim() == lower.get_ylim()


def test_command_writes_vectors_and_captions_beside_the_screens_figures(make_store, capsys) -> None:
    root = make_store(num_seeds=2)
    assert main(["lr", "--root", str(root), "--style", "paper"]) == 0
    out = root / "figures" / "paper" / "lr-mini"
    assert {path.name for path in out.iterdir() if path.suffix in (".pdf", ".svg", ".png", ".txt")} == {
        f"{stem}.{kind}" for stem in ("lr", "curves") for kind in ("pdf", "svg", "txt")
    }  # fmt: skip
    assert "n = 2 seeds" in (out / "lr.txt").read_text()
    assert f"{out / 'lr.pdf'}" in capsys.readouterr().out
    assert main(["lr", "--root", str(root), "--style", "poster"]) == 2
    assert capsys.readouterr().err == "error: style: 'poster' is not allowed; one of screen, paper\n"


def test_screen_comes_back_after_a_paper(tmp_path: Path) -> None:
    study = REFERENCE.study("early")

    def on_screen() -> bytes:
        style.use()
        return style.save(FIGURES["early"](study, "c"), tmp_path / "early", ["svg"])[-1].read_bytes()

    before = on_screen()
    style.use("paper")
    assert "c." in FIGURES["early"](study, "c").get_label()
    assert on_screen() == before
    assert not (tmp_path / "early.txt").exists()


def drawings(results: Results) -> dict[str, tuple]:
    """(function, its table, what else it takes) of each panel of the studies."""
    study = {name: results.study(name) for name in results.studies}
    arms = find_arms(study["lr"].runs)
    looks = style.arm_looks([arm.name for arm in arms])
    base = {"model": placement.bases(study["placement"])[0]}
    return {
        "batch curves": (batch.draw_curves, study["batch"], {}),
        "batch finals": (batch.draw_finals, study["batch"], {}),
        "batch gaps": (batch.draw_gaps, study["batch"], {}),
        "capacity": (capacity.draw, study["capacity"], {}),
        "early losses": (early.draw_losses, study["early"], {}),
        "early difference": (early.draw_difference, study["early"], {}),
        "length ratios": (length.draw_ratios, study["length"], {}),
        "length optima": (length.draw_optima, study["length"], {}),
        "bowls": (lr.draw_bowls, study["lr"].runs, {"arms": arms, "looks": looks}),
        "placement finals": (placement.draw_finals, study["placement"], base),
        "placement at equal parameters": (placement.draw_equal, study["placement"], base),
        "rank curves": (rank.draw_curves, study["rank"], {}),
        "rank gaps": (rank.draw_gaps, study["rank"], {}),
        "reward against LR": (rl_lr.draw, study["rl-lr"], {}),
        "bits of reward": (rl_bits.draw, study["rl-bits"], {}),
        "width": (width.draw_widths, study["width"], {}),
        "alpha": (width.draw_alphas, study["width"], {}),
    }


def test_every_drawing_takes_a_table_and_an_axes_and_returns_it() -> None:
    for name, (function, table, options) in drawings(REFERENCE).items():
        axes = Figure().subplots()
        assert function(table, axes=axes, **options) is axes, name
        assert axes.has_data(), name


def test_note_of_a_panel_is_on_its_axes_and_not_drawn() -> None:
    style.use()
    figure = Figure()
    axes = early.draw_difference(REFERENCE.study("early"), figure.subplots())
    assert re.fullmatch(r"dotted: ± 0\.\d+ nats, \d+ % of what was learnt by then", axes.get_label())
    assert "what was learnt" not in words(figure)
