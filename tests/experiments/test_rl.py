"""Reinforcement learning runs: the protocol's invariants, on real rollouts and training of a tiny model."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import rl, store, worker
from experiments.compose import parse
from experiments.config import encode, run_id
from experiments.packed import policy
from experiments.recorder import Interrupted, Progress
from experiments.run import execute

FULL = ["method=full", "optim.lr=3e-4"]
RANK_1 = ["method=lora", "method.rank=1", "method.unembed=true", "optim.lr=1e-3"]
TINY = ["method=tiny", "optim.lr=3e-2"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [
        "model=mini-w64-mixed", "data=mini-puzzles", "data.num_train=64", "data.num_test=8", "rl.group_size=4",
        "optim.batch_size=4", "optim.steps=6", "launch.checkpoint_every_s=1e6", f"launch.root={tmp_path / 'a'}",
    ]  # fmt: skip


def rows_of(overrides: list[str], progress: Progress | None = None) -> list[dict[str, Any]]:
    config, launch = parse(overrides)
    execute(config, launch, progress)
    return store.read_metrics(Path(launch.root) / run_id(config))[0]


def summary_of(overrides: list[str]) -> dict[str, Any]:
    config, launch = parse(overrides)
    return store.read_json(Path(launch.root) / run_id(config) / "summary.json")


def rewards(rows: list[dict[str, Any]]) -> list[float]:
    return [row[key] for row in rows for key in ("train/reward", "train/entropy_nats", "test/reward") if key in row]


def stop_at(step: int) -> Progress:
    seen: list[int] = []
    return Progress(on_step=lambda s, _n, _v: seen.append(s), should_stop=lambda: bool(seen) and seen[-1] >= step)


@pytest.mark.parametrize("method", [FULL, RANK_1, TINY])
def test_resumed_run_draws_the_same_completions(base: list[str], tmp_path: Path, method: list[str]) -> None:
    straight, broken = [*base, *method], [*base, *method, f"launch.root={tmp_path / 'b'}"]
    whole = rows_of(straight)
    with pytest.raises(Interrupted, match="step 3"):
        rows_of(broken, stop_at(3))
    steps: list[int] = []
    resumed = rows_of(broken, Progress(on_step=lambda step, _n, _v: steps.append(step)))
    assert steps == [4, 5, 6]
    assert resumed == whole  # every metric of every step, bit for bit
    name = run_id(parse(straight)[0])
    samples = [(tmp_path / root / name / "samples.jsonl").read_text() for root in "ab"]
    assert samples[0] == samples[1] and samples[0].count("\n") == 4 * len([r for r in whole if "test/reward" in r])


def test_samples_after_the_checkpoint_are_drawn_again(base: list[str], tmp_path: Path) -> None:
    overrides = [*base, *FULL]
    with pytest.raises(Interrupted):
        rows_of(overrides, stop_at(3))
    file = tmp_path / "a" / run_id(parse(overrides)[0]) / "samples.jsonl"
    file.write_text(file.read_text() + json.dumps({"step": 5, "completion": "lost"}) + "\n")
    rows_of(overrides)
    assert "lost" not in file.read_text()


def test_sampling_seed_alone_decides_the_completions(base: list[str], tmp_path: Path) -> None:
    first = rewards(rows_of([*base, *FULL]))
    again = rewards(rows_of([*base, *FULL, f"launch.root={tmp_path / 'b'}"]))
    other = rewards(rows_of([*base, *FULL, "seed.sampling=1"]))
    assert first == again and first != other


def test_micro_batches_change_no_reward(base: list[str], tmp_path: Path) -> None:
    """The same completions, and weights that agree to rounding: the loss is divided by the whole batch's number."""
    whole = rows_of([*base, *FULL])
    split = rows_of([*base, *FULL, "launch.micro_batch_size=1", f"launch.root={tmp_path / 'b'}"])
    assert rewards(split) == pytest.approx(rewards(whole), rel=1e-4)
    assert [row.get("train/num_tokens") for row in split] == [row.get("train/num_tokens") for row in whole]


@pytest.mark.parametrize("method", [FULL, RANK_1])
@pytest.mark.parametrize("engine", ["trl", "packed"])
def test_gradient_of_a_step_is_the_policy_gradient(
    base: list[str], monkeypatch: pytest.MonkeyPatch, engine: str, method: list[str]
) -> None:
    """Against sum over completions of advantage x grad log p, each sequence forward alone and without padding."""
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    real = rl.Trainer._compute_loss

    def spy(self: rl.Trainer, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        loss = real(self, model, inputs)
        found.append((gradients(model, loss), by_hand(model, inputs)))
        return loss

    def by_hand(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        total = torch.zeros(())
        for i, advantage in enumerate(inputs["advantages"]):
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
            completion = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()]
            logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
            logps = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
            total = total - advantage * logps[torch.arange(len(completion)), completion].sum()
        return gradients(model, total / len(inputs["advantages"]))

    def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), retain_graph=True), strict=True))

    monkeypatch.setattr(rl.Trainer, "_compute_loss", spy)
    rows_of([*base, *method, "optim.steps=2", f"launch.engine={engine}"])
    assert len(found) == 2
    for measured, expected in found:
        assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
        for name in expected:
            torch.testing.assert_close(measured[name], expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "sampler"),
    [
        (["launch.engine=trl"], "transformers"),
        (["launch.engine=packed"], "packed"),
        (["launch.engine=packed", "launch.sampler=transformers"], "transformers"),
    ],
)
def test_sampler_follows_the_trainer(base: list[str], words: list[str], sampler: str) -> None:
    """The sampler's log-probabilities are the trainer's before the update, at every step."""
    overrides = [*base, *RANK_1, *words]
    rows = rows_of(overrides)[1:]
    assert summary_of(overrides)["sampler"] == sampler
    for row in rows:
        assert row["sampler/kl_nats"] < 1e-8
        assert abs(row["sampler/ratio_max"] - 1) < 1e-3 and abs(row["sampler/ratio_p01"] - 1) < 1e-3


