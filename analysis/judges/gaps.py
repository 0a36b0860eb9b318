"""Gaps between arms: C11 to C13 (batch size), C14 to C16 (placement), C8 (capacity), C22 (norms)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.arms import FULL
from analysis.inference import Decision, Estimate, equivalent, greater, slope
from analysis.judges.common import (
    Finding,
    TooLittle,
    at_best_lr,
    both,
    bounds,
    equivalence_needs,
    gap,
    grid_of,
    lora_arms,
    seed_sd,
    seeds_text,
)
from analysis.results import StudyRuns

NATS_PER_BIT = math.log(2.0)


# ---------------------------------------------------------------- batch size


def batch_gaps(study: StudyRuns) -> pd.DataFrame:
    """LoRA - full per batch size, LoRA arm and seed, each at its best LR: ``batch, arm, rank, seed, gap``."""
    rows = []
    for batch in sorted(study.runs["config.optim.batch_size"].unique()):
        runs = study.runs[study.runs["config.optim.batch_size"] == batch]
        full = at_best_lr(runs, FULL)
        for arm in lora_arms(runs):
            values = at_best_lr(runs, arm)
            rank = int(runs.loc[runs["arm"] == arm, "rank"].iloc[0])
            for seed in values.index.intersection(full.index):
                rows.append(
                    {"batch": int(batch), "arm": arm, "rank": rank, "seed": seed, "gap": values[seed] - full[seed]}
                )
    table = pd.DataFrame(rows)
    if table.empty or table["batch"].nunique() < 3:
        raise TooLittle("needs three batch sizes")
    return table


def slope_margin(study: StudyRuns) -> float:
    """The smallest slope that counts, nats per factor e in batch size: the study's number of seed SDs per factor
    of four, with the SD of the LoRA arms at the smallest batch size."""
    runs = study.runs[study.runs["config.optim.batch_size"] == study.runs["config.optim.batch_size"].min()]
    ranks = lora_arms(runs)
    noise = seed_sd(runs, [ranks[0], ranks[-1]])
    return float(study.settings["slope_margin"]["seed_sd"]) * noise / math.log(4)


def _grows(found: Estimate, margin: float, level: float) -> Decision:
    """yes: above 0 and not shown to be below the margin; no: below the margin and not shown to be above 0."""
    above, small = greater(found, 0.0, level) == "yes", greater(found, margin, level) == "no"
    return "undecided" if above == small else "yes" if above else "no"


def _batch_slope(table: pd.DataFrame) -> Estimate:
    return slope(np.log(table["batch"].to_numpy(float)), table["gap"].to_numpy(), groups=table["seed"].tolist())


def batch_penalty_grows(study: StudyRuns) -> Finding:
    """C11: the gap to full fine-tuning rises with batch size, at every rank; refuted by a slope below the margin."""
    table = batch_gaps(study)
    margin = slope_margin(study)
    parts: list[Decision] = []
    texts, last = [], None
    for arm, inside in table.groupby("arm", sort=False):
        last = _batch_slope(inside)
        parts.append(_grows(last, margin, study.level))
        low, high = last.interval()
        means = ", ".join(f"{m:+.3f} at {b}" for b, m in inside.groupby("batch")["gap"].mean().items())
        texts.append(f"{arm}: {last.value:+.4f} {bounds(low, high, '.4f')} per factor e ({means})")
    decision = both(*parts)
    assert last is not None
    why = f"slope of the gap in nats on log batch size, one-sided; below {margin:.4f} is no growth"
    return Finding(decision, "; ".join(texts), why,
                   seeds_text(study.runs), last.value, last.interval(),
                   "more seeds or a wider range of batch sizes" if decision == "undecided" else "")  # fmt: skip


def penalty_is_free_of_rank(study: StudyRuns) -> Finding:
    """C12: the slopes of two ranks a decade apart are equal within the margin."""
    table = batch_gaps(study)
    arms = list(dict.fromkeys(table.sort_values("rank")["arm"]))
    if len(arms) < 2:
        raise TooLittle("needs two ranks")
    wide = table.pivot_table(index=["seed", "batch"], columns="arm", values="gap").dropna().reset_index()
    difference = wide[arms[-1]] - wide[arms[0]]
    found = slope(np.log(wide["batch"].to_numpy(float)), difference.to_numpy(), groups=wide["seed"].tolist())
    margin = slope_margin(study)
    decision = equivalent(found, margin, study.level) if margin > 0 else "undecided"
    low, high = found.interval()
    text = f"{arms[-1]} - {arms[0]}: {found.value:+.4f} {bounds(low, high, '.4f')} per factor e in batch size"
    rule = study.settings["slope_margin"]["seed_sd"]
    why = f"difference of slopes, margin {margin:.4f} ({rule:g} seed SDs per factor 4)"
    return Finding(decision, text, why, seeds_text(study.runs), found.value, (low, high),
                   "more seeds" if decision == "undecided" else "")  # fmt: skip


def small_batches_are_best(study: StudyRuns) -> Finding:
    """C13: at equal examples both methods end lowest at the smallest batch size."""
    runs = study.runs
    batches = sorted(runs["config.optim.batch_size"].unique())
    if len(batches) < 2:
        raise TooLittle("needs two batch sizes")
    parts: list[Decision] = []
    texts = []
    for arm in [FULL, *lora_arms(runs)]:
        series = {b: at_best_lr(runs[runs["config.optim.batch_size"] == b], arm) for b in batches}
        first = series[batches[0]]
        rest = min(batches[1:], key=lambda b: float(series[b].mean()))
        shared = first.index.intersection(series[rest].index)
        difference = series[rest][shared] - first[shared]
        count = len(difference)
        se = float(difference.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        parts.append(greater(Estimate(float(difference.mean()), se, count - 1), level=study.level))
        texts.append(f"{arm}: {difference.mean():+.3f} at {rest} against {batches[0]}")
    decision = both(*parts)
    return Finding(decision, "; ".join(texts), "best other batch size minus the smallest, paired by seed, one-sided",
                   seeds_text(runs), needs="more seeds" if decision == "undecided" else "")  # fmt: skip


# ---------------------------------------------------------------- placement


def matched(runs: pd.DataFrame, placement: str, target: float | None, unembed: bool) -> str:
    """The arm of a placement whose trainable parameters come nearest to ``target``; without a target the one of
    lowest rank."""
    chosen = runs[(runs["config.method.placement"] == placement) & (runs["config.method.unembed"] == unembed)]
    if chosen.empty:
        raise TooLittle(f"no {placement} arm {'with' if unembed else 'without'} the unembedding")
    counts = chosen.groupby("arm")[["metric.num_trainable", "rank"]].first()
    if target is None:
        return str(counts["rank"].idxmin())
    return str((counts["metric.num_trainable"] - target).abs().idxmin())


def _attn_and_mlp(study: StudyRuns, panel: str, unembed: bool) -> tuple[pd.DataFrame, str, str]:
    """Runs of one base, its mlp arm and the attn arm nearest to that in parameters."""
    runs = study.runs[study.runs["config.model.name"] == panel]
    mlp = matched(runs, "mlp", None, unembed)
    return runs, matched(runs, "attn", _size(runs, mlp), unembed), mlp


def _all_like(runs: pd.DataFrame, mlp: str) -> tuple[str, str]:
    """The arms of all matrices at the mlp's rank (where there is none: at its size) and at its size."""
    equal = matched(runs, "all", _size(runs, mlp), True)
    rank = runs.loc[runs["arm"] == mlp, "rank"].iloc[0]
    every = (runs["config.method.placement"] == "all") & runs["config.method.unembed"]
    same = runs.loc[every & (runs["rank"] == rank), "arm"]
    return (str(same.iloc[0]) if len(same) else equal), equal


