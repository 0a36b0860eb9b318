"""How a mixture of experts uses its experts while it is fine-tuned, against step."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import style
from analysis.figures import parts
from analysis.figures.rl_curves import best_runs, draw
from analysis.results import StudyRuns

METRIC = "metric.experts/entropy_frac"
"""Its column is there if any run had experts."""
PANELS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("experts/entropy_frac",), "entropy of the tokens over\nexperts (1: even)"),
    (("experts/busiest_frac", "experts/top_frac"), "share of the busiest expert,\nand of as many as are active"),
    (("experts/load_p10", "experts/load_p90"), "load of an expert, 10 % and\n90 % quantile (1: even)"),
    (("experts/num_unused",), "experts without a token,\nof all layers"),
)


def has_experts(study: StudyRuns) -> bool:
    """Whether any run of the study counted what its experts take."""
    return METRIC in study.curves and bool(study.curves[METRIC].notna().any())


def figure(study: StudyRuns, caption: str) -> Figure:
    """One row per setting with experts, one line per arm at its best LR.

    Args: a study with ``has_experts``; where its runs come from: what, model, data, scale.
    """
    panels = [(name, part) for name, part in parts.by_panel(study) if has_experts(part)]
    arms = list(dict.fromkeys(arm for _, part in panels for arm in parts.expected_arms(part)))
    looks = parts.arm_looks(arms)
    fig, grid = style.panels(len(panels), len(PANELS), 1.0 + 2.2 * len(panels), paper_heights=(1.6,), paper_columns=2)
    for (name, part), row in zip(panels, grid, strict=True):
        chosen = best_runs(part, parts.expected_arms(part))
        for axes, (metrics, label) in zip(row, PANELS, strict=True):
            parts.attempt(draw, part, axes, metrics=metrics, chosen=chosen, looks=looks)
            axes.set_title(label, loc="left", fontsize=style.SMALL_PT)
        if name:
            row[0].set_ylabel(name)
    names = style.arm_labels(arms)
    handles = [Line2D([], [], label=names[arm], **looks[arm]) for arm in arms if arm in looks]
    style.legend(fig, handles, style.legend_columns([*names.values()]))
    parts.caption(fig, caption, study, "tokens that the experts take in a training step, padding left out; each arm at "
                  "its best LR, mean over seeds, bands: lowest to highest seed")  # fmt: skip
    return fig
