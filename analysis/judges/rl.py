"""Reinforcement learning: C17 (rank 1), C18 (range of good LRs), C19 and C20 (bits and parameters).

Values are failure rates, 1 - held-out reward (``arms.as_loss``), so that less is better as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.arms import FULL, find_arms
from analysis.inference import Decision, Interval, equivalent, within
from analysis.judges.common import (
    Finding,
    TooLittle,
    at_best_lr,
    bounds,
    equivalence_needs,
    gap,
    grid_of,
    lora_arms,
    seed_sd,
    seeds_text,
)
from analysis.judges.gaps import stored_bits
from analysis.results import StudyRuns
from analysis.stats import Array, percentile_interval
from analysis.window import Window, usable_window

NUM_RESAMPLES = 1000
SHOWN = ("r1", "r1-unembed")


def rank_one(runs: pd.DataFrame) -> str:
    """The name of the rank 1 arm. Raises TooLittle if there is none."""
    arm = lora_arms(runs)[0]
    if arm not in SHOWN:
        raise TooLittle("no finished run of rank 1")
    return arm


def rank_one_is_enough(study: StudyRuns) -> Finding:
    """C17: rank 1's held-out reward equals full fine-tuning's, each at its best LR, within the study's margin."""
    runs = study.runs
    arm = rank_one(runs)
    found = gap(runs, arm, FULL)
    margin = float(study.settings["margin"])
    sd = seed_sd(runs, [arm, FULL])
    base, best = float(runs["base"].mean()), float(at_best_lr(runs, FULL).mean())
    decision: Decision = equivalent(found.estimate, margin, study.level) if sd <= margin else "undecided"
    low, high = (-x for x in reversed(found.estimate.interval()))
    text = f"rank 1 minus full: {-found.estimate.value:+.3f} {bounds(low, high, '+.3f')} in reward, seed SD {sd:.3f}"
    why = f"TOST within {margin:g}; base {1 - base:.2f}, full {1 - best:.2f}"
    if not base - best >= float(study.settings["least_gain"]):
        decision, why = "undecided", f"{why}: full fine-tuning gains less than {study.settings['least_gain']:g}"
    if sd > margin:
        why += "; the spread of seeds exceeds the margin"
    ratios = "; ".join(
        f"{a.name} {a.ratio.value:.1f} [{a.ratio.interval[0]:.1f}, {a.ratio.interval[1]:.1f}]"
        for a in find_arms(runs)
        if a.ratio and a.ratio.value and a.ratio.interval
    )
    why += f"; LR*/LR*(full): {ratios}" if ratios else "; no LR ratio is decided"
    needs = equivalence_needs(found, margin) if decision == "undecided" else ""
    return Finding(decision, text, why, seeds_text(runs), -found.estimate.value, (low, high), needs)


# ---------------------------------------------------------------- range of good LRs


def good_window(runs: pd.DataFrame, arm: str, share: float, seeds: Sequence[str]) -> Window | None:
    """The LRs that reach ``share`` of the arm's best gain over the base, None if nothing improves on it.

    ``seeds`` may repeat (a bootstrap resample). A LR at which one of them diverged bounds the range.
    """
    inside = runs[runs["arm"] == arm]
    wide = inside.pivot(index="lr", columns="seed", values="value")
    means_L = wide[list(seeds)].to_numpy(float).mean(axis=1)  # NaN where one of them is
    return usable_window(wide.index.to_numpy(float), means_L, float(inside["base"].mean()), share)


def decades(window: Window | None) -> float:
    """Width of a range of LRs, NaN for none."""
    return math.nan if window is None else math.log10(window.factor)


