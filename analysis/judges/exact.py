"""Claims that arithmetic settles: C9's first step, C21, C23, C24, from the records of ``experiments.exact``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from analysis.inference import Decision, Estimate, equivalent, within
from analysis.judges.common import Finding, both, bounds

Record = Mapping[str, Any]

TABLE = {("mlp", 256): 0.49, ("attn", 256): 0.25, ("all", 256): 0.70, ("mlp", 128): 0.24}
"""The post's table, in billions of parameters."""
SAME = 0.02
"""C9: largest relative difference of mean updates that counts as none."""
RANK_ONE = 3
"""Millions of parameters that the post gives for rank 1 on all layers of Llama-3.1-8B."""


def first_step(record: Record) -> Finding:
    """C9, exact half: after one step the mean update is the same for every rank, its variance as 1 / rank.

    Same: the mean along the gradient within 2 % of the reference rank's (TOST), as the curves' margin.
    """
    adam = record["adam"]
    z, null = float(adam["mean_squared_z"]), tuple(adam["mean_squared_z_null_95"])
    reference = next(rank for rank in adam["ranks"] if rank["rank"] == adam["reference_rank"])
    size = abs(reference["along_gradient"])
    relative = [
        Estimate((rank["along_gradient"] - reference["along_gradient"]) / size,
                 math.hypot(rank["along_gradient_se"], reference["along_gradient_se"]) / size, math.inf)
        for rank in adam["ranks"] if rank is not reference
    ]  # fmt: skip
    slope, interval = float(adam["variance_slope"]), tuple(adam["variance_slope_95"])
    same = both(*(equivalent(estimate, SAME) for estimate in relative))
    worst = max(relative, key=lambda estimate: abs(estimate.value))
    falls = within((slope, slope), -1.05, -0.95)
    ranks = ", ".join(str(rank["rank"]) for rank in adam["ranks"])
    here = f"mean update within {100 * abs(worst.value):.1f} % of rank {reference['rank']}'s; variance ~ r^{slope:.3f}"
    why = (
        f"fp64, {record['num_inits']} inits of each rank ({ranks}), one Adam step; TOST at {100 * SAME:g} %, slope of "
        f"variance within 0.05 of -1; mean squared z {z:.3f} (noise alone: {null[0]:.3f} to {null[1]:.3f})"
    )
    decision = both(same, falls)
    return Finding(decision, here, why, f"{record['num_inits']} inits", slope, interval)


def invariance(record: Record) -> Finding:
    """C21: rescaling alpha, init and LRs changes nothing when both eps are rescaled; controls do."""
    largest, smallest = record["largest"], record["smallest"]
    exact = float(largest["corrected_eps"]["weights"])
    control = min(float(smallest[name]["weights"]) for name in ("weight_decay", "clipping"))
    shared = float(largest["shared_eps"]["weights"])
    decision: Decision = "yes" if exact < 1e-9 < 1e-3 < control else "no"
    here = f"largest deviation {exact:.0e} with eps / p and eps / q; {shared:.2g} with the post's single eps / q"
    why = (
        f"fp64, {record['steps']} Adam steps, {len(record['cases'])} pairs (p, q), relative to the weights' movement; "
        f"below 1e-9 counts as none; controls with weight decay or clipping at least {control:.2g}"
    )
    return Finding(decision, here, why, f"{len(record['cases'])} pairs", exact)


def flops(record: Record) -> Finding:
    """C23: counted multiply-adds of LoRA over full fine-tuning, per matrix, against 2/3 + 2R/N."""
    worst = max(abs(row["ratio"] - (2 / 3 + 2 * row["rank"] / row["width"])) for row in record["layers"])
    decision: Decision = "yes" if worst < 1e-9 else "no"
    timed = []
    for name, model in record["models"].items():
        for arm in model["arms"]:
            if arm["rank"] == 16:
                low, high = arm["step_ratio_to_full_95"]
                timed.append(f"{name} r16 counted {arm['flops_ratio_to_full']:.2f}, step time "
                             f"{arm['step_ratio_to_full']:.2f} {bounds(low, high, '.2f')}")  # fmt: skip
    here = f"deviation from 2/3 + 2R/N: {worst:.0e} over {len(record['layers'])} (N, R); models: {'; '.join(timed)}"
    why = "counted by torch on forward and backward of one matrix; step times (CPU) are shown and decide nothing"
    return Finding(decision, here, why, f"{len(record['layers'])} matrices", worst)


def counts(record: Record) -> Finding:
    """C24: the post's parameter table and rank 1, with the unembedding adapted, from shapes alone."""
    rows = {(row["placement"], row["rank"]): row for row in record["rows"]}
    right = all(abs(rows[key]["with_unembedding"] / 1e9 - value) <= 0.0051 for key, value in TABLE.items())
    without = all(abs(rows[key]["without_unembedding"] / 1e9 - value) <= 0.0051 for key, value in TABLE.items())
    one = int(rows[("all", 1)]["with_unembedding"])
    decision: Decision = "yes" if right and round(one / 1e6) == RANK_ONE else "no"
    listed = ", ".join(f"{p} r{r} {rows[p, r]['with_unembedding'] / 1e9:.3f} B" for p, r in TABLE)
    why = (
        f"to the digits that the post prints; without the unembedding the table would {'' if without else 'not '}add up"
    )
    return Finding(decision, f"{listed}; all r1 {one:,}", why, "exact", float(one))
