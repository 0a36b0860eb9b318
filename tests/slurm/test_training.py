"""Real training as jobs: the same bytes as on this machine, also after interruptions."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from private_cluster import PrivateCluster

from experiments import store
from experiments.run import execute
from slurm import cluster as profiles
from slurm.collect import collect
from slurm.ledger import Ledger
from sweeps import grid, launch, status

pytestmark = pytest.mark.slurm
PROVENANCE = ("time", "time_unix_s", "notes")
WHERE_AND_WHEN = ("argv", "host", "time_unix_s")
"""Of provenance.json: the rest must not depend on who launched a run."""


@pytest.fixture
def study(cluster: PrivateCluster, tiny_study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A study of 12 tiny runs, and a profile called ``private`` for the private cluster."""
    profile = {
        "poll_s": 1, "lost_s": 20, "retry_pause_s": 1, "signal_s": 30, "spare_gib": 0.01,
        "classes": {"cpu": {"memory_gib": 1, "time_min": 10, "runs_per_task": 3}},
    }  # fmt: skip
    for name, content in (("sweeps/tiny.yaml", tiny_study), ("cluster/private.yaml", profile)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(yaml.safe_dump(content))
    monkeypatch.setattr(grid, "SWEEPS_DIR", tmp_path / "sweeps")
    monkeypatch.setattr(profiles, "PROFILES_DIR", tmp_path / "cluster")
    return "tiny"


def uninterrupted(run: str, root: Path, elsewhere: Path, study: str, extra: list[str]) -> tuple[dict, bytes]:
    """What this machine makes of a run of the study."""
    loaded = grid.load_study(study, "mini", [*extra, f"launch.root={elsewhere}"])
    (config,) = [point.config for point in loaded.points if point.run_id == run]
    execute(config, loaded.launch)
    return science(elsewhere / run)


def science(run: Path) -> tuple[dict, bytes]:
    summary = store.read_summary(run)
    assert summary is not None
    return {k: v for k, v in summary.items() if k not in PROVENANCE}, (run / "metrics.jsonl").read_bytes()


def files_of(run: Path) -> dict[str, Any]:
    """Every file that a finished run leaves, its bytes apart from times, hosts and command lines."""
    files: dict[str, Any] = {p.name: p.read_bytes() for p in run.iterdir() if p.name != "lock"}
    for name, left_out in (("summary.json", ("time", "time_unix_s")), ("provenance.json", WHERE_AND_WHEN)):
        files[name] = json.dumps({k: v for k, v in json.loads(files[name]).items() if k not in left_out})
    return files


def test_jobs_make_the_same_bytes_as_the_local_launcher(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, local = tmp_path / "runs", tmp_path / "local"
    assert launch.main([study, "--cluster", "private"]) == 0
    said = capsys.readouterr().err
    assert "12 runs, 0 done already, 12 to do" in said and "12 submitted in 4 tasks" in said and "[12/12]" in said
    assert collect(root, study, "mini") == (12, [])
    (entry,) = Ledger(root).entries()
    nodes = {Ledger(root).log_path(entry, k).read_text().split(" on ")[1].split(":")[0] for k in range(4)}
    assert nodes == {"n1", "n2", "n3", "n4"}
    assert launch.main([study, "--cluster", "local", "launch.workers=2", f"launch.root={local}"]) == 0
    assert "submitted" not in capsys.readouterr().err and Ledger(local).places() == {}
    run_ids = sorted(run for runs in entry.tasks for run in runs)
    assert len(run_ids) == 12 and run_ids == sorted(p.parent.name for p in local.glob("*/summary.json"))
    for run in run_ids:
        assert files_of(root / run) == files_of(local / run)
    assert launch.main([study, "--cluster", "private"]) == 0
    assert "12 done already, 0 to do" in capsys.readouterr().err and len(Ledger(root).entries()) == 1
    assert status.main(["--root", str(root)]) == 0
    assert re.search(r"tiny\s+mini\s+12\s+12", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["requeue", "warning", "warning-to-two", "preemption"])
def test_interrupted_training_ends_with_the_same_bytes(
    study: str, tmp_path: Path, cluster: PrivateCluster, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A requeue from outside, USR2 as before the time limit, and a job of a higher partition that wants the nodes."""
    root, extra = tmp_path / "runs", ["optim.steps=300", "optim.lr=1e-3", "launch.checkpoint_every_s=1"]
    profile = tmp_path / "cluster" / "private.yaml"
    changed = profile.read_text() + "partition: low\n"
    if fault == "warning-to-two":
        extra.append("launch.processes=2")
        changed = changed.replace("memory_gib: 1", "memory_gib: 2.5")
    profile.write_text(changed)
    harmed = threading.Event()

    def harm() -> None:
        run = "*"
        while not list(root.glob(f"{run}/checkpoints/*/SOUND.json")):
            time.sleep(0.1)
            for entry in Ledger(root).entries():
                run = entry.tasks[0][0]  # the one that is harmed: another's checkpoint would not help it
        job = Ledger(root).entries()[0].job_id
        if fault == "requeue":
            cluster.sh("scontrol", "requeue", f"{job}_0")
        elif fault.startswith("warning"):
            cluster.sh("scancel", "--batch", "--signal=USR2", f"{job}_0")
        else:
            cluster.sh("sbatch", "--partition=main", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null",
                       "--wrap", "sleep 2")  # fmt: skip
        harmed.set()

    thread = threading.Thread(target=harm, daemon=True)
    thread.start()
    assert launch.main([study, "--cluster", "private", *extra]) == 0
    assert harmed.is_set() and "resumed from step" in capsys.readouterr().err
    runs = [p.parent for p in root.glob("*/summary.json")]
    resumed = [run for run in runs if "resumed" in " ".join((store.read_summary(run) or {})["notes"])]
    assert len(runs) == 4 and resumed and len(Ledger(root).entries()) == 1
    for run in resumed:
        assert science(run) == uninterrupted(run.name, root, tmp_path / "here", study, extra)


def test_where_a_study_runs(cluster: PrivateCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``auto`` submits on a login node and nowhere else."""
    chosen = profiles.choose("auto")
    assert chosen is not None and chosen.name == profiles.DEFAULT_PROFILE and profiles.choose("local") is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # an interactive job: it has its machine already
    assert profiles.choose("auto") is None
    monkeypatch.delenv("SLURM_JOB_ID")
    if not Path("/etc/slurm/slurm.conf").exists():
        monkeypatch.delenv("SLURM_CONF")  # Slurm's programs, but no cluster
        assert profiles.choose("auto") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profiles.choose("auto") is None
