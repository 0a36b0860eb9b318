"""From a study to the arms of a search, from proposed LRs to runs, and from the store to what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.arms import FULL, VALUE, label_arms, label_points
from analysis.load import load_runs
from experiments.config import ConfigError, MethodKind, RunConfig, SeedConfig, encode, run_id
from experiments.manifests import study_name
from search.lattice import FINENESS, lay
from search.look import Arm, Runs
from sweeps.grid import Point, Study

MARK = "search=adaptive"
"""The override that names a search: ``lr+search=adaptive`` is a study of its own, which no verdict reads."""


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


def searched(study: Study, base: str, extra: Sequence[str], width: float | None) -> Searched:
    """The arms of ``study`` (loaded as ``base`` with overrides ``extra``) on the lattice that ``width`` asks for.

    Raises ConfigError, in one line, for a study that sweeps no LR and a width that no lattice resolves.
    """
    table = label_points(pd.DataFrame([_row(point) for point in study.points]))
    points = {point.run_id: point for point in study.points}
    reference = str(study.settings.get("reference", FULL))
    fineness = _fineness(width, bool((table["arm"] == reference).any()))
    shared = tuple(sorted(set(table["lr"])))
    arms, templates, seeds, families = [], {}, {}, {}
    for (panel, name), rows in table.groupby(["panel", "arm"], sort=False):
        key = f"{panel} {name}".strip()
        grid = tuple(sorted(set(rows["lr"])))
        if len(grid) < 3:
            raise ConfigError(f"study: {base!r} does not sweep the LR of {key} (LRs: {len(grid)}); a search needs 3")
        templates[key] = points[rows["run_id"].iloc[0]]
        for run, label in zip(rows["run_id"], rows["seed"], strict=True):
            seeds[label] = points[run].config.seed
        families[key] = _family(templates[key].config)
        labels = tuple(dict.fromkeys(rows["seed"]))
        arms.append(Arm(key, str(panel), str(name), lay(grid, shared, fineness), grid, labels))
    arms = [replace(arm, reference=_reference(arm, arms, reference), donor=_donor(arm, arms, families)) for arm in arms]
    return Searched(study, study_name(base, [*extra, MARK]), tuple(arms), templates, seeds)


def _row(point: Point) -> dict[str, Any]:
    flat = {f"config.{section}.{name}": ",".join(map(str, value)) if isinstance(value, list) else value
            for section, values in encode(point.config).items() for name, value in values.items()}  # fmt: skip
    return {"run_id": point.run_id, "state": "new", **flat}


def _fineness(width: float | None, as_ratio: bool) -> int:
    if width is None:
        return FINENESS[0]
    for fineness in FINENESS:
        floor = 2 ** (1 / (2 * fineness) * (2**0.5 if as_ratio else 1.0))
        if width >= floor * 0.995:
            return fineness
    what = "a ratio" if as_ratio else "LR*"
    raise ConfigError(
        f"width: {width:g} is not allowed; it is a factor, and {what} is resolved to {floor:.2f} by the finest LRs, "
        f"{2 ** (1 / FINENESS[-1]):.2f} apart"
    )


def _family(config: RunConfig) -> tuple[str, int] | None:
    """(what arms that differ in rank only have in common, the rank); None for what has no rank."""
    if config.method.kind is not MethodKind.lora:
        return None
    bare = replace(
        config, optim=replace(config.optim, lr=1.0), seed=SeedConfig(), method=replace(config.method, rank=1)
    )
    return run_id(bare), config.method.rank


def _donor(arm: Arm, arms: Sequence[Arm], families: Mapping[str, tuple[str, int] | None]) -> str:
    """The middle rank of the arm's family: no other is farther than half of the ranks away."""
    mine = families[arm.key]
    if mine is None:
        return ""
    family = [(found[1], a.key) for a in arms if (found := families[a.key]) and found[0] == mine[0]]
    middle = sorted(family)[len(family) // 2][1]
    return "" if middle == arm.key else middle


def _reference(arm: Arm, arms: Sequence[Arm], reference: str) -> str:
    return next((a.key for a in arms if a.panel == arm.panel and a.name == reference != arm.name), "")


def finished(search: Searched, asked: Mapping[str, tuple[str, float, str]], root: Path) -> dict[str, Runs]:
    """The finished runs among those ``asked`` for (run id: arm, LR, seed), by arm, as the figures read them."""
    value = str(search.study.settings.get("value", VALUE))
    table = load_runs(root, list(asked))
    done = label_arms(table, value) if len(asked) else table.iloc[:0]
    known = dict(zip(done["run_id"], done["value"], strict=True)) if len(done) else {}
    found: dict[str, list[tuple[float, float, str]]] = {}
    for run, (arm, lr, seed) in asked.items():
        if run in known:
            found.setdefault(arm, []).append((lr, float(known[run]), seed))
    return {arm: Runs(*map(tuple, zip(*rows, strict=True))) for arm, rows in found.items()}
