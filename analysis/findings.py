"""The page "what we found": ``python -m analysis.findings``, or as a part of ``make reference``.

Every sentence with a number in it comes from a verdict; what is typed are the questions, and which claims answer them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.claims import Verdict, judge
from analysis.results import Results, from_reference
from analysis.verdict import REFERENCE_DIR, summary
from experiments import store

PAGE = Path(__file__).resolve().parent.parent / "docs" / "findings.md"
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Does LoRA match full fine-tuning?", ("C1", "C2", "C8", "C17", "Q1")),
    ("Where does it stop matching?", ("C3", "C4", "C9", "C11", "C12", "C13", "C19", "C20")),
    ("Which learning rate does it want?", ("C5", "C6", "C7", "C10", "C18", "C21")),
    ("Where should it sit?", ("C14", "C15", "C16", "C22")),
    ("What does it cost?", ("C23", "C24")),
)
ORDER = ("reproduced", "contradicted", "undecided", "not run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for results that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m analysis.findings", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--scale", default="mini")
    options = parser.parse_args(arguments)
    try:
        results = from_reference(REFERENCE_DIR / options.scale)
        store.write_atomic(PAGE, page(judge(results), results))
    except store.StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written: {PAGE}")
    return 0


def page(verdicts: Sequence[Verdict], results: Results) -> str:
    """Markdown: each question with what was found, the decided claims first."""
    by_id = {verdict.claim.id: verdict for verdict in verdicts}
    lines = [
        "# What we found",
        "",
        "<!-- generated from the verdicts by make reference; do not edit -->",
        "",
        f"{summary(verdicts, results)}.",
        "",
        f"All of it is about the models and data of scale `{results.scale}`: a claim that does not hold here may hold",
        "elsewhere. Rules and margins were fixed before the runs were read (see [the protocol](protocol.md)).",
    ]
    for question, ids in QUESTIONS:
        lines += ["", f"## {question}", ""]
        mine = [by_id[one] for one in ids if one in by_id]
        for verdict in sorted(mine, key=lambda one: ORDER.index(one.verdict)):
            lines += [*_entry(verdict), ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def _entry(verdict: Verdict) -> list[str]:
    claim = verdict.claim
    lines = [f"- **{claim.id}, {verdict.verdict}**: {claim.statement}.", f"  - The post: {claim.paper}."]
    if verdict.here:
        lines.append(f"  - Here ({verdict.n or 'counted'}): {verdict.here}.")
    lines.append(f"  - Why: {verdict.why}.")
    if verdict.needs:
        lines.append(f"  - What would decide it: {verdict.needs}.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
