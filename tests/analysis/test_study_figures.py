"""The figure of every study: what is on it, that it survives missing runs, equal bytes, nothing unreadable."""

import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from synthetic_studies import make_results, without

from analysis import style
from analysis.arms import FULL
from analysis.figures import capacity, parts, rank
from analysis.figures.registry import FIGURES
from analysis.judges import curves
from analysis.judges.rates import width_of
from analysis.results import Results, study_runs
from sweeps.grid import known_studies, load_study

CAPTION = "where the runs come from"
SUPERVISED = [name for name in FIGURES if not name.startswith("rl-")]  # the others: test_rl_figures.py
ONE_SEED = "`config.seed.init` > 0"
GONE = {  # a query per study that takes a whole arm away, and how the caption names it
    "rank": ("`config.model.name` == 'mini-w128' and `config.method.rank` == 4", "no finished run of LoRA rank 4"),
    "length": ("`config.method.kind` == 'full' and `config.optim.steps` == 1000", "no finished run of full"),
    "width": ("`config.model.name` == 'mini-w256' and `config.optim.steps` == 100", "no finished run of full"),
    "batch": ("`config.optim.batch_size` == 64 and `config.method.rank` == 64", "no finished run of LoRA rank 64"),
    "placement": ("`config.model.name` == 'mini-moe' and `config.method.placement` == 'mlp'", "LoRA rank 16 (mlp"),
    "early": ("`config.optim.steps` == 60 and `config.method.rank` == 16", "no finished run of LoRA rank 16"),
    "capacity": ("`config.data.name` == 'facts' and `config.method.kind` == 'full'", "no finished run of full"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _style():
    style.use()


@pytest.fixture(scope="module")
def results() -> Results:
    return make_results()


def draw(results: Results, name: str) -> Figure:
    """Drawn and laid out; what the layout warns of is an error."""
    study = results.study(name)
    assert study is not None
    figure = FIGURES[name](study, CAPTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FigureCanvasAgg(figure).draw()
    return figure


@pytest.fixture(scope="module")
def figures(results, tmp_path_factory) -> dict[str, Figure]:
    """Every figure of the complete studies, drawn once (SVGs in the base folder)."""
    style.use()
    drawn = {name: FIGURES[name](results.study(name), CAPTION) for name in SUPERVISED}
    for name, figure in drawn.items():
        style.save(figure, tmp_path_factory.getbasetemp() / name, ["svg"])
        FigureCanvasAgg(figure).draw()
    return drawn


def ticks(axes: Axes) -> Iterator[Text]:
    """Tick labels that are on paper."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if low <= tick.get_loc() <= high and tick.label1.get_visible() and tick.label1.get_text():
                yield tick.label1


def written(figure: Figure) -> list[Text]:
    """Every text on paper."""
    found = [figure._suptitle] if figure._suptitle else []
    found += [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*ticks(axes), *axes.texts, axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
    return [text for text in found if text.get_text() and text.get_visible()]


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in written(figure)).split())


def problems(figure: Figure) -> list[str]:
    """Texts that overlap, leave the page or are too small to read."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-1.0)) for text in written(figure)]
    found = [f"{a!r} overlaps {b!r}" for (a, first), (b, second) in itertools.combinations(boxes, 2)
             if first.overlaps(second)]  # fmt: skip
    page = figure.bbox.padded(1.0)
    found += [f"{text!r} leaves the page" for text, box in boxes
              if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1]  # fmt: skip
    return found + [f"{t.get_text()!r} is too small" for t in written(figure) if t.get_fontsize() < style.SMALL_PT]


def expected_words(results: Results, name: str) -> list[str]:
    """What must be on the figure for every arm that the study asks for."""
    study = results.study(name)
    assert study is not None
    points = study.points
    if name == "placement":
        rows = points[["config.method.placement", "rank"]].drop_duplicates().itertuples(index=False)
        return [f"{placement}, rank {rank}" for placement, rank in rows]
    if name == "width":
        widths = {width_of(model) for model in points["config.model.name"]}
        return [str(width) for width in widths] + [f"{alpha:g}" for alpha in points["config.method.alpha"].unique()]
    return list(style.arm_labels(parts.expected_arms(study)).values())


def test_every_study_has_its_figure():
    own = {load_figure(name) for name in known_studies()}
    assert own - {"lr"} <= set(FIGURES)


def load_figure(name: str) -> str:
    from sweeps.grid import _read

    return str(_read(name)["figure"])


def test_synthetic_points_are_those_of_the_study_file(results):
    expected = [point.run_id for point in load_study("early", "mini").points]
    assert results.studies["early"]["run_ids"] == expected


@pytest.mark.parametrize("name", SUPERVISED)
def test_every_arm_is_on_the_figure_and_the_caption_says_what_it_is(results, figures, name):
    figure = figures[name]
    text = words(figure)
    assert [word for word in expected_words(results, name) if word not in text] == []
    assert text.startswith(f"{CAPTION} n = ")
    assert "no finished run" not in text
    assert figure.get_size_inches()[0] == style.WIDTH_IN
    assert problems(figure) == []


@pytest.mark.parametrize("name", SUPERVISED)
def test_equal_runs_give_equal_bytes(results, figures, name, tmp_path_factory, tmp_path):
    again = FIGURES[name](results.study(name), CAPTION)
    [path] = style.save(again, tmp_path / name, ["svg"])
    assert path.read_bytes() == (tmp_path_factory.getbasetemp() / name).with_suffix(".svg").read_bytes()


@pytest.mark.parametrize("name", SUPERVISED)
def test_missing_arm_is_named_and_the_rest_drawn_with_one_seed(results, name):
    query, named = GONE[name]
    figure = draw(without(without(results, query), ONE_SEED), name)
    assert named in words(figure)
    assert "n = 1 seed;" in words(figure)
    assert [word for word in expected_words(results, name) if word not in words(figure)] == []
    assert any(len(line.get_xdata()) for axes in figure.axes for line in axes.lines)
    assert problems(figure) == []


@pytest.mark.parametrize("name", SUPERVISED)
def test_no_run_at_all_is_no_traceback(results, name):
    figure = draw(without(results, "run_id == run_id"), name)
    assert "n = 0: no finished run" in words(figure)
    assert problems(figure) == []


@pytest.mark.parametrize("name", SUPERVISED)
def test_study_without_configurations_is_no_traceback(results, name):
    study = results.study(name)
    unknown = study_runs(name, study.settings, pd.DataFrame({"run_id": ["a"], "state": ["missing"]}), study.curves)
    assert "no run and no configuration" in "".join(t.get_text() for t in FIGURES[name](unknown, "").axes[0].texts)


@pytest.mark.parametrize("name", SUPERVISED)
def test_first_runs_of_a_study_are_drawn(results, name):
    """What a sweep looks like after a tenth of its runs."""
    ids = results.studies[name]["run_ids"]
    rest = set(ids[len(ids) // 10 :])
    figure = draw(without(results, f"run_id in {sorted(rest)}"), name)
    assert "no finished run" in words(figure)


@pytest.mark.parametrize("name", ["length", "width"])
def test_undecided_ratio_is_a_cross_and_a_reason(results, name):
    cut = without(results, "`config.method.kind` == 'full' and `config.optim.lr` > 6e-4")  # the optimum is at 5e-4
    figure = draw(cut, name)
    assert "undecided" in words(figure) and "largest of the grid" in words(figure)
    assert any(line.get_marker() == "x" and len(line.get_xdata()) for line in figure.axes[0].lines)
    assert problems(figure) == []


def test_rank_figure_marks_where_each_rank_leaves(results, figures):
    study = results.study("rank")
    figure = figures["rank"]
    rings = [line for line in figure.axes[0].lines if line.get_markersize() == 9 and len(line.get_xdata())]
    steps = curves.departures(study).groupby("rank")["step"].median()
    assert [line.get_xdata()[0] for line in rings] == steps[np.isfinite(steps)].tolist()
    assert len(rings) == 3
    ends = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert ends == [32, 316]


def test_rank_curves_leave_out_seeds_that_ran_few_lrs(results):
    study = results.study("rank")
    few = study.runs[(study.runs["seed"] != "1/1/1") | (study.runs["arm"] != FULL) | (study.runs["lr"] < 3e-3)]
    kept = rank.seeds_with_every_lr(replace(study, runs=few)).runs
    seeds = kept.groupby("arm")["seed"].unique().map(sorted).to_dict()
    assert "1/1/1" not in seeds[FULL] and "0/0/0" in seeds[FULL]
    assert "1/1/1" in seeds["r4-unembed"]


def test_rank_figure_shows_the_known_gap(results):
    gaps, why = rank.gaps(make_results(["rank"], lora_gap=0.3).study("rank"), 316)
    assert why == []
    highest = gaps[gaps["rank"] == 128].iloc[0]
    assert highest["low"] < 0.3 < highest["high"]
    assert highest["gap"] == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("power", "ratio", "said", "unsaid"),
    [
        (0.0, 10.0, "width / (2 alpha): excluded by the slope and by its value at 64", "post's 10): excluded"),
        (0.0, 5.0, "post's 10): excluded by its value at 64", "post's 10): excluded by the slope"),
        (1.0, 5.0, "post's 10): excluded by the slope", "width / (2 alpha): excluded by the slope"),
    ],
)
def test_width_figure_says_which_account_is_excluded_and_by_what(power, ratio, said, unsaid):
    text = words(draw(make_results(["width"], width_power=power, ratio=ratio), "width"))
    assert said in text
    assert unsaid not in text


def test_batch_figure_shows_the_growing_gap(figures):
    right = figures["batch"].axes[2]
    ranks = [bars.lines[0] for bars in right.containers]
    assert len(ranks) == 2
    for line in ranks:
        assert np.diff(line.get_ydata()) == pytest.approx([0.05 * math.log(4)] * 2, abs=0.03)


def test_placement_figure_tells_the_unembedding_by_its_fill(figures):
    dense = figures["placement"].axes[0]
    fills = [bars.lines[0].get_markerfacecolor() for bars in dense.containers]
    assert len(fills) == 10 and sum(fill == "white" for fill in fills) == 5


def test_early_figure_shows_the_difference_grow(figures):
    right = figures["early"].axes[1]
    train = next(line for line in right.lines if line.get_label().startswith("training"))
    values = dict(zip(train.get_xdata(), train.get_ydata(), strict=True))
    assert abs(values[5]) < 0.02 < 0.2 < values[60]


def test_capacity_figure_keeps_runs_that_stored_nothing(results):
    nothing = make_results(["capacity"], seeds_noise=0.0, bits_per_parameter=1e-6)
    figure = draw(nothing, "capacity")
    hollow = [line for line in figure.axes[0].lines if line.get_fillstyle() == "none"]
    assert sum(len(line.get_xdata()) for line in hollow) == 10
    assert "less than 0.1 % of all bits (full fine-tuning, LoRA rank 1" in words(figure)
    table, failed = capacity.bits(results.study("capacity"))
    assert failed == []
    one = table[table["arm"] == "r1-unembed"]
    assert (one["bits"] / one["num_trainable"]).to_numpy() == pytest.approx(1.0, abs=0.06)


def test_diverged_arm_is_said(results):
    study = results.study("capacity")
    runs = study.runs.assign(value=study.runs["value"].where(study.runs["arm"] != FULL))
    figure = FIGURES["capacity"](replace(study, runs=runs), "")
    assert "every run diverged of full fine-tuning" in words(figure)


def test_single_lora_arm_is_not_pale():
    red, green, blue, _ = parts.arm_looks([FULL, "r16"])["r16"]["color"]
    assert 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
