"""What is refused before anything is queued, by a real controller."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from paced_study import paced_configs
from private_cluster import PrivateCluster

from experiments.config import encode
from experiments.manifests import write_study
from slurm import cluster as profiles
from slurm import submit

pytestmark = pytest.mark.slurm


def test_impossible_studies_are_one_line_and_leave_the_queue_empty(
    cluster: PrivateCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "PROFILES_DIR", tmp_path)
    root, configs = tmp_path / "runs", paced_configs(3)
    write_study(root, "lr", "mini", {"title": "LR", "settings": {}, "run_ids": list(configs),
                                     "configs": {run: encode(c) for run, c in configs.items()}})  # fmt: skip
    small = {"memory_gib": 0.2}
    for change, said in (
        ({"classes": {"c": {"gpus": 1, "gpu_type": "moon"}}}, "class c is refused: sbatch: "),
        ({"classes": {"c": {"gpus": 3}}}, "launch.processes: 3 is not allowed; it must divide optim.batch_size (16)"),
        ({"classes": {"c": {"memory_gib": 9}}}, "class c is refused: sbatch: "),
        ({"classes": {"c": small}, "partition": "moon"}, "Invalid partition name specified"),
        ({"classes": {"c": {"memory_gib": 0.001}}}, "GiB of memory before activations; no class has that"),
        ({"classes": {"c": small}, "spare_gib": 1e9}, "checkpoints may take"),
    ):
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(change))
        assert submit.main(["lr", "--root", str(root), "--cluster", "p"]) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert error.startswith("error: ") and said in error
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({"classes": {"c": small}}))
    (root / "slurm" / "lock").unlink(missing_ok=True)
    (root / "logs" / "slurm").rmdir()
    (root / "logs" / "slurm").write_text("in the way")
    assert submit.main(["lr", "--root", str(root), "--cluster", "p"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: store: cannot use ") and "a file stands where a directory is needed" in error
    assert not cluster.sh("squeue", "-h", "-o", "%i") and not list((root / "slurm").glob("*.json"))
