"""The private cluster, once for the session, and a study of light runs that jobs can train in seconds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from paced_study import paced_batch
from private_cluster import PATH, PrivateCluster, missing_programs

from slurm import submit
from slurm.follow import Follower

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def private_cluster() -> Iterator[PrivateCluster]:
    missing = missing_programs()
    if missing:  # never a silent skip where it must be there
        (pytest.fail if os.environ.get("REQUIRE_SLURM") == "1" else pytest.skip)(f"not installed: {', '.join(missing)}")
    cluster = PrivateCluster()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the cluster's jobs would outlive the tests
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(private_cluster: PrivateCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateCluster]:
    """The cluster, idle and whole, and this process set up as a login node's."""
    monkeypatch.setenv("SLURM_CONF", private_cluster.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield private_cluster
    private_cluster.heal()


@pytest.fixture
def store_root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.fixture
def paced(cluster: PrivateCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs train with ``paced``: real claims, checkpoints and summaries, steps that only wait."""
    monkeypatch.setattr(submit, "TASK", "paced")


@pytest.fixture
def study(paced: None, store_root: Path) -> Follower:
    """A launcher of 12 runs of about two seconds, in four tasks."""
    return paced_batch(store_root)
