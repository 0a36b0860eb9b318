"""Learning curves of an arm: the pointwise minimum over LRs (the post's Figure 1) and one LR's curve.

The pointwise minimum is a minimum over noisy numbers: the more LRs an arm has, the lower it lies.
Arms are comparable at equal LR counts only; ``unequal_counts`` says when they are not, and
``minimum_bias`` how low the luckiest of equally good LRs lies.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

CURVE = "metric.test/nll_nats"


def mean_curves(runs: pd.DataFrame, curves: pd.DataFrame, metric: str = CURVE) -> pd.DataFrame:
    """Mean over seeds at each evaluated step: columns ``panel, arm, lr, step, nll, sd, num_seeds``.

    An LR counts at a step only while none of its seeds has diverged, as for the optimum.

    Args:
        runs: the table of ``arms.label_arms``.
        curves: the table of ``load_curves``; steps without the metric are no points.
    """
    keys = ["panel", "arm", "lr"]
    joined = curves[["run_id", "step", metric]].merge(runs[["run_id", *keys]], on="run_id")
    grouped = joined.dropna(subset=metric).groupby([*keys, "step"], sort=True)[metric]
    table = grouped.agg(nll="mean", sd="std", num_seeds="size").reset_index()
    expected = runs.groupby(keys).size().rename("expected").reset_index()
    table = table.merge(expected, on=keys)
    return table[table["num_seeds"] == table["expected"]].drop(columns="expected").reset_index(drop=True)


def envelope(means: pd.DataFrame) -> pd.DataFrame:
    """Pointwise minimum over LRs, same columns; ``lr`` is the one that attains it at that step."""
    best = means.loc[means.groupby(["panel", "arm", "step"])["nll"].idxmin()]
    return best.sort_values(["panel", "arm", "step"]).reset_index(drop=True)


def best_run(means: pd.DataFrame) -> pd.DataFrame:
    """The curve of the single LR that is lowest at the arm's last step, same columns."""
    keys = ["panel", "arm"]
    last = means[means["step"] == means.groupby(keys)["step"].transform("max")]
    chosen = last.loc[last.groupby(keys)["nll"].idxmin(), [*keys, "lr"]]
    return means.merge(chosen, on=[*keys, "lr"]).sort_values([*keys, "step"]).reset_index(drop=True)


def minimum_bias(num_lrs: int, rng: np.random.Generator, num: int = 20_000) -> float:
    """How far the minimum over equally good LRs lies below their common mean, in SDs of one LR's mean.

    By simulation with normal noise (the mean of the least of n: 0 for one LR, -0.56 for two, -1.35 for seven).
    It bounds the optimism of an envelope: LRs that are not equally good matter less.
    """
    return float(rng.standard_normal((num, num_lrs)).min(axis=1).mean())


def unequal_counts(runs: pd.DataFrame) -> str:
    """``""`` if all arms of each panel have equally many LRs, else what differs, in one line."""
    for panel, inside in runs.groupby("panel", sort=False):
        counts = inside.groupby("arm", sort=False)["lr"].nunique()
        if counts.nunique() > 1:
            listed = ", ".join(f"{arm} {n}" for arm, n in zip(counts.index, counts, strict=True))
            where = f" ({panel!s})" if panel else ""
            return f"LR counts differ{where}: {listed}; the arm with more LRs is flattered"
    return ""
