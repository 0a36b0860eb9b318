"""Learning curves by rank: C1 (parity), C2 (log-linear), C3 (departure), C4 (no floor), C9's curves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis.arms import FULL, VALUE
from analysis.inference import (
    Decision,
    Estimate,
    curvature,
    equivalent,
    greater,
    jonckheere,
    slope,
)
from analysis.judges.common import (
    Finding,
    Gap,
    TooLittle,
    arms_of,
    both,
    bounds,
    equivalence_needs,
    gap,
    lora_arms,
    seed_sd,
    seeds_text,
)
from analysis.results import StudyRuns

STRONG = 10.0
"""Difference in BIC that counts as very strong evidence (Kass and Raftery 1995)."""


def sizes(study: StudyRuns) -> dict[str, int]:
    """Steps at which the small and the large data set end: one epoch each, of the same stream."""
    last = int(study.points["config.optim.steps"].max())
    target = last * float(study.settings["small_frac"])
    evaluated = np.array(sorted(study.curves.loc[study.curves[f"metric.{VALUE}"].notna(), "step"].unique()))
    if not len(evaluated):
        raise TooLittle("no learning curve")
    small = int(evaluated[np.argmin(np.abs(evaluated - target))])
    return {"small": small, "large": last}


def parity(study: StudyRuns) -> Finding:
    """C1: the highest rank against full fine-tuning, on the small and on the large data set (TOST)."""
    parts: list[Decision] = []
    texts, whys, needs, worst = [], [], [], None
    for name, step in sizes(study).items():
        runs = arms_of(study.at(step))
        ranks = lora_arms(runs)
        found, low_rank = gap(runs, ranks[-1], FULL), gap(runs, ranks[0], FULL)
        margin = parity_margin(study, runs, ranks, low_rank)
        decision = equivalent(found.estimate, margin, study.level)
        parts.append(decision)
        texts.append(f"{name} ({step} steps) {found.text()}")
        whys.append(f"{name}: margin {margin:.3f}, {decision}")
        if decision == "undecided":
            needs.append(f"{name}: {equivalence_needs(found, margin)}")
        worst = found if worst is None or abs(found.estimate.value) > abs(worst.estimate.value) else worst
    assert worst is not None
    rule = study.settings["margin"]
    why = f"{'; '.join(whys)} (larger of {rule['seed_sd']:g} seed SDs and {100 * rule['gap_frac']:g} % of rank 1's gap)"
    return Finding(both(*parts), f"{ranks[-1]} - full, nats: {'; '.join(texts)}", why, seeds_text(study.runs),
                   worst.estimate.value, worst.estimate.interval(), "; ".join(needs))  # fmt: skip


def parity_margin(study: StudyRuns, runs: pd.DataFrame, ranks: list[str], low_rank: Gap) -> float:
    """The rule fixed in the study file: the larger of some seed SDs and a share of the lowest rank's gap."""
    rule = study.settings["margin"]
    noise = seed_sd(runs, [FULL, ranks[-1]])
    return max(
        rule["seed_sd"] * noise if math.isfinite(noise) else 0.0, rule["gap_frac"] * abs(low_rank.estimate.value)
    )


def envelopes(study: StudyRuns) -> pd.DataFrame:
    """Pointwise minimum over LRs of each arm and seed: columns ``arm, rank, seed, step, nll`` (step > 0).

    Only seeds that ran the arm's whole grid: a minimum over fewer LRs lies higher.
    """
    runs = arms_of(study.runs)
    whole = runs.groupby("arm")["lr"].transform("nunique")
    runs = runs[runs.groupby(["arm", "seed"])["lr"].transform("nunique") == whole]
    column = f"metric.{VALUE}"
    curves = study.curves.loc[study.curves["step"] > 0, ["run_id", "step", column]].dropna()
    joined = curves.merge(runs[["run_id", "arm", "rank", "seed", "lr"]], on="run_id")
    lowest = joined.groupby(["arm", "rank", "seed", "step"])[column].min().rename("nll").reset_index()
    return lowest.sort_values(["rank", "arm", "seed", "step"]).reset_index(drop=True)


