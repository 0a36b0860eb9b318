"""What the judges share: findings, the best LR of an arm, paired gaps and the noise of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.inference import Decision, Estimate, Interval, paired, seeds_for_equivalence, seeds_needed
from analysis.stats import Array, pooled_sd, remove_seed_effects


@dataclass(frozen=True)
class Finding:
    """What the runs say of one claim. ``decision`` yes: the claim holds here; no: it does not.

    ``here`` is the measured value in words, ``why`` what the decision rests on, ``needs`` what would
    decide an undecided claim; ``value`` and ``interval`` (95 %) the number behind ``here``, if it is one.
    """

    decision: Decision
    here: str
    why: str
    n: str
    value: float | None = None
    interval: Interval | None = None
    needs: str = ""


def bounds(low: float, high: float, spec: str) -> str:
    """``[0.100, 0.146]``; where nothing gives an interval (one seed), just that."""
    return f"[{low:{spec}}, {high:{spec}}]" if math.isfinite(low) or math.isfinite(high) else "[no interval]"


@dataclass(frozen=True)
class Gap:
    """Paired difference of two arms, each at its own best LR: positive if the first loses more."""

    estimate: Estimate
    num_seeds: int
    sd: float  # of one paired difference

    def text(self) -> str:
        """``+0.123 [0.100, 0.146]`` in nats per token."""
        return f"{self.estimate.value:+.3f} {bounds(*self.estimate.interval(), '.3f')}"

    def seeds_to_resolve(self, delta: float) -> str:
        """How many seeds would tell a difference of ``delta`` nats from none, in words."""
        if not (math.isfinite(self.sd) and delta > 0):
            return "more than one seed"
        return f"about {seeds_needed(self.sd, delta)} seeds to resolve {delta:.2g} nats"


def equivalence_needs(found: Gap, margin: float) -> str:
    """What would decide an undecided equivalence, in words."""
    num = seeds_for_equivalence(found.estimate.value, found.sd, margin) if math.isfinite(found.sd) else None
    return f"about {num} seeds" if num else "more seeds, the gap is near the margin or beyond it"


class TooLittle(Exception):
    """The runs there are do not even give an estimate; the message says what is missing."""


def arms_of(runs: pd.DataFrame, panel: str | None = None) -> pd.DataFrame:
    """The runs of one panel (the first, if none is named). Raises TooLittle if there is no run at all."""
    if runs.empty:
        raise TooLittle("no finished run")
    chosen = panel if panel is not None else runs["panel"].iloc[0]
    return runs[runs["panel"] == chosen]


def grid_of(runs: pd.DataFrame, arm: str) -> pd.Series:
    """Mean final value per LR at which no run diverged, LR ascending. Raises TooLittle if there is none."""
    inside = runs[runs["arm"] == arm].groupby("lr")["value"].agg(["mean", "size", "count"])
    usable = inside[inside["size"] == inside["count"]]["mean"]
    if usable.empty:
        raise TooLittle(f"{arm}: no usable run")
    return usable


def at_best_lr(runs: pd.DataFrame, arm: str, offset: int = 0) -> pd.Series:
    """Final value per seed at the arm's best LR, or ``offset`` grid steps beside it (then maybe empty)."""
    usable = grid_of(runs, arm)
    at = int(np.argmin(usable.to_numpy())) + offset
    if not 0 <= at < len(usable):
        return pd.Series(dtype=float)
    chosen = runs[(runs["arm"] == arm) & (runs["lr"] == usable.index[at])]
    return chosen.set_index("seed")["value"].sort_index()


def gap(runs: pd.DataFrame, arm: str, reference: str) -> Gap:
    """arm - reference, paired by seed, each at its best LR.

    The SD of a difference is pooled over the best LRs and the grid step to each side of them: the
    noise of neighbouring LRs is alike and two or three seeds alone say little about it. (They share their
    seeds, so they are worth less than independent ones: a nominal 5 % is 6 to 7 % with two or three seeds.)
    """
    pairs = []
    for offset in (0, -1, 1):
        a, b = at_best_lr(runs, arm, offset), at_best_lr(runs, reference, offset)
        shared = a.index.intersection(b.index)
        if len(shared):
            pairs.append((a[shared].to_numpy(), b[shared].to_numpy()))
        elif offset == 0:
            raise TooLittle(f"{arm} and {reference} share no seed")
    estimate = paired(*pairs[0], pool=[pair for pair in pairs[1:] if len(pair[0]) > 1])
    num = len(pairs[0][0])
    return Gap(estimate, num, estimate.se * math.sqrt(num))


def seed_sd(runs: pd.DataFrame, arms: Sequence[str]) -> float:
    """SD of one run's final value over seeds, pooled over the arms' best LRs and their neighbours, after
    what a seed does to all of an arm's LRs alike is taken out (arms are compared on the same seeds).

    The effects taken out are estimated from the same runs, so the SD errs low by up to 18 %, and a margin
    made of it errs narrow. Only seeds that ran all three LRs count.
    """
    values: list[Array] = []
    for arm in arms:
        columns = [series for k in (-1, 0, 1) if len(series := at_best_lr(runs, arm, k))]
        shared = columns[0].index
        for column in columns[1:]:
            shared = shared.intersection(column.index)
        values += remove_seed_effects([c[shared].to_numpy() for c in columns], [list(shared)] * len(columns))
    return pooled_sd(values)[0]


def lora_arms(runs: pd.DataFrame, placement: str = "all") -> list[str]:
    """LoRA arms of one placement, lowest rank first. Raises TooLittle if there is none."""
    chosen = runs[(runs["rank"] > 0) & (runs["config.method.placement"] == placement)]
    if chosen.empty:
        raise TooLittle(f"no finished run of a LoRA arm ({placement})")
    return list(dict.fromkeys(chosen.sort_values("rank")["arm"]))


def seeds_text(runs: pd.DataFrame) -> str:
    """``105 runs, 3 seeds``; the fewest and most seeds at any point of the grid."""
    counts = runs.groupby(["panel", "arm", "lr"])["seed"].nunique()
    low, high = int(counts.min()), int(counts.max())
    span = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(runs)} runs, {span} seeds"


def both(*decisions: Decision) -> Decision:
    """yes if all parts hold, no if any fails, else undecided."""
    if "no" in decisions:
        return "no"
    return "yes" if all(d == "yes" for d in decisions) else "undecided"