def _size(runs: pd.DataFrame, arm: str) -> int:
    return int(runs.loc[runs["arm"] == arm, "metric.num_trainable"].iloc[0])


def dense_and_moe(study: StudyRuns) -> tuple[str, str | None]:
    """Names of the dense base and of the MoE base, if there is one."""
    names = list(dict.fromkeys(study.runs["config.model.name"]))
    moe = [name for name in names if "moe" in name or "a3b" in name]
    dense = [name for name in names if name not in moe]
    if not dense:
        raise TooLittle("no run of a dense base")
    return dense[0], moe[0] if moe else None


def attention_alone_is_worse(study: StudyRuns, panel: str | None = None) -> Finding:
    """C14: attn loses to mlp at matched parameters, with and without the unembedding."""
    panel = panel or dense_and_moe(study)[0]
    options = sorted(study.runs.loc[study.runs["config.model.name"] == panel, "config.method.unembed"].unique())
    parts: list[Decision] = []
    texts, gaps = [], []
    for unembed in options[::-1]:
        runs, attn, mlp = _attn_and_mlp(study, panel, bool(unembed))
        gaps.append(gap(runs, attn, mlp))
        parts.append(greater(gaps[-1].estimate, level=study.level))
        sizes = [_size(runs, arm) for arm in (attn, mlp)]
        texts.append(f"{attn} - {mlp}: {gaps[-1].text()} at {sizes[0]:,} and {sizes[1]:,} parameters")
    decision = both(*parts)
    found = gaps[parts.index(decision)] if decision in parts else gaps[0]
    why = f"nats, each at its best LR, one-sided at {100 * study.level:g} %; parameters match exactly without the "
    why += "unembedding, which is adapted at the arm's rank"
    return Finding(decision, "; ".join(texts), why,
                   seeds_text(study.runs[study.runs["config.model.name"] == panel]), found.estimate.value,
                   found.estimate.interval(), found.seeds_to_resolve(abs(found.estimate.value))
                   if decision == "undecided" else "")  # fmt: skip