def log_linear(study: StudyRuns) -> Finding:
    """C2: is NLL against log step a line, for full fine-tuning and the highest rank?"""
    table = late(study)
    parts: list[Decision] = []
    texts = []
    for arm in (FULL, lora_arms(arms_of(study.runs))[-1]):
        mean = table[table["arm"] == arm].groupby("step")["nll"].mean()
        if mean.empty:
            raise TooLittle(f"{arm}: no seed with the whole grid")
        line, _, bic = curvature(np.log(mean.index.to_numpy(float)), mean.to_numpy())
        if not math.isfinite(bic):
            raise TooLittle(f"{arm}: too few evaluated steps for a fit")
        parts.append("no" if bic > STRONG else "yes" if bic <= 0 else "undecided")
        texts.append(f"{arm}: R² {line:.4f}, ΔBIC {bic:+.0f} for a bend")
    why = (
        f"a bend with ΔBIC above {STRONG:g} refutes the line, at or below 0 supports it; after the burn-in; BIC takes "
    )
    why += "the residuals of neighbouring steps as independent"
    needs = "longer runs" if both(*parts) == "undecided" else ""
    return Finding(both(*parts), "; ".join(texts), why, seeds_text(study.runs), needs=needs)


def late(study: StudyRuns) -> pd.DataFrame:
    """``envelopes`` after the burn-in."""
    table = envelopes(study)
    return table[table["step"] >= float(study.settings["burn_in_frac"]) * table["step"].max()]


def departures(study: StudyRuns) -> pd.DataFrame:
    """First evaluated step from which a rank stays above the highest rank's envelope for good.

    Columns ``arm, rank, seed, step``; inf where it never leaves. Above means by more than the study's
    number of seed SDs at that step, pooled over arms. The SD is of one arm, not of the paired difference:
    it holds what a seed does to all arms alike, so departures err late.
    """
    table = envelopes(study)
    ranks = lora_arms(arms_of(study.runs))
    wide = table.pivot_table(index="step", columns=["arm", "seed"], values="nll")
    repeated = [arm for arm in [*ranks, FULL] if arm in wide and wide[arm].shape[1] > 1]
    if not repeated:
        raise TooLittle("the noise of an envelope needs two seeds")
    sd = np.sqrt(np.mean([wide[arm].to_numpy().var(axis=1, ddof=1) for arm in repeated], axis=0))
    delta = float(study.settings["departure"]["seed_sd"]) * sd
    rows = []
    for arm in ranks[:-1]:
        for seed in wide[arm].columns.intersection(wide[ranks[-1]].columns):
            above = (wide[arm][seed] - wide[ranks[-1]][seed]) > delta
            below = above.index[~above]
            later = above.index[above.index > below[-1]] if len(below) else above.index
            rank = int(table.loc[table["arm"] == arm, "rank"].iloc[0])
            rows.append({"arm": arm, "rank": rank, "seed": seed, "step": float(later[0]) if len(later) else math.inf})
    return pd.DataFrame(rows, columns=["arm", "rank", "seed", "step"])


def leave_in_order_of_rank(study: StudyRuns) -> Finding:
    """C3: the step of departure rises with rank (Jonckheere's trend over ranks, seeds as repeats)."""
    table = departures(study)
    if table.empty or table["rank"].nunique() < 3:
        raise TooLittle("needs three ranks below the highest")
    groups = [inside["step"].to_numpy() for _, inside in table.groupby("rank")]
    p_up = jonckheere(groups)[1]
    p_down = jonckheere(groups[::-1])[1]
    alpha = 1 - study.level
    decision: Decision = "yes" if p_up < alpha else "no" if p_down < alpha else "undecided"
    listed = "; ".join(
        f"{arm}: {', '.join('never' if math.isinf(s) else f'{s:g}' for s in inside['step'])}"
        for arm, inside in table.groupby("arm", sort=False)
    )
    why = f"Jonckheere's trend over {len(groups)} ranks: p = {p_up:.3g} rising, {p_down:.3g} falling"
    return Finding(decision, f"leaves at step {listed} (one per seed)", why, seeds_text(study.runs),
                   needs="more seeds or more ranks" if decision == "undecided" else "")  # fmt: skip


