"""How often a lost run is tried again, over launches and killed launchers; what Slurm holds."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paced_study import CLUSTER, paced_batch
from private_cluster import PrivateCluster
from test_faults import check_complete, elements, events, following, launcher, said, steps_of, wait_for

from slurm import retries
from slurm.collect import collect
from slurm.follow import Follower
from slurm.holds import held_lines, release
from slurm.judge import Finding, Snapshot, judge
from slurm.ledger import Entry, Ledger, Place
from slurm.states import RETRIES, Fate, Job, Seen
from slurm.status import lines

CANNOT_START = "echo no such module >&2; exit 1"


def place(**fields: dict) -> Place:
    return Place(Entry("e", 1, "lr", "mini", "small", [["a", "b"], ["c"]], job_id=44, **fields), 0)


@pytest.mark.parametrize("cause", [fate for fate in RETRIES if fate is not Fate.memory])
def test_retries_of_a_cause_are_bounded(cause: Fate) -> None:
    for num in range(RETRIES[cause] + 1):
        verdict = retries.decide("a", place(spent={"a": {cause.value: num}}), Finding(cause), CLUSTER)
        assert verdict.again is (num < RETRIES[cause]) is not verdict.used_up
    assert f", {RETRIES[cause] + 1} times; the same command submits it again" in verdict.cause
    assert retries.decide("b", place(spent={"a": {cause.value: 99}}), Finding(cause), CLUSTER).again


def test_memory_goes_up_a_class_and_ends_in_the_largest() -> None:
    assert retries.decide("a", place(), Finding(Fate.memory), CLUSTER).again
    largest = Place(replace(place().entry, resources="large"), 0)
    verdict = retries.decide("a", largest, Finding(Fate.memory), CLUSTER)
    assert verdict.used_up and verdict.cause == "out of memory in class large, the largest"


def test_runs_own_failure_and_a_cancel_are_no_retries() -> None:
    assert retries.decide("a", place(), Finding(Fate.died, "ValueError: no", failed=True), CLUSTER).cause == (
        "ValueError: no"
    )
    verdict = retries.decide("a", place(), Finding(Fate.cancelled), CLUSTER)
    assert not verdict.again and not verdict.used_up


def test_death_is_charged_to_the_run_at_work() -> None:
    dead = place(deaths={"0": "died"}, spent={"a": {"died": 1, "node": 1}})
    assert retries.spent("a", dead, begun={"a"}) == {"died": 2, "node": 1}
    assert retries.spent("b", dead, begun={"a"}) == {}  # it had not begun
    assert retries.spent("b", dead, begun=set()) == {"died": 1}  # nothing ever began: the task cannot start
    assert retries.spent("b", place(deaths={"0": "returning"}), begun={"a"}) == {"returning": 1}
    assert retries.spent("c", Place(dead.entry, 1), begun=set()) == retries.spent("c", None, begun=set()) == {}


def test_what_is_held_is_said_once_for_each_array_and_reason(tmp_path: Path) -> None:
    at = place()
    reasons = {0: "JobHeldUser", 1: "JobHeldUser"}
    snapshot = Snapshot({"e": Job(44, {k: Seen("PENDING", reason) for k, reason in reasons.items()})})
    places = [at, at, Place(at.entry, 1)]
    assert held_lines(Ledger(tmp_path), places, snapshot) == [
        "slurm: job 44: 2 tasks held (JobHeldUser); to let them go on: scontrol release '44_[0-1]'"
    ]
    snapshot.queue["e"].elements = {0: Seen("PENDING", "Priority"), 1: Seen("PENDING", "JobHeldAdmin")}
    (line,) = held_lines(Ledger(tmp_path), places, snapshot)
    assert "an administrator's, who alone can release it" in line and line.endswith("scontrol release 44_1")
    assert release(44, [0, 1, 2, 5, 7, 8]) == "scontrol release '44_[0-2,5,7-8]'"


def test_task_that_a_launcher_took_out_of_the_queue_was_held_not_cancelled(tmp_path: Path) -> None:
    """A second launcher sees the cancelled element: nobody wanted the run to end."""
    cancelled = Seen("CANCELLED", "launch failed requeued held")
    assert judge(Ledger(tmp_path), place(deaths={"0": "held"}), "a", cancelled).fate is Fate.held
    assert judge(Ledger(tmp_path), place(), "a", cancelled).fate is Fate.cancelled
    for reason in ("launch failed requeued held", "launch_failed_requeued_held", "JobHoldMaxRequeue"):
        assert judge(Ledger(tmp_path), place(), "a", Seen("PENDING", reason)).fate is Fate.held
    assert judge(Ledger(tmp_path), place(), "a", Seen("PENDING", "JobHeldUser")).fate is Fate.alive


def test_death_that_slurm_has_forgotten_is_in_the_ledger(tmp_path: Path) -> None:
    """Typed a week later, the command knows that the run was given up."""
    given_up = place(deaths={"0": "died"}, spent={"a": {"died": RETRIES[Fate.died]}})
    finding = judge(Ledger(tmp_path), given_up, "a", None)
    assert finding.fate is Fate.died and retries.decide("a", given_up, finding, CLUSTER).used_up
    assert judge(Ledger(tmp_path), given_up, "a", Seen("RUNNING")).fate is Fate.alive  # it came back


@pytest.mark.slurm
def test_task_that_cannot_start_is_given_up_and_tried_anew_by_the_same_command(
    paced: None, store_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for launch in (1, 2):
        study = paced_batch(store_root, cluster=replace(CLUSTER, setup=(CANNOT_START,)))
        with following(study):
            pass
        entries = study.ledger.entries()
        assert [max((c["died"] for c in e.spent.values()), default=0) for e in entries] == [0, 1, 2] * launch
        why = "its job died (no such module), 3 times; the same command submits it again"
        assert set(said(study, "failed")) == {why}
        told = capfd.readouterr().err
        assert (f"12 runs were given up before ({why}): tried anew, with all their retries" in told) is (launch == 2)


@pytest.mark.slurm
def test_killed_launcher_gives_no_new_retries(paced: None, store_root: Path) -> None:
    first = launcher(store_root, 0.1, CANNOT_START)
    wait_for(lambda: [entry.job_id > 0 for entry in Ledger(store_root).entries()] == [True, True])
    first.kill()
    first.wait()
    second = launcher(store_root, 0.1, CANNOT_START)
    output, _ = second.communicate(timeout=120)
    assert "given up before" not in output
    assert [next(iter(e.spent.values()), {}) for e in Ledger(store_root).entries()] == [{}, {"died": 1}, {"died": 2}]
    causes = {detail["cause"] for kind, _, detail in events(output) if kind == "failed"}
    assert causes == {"its job died (no such module), 3 times; the same command submits it again"}


@pytest.mark.slurm
def test_held_task_is_said_with_the_command_that_releases_it(
    paced: None, cluster: PrivateCluster, store_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study = paced_batch(store_root, cluster=replace(CLUSTER, at_once=2))
    with following(study):
        wait_for(lambda: steps_of(study) > 2)
        cluster.sh("scontrol", "uhold", elements(study)[3])  # pending behind the bound
        wait_for(lambda: len(list(store_root.glob("*/summary.json"))) == 9)
        *_, line = lines(store_root)
        said_so, _, command = line.partition("; to let them go on: ")
        assert "1 tasks held (JobHeldUser)" in said_so and "3 held" in " ".join(lines(store_root))
        missing = collect(store_root, "paced", "mini")[1]
        assert len(missing) == 3 and all(f"held; to let it go on: {command} (JobHeldUser)" in m for m in missing)
        time.sleep(2 * CLUSTER.poll_s)
        assert cluster.ok(*shlex.split(command))
    check_complete(study)
    assert not said(study, "lost") and len(study.ledger.entries()) == 1
    assert capfd.readouterr().err.count("tasks held (JobHeldUser)") == 1


@pytest.mark.slurm
def test_held_after_a_failed_start_is_submitted_again(study: Follower, cluster: PrivateCluster) -> None:
    """Slurm drains the node whose prolog failed and holds the job: for ever, if nobody does anything."""
    cluster.make_sick("n2")
    study.start()
    wait_for(lambda: "1 tasks held (launch failed requeued held)" in " ".join(lines(study.batch.root)))
    again = paced_batch(study.batch.root)  # the same command
    with following(again):
        pass
    check_complete(again)
    first, second = again.ledger.entries()
    assert len(first.tasks) == 4 and len(second.tasks) == 1
    assert second.spent == {run: {"held": 1} for run in second.tasks[0]}
    assert not [row for row in cluster.sh("squeue", "-h", "-o", "%T").split() if row == "PENDING"]
