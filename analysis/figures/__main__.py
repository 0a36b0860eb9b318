"""Redraw figures and tables from the store alone: ``python -m analysis.figures [STUDY ...]``.

Writes ``<root>/figures/<study>-<scale>/``: the study's figures as PNG, SVG and PDF, ``runs.csv`` (one row
per run) and, where LRs were swept, ``optimum.csv`` and ``optimum.json`` (one row per arm); prints the arms.
``--style paper`` writes ``<root>/figures/paper/``: one column wide, as PDF and SVG with the caption beside them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from analysis import envelope, style
from analysis.arms import FULL, REWARD, Arm, arm_records, arm_table, find_arms
from analysis.figures import curves, experts, lr
from analysis.figures.registry import FIGURES
from analysis.load import load, load_curves
from analysis.results import StudyRuns, study_runs
from experiments import manifests, store


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for an unknown study or an unreadable store; the other studies are drawn."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="default: every study in the store, at every scale")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--overrides", nargs="*", default=[], help="those STUDY was launched with")
    parser.add_argument("--root", default="runs")
    parser.add_argument("--out", default=None, help="default: <root>/figures, in style paper <root>/figures/paper")
    parser.add_argument("--style", default="screen", help="screen, or paper: one column wide, PDF, SVG and caption")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    root = Path(options.root)
    try:
        style.use(options.style)
        out = Path(options.out or root / "figures" / ("paper" if style.current().is_paper else ""))
        named = [manifests.study_name(study, options.overrides) for study in options.studies]
        chosen = [(study, options.scale) for study in named] or manifests.list_studies(root)
    except (store.StoreError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not chosen:
        print(f"no studies in {root} yet; start with: make sweep-lr", file=sys.stderr)
    return max([_try_to_redraw(study, scale, root, out / f"{study}-{scale}") for study, scale in chosen], default=0)


def _try_to_redraw(study: str, scale: str, root: Path, out: Path) -> int:
    try:
        redraw(study, scale, root, out)
    except (store.StoreError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def redraw(study: str, scale: str, root: Path, out: Path) -> None:
    """Figures and tables of one study into ``out``; says what is missing, draws what is there."""
    manifest = manifests.read_study(root, study, scale)
    table = load(study, scale, root)
    if not (table["state"] == "done").any():
        print(f"{study} ({scale}): none of its {len(table)} runs is finished yet, nothing to draw")
        return
    found = study_runs(study, manifest.get("settings") or {}, table, load_curves(table, root))
    arms = sweeps_of(found)
    figures = draw(found, manifest, scale, arms)
    for name, figure in figures.items():
        style.save(figure, out / name)
    write_tables(study, scale, table, arms, out)
    title = f"{study} ({scale}): {_tally(table, found.runs)}"
    title += "; best is the rate of failure, 1 - reward" if found.settings.get("value") == REWARD else ""
    if arms:
        print_arms(arms, title)
    else:
        print(title)
    for name, end in (manifest.get("search") or {}).get("arms", {}).items():
        print(f"search: {name}: {end['phase']}: {end['why']}")
    for note in filter(None, [envelope.unequal_counts(found.runs) if arms else ""]):
        print(f"note: {note}")
    first, also = ("pdf", ".svg, caption .txt") if style.current().is_paper else ("png", ".svg, .pdf")
    print(f"figures: {', '.join(f'{out / name}.{first}' for name in figures)} (also {also})")
    print(f"tables: {', '.join(str(path) for path in sorted(out.glob('*.csv')))}")


def sweeps_of(study: StudyRuns) -> list[Arm]:
    """LR* of every arm, if the study sweeps the LR at all."""
    if study.runs.groupby(["panel", "arm"])["lr"].nunique().max() < 3:
        return []
    settings = study.settings
    return find_arms(study.runs, settings.get("reference", FULL), maximize=bool(settings.get("maximize", False)))


def draw(study: StudyRuns, manifest: Mapping[str, Any], scale: str, arms: Sequence[Arm]) -> dict[str, Figure]:
    """The study's own figure, by its file's ``figure``, and the general ones where LRs were swept."""
    caption = caption_of(manifest, scale, study.runs, len(study.points))
    own = str(manifest.get("figure", "lr"))
    searched = manifest.get("search")
    own_name, lr_name = (f"{own}-adaptive", "lr-adaptive") if searched else (own, "lr")
    figures = {own_name: FIGURES[own](study, caption)} if own in FIGURES else {}
    if arms:
        reference = study.settings.get("reference", FULL)
        ratio_paper = study.settings.get("ratio_paper")
        ten = float(ratio_paper) if isinstance(ratio_paper, int | float) else None
        if study.settings.get("value") != REWARD:  # a reward has a figure of its own
            phases = searched["phases"] if searched else {}
            figures[lr_name] = lr.figure(study.runs, arms, caption, ten, reference, phases=phases)
        if own == "lr" and envelope.CURVE in study.curves and not searched:  # an envelope needs equal numbers of LRs
            figures["curves"] = curves.figure(study.runs, arms, study.curves, caption, reference)
    if experts.has_experts(study):
        figures["experts"] = experts.figure(study, caption)
    return figures


def caption_of(manifest: Mapping[str, Any], scale: str, runs: pd.DataFrame, expected: int) -> str:
    """What a study's figures show: title, models, data and scale, and how many of the ``expected`` runs are there."""
    models = " + ".join(sorted(set(runs["config.model.name"])))
    data = " + ".join(sorted(set(runs["config.data.name"])))
    own = " (the suite's own small models)" if scale == "mini" else ""
    how = ", LRs searched instead of a full grid" if manifest.get("search") else ""
    missing = f"; {expected - len(runs)} of {expected} runs without a result" if len(runs) < expected else ""
    lora = runs[runs["config.method.kind"] == "lora"]
    adapted = ", LoRA on the unembedding too" if len(lora) and lora["config.method.unembed"].all() else ""
    return f"{manifest['title']}: {models} on {data}, {scale} scale{own}{adapted}{how}{missing}"


