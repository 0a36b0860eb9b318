"""wandb mirrors what is on disk: one run per run id, each step once, whatever happens; and never in the way."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import claim, tracking
from experiments.compose import parse
from experiments.config import encode, run_id
from experiments.packed import train as packed
from experiments.recorder import Interrupted, Progress
from experiments.run import execute

BLOCK = 32768


def records(file: Path) -> Iterator[Any]:
    """The protobuf records of an offline run, read by wandb's own schema. wandb 0.31 has a reader in Go only: this is
    LevelDB's log format (blocks of 32 KiB; a checksum, a length and a type before each piece) after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


class Mirrored:
    """What one attempt's offline directory holds."""

    def __init__(self, directory: Path) -> None:
        (file,) = directory.glob("*.wandb")
        self.ids, self.steps, self.rows, self.config, self.summary = set(), [], [], {}, {}
        for _ in range(100):  # wandb's own process writes it, and ends it a moment after the run
            found = list(records(file))
            if found and found[-1].WhichOneof("record_type") == "exit":
                break
            time.sleep(0.05)
        for record in found:
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.ids.add(record.run.run_id)
                self.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update if i.key != "_wandb"}
            elif kind == "history":
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                self.steps.append(row["_step"])
                self.rows.append({name: value for name, value in row.items() if not name.startswith("_")})
            elif kind == "summary":
                self.summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update}


def taken(root: Path, run: str) -> Mirrored:
    """The one attempt in the store, taken out of it: wandb names directories by the second, tests are quicker."""
    (directory,) = (root / "wandb").glob(f"offline-run-*-{run}")
    found = Mirrored(directory)
    shutil.rmtree(directory)
    return found


def on_disk(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "_lost", type(tracking._lost)())


@pytest.mark.parametrize("engine", ["trl", "packed"])
def test_interrupted_run_is_mirrored_once_step_by_step(engine: str, tiny_overrides: list[str], tmp_path: Path) -> None:
    """Stopped at step 3 after a checkpoint, then killed by an error at step 6 without one, then ended."""
    words = [*tiny_overrides, "launch.wandb=true", f"launch.engine={engine}", "launch.checkpoint_every_s=999"]
    config, launch = parse(words)
    seen: list[int] = []

    def broken(step: int, steps: int, value: float | None) -> None:
        seen.append(step)
        if step == 6 and seen.count(6) == 1:
            raise OSError("power cut")

    root, run = Path(launch.root), run_id(config)
    with pytest.raises(Interrupted):
        execute(config, launch, Progress(on_step=lambda step, *_: seen.append(step), should_stop=lambda: 3 in seen))
    attempts = [taken(root, run)]
    with pytest.raises(OSError, match="power cut"):
        execute(config, launch, Progress(on_step=broken))
    attempts.append(taken(root, run))
    summary = execute(config, launch)
    attempts.append(taken(root, run))
    assert [attempt.steps for attempt in attempts] == [[0, 1, 2, 3], [], [4, 5, 6, 7, 8]]
    assert seen == [1, 2, 3, 4, 5, 6]
    rows = [{"step": step, **row} for a in attempts for step, row in zip(a.steps, a.rows, strict=True)]
    assert rows == on_disk(root / run)
    assert all(attempt.ids == {run} and attempt.config == encode(config) for attempt in attempts)
    assert attempts[-1].summary["outcome"] == "finished"
    assert attempts[-1].summary["test/nll_nats"] == summary["metrics"]["test/nll_nats"]
    assert execute(config, launch) == summary and not list(root.glob("wandb/offline*"))  # done: nothing is sent again


