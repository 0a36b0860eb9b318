"""The report as plain data: what ``report.html`` shows, and nothing of how."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.arms import Arm
from analysis.claims import judge
from analysis.figures.__main__ import sweeps_of
from analysis.page import Column, Table
from analysis.report.ends import arms_table, cost, ends_of, flops_table, runs_table, tally
from analysis.report.fidelity import Kept, compare
from analysis.report.figures import Download, Drawing, csv, drawings, runs_behind
from analysis.results import Results, StudyRuns
from analysis.verdict import record, summary
from experiments import store

Claim = Mapping[str, Any]
"""One claim of ``verdict.json``."""
VERDICTS = ("reproduced", "contradicted", "undecided", "not run")


@dataclass(frozen=True)
class StudyPage:
    """One study. Without a finished run it has no figures, and ``note`` says why."""

    name: str
    title: str
    note: str
    claims: tuple[Claim, ...]
    settings: tuple[tuple[str, str], ...]
    tally: tuple[tuple[str, int], ...]
    cost: tuple[tuple[str, str], ...]
    arms: Table | None = None
    runs: Table | None = None
    download: Download | None = None
    figures: tuple[Drawing, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything that the page says."""

    scale: str
    source: str
    summary: str
    counts: tuple[tuple[str, int], ...]
    claims: tuple[Claim, ...]
    studies: tuple[StudyPage, ...]
    fidelity: tuple[Kept, ...]
    cost: tuple[tuple[str, str], ...]
    flops: Table | None
    provenance: tuple[tuple[str, str], ...]
    versions: Table


def verdicts(results: Results, published: Path | None = None) -> tuple[str, list[Claim]]:
    """(the summary, every claim as in ``verdict.json``): the published file's, or judged now."""
    if published is not None and published.exists():
        document = store.with_fields(published, store.read_json(published), summary=str, claims=list)
        return document["summary"], document["claims"]
    judged = judge(results)
    return summary(judged, results), [json.loads(json.dumps(record(verdict))) for verdict in judged]


def build(
    results: Results, source: str, said: str, claims: Sequence[Claim], root: Path | None, names: Iterable[str]
) -> Report:
    """The whole report. ``names`` are the studies in their order (an iterable that may show its progress)."""
    counted = tuple((word, sum(claim["verdict"] == word for claim in claims)) for word in VERDICTS)
    studies = tuple(study_page(results, name, claims, root) for name in names)
    facts, versions = provenance(results.provenance)
    return Report(
        results.scale, source, said, tuple(pair for pair in counted if pair[1]), tuple(claims), studies,
        tuple(compare(results.points)), tuple(cost(results.outcomes, results.curves, results.points)),
        flops_table(results), facts, versions,
    )  # fmt: skip


def in_order(results: Results, claims: Sequence[Claim]) -> list[str]:
    """The studies by the first claim that rests on each; those that none rests on come last."""
    first = {name: k for k, claim in reversed(list(enumerate(claims))) for name in claim["studies"]}
    return sorted(results.studies, key=lambda name: (first.get(name, len(claims)), name))


def study_page(results: Results, name: str, claims: Sequence[Claim], root: Path | None) -> StudyPage:
    """One study's page, also where its runs do not suffice for a figure."""
    manifest = results.studies[name]
    own = tuple(c for c in claims if c["claim"] in manifest.get("claims", ()) or name in c["studies"])
    settings = tuple(flat(manifest.get("settings") or {}))
    title = str(manifest.get("title", name))
    try:
        study = results.study(name)
    except ValueError as error:  # a metric that its runs do not have
        return StudyPage(name, title, str(error), own, settings, (), ())
    assert study is not None
    ends = ends_of(study, root)
    drawn, arms, note = _drawn(study, manifest, results.scale)
    outcomes = results.outcomes[results.outcomes["run_id"].isin(set(study.runs["run_id"]))]
    known = not study.points.empty
    return StudyPage(
        name, title, note, own, settings, tuple(tally(end for end, _ in ends.values())),
        tuple(cost(outcomes, study.curves, study.points)) if len(outcomes) else (),
        arms_table(study, arms) if known else None, runs_table(study, ends) if known else None,
        csv(f"{name}-runs.csv", "All runs", runs_behind(study)) if known else None, tuple(drawn),
    )  # fmt: skip


def _drawn(study: StudyRuns, manifest: Mapping[str, Any], scale: str) -> tuple[list[Drawing], list[Arm], str]:
    if study.runs.empty:
        return [], [], f"none of its {len(study.points)} runs is finished yet"
    try:
        arms = sweeps_of(study)
        return drawings(study, manifest, scale, arms), arms, ""
    except ValueError as error:
        return [], [], str(error)


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as pairs; what is empty is left out."""
    pairs: list[tuple[str, str]] = []
    for key, value in settings.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            pairs += flat(value, f"{name}: ")
        elif value not in ([], None, ""):
            pairs.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return pairs


def provenance(origin: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], Table]:
    """Where the runs come from: (facts, versions of libraries); each value where they differ."""
    exact = origin.get("exact") or {}
    facts = [
        ("runs", f"{origin.get('num_runs', 0):,}"),
        ("uncommitted changes", "yes" if origin.get("dirty") else "none"),
    ]
    for key, name in (("cpu", "CPU"), ("num_cores", "cores"), ("platform", "platform"), ("python", "Python")):
        facts.append((name, ", ".join(map(str, _each(origin.get(key))))))
    facts.append(("commits of the code", ", ".join(str(commit)[:10] for commit in _each(origin.get("commit")))))
    if exact:
        facts.append(("commit of the exact record", str(exact.get("commit"))[:10]))
    rows: dict[str, dict[str, None]] = {}
    for versions in [*_each(origin.get("versions")), exact.get("versions") or {}]:
        for name, version in (versions or {}).items():
            rows.setdefault(str(name), {})[str(version)] = None
    listed = tuple((name, ", ".join(found)) for name, found in sorted(rows.items()))
    return tuple(facts), Table("versions", "Versions of the libraries", (Column("library"), Column("version")), listed)


def _each(value: Any) -> list[Any]:
    return [item for item in (value if isinstance(value, list) else [value]) if item is not None]
