"""Which runs the benchmark of all studies holds against ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments import store
from sweeps import bench, bench_studies
from sweeps.grid import load_study


@pytest.mark.parametrize(("study", "lengths"), [("lr", 1), ("rank", 2), ("length", 5)])
def test_every_plotted_point_is_a_run_of_its_length(study: str, lengths: int) -> None:
    loaded = load_study(study, "mini")
    runs = bench_studies.as_runs(loaded)
    assert len(set(runs)) == len(runs) == lengths * len(loaded.points)
    assert {point.config for point in loaded.points} <= set(runs)
    assert len({config.optim.steps for config in runs}) == lengths


def test_both_ways_are_timed_and_a_stopped_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "studies" / "some-run"

    def make(command: list[str], **options: object) -> subprocess.Popen:
        if command[:3] != ["make", "-s", "studies"]:
            return real(command, **options)  # provenance asks git
        assert f"ROOT={tmp_path}/studies" in command
        made.mkdir(parents=True, exist_ok=True)
        store.write_json(made / "config.json", {})
        store.write_json(made / "summary.json", {"metrics": {"test/nll_nats": 2.0}})
        return real(["true"])

    real = subprocess.Popen
    monkeypatch.setattr(bench_studies.subprocess, "Popen", make)
    timed: list[int] = []
    monkeypatch.setattr(bench_studies, "one_process_per_core", lambda runs: timed.append(len(runs)) or bench.Cost(7.0))
    for whole in (True, False):
        assert bench_studies.main(["--out", str(tmp_path)]) == 0
        found = store.read_json(tmp_path / "bench.json")["studies"]
        assert found["whole"] is whole and found["ours"]["nll"] == {"some-run": 2.0} and found["b2"]["wall_s"] == 7.0
        assert timed[-1] == found["num_sampled"] == -(-found["num_runs"] // bench_studies.SAMPLE)


def test_a_command_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "make").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setattr(bench_studies, "one_process_per_core", lambda runs: bench.Cost())
    assert bench_studies.main(["--out", str(tmp_path)]) == 2
    assert "ended with exit code 1" in capsys.readouterr().err