def no_floor(study: StudyRuns) -> Finding:
    """C4: after its departure the lowest rank still improves: slope of NLL on log step below 0 at the end."""
    table = envelopes(study)
    left = departures(study)
    arm = lora_arms(arms_of(study.runs))[0]
    if left.empty:
        raise TooLittle("no rank below the highest to leave its curve")
    first = left.loc[left["arm"] == arm, "step"].max()
    if not math.isfinite(first):
        return Finding("undecided", f"{arm} never leaves the envelope", "nothing to judge before it leaves",
                       seeds_text(study.runs), needs="longer runs or a lower rank")  # fmt: skip
    last = table["step"].max()
    start = max(first, math.sqrt(max(first, 1) * last))
    window = table[(table["arm"] == arm) & (table["step"] >= start)]
    found = slope(np.log(window["step"].to_numpy(float)), window["nll"].to_numpy(), groups=window["seed"].tolist())
    decision = greater(Estimate(-found.value, found.se, found.dof), level=study.level)
    low, high = found.interval()
    text = f"{arm} at the end: {found.value:+.3f} {bounds(low, high, '.3f')} nats per factor e in steps"
    why = f"it left at step {first:g}; slope over steps {start:.0f} to {last}, the second half on a log axis: it still "
    why += "improves at the end of the run; a slow approach to a floor would look the same"
    return Finding(decision, text, why, seeds_text(study.runs), found.value, (low, high),
                   "longer runs" if decision == "undecided" else "")  # fmt: skip


def early_difference(study: StudyRuns) -> pd.DataFrame:
    """Training loss of the study's two ranks on the same batches: columns ``seed, step, difference, learnt``.

    ``difference`` is the first rank minus the second; ``learnt`` how far the second has come down since step 1.
    """
    low, high = (int(rank) for rank in study.settings["ranks"])
    runs = arms_of(study.runs)
    column = f"metric.{study.settings['value']}"
    curves = study.curves[["run_id", "step", column]].dropna()
    joined = curves.merge(runs[["run_id", "rank", "seed"]], on="run_id")
    wide = joined.pivot_table(index=["seed", "step"], columns="rank", values=column)
    if low not in wide or high not in wide:
        raise TooLittle(f"needs ranks {low} and {high}")
    table = pd.DataFrame({"difference": wide[low] - wide[high], "loss": wide[high]}).dropna().reset_index()
    first = table.groupby("seed")["loss"].transform("first")
    return table.assign(learnt=first - table["loss"]).drop(columns="loss")


def early_curves_coincide(study: StudyRuns) -> Finding:
    """C9, curves: equal over the first steps within the margin, and the difference grows afterwards."""
    table = early_difference(study)
    limit = int(study.settings["early_steps"])
    early = (
        table[table["step"] <= limit].groupby("seed").agg(difference=("difference", "mean"), learnt=("learnt", "last"))
    )
    margin = float(study.settings["margin_frac"]) * float(early["learnt"].mean())
    count = len(early)
    se = float(early["difference"].std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    mean = Estimate(float(early["difference"].mean()), se, count - 1)
    same = equivalent(mean, margin, study.level) if margin > 0 else "undecided"
    later = table[table["step"] >= limit]
    growth = slope(np.log(later["step"].to_numpy(float)), later["difference"].to_numpy(), groups=later["seed"].tolist())
    grows = greater(growth, level=study.level)
    low, high = mean.interval()
    first = table[table["step"].between(2, 5)]["difference"].mean()
    a, b = study.settings["ranks"]
    text = f"r{a} - r{b} over steps 1 to {limit}: {mean.value:+.4f} {bounds(low, high, '.4f')} nats "
    text += f"(steps 2 to 5 {first:+.4f})"
    g_low, g_high = growth.interval()
    why = (
        f"early: {same} at a margin of {margin:.3f} nats; then {growth.value:+.4f} {bounds(g_low, g_high, '.4f')} nats "
        f"per factor e in steps, grows: {grows}"
    )
    decision = both(same, grows)
    return Finding(decision, text, why, seeds_text(study.runs), mean.value, (low, high),
                   "more seeds" if decision == "undecided" else "")  # fmt: skip
