"""Learning rates: C5 and C7 (the ratio, its rank dependence), C6 (width), C10 (run length)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.arms import FULL, Arm, find_arms
from analysis.inference import Decision, Estimate, greater, slope, within
from analysis.judges.common import Finding, TooLittle, bounds, seeds_text
from analysis.optimum import Ratio, ratio
from analysis.results import StudyRuns
from analysis.stats import LEVEL


def ratio_is_ten(study: StudyRuns) -> Finding:
    """C5: LR*(highest rank) / LR*(full) within the range fixed around 10."""
    arms = find_arms(study.runs)
    highest = max((arm for arm in arms if arm.ratio), key=lambda arm: _rank(study, arm), default=None)
    if highest is None or highest.ratio is None:
        raise TooLittle("no LoRA arm beside full fine-tuning")
    found = highest.ratio
    n = seeds_text(study.runs)
    if found.value is None or found.interval is None:
        return Finding("undecided", "no ratio", found.why, n, needs=_needs(arms))
    low, high = study.settings["ratio_range"]
    text = f"{found.value:.1f} [{found.interval[0]:.1f}, {found.interval[1]:.1f}] at {highest.name}"
    why = f"a 95 % interval inside {low:g} to {high:g} counts as ten, one outside as not; {_note(found)}"
    decision = within(found.interval, low, high)
    needs = f"LRs between those around {highest.optimum.best_lr:g}" if decision == "undecided" else ""
    return Finding(decision, text, why, n, found.value, found.interval, needs)


def optimum_hardly_moves_with_rank(study: StudyRuns) -> Finding:
    """C7: LR* of ranks of 4 and more within a factor of two. Rank 1's is reported, and refutes if it is higher."""
    arms = [arm for arm in find_arms(study.runs) if arm.name != FULL]
    undecided = [arm.name for arm in arms if arm.optimum.lr_star is None]
    n = seeds_text(study.runs)
    if undecided:
        why = "; ".join(f"{arm.name}: {arm.optimum.why}" for arm in arms if arm.optimum.lr_star is None)
        return Finding("undecided", f"LR* of {', '.join(undecided)} unknown", why, n, needs=_needs(arms))
    ranked = sorted(arms, key=lambda arm: _rank(study, arm))
    rest = [arm for arm in ranked if _rank(study, arm) >= 4]
    if len(rest) < 2 or _rank(study, ranked[0]) > 1:
        raise TooLittle("needs rank 1 and two ranks of 4 or more")
    factor = float(study.settings["rank_factor"])
    extremes = sorted(rest, key=lambda arm: arm.optimum.lr_star or math.nan)
    spread = ratio(extremes[-1].optimum, extremes[0].optimum)
    lowest = ratio(ranked[0].optimum, rest[0].optimum)
    assert spread.value and spread.interval and lowest.value and lowest.interval
    moved = within(spread.interval, 1 / factor, factor)
    below: Decision = "yes" if lowest.interval[1] < 1 else "no" if lowest.interval[0] > 1 else "undecided"
    text = (
        f"{extremes[-1].name} to {extremes[0].name}: {_interval(spread)}; rank 1 to {rest[0].name}: {_interval(lowest)}"
    )
    why = f"ranks of 4 and more: {_word[moved]} within a factor of {factor:g}; rank 1 lower: {_word[below]}"
    decision: Decision = "no" if "no" in (moved, below) else moved  # the post gives a number for the first part only
    return Finding(
        decision, text, why, n, spread.value, spread.interval, "" if decision != "undecided" else _needs(arms)
    )


