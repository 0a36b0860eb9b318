"""Profiles, resource classes and the ledger, without a cluster."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from paced_study import CLUSTER, paced_configs

from experiments.compose import parse
from experiments.config import ConfigError, LaunchConfig, SamplerKind
from experiments.manifests import write_study
from experiments.store import StoreError
from slurm import classes, follow, retries, submit
from slurm import cluster as profiles
from slurm.classes import Size, class_of, larger, pack
from slurm.client import Client, SlurmDown, SlurmError
from slurm.cluster import ResourceClass
from slurm.judge import Finding, Snapshot, judge, look
from slurm.ledger import Entry, Ledger, Place
from slurm.states import Fate, Job, Seen
from slurm.task import serve_all
from sweeps.grid import load_study

BILLION = 1_000_000_000


@pytest.mark.parametrize("name", profiles.known_profiles())
def test_profile_is_read_and_its_script_is_one_command(name: str) -> None:
    profile = profiles.load_cluster(name)
    text = submit.script(profile, Path("/store/slurm/x.runs.json"))
    assert text.startswith("#!/bin/bash\n") and text.splitlines()[-1].endswith("slurm.task /store/slurm/x.runs.json")
    asked = submit.options(profile, profile.classes[-1], 3, "x", Path("/store/logs/slurm/x-TASK.out"))
    assert "--output=/store/logs/slurm/x-%a.out" in asked and any(o.startswith("--gres=gpu:") for o in asked)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partitoin": "gpu"}, "cluster.partitoin: not a field"),
        ({"poll_s": "often"}, "cluster.poll_s: 'often' is not allowed; expected float"),
        ({"poll_s": 0}, "cluster.poll_s: 0.0 is not allowed"),
        ({"classes": {}}, "name at least one resource class"),
        ({"classes": {"cpu": {"gpus": -1}}}, "cluster.classes.cpu.gpus: -1 is not allowed"),
        ({"classes": {"cpu": 3}}, "broken.yaml: "),
    ],
)
def test_bad_profile_is_one_line(change: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "PROFILES_DIR", tmp_path)
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump({"classes": {"cpu": {}}, **change}))
    with pytest.raises(ConfigError) as error:
        profiles.load_cluster("broken")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="cluster: 'moon' is not allowed; choose one of auto, local, "):
        profiles.choose("moon")


def test_runs_go_to_the_class_that_holds_them() -> None:
    profile = profiles.load_cluster("slurm")
    (mini,) = paced_configs(1).values()
    lora, full = Size(8 * BILLION, 42_000_000), Size(8 * BILLION, 8 * BILLION)
    assert round(full.memory_gib(is_rl=False) * 2**30 / 1e9) == 128  # 16 bytes a parameter
    assert class_of(mini, Size(250_000, 250_000), profile).name == "cpu"
    assert class_of(mini, lora, profile).name == "gpu1"
    assert class_of(mini, full, profile).name == "gpu4"
    rl, _ = parse(["scale=mini", "optim.lr=1e-4", "rl.group_size=8", "model=mini-w64-mixed", "data=mini-puzzles"])
    big = Size(31 * BILLION // 2, 31 * BILLION // 2)
    assert [class_of(c, big, profile).name for c in (mini, rl)] == ["gpu4", "gpu8"]  # the sampler's copy
    assert not classes.holds(profile.classes[-1], Size(70 * BILLION, 70 * BILLION), 70 * 16 * BILLION / 2**30)
    assert larger("cpu", profile) == profile.classes[1] and larger("gpu8", profile) is larger("gone", profile) is None


def test_class_of_several_gpus_plans_a_process_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One array for each class, whose task reads how many processes train its runs."""
    cluster = profiles.load_cluster("slurm")
    configs = paced_configs(3)
    chosen = dict(zip(configs, [cluster.classes[0], cluster.classes[1], cluster.classes[2]], strict=True))
    assert [c.gpus for c in chosen.values()] == [0, 1, 4]
    wanted = submit.Batch("lr", "mini", configs, LaunchConfig(root=str(tmp_path), processes=2), cluster, chosen)
    client = Client()
    monkeypatch.setattr(client, "submit", lambda options, text: 7)
    ledger = Ledger(tmp_path)
    with ledger.locked():
        entries = submit.submit(wanted, list(configs), ledger, client, 1001)
    found = [json.loads(ledger.runs_path(entry).read_text())["launch"]["processes"] for entry in entries]
    assert found == [2, 1, 4]


