"""Do two sets of runs say the same? ``python -m analysis.compare --root runs``, or ``make compare``.

Holds a store's runs (made by another engine, on another machine) against the committed reference: every run that both
have, by its id, and every claim whose studies are whole in both. Prints the differences, and with ``--out`` writes them
and a table of the runs; returns 1 if a run ended otherwise or a verdict differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.arms import VALUE
from analysis.claims import CLAIMS, judge
from analysis.results import Results, from_reference, from_store
from analysis.verdict import REFERENCE_DIR
from experiments import store

COLUMN = f"metric.{VALUE}"
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Comparison:
    """``table`` has a row per common run: run_id, arm facts, ``difference`` in nats (ours minus theirs, NaN for
    diverged ones). ``verdicts`` maps each claim judged in both to (reference, ours)."""

    table: pd.DataFrame
    otherwise: list[str]
    verdicts: dict[str, tuple[str, str]]

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        return {claim: pair for claim, pair in self.verdicts.items() if pair[0] != pair[1]}


def compare(reference: Results, ours: Results) -> Comparison:
    """Pure: no store, no clock."""
    keys = ["run_id", "outcome", "step", COLUMN]
    both = reference.outcomes[keys].merge(ours.outcomes[keys], on="run_id", suffixes=("_reference", "_ours"))
    ended = both["outcome_reference"] != both["outcome_ours"]
    otherwise = sorted(both.loc[ended | (both["step_reference"] != both["step_ours"]), "run_id"])
    both["difference"] = (both[f"{COLUMN}_ours"] - both[f"{COLUMN}_reference"]).where(
        both["outcome_ours"].eq("finished") & both["outcome_reference"].eq("finished")
    )
    facts = ours.points.merge(both, on="run_id")
    whole = {name for name in ours.studies if (study := ours.study(name)) is not None and not study.missing}
    whole &= set(reference.studies)
    claims = [c for c in CLAIMS if c.studies and set(c.studies) <= whole and (not c.exact or ours.exact)]
    found = {v.claim.id: v.verdict for v in judge(ours, claims)}
    before = {v.claim.id: v.verdict for v in judge(reference, claims)}
    return Comparison(facts, otherwise, {claim: (before[claim], found[claim]) for claim in found})


def describe(found: Comparison) -> list[str]:
    """The comparison in lines."""
    table = found.table
    size = table["difference"].abs().dropna()
    lines = [f"{len(table)} runs in both, {len(found.otherwise)} of them ended otherwise"]
    lines += [f"  {run}" for run in found.otherwise]
    if len(size):
        shares = ", ".join(f"{100 * q:g} %: {np.quantile(size, q):.1e}" for q in QUANTILES)
        lines.append(f"difference of the final held-out NLL in nats, up to this share of {len(size)} runs: {shares}")
        calm = size[table.loc[size.index, "config.optim.lr"] <= _best_lr(table).loc[size.index]]
        if len(calm):
            shares = ", ".join(f"{100 * q:g} %: {np.quantile(calm, q):.1e}" for q in QUANTILES)
            lines.append(f"  up to the LR that is the best of its arm ({len(calm)} runs): {shares}")
    lines.append(f"{len(found.verdicts)} claims judged in both, {len(found.changed)} verdicts differ")
    lines += [f"  {claim}: {before} in the reference, {now} here" for claim, (before, now) in found.changed.items()]
    return lines


def _best_lr(table: pd.DataFrame) -> pd.Series:
    """For each run the LR that is best for its kind in the reference, by the mean over seeds of those that finished."""
    same = [
        c for c in table if str(c).startswith("config.") and not str(c).startswith(("config.seed.", "config.optim.lr"))
    ]
    kind = table[same].astype(str).agg("|".join, axis=1)
    value = table[f"{COLUMN}_reference"].where(table["difference"].notna())
    mean = value.groupby([kind, table["config.optim.lr"]]).mean()
    best = mean.dropna().groupby(level=0).idxmin().map(lambda pair: pair[1])
    return kind.map(best)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if both say the same, 1 if not, 2 for results that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    parser.add_argument("--out", type=Path, help="a folder for compare.md and compare.csv")
    options = parser.parse_args(arguments)
    try:
        ours = from_store(Path(options.root), options.scale)
        found = compare(from_reference(REFERENCE_DIR / options.scale), ours)
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if found.table.empty:
        print(f"error: --root: {options.root} holds no run of the reference at scale {options.scale}", file=sys.stderr)
        return 2
    lines = describe(found)
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        commits = ours.provenance["commit"]
        made = f"made at commit {commits if isinstance(commits, str) else ' and '.join(commits)}"
        (options.out / "compare.md").write_text("\n".join(f"- {line.strip()}" for line in [*lines, made]) + "\n")
        found.table[["run_id", "outcome_ours", "step_ours", f"{COLUMN}_ours", "difference"]].to_csv(
            options.out / "compare.csv", index=False, float_format="%.9g"
        )
    return int(bool(found.otherwise or found.changed))


if __name__ == "__main__":
    sys.exit(main())
