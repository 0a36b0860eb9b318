"""Supervised runs: the protocol's invariants, on real training of a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import models, sft, store
from experiments.compose import parse
from experiments.config import ConfigError, run_id
from experiments.data import dataset
from experiments.losses import IGNORED
from experiments.packed import arms, session, train
from experiments.packed.rows import lay_out
from experiments.run import execute, main

LORA, FULL = ["method=lora", "method.rank=4"], ["method=full"]


@pytest.fixture(params=["trl", "packed"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_overrides(tiny_overrides: list[str], engine: str) -> list[str]:
    """Whatever engine makes a run, the same is promised of it."""
    return [*tiny_overrides, f"launch.engine={engine}"]


def patch_evaluation(patch: pytest.MonkeyPatch, found: Callable[[], float]) -> None:
    """Put ``found`` in the place of every held-out evaluation, in both engines."""
    patch.setattr(sft, "held_out_nll", lambda *_: found())
    patch.setattr(session.Session, "held_out_nll", lambda *_: found())
    patch.setattr(session.Session, "base_model_nll", lambda *_: found())


def rows_of(overrides: list[str], progress: sft.Progress | None = None) -> list[dict[str, Any]]:
    config, launch = parse(overrides)
    execute(config, launch, progress)
    return store.read_metrics(Path(launch.root) / run_id(config))[0]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row[key] for row in rows for key in ("train/nll_nats", "test/nll_nats") if key in row]


@pytest.mark.parametrize("method", [LORA, FULL])
def test_micro_batches_change_no_loss(tiny_overrides: list[str], tmp_path: Path, method: list[str]) -> None:
    """Sequences of unequal length: averaging over micro-batches instead of tokens would show."""
    whole = losses(rows_of([*tiny_overrides, *method]))
    split = losses(rows_of([*tiny_overrides, *method, "launch.micro_batch_size=4", f"launch.root={tmp_path / 'b'}"]))
    assert len(whole) > 8 and whole[0] != whole[-1]
    assert split == pytest.approx(whole, rel=1e-6)


def test_rows_count_completion_tokens_and_measure_the_adapter(tiny_overrides: list[str], tmp_path: Path) -> None:
    split = [*tiny_overrides, *LORA, "launch.micro_batch_size=4", f"launch.root={tmp_path / 'b'}"]
    config, _ = parse([*tiny_overrides, *LORA])
    data = dataset.load(config.data, models.load_tokenizer(config.model, tmp_path))
    order = dataset.order(len(data.train), config.optim.batch_size * config.optim.steps, config.seed.data)
    first = [data.train[int(i)]["labels"] for i in order[: config.optim.batch_size]]
    by_hand = sum(label != IGNORED for labels in first for label in labels)
    for rows in (rows_of([*tiny_overrides, *LORA]), rows_of(split)):
        assert rows[1]["train/num_tokens"] == by_hand
        assert rows[1]["adapter/norm_b_median"] > 0 and rows[1]["adapter/frac_b_larger"] == 0
    assert not any(key.startswith("adapter/") for row in rows_of([*tiny_overrides, *FULL]) for key in row)


def stop_at(step: int) -> sft.Progress:
    seen: list[int] = []
    return sft.Progress(on_step=lambda s, _n, _v: seen.append(s), should_stop=lambda: bool(seen) and seen[-1] >= step)


@pytest.mark.parametrize("method", [LORA, FULL, ["method=lora", "method.unembed=true"]])
def test_resumed_run_equals_uninterrupted_bit_for_bit(
    tiny_overrides: list[str], tmp_path: Path, method: list[str]
) -> None:
    straight = [*tiny_overrides, *method]
    broken = [*straight, f"launch.root={tmp_path / 'b'}"]
    rows_of(straight)
    with pytest.raises(sft.Interrupted, match="step 3"):
        rows_of(broken, stop_at(3))
    steps: list[int] = []
    rows_of(broken, sft.Progress(on_step=lambda step, _n, _v: steps.append(step)))
    assert steps == [4, 5, 6, 7, 8]  # it went on, it did not begin again
    name = run_id(parse(straight)[0])
    first, second = (root / name / "metrics.jsonl" for root in (tmp_path / "runs", tmp_path / "b"))
    assert first.read_bytes() == second.read_bytes()
    summaries = [store.read_json(file.parent / "summary.json") for file in (first, second)]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]
    assert summaries[1]["notes"] == ["resumed from step 3"]


def test_trainer_arguments_are_the_protocol(tiny_overrides: list[str], tmp_path: Path) -> None:
    """Constant LR, no warm-up, AdamW with the configured constants, clipping only if asked for."""
    chosen = ["optim.lr=3e-3", "optim.beta1=0.8", "optim.beta2=0.7", "optim.eps=1e-6", "optim.weight_decay=0.1"]
    extra = [*chosen, "optim.max_grad_norm=2", "optim.autocast=bfloat16", "launch.micro_batch_size=4"]
    arguments = sft.trainer_arguments(*parse([*tiny_overrides, *extra]), tmp_path)
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.warmup_steps) == (3e-3, "constant", 0)
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.8, 0.7, 1e-6)
    assert (arguments.weight_decay, arguments.max_grad_norm, arguments.bf16) == (0.1, 2.0, True)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 4)
    assert not arguments.packing and not arguments.gradient_checkpointing
    plain = sft.trainer_arguments(*parse(tiny_overrides), tmp_path)
    assert (plain.weight_decay, plain.max_grad_norm, plain.bf16, plain.adam_beta2) == (0.0, 0.0, False, 0.95)


def test_held_out_nll_is_token_weighted_over_the_test_split(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the sum over examples taken one by one, unpadded; batches are forced to be several."""
    monkeypatch.setattr(sft, "EVAL_TOKENS", 40)
    monkeypatch.setattr(session, "EVAL_ROWS", 40)
    config, _ = parse(tiny_overrides)
    tokenizer, model = models.load_tokenizer(config.model, tmp_path), models.load_model(config.model, tmp_path).eval()
    total, count = 0.0, 0
    for row in dataset.load(config.data, tokenizer).test:
        ids, labels = (torch.tensor(row[key]) for key in ("input_ids", "labels"))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        kept = labels[1:] != -100
        total -= float(logprobs[kept, labels[1:][kept]].sum())
        count += int(kept.sum())
    assert rows_of(tiny_overrides)[0]["test/nll_nats"] == pytest.approx(total / count, rel=1e-5)


