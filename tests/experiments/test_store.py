"""The store: atomic ends, locks, drift, damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import claim, store

CONFIG = {"optim": {"lr": 0.1}}


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
        writer.finish({"outcome": "finished", "step": 1, "metrics": {}})
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
