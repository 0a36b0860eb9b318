"""The benchmark's way of timing whole commands, with children that train nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps import bench
from sweeps.grid import load_study

ECHO = """
import json, sys
from experiments.compose import decode
from experiments.config import run_id
for line in sys.stdin:
    print("noise", flush=True) if {noise} else None
    print(json.dumps({{"run_id": run_id(decode(json.loads(line))), "test/nll_nats": 1.5}}), flush=True)
"""


def children(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(bench, "_plain", lambda how, environment: subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))  # fmt: skip


def test_every_run_is_handed_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    children(monkeypatch, ECHO.format(noise=False))
    points = load_study("lr", "mini", ["seed.init=0", "seed.data=0"]).points[:7]
    cost = bench.one_process_per_core([point.config for point in points])
    assert cost.nll == {point.run_id: 1.5 for point in points} and cost.wall_s > 0 < cost.cpu_s


def test_each_run_has_a_process_and_the_last_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    children(monkeypatch, ECHO.format(noise=True))
    points = load_study("lr", "mini", ["seed.init=0", "seed.data=0"]).points[:2]
    assert bench.one_process_each([point.config for point in points]).nll == {p.run_id: 1.5 for p in points}


@pytest.mark.parametrize("way", [bench.one_process_each, bench.one_process_per_core])
def test_process_that_ends_without_a_result_is_an_error(monkeypatch: pytest.MonkeyPatch, way) -> None:
    """Else a baseline that does not run would look fast."""
    children(monkeypatch, "import sys; sys.stdin.readline(); sys.exit(1)")
    with pytest.raises(bench.Broken, match="without a result"):
        way([load_study("lr", "mini").points[0].config])


def test_memory_of_children_and_their_children_is_watched() -> None:
    allocate = "x = bytearray(200 << 20); import time; time.sleep(1)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {allocate!r}])"
    cost = bench.Cost()
    with bench.measured(cost) as running:
        running.append(subprocess.Popen([sys.executable, "-c", parent]))
        running[0].wait()
    assert cost.peak_mib > 200 and cost.wall_s >= 1


@pytest.mark.parametrize(
    ("words", "said"), [(["optim.lrr=3"], "did you mean optim.lr?"), (["--study=no"], "not known")]
)
def test_mistake_is_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: ")


def test_rounds_are_written_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the second round, the first is there."""
    calls: list[str] = []

    def way(name: str, cost: bench.Cost) -> bench.Cost:
        calls.append(name)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return cost

    monkeypatch.setattr(bench, "one_process_each", lambda configs: way("b0", bench.Cost(wall_s=3.0)))
    monkeypatch.setattr(bench, "one_process_per_core", lambda configs: way("b2", bench.Cost(wall_s=2.0)))
    monkeypatch.setattr(bench, "whole_command", lambda study, words: way("ours", bench.Cost(wall_s=1.0)))
    with pytest.raises(KeyboardInterrupt):
        bench.main(["seed.init=0", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "bench.json").read_text())
    assert calls == ["b0", "b2", "ours", "b0"] and len(found["rounds"]) == 1
    assert found["rounds"][0]["ours"]["wall_s"] == 1.0 and found["num_sampled"] == -(-found["num_runs"] // bench.SAMPLE)
