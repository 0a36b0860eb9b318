"""Runs that two processes train together (gloo on the CPU): the numbers of one, and nothing lost when they end."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from experiments import models, ranks, sft, sharded, store
from experiments.compose import parse
from experiments.config import ConfigError, run_id
from experiments.data import dataset
from experiments.recorder import Interrupted, Progress
from experiments.run import execute, main

METHODS = {
    "full": ["method=full", "optim.max_grad_norm=0.5"],
    "lora": ["method=lora", "method.rank=3", "method.unembed=true", "launch.micro_batch_size=4"],
}
TWO = "launch.processes=2"
Run = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def run(tiny_overrides: list[str], tmp_path: Path) -> Run:
    """The directory of a run below a root of its own, and its overrides; every step is evaluated."""

    def run(method: str, root: str, *extra: str) -> tuple[Path, list[str]]:
        words = [
            *tiny_overrides,
            *METHODS[method],
            "optim.steps=8",
            "eval.per_decade=40",
            "launch.checkpoint_every_s=999",
            f"launch.root={tmp_path / root}",
            *extra,
        ]
        return tmp_path / root / run_id(parse(words)[0]), words

    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run, str], bytes]:
    """The metrics of a run that two processes trained without a break; trained once for all tests that ask.

    Layers are computed again in the backward pass, which must not show: the runs beside it keep theirs. It has a
    mirror in wandb, of the process that writes and of no other.
    """
    known: dict[str, bytes] = {}

    def uninterrupted(run: Run, method: str) -> bytes:
        if method not in known:
            directory, words = run(method, "straight", TWO)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WANDB_MODE", "offline")
                execute(*parse([*words, "launch.gradient_checkpointing=always", "launch.wandb=true"]))
            assert len(list(directory.parent.glob("wandb/*-run-*"))) == 1
            assert store.read_json(directory / "wandb.json") == {"step": 8}
            engine = store.read_json(directory / "provenance.json")["engine"]
            assert engine == {
                "name": "trl", "processes": 2, "attention": "sdpa", "gradient_checkpointing": "always", "liger": False,
            }  # fmt: skip
            known[method] = (directory / "metrics.jsonl").read_bytes()
        return known[method]

    return uninterrupted


def rows_of(metrics: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_have_the_losses_of_one(run: Run, uninterrupted: Callable, method: str) -> None:
    directory, words = run(method, "one")
    execute(*parse(words))
    one, two = rows_of((directory / "metrics.jsonl").read_bytes()), rows_of(uninterrupted(run, method))
    assert [row["step"] for row in two] == list(range(9)) and [sorted(row) for row in two] == [sorted(r) for r in one]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert one[-1]["test/nll_nats"] < one[0]["test/nll_nats"] - 0.1


def wait_until(found: Callable[[], Any], limit_s: float = 60.0) -> Any:
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def processes_of(root: Path) -> list[int]:
    """Ranks that hold a file below ``root`` open: they have inherited the lock of the run."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith(str(root)):
                found.append(int(link.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_killed_after_a_checkpoint_it_goes_on_bit_for_bit(run: Run, uninterrupted: Callable) -> None:
    """Only the parent is killed: its processes end by themselves and free the run."""
    directory, words = run("lora", "killed", TWO, "launch.checkpoint_every_s=1e-6")
    process = subprocess.Popen([sys.executable, "-m", "experiments.run", *words], stderr=subprocess.DEVNULL)
    wait_until(lambda: list(directory.glob("checkpoints/*/SOUND.json")))
    assert len(set(processes_of(directory))) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes_of(directory))
    assert store.read_summary(directory) is None
    check_loads(directory, words)
    notes = execute(*parse([*words, "launch.checkpoint_every_s=999"]))["notes"]
    assert notes[-1].startswith("resumed from step")
    assert (directory / "metrics.jsonl").read_bytes() == uninterrupted(run, "lora")


def check_loads(directory: Path, words: list[str]) -> int:
    """The newest checkpoint is a model, or an adapter, as other programs load it; returns its step."""
    config, launch = parse(words)
    checkpoint = [c for c in store.checkpoints(directory) if store.is_sound(c)][-1]
    if (checkpoint / "adapter_config.json").exists():
        base = AutoModelForCausalLM.from_pretrained(config.model.path)
        model = PeftModel.from_pretrained(base, checkpoint)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = models.load_tokenizer(config.model, Path(launch.root) / "cache")
    test = sft.eval_batches(dataset.load(config.data, tokenizer).test, tokenizer)
    (row,) = [r for r in store.read_metrics(directory)[0] if r["step"] == store.step_of(checkpoint)]
    assert sft.held_out_nll(model, test, config) == pytest.approx(row["test/nll_nats"], rel=1e-5)
    return store.step_of(checkpoint)


def stopped(words: list[str], at: int) -> None:
    seen: list[int] = []
    progress = Progress(lambda step, _n, _v: seen.append(step), lambda: bool(seen) and seen[-1] >= at)
    with pytest.raises(Interrupted, match=r"stopped at step \d+, checkpointed"):
        execute(*parse(words), progress)


def test_asked_to_stop_both_stop_at_one_step_and_go_on(run: Run, uninterrupted: Callable) -> None:
    """What they leave goes on as if nothing had been, but not with one process."""
    directory, words = run("full", "stopped", TWO)
    stopped(words, at=2)
    assert not processes_of(directory)
    (checkpoint,) = directory.glob("checkpoints/*")
    assert store.sealed_by(checkpoint) == 2 and {f"rng_state_{k}.pth" for k in (0, 1)} <= {
        p.name for p in checkpoint.iterdir()
    }
    step = check_loads(directory, words)
    assert store.read_metrics(directory)[0][-1]["step"] == step >= 2
    other, alone = run("full", "alone")
    shutil.copytree(directory, other)
    assert execute(*parse(words))["notes"] == [f"resumed from step {step}"]
    assert (directory / "metrics.jsonl").read_bytes() == uninterrupted(run, "full")
    assert execute(*parse(alone))["notes"] == [f"{checkpoint.name} was written by 2 processes, here are 1: passed over"]
    assert rows_of((other / "metrics.jsonl").read_bytes())[-1]["step"] == 8


def test_process_that_is_killed_is_the_cause(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that misses it fails too, and may be heard first."""
    started: list[sharded.Ranks] = []
    real = sharded._followed
    monkeypatch.setattr(sharded, "_followed", lambda ranks, *rest: (started.append(ranks), real(ranks, *rest))[1])
    directory, words = run("lora", "died", TWO)
    with pytest.raises(RuntimeError, match="process 2 of 2 was killed by signal 9"):
        execute(*parse(words), Progress(lambda *_: started[0].processes[1].kill()))
    assert "killed by signal 9" in store.read_json(directory / "failure.json")["cause"]
    assert not processes_of(directory)


@pytest.mark.parametrize("num_batches", [1, 3, 4])
def test_held_out_examples_are_counted_once(tiny_base: Path, monkeypatch: pytest.MonkeyPatch, num_batches: int) -> None:
    """Two processes run the model equally often, whatever is left for the second, and together see every example."""
    config, _ = parse(["optim.lr=1e-3"])
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 200, (2 + k, 9), generator=generator) for k in range(num_batches)]
    batches = [(i, i, torch.ones_like(i)) for i in ids]
    whole = sft.held_out_nll(model, batches, config)
    parts: list[tuple[float, ...]] = []
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "summed", lambda *values: (parts.append(values), (1.0, 1.0))[1])
    for index in (0, 1):
        monkeypatch.setattr(ranks, "index", lambda index=index: index)
        sft.held_out_nll(model, batches, config)
    assert len(calls) == 2 * math.ceil(num_batches / 2)
    assert sum(p[0] for p in parts) / sum(p[1] for p in parts) == pytest.approx(whole, rel=1e-6)
    assert sum(p[1] for p in parts) == sum(8 * (2 + k) for k in range(num_batches))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["launch.processes=3"], "launch.processes: 3 is not allowed; it must divide optim.batch_size (16)"),
        ([TWO, "launch.micro_batch_size=16"], "must divide optim.batch_size / launch.processes (8)"),
        ([TWO, "method=tiny", "method.dims=4"], "launch.processes: 2 is not allowed; method=tiny"),
        ([TWO, "rl.group_size=4"], "reinforcement learning trains its policy on one device"),
        (["launch.processes=0"], "launch.processes: 0 is not allowed"),
    ],
)
def test_what_cannot_be_split_is_one_line_and_leaves_nothing(
    tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert main([*tiny_overrides, *extra]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ") and said in error
    assert not list(tmp_path.glob("runs/*/config.json"))


def test_more_processes_than_gpus_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on one GPU would hang or fail somewhere in the communication."""
    _, words = run("lora", "gpu", TWO)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="launch.processes: 2 is not allowed; 1 GPU is in sight"):
        sharded.check_devices(parse(words)[1])


def test_processes_do_not_reach_the_identity(tiny_overrides: list[str]) -> None:
    assert run_id(parse(tiny_overrides)[0]) == run_id(parse([*tiny_overrides, TWO])[0])
    assert "RANK" not in os.environ  # what a rank is told stays with it
