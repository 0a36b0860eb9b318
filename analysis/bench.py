"""Table and figure of the benchmark: ``python -m analysis.bench --from runs/bench/bench.json`` (see ``make bench``).

Writes ``analysis/reference/bench/``: the measurements without what names a machine or user, a table in Markdown, and a
figure of packing alone against tokens per arm and step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis import style
from experiments import store

TARGET = Path(__file__).resolve().parent / "reference" / "bench"
KEPT = ("commit", "cpu", "num_cores", "versions")
"""Of the provenance: what a reader needs to judge the times."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for measurements that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m analysis.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--from", dest="source", type=Path, default=Path("runs/bench/bench.json"))
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args(arguments)
    try:
        found = store.read_json(options.source)
    except store.StoreError as error:
        print(f"error: --from: {error}; make bench measures", file=sys.stderr)
        return 2
    for measured in (found, found.get("studies", {})):
        if "provenance" in measured:
            measured["provenance"] = {key: measured["provenance"].get(key) for key in KEPT}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "bench.md").write_text("\n".join(table(found)) + "\n")
    if "steps" in found:
        style.use()
        style.save(figure(found), options.out / "bench", formats=("png",))
    print("\n".join(table(found)))
    return 0


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown lines: whole sweeps, then all studies, then single steps; whatever of these was measured."""
    lines: list[str] = []
    for part, measured in ((_sweep, "rounds"), (_studies, "studies"), (_steps, "steps")):
        if measured in found:
            lines += [*([""] if lines else []), *part(found)]
    return lines


def _sweep(found: Mapping[str, Any]) -> list[str]:
    rounds, scale = found["rounds"], found["num_runs"] / found["num_sampled"]
    runs, sampled, overrides = found["num_runs"], found["num_sampled"], " ".join(found["overrides"])
    lines = [
        f"{runs} runs of `{found['study']}` ({overrides}), {len(rounds)} rounds; B0 from {sampled} of them. Medians.",
        "",
        "| way | wall, s | CPU, s | peak, MiB | over ours, wall | over ours, CPU |",
        "|---|---|---|---|---|---|",
    ]
    names = {"b0": "B0: a process a run, TRL + PEFT", "b2": "B2: PEFT + AdamW, a process a core", "ours": "ours"}
    for way, name in names.items():
        k = scale if way == "b0" else 1.0
        cells = [f"{statistics.median(k * r[way][key] for r in rounds):.0f}" for key in ("wall_s", "cpu_s")]
        cells.append(f"{statistics.median(r[way]['peak_mib'] for r in rounds):.0f}")
        cells += [f"{statistics.median(k * r[way][key] / r['ours'][key] for r in rounds):.2f}"
                  for key in ("wall_s", "cpu_s")]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _studies(found: Mapping[str, Any]) -> list[str]:
    studies = found["studies"]
    scale = studies["num_runs"] / studies["num_sampled"]
    b2, ours = (
        {key: k * studies[way][key] for key in ("wall_s", "cpu_s")} for way, k in (("b2", scale), ("ours", 1.0))
    )
    return [
        f"All supervised studies, once: every plotted point as a run of its own ({studies['num_runs']}, "
        f"{studies['num_sampled']} of them timed) against `make studies` ({studies['num_ours']} runs"
        f"{'' if studies['whole'] else '; stopped and continued, so its time is of the last part only'}).",
        "",
        "| way | wall, s | CPU, s | over ours, wall | over ours, CPU |",
        "|---|---|---|---|---|",
        f"| B2, each point a run | {b2['wall_s']:.0f} | {b2['cpu_s']:.0f} | {b2['wall_s'] / ours['wall_s']:.2f} | "
        f"{b2['cpu_s'] / ours['cpu_s']:.2f} |",
        f"| ours | {ours['wall_s']:.0f} | {ours['cpu_s']:.0f} | 1.00 | 1.00 |",
    ]


def _steps(found: Mapping[str, Any]) -> list[str]:
    lines = ["| width | tokens per arm and step | arms | packed | b_half | B1, s | ours, s | B1 / ours | B2 / ours |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row, both in _paired(found):
        cells = [f"{row[key]}" for key in ("width", "tokens", "num_arms", "pack")]
        cells += [f"{row['b_half']:.0f}", f"{row['plain_s']:.4f}", f"{row['ours_s']:.4f}"]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.2f} | {both:.2f} |")
    lines += ["", "| ranks in one pack | tokens | time over that of equal ranks |", "|---|---|---|"]
    for row in found["steps"]["mixed"]:
        lines.append(f"| {row['ranks']} | {row['tokens']} | {1 / row['ratio']:.2f} |")
    lines += ["", "| LoRA step / full step, width, rank | tokens | ours | PEFT | by FLOPs |", "|---|---|---|---|---|"]
    for row in found["steps"]["ratio"]:
        lines.append(f"| {row['width']}, {row['rank']} | {row['tokens']} | {row['ours']:.2f} | {row['peft']:.2f} | "
                     f"{row['by_flops']:.2f} |")  # fmt: skip
    return lines


def _paired(found: Mapping[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Each setting alone, and its ratio where every core is busy (mean over the processes)."""
    busy = [process["grid"] for process in found["steps_per_core"]]
    return [(row, statistics.mean(rows[k]["ratio"] for rows in busy)) for k, row in enumerate(found["steps"]["grid"])]


def figure(found: Mapping[str, Any]) -> Figure:
    """One panel per width; a line per number of arms; b_half where the line of most arms has it."""
    pairs = _paired(found)
    widths = sorted({row["width"] for row, _ in pairs})
    fig = Figure(figsize=(style.WIDTH_IN, 2.6), layout="constrained")
    panels = fig.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    for axes, width in zip(panels, widths, strict=True):
        mine = [(row, both) for row, both in pairs if row["width"] == width]
        for num, marker in zip(sorted({row["num_arms"] for row, _ in mine}), style.MARKERS, strict=False):
            line = [(row["tokens"], both) for row, both in mine if row["num_arms"] == num]
            axes.plot(*zip(*line, strict=True), marker=marker, label=f"{num} arms" if num > 1 else "1 arm")
        axes.axhline(1.0, color="0.4", linewidth=0.8, linestyle="--")
        b_half = statistics.median(row["b_half"] for row, _ in mine)
        axes.set_title(f"width {width}, $b_{{1/2}}$ about {b_half:.0f} tokens")
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sorted({row["tokens"] for row, _ in mine}), [str(t) for t in sorted({r["tokens"] for r, _ in mine})]
        )
        axes.set_xlabel("tokens per arm and step")
    panels[0].set_ylabel("plain PEFT's time / ours")
    panels[0].legend()
    return fig


if __name__ == "__main__":
    sys.exit(main())