def test_rows_sent_before_are_not_sent_again_when_a_checkpoint_is_lost(
    tiny_overrides: list[str], tmp_path: Path
) -> None:
    words = [*tiny_overrides, "launch.wandb=true", "launch.engine=trl"]
    config, launch = parse(words)
    seen: list[int] = []
    with pytest.raises(Interrupted):
        execute(config, launch, Progress(on_step=lambda step, *_: seen.append(step), should_stop=lambda: 3 in seen))
    run = Path(launch.root) / run_id(config)
    for sealed in (run / "checkpoints").glob("*/*.json"):
        sealed.unlink()
    first = taken(run.parent, run.name)
    execute(config, launch)
    assert (first.steps, taken(run.parent, run.name).steps) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])


def test_mirror_asked_for_later_has_the_steps_before_it_too(tiny_overrides: list[str]) -> None:
    seen: list[int] = []
    words = [*tiny_overrides, "launch.engine=packed", "optim.steps=5"]
    with pytest.raises(Interrupted):
        execute(*parse(words), Progress(on_step=lambda step, *_: seen.append(step), should_stop=lambda: bool(seen)))
    config, launch = parse([*words, "launch.wandb=true"])
    execute(config, launch)
    attempt = taken(Path(launch.root), run_id(config))
    assert attempt.steps == [0, 1, 2, 3, 4, 5]


def test_runs_trained_together_have_a_mirror_each(tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed._Engine, "_chosen_width", lambda self: 2)
    points = [parse([*tiny_overrides, "launch.wandb=true", f"optim.lr={lr}", "optim.steps=3"]) for lr in (1e-3, 2e-3)]
    packed.execute([config for config, _ in points], points[0][1], packed.Reports())
    for config, launch in points:
        attempt = taken(Path(launch.root), run_id(config))
        assert attempt.steps == [0, 1, 2, 3] and attempt.config["optim"]["lr"] == config.optim.lr
        assert [{"step": s, **r} for s, r in zip(attempt.steps, attempt.rows, strict=True)] == on_disk(
            Path(launch.root) / run_id(config)
        )


@pytest.mark.parametrize("done", [False, True])
def test_late_mirror_writes_nothing_in_a_run_that_is_given_back(
    done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is done has no later attempt to send its rows; of what is not, the next attempt sends them."""
    slow, sent = threading.Event(), []
    wandb_run = SimpleNamespace(log=lambda row, step: sent.append(step), summary={}, finish=lambda exit_code: None)
    monkeypatch.setattr(tracking, "END_S", 0.05)
    monkeypatch.setattr(tracking.WandbTracker, "_begun", lambda self: slow.wait() and wandb_run)
    config, launch = parse(["optim.lr=1e-3", "launch.wandb=true", f"launch.root={tmp_path}"])
    with claim.claim(tmp_path, run_id(config), encode(config)) as writer:
        with tracking.tracker(config, launch, writer) as tracker:
            assert isinstance(tracker, tracking.WandbTracker)
            tracker.log({"step": 0})
            tracker.seal()
            if done:
                tracker.end({"metrics": {}})
        assert "wandb: not done 0.05 s after the run; wandb sync" in capsys.readouterr().err
        assert writer.notes == []  # they were written before
    slow.set()
    tracker._thread.join()
    assert not (tmp_path / run_id(config) / tracking.MARK).exists()
    assert sent == ([0] if done else [])


@pytest.mark.parametrize("wrong", ["key", "network", "package"])
def test_what_is_wrong_with_wandb_is_one_line_and_the_run_ends(
    wrong: str,
    tiny_overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr(tracking, "BEGIN_S", 1.0)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if wrong == "network":
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    elif wrong == "package":
        monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
        monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # reads its environment once
    begun = time.monotonic()
    for lr in ("1e-3", "2e-3"):
        config, launch = parse([*tiny_overrides, "launch.wandb=true", "optim.steps=2", f"optim.lr={lr}"])
        assert execute(config, launch)["outcome"] in ("finished", "diverged")
    assert time.monotonic() - begun < 8
    said = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    expected = {"key": "no API key", "network": "", "package": "division by zero"}[wrong]
    assert len(said) == 1 and said[0].startswith(f"wandb: {expected}") and said[0].endswith("runs go on without it")
    wandb.teardown()
