"""Faults that take a cluster minutes to notice, or that take a daemon away."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paced_study import CLUSTER, paced_batch, paced_configs
from private_cluster import PrivateCluster
from test_faults import check_complete, following, notes, said, steps_of, wait_for

from slurm import follow
from slurm.cancel import cancel
from slurm.follow import Follower
from slurm.states import SAID, Fate, Job, fate
from slurm.status import lines

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_preempted_study_resumes(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    study = paced_batch(store_root, paced_configs(steps=40), replace(CLUSTER, partition="low"))
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        cluster.sh("sbatch", "--partition=main", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null",
                   "--wrap", "sleep 2")  # fmt: skip
    check_complete(study)
    assert notes(study).count("resumed from step") == 4 and not said(study, "lost")
    assert len(study.ledger.entries()) == 1


def test_time_limit_is_the_normal_life_of_a_long_run(paced: None, store_root: Path) -> None:
    """Two minutes of steps under a limit of one: warned, checkpointed, requeued, until it is done."""
    brief = replace(CLUSTER.classes[0], time_min=1, runs_per_task=1)
    study = paced_batch(store_root, paced_configs(num=2, steps=100, step_s=1.0), replace(CLUSTER, classes=(brief,)))
    with following(study):
        pass
    check_complete(study)
    assert "resumed from step" in notes(study) and not said(study, "failed")


def test_killed_step_daemon_is_noticed_by_the_node(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    """The only step of a job is its batch step: its daemon dies, and Slurm, which learns it when the node registers,
    requeues the job. The task goes on as an orphan and keeps its lock: what is started for it waits."""
    study = paced_batch(store_root, paced_configs(steps=90, step_s=0.4))
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        os.kill(cluster.step_daemon_pids()[0], signal.SIGKILL)
        time.sleep(12)  # BatchStartTimeout: a younger job may still be on its way to its node
        cluster.sh("scontrol", "reconfigure")  # every node registers, as each does once in a while
        logs = [study.ledger.log_path(study.ledger.entries()[0], k) for k in range(4)]
        wait_for(lambda: any("start 1" in log.read_text() for log in logs), limit_s=80)
    check_complete(study)
    assert "resumed from step" not in notes(study) and any("kind=busy" in log.read_text() for log in logs)


@pytest.mark.parametrize("alive", [True, False])
def test_killed_batch_step_with_its_daemon(study: Follower, cluster: PrivateCluster, alive: bool) -> None:
    """The batch step is the task itself; ``alive`` False: its daemon dies too, so that nobody can report it."""
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        daemon = cluster.step_daemon_pids()[0]
        (task,) = cluster.children(daemon)
        if not alive:
            os.kill(daemon, signal.SIGKILL)
        os.kill(task, signal.SIGKILL)
    check_complete(study)
    assert "resumed from step" in notes(study)


def test_node_down_moves_its_runs(study: Follower, cluster: PrivateCluster) -> None:
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        cluster.fail_node("n2")
    check_complete(study)
    assert "resumed from step" in notes(study)


def test_dead_node_daemon_with_its_task_alive(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    """The task of a node that Slurm has given up still writes; the one that replaces it waits for it."""
    study = paced_batch(store_root, paced_configs(steps=100, step_s=0.3))
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        cluster.kill("slurmd.n3")
    check_complete(study)
    assert any("start 1" in study.ledger.log_path(study.ledger.entries()[0], k).read_text() for k in range(4))


def test_dead_node_whose_locks_have_expired(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    """As above, on a file system that gave the locks of the dead node up: two tasks write, one of them in vain."""
    study = paced_batch(store_root, paced_configs(steps=100, step_s=0.3))
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        cluster.kill("slurmd.n3")
        (entry,) = study.ledger.entries()
        where = dict(line.split() for line in cluster.sh("squeue", "-h", "-r", "-o", "%K %N").splitlines())
        (task,) = (int(k) for k, node in where.items() if node == "n3")
        log = study.ledger.log_path(entry, task)

        def expire() -> bool:
            """Put other files with the same words in place of the locks: nobody holds them."""
            for lock in (store_root / run / "lock" for run in entry.tasks[task]):
                if lock.exists():
                    shutil.copy(lock, lock.with_name("copy"))
                    lock.with_name("copy").replace(lock)
            return "start 1" in log.read_text()

        wait_for(expire, limit_s=90)
    check_complete(study)
    assert "taken over by pid" in log.read_text()


def test_controller_is_killed_and_comes_back(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    study = paced_batch(store_root, paced_configs(step_s=0.3))
    with following(study):
        wait_for(lambda: steps_of(study) > 10)
        cluster.save_state(study.ledger.entries()[0].job_id)
        cluster.kill("slurmctld")
        begun = time.monotonic()
        assert "what follows is from the store alone" in lines(study.batch.root)[0]
        assert time.monotonic() - begun < 11  # slurm.status.STATUS_CALL_S
        time.sleep(8)
        cluster.start("slurmctld")
    check_complete(study)
    assert len(study.ledger.entries()) == 1 and not said(study, "lost")


def test_controller_forgets_its_newest_job(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    """It was killed before it had written the job down; the tasks run on, and are submitted again."""
    state, earlier = cluster.dir / "state", cluster.dir / "earlier"
    shutil.copytree(state, earlier)
    study = paced_batch(store_root, paced_configs(step_s=0.3))
    with following(study):
        wait_for(lambda: steps_of(study) > 10)
        cluster.kill("slurmctld")
        shutil.rmtree(state)
        earlier.rename(state)
        cluster.start("slurmctld")
    check_complete(study)
    assert any("Slurm lost its job" in cause for cause in said(study, "lost"))


@pytest.mark.parametrize("forgetful", [False, True])
def test_accounting_is_down_all_the_time(
    study: Follower, cluster: PrivateCluster, forgetful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``forgetful``: a controller with a short MinJobAge forgets at once who has ended, so that nobody knows."""
    if forgetful:
        whole = study.client.queue

        def queue() -> dict[str, Job]:
            return {
                name: Job(job.job_id, {k: seen for k, seen in job.elements.items() if fate(seen) is Fate.alive})
                for name, job in whole().items()
            }

        monkeypatch.setattr(study.client, "queue", queue)
    cluster.kill("slurmdbd")
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        os.kill(cluster.job_pids("-m paced")[0], signal.SIGKILL)
    check_complete(study)
    assert {SAID[Fate.unknown] if forgetful else SAID[Fate.died]} == {
        cause.partition(" (")[0].partition(";")[0] for cause in said(study, "lost")
    }