def test_what_several_gpus_cannot_train_is_one_line(tmp_path: Path) -> None:
    from slurm import preflight

    rl, _ = parse(["scale=mini", "optim.lr=1e-4", "rl.group_size=8", "model=mini-w64-mixed", "data=mini-puzzles"])
    (odd, *_) = paced_configs(1).values()
    for config, gpus, said in ((rl, 4, "trains its policy on one device"), (odd, 5, "it must divide optim.batch_size")):
        cluster = replace(CLUSTER, classes=(ResourceClass("big", gpus=gpus),))
        wanted, sizes = submit.batch("lr", "mini", {"a": config}, LaunchConfig(root=str(tmp_path)), cluster)
        with pytest.raises(ConfigError, match=f"a needs class big .*launch.processes: {gpus} .*{said}") as error:
            preflight.check(wanted, sizes, Client())
        assert "\n" not in str(error.value)


def test_class_that_cannot_train_a_run_is_passed_over_on_the_way_up(tmp_path: Path) -> None:
    """After a death of memory: more GPUs help neither the policy of RL nor a batch that they do not divide."""
    cluster = replace(CLUSTER, classes=tuple(ResourceClass(f"gpu{n}", gpus=n) for n in (1, 3, 4)))
    rl, _ = parse(["scale=mini", "optim.lr=1e-4", "rl.group_size=8", "model=mini-w64-mixed", "data=mini-puzzles"])
    (sft,) = paced_configs(1).values()
    configs = {"sft": sft, "rl": rl}
    wanted, _ = submit.batch("lr", "mini", configs, LaunchConfig(root=str(tmp_path)), cluster)
    follower = follow.Follower(wanted, Client(), 1001, lambda *event: None)
    died = Place(Entry("e", 1, "lr", "mini", "gpu1", [["sft", "rl"]], deaths={"0": Fate.memory.value}), 0)
    again = {r: retries.class_for(r, died, wanted.classes, cluster, follower._fits(r)) for r in configs}
    assert again["sft"] == cluster.classes[2] and again["rl"] == wanted.classes["rl"]
    out_of_memory = Finding(fate=Fate.memory)
    verdicts = {r: retries.decide(r, died, out_of_memory, cluster, follower._fits(r)) for r in configs}
    assert verdicts["sft"].again and verdicts["sft"].cause.endswith("in class gpu4") and not verdicts["rl"].again
    sharded = Size(1 << 30, 1 << 30)
    assert sharded.checkpoints_gib() == 36 and sharded.checkpoints_gib(4) == 48


def test_size_of_a_shipped_base_is_its_weights() -> None:
    from experiments import models

    (config,) = paced_configs(1).values()
    (size,) = classes.sizes([config], Path("cache"))
    shapes = models.empty_model(config.model, Path("cache"))
    assert size.num_parameters == pytest.approx(sum(p.numel() for p in shapes.parameters()), rel=0.02)


def test_packing_deals_out_the_longest_runs() -> None:
    assert pack(list("abcdefg"), 3) == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert [len(c) for c in classes.chunks([[str(k)] for k in range(1200)], 1001)] == [1001, 199]


