"""From a study to the arms of a search, from proposed LRs to runs, and from the store to what is known of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.arms import FULL, VALUE, label_arms, label_points
from analysis.load import load_runs
from experiments.config import ConfigError, SeedConfig, encode, run_id
from experiments.manifests import study_name
from sweeps.grid import Point, Study
from sweeps.search.look import Arm, Runs
from sweeps.search.rungs import REACH_DECADES, lay

MARK = "search=adaptive"
"""The override that names a search: ``lr+search=adaptive`` is a study of its own, which no verdict reads."""
CLOSEST = 1.1
"""Factor between the closest LRs that two typed digits still tell apart evenly."""


@dataclass(frozen=True)
class Searched:
    """A study whose LRs are searched: its arms, and for each the point that all of its runs are copies of."""

    study: Study
    name: str
    arms: tuple[Arm, ...]
    templates: Mapping[str, Point]
    seeds: Mapping[str, SeedConfig]

    def point(self, arm: str, lr: float, seed: str) -> Point:
        """The run of an arm at an LR: the same run, with the same id, as that of a grid."""
        template, seeds = self.templates[arm], self.seeds[seed]
        config = replace(template.config, optim=replace(template.config.optim, lr=lr), seed=seeds)
        new = [f"optim.lr={lr:g}", *(f"seed.{name}={value}" for name, value in encode(seeds).items())]
        kept = [word for word in template.overrides if not word.startswith(("optim.lr=", "seed."))]
        return Point(run_id(config), config, (*kept, *new))


def searched(
    study: Study, base: str, extra: Sequence[str], width: float | None, reach: float = REACH_DECADES
) -> Searched:
    """The arms of ``study`` (loaded as ``base`` with overrides ``extra``), with LRs as close as ``width`` asks for.

    ``reach``: how many decades beyond the grid's ends may be searched.

    Raises ConfigError, in one line, for a study that sweeps no LR and a width that no LRs resolve.
    """
    table = label_points(pd.DataFrame([_row(point) for point in study.points]))
    points = {point.run_id: point for point in study.points}
    for (panel, name), lrs in table.groupby(["panel", "arm"], sort=False)["lr"]:
        if lrs.nunique() < 3:
            raise ConfigError(f"study: {base!r} does not sweep the LR of {_key(panel, name)} (LRs: {lrs.nunique()}); "
                              "a search needs 3")  # fmt: skip
    arms = arms_of(table, str(study.settings.get("reference", FULL)), width, reach)
    first = table.drop_duplicates(["panel", "arm"])
    templates = {_key(panel, name): points[run] for panel, name, run in zip(first["panel"], first["arm"],
                                                                           first["run_id"], strict=True)}  # fmt: skip
    seeds = {label: points[run].config.seed for label, run in zip(table["seed"], table["run_id"], strict=True)}
    return Searched(study, study_name(base, [*extra, MARK]), arms, templates, seeds)


def arms_of(table: pd.DataFrame, reference: str, width: float | None, reach: float = REACH_DECADES) -> tuple[Arm, ...]:
    """The arms of ``label_points``'s table, in its order, with the seeds that ran at every LR of their grid.

    Every arm has two LRs or more. With a ``width`` the LRs are close enough to resolve it; ``reach`` is in decades
    beyond the grid's ends.
    """
    arms = []
    for (panel, name), rows in table.groupby(["panel", "arm"], sort=False):
        of = _key(panel, reference) if name != reference and reference in set(table["arm"]) else ""
        grid = sorted(set(rows["lr"]))
        counts = rows.groupby("seed", sort=False)["lr"].nunique()
        seeds = tuple(str(seed) for seed in counts.index[counts == len(grid)])
        rungs = lay(grid, math.inf if width is None else _gap(width, bool(of)), reach)
        arms.append(Arm(_key(panel, name), str(panel), str(name), rungs, tuple(grid), seeds, of))
    known = {arm.key for arm in arms}
    return tuple(replace(arm, reference=arm.reference if arm.reference in known else "", donor=_donor(arm, arms))
                 for arm in arms)  # fmt: skip


def _key(panel: object, name: object) -> str:
    return f"{panel} {name}".strip()


def _row(point: Point) -> dict[str, Any]:
    flat = {f"config.{section}.{name}": ",".join(map(str, value)) if isinstance(value, list) else value
            for section, values in encode(point.config).items() for name, value in values.items()}  # fmt: skip
    return {"run_id": point.run_id, "state": "new", **flat}


def _gap(width: float, as_ratio: bool) -> float:
    """The step at which half a step to each side is ``width``; a ratio has those of two grids, added in squares."""
    gap = width ** (math.sqrt(2) if as_ratio else 2)
    if gap < CLOSEST:
        least = CLOSEST ** (1 / math.sqrt(2))
        raise ConfigError(f"width: {width:g} is not allowed; a factor of {least:.2f} is what the closest LRs resolve")
    return gap


def _donor(arm: Arm, arms: Sequence[Arm]) -> str:
    """The middle rank among arms that differ in rank only: no other is farther than half of the ranks away."""

    def family(other: Arm) -> tuple[str, str]:
        return other.panel, re.sub(r"^r\d+", "r", other.name)

    alike = [other for other in arms if family(other) == family(arm)]
    middle = sorted(alike, key=lambda a: int(re.sub(r"\D.*", "", a.name[1:]) or 0))[len(alike) // 2]
    return "" if middle.key == arm.key else middle.key


def finished(search: Searched, asked: Mapping[str, tuple[str, float, str]], root: Path) -> dict[str, Runs]:
    """The finished runs among those ``asked`` for (run id: arm, LR, seed), by arm, as the figures read them."""
    if not asked:
        return {}
    done = label_arms(load_runs(root, list(asked)), str(search.study.settings.get("value", VALUE)))
    known = dict(zip(done["run_id"], done["value"], strict=True)) if len(done) else {}
    found: dict[str, list[tuple[float, float, str]]] = {}
    for run, (arm, lr, seed) in asked.items():
        if run in known:
            found.setdefault(arm, []).append((lr, float(known[run]), seed))
    return {arm: Runs(*map(tuple, zip(*rows, strict=True))) for arm, rows in found.items()}