def mlp_is_enough(study: StudyRuns, panel: str | None = None) -> Finding:
    """C15: adding attention to mlp at the same rank changes nothing beyond the margin (TOST)."""
    panel = panel or dense_and_moe(study)[0]
    runs, attn, mlp = _attn_and_mlp(study, panel, True)
    every, equal = _all_like(runs, mlp)
    found, worse, same = gap(runs, mlp, every), gap(runs, attn, mlp), gap(runs, mlp, equal)
    rule = study.settings["margin"]
    noise = seed_sd(runs, [mlp, every])
    margin = max(rule["seed_sd"] * noise if math.isfinite(noise) else 0.0,
                 rule["gap_frac"] * abs(worse.estimate.value))  # fmt: skip
    decision = equivalent(found.estimate, margin, study.level)
    text = f"{mlp} - {every}: {found.text()}" + ("" if equal == every else f"; {mlp} - {equal}: {same.text()}")
    why = f"margin {margin:.3f} (larger of {rule['seed_sd']:g} seed SDs and {100 * rule['gap_frac']:g} % of attn - mlp)"
    return Finding(decision, text, why, seeds_text(runs), found.estimate.value, found.estimate.interval(),
                   equivalence_needs(found, margin) if decision == "undecided" else "")  # fmt: skip


def moe_is_alike(study: StudyRuns) -> Finding:
    """C16: C14 on the MoE base, with rank / active experts per expert."""
    moe = dense_and_moe(study)[1]
    if moe is None:
        raise TooLittle("no run of an MoE base")
    worse, enough = attention_alone_is_worse(study, moe), mlp_is_enough(study, moe)
    why = f"{worse.why}; beside it {enough.here} ({enough.decision}, {enough.why})"
    return Finding(worse.decision, worse.here, why, worse.n, worse.value, worse.interval, worse.needs)


# ---------------------------------------------------------------- capacity and norms


