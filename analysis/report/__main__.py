"""Everything on one page: ``python -m analysis.report [--root runs]``, or ``make report``.

Writes a single HTML file that needs no network. Without ``--root`` it is about the committed reference results.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from analysis import style
from analysis.page import Link, page, render
from analysis.report.model import Report, build, in_order, verdicts
from analysis.results import from_reference, from_store
from analysis.verdict import REFERENCE_DIR
from experiments import store

TITLE = "Does LoRA match full fine-tuning?"
LEAD = (
    "Where does it stop, and what does it cost? The claims of “LoRA Without Regret” (Schulman and Thinking Machines "
    "Lab, 2025), run again with an interval on every number."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for results that cannot be read or a page that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default=None, help="this store's runs; default: the committed reference results")
    parser.add_argument("--out", default=None, help="default: <root or runs>/report.html")
    options = parser.parse_args(arguments)
    out = Path(options.out or Path(options.root or "runs") / "report.html")
    root = Path(options.root) if options.root else None
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        text = html(collect(options.scale, root))
        with store.explained(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        store.write_atomic(out, text)
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {out} ({len(text) / 1e6:.1f} MB)")
    return 0


def collect(scale: str, root: Path | None) -> Report:
    """Everything at ``scale``, in a store or in the reference. Raises store.StoreError if it is not readable."""
    folder = REFERENCE_DIR / scale
    results = from_reference(folder) if root is None else from_store(root, scale)
    if not results.studies:
        raise store.StoreError(f"study: none at scale {scale!r} in {root or folder}; start with: make sweep-lr")
    said, claims = verdicts(results, folder / "verdict.json" if root is None else None)
    style.use()
    console = Console(stderr=True)
    names = track(
        in_order(results, claims), "drawing", console=console, transient=True, disable=not console.is_terminal
    )
    source = "the committed reference results" if root is None else f"the store {root.name}"
    return build(results, source, said, claims, root, names)


def html(report: Report) -> str:
    """The whole page."""
    contents = [Link("#verdicts", "Verdicts"), Link("#studies", "Studies")]
    contents += [Link(f"#study-{study.name}", study.name, inner=True) for study in report.studies]
    contents += [Link("#fidelity", "Fidelity"), Link("#cost", "Cost"), Link("#provenance", "Provenance")]
    body = render("report.html", report=report)
    return page(TITLE, body, lead=LEAD, contents=contents)


if __name__ == "__main__":
    sys.exit(main())