def ratio_by_width(study: StudyRuns) -> pd.DataFrame:
    """LR ratio per width: columns ``width, panel, arm, ratio, low, high, why`` (NaN where undecided).

    The arm is the LoRA arm of the protocol's alpha; one row per base model.
    """
    runs = study.at(int(study.settings["read_at"]))
    rows = []
    for arm in find_arms(runs):
        if arm.ratio is not None:
            inside = runs[(runs["panel"] == arm.panel) & (runs["arm"] == arm.name)]
            low, high = arm.ratio.interval or (math.nan, math.nan)
            rows.append(
                {
                    "panel": arm.panel,
                    "arm": arm.name,
                    "width": width_of(arm.panel or str(inside["config.model.name"].iloc[0])),
                    "alpha": float(inside["config.method.alpha"].iloc[0]),
                    "ratio": arm.ratio.value if arm.ratio.value is not None else math.nan,
                    "low": low,
                    "high": high,
                    "why": arm.ratio.why,
                }
            )
    return pd.DataFrame(rows)


WIDTHS = {"smollm2-135m": 576, "llama-3.2-1b": 2048, "llama-3.2-3b": 3072, "llama-3.1-8b": 4096}
"""Hidden sizes of the bases whose name does not say it."""


def width_of(model: str) -> int:
    """Hidden size of a base by its name (``mini-w128`` says it). Raises ValueError for an unknown one."""
    name = model.split(",")[0]
    if name in WIDTHS:
        return WIDTHS[name]
    if "-w" in name:
        return int(name.rpartition("-w")[2])
    raise ValueError(f"model: the width of {name!r} is not known; add it to analysis.judges.rates.WIDTHS")


HYPOTHESES = {"constant": 0.0, "square root of width": 0.5, "width / (2 alpha)": 1.0}
"""Slope of log ratio on log width under each account of it."""


def width_slope(table: pd.DataFrame, alpha: float = 32.0) -> Estimate:
    """Slope of log ratio on log width over the bases at one alpha; each ratio's interval is its noise."""
    known = table[(table["alpha"] == alpha) & table["ratio"].notna()]
    if known["width"].nunique() < 3:
        raise TooLittle(f"LR ratios at {known['width'].nunique()} widths; a slope needs 3")
    noise = float(np.max(np.log(known["high"] / known["low"]))) / (2 * 1.96)
    return slope(np.log(known["width"].to_numpy(float)), np.log(known["ratio"].to_numpy()), noise=(noise, math.inf))


def excluded(estimate: Estimate) -> dict[str, bool]:
    """Which hypotheses the 95 % interval of the slope excludes."""
    low, high = estimate.interval()
    return {name: not low <= value <= high for name, value in HYPOTHESES.items()}


def excluded_levels(table: pd.DataFrame, ratio_paper: float, alpha: float = 32.0) -> dict[str, list[int]]:
    """Widths at which a hypothesis that names a value lies outside the measured 95 % interval."""
    known = table[(table["alpha"] == alpha) & table["ratio"].notna()]
    predicted = {"constant": ratio_paper + 0 * known["width"], "width / (2 alpha)": known["width"] / (2 * alpha)}
    return {
        name: known.loc[(value < known["low"]) | (value > known["high"]), "width"].astype(int).tolist()
        for name, value in predicted.items()
    }


def ratio_is_free_of_width(study: StudyRuns) -> Finding:
    """C6: the slope's interval includes 0 and excludes the 1 of width / (2 alpha)."""
    table = ratio_by_width(study)
    if table.empty:
        raise TooLittle("no width with both LoRA and full fine-tuning")
    n = seeds_text(study.runs)
    unknown = table[(table["alpha"] == 32.0) & table["ratio"].isna()]
    estimate = width_slope(table)
    low, high = estimate.interval()
    out = excluded(estimate)
    decision: Decision = "no" if out["constant"] else "yes" if out["width / (2 alpha)"] else "undecided"
    ratios = ", ".join(f"{row.ratio:.1f} at {row.width}" for row in table[table["alpha"] == 32.0].itertuples())
    names = [name for name, is_out in out.items() if is_out]
    why = f"slope of log ratio on log width; excluded by it: {', '.join(names) or 'none of the three'}"
    for name, widths in excluded_levels(table, float(study.settings["ratio_paper"])).items():
        value = f"{study.settings['ratio_paper']:g}" if name == "constant" else name
        why += f"; the value {value} is excluded at {', '.join(map(str, widths))}" if widths else ""
    if len(unknown):
        why += f"; undecided at {', '.join(unknown['panel'])}"
    needs = "more seeds, LRs closer together or more widths" if decision == "undecided" else ""
    return Finding(decision, f"{estimate.value:+.2f} {bounds(low, high, '.2f')} ({ratios})", why, n,
                   estimate.value, (low, high), needs)  # fmt: skip


