"""What is known beyond a task's own runs: the batch sizes at which LoRA pays, and what an adapter can hold.

Numbers of this repository are read from the committed reference results, never typed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.judges.common import Finding, TooLittle, grid_of
from analysis.judges.gaps import NATS_PER_BIT, batch_penalty_grows, parity_follows_capacity
from analysis.regret.advice import Advice
from analysis.results import from_reference
from experiments.store import StoreError

REFERENCE = Path(__file__).resolve().parents[1] / "reference" / "mini"
POST_BATCH = 32
"""The batch size at which the post's gap is small and shrinks over the run (its figure 3)."""
POST_BITS = 2.0
"""Bits a parameter holds at most, in very long training (Allen-Zhu and Li 2024, quoted by the post)."""


@dataclass(frozen=True)
class Evidence:
    """Findings of this repository's reference results; None where there are none.

    ``batches`` are the batch sizes of the finding on C11.
    """

    batch: Finding | None = None
    batches: tuple[int, int] = (0, 0)
    capacity: Finding | None = None


def evidence(folder: Path = REFERENCE) -> Evidence:
    """What the reference results say of C11 (batch size) and C8 (capacity)."""
    try:
        results = from_reference(folder)
        batch, capacity = results.study("batch"), results.study("capacity")
        assert batch is not None and capacity is not None
        sizes = batch.runs["config.optim.batch_size"]
        return Evidence(batch_penalty_grows(batch), (int(sizes.min()), int(sizes.max())),
                        parity_follows_capacity(capacity))  # fmt: skip
    except (StoreError, TooLittle, AssertionError):
        return Evidence()


def batch_text(batch_size: int, known: Evidence) -> list[str]:
    """Whether LoRA pays at this batch size, and who measured it."""
    low, high = known.batches
    if batch_size <= POST_BATCH:
        said = f"Batch size {batch_size} is in the range where LoRA pays: the post's gap is small at {POST_BATCH}, and "
        said += "grows with larger batches (its figure 3)."
    elif batch_size <= high:
        said = f"Batch size {batch_size} is above the post's {POST_BATCH}, beyond which its gap to full fine-tuning "
        said += (
            f"grows; runs of this repository went up to {high}. Undecided: this task's regret is of this batch only."
        )
    else:
        said = f"Batch size {batch_size} is outside the range where LoRA is known to pay: the post's gap grows above "
        said += f"{POST_BATCH}. ARGS='optim.batch_size={POST_BATCH}' would show whether a smaller one costs less."
    lines = [said]
    if known.batch:
        verdict = {"yes": "reproduced", "no": "contradicted"}.get(known.batch.decision, "undecided")
        lines.append(
            f"Here, at scale mini, batches {low} to {high}, that growth is {verdict} (C11): {known.batch.here}."
        )
    return lines


def first_epoch_bits(advice: Advice, runs: pd.DataFrame, curves: pd.DataFrame) -> tuple[float, float]:
    """(bits of the first epoch's training losses, share of the epoch that was trained), at the reference's best LR.

    The log loss of examples not seen before bounds the length of a description of them (the post, section on
    capacity). Mean over seeds.
    """
    lr = grid_of(runs, advice.reference).idxmin()
    chosen = runs[(runs["arm"] == advice.reference) & (runs["lr"] == lr)]["run_id"]
    epoch = max(1, advice.setting.num_train // advice.setting.batch_size)
    inside = curves[curves["run_id"].isin(set(chosen)) & curves["step"].between(1, epoch)]
    bits = inside["metric.train/nll_nats"] * inside["metric.train/num_tokens"] / NATS_PER_BIT
    per_seed = bits.groupby(inside["run_id"]).sum()
    return float(per_seed.mean()), min(1.0, advice.setting.steps / epoch)


def capacity_text(advice: Advice, runs: pd.DataFrame, curves: pd.DataFrame, known: Evidence) -> list[str]:
    """Estimated bits of the data set against what each adapter can hold."""
    setting = advice.setting
    if setting.is_rl:
        bits = float(setting.steps * setting.episodes_per_step)
        lines = [
            f"A reward of two values tells at most one bit an episode: {bits:,.0f} bits in this run, an upper bound. "
            "Of k values it is log2 k times that."
        ]
    else:
        trained, share = first_epoch_bits(advice, runs, curves)
        if not math.isfinite(trained):
            return ["The information of the data set is unknown: no training loss was recorded."]
        bits, told = trained / share, setting.train_tokens * advice.base / NATS_PER_BIT
        lines = [
            f"An estimate: the training set holds at most {kbit(bits)}, the sum of the first epoch's losses, which "
            f"bounds it from above ({kbit(told)} as the base prices its {setting.train_tokens:,} completion tokens). "
            "What has to be learned to do well on other rows may be far less."
        ]
    for arm in (arm for arm in advice.arms if arm.rank):
        held = POST_BITS * arm.num_trainable
        times = f": {held / bits:.2g} times that" if bits else ""
        lines.append(
            f"{arm.name}: {arm.num_trainable:,} parameters hold {kbit(held)} at {POST_BITS:g} bits each{times}."
        )
    if known.capacity and known.capacity.value is not None:
        said = (
            f"{POST_BITS:g} bits a parameter is the post's figure, for very long training; adapters here held at most "
        )
        lines.append(f"{said}{known.capacity.value:.2f} (C8). The regret above is measured, this is not.")
    return lines


def kbit(bits: float) -> str:
    """``16.4 kbit``, ``3.1 Mbit``."""
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bits"


def expert_text(advice: Advice, runs: pd.DataFrame, curves: pd.DataFrame) -> list[str]:
    """What the experts of a MoE base take at the end of each arm's best runs; empty for a dense base."""
    names = ("entropy_frac", "busiest_frac", "num_unused")
    columns = [f"metric.experts/{name}" for name in names]
    if not set(columns) <= set(curves):
        return []
    lines = []
    for arm in (arm for arm in advice.arms if not arm.failed):
        lr = grid_of(runs, arm.name).idxmin()
        ids = set(runs[(runs["arm"] == arm.name) & (runs["lr"] == lr)]["run_id"])
        rows = curves[curves["run_id"].isin(ids)].dropna(subset=columns)
        if rows.empty:
            continue
        entropy, busiest, unused = rows.sort_values("step").groupby("run_id")[columns].last().mean()
        lines.append(f"{arm.name}: experts are used {100 * entropy:.0f} % as evenly as can be; the busiest takes "
                     f"{100 * busiest:.0f} % of a layer's tokens, {unused:.0f} take none.")  # fmt: skip
    return lines
