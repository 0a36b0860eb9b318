"""Real sweeps of a tiny grid: real workers, real training, real kills."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import manifests, store
from experiments.config import encode
from experiments.run import execute
from sweeps import grid, launch, status
from sweeps.pool import Event, run_all

pytestmark = pytest.mark.sweep


@pytest.fixture
def study(tiny_study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A study of 12 runs: two arms, three LRs, two seeds."""
    sweeps = tmp_path / "sweeps"
    sweeps.mkdir()
    (sweeps / "tiny.yaml").write_text(yaml.safe_dump(tiny_study))
    monkeypatch.setattr(grid, "SWEEPS_DIR", sweeps)
    return "tiny"


def test_sweep_runs_once_then_draws_the_same_bytes(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from analysis.figures.__main__ import main as draw

    root = tmp_path / "runs"
    assert launch.main([study, "--dry"]) == 0
    assert "12 runs, 12 to do" in capsys.readouterr().out and not list(root.glob("tiny-*"))
    assert launch.main([study]) == 0
    summaries = {path: path.stat().st_mtime_ns for path in root.glob("*/summary.json")}
    assert len(summaries) == 12
    assert draw(["tiny", "--root", str(root)]) == 0
    first = {p.name: p.read_bytes() for p in (root / "figures" / "tiny-mini").iterdir()}
    assert {"lr.png", "lr.svg", "lr.pdf", "curves.png", "optimum.json", "runs.csv"} <= set(first)
    capsys.readouterr()
    assert launch.main([study]) == 0
    assert "12 done already, 0 to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in root.glob("*/summary.json")} == summaries
    assert draw(["tiny", "--root", str(root)]) == 0
    assert {p.name: p.read_bytes() for p in (root / "figures" / "tiny-mini").iterdir()} == first
    assert status.main(["--root", str(root)]) == 0
    assert re.search(r"tiny\s+mini\s+12\s+12", capsys.readouterr().out)


def test_killed_worker_resumes_bit_for_bit(study: str, tmp_path: Path) -> None:
    """kill -9 in mid-run: the pool starts another worker, which goes on from the checkpoint."""
    extra = ["optim.steps=200", "launch.checkpoint_every_s=0.2", "launch.workers=1"]
    point = grid.load_study(study, "mini", extra).points[0]
    straight = grid.load_study(study, "mini", [*extra, f"launch.root={tmp_path / 'b'}"])
    expected = execute(point.config, straight.launch)["metrics"]
    killed, events = [], []
    root = tmp_path / "runs"
    launched = grid.load_study(study, "mini", extra).launch

    def on_event(event: Event) -> None:
        events.append(event)
        sound = list(root.glob("*/checkpoints/*/SOUND.json"))
        if event.kind == "step" and event.detail["step"] >= 20 and sound and not killed:
            owner = int(re.findall(r"pid (\d+)", (root / event.run / "lock").read_text())[0])
            os.kill(owner, signal.SIGKILL)
            killed.append(owner)

    run_all([point], launched, on_event)
    kinds = Counter(event.kind for event in events)
    assert killed and kinds["lost"] == 1 and kinds["finished"] == 1
    summary = store.read_json(root / point.run_id / "summary.json")
    assert summary["metrics"] == expected and summary["notes"][-1].startswith("resumed from step")
    files = [base / point.run_id / "metrics.jsonl" for base in (root, tmp_path / "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_two_sweeps_at_once_train_nothing_twice(study: str) -> None:
    loaded = grid.load_study(study, "mini", ["launch.workers=1"])
    trained: list[tuple[str, int]] = []
    ends: list[list[str]] = [[], []]

    def run(k: int) -> None:
        def on_event(event: Event) -> None:
            if event.kind == "step":
                trained.append((event.run, event.detail["step"]))
            elif event.kind in ("finished", "diverged", "failed"):
                ends[k].append(event.run)

        run_all(loaded.points, loaded.launch, on_event)

    threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(Counter(trained).values()) == 1
    assert [sorted(names) for names in ends] == [sorted(p.run_id for p in loaded.points)] * 2
    records, left_out = store.scan(Path(loaded.launch.root))
    assert {record.state for record in records} == {"done"} and not left_out


def test_one_failed_run_stops_no_other(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    points = grid.load_study(study, "mini").points
    unwritable, torn, hollow = points[5].run_id, points[8].run_id, points[2].run_id
    (root / unwritable / "metrics.jsonl").mkdir(parents=True)  # this run cannot write its metrics
    (root / torn).mkdir()
    (root / torn / "config.json").write_text("{")
    (root / hollow).mkdir()
    document = {"format": store.FORMAT, "run_id": hollow, "config": encode(points[2].config)}
    store.write_json(root / hollow / "config.json", document)
    (root / hollow / "summary.json").write_text("{}")
    assert launch.main([study, "--dry"]) == 0
    out = capsys.readouterr().out
    assert "12 runs, 12 to do" in out and len(re.findall(r" damaged\s*$", out, re.MULTILINE)) == 2
    assert "config.json: damaged: not valid JSON" in out and "summary.json: damaged: outcome: missing" in out
    assert launch.main([study]) == 1
    error = capsys.readouterr().err
    assert f"failed: {unwritable}: store: cannot use" in error and ".log" in error
    assert f"failed: {torn}: " in error and "not valid JSON" in error
    assert f"failed: {hollow}: " in error and "summary.json: damaged: outcome: missing" in error
    assert len(list(root.glob("*/summary.json"))) == 9 + 1
    assert launch.main([study, "--dry"]) == 0 and "12 runs, 3 to do" in capsys.readouterr().out
    other = root / points[0].run_id / "config.json"
    other.write_text(other.read_text().replace('"beta2": 0.95', '"beta2": 0.5'))  # as if a default had changed
    assert launch.main([study]) == 2
    assert "optim.beta2: 0.5 in the store, 0.95 asked for" in capsys.readouterr().err
    other.write_text(other.read_text().replace('"beta2": 0.5', '"beta2": 0.95'))
    config = root / torn / "config.json"
    config.write_text('{"format": 99}')
    assert launch.main([study]) == 2  # a newer version's store is not touched at all
    assert "newer version" in capsys.readouterr().err and config.read_text() == '{"format": 99}'


def test_bad_input_starts_nothing(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for extra, said in (
        (["optim.lr=0"], "optim.lr: 0.0 is not allowed"),
        (["model.path=/nowhere"], "model.path: '/nowhere' cannot be loaded"),
        (["optim.lrr=1"], "did you mean optim.lr?"),
        (["data.path=/nowhere"], "data.path: '/nowhere' cannot be read"),
        (["--cluster", "moon"], "cluster: 'moon' is not allowed"),
        (["--scale", "huge"], "scale: 'huge' is not allowed"),
    ):
        assert launch.main([study, *extra]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and said in error
    assert not list(tmp_path.glob("runs/tiny-*"))


def test_dry_run_names_what_it_cannot_read_and_refuses_what_a_launch_refuses(
    study: str, tmp_path: Path, forbid: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    points = grid.load_study(study, "mini").points
    for point in points[:3]:
        (root / point.run_id).mkdir(parents=True)
        document = {"format": store.FORMAT, "run_id": point.run_id, "config": encode(point.config)}
        store.write_json(root / point.run_id / "config.json", document)
    (root / points[0].run_id / "failure.json").write_text('{"cau')
    forbid(root / points[1].run_id)
    forbid(root / points[2].run_id / "config.json")
    assert launch.main([study, "--dry"]) == 0
    out = capsys.readouterr().out
    assert "12 runs, 12 to do" in out and len(re.findall(r" damaged\s*$", out, re.MULTILINE)) == 2
    assert f"{points[0].run_id}/failure.json: damaged: " in out
    assert sum("permission denied" in line for line in out.splitlines()) == 2
    file = root / points[0].run_id / "config.json"
    file.write_text(file.read_text().replace('"beta2": 0.95', '"beta2": 0.5'))
    assert launch.main([study, "--dry"]) == 2
    assert "optim.beta2: 0.5 in the store" in capsys.readouterr().err


def test_unusable_store_stops_a_launch_before_anything_starts(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    newer = '{"format": 99}'
    for name, content in (("logs", ""), ("studies", ""), (f"studies/{study}-mini.json", newer)):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        assert launch.main([study]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 2 and error[1].startswith("error: ") and str(path) in error[1]  # after the counts
        assert path.read_text() == content and not list(root.glob("tiny-*"))
        path.unlink()


def test_unusable_worker_log_is_one_line(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "logs" / "worker-0.log").mkdir(parents=True)
    assert launch.main([study]) == 2
    assert "worker-0.log: Is a directory" in capsys.readouterr().err.splitlines()[-1]


def test_overrides_make_a_study_of_their_own(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``ARGS`` for a quick look must not change what ``make figures`` shows as the study."""
    from analysis.figures.__main__ import main as draw

    root = tmp_path / "runs"
    plain = grid.load_study(study, "mini", ["launch.workers=1"])
    assert (plain.name, plain.title) == ("tiny", "Tiny")
    manifests.write_study(root, plain.name, plain.scale, plain.manifest())
    manifest = (root / "studies" / "tiny-mini.json").read_bytes()
    overrides = ["seed.init=0", "optim.steps=4"]
    name = "tiny+optim.steps=4+seed.init=0"
    assert launch.main([study, *overrides]) == 0
    assert f"{name} (mini): 6 runs" in capsys.readouterr().err
    assert (root / "studies" / "tiny-mini.json").read_bytes() == manifest
    assert manifests.read_study(root, name, "mini")["title"] == f"Tiny ({name})"
    assert draw([study, "--root", str(root), "--overrides", *overrides]) == 0
    drawn = {path: path.stat().st_mtime_ns for path in (root / "figures" / f"{name}-mini").iterdir()}
    assert len(drawn) > 6 and not (root / "figures" / "tiny-mini").exists()
    assert draw(["--root", str(root)]) == 0
    assert all(path.stat().st_mtime_ns > then for path, then in drawn.items())
    assert status.main(["--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^ {re.escape(name)} +mini +6 +6 ", out, re.MULTILINE)
    assert re.search(r"^ tiny +mini +12 +0 ", out, re.MULTILINE)


def made(*words: str) -> subprocess.CompletedProcess[str]:
    """What ``make`` would run, without the flags of the ``make test`` that runs this, which print more lines."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", "-n", *words], cwd=grid.SWEEPS_DIR.parent, env=env, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_draws_the_study_that_it_launched() -> None:
    printed = made("sweep-lr", "ARGS=optim.steps=4 seed.init=0", "ROOT=elsewhere", "SCALE=smol").stdout
    launched, drawn = printed.strip().splitlines()[-1].split(" && ")
    assert "sweeps.launch lr" in launched and launched.endswith("launch.root=elsewhere optim.steps=4 seed.init=0")
    assert "analysis.figures" in drawn and drawn.endswith("lr --scale smol --overrides optim.steps=4 seed.init=0")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_root_that_the_figures_would_not_know_is_refused() -> None:
    done = made("sweep-lr", "ARGS=optim.steps=4 launch.root=elsewhere")
    assert done.returncode == 2 and "ARGS: launch.root is not allowed; give ROOT=DIR" in done.stderr