def _tally(table: pd.DataFrame, runs: pd.DataFrame) -> str:
    """What became of every run the study expects."""
    parts = [f"{len(runs)} of {len(table)} runs have a result", f"{(runs['outcome'] == 'diverged').sum()} diverged"]
    others = table[table["state"] != "done"]["state"].value_counts(sort=False)
    return ", ".join([*parts, *(f"{count} {str(state).replace('_', ' ')}" for state, count in others.items())])


def write_tables(
    study: str, scale: str, table: pd.DataFrame, arms: Sequence[Arm], out: Path, *, with_runs: bool = True
) -> None:
    """``runs.csv`` holds every expected run, also those without a result."""
    out.mkdir(parents=True, exist_ok=True)
    if with_runs:
        table.to_csv(out / "runs.csv", index=False)
    if not arms:
        return
    arm_table(arms).to_csv(out / "optimum.csv", index=False)
    document = {"study": study, "scale": scale, "arms": arm_records(arms)}
    (out / "optimum.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def print_arms(arms: Sequence[Arm], title: str) -> None:
    """One line per arm on the terminal, then why arms are undecided or what their numbers rest on."""
    with_panels = any(arm.panel for arm in arms)
    heads = [*(["panel"] if with_panels else []), "arm", "best", "SD", "LR*", "95 % interval", "ratio", "95 % interval",
             "n", "verdict"]  # fmt: skip
    table = Table(*heads, title=title, box=None, title_justify="left", title_style="bold")
    for arm in arms:
        optimum, against = arm.optimum, arm.ratio
        cells = [arm.name, _number(optimum.best, ".4f"), _number(optimum.best_sd, ".4f")]
        cells += [_number(optimum.lr_star, ".2e"), _interval(optimum.interval, ".1e")]
        cells += [_number(against.value, ".1f"), _interval(against.interval, ".1f")] if against else ["-", "-"]
        table.add_row(*([arm.panel] if with_panels else []), *cells, str(optimum.num_seeds), optimum.verdict)
    Console(highlight=False, soft_wrap=True, width=120, markup=False).print(table)
    reasons: dict[str, list[str]] = {}
    for arm in arms:
        if arm.optimum.why:
            reasons.setdefault(arm.optimum.why, []).append(f"{arm.panel} {arm.name}".strip())
    for why, names in reasons.items():
        print(f"  {', '.join(names)}: {why}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:{form}}"


def _interval(interval: tuple[float, float] | None, form: str) -> str:
    return "-" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


if __name__ == "__main__":
    sys.exit(main())