def ratio_by_length(study: StudyRuns) -> pd.DataFrame:
    """LR ratio of each LoRA arm at each run length: ``steps, arm, ratio, low, high, lr_full, lr_lora, why``."""
    rows = []
    for steps in study.settings["lengths"]:
        runs = study.at(int(steps))
        arms = find_arms(runs[runs["panel"] == runs["panel"].iloc[0]]) if len(runs) else []
        full = next((arm for arm in arms if arm.name == FULL), None)
        for arm in arms:
            if arm.ratio is not None and full is not None:
                low, high = arm.ratio.interval or (math.nan, math.nan)
                rows.append(
                    {
                        "steps": int(steps),
                        "arm": arm.name,
                        "ratio": arm.ratio.value if arm.ratio.value is not None else math.nan,
                        "low": low,
                        "high": high,
                        "lr_full": full.optimum.lr_star or math.nan,
                        "lr_lora": arm.optimum.lr_star or math.nan,
                        "why": arm.ratio.why,
                    }
                )
    return pd.DataFrame(rows)


def short_runs_want_more(study: StudyRuns) -> Finding:
    """C10: the ratio falls with run length."""
    table = ratio_by_length(study)
    known = table[table["ratio"].notna()] if len(table) else table
    n = seeds_text(study.runs)
    if len(known) < 3:
        why = "; ".join(dict.fromkeys(table["why"])) if len(table) else "no ratio"
        raise TooLittle(f"LR ratios at {len(known)} lengths; a trend needs 3 ({why})")
    noise = float(np.max(np.log(known["high"] / known["low"]))) / (2 * 1.96)
    found = slope(np.log(known["steps"].to_numpy(float)), np.log(known["ratio"].to_numpy()), noise=(noise, math.inf))
    decision = greater(Estimate(-found.value, found.se, found.dof))
    low, high = found.interval()
    listed = ", ".join(f"{row.ratio:.1f} at {row.steps}" for row in known.itertuples())
    why = f"slope of log ratio on log steps {found.value:+.2f} {bounds(low, high, '.2f')}; falls: {_word[decision]}"
    left_out = table.loc[table["ratio"].isna(), "steps"].tolist()
    if left_out:
        why += f"; undecided at {', '.join(map(str, left_out))} steps"
    return Finding(decision, listed, why, n, found.value, (low, high),
                   "LRs closer together and more seeds" if decision == "undecided" else "")  # fmt: skip


_word = {"yes": "yes", "no": "no", "undecided": "cannot be told"}


def _rank(study: StudyRuns, arm: Arm) -> int:
    return int(study.runs.loc[study.runs["arm"] == arm.name, "rank"].iloc[0])


def _interval(found: Ratio) -> str:
    assert found.value is not None and found.interval is not None
    return f"{found.value:.2f} [{found.interval[0]:.2f}, {found.interval[1]:.2f}]"


def _note(found: Ratio) -> str:
    return found.why or f"{100 * LEVEL:.0f} % bootstrap over seeds, at least half a grid step"


def _needs(arms: list[Arm]) -> str:
    wanted = [
        f"{arm.name}: {', '.join(f'{lr:g}' for lr in arm.optimum.add_lrs)}" for arm in arms if arm.optimum.add_lrs
    ]
    return f"LRs {'; '.join(wanted)}" if wanted else "LRs closer together and more seeds"