def wider(runs: pd.DataFrame, arm: str, share: float) -> tuple[float, Interval, bool]:
    """Width of ``arm``'s range minus full's, decades; 95 % bootstrap interval over seeds; is a range cut off?

    Arms are resampled together: they share their seeds.
    """
    seeds = sorted(set.intersection(*(set(runs.loc[runs["arm"] == name, "seed"]) for name in (arm, FULL))))
    if len(seeds) < 2:
        raise TooLittle(f"{arm} and full share {len(seeds)} seeds")
    pair = [good_window(runs, name, share, seeds) for name in (arm, FULL)]
    rng = np.random.default_rng(0)
    draws: Array = np.array([
        decades(good_window(runs, arm, share, drawn)) - decades(good_window(runs, FULL, share, drawn))
        for drawn in (rng.choice(seeds, len(seeds)).tolist() for _ in range(NUM_RESAMPLES))
    ])  # fmt: skip
    if not np.isfinite(draws).any():
        raise TooLittle("an arm does not improve on the base")
    low, high = percentile_interval(draws[np.isfinite(draws)], len(seeds) - 1)
    cut = any(window is not None and (window.open_low or window.open_high) for window in pair)
    return decades(pair[0]) - decades(pair[1]), (float(low), float(high)), cut


def wider_range(study: StudyRuns) -> Finding:
    """C18: more decades of LR are good for rank 1 than for full fine-tuning; other ranks are reported."""
    runs, share = study.runs, float(study.settings["window_share"])
    arm = rank_one(runs)
    value, (low, high), cut = wider(runs, arm, share)
    if not math.isfinite(value):
        raise TooLittle("an arm does not improve on the base")
    listed = []
    for name in [FULL, *lora_arms(runs)]:
        window = good_window(runs, name, share, sorted(set(runs.loc[runs["arm"] == name, "seed"])))
        is_open = window is not None and (window.open_low or window.open_high)
        listed.append(f"{name} {'at least ' * is_open}{decades(window):.2f}")
    least = float(study.settings["window_margin"])
    decision: Decision = "yes" if low > 0 else "no" if high < least else "undecided"
    text = f"rank 1 minus full: {value:+.2f} {bounds(low, high, '+.2f')} decades ({', '.join(listed)})"
    why = f"LRs that reach {100 * share:g} % of the arm's best gain; bootstrap over seeds; no wider if below {least:g}"
    if cut and decision != "undecided":
        decision, why = "undecided", f"{why}; the grid cuts a range off"
    needs = "LRs beyond the grid" if cut else "more seeds, LRs closer together"
    return Finding(decision, text, why, seeds_text(runs), value, (low, high), needs if decision == "undecided" else "")


# ---------------------------------------------------------------- bits and parameters


def gains(study: StudyRuns) -> pd.DataFrame:
    """Each arm at its best LR: ``arm, num_trainable, seed, gain, share, bits, episodes``.

    ``gain`` is the rise in held-out reward; ``share`` that of full fine-tuning's mean gain; ``bits`` what the
    rewards of the run could carry (sum of the entropy of each completion's reward), ``episodes`` their number.
    """
    runs = study.runs
    per_run = study.curves.groupby("run_id")["metric.train/bits"].sum()
    rows = []
    for arm in dict.fromkeys(runs["arm"]):
        try:
            best = grid_of(runs, arm).idxmin()
        except TooLittle:  # every LR lost a run
            continue
        for row in runs[(runs["arm"] == arm) & (runs["lr"] == best)].to_dict("records"):
            episodes = row["step"] * row["config.optim.batch_size"] * row["config.rl.group_size"]
            rows.append({"arm": arm, "num_trainable": int(row["metric.num_trainable"]), "seed": row["seed"],
                         "gain": row["base"] - row["value"], "bits": float(per_run[row["run_id"]]),
                         "episodes": int(episodes)})  # fmt: skip
    table = pd.DataFrame(rows)
    if table.empty or FULL not in set(table["arm"]):
        raise TooLittle("no usable run of full fine-tuning")
    full = float(table.loc[table["arm"] == FULL, "gain"].mean())
    return table.assign(share=table["gain"] / full)


def fewest_parameters(table: pd.DataFrame, share: float) -> tuple[str, int] | None:
    """The adapter with the fewest parameters whose mean gain is ``share`` of full's, and so has every larger one."""
    means = table[table["arm"] != FULL].groupby("arm")[["num_trainable", "share"]].mean().sort_values("num_trainable")
    found = None
    for arm, row in means[::-1].iterrows():
        if row["share"] < share:
            break
        found = str(arm), int(row["num_trainable"])
    return found


