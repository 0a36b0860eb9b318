"""Reference results: ``python -m analysis.reference lr [--scale mini] [--root runs]``, or ``make reference``.

Copies a finished study's figures and tables into ``analysis/reference/<study>-<scale>/`` with their
provenance and writes them into the README, so that no number there is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.load import load
from analysis.style import arm_label
from experiments import store

PROJECT = Path(__file__).resolve().parent.parent
REFERENCE_DIR = PROJECT / "analysis" / "reference"
README = PROJECT / "README.md"
FILES = ("lr.png", "curves.png", "lr.pdf", "curves.pdf", "optimum.csv", "optimum.json", "runs.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 if the study is unknown, unfinished or not drawn yet."""
    parser = argparse.ArgumentParser(prog="python -m analysis.reference", description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    options = parser.parse_args(arguments)
    try:
        target = publish(options.study, options.scale, Path(options.root))
    except (store.StoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"published {target.relative_to(PROJECT)} and {README.name}")
    return 0


def publish(study: str, scale: str, root: Path) -> Path:
    """Copy one finished study into the repository; returns where. Raises StoreError if runs are missing."""
    table = load(study, scale, root)
    unfinished = int((table["state"] != "done").sum())
    if unfinished:
        raise store.StoreError(f"study: {unfinished} of {len(table)} runs of {study!r} ({scale}) are not done")
    target = REFERENCE_DIR / f"{study}-{scale}"
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(root / "figures" / f"{study}-{scale}" / name, target / name)
    store.write_json(target / "provenance.json", provenance(table["run_id"].tolist(), root))
    README.write_text(with_block(README.read_text(), study, scale, block(study, scale, target)))
    return target


def provenance(run_ids: Sequence[str], root: Path) -> dict[str, Any]:
    """What the runs of a study have in common, and every value where they differ."""
    keys = ("commit", "cpu", "num_cores", "python", "versions", "platform")
    found: dict[str, list[Any]] = {key: [] for key in keys}
    for run_id in run_ids:
        record = store.read_json(root / run_id / "provenance.json")
        for key in keys:
            if record.get(key) not in found[key]:
                found[key].append(record.get(key))
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


def block(study: str, scale: str, target: Path) -> str:
    """The README's account of a study, from its committed ``optimum.json`` alone."""
    arms = json.loads((target / "optimum.json").read_text())["arms"]
    where = target.relative_to(PROJECT).as_posix()
    lines = [
        f"![final held-out loss against learning rate]({where}/lr.png)",
        "",
        "| arm | best held-out NLL (SD of seeds) | LR* [95 %] | LR* / LR*(full) [95 %] | seeds | verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(arm) for arm in arms]
    tables = f"Tables: [`optimum.csv`]({where}/optimum.csv), every run in [`runs.csv`]({where}/runs.csv)"
    return "\n".join(
        [*lines, "", _sentence(arms), "", f"{tables}; learning curves: [`curves.png`]({where}/curves.png)."]
    )


def _row(arm: dict[str, Any]) -> str:
    star = f"{_lr(arm['lr_star'])} [{', '.join(map(_lr, arm['interval']))}]" if arm["lr_star"] else arm["why"]
    ratio = f"{arm['ratio']:.1f} {_interval(arm['ratio_interval'], '.1f')}" if arm["ratio"] else "–"
    nll = f"{arm['best_mean']:.3f} ({arm['best_sd']:.3f})"
    return f"| {arm_label(arm['arm'])} | {nll} | {star} | {ratio} | {arm['num_seeds']} | {arm['verdict']} |"


def _sentence(arms: list[dict[str, Any]]) -> str:
    full = next(arm for arm in arms if arm["arm"] == "full")
    highest = max((arm for arm in arms if arm["arm"] != "full"), key=lambda arm: int(arm["arm"].lstrip("r")))
    gap = highest["best_mean"] - full["best_mean"]
    text = f"At its best LR, {arm_label(highest['arm'])} ends {gap:+.3f} nats per token from full fine-tuning"
    if not highest["ratio"]:
        return f"{text}; the ratio of their LRs is undecided: {highest['ratio_why']}."
    low, high = highest["ratio_interval"]
    holds = "contains" if low <= 10 <= high else "excludes"
    return (
        f"{text}, and its optimal LR is {highest['ratio']:.1f} times as large; the interval "
        f"[{low:.1f}, {high:.1f}] {holds} the post's 10."
    )


def _lr(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _interval(interval: Sequence[float], form: str) -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def with_block(text: str, study: str, scale: str, content: str) -> str:
    """``text`` with the part between the study's two marks replaced. Raises StoreError without marks."""
    begin, end = f"<!-- {study}-{scale}: generated, see make reference -->", f"<!-- /{study}-{scale} -->"
    if begin not in text or end not in text:
        raise store.StoreError(f"{README.name}: no place for {study}-{scale}; add the lines {begin} and {end}")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"


if __name__ == "__main__":
    sys.exit(main())
