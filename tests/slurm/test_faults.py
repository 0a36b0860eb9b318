"""A live study of twelve runs over four nodes, and what clusters do to it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from paced import final_value
from paced_study import CLUSTER, paced_batch, paced_configs
from private_cluster import PrivateCluster

from experiments import store
from slurm import follow
from slurm.cancel import cancel
from slurm.collect import collect
from slurm.follow import Follower
from slurm.ledger import Ledger
from slurm.status import lines

pytestmark = pytest.mark.slurm


def wait_for(condition: Callable[[], object], limit_s: float = 40) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(0.05)


@contextmanager
def following(study: Follower) -> Iterator[None]:
    """The launcher at work while the block does harm; afterwards it has come to its end."""
    study.start()
    errors: list[BaseException] = []

    def follow() -> None:
        try:
            study.follow()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    except BaseException:
        study.open.clear()
        raise
    finally:
        thread.join(timeout=150)
        study.open.clear()
    assert not thread.is_alive() and not errors, errors


def elements(study: Follower) -> list[str]:
    return [f"{e.job_id}_{k}" for e in study.ledger.entries() for k in range(len(e.tasks))]


def check_complete(study: Follower) -> None:
    """Every run done with the result of an uninterrupted one, each said once, nothing half-written."""
    assert not said(study, "failed")
    configs = study.batch.configs
    records, left_out = store.scan(study.batch.root)
    assert not left_out and {r.run_id: r.state for r in records} == dict.fromkeys(configs, "done")
    assert {r.run_id: r.summary["metrics"]["test/nll_nats"] for r in records if r.summary} == {
        run: float(final_value(config)) for run, config in configs.items()
    }
    for run in configs:
        rows, notes = store.read_metrics(study.batch.root / run)
        assert not notes and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    ends = [run for kind, run, _ in study.events if kind in ("finished", "failed")]  # type: ignore[attr-defined]
    assert sorted(ends) == sorted(configs)


def steps_of(study: Follower) -> int:
    return sum(len(store.read_metrics(study.batch.root / run)[0]) for run in study.batch.configs)


def said(study: Follower, kind: str) -> list[str]:
    return [detail["cause"] for k, _, detail in study.events if k == kind]  # type: ignore[attr-defined]


def notes(study: Follower) -> str:
    return " ".join(note for r in store.scan(study.batch.root)[0] if r.summary for note in r.summary["notes"])


def test_requeued_task_goes_on_from_its_checkpoint(paced: None, cluster: PrivateCluster, store_root: Path) -> None:
    study = paced_batch(store_root, paced_configs(step_s=0.3))  # long enough to be hit on a busy machine
    with following(study):
        wait_for(lambda: steps_of(study) > 20)
        cluster.sh("scancel", "--batch", "--signal=USR2", elements(study)[2])  # as before a time limit
        for element in elements(study)[:2]:
            cluster.sh("scontrol", "requeue", element)
        wait_for(lambda: "checkpointed and requeued" in study.ledger.log_path(study.ledger.entries()[0], 2).read_text())
    check_complete(study)
    assert not said(study, "lost") and len(study.ledger.entries()) == 1
    assert len(re.findall("resumed from step", notes(study))) >= 3


def test_killed_task_is_tried_again(study: Follower, cluster: PrivateCluster) -> None:
    with following(study):
        wait_for(lambda: steps_of(study) > 28)
        os.kill(cluster.job_pids("-m paced")[0], signal.SIGKILL)
    check_complete(study)
    assert said(study, "lost") and all("its job died" in cause for cause in said(study, "lost"))
    assert "resumed from step" in notes(study) and len(study.ledger.entries()) == 2


def test_cancelled_elements_are_said_and_come_back_with_the_same_command(
    paced: None, cluster: PrivateCluster, store_root: Path
) -> None:
    crowded = replace(CLUSTER, at_once=2)
    first = paced_batch(store_root, paced_configs(steps=10, step_s=0.06), crowded)
    with following(first):
        wait_for(lambda: steps_of(first) > 2)
        cluster.sh("scancel", elements(first)[3])  # pending: it leaves the queue without a record
        cluster.sh("scancel", elements(first)[0])  # running
        wait_for(lambda: "cancelled" in " ".join(said(first, "failed")))
    causes = Counter(said(first, "failed"))
    assert list(causes) == ["cancelled in Slurm; the same command submits it again"] and 5 <= sum(causes.values()) <= 6
    assert not said(first, "lost")
    num_done, missing = collect(store_root, "paced", "mini")
    assert num_done == 12 - len(missing) and all("cancelled" in line for line in missing)
    assert f"{len(missing)} cancelled" in " ".join(lines(store_root))
    again = paced_batch(store_root, {r: c for r, c in first.batch.configs.items()
                                     if not (store_root / r / "summary.json").exists()})  # fmt: skip
    with following(again):
        pass
    assert sorted(r for e in Ledger(store_root).entries()[1:] for t in e.tasks for r in t) == sorted(
        again.batch.configs
    )
    assert collect(store_root, "paced", "mini") == (12, [])


def launcher(root: Path, step_s: float = 0.1, *setup: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("paced_study.py")), str(root), str(step_s), *setup]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path.cwd()}"})  # fmt: skip


def events(output: str) -> list[list]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")]


def test_killed_launcher_is_taken_up_by_the_same_command(paced: None, store_root: Path) -> None:
    first = launcher(store_root)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith('["submitted"'):
            break
    first.kill()
    first.wait()
    (entry,) = Ledger(store_root).entries()
    entry.job_id = 0  # as if it had died between sbatch and its own note
    Ledger(store_root).save(entry)
    second = launcher(store_root)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert "12 runs in the queue already, 0 submitted" in output
    assert len({run for kind, run, _ in events(output) if kind == "finished"}) == 12
    assert len(Ledger(store_root).entries()) == 1


def test_two_launchers_submit_nothing_twice(paced: None, store_root: Path) -> None:
    launchers = [launcher(store_root, step_s=0.05) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    for output in outputs:
        assert len([run for kind, run, _ in events(output) if kind == "finished"]) == 12
    submitted = [run for entry in Ledger(store_root).entries() for runs in entry.tasks for run in runs]
    assert len(submitted) == len(set(submitted)) == 12


def test_1200_runs_are_queued_in_chunks_and_followed_gently(
    paced: None, cluster: PrivateCluster, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "TICK_S", 0.01)  # however eager the following is, the client is not
    few = replace(CLUSTER, at_once=1, poll_s=0.01, classes=(replace(CLUSTER.classes[0], runs_per_task=1),))
    configs = paced_configs(num=1200, steps=1)
    begun = time.monotonic()
    study = paced_batch(store_root, configs, few)
    study.start()
    submit_s = time.monotonic() - begun
    assert [len(entry.tasks) for entry in study.ledger.entries()] == [1001, 199]
    num_calls, begun = study.client.num_calls, time.monotonic()
    with following_only(study):
        time.sleep(6)
    calls_per_s = (study.client.num_calls - num_calls - 1) / (time.monotonic() - begun)  # a call at the very start
    status_s, cpu_s = min(timed_status(store_root) for _ in range(3))
    print(f"1,200 runs: submitted in {submit_s:.1f} s, {calls_per_s:.2f} calls a second, "
          f"status in {status_s:.2f} s ({cpu_s:.2f} s of a core)")  # fmt: skip
    assert submit_s < 20 and 0 < calls_per_s <= 1
    assert cpu_s < 2 and (status_s < 2 or status_s > 1.5 * cpu_s)  # others may have had the cores meanwhile
    num_tasks, jobs = cancel(store_root, "paced")
    assert num_tasks >= 1100 and len(jobs) == 2
    wait_for(lambda: not cluster.sh("squeue", "-h", "-o", "%i").split())


def timed_status(root: Path) -> tuple[float, float]:
    """Seconds of ``make status``, from the start of Python to its last line, and seconds of a core that it took."""
    begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "sweeps.status", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"paced\s+mini\s+1200", done.stdout) and re.search(r"1\d\d queued", done.stdout), done
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - begun, now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime


@contextmanager
def following_only(study: Follower) -> Iterator[None]:
    thread = threading.Thread(target=study.follow)
    thread.start()
    yield
    study.open.clear()
    thread.join(timeout=30)
