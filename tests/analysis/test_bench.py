"""The benchmark's table and figure from made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import bench


def measured() -> dict[str, Any]:
    def cost(wall: float, cpu: float) -> dict[str, Any]:
        return {"wall_s": wall, "cpu_s": cpu, "peak_mib": 10.0, "nll": {}}

    rounds = [{"b0": cost(b0, 20.0), "b2": cost(30.0, 50.0), "ours": cost(10.0, 20.0)} for b0 in (8.0, 10.0, 90.0)]
    grid = [
        {"width": 64, "tokens": tokens, "num_arms": num, "ranks": "16", "pack": num, "b_half": 50.0,
         "plain_s": 0.02, "ours_s": 0.01, "ratio": 2.0, "peak_mib": 1.0}
        for tokens in (32, 128) for num in (1, 4)
    ]  # fmt: skip
    share = {"width": 128, "rank": 8, "tokens": 512, "ours": 0.8, "peft": 1.1, "by_flops": 0.76}
    steps = {"grid": grid, "mixed": [{"ranks": "1,4", "tokens": 128, "ratio": 0.8}], "ratio": [share]}
    faster = {"grid": [row | {"ratio": 4.0} for row in grid]}
    return {"study": "lr", "overrides": ["seed.init=0"], "num_runs": 35, "num_sampled": 5, "rounds": rounds,
            "provenance": {"commit": "abc", "host": "mine", "user": "me"},
            "steps": steps, "steps_per_core": [steps, faster]}  # fmt: skip


def test_table_has_medians_and_a_sample_stands_for_all_runs() -> None:
    lines = bench.table(measured())
    assert "| B0: a process a run, TRL + PEFT | 70 | 140 | 10 | 7.00 | 7.00 |" in lines
    assert "| B2: PEFT + AdamW, a process a core | 30 | 50 | 10 | 3.00 | 2.50 |" in lines
    assert "| 64 | 32 | 4 | 4 | 50 | 0.0200 | 0.0100 | 2.00 | 3.00 |" in lines  # B2: the mean over the processes
    assert "| 1,4 | 128 | 1.25 |" in lines


def test_all_studies_stand_beside_the_sweep_or_alone() -> None:
    cost = {"wall_s": 30.0, "cpu_s": 50.0, "peak_mib": 1.0, "nll": {}}
    studies = {"num_runs": 100, "num_sampled": 10, "num_ours": 70, "whole": True, "b2": cost,
               "ours": cost | {"wall_s": 60.0, "cpu_s": 125.0}}  # fmt: skip
    both = bench.table(measured() | {"studies": studies})
    assert "| B2, each point a run | 300 | 500 | 5.00 | 4.00 |" in both
    assert set(bench.table(measured())) < set(both)
    assert set(bench.table({"studies": studies})) < set(both)
    assert any("last part only" in line for line in bench.table({"studies": studies | {"whole": False}}))


def test_what_is_kept_names_no_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = {"wall_s": 1.0, "cpu_s": 1.0}
    studies = {"num_runs": 1, "num_sampled": 1, "num_ours": 1, "whole": True, "b2": cost, "ours": cost}
    both = measured() | {"studies": studies | {"provenance": measured()["provenance"]}}
    (tmp_path / "bench.json").write_text(json.dumps(both))
    out = tmp_path / "out"
    assert bench.main(["--from", str(tmp_path / "bench.json"), "--out", str(out)]) == 0
    written = json.loads((out / "bench.json").read_text())
    assert set(written["provenance"]) == set(written["studies"]["provenance"]) == set(bench.KEPT)
    assert {p.name for p in out.iterdir()} == {"bench.json", "bench.md", "bench.png"}
    assert (out / "bench.md").read_text() == capsys.readouterr().out


def test_missing_measurements_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--from", str(tmp_path / "none.json")]) == 2
    assert "make bench measures" in capsys.readouterr().err


def test_readme_says_what_was_measured() -> None:
    """The numbers in the README are those of the committed measurements."""
    rows = [line.split("|")[1:-1] for line in (bench.TARGET / "bench.md").read_text().splitlines() if line[:1] == "|"]
    cells = {tuple(cell.strip() for cell in row[:3]): [cell.strip() for cell in row] for row in rows}
    b0, b2, each, ours = (
        next(row for key, row in reversed(cells.items()) if key[0].startswith(way))
        for way in ("B0:", "B2:", "B2, each", "ours")
    )
    small, large = cells["64", "32", "16"], cells["256", "128", "16"]
    shares = [row for key, row in cells.items() if key[0] == "128, 8"]
    settings = [row for key, row in cells.items() if all(part.isdecimal() for part in key)]  # width, tokens, arms
    long = [float(row[8]) for row in settings if int(row[1]) >= 512]

    def one(cell: str) -> str:
        return f"{float(cell):.1f}"

    readme = " ".join((bench.TARGET.parents[2] / "README.md").read_text().split())
    for said in (
        f"{one(b0[4])} times faster; against plain PEFT and AdamW, one process per core, {one(b2[4])} times",
        f"`make studies` takes {float(ours[1]) / 60:.0f} minutes",
        f"would take {one(each[3])} times as long",
        f"{one(small[8])} times faster than plain PEFT does with both cores busy ({one(small[7])} with one)",
        f"at width 256 and 128 tokens it is {one(large[8])} ({one(large[7])})",
        f"at 512 tokens and more {min(long):.1f} to {max(long):.1f}",
        f"takes {shares[0][2]} to {shares[1][2]} of a full fine-tuning step ({shares[0][4]} by FLOPs; "
        f"PEFT: {min(row[3] for row in shares)} to {max(row[3] for row in shares)})",
    ):
        assert said in readme
