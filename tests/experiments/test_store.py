"""The store: atomic ends, locks, drift, damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import claim, manifests, store
from experiments.checks import ConfigError

CONFIG = {"optim": {"lr": 0.1}}
SUMMARY = {"outcome": "finished", "step": 1, "metrics": {}, "time": {"total_s": 1.0}}
MANIFEST = {"title": "t", "settings": {}, "run_ids": ["r-1"]}


def begin(root: Path, run_id: str = "r-1") -> Path:
    with claim.claim(root, run_id, CONFIG) as writer:
        writer.append({"step": 0, "test/nll_nats": 2.0})
        writer.append({"step": 1, "train/nll_nats": 1.5})
    return root / run_id


def checkpoint(run: Path, step: int, seal: bool = True) -> Path:
    directory = run / "checkpoints" / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(b"x" * 100)
    if seal:
        store.seal_checkpoint(directory)
    return directory


def test_run_is_done_only_with_a_summary(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert store.read_run(run).state == "partial"
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        writer.finish(SUMMARY)
    record = store.read_run(run)
    assert record.state == "done" and record.summary is not None
    assert not (run / "checkpoints").exists()


def test_drift_is_refused_naming_the_fields(tmp_path: Path) -> None:
    begin(tmp_path)
    with (
        pytest.raises(store.StoreError, match=r"optim\.lr: 0\.1 in the store, 0\.2 asked for"),
        claim.claim(tmp_path, "r-1", {"optim": {"lr": 0.2}}),
    ):
        pass


def test_living_owner_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib; from experiments import claim\n"
        f"with claim.claim(pathlib.Path({str(tmp_path)!r}), 'r-1', {CONFIG!r}):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    assert store.read_run(tmp_path / "r-1").state == "running"
    with pytest.raises(claim.Busy, match=f"pid {owner.pid}"), claim.claim(tmp_path, "r-1", CONFIG):
        pass
    owner.kill()  # SIGKILL: no clean-up runs
    owner.wait()
    with claim.claim(tmp_path, "r-1", CONFIG):
        assert (tmp_path / "r-1" / "lock").read_text().startswith(f"pid {os.getpid()} ")


def test_attempt_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    """A machine that was cut off comes back after its lock has gone to another one."""
    with claim.claim(tmp_path, "run", {}) as stale:
        stale.append({"step": 1})
        (tmp_path / "run" / "lock").unlink()  # the lock of a file system that has given it up
        with claim.claim(tmp_path, "run", {}) as fresh:
            fresh.resume_point()
            fresh.append({"step": 1})
            for write in (lambda: stale.append({"step": 2}), lambda: stale.finish({"outcome": "finished"})):
                with pytest.raises(claim.Busy, match="taken over by pid"):
                    write()
            assert [row["step"] for row in store.read_metrics(tmp_path / "run")[0]] == [1]
            assert not (tmp_path / "run" / "summary.json").exists()


def write_checkpoint(writer: claim.RunWriter, step: int, content: bytes) -> Path:
    directory = writer.scratch / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(content)
    return directory


def test_provenance_keeps_the_attempts_whose_steps_it_goes_on_from(tmp_path: Path) -> None:
    def attempt(time_unix_s: float, commit: str, checkpoint: bool = True) -> dict[str, Any]:
        with claim.claim(tmp_path, "run", {}) as writer:
            writer.write_provenance({"commit": commit, "time_unix_s": time_unix_s})
            step = int(time_unix_s)
            if checkpoint:
                writer.append({"step": step})
                writer.commit_checkpoint(write_checkpoint(writer, step, b"state"))
            return store.read_json(tmp_path / "run" / "provenance.json")

    assert attempt(0, "a", checkpoint=False) == {"commit": "a", "time_unix_s": 0}
    assert "earlier" not in attempt(1, "b")  # the first left nothing
    assert "earlier" not in attempt(2, "b")  # the same but for the time
    assert [old["commit"] for old in attempt(3, "c")["earlier"]] == ["b"]
    assert [old["commit"] for old in attempt(4, "d")["earlier"]] == ["b", "c"]
    (tmp_path / "run" / "provenance.json").write_text("{")
    with claim.claim(tmp_path, "run", {}) as writer:
        writer.write_provenance({"commit": "e"})
        assert "left no provenance" in writer.notes[-1]


def test_run_goes_on_from_steps_on_the_same_commits_only(tmp_path: Path) -> None:
    def attempt(step: int, **hub: str | None) -> None:
        with claim.claim(tmp_path, "run", {}) as writer:
            writer.write_provenance({"hub": hub})
            writer.append({"step": step})
            writer.commit_checkpoint(write_checkpoint(writer, step, b"state"))

    attempt(1, model="a", data=None)
    attempt(2, model=None, data="d")  # neither is known to be another one
    for piece, old, here in (("model", "a", "b"), ("data", "d", "e")):
        with pytest.raises(ConfigError, match=f"^hub: {piece} is commit '{here}' here, and run has steps on '{old}'; "):
            attempt(3, **{piece: here})
    assert store.read_json(tmp_path / "run" / "provenance.json")["hub"] == {"model": None, "data": "d"}
    attempt(3, model="a", data="d")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    attempt(1, model="b", data="e")


def test_attempt_that_was_replaced_commits_no_checkpoint(tmp_path: Path) -> None:
    """It comes back in the middle of one: neither its half nor its whole one gets among its successor's."""
    run = tmp_path / "run"
    with claim.claim(tmp_path, "run", {}) as stale:
        stale.append({"step": 1})
        stale.commit_checkpoint(write_checkpoint(stale, 1, b"old"))
        stale.append({"step": 2})
        late = write_checkpoint(stale, 2, b"old, hal")
        (run / "lock").unlink()  # the lock of a file system that has given it up
        with claim.claim(tmp_path, "run", {}) as fresh:
            point = fresh.resume_point()
            assert point is not None and point.step == 1 and not late.exists()
            fresh.append({"step": 2})
            half = write_checkpoint(fresh, 2, b"new, ha")
            late.mkdir(parents=True)
            (late / "model.bin").write_bytes(b"old, half the size")
            with pytest.raises(claim.Busy, match="taken over by pid"):
                stale.commit_checkpoint(late)
            assert [c.name for c in store.checkpoints(run)] == ["checkpoint-1"] and half.exists()
            (half / "model.bin").write_bytes(b"new, whole")
            fresh.commit_checkpoint(half)
            for write in (lambda: stale.fail("no", ""), lambda: stale.append_sample({"step": 2}),
                          lambda: stale.write("provenance.json", {})):  # fmt: skip
                with pytest.raises(claim.Busy):
                    write()
            assert not {"failure.json", "samples.jsonl", "provenance.json"} & {p.name for p in run.iterdir()}
    assert [c.name for c in store.checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    assert (run / "checkpoints" / "checkpoint-2" / "model.bin").read_bytes() == b"new, whole"
    assert not store.unsound_checkpoints(run) and not list((run / "checkpoints").glob(".*"))


def test_checkpoint_that_slipped_in_is_replaced_whole(tmp_path: Path) -> None:
    """Between the look at the lock and the rename an attempt may be replaced: its checkpoint is whole, and goes."""
    run = begin(tmp_path)
    checkpoint(run, 1)
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        writer.commit_checkpoint(write_checkpoint(writer, 1, b"new"))
    assert store.is_sound(run / "checkpoints" / "checkpoint-1")
    assert (run / "checkpoints" / "checkpoint-1" / "model.bin").read_bytes() == b"new"
    assert not list((run / "checkpoints").glob(".*"))


def test_resume_point_is_the_newest_sound_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        writer.append({"step": 2})
        writer.append({"step": 3})
    checkpoint(run, 1)
    checkpoint(run, 2)
    checkpoint(run, 3, seal=False)
    (run / "checkpoints" / "checkpoint-2" / "model.bin").write_bytes(b"")  # truncated by a full disk
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        point = writer.resume_point()
        assert point is not None and point.step == 1
        assert [row["step"] for row in point.rows] == [0, 1]
        assert any("checkpoint-2 is incomplete" in note for note in writer.notes)
        assert any("checkpoint-3 is incomplete" in note for note in writer.notes)
    assert [row["step"] for row in store.read_metrics(run)[0]] == [0, 1]


def test_truncated_metrics_are_said_and_resumed_before_the_damage(tmp_path: Path) -> None:
    run = begin(tmp_path)
    checkpoint(run, 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/nl')
    rows, notes = store.read_metrics(run)
    assert len(rows) == 2 and "cut off at line 3" in notes[0]
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        point = writer.resume_point()
        assert point is not None and point.step == 1 and any("cut off" in note for note in writer.notes)


def test_checkpoint_whose_metrics_are_lost_is_passed_over(tmp_path: Path) -> None:
    run = begin(tmp_path)
    checkpoint(run, 1)
    (run / "metrics.jsonl").write_text('{"step": 0, "test/nll_nats": 2.0}\n')
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        assert writer.resume_point() is None
        assert any("lost rows" in note for note in writer.notes)


def test_scan_names_what_it_leaves_out(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "holiday-photos").mkdir()
    newer = begin(tmp_path, "r-2") / "config.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"format": store.FORMAT + 1}))
    broken = begin(tmp_path, "r-3") / "config.json"
    broken.write_text("{")
    records, left_out = store.scan(tmp_path)
    assert [record.run_id for record in records] == ["r-1"]
    text = "\n".join(left_out)
    assert "holiday-photos: no config.json" in text and "newer version" in text and "not valid JSON" in text


def test_newer_store_is_refused_for_writing(tmp_path: Path) -> None:
    path = begin(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": store.FORMAT + 1}))
    with pytest.raises(store.StoreError, match="newer version"), claim.claim(tmp_path, "r-1", CONFIG):
        pass


def test_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary.json"
    store.write_json(target, {"a": 1})

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(store.StoreError, match="the disk is full"):
        store.write_json(target, {"a": 2})
    assert json.loads(target.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [target]


def test_unusable_root_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(store.StoreError, match="a file stands where a directory is needed"):
        store.ensure_root(tmp_path / "file")


def test_nan_never_becomes_a_number(tmp_path: Path) -> None:
    with claim.claim(tmp_path, "r-1", CONFIG) as writer, pytest.raises(ValueError):
        writer.append({"step": 0, "test/nll_nats": float("nan")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"cause": "the gra', "not valid JSON"),
        (b"\xff\xfe\x00{", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "cause: missing; expected str"),
        (b'{"cause": null}', "cause: None is not allowed; expected str"),
    ],
)
def test_damaged_failure_is_named_and_the_run_still_resumable(tmp_path: Path, content: bytes, said: str) -> None:
    run = begin(tmp_path)
    with claim.claim(tmp_path, "r-1", CONFIG) as writer:
        writer.fail("ValueError: no", "traceback")
    assert store.read_run(run).cause == "ValueError: no"
    (run / "failure.json").write_bytes(content)
    record = store.read_run(run)
    assert record.state == "failed" and record.cause is None
    assert len(record.problems) == 1 and "\n" not in record.problems[0]
    assert record.problems[0].startswith(f"{run / 'failure.json'}: damaged: ") and said in record.problems[0]


@pytest.mark.parametrize("field", [*SUMMARY, "total_s"])
def test_summary_without_its_fields_is_left_out_and_not_returned(tmp_path: Path, field: str) -> None:
    run = begin(tmp_path)
    begin(tmp_path, "r-2")
    hollow = json.loads(json.dumps(SUMMARY))
    del (hollow["time"] if field == "total_s" else hollow)[field]
    (run / "summary.json").write_text(json.dumps(hollow))
    records, left_out = store.scan(tmp_path)
    assert [record.run_id for record in records] == ["r-2"]
    assert len(left_out) == 1 and f"{run / 'summary.json'}: damaged: {field}: missing" in left_out[0]
    with claim.claim(tmp_path, "r-1", CONFIG) as writer, pytest.raises(store.StoreError, match=f"{field}: missing"):
        _ = writer.summary


@pytest.mark.parametrize("name", ["", "config.json", "summary.json", "checkpoints/checkpoint-1"])
def test_unreadable_run_is_named_and_the_others_are_read(
    tmp_path: Path, forbid: Callable[[Path], None], name: str
) -> None:
    run = begin(tmp_path)
    checkpoint(run, 1)
    if name == "summary.json":
        store.write_json(run / name, SUMMARY)
    begin(tmp_path, "r-2")
    forbid(run / name)
    records, left_out = store.scan(tmp_path)
    if name.startswith("checkpoints"):  # it is not sound, and the run goes on without it
        assert "checkpoint-1 is incomplete" in records[0].problems[0]
        return
    assert [record.run_id for record in records] == ["r-2"]
    assert len(left_out) == 1 and str(run) in left_out[0] and "permission denied" in left_out[0]
    with pytest.raises(store.StoreError, match="permission denied"):
        store.state_of(run)


def test_unreadable_files_of_a_checkpoint_and_the_metrics_are_one_line(
    tmp_path: Path, forbid: Callable[[Path], None]
) -> None:
    run = begin(tmp_path)
    inner = checkpoint(run, 1, seal=False) / "optimizer"
    inner.mkdir()
    (inner / "state.bin").write_bytes(b"x")
    store.seal_checkpoint(inner.parent)
    forbid(run / "metrics.jsonl")
    with pytest.raises(store.StoreError, match="permission denied"):
        store.read_metrics(run)
    forbid(inner)
    with pytest.raises(store.StoreError, match=r"r-1/checkpoints: permission denied"):
        store.read_run(run)


def test_checkpoint_deleted_while_it_is_looked_at_is_not_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checkpoint(begin(tmp_path), 1)

    def gone(_path: Path) -> dict[str, int]:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(store, "checkpoint_files", gone)
    assert not store.is_sound(found)


def test_unreadable_root_is_one_line(tmp_path: Path, forbid: Callable[[Path], None]) -> None:
    forbid(tmp_path)
    for ask in (store.scan, manifests.list_studies, lambda root: manifests.read_study(root, "lr", "mini")):
        with pytest.raises(store.StoreError, match="permission denied"):
            ask(tmp_path)


def test_study_manifest_of_a_newer_version_is_never_overwritten(tmp_path: Path, forbid: Callable[[Path], None]) -> None:
    manifests.write_study(tmp_path, "lr", "mini", MANIFEST)
    path = tmp_path / "studies" / "lr-mini.json"
    newer = json.dumps(json.loads(path.read_text()) | {"format": store.FORMAT + 1, "run_ids": {"other": "shape"}})
    path.write_text(newer)
    for ask in (manifests.write_study, lambda *where: manifests.read_study(*where[:3])):
        with pytest.raises(store.NewerStore, match="lr-mini.json: format: 2 was written by a newer version"):
            ask(tmp_path, "lr", "mini", MANIFEST)
    assert path.read_text() == newer
    path.write_text(newer[:20])  # a damaged one says nothing that the study file does not
    manifests.write_study(tmp_path, "lr", "mini", MANIFEST)
    assert manifests.read_study(tmp_path, "lr", "mini")["run_ids"] == ["r-1"]
    forbid(path)
    with pytest.raises(store.StoreError, match="lr-mini.json: permission denied"):
        manifests.write_study(tmp_path, "lr", "mini", MANIFEST)


@pytest.mark.parametrize("field", MANIFEST)
def test_study_manifest_without_its_fields_is_one_line(tmp_path: Path, field: str) -> None:
    manifests.write_study(tmp_path, "lr", "mini", {k: v for k, v in MANIFEST.items() if k != field})
    with pytest.raises(store.StoreError, match=f"lr-mini.json: damaged: {field}: missing"):
        manifests.read_study(tmp_path, "lr", "mini")
    (tmp_path / "studies" / ".lr-mini.json.17.tmp").write_text("")
    (tmp_path / "studies" / ".lr-mini.json").write_text("")
    assert manifests.list_studies(tmp_path) == [("lr", "mini")]


def test_study_name_says_the_science_and_nothing_else() -> None:
    name = manifests.study_name
    assert name("lr", []) == name("lr", ["launch.root=x", "launch.workers=1"]) == "lr"
    both = name("lr", ["seed.init=0", "launch.root=x", "optim.steps=50"])
    assert both == name("lr", ["optim.steps=50", "seed.init=0"]) == "lr+optim.steps=50+seed.init=0"
    assert name("lr", ["optim.steps=1", "optim.steps=2"]) != name("lr", ["optim.steps=2", "optim.steps=1"])


def test_study_name_is_a_file_name_and_its_own(tmp_path: Path) -> None:
    overrides = [
        ["data.path=/a/b"], ["data.path=_a_b"], ["data.path=/a_b"], ["optim.lr=1e-3,2e-3"], ["optim.lr=1e+3"],
        ["model.name=a+seed.init=3"], ["model.name=a", "seed.init=3"], ["data.tasks=[a, b]"],
        *([f"model.path={'x' * 300}{k}"] for k in range(2)), ["model.name=é"], ["model.name=.."],
    ]  # fmt: skip
    names = [manifests.study_name("lr", each) for each in overrides]
    assert len(set(names)) == len(names)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=._-")
        assert name.startswith("lr+") and len(name) <= manifests.MAX_NAME
        manifests.write_study(tmp_path, name, "mini", MANIFEST)
    assert set(manifests.list_studies(tmp_path)) == {(name, "mini") for name in names}
