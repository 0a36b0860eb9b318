"""A verdict for each claim of the post: ``python -m analysis.verdict [--root runs]``, or ``make verdict``.

Without ``--root`` the committed reference results are judged: no training, no network. Prints the table
and writes ``verdict.md``, ``verdict.csv`` and ``verdict.json`` (default: into ``runs/verdict``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.claims import CLAIMS, Verdict, judge
from analysis.results import Results, from_reference, from_store
from experiments import store

REFERENCE_DIR = Path(__file__).resolve().parent / "reference"
PIPED_WIDTH = 160
COLUMNS = ("claim", "statement", "paper", "here", "interval", "n", "verdict", "why", "needs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for results that cannot be read or written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.verdict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    parser.add_argument(
        "--root", default=None, help="judge this store's runs; default: the committed reference results"
    )
    parser.add_argument("--claims", nargs="+", metavar="ID", choices=[claim.id for claim in CLAIMS], default=None,
                        help="only these, e.g. C17 C18")  # fmt: skip
    parser.add_argument("--out", default=None, help="default: <root or runs>/verdict")
    options = parser.parse_args(arguments)
    out = Path(options.out or Path(options.root or "runs") / "verdict")
    try:
        if options.root is None:
            results = from_reference(REFERENCE_DIR / options.scale)
        else:
            results = from_store(Path(options.root), options.scale)
        verdicts = judge(results, [claim for claim in CLAIMS if claim.id in (options.claims or [claim.id])])
        write(verdicts, results, out)
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    show(verdicts, results, console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH))
    print(f"written: {out}/verdict.md, .csv, .json")
    return 0


def rows(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """One flat row of text per claim, for every output."""
    return [
        {
            "claim": v.claim.id,
            "statement": v.claim.statement,
            "paper": v.claim.paper,
            "here": v.here or "–",
            "interval": _interval(v.interval),
            "n": v.n or "–",
            "verdict": v.verdict,
            "why": v.why,
            "needs": v.needs,
        }
        for v in verdicts
    ]


def _interval(interval: tuple[float, float] | None) -> str:
    if interval is None or not all(map(math.isfinite, interval)):
        return "–"
    return f"[{interval[0]:.3g}, {interval[1]:.3g}]"


def summary(verdicts: Sequence[Verdict], results: Results) -> str:
    """One line: how many of each verdict, on how many runs."""
    counts = Counter(v.verdict for v in verdicts)
    listed = ", ".join(f"{counts[k]} {k}" for k in ("reproduced", "contradicted", "undecided", "not run") if counts[k])
    shared = f" ({results.num_shared} more are shared between studies)" if results.num_shared else ""
    runs = f"{len(results.outcomes)} of {len(results.points)} runs of {len(results.studies)} studies{shared}"
    return f"{len(verdicts)} claims at scale {results.scale}: {listed}; from {runs}"


def markdown(verdicts: Sequence[Verdict], results: Results) -> str:
    """The table as Markdown: claim, paper, here, n, verdict, why."""
    lines = [
        summary(verdicts, results),
        "",
        "| claim | paper | here | n | verdict | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(verdicts):
        why = row["why"] + (f"; it would take {row['needs']}" if row["needs"] else "")
        cells = (f"**{row['claim']}** {row['statement']}", row["paper"], row["here"], row["n"], row["verdict"], why)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def record(verdict: Verdict) -> dict[str, Any]:
    """For JSON: numbers as numbers, nothing that is not finite."""
    low, high = verdict.interval or (math.nan, math.nan)
    return {
        **dict(zip(COLUMNS, rows([verdict])[0].values(), strict=True)),
        "value": verdict.value if verdict.value is not None and math.isfinite(verdict.value) else None,
        "interval": [low, high] if math.isfinite(low) and math.isfinite(high) else None,
        "measured": verdict.claim.measured,
        "rule": verdict.claim.rule,
        "noise": verdict.claim.noise,
        "studies": list(verdict.claim.studies),
    }


def write(verdicts: Sequence[Verdict], results: Results, out: Path) -> None:
    """Write the three files."""
    out.mkdir(parents=True, exist_ok=True)
    store.write_atomic(out / "verdict.md", markdown(verdicts, results) + "\n")
    store.write_atomic(out / "verdict.csv", pd.DataFrame(rows(verdicts), columns=list(COLUMNS)).to_csv(index=False))
    document = {"scale": results.scale, "summary": summary(verdicts, results), "claims": [record(v) for v in verdicts]}
    store.write_atomic(out / "verdict.json", json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def recorded(folder: Path) -> pd.DataFrame:
    """What ``write`` put into a folder: a row per claim, by its id."""
    return pd.DataFrame(json.loads((folder / "verdict.json").read_text())["claims"]).set_index("claim")


def show(verdicts: Sequence[Verdict], results: Results, console: Console) -> None:
    """Print the table, as wide as the terminal, and the summary."""
    table = Table("claim", "paper", "here", "n", "verdict", "why", show_lines=True)
    styles = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}
    for row in rows(verdicts):
        why = row["why"] + (f"\nneeds: {row['needs']}" if row["needs"] else "")
        style = styles.get(row["verdict"], "dim")
        cells = (f"{row['claim']} {row['statement']}", row["paper"], row["here"], row["n"], row["verdict"], why)
        table.add_row(
            *(cell.replace("[", r"\[") for cell in cells[:4]), f"[{style}]{cells[4]}[/]", why.replace("[", r"\[")
        )
    console.print(table)
    console.print(summary(verdicts, results), markup=False)


if __name__ == "__main__":
    sys.exit(main())