EVIL = """
import time
from experiments.grading import serve

def score(problem, text):
    if problem["task"] == "lcm":
        time.sleep(1e6)
    if problem["task"] == "spell_backward":
        raise RuntimeError("no")
    print("x" * 10_000_000)
    return 1.0

serve(lambda: score)
"""


def test_run_goes_on_though_its_grader_fails(base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that hangs, one that raises and one that floods: counted, left out of the rewards, never a 0."""
    script = tmp_path / "evil.py"
    script.write_text(EVIL)
    monkeypatch.setenv("PYTHONPATH", str(Path(rl.__file__).parents[1]))
    monkeypatch.setattr(rl, "GraderProcess", partial(rl.GraderProcess, command=[sys.executable, str(script)]))
    overrides = [*base, *FULL, "optim.steps=1", "data.num_test=3", "rl.eval_samples=1", "rl.grade_limit_s=0.2",
                 "optim.batch_size=12", "rl.group_size=2"]  # fmt: skip
    first, last = rows_of(overrides)
    assert last["grader/timeout"] > 0 and last["grader/crash"] > 0
    assert last["grader/timeout"] + last["grader/crash"] < 24
    assert last["train/reward"] == 1.0 and last["train/bits"] == 0.0  # of those that were graded
    assert first["test/num_ungraded"] > 0


def test_broken_objective_is_refused_unless_named(base: list[str]) -> None:
    off = ["rl.off_objective=[top_p,updates_per_batch]", "rl.top_p=0.5", "rl.updates_per_batch=2", "optim.steps=4"]
    rows = rows_of([*base, *FULL, *off])
    assert rows[1]["sampler/ratio_p50"] < 1  # the sampler's tokens were likelier than the learner's: no silent bias
    assert "train/reward" in rows[1] and "train/reward" not in rows[2]  # one batch, two updates
    assert abs(rows[2]["sampler/ratio_p50"] - rows[1]["sampler/ratio_p50"]) > 0


def test_collapsed_run_is_a_result(base: list[str]) -> None:
    config, launch = parse([*base, "method=full", "optim.lr=0.1", "optim.steps=3"])
    summary = execute(config, launch)
    assert summary["outcome"] == "diverged" and summary["step"] == 3
    assert summary["metrics"]["test/reward"] < 0.5 * summary["metrics"]["test/reward_base"]


@pytest.mark.parametrize("method", [FULL, RANK_1])
def test_engines_make_the_same_run(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: list[str]
) -> None:
    """The same tokens drawn and the same rewards, numbers up to rounding; each says what made it."""
    calls: list[int] = []
    real = policy.completion_logps
    monkeypatch.setattr(policy, "completion_logps", lambda *a: (calls.append(1), real(*a))[1])
    single, packed = (
        rows_of([*base, *method, f"launch.engine={engine}", f"launch.root={tmp_path / engine}"])
        for engine in ("trl", "packed")
    )
    assert len(calls) == 6  # the steps of one of the two
    assert [row.keys() for row in packed] == [row.keys() for row in single]
    for found, wanted in zip(packed, single, strict=True):
        for key in ("train/num_tokens", "train/reward", "test/reward", "test/accuracy_greedy", "test/length"):
            assert found.get(key) == wanted.get(key), key
        assert found.get("train/entropy_nats", 0.0) == pytest.approx(wanted.get("train/entropy_nats", 0.0), abs=1e-4)
    name = run_id(parse([*base, *method])[0])
    for engine in ("trl", "packed"):
        assert store.read_json(tmp_path / engine / name / "provenance.json")["engine"]["name"] == engine


def test_engine_may_change_between_the_parts_of_a_run(base: list[str]) -> None:
    """Checkpoints are TRL's with either."""
    with pytest.raises(Interrupted, match="step 3"):
        rows_of([*base, *RANK_1, "launch.engine=packed"], stop_at(3))
    steps: list[int] = []
    rows_of([*base, *RANK_1, "launch.engine=trl"], Progress(on_step=lambda step, _n, _v: steps.append(step)))
    assert steps == [4, 5, 6]


def test_worker_makes_runs_that_came_together_one_after_the_other(base: list[str], tmp_path: Path) -> None:
    """Each as if it had come alone."""
    pairs = [parse([*base, *method, "optim.steps=2"]) for method in (RANK_1, [*RANK_1, "optim.lr=2e-3"])]
    job = {"launch": encode(pairs[0][1]), "configs": [encode(config) for config, _ in pairs]}
    events: list[dict[str, Any]] = []
    worker.serve(job, lambda **event: events.append(event), lambda: False)
    names = [run_id(config) for config, _ in pairs]
    expected = [(kind, name) for name in names for kind in ("started", "step", "step", "finished")]
    assert [(event["kind"], event["run"]) for event in events] == expected
    alone = rows_of([*base, *RANK_1, "optim.steps=2", f"launch.root={tmp_path / 'b'}"])
    assert store.read_metrics(tmp_path / "a" / names[0])[0] == alone
