"""Every study's runs as one object, from a store or from the committed reference tables.

The reference tables (``analysis/reference/<scale>/``): ``points.parquet`` says which runs the studies
expect, ``runs.parquet`` how they ended, ``curves.parquet`` every recorded step, ``studies.json`` the
settings fixed beforehand, ``exact.json`` what needs no training, ``provenance.json`` where all came from.
Expectation and outcome are apart so that a run missing from the second is seen to be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import VALUE, as_loss, label_arms, label_points
from analysis.load import load, load_curves
from analysis.stats import LEVEL
from experiments import manifests, store

Hole = tuple[str, str, float]
"""Panel, arm and LR at which no run is finished."""


@dataclass(frozen=True)
class StudyRuns:
    """One study: what it expects and what there is.

    ``points`` has a row per expected run and ``runs`` one per finished run (columns of
    ``arms.label_arms``); ``curves`` every recorded step of those (columns of ``load.load_curves``).
    """

    name: str
    settings: Mapping[str, Any]
    points: pd.DataFrame
    runs: pd.DataFrame
    curves: pd.DataFrame

    @property
    def level(self) -> float:
        """Level of a decision: 95 %, or 1 - 5 % / looks where runs were added after a first look (Bonferroni)."""
        return 1 - (1 - LEVEL) / int(self.settings.get("looks", 1))

    @property
    def missing(self) -> list[str]:
        """Ids of expected runs that are not finished."""
        return sorted(set(self.points["run_id"]) - set(self.runs["run_id"]))

    @property
    def holes(self) -> list[Hole]:
        """Points of the grid without a single finished run: no estimate may silently do without them."""
        keys = ["panel", "arm", "lr"]
        expected = self.points[keys].drop_duplicates()
        found = expected.merge(self.runs[keys].drop_duplicates(), on=keys, how="left", indicator=True)
        left = found[found["_merge"] == "left_only"]
        return [(str(panel), str(arm), float(lr)) for panel, arm, lr in left[keys].itertuples(index=False)]

    def at(self, step: int, metric: str = VALUE) -> pd.DataFrame:
        """``runs`` with ``value`` read off at ``step``: NaN where the run had diverged by then, and no
        row where it was not evaluated (a shorter run)."""
        column = f"metric.{metric}"
        rows = self.curves.loc[self.curves["step"] == step, ["run_id", column]].rename(columns={column: "value"})
        read = self.runs.drop(columns="value").merge(rows, on="run_id", how="left")
        read["value"] = as_loss(read["value"], metric).where((read["outcome"] != "diverged") | (read["step"] > step))
        lost = (read["outcome"] == "diverged") & (read["config.optim.steps"] >= step)
        recorded = read["value"].notna() | lost
        return read[recorded].reset_index(drop=True)


def study_runs(name: str, settings: Mapping[str, Any], table: pd.DataFrame, curves: pd.DataFrame) -> StudyRuns:
    """One study from the table of ``load`` (or one joined like it) and the curves of its runs.

    A value that no run ends with, such as a training loss, is read off the curves; the final value is then
    the held-out loss.
    """
    wanted = settings.get("value", VALUE)
    final = wanted if f"metric.{wanted}" in table else VALUE
    runs = label_arms(table, final)
    kept = curves[curves["run_id"].isin(set(runs["run_id"]))].reset_index(drop=True)
    return StudyRuns(name, settings, label_points(table), runs, kept)


@dataclass(frozen=True)
class Results:
    """All studies of one scale. ``points`` and ``outcomes`` have one row per distinct run."""

    scale: str
    points: pd.DataFrame
    outcomes: pd.DataFrame
    curves: pd.DataFrame
    studies: Mapping[str, Mapping[str, Any]]
    exact: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def study(self, name: str) -> StudyRuns | None:
        """One study, or None if it was never begun."""
        if name not in self.studies:
            return None
        manifest = self.studies[name]
        ids = pd.DataFrame({"run_id": manifest["run_ids"]})
        table = ids.merge(self.points, on="run_id", how="left").merge(self.outcomes, on="run_id", how="left")
        table["state"] = table["state"].fillna("missing")
        used = [c for c in table if not str(c).startswith("config.") or table[c].notna().any()]
        return study_runs(name, manifest.get("settings") or {}, table[used], self.curves)

    @property
    def num_shared(self) -> int:
        """How many runs the sharing between studies saved."""
        return sum(len(manifest["run_ids"]) for manifest in self.studies.values()) - len(self.points)


def from_store(root: Path, scale: str = "mini") -> Results:
    """Collect every study of ``scale`` in a store. Raises store.StoreError for an unreadable one."""
    studies: dict[str, Mapping[str, Any]] = {}
    tables = []
    for name, found in manifests.list_studies(root):
        if found == scale and "+" not in name:  # a + names overrides that make it another study
            manifest = manifests.read_study(root, name, scale)
            studies[name] = {key: value for key, value in manifest.items() if key != "configs"}
            tables.append(load(name, scale, root))
    empty = pd.DataFrame({"run_id": [], "state": [], "outcome": [], "step": []})
    table = pd.concat(tables, ignore_index=True).drop_duplicates("run_id") if tables else empty
    configured = [str(c) for c in table if str(c).startswith("config.")]
    done = table[table["state"] == "done"]
    file = root / "exact.json"
    exact = store.read_json(file) if file.exists() else {}
    origin = provenance(done["run_id"].tolist(), root)
    if exact:  # which machine and user measured it is nobody's business
        measured = exact.pop("provenance", {})
        origin["exact"] = {key: measured.get(key) for key in ("commit", "cpu", "num_cores", "versions")}
        origin["dirty"] |= bool(measured.get("diff"))
    return Results(
        scale,
        table[["run_id", *configured]].reset_index(drop=True),
        done[[c for c in table if c not in configured]].reset_index(drop=True),
        load_curves(done, root),
        studies,
        exact,
        origin,
    )


def provenance(run_ids: list[str], root: Path) -> dict[str, Any]:
    """What the runs have in common, and every value where they or their attempts differ; ``dirty`` if any tree was."""
    keys = ("commit", "cpu", "num_cores", "python", "versions", "platform")
    found: dict[str, list[Any]] = {key: [] for key in keys}
    dirty = False
    for run_id in run_ids:
        last = store.read_json(root / run_id / "provenance.json")
        for record in (last, *last.get("earlier", ())):
            dirty |= bool(record.get("diff"))
            for key in keys:
                if record.get(key) not in found[key]:
                    found[key].append(record.get(key))
    common = {key: values[0] if len(values) == 1 else values for key, values in found.items()}
    return {"num_runs": len(run_ids), "dirty": dirty, **common}


def save(results: Results, folder: Path) -> None:
    """Write the reference tables. Equal results give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("points", "outcomes", "curves"):
        table = getattr(results, name).sort_values([c for c in ("run_id", "step") if c in getattr(results, name)])
        file = "runs" if name == "outcomes" else name
        table.reset_index(drop=True).to_parquet(folder / f"{file}.parquet", compression="zstd", index=False)
    for name in ("studies", "exact", "provenance"):
        store.write_json(folder / f"{name}.json", {"scale": results.scale, **getattr(results, name)}
                         if name == "provenance" else dict(getattr(results, name)))  # fmt: skip


def from_reference(folder: str | Path) -> Results:
    """Read what ``save`` wrote. Raises store.StoreError, in one line, for a folder that is not such."""
    folder = Path(folder)
    try:
        tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in ("points", "runs", "curves")}
        texts = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("studies", "exact", "provenance")}
    except (OSError, ValueError) as error:
        raise store.StoreError(f"reference: {folder} is not readable: {str(error).splitlines()[0]}") from None
    tables["curves"] = tables["curves"].replace({None: np.nan})
    return Results(
        str(texts["provenance"].get("scale", "mini")),
        tables["points"],
        tables["runs"],
        tables["curves"],
        texts["studies"],
        texts["exact"],
        texts["provenance"],
    )