def stored_bits(study: StudyRuns) -> pd.DataFrame:
    """Bits of the facts that each run holds at its end, the arm's best LR by mean: one row per arm and seed.

    bits = total - NLL of all facts in bits; the end-of-answer token is counted against the model, so the number
    errs low. Where only some of the facts are asked for, the rest is taken to be held alike.
    Columns ``arm, rank, num_trainable, seed, bits, total_bits``.
    """
    runs = study.runs.copy()
    total = runs["config.data.num_train"] * runs["config.data.bits_per_fact"]
    asked_share = runs["config.data.num_test"] / runs["config.data.num_train"]
    runs["bits"] = total - runs["value"] * runs["metric.test/num_tokens"] / asked_share / NATS_PER_BIT
    rows = []
    for arm in dict.fromkeys(runs["arm"]):
        best = grid_of(runs, arm).idxmin()
        for row in runs[(runs["arm"] == arm) & (runs["lr"] == best)].itertuples():
            rows.append(
                {"arm": arm, "rank": row.rank, "seed": row.seed, "bits": row.bits,
                 "num_trainable": int(runs.loc[row.Index, "metric.num_trainable"]), "total_bits": int(total[row.Index])}
            )  # fmt: skip
    return pd.DataFrame(rows)


def parity_follows_capacity(study: StudyRuns) -> Finding:
    """C8: arms with room for twice the bits store 90 % of them; none stores more than the quoted bits per parameter."""
    table = stored_bits(study)
    per = float(study.settings["bits_per_parameter_paper"])
    lora = table[table["rank"] > 0]
    room = per * lora["num_trainable"] / lora["total_bits"]
    ample, short = lora[room >= 2], lora[room < 1]
    if ample.empty:
        raise TooLittle("no arm with room for twice the bits")
    share = ample.groupby("arm", sort=False)["bits"].mean() / ample["total_bits"].iloc[0]
    over = (lora["bits"] / lora["num_trainable"]).max()
    filled: Decision = "yes" if share.min() >= 0.9 else "undecided"
    decision: Decision = "no" if over > per else filled
    listed = "; ".join(
        f"{arm}: {inside['bits'].mean() / 1000:.1f} of {inside['total_bits'].iloc[0] / 1000:.1f} kbit, "
        f"{inside['bits'].mean() / inside['num_trainable'].iloc[0]:.2f} per parameter"
        for arm, inside in table.groupby("arm", sort=False)
    )
    why = f"at most {over:.2f} bits per parameter stored (the post quotes {per:g}); "
    why += f"arms with ample room hold {100 * share.min():.0f} to {100 * share.max():.0f} %"
    why += f"; {', '.join(dict.fromkeys(short['arm']))} has too little room" if len(short) else ""
    needs = "longer runs: an arm with room has not filled it" if decision == "undecided" else ""
    return Finding(decision, listed, why, seeds_text(study.runs), float(over), None, needs)


def b_outgrows_a(studies: Sequence[StudyRuns]) -> Finding:
    """C22: at the end of the longest runs most matrices have ||B|| > ||A||, at each arm's best LR."""
    shares, early, texts = [], [], []  # one share per arm: arms with more seeds do not weigh more
    for study in studies:
        runs = study.runs[study.runs["panel"] == study.runs["panel"].iloc[0]]
        for arm in lora_arms(runs):
            best = grid_of(runs, arm).idxmin()
            chosen = runs[(runs["arm"] == arm) & (runs["lr"] == best)]
            values = chosen["metric.adapter/frac_b_larger"].dropna()
            shares += [float(values.mean())] if len(values) else []
            curve = study.curves[study.curves["run_id"].isin(set(chosen["run_id"]))]
            early += curve.loc[curve["step"] <= 10, "metric.adapter/frac_b_larger"].dropna().tolist()
            if len(values):
                texts.append(f"{arm} {100 * values.mean():.0f} % after {int(chosen['step'].max())} steps")
    if len(shares) < 2:
        raise TooLittle("fewer than two arms with recorded norms")
    array = np.array(shares)
    found = Estimate(float(array.mean()), float(array.std(ddof=1)) / math.sqrt(len(array)), len(array) - 1)
    low, high = found.interval()
    share = f"{100 * found.value:.0f} % {bounds(100 * low, 100 * high, '.0f')}"
    text = f"||B|| > ||A|| in {share} of the matrices ({'; '.join(texts)})"
    why = f"more than half of them, t test over {len(array)} arms; in the first ten steps {100 * np.mean(early):.0f} %"
    decision = greater(found, 0.5)
    return Finding(decision, text, why, f"{len(array)} arms", found.value, (low, high),
                   "longer runs" if decision == "undecided" else "")  # fmt: skip
