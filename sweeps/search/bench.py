"""A search against the full grid of the same study: ``make bench-search``, or ``python -m search.bench [lr]``.

Needs the finished grid in the store. Searches twice, each time from nothing: with the default target, and asking
each arm for the very interval that the full grid gave. Answers come from the store; what it lacks (LRs that the
grid does not have) is trained into it. Prints LR*, ratio and intervals of all three and their steps, and writes
``<root>/bench/search-<study>-<scale>.json``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.optimum import Interval, Optimum, Ratio, ratio
from experiments.config import ConfigError
from experiments.store import StoreError, ensure_root, read_summary, write_json
from search.arms import Searched, finished, searched
from search.launch import run
from search.look import Look, Runs
from search.plan import Width
from sweeps.display import warn
from sweeps.grid import Point, load_study
from sweeps.launch import launch
from sweeps.plan import find

BAR = 0.4
"""Share of the full grid's steps that a search may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 (whatever the bar says), 1 if a run failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m search.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", nargs="?", default="lr")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--root", default="runs")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    root = Path(options.root)
    try:
        extra = [*options.overrides, f"launch.root={root}"]
        study = load_study(options.study, options.scale, extra)
        wanted = searched(study, options.study, options.overrides, None)
        missing = [point for point in study.points if find(root, point).state != "done"]
        if missing:
            raise ConfigError(
                f"study: {len(missing)} of {len(study.points)} runs of the full grid of {options.study!r} are not in "
                f"{root}; make sweep-{options.study} runs them"
            )
        ensure_root(root)
        grid = _of(wanted, root, study.points)
        results = {"full grid": grid}
        same = {row["arm"]: _factor(row["ratio_interval"] or row["interval"]) for row in grid["arms"]}
        widths: dict[str, Width] = {"search, default": None}
        if all(math.isfinite(factor) for factor in same.values()):
            widths["search, the grid's intervals"] = same
        for name, width in widths.items():
            code, progress = run(wanted, root, width, lambda s: launch(s, root), record=False)
            if code:
                return code
            asked = [wanted.point(*where) for where in progress.asked.values()]
            results[name] = _of(wanted, root, asked) | {"rounds": progress.rounds}
        for name in widths:
            results[name] |= _against(results[name], grid)
        path = root / "bench" / f"search-{study.name}-{study.scale}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"study": study.name, "scale": study.scale, "bar": BAR, "results": results})
        _show(results, Console(highlight=False, soft_wrap=True, width=140))
        print(f"written: {path}")
    except (ConfigError, StoreError) as error:
        warn(f"error: {error}")
        return 2
    return 0


def _of(wanted: Searched, root: Path, points: Sequence[Point]) -> dict[str, Any]:
    """LR* and ratio of every arm from these runs alone, and the steps that they took."""
    where = {wanted.point(arm.key, lr, seed).run_id: (arm.key, lr, seed) for arm in wanted.arms
             for lr in {p.config.optim.lr for p in points} for seed in arm.seeds}  # fmt: skip
    asked = {point.run_id: where[point.run_id] for point in points}
    found = finished(wanted, asked, root)
    optima = {arm.key: Look(arm, found.get(arm.key, Runs())).optimum for arm in wanted.arms}
    steps = sum(summary["step"] for point in points if (summary := read_summary(root / point.run_id)))
    return {"num_runs": len(points), "num_steps": steps, "arms": [
        _row(arm.key, optima[arm.key], ratio(optima[arm.key], optima[arm.reference]) if arm.reference else None,
             len(found.get(arm.key, Runs()).lr))
        for arm in wanted.arms
    ]}  # fmt: skip


def _row(key: str, optimum: Optimum, against: Ratio | None, num_runs: int) -> dict[str, Any]:
    return {
        "arm": key, "num_runs": num_runs, "lr_star": optimum.lr_star, "interval": optimum.interval,
        "ratio": against.value if against else None, "ratio_interval": against.interval if against else None,
        "num_seeds": optimum.num_seeds, "why": optimum.why,
    }  # fmt: skip


def _against(result: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    """The bar: the share of steps, and by arm whether each LR* lies within the other's interval."""
    pairs = list(zip(result["arms"], grid["arms"], strict=True))
    return {
        "share": result["num_steps"] / grid["num_steps"],
        "equal": {a["arm"]: _inside(a["lr_star"], b["interval"]) and _inside(b["lr_star"], a["interval"])
                  for a, b in pairs},
    }  # fmt: skip


def _inside(value: float | None, interval: Interval | None) -> bool:
    return value is not None and interval is not None and interval[0] <= value <= interval[1]


def _factor(interval: Interval | None) -> float:
    return math.sqrt(interval[1] / interval[0]) if interval else math.nan


def _show(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table(
        "", "arm", "runs", "LR*", "95 % interval", "ratio", "95 % interval", "within a factor", "equal", box=None
    )
    for name, result in results.items():
        for n, row in enumerate(result["arms"]):
            interval = row["ratio_interval"] if row["ratio_interval"] else row["interval"]
            equal = result.get("equal", {}).get(row["arm"])
            table.add_row(
                "" if n else name, row["arm"], str(row["num_runs"]), *_cells(row["lr_star"], row["interval"], ".2e"),
                *_cells(row["ratio"], row["ratio_interval"], ".2f"), f"{_factor(interval):.2f}",
                "-" if equal is None else "yes" if equal else "no",
            )  # fmt: skip
    console.print(table, markup=False)
    for name, result in results.items():
        share = f": {100 * result['share']:.1f} % (bar: {100 * BAR:.0f} %)" if "share" in result else ""
        console.print(f"{name}: {result['num_runs']} runs, {result['num_steps']:,} steps{share}")


def _cells(value: float | None, interval: Interval | None, form: str) -> tuple[str, str]:
    if value is None or interval is None:
        return "-", "-"
    return f"{value:{form}}", f"[{interval[0]:{form}}, {interval[1]:{form}}]"


if __name__ == "__main__":
    sys.exit(main())