def entry_of(root: Path, tasks: list[list[str]]) -> tuple[Ledger, Place]:
    ledger = Ledger(root)
    with ledger.locked():
        entry = ledger.add("lr+optim.steps=50", "mini", "cpu", tasks, {"launch": {}, "configs": {}})
    return ledger, Place(entry, 0)


def test_newest_submission_of_a_run_counts(tmp_path: Path) -> None:
    ledger, first = entry_of(tmp_path, [["a"], ["b"]])
    _, second = entry_of(tmp_path, [["b"]])
    places = Ledger(tmp_path).places()
    assert (places["a"].entry.name, places["b"].entry.name) == (first.entry.name, second.entry.name)
    assert places["b"].entry.sequence == 2 and "/" not in first.entry.name and "+" not in first.entry.name
    (ledger.directory / f"{first.entry.name}.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):  # guessing would submit twice
        ledger.places()


def test_cancelled_while_pending_is_no_loss(tmp_path: Path) -> None:
    """Slurm forgets such an element for ever; its array is known, and no start has made its log."""
    ledger, place = entry_of(tmp_path, [["a"], ["b"]])
    known = Snapshot({place.entry.name: Job(7, {1: Seen("RUNNING")})})
    assert judge(ledger, place, "a", known.seen(ledger, place)).fate is Fate.cancelled
    assert judge(ledger, place, "a", Snapshot().seen(ledger, place)).fate is Fate.unknown
    ledger.log_path(place.entry, 0).parent.mkdir(parents=True)
    ledger.log_path(place.entry, 0).write_text("it had started")
    assert judge(ledger, place, "a", known.seen(ledger, place)).fate is Fate.unknown


def test_job_that_only_the_accounting_has_running_is_lost(tmp_path: Path) -> None:
    """So is one that nobody cancelled: its controller was killed before it had written the job down."""
    ledger, place = entry_of(tmp_path, [["a"]])
    meanings = {"RUNNING": Fate.unknown, "PENDING": Fate.unknown, "CANCELLED": Fate.unknown,
                "CANCELLED by 0": Fate.cancelled, "NODE_FAIL": Fate.returning}  # fmt: skip
    for state, meaning in meanings.items():
        snapshot = Snapshot(accounted={place.entry.name: Job(7, {0: Seen(state)})})
        assert judge(ledger, place, "a", snapshot.seen(ledger, place)).fate is meaning


def test_cause_is_the_runs_own_where_it_could_say_it(tmp_path: Path) -> None:
    ledger, place = entry_of(tmp_path, [["a"]])
    log = ledger.log_path(place.entry, 0)
    log.parent.mkdir(parents=True)
    log.write_text("kind=started run=a\nkind=failed run=a cause=store: the disk is full log=x\n")
    found = judge(ledger, place, "a", Seen("FAILED"))
    assert (found.fate, found.cause, found.failed) == (Fate.died, "store: the disk is full", False)
    (tmp_path / "a").mkdir()
    for when, failed in ((place.entry.time_unix_s - 9, False), (place.entry.time_unix_s + 9, True)):
        (tmp_path / "a" / "failure.json").write_text(json.dumps({"cause": "ValueError: no", "time_unix_s": when}))
        assert judge(ledger, place, "a", Seen("FAILED")).failed is failed
    log.write_text("slurmstepd: error: exceeded memory limit (2 > 1), being killed\n")
    (tmp_path / "a" / "failure.json").unlink()
    assert judge(ledger, place, "a", Seen("FAILED")).fate is Fate.memory


def test_job_with_a_known_number_and_another_name_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that lost its state gives a number out again."""
    ledger, place = entry_of(tmp_path, [["a"]])
    place.entry.job_id = 7
    client = Client()
    monkeypatch.setattr(client, "queue", dict)
    monkeypatch.setattr(client, "account", lambda ids: {"other": Job(7, {0: Seen("COMPLETED")})})
    assert look(client, ledger, [place]).seen(ledger, place) is None


def test_calls_are_bounded_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    refusal = "echo 'sbatch: error: no' >&2; exit 1"
    for name, body in (("scancel", "exit 0"), ("squeue", "exec sleep 30"), ("sbatch", refusal)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    client, begun = Client(call_s=0.5), time.monotonic()
    client.cancel(["1"])
    with pytest.raises(SlurmDown, match="squeue: no answer within 0.5 s"):
        client.queue()
    assert 1.4 < time.monotonic() - begun < 5 and client.num_calls == 2
    with pytest.raises(SlurmError, match="sbatch: no$") as refused:
        client.submit([], "")
    assert not isinstance(refused.value, SlurmDown)
    (tmp_path / "squeue").write_text("#!/bin/bash\necho 'squeue: error: words of another version' >&2; exit 1\n")
    with pytest.raises(SlurmDown, match="words of another version"):  # a launcher must bear it
        client.queue()


def test_pack_goes_on_after_a_failure_and_waits_for_a_busy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm import task

    monkeypatch.setattr(task, "BUSY_PAUSE_S", 0.0)
    kinds = {"a": ["failed"], "b": ["busy", "busy", "finished"], "c": ["finished"]}
    served: list[str] = []

    def serve(job: dict, emit, should_stop) -> None:
        served.append(job["run"])
        emit(kind=kinds[job["run"]].pop(0), run=job["run"])

    jobs = [{"run": run} for run in kinds]
    assert serve_all(jobs, serve, lambda: False) == (1, 0) and served == ["a", "b", "c", "b", "b"]
    kinds = {"a": ["finished"], "b": ["stopped"], "c": []}
    served.clear()
    assert serve_all(jobs, serve, lambda: len(served) >= 2) == (0, 2)  # the stopped one and the one behind it


def test_too_little_disk_is_one_line(tmp_path: Path) -> None:
    from slurm import preflight

    configs = paced_configs(2)
    greedy = replace(CLUSTER, spare_gib=1e9)
    wanted, sizes = submit.batch("lr", "mini", configs, LaunchConfig(root=str(tmp_path)), greedy)
    with pytest.raises(StoreError, match=r"GiB free, checkpoints may take 1000000000\.\d GiB"):
        preflight.check(wanted, sizes, Client())


def test_resubmission_keeps_how_the_study_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``slurm.submit`` knows a study by its manifest alone, whatever store it lies in by now."""
    words = ["launch.sampler=vllm", "launch.micro_batch_size=4", "launch.root=/elsewhere"]
    study = load_study("rl-tools", "mini", words)
    write_study(tmp_path, study.name, study.scale, study.manifest())
    found = []

    class Spy:
        @staticmethod
        def prepared(*arguments: Any) -> Any:
            found.append(arguments[3])
            return Spy()

        def start(self) -> None: ...

    monkeypatch.setattr(follow, "Follower", Spy)
    assert submit.main(["rl-tools", "--root", str(tmp_path)]) == 0
    assert found == [LaunchConfig(root=str(tmp_path), micro_batch_size=4, sampler=SamplerKind.vllm)]
    assert "/elsewhere" not in (tmp_path / "studies" / "rl-tools-mini.json").read_text()


def test_ledger_has_one_holder(tmp_path: Path) -> None:
    """Between looking what is in flight and submitting, a second launcher waits."""
    entered = threading.Event()

    def second() -> None:
        with Ledger(tmp_path).locked():
            entered.set()

    thread = threading.Thread(target=second)
    with Ledger(tmp_path).locked():
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    thread.join()


def test_job_id_that_its_launcher_lost_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number a job is cancelled and looked up in the accounting."""
    ledger, place = entry_of(tmp_path, [["a"]])
    client = Client()
    monkeypatch.setattr(client, "queue", lambda: {place.entry.name: Job(44, {0: Seen("RUNNING")})})
    look(client, ledger, [place])
    assert [entry.job_id for entry in Ledger(tmp_path).entries()] == [44]