def resampled_parameters(table: pd.DataFrame, share: float, num: int = NUM_RESAMPLES) -> Interval:
    """95 % bootstrap interval, over seeds, of the fewest sufficient parameters; inf where no adapter suffices."""
    rng = np.random.default_rng(0)
    wide = table.pivot_table(index="arm", columns="seed", values="gain")
    counts = table.groupby("arm")["num_trainable"].first()
    draws = []
    for _ in range(num):
        chosen = wide[rng.choice(wide.columns, wide.shape[1])].mean(axis=1)
        sample = pd.DataFrame({"arm": wide.index, "num_trainable": counts[wide.index].to_numpy(),
                               "share": (chosen / chosen[FULL]).to_numpy()})  # fmt: skip
        found = fewest_parameters(sample, share)
        draws.append(math.inf if found is None else float(found[1]))
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return float(low), float(high)


def rewards_bound_what_is_learned(study: StudyRuns) -> Finding:
    """C19: adapters with room for no more bits than the rewards carried suffice (the post: at most 1 an episode)."""
    table = gains(study)
    share, per = float(study.settings["gain_share"]), float(study.settings["bits_per_parameter_paper"])
    full = table[table["arm"] == FULL]
    bits, episodes = float(full["bits"].mean()), float(full["episodes"].mean())
    found = fewest_parameters(table, share)
    low, high = resampled_parameters(table, share)
    if found is None:
        raise TooLittle(f"no adapter reaches {100 * share:g} % of full fine-tuning's gain")
    decision: Decision = within((per * low, per * high), 0.0, bits)
    text = (
        f"{bits:,.0f} bits in {episodes:,.0f} episodes ({bits / episodes:.2f} each); {found[0]} suffices: "
        f"{found[1]:,} parameters {bounds(low, high, ',.0f')}"
    )
    why = f"{100 * share:g} % of full's gain; at {per:g} bits per parameter it holds {per * found[1]:,.0f} bits"
    needs = "smaller adapters or more seeds" if decision == "undecided" else ""
    return Finding(decision, text, why, seeds_text(study.runs), float(found[1]), (low, high), needs)


def less_than_supervised(rl: StudyRuns, supervised: StudyRuns) -> Finding:
    """C20: the fewest adapter parameters for a share of full's gain, supervised against RL, at one model width."""
    share = float(rl.settings["gain_share"])
    table = gains(rl)
    found, (low, high) = fewest_parameters(table, share), resampled_parameters(table, share)
    stored = stored_bits(supervised)
    full = float(stored.loc[stored["rank"] == 0, "bits"].mean())
    means = stored[stored["rank"] > 0].groupby("arm")[["num_trainable", "bits"]].mean().sort_values("num_trainable")
    enough = means[means["bits"] >= share * full]
    if found is None or enough.empty:
        raise TooLittle(f"no adapter reaches {100 * share:g} % of full fine-tuning's gain in both")
    wanted = int(enough["num_trainable"].iloc[0])
    missed = means[means["bits"] < share * full]["num_trainable"]
    least = int(missed.max()) if len(missed) else 1  # the grid of ranks only says: more than that
    value, interval = wanted / found[1], (least / high, wanted / low)
    decision: Decision = "yes" if interval[0] > 1 else "no" if interval[1] < 1 else "undecided"
    text = f"{wanted:,} parameters ({enough.index[0]}) against {found[1]:,} ({found[0]}): {value:,.0f}x"
    why = (
        f"{100 * share:g} % of full's gain; supervised: random facts stored, the most that a data set "
        f"can ask; interval over the grid of adapters: supervised more than {least:,}, RL {low:,.0f} to {high:,.0f}"
    )
    needs = "adapters between these" if decision == "undecided" else ""
    return Finding(decision, text, why, seeds_text(rl.runs), value, interval, needs)
