"""Redraw figures and tables from the store alone: ``python -m analysis.figures [STUDY ...]``.

Writes ``<root>/figures/<study>-<scale>/``: ``lr`` and ``curves`` as PNG, SVG and PDF, ``optimum.csv``
and ``optimum.json`` (one row per arm) and ``runs.csv`` (one row per run); prints the arms.
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
from analysis.arms import FULL, VALUE, Arm, arm_records, arm_table, find_arms, label_arms
from analysis.figures import curves, lr
from analysis.load import load, load_curves
from experiments import store


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for an unknown study or an unreadable store."""
    parser = argparse.ArgumentParser(prog="python -m analysis.figures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="default: every study in the store, at every scale")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    parser.add_argument("--out", default=None, help="default: <root>/figures")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    style.use()
    root = Path(options.root)
    try:
        chosen = [(study, options.scale) for study in options.studies] or store.list_studies(root)
        if not chosen:
            print(f"no studies in {root} yet; start with: make sweep-lr", file=sys.stderr)
        for study, scale in chosen:
            redraw(study, scale, root, Path(options.out or root / "figures") / f"{study}-{scale}")
    except (store.StoreError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def redraw(study: str, scale: str, root: Path, out: Path) -> None:
    """Figures and tables of one study into ``out``; says what is missing, draws what is there."""
    manifest = store.read_study(root, study, scale)
    table = load(study, scale, root)
    settings: Mapping[str, Any] = manifest.get("settings") or {}
    reference, value = settings.get("reference", FULL), settings.get("value", VALUE)
    runs = label_arms(table, value)
    if runs.empty:
        print(f"{study} ({scale}): none of its {len(table)} runs is finished yet, nothing to draw")
        return
    arms = find_arms(runs, reference, maximize=bool(settings.get("maximize", False)))
    caption = _caption(manifest, scale, runs, len(table))
    paper_ratio = float(settings["ratio_paper"]) if "ratio_paper" in settings else None
    figures: dict[str, Figure] = {"lr": lr.figure(runs, arms, caption, paper_ratio, reference)}
    recorded = load_curves(runs, root)
    if envelope.CURVE in recorded:
        figures["curves"] = curves.figure(runs, arms, recorded, caption, reference)
    for name, figure in figures.items():
        style.save(figure, out / name)
    write_tables(study, scale, table, arms, out)
    print_arms(arms, f"{study} ({scale}): {_tally(table, runs)}")
    for note in filter(None, [envelope.unequal_counts(runs)]):
        print(f"note: {note}")
    print(f"figures: {', '.join(f'{out / name}.png' for name in figures)} (also .svg, .pdf)")
    print(f"tables: {out / 'optimum.csv'}, {out / 'optimum.json'}, {out / 'runs.csv'}")


def _caption(manifest: Mapping[str, Any], scale: str, runs: pd.DataFrame, expected: int) -> str:
    models = " + ".join(sorted(set(runs["config.model.name"])))
    data = " + ".join(sorted(set(runs["config.data.name"])))
    own = " (the suite's own small models)" if scale == "mini" else ""
    missing = f"; {expected - len(runs)} of {expected} runs without a result" if len(runs) < expected else ""
    return f"{manifest['title']}: {models} on {data}, {scale} scale{own}{missing}"


def _tally(table: pd.DataFrame, runs: pd.DataFrame) -> str:
    """What became of every run the study expects."""
    parts = [f"{len(runs)} of {len(table)} runs have a result", f"{(runs['outcome'] == 'diverged').sum()} diverged"]
    others = table[table["state"] != "done"]["state"].value_counts(sort=False)
    return ", ".join([*parts, *(f"{count} {str(state).replace('_', ' ')}" for state, count in others.items())])


def write_tables(study: str, scale: str, table: pd.DataFrame, arms: Sequence[Arm], out: Path) -> None:
    """``runs.csv`` holds every expected run, also those without a result."""
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "runs.csv", index=False)
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
