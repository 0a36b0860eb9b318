"""The search against the full grids of the committed reference results: ``make bench-search``. No training.

Every study that swept LRs in ``analysis/reference/<scale>`` is searched as if nothing of it were known, each answer
taken from the reference. Only LRs and seeds of the grid have answers: LRs beyond its ends do not exist, and of seeds
that ran at some LRs only (a second look at the best) neither side sees anything. Twice: once with the search's
default, and once asking each arm for the very interval that its full grid gave ("same"), which is the bar: at most
40 % of the full grid's training steps, LR* within both intervals.

Writes ``search.csv`` (a row per arm) beside the reference and prints the totals of each study.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis.arms import FULL
from analysis.optimum import Interval, Optimum, ratio
from analysis.results import StudyRuns, from_reference
from experiments.store import StoreError
from sweeps.display import warn
from sweeps.search.arms import arms_of
from sweeps.search.look import Arm, Look, Runs
from sweeps.search.propose import TOLERANCE, WIDTH, Move, Width, propose

REFERENCE = Path(__file__).resolve().parents[2] / "analysis" / "reference"
BAR = 0.4
"""Share of the full grid's steps that a search may take."""

Answers = Mapping[tuple[str, float, str], tuple[float, int]]
"""(value, steps trained) of each (arm, LR, seed)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (whatever the bar says), 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.search.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--reference", default=str(REFERENCE), help="folder of the reference results")
    options = parser.parse_args(arguments)
    folder = Path(options.reference) / options.scale
    try:
        results = from_reference(folder)
    except StoreError as error:
        warn(f"error: {error}")
        return 2
    tables, seen = [], set()
    for name in results.studies:
        study = results.study(name)
        if study is not None and (runs := frozenset(study.runs["run_id"])) not in seen:
            seen.add(runs)  # two studies may read the same runs
            tables += [compare(study)]
    table = pd.concat(tables, ignore_index=True)
    table.to_csv(folder / "search.csv", index=False, float_format="%.4g")
    print(summarise(table).to_string(index=False, na_rep="-"))
    print(f"written: {folder / 'search.csv'}")
    return 0


def compare(study: StudyRuns) -> pd.DataFrame:
    """Full grid and searches of one study, a row per arm and way of asking; none if it swept no LRs with repeats."""
    runs = study.runs
    runs = runs[runs.groupby(["panel", "arm"])["lr"].transform("nunique") >= 3]
    labelled = arms_of(runs, str(study.settings.get("reference", FULL)), None, reach=0)
    arms = [arm for arm in labelled if len(arm.seeds) >= 2]
    keys = [f"{panel} {arm}".strip() for panel, arm in zip(runs["panel"], runs["arm"], strict=True)]
    answers = {(key, lr, seed): (value, int(step)) for key, lr, seed, value, step in
               zip(keys, runs["lr"], runs["seed"], runs["value"], runs["step"], strict=True)}  # fmt: skip
    if not arms:
        return pd.DataFrame()
    full = {arm.key: _asked(arm.key, [(lr, seed) for lr in arm.grid for seed in arm.seeds], answers) for arm in arms}
    grid = {arm.key: Look(arm, full[arm.key]).optimum for arm in arms}
    same = {arm.key: _factor(_interval(arm, grid)) or WIDTH for arm in arms}
    rows = []
    for how, width in (("default", WIDTH), ("same", same)):
        found, moves = replay(arms, answers, width)
        optima = {arm.key: Look(arm, found[arm.key]).optimum for arm in arms}
        for arm, move in zip(arms, moves, strict=True):
            mine, theirs = optima[arm.key], grid[arm.key]
            rows.append({
                "study": study.name, "asked": how, "arm": arm.key,
                "steps_grid": _steps(arm, full, answers), "steps": _steps(arm, found, answers),
                "lr_star_grid": theirs.lr_star, "lr_star": mine.lr_star, "equal": _equal(mine, theirs),
                "factor_grid": _factor(_interval(arm, grid)), "factor": _factor(_interval(arm, optima)),
                "end": move.phase, "why": move.why,
            })  # fmt: skip
    return pd.DataFrame(rows)


def replay(arms: Sequence[Arm], answers: Answers, width: Width) -> tuple[dict[str, Runs], list[Move]]:
    """What a search finds where every run's result is known beforehand, and how each arm ended."""
    pairs: dict[str, list[tuple[float, str]]] = {arm.key: [] for arm in arms}
    while True:
        found = {key: _asked(key, asked, answers) for key, asked in pairs.items()}
        moves = propose(arms, found, width)
        if not any(move.runs for move in moves):
            return found, moves
        for move in moves:
            pairs[move.arm] += move.runs


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """A row per study and way of asking: the share of the steps, and on how many arms LR* and intervals agree.

    ``narrow`` counts, among the arms with both intervals, those whose interval is at most 5 % wider than the grid's.
    """
    rows = []
    for (asked, name), part in [*table.groupby(["asked", "study"], sort=False),
                                *(((asked, "all"), p) for asked, p in table.groupby("asked", sort=False))]:  # fmt: skip
        both = part[part["lr_star"].notna() & part["lr_star_grid"].notna()]
        narrow = both[both["factor"].map(math.log) <= TOLERANCE * both["factor_grid"].map(math.log)]
        share = part["steps"].sum() / part["steps_grid"].sum()
        rows.append({
            "asked": asked, "study": name, "steps of grid": f"{100 * share:.0f} %",
            "bar": "met" if share <= BAR else "missed", "arms": len(part),
            "decided by grid / search / both": f"{part['lr_star_grid'].notna().sum()} / "
                                               f"{part['lr_star'].notna().sum()} / {len(both)}",
            "LR* equal": f"{int(both['equal'].sum())} of {len(both)}", "narrow": f"{len(narrow)} of {len(both)}",
        })  # fmt: skip
    return pd.DataFrame(rows)


def _asked(key: str, pairs: Sequence[tuple[float, str]], answers: Answers) -> Runs:
    values = [answers[key, lr, seed][0] for lr, seed in pairs]
    return Runs(tuple(lr for lr, _ in pairs), tuple(values), tuple(seed for _, seed in pairs))


def _steps(arm: Arm, found: Mapping[str, Runs], answers: Answers) -> int:
    runs = found[arm.key]
    return sum(answers[arm.key, lr, seed][1] for lr, seed in zip(runs.lr, runs.seed, strict=True))


def _interval(arm: Arm, optima: Mapping[str, Optimum]) -> Interval | None:
    """Of the ratio to the arm's reference; of LR* without one, and where that is undecided. None if undecided."""
    mine, theirs = optima[arm.key], optima.get(arm.reference)
    if mine.lr_star is None:
        return None
    return (ratio(mine, theirs).interval if theirs is not None else None) or mine.interval


def _factor(interval: Interval | None) -> float | None:
    return math.sqrt(interval[1] / interval[0]) if interval else None


def _equal(a: Optimum, b: Optimum) -> bool | None:
    if a.lr_star is None or b.lr_star is None or a.interval is None or b.interval is None:
        return None
    return b.interval[0] <= a.lr_star <= b.interval[1] and a.interval[0] <= b.lr_star <= a.interval[1]


if __name__ == "__main__":
    sys.exit(main())