def test_whole_array_cancelled(study: Follower, cluster: PrivateCluster) -> None:
    with following(study):
        wait_for(lambda: steps_of(study) > 20)
        num_tasks, jobs = cancel(study.batch.root, "paced")
        assert num_tasks == 4 and len(jobs) == 1
    assert len(said(study, "failed")) == 12 and "12 cancelled" in lines(study.batch.root)[0]
    again = paced_batch(study.batch.root)
    with following(again):
        pass
    check_complete(again)
    assert "resumed from step" in notes(again)  # what was told to end had checkpointed


def test_memory_death_goes_one_class_up_once(paced: None, store_root: Path) -> None:
    """Slurm looks at the memory of a task once a second, later on a busy machine: the runs are long enough."""
    configs = paced_configs(num=2, step_s=0.5, sampling=99)
    roomy = replace(CLUSTER.classes[0], runs_per_task=1)
    study = paced_batch(store_root, configs, replace(CLUSTER, classes=(roomy, CLUSTER.classes[1])))
    with following(study):
        pass
    check_complete(study)
    assert ["out of memory" in cause and "in class small; trying again in class large" in cause
            for cause in said(study, "lost")] == [True, True]  # fmt: skip
    small, *large = study.ledger.entries()  # two arrays if the deaths were seen one after the other
    assert small.resources == "small" and sorted(r for e in large for t in e.tasks for r in t) == sorted(configs)
    assert {entry.resources for entry in large} == {"large"}


def test_memory_death_in_the_largest_class_is_the_end(paced: None, store_root: Path) -> None:
    configs = paced_configs(num=1, step_s=0.5, sampling=99)
    study = paced_batch(store_root, configs, replace(CLUSTER, classes=CLUSTER.classes[:1]))
    with following(study):
        pass
    (cause,) = said(study, "failed")
    assert cause.startswith("out of memory") and cause.endswith("in class small, the largest")


def test_run_that_cannot_be_trained_fails_once(paced: None, store_root: Path) -> None:
    study = paced_batch(store_root, paced_configs(num=3, sampling=98))
    with following(study):
        pass
    assert said(study, "failed") == ["RuntimeError: cannot be trained"] * 3 and len(study.ledger.entries()) == 1


@pytest.mark.parametrize("trouble", ["read-only", "full"])
def test_store_in_trouble_for_twenty_seconds(
    paced: None, cluster: PrivateCluster, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(follow, "_say", told.append)
    said_of = {"full": "the disk is full", "read-only": "read-only file system"}
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", mount], check=False).returncode:
        pytest.skip("may not mount")
    try:
        patient = replace(CLUSTER, retry_pause_s=8.0)
        study = paced_batch(mount / "runs", paced_configs(steps=100), patient)
        with following(study):
            wait_for(lambda: steps_of(study) > 60)
            if trouble == "full":
                with (mount / "ballast").open("wb", buffering=0) as file:
                    for size in [1 << 20] * 256 + [4096] * 256:
                        with contextlib.suppress(OSError):
                            file.write(b"x" * size)
                assert shutil.disk_usage(mount).free < 4096
            else:  # on top of itself: what is written to already cannot be made read-only
                subprocess.run(["mount", "--bind", mount, mount], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", mount], check=True)
                with pytest.raises(OSError, match="Read-only"):
                    (mount / "probe").touch()
            wait_for(lambda: "asking again for up to" in "".join(told))
            assert "store: cannot use" in told[-1] and said_of[trouble] in told[-1]
            time.sleep(20)
            (mount / "ballast").unlink() if trouble == "full" else subprocess.run(["umount", "-l", mount], check=True)
        check_complete(study)
        assert "all answer again after" in told[-1] and said(study, "lost")
    finally:
        while mount.is_mount():  # the read-only one too, if the test ended below it
            subprocess.run(["umount", "-l", mount], check=True)