def test_batches_are_those_of_the_seeded_order(tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = sft.Trainer.compute_loss

    def spy(self: Any, model: Any, inputs: dict, **kwargs: Any) -> Any:
        seen.extend(
            ids[mask == 1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        )
        return real(self, model, inputs, **kwargs)

    def spy_rows(examples: list[list[dict]]) -> Any:
        seen.extend(list(row["input_ids"]) for row in examples[0])
        return lay_out(examples)

    monkeypatch.setattr(sft.Trainer, "compute_loss", spy)
    monkeypatch.setattr(train, "lay_out", spy_rows)
    config, launch = parse([*tiny_overrides, "seed.data=5"])
    execute(config, launch)
    examples = dataset.load(config.data, models.load_tokenizer(config.model, Path(launch.root) / "cache")).train
    assert seen == examples.select(dataset.order(len(examples), 8 * 16, 5))["input_ids"][:]


@pytest.mark.parametrize(
    ("above", "outcome", "step"), [(2.1, "diverged", 1), (1.9, "diverged", 8), (-0.1, "finished", 8)]
)
def test_divergence_rule(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch, above: float, outcome: str, step: int
) -> None:
    """Two nats above the base stop a run; ending no better than the base is divergence too."""
    values = iter([3.0])
    patch_evaluation(monkeypatch, lambda: next(values, 3.0 + above))
    summary = execute(*parse(tiny_overrides))
    assert (summary["outcome"], summary["step"]) == (outcome, step)


def test_only_the_newest_checkpoints_are_kept(tiny_overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(sft.Interrupted):
        rows_of([*tiny_overrides, "launch.checkpoint_every_s=1e-6"], stop_at(6))
    kept = sorted(path.parent.name for path in tmp_path.glob("runs/*/checkpoints/*/SOUND.json"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


def test_arms_of_one_seed_see_the_same_batches(tiny_overrides: list[str]) -> None:
    """The first batch's loss is the base's for every arm: equal batches give equal losses."""
    first = [
        rows_of([*tiny_overrides, *method, seed])[1]["train/nll_nats"]
        for method in (LORA, FULL, ["method.rank=1"])
        for seed in ("seed.data=0", "seed.data=1")
    ]
    assert first[0] == pytest.approx(first[2], rel=1e-6) and first[0] == pytest.approx(first[4], rel=1e-6)
    assert first[0] != pytest.approx(first[1], rel=1e-4)


def test_same_seed_same_run_other_seed_other_run(tiny_overrides: list[str], tmp_path: Path) -> None:
    again = [*tiny_overrides, f"launch.root={tmp_path / 'b'}"]
    assert rows_of(tiny_overrides) == rows_of(again)
    assert rows_of([*tiny_overrides, "seed.init=1", "seed.data=0"])[-1] != rows_of(tiny_overrides)[-1]


def test_diverged_run_is_a_result(tiny_overrides: list[str]) -> None:
    config, launch = parse([*tiny_overrides, "optim.lr=1e20", "optim.steps=20"])
    summary = execute(config, launch)
    assert summary["outcome"] == "diverged" and summary["step"] < 20
    assert execute(config, launch) == summary  # done: returned, not run again
    text = (Path(launch.root) / run_id(config) / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_moe_with_lora_trains(tiny_overrides: list[str], tmp_path: Path) -> None:
    from tiny import tiny_moe, tiny_tokenizer

    tiny_moe().save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    overrides = [*tiny_overrides, f"model.path={tmp_path / 'moe'}", "optim.lr=1e-2"]
    if "launch.engine=packed" in overrides:
        with pytest.raises(ConfigError, match="neither llama nor qwen3"):
            rows_of(overrides)
    rows = rows_of([*overrides, "launch.engine=auto"])
    assert rows[-1]["test/nll_nats"] < rows[0]["test/nll_nats"]


def test_run_directory_explains_itself(tiny_overrides: list[str]) -> None:
    config, launch = parse(tiny_overrides)
    execute(config, launch)
    run = Path(launch.root) / run_id(config)
    provenance = store.read_json(run / "provenance.json")
    assert {"commit", "diff", "versions", "argv", "cpu", "host"} <= set(provenance)
    assert provenance["versions"]["trl"] == "1.16.0"
    summary = store.read_json(run / "summary.json")
    assert len(summary["init_hash"]) == 16 and summary["num_trainable"] > 0
    assert not (run / "failure.json").exists() and not (run / "checkpoints").exists()


def test_failure_is_recorded_and_resumable(tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config, launch = parse(tiny_overrides)
    run = Path(launch.root) / run_id(config)

    def broken() -> float:
        raise RuntimeError("the grader fell over")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch_evaluation(patch, broken)
        execute(config, launch)
    assert store.read_run(run).state == "failed"
    assert "the grader fell over" in store.read_json(run / "failure.json")["cause"]
    execute(config, launch)
    assert store.read_run(run).state == "done" and not (run / "failure.json").exists()


def test_disk_that_fills_up_is_one_line_and_resumable(
    tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """safetensors and torch report a full disk as errors of their own, not as OSError."""

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(sft.Trainer, "_save_checkpoint", full)
        patch.setattr(arms, "save", full)
        assert main([*tiny_overrides, "launch.checkpoint_every_s=1e-6"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: store: no space left in ") and "run the same command again" in error
    assert main([*tiny_overrides, "launch.checkpoint_every_s=1e-6"]) == 0


BAD: list[tuple[Callable[[Path], list[str]], str]] = [
    (lambda _: ["optim.lrr=1"], "did you mean optim.lr?"),
    (lambda _: ["method.rank=999"], "method.rank: 999 is not allowed"),
    (lambda _: ["launch.micro_batch_size=5"], "must divide optim.batch_size"),
    (lambda _: ["model.path=/nowhere"], "model.path: '/nowhere' cannot be loaded"),
    (lambda _: ["model=mini-w64", "model.path=mini-w65"], "model.path: 'mini-w65' is not a bundled base"),
    (lambda _: ["model=mini-w64", "model.revision=0"], "model.revision: '0' is pinned but"),
    (lambda _: ["data.path=/nowhere"], "data.path: '/nowhere' cannot be read"),
    (lambda _: ["data.num_train=500"], "data.num_train: 500"),
    (lambda _: ["data.source=reasoning_gym", "data.tasks=[gdc]"], "did you mean 'gcd'"),
    (lambda p: [f"launch.root={p / 'file'}"], "a file stands where a directory is needed"),
    (lambda p: [f"data.path={p / 'bad.jsonl'}"], "bad.jsonl line 2: no 'completion' field"),
    (lambda p: [f"data.path={p / 'torn.jsonl'}"], "torn.jsonl line 1:"),
]


@pytest.mark.parametrize(("extra", "said"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_overrides: list[str], tmp_path: Path, extra, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a", "compl')
    kept = [o for o in tiny_overrides if not (extra(tmp_path)[0] == "model=mini-w64" and o.startswith("model."))]
    assert main([*kept, *extra(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.count("\n") == 0 and "Traceback" not in error
    root = tmp_path / "runs"
    assert not root.exists() or not list(root.glob("*/config.json"))  # nothing half-written


def test_ctrl_c_leaves_the_run_resumable(tiny_overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.run", *tiny_overrides, "optim.steps=400", "data.num_train=60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "step 10/" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in error and "Traceback" not in error
    (run,) = (tmp_path / "runs").glob("tiny-*")
    assert list((run / "checkpoints").glob("checkpoint-*/SOUND.json"))
    assert not (run / "failure.json").exists()
    config, launch = parse(command[3:])
    assert execute(config, launch)["notes"][0].startswith("resumed from step")


def test_a_run_by_hand_takes_one_thread(tiny_overrides: list[str]) -> None:
    torch.set_num_threads(2)
    assert main(tiny_overrides) == 0
    assert torch.get_num_threads() == 1


def test_an_impossible_point_is_refused_before_the_first_trains(tiny_overrides: list[str], capsys) -> None:
    assert main([*tiny_overrides, "-m", "method.rank=2,4096"]) == 2
    assert "method.rank: 4096 is not allowed" in capsys.readouterr().err
    _, launch = parse(tiny_overrides)
    assert not list(Path(launch.root).glob("*-r2-*"))


def test_multirun_line_runs_every_point(tiny_overrides: list[str], tmp_path: Path) -> None:
    assert main(["-m", *tiny_overrides, "optim.steps=2", "optim.lr=1e-3,2e-3", "method.rank=1,2"]) == 0
    files = list((tmp_path / "runs").glob("*/summary.json"))
    assert len(files) == 4 and all(json.loads(f.read_text())["step"] == 2 for f in files)
